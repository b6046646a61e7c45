"""Run the benches and write bench/RESULTS.md and bench/results.json: `python -m bench.run [--quick] [--only NAME]...`.

Each section is written as soon as it is measured, so that sections can be run on different days; RESULTS.md is made anew from results.json
every time. `--quick` asks whether everything runs: few repetitions, printed only, unless --write is given.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import asynchronous, ledger, relay, sampling, teacher, train, update
from bench.common import OURS, ROOT, Range, bound_verdict, environment, last_words, machine, table

RESULTS, DATA = ROOT / "bench" / "RESULTS.md", ROOT / "bench" / "results.json"


def logprob(*, quick: bool, pairs: int | None, model: str | None, device: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The chunked log-prob and entropy against the plain path, by the children of `bench/logprob.py`. On the CPU only."""
    _cpu_only(device)
    size = ("--tokens=512", "--hidden=256", "--vocab=32768") if quick else ("--tokens=2048", "--hidden=1024", "--vocab=151936")
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "chunked": []}
    for pair in range(pairs or (1 if quick else 3)):
        for name, own in runs.items():
            command = [str(OURS), str(ROOT / "bench" / "logprob.py"), "--child", name, "--repeat=1", *size]
            done = subprocess.run(command, cwd=ROOT, env=environment(2), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(last_words(done.stderr))
            own.append(json.loads(done.stdout.splitlines()[-1]))
            say(f"pair {pair + 1} {name}: {own[-1]['time_s']:.2f} s, peak {own[-1]['peak_mb']:.0f} MB")
    code = f"from bench.logprob import gradient_error; print(gradient_error({', '.join(s.partition('=')[2] for s in size)}))"
    done = subprocess.run([str(OURS), "-c", code], cwd=ROOT, env=environment(2), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(last_words(done.stderr))
    return {"size": size, "runs": runs, "gradient_error": float(done.stdout.split()[-1])}


def cpu_update(*, device: str, **rest: Any) -> dict[str, Any]:
    """`update.measure`: its counters are the CPU's."""
    _cpu_only(device)
    return update.measure(**rest)


def _cpu_only(device: str) -> None:
    if device != "cpu":
        raise RuntimeError("this section measures the CPU")


def render_logprob(result: Mapping[str, Any]) -> str:
    """Markdown."""
    runs, error = result["runs"], result["gradient_error"]
    rows = [
        (name, Range.of([r["time_s"] for r in own]).text("{:.2f}"), Range.of([r["peak_mb"] for r in own]).text("{:.0f}"), len(own))
        for name, own in runs.items()
    ]
    times = [c["time_s"] / p["time_s"] for p, c in zip(runs["plain"], runs["chunked"], strict=True)]
    peaks = [c["peak_mb"] / p["peak_mb"] for p, c in zip(runs["plain"], runs["chunked"], strict=True)]
    lines = [
        f"{' '.join(result['size'])}; peak above the inputs and the weight gradient, forward and backward.",
        "", table(("path", "seconds, median (min-max)", "peak MB", "runs"), rows), "",
        f"- time {Range.of(times).text('{:.2f}')}x of plain; target at most 1.15: **{bound_verdict(times, at_most=1.15)}**",
        f"- peak {Range.of(peaks).text('{:.3f}')}x of plain; target at most 0.1: **{bound_verdict(peaks, at_most=0.1)}**",
        f"- gradient error {error:.1e} relative; target 1e-5: **{bound_verdict([error], at_most=1e-5)}**",
    ]  # fmt: skip
    return "\n".join(lines)


SECTIONS: dict[str, tuple[str, Callable[..., dict[str, Any]], Callable[[Any], str]]] = {
    "train-tiny": ("Training, tiny default, against TRL", lambda **k: train.measure("tiny", **k), train.render),
    "train-smollm2": ("Training, SmolLM2-135M `products`, against TRL", lambda **k: train.measure("smollm2", **k), train.render),
    "sampling": ("Sampling, against transformers generate and vLLM", sampling.measure, sampling.render),
    "update": ("The update", cpu_update, update.render),
    "relay": ("Sampling relayed responses", relay.measure, relay.render),
    "teacher": ("A teacher beside the student", teacher.measure, teacher.render),
    "logprob": ("Log-probs and entropy of a large vocabulary", logprob, render_logprob),
    "async": ("Asynchronous training", asynchronous.measure, asynchronous.render),
    "ledger": ("The ledger of asynchronous training", ledger.measure, ledger.render),
}


def write(data: Mapping[str, Any]) -> str:
    """RESULTS.md from everything measured so far."""
    text = [
        "# Measured speed and memory", "",
        "Written by `python -m bench.run`; do not edit. Medians with min-max in brackets. A verdict is *inconclusive* when the range of the "
        "pairs reaches across the target. Ratios compare runs of one session on one machine; absolute numbers are that machine's.", "",
    ]  # fmt: skip
    for name, (title, _, render) in SECTIONS.items():
        if name not in data:
            text += [f"## {title}", "", f"Not measured yet (`python -m bench.run --only {name}`).", ""]
            continue
        entry, m = data[name], data[name]["machine"]
        own = ", ".join(f"{k} {v}" for k, v in m["versions"]["nearpolicy"].items())
        peers = "; ".join(f"{side} environment: " + ", ".join(f"{k} {v}" for k, v in got.items())
                          for side, got in m["versions"].items() if side != "nearpolicy" and got)  # fmt: skip
        text += [
            f"## {title}", "", f"`{entry['command']}` on {entry['date']}, {entry['minutes']:.0f} minutes. {m['cpu']}, {m['cores']} cores "
            f"({m['vector units']}), {m['memory_gb']} GB, load before {m['load_before']}; "
            f"Python {m['python']}, {own}{'; ' + peers if peers else ''}.", "",
            render(entry["result"]), "",
        ]  # fmt: skip
    return "\n".join(text).rstrip() + "\n"


def main() -> int:
    """Measure the chosen sections in order; exit 1 when one could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="a section; may be given several times")
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--write", action="store_true", help="write also with --quick")
    parser.add_argument("--pairs", type=int, help="pairs (or repetitions) of each comparison")
    parser.add_argument("--model", help="another model folder, for one section")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (training and sampling)")
    parser.add_argument("--render", action="store_true", help="only write RESULTS.md again from results.json")
    args = parser.parse_args()
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    failed = []
    for name in () if args.render else args.only or list(SECTIONS):
        title, measure, render = SECTIONS[name]
        print(f"== {title}", flush=True)
        facts, start = machine(), time.perf_counter()
        if facts["load_before"] > 0.5:
            print(f"warning: load {facts['load_before']} before the first run: others use this machine, and ranges will be wide", flush=True)
        try:
            result = measure(quick=args.quick, pairs=args.pairs, model=args.model, device=args.device, say=lambda text: print(text, flush=True))
        except RuntimeError as error:
            print(f"error: {name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        print(render(result), flush=True)
        words = [f"--only {name}", *(["--quick"] if args.quick else []), *([f"--pairs {args.pairs}"] if args.pairs else []),
                 *([f"--device {args.device}"] if args.device != "cpu" else [])]  # fmt: skip
        data[name] = {
            "command": "python -m bench.run " + " ".join(words), "date": time.strftime("%Y-%m-%d"), "minutes": (time.perf_counter() - start) / 60,
            "machine": facts, "result": result,
        }  # fmt: skip
        if not args.quick or args.write:
            _save(DATA, json.dumps(data, indent=1) + "\n")
            _save(RESULTS, write(data))
    if args.render:
        _save(RESULTS, write(data))
    return 1 if failed else 0


def _save(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
