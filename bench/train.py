"""Samples per second of training, nearpolicy against TRL's GRPOTrainer: same model, prompts, batch, lengths, reward function and CPU threads.

Each run is a fresh process in its side's own environment. The first rollout batch warms up; the clock runs from the end of its last update to the
end of the last update of all (generation, scoring, log-probs, updates, and whatever each side does between them; start-up is left out). Runs of the
two sides take turns; a pair is two runs next to each other.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import OURS, TRL, BenchError, Range, ratio_verdict, run_child, table
from nearpolicy.policy.loading import fast_bfloat16

_COMMON = {"device": "cpu", "group": 8}
CASES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "recipe": ["tiny"], "model": "tiny", "task": {}, "prompts": 64, "max_tokens": 56, "updates_per_rollout": 16, "batches": 3,
        "lr": 3e-4, "losses": ("vespo", "grpo"), "threads": (2,), "dtypes": (("float32", "float32"),), "target": 2.5, "pairs": 7,
    },
    "smollm2": {
        **_COMMON, "recipe": ["tiny"], "model": "smollm2", "prompts": 8, "max_tokens": 16, "updates_per_rollout": 1, "batches": 2, "lr": 2e-5,
        "task": {
            "kind": '"reasoning_gym"', "name": '"products"', "verifier": '"number"',
            "options": "{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}",
        },
        "losses": ("vespo",), "threads": (2,), "target": 3.0, "pairs": 3,
        "dtypes": (("float32", "float32"), ("bfloat16", "autocast"), (None, "bfloat16")),
    },
}  # fmt: skip
"""Settings of each case, for both sides. `dtypes` are pairs (ours, TRL's) of which each side's best is compared; `autocast` keeps float32 weights."""

Say = Callable[[str], None]


def measure(
    name: str, *, quick: bool = False, pairs: int | None = None, model: str | None = None, device: str = "cpu", say: Say = print
) -> dict[str, Any]:
    """All settings of one case.

    Half precision is left out on a CPU without bfloat16 matrix products, where it is several times slower than float32.

    Args:
        quick: one pair of one rollout batch, with one loss and one thread count: does it run, not how fast.
        model: another model folder.
    """
    case = {**CASES[name], "device": device, **({"model": model} if model else {})}
    if quick:
        case |= {"losses": case["losses"][:1], "threads": case["threads"][:1], "batches": 1, "pairs": 1}
    case["pairs"] = pairs or case["pairs"]
    if device == "cpu" and not fast_bfloat16(torch.device("cpu")):
        case["dtypes"] = case["dtypes"][:1]
    with tempfile.TemporaryDirectory() as folder:
        prompts = str(Path(folder) / "prompts.jsonl")
        first = {**case, "prompts_file": prompts, "loss": "vespo", "dtype": "float32"}
        told = run_child("train_ours", {**first, "prepare": True}, threads=1)
        case |= {"prompts_file": prompts, "model": told["folder"], "reward": told["reward"], "reward_options": told["reward_options"]}
        blocks = [_compare(name, case, loss, threads, say) for loss in case["losses"] for threads in case["threads"]]
    kept = ("prompts", "group", "max_tokens", "updates_per_rollout", "batches", "lr", "target", "pairs")
    return {"case": name, "settings": {k: case[k] for k in kept}, "blocks": blocks, "best": _best(blocks, case["target"])}


def _compare(name: str, case: dict[str, Any], loss: str, threads: int, say: Say) -> dict[str, Any]:
    """Runs that take turns, of every dtype of each side first and of the faster ones after that."""
    runs: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    took: dict[str, float] = {}

    def go(side: str, dtype: str | None) -> None:
        label = f"{side} {dtype}"
        if dtype is None or label in failed:
            return
        module, python = ("train_ours", OURS) if side == "nearpolicy" else ("train_trl", TRL)
        # Half precision can be slower than float32 by any factor where the processor lacks it: enough is known at four times the first run.
        limit = max(60.0, 4 * took[side]) if side in took else 7200.0
        start = time.perf_counter()
        try:
            got = run_child(module, {**case, "loss": loss, "dtype": dtype}, python=python, threads=threads, timeout=limit)
        except BenchError as error:
            failed[label] = str(error)
            say(f"{name} {loss} {threads} threads  {label}: {error}")
            return
        took.setdefault(side, time.perf_counter() - start)
        got["rate"] = got["samples"] / got["seconds"]
        runs.setdefault(label, []).append(got)
        figures = f"{got['rate']:.1f} samples/s, {got['cpu_seconds']:.1f} processor s, peak {got['peak_mb']:.0f} MB"
        say(f"{name} {loss} {threads} threads  {label}: {figures}")

    for ours, theirs in case["dtypes"]:
        go("nearpolicy", ours)
        go("TRL", theirs)
    best = {side: _fastest(runs, side) for side in ("nearpolicy", "TRL")}
    for _ in range(case["pairs"] - 1):
        for side, label in best.items():
            if label is not None:
                go(side, label.removeprefix(f"{side} "))
    out: dict[str, Any] = {"loss": loss, "threads": threads, "runs": runs, "failed": failed, "best": best}
    if best["nearpolicy"] and best["TRL"]:
        rates = [[r["rate"] for r in runs[label]] for label in (best["nearpolicy"], best["TRL"])]
        out["verdict"] = ratio_verdict(*rates, case["target"])
    return out


def _fastest(runs: dict[str, list[dict[str, Any]]], side: str) -> str | None:
    own = {label: got[0]["rate"] for label, got in runs.items() if label.startswith(side)}
    return max(own, key=own.__getitem__) if own else None


def _best(blocks: list[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """For each loss: our own default against the better of TRL's thread counts. Ours is the faster of its thread counts too."""
    out = []
    for loss in dict.fromkeys(b["loss"] for b in blocks):
        sides = {}
        for side in ("nearpolicy", "TRL"):
            found = [
                (b["threads"], b["best"][side], [r["rate"] for r in b["runs"][b["best"][side]]])
                for b in blocks
                if b["loss"] == loss and b["best"][side]
            ]
            if found:
                sides[side] = max(found, key=lambda f: sorted(f[2])[len(f[2]) // 2])
        if len(sides) == 2:
            verdict = ratio_verdict(sides["nearpolicy"][2], sides["TRL"][2], target)
            out.append({"loss": loss, **{side: f"{label.split()[1]}, {threads} threads" for side, (threads, label, _) in sides.items()}, **verdict})
    return out


def render(result: dict[str, Any]) -> str:
    """Markdown of one case."""
    s = result["settings"]
    head = ("loss", "threads", "side and dtype", "samples/s, median (min-max)", "runs", "processor ms/sample", "peak MB", "response length",
            "share of the step")  # fmt: skip
    rows = []
    for b in result["blocks"]:
        for label, runs in b["runs"].items():
            rate, peak = Range.of([r["rate"] for r in runs]), Range.of([r["device_mb"] or r["peak_mb"] for r in runs])
            shares = {k: sum(r["shares"][k] for r in runs) / len(runs) for k in runs[0]["shares"]}
            parts = ", ".join(f"{k} {v:.0%}" for k, v in shares.items() if v >= 0.005)
            length = sum(r["response_length"] for r in runs) / len(runs)
            cpu = Range.of([1000 * r["cpu_seconds"] / r["samples"] for r in runs]).text("{:.3g}")
            rows.append((b["loss"], b["threads"], label, rate.text("{:.3g}"), rate.count, cpu, f"{peak.median:.0f}", f"{length:.1f}", parts))
        rows += [(b["loss"], b["threads"], label, f"failed: {why}", 0, "", "", "", "") for label, why in b["failed"].items()]
    text = [
        f"{s['prompts']} prompts x {s['group']} responses of at most {s['max_tokens']} tokens a rollout batch, {s['updates_per_rollout']} updates of "
        f"{s['prompts'] * s['group'] // s['updates_per_rollout']} samples from it; {s['batches']} rollout batches measured after one of warm-up. "
        f"{s['pairs']} interleaved pairs. Peak memory is that of the training process (our reward worker is another, small process), on a GPU "
        "that of the device.",
        "", table(head, rows), "",
    ]  # fmt: skip
    for b in result["blocks"]:
        if "verdict" in b:
            text.append("- " + _line(f"{b['loss']}, {b['threads']} threads on both sides", b["verdict"]))
    for v in result["best"]:
        text.append("- **" + _line(f"{v['loss']}, each side in its better setting (ours {v['nearpolicy']}; TRL {v['TRL']})", v) + "**")
    return "\n".join(text)


def _line(what: str, v: dict[str, Any]) -> str:
    return f"{what}: {v['ratio']:.2f}x TRL (pairs {v['low']:.2f}-{v['high']:.2f}); target {v['target']:g}x: {v['verdict']}"
