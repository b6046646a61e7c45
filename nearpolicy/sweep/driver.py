"""Runs a plan in worker processes: one run at a time in each, a new worker in place of one that died, a checkpoint on Ctrl-C.

<out>/plan.json         names and configuration hashes of the runs: what makes it this experiment's directory
<out>/timing.json       seconds of the runs and of the sweep, one entry each time it was started
<out>/warm_starts/NAME  models made before the runs
<out>/runs/NAME         run directories
<out>/logs/NAME.log     what each run printed
"""

import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nearpolicy.errors import EngineError, NearPolicyError, UsageError
from nearpolicy.layers import to_tree
from nearpolicy.sweep.board import Board, last_line
from nearpolicy.sweep.experiment import Plan, PlannedRun, WarmStart
from nearpolicy.trainer.rundir import write_atomic

_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_POLL_S = 0.25
_MOST_STARTS = 3
"""Workers in a row that die before they are ready."""


class SweepStopped(NearPolicyError):
    """Ctrl-C or SIGTERM: the running runs wrote checkpoints."""

    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the wall time of one start of a sweep went, in seconds."""

    jobs: int
    wall: float
    """From the first worker's start to the last job's end."""
    own: float
    """Sum over the jobs of the time inside training (of runs and of warm starts)."""
    starting: float
    """Sum over the workers of the time until they were ready."""
    runs: int
    """Jobs ended."""

    @property
    def overhead(self) -> float:
        """(jobs x wall - own) / own: starting workers, handing out jobs, and workers with nothing left to do at the end. NaN without jobs."""
        return (self.jobs * self.wall - self.own) / self.own if self.own else float("nan")


@dataclass(slots=True)
class _Worker:
    """One process and the job it has."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float
    ready: bool = False
    job: dict[str, Any] | None = None
    job_began: float = 0.0
    pending: bytes = b""

    def give(self, job: dict[str, Any]) -> None:
        """Hand it a job; a worker that died meanwhile is noticed when its answers end."""
        assert self.process.stdin is not None
        self.job, self.job_began = job, time.monotonic()
        try:
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def sweep_directory(out: Path, plan: Plan, *, resume: bool) -> Iterator[Path]:
    """Make `out`, or open it to go on; nobody else drives a sweep in it meanwhile.

    Raises:
        UsageError: it holds something and `resume` is off; it is another experiment's; another process is at work in it.
    """
    record = out / "plan.json"
    known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    filled = out.exists() and (not out.is_dir() or any(p.name != ".lock" for p in out.iterdir()))
    if filled and known is None:
        raise UsageError(f"--out {out}", got="it exists and is no sweep's directory", expected="a new directory", do="Choose another --out.")
    hashes = {r.name: r.config_hash for r in plan.runs}
    if known is not None:
        foreign = [n for n, digest in known["runs"].items() if hashes.get(n) != digest]
        if known["name"] != plan.name or foreign:
            got = f"the sweep {known['name']!r}" + (f" with the run {foreign[0]}, which is not in this experiment as it was" if foreign else "")
            raise UsageError(f"--out {out}", got=got, expected=f"the directory of {plan.name!r}", do="Choose another --out.")
        if not resume:
            raise UsageError(f"--out {out}", got="this sweep's directory, begun before", expected="a new directory",
                             do="Go on with --resume, or choose another --out.")  # fmt: skip
    for folder in ("runs", "logs", "warm_starts"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--out {out}", got="another sweep at work in it", expected="one at a time", do="Wait for it or stop it.") from None
        write_atomic(record, json.dumps({"name": plan.name, "runs": hashes}, indent=1))
        yield out


def is_finished(out: Path) -> bool:
    """Whether a run directory says that its run has ended well."""
    try:
        return bool(json.loads((out / "status.json").read_text(encoding="utf-8"))["status"] == "finished")
    except (OSError, ValueError, KeyError):
        return False


@dataclass(slots=True, kw_only=True)
class Driver:
    """Hands the runs of a plan to worker processes."""

    plan: Plan
    out: Path
    jobs: int
    board: Board
    command: tuple[str, ...] = (sys.executable, "-m", "nearpolicy.sweep.worker")
    """Starts a worker."""
    waiting: deque[dict[str, Any]] = field(default_factory=deque)
    made: set[str] = field(default_factory=set)
    """Warm starts that are there."""
    workers: list[_Worker] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    own: float = 0.0
    starting: float = 0.0
    ended: int = 0
    _signals: int = 0
    _bad_starts: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> Timing:
        """All runs that are not finished, warm starts first.

        Raises:
            SweepStopped: after a signal, when every running run has written its checkpoint.
            UsageError: a warm start outside its gate.
            EngineError: workers that cannot start.
        """
        began = time.monotonic()
        before = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._queue()
            while (self.waiting and not self._signals) or any(w.job for w in self.workers):
                self._hand_out()
                for key, _ in self._selector.select(_POLL_S):
                    self._hear(key.data)
                self.board.refresh({w.job["name"]: (w.job_began, Path(w.job["log"])) for w in self.workers if w.job})
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signals:
            left = len(self.waiting)
            raise SweepStopped("sweep", got="a signal", expected="to run on", do=f"Running runs wrote checkpoints, {left} wait: go on with --resume.")
        return Timing(jobs=self.jobs, wall=time.monotonic() - began, own=self.own, starting=self.starting, runs=self.ended)

    def _queue(self) -> None:
        needed = []
        seeds = list(dict.fromkeys((r.seed, r.group) for r in self.plan.runs))
        # Seed by seed: a sweep that is stopped early has whole rows, and a warm start is made while other seeds run.
        for run in sorted(self.plan.runs, key=lambda r: seeds.index((r.seed, r.group))):
            folder = self.out / "runs" / run.name
            if is_finished(folder):
                if not self.plan.experiment.keep_checkpoints:
                    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                continue
            self.waiting.append(self._run_job(run))
            needed.append(self.plan.warm_start(run))
        for warm in self.plan.experiment.warm_start:
            if warm.name not in needed:
                continue
            if (self.out / "warm_starts" / warm.name / "sft.json").exists():
                self._admit(warm)
            else:
                self.waiting.appendleft(self._sft_job(warm))

    def _run_job(self, run: PlannedRun) -> dict[str, Any]:
        tree, warm = to_tree(run.config), self.plan.warm_start(run)
        if warm is not None:
            tree["model"]["path"] = str(self.out / "warm_starts" / warm)
        return {"kind": "run", "name": run.name, "needs": warm, "out": str(self.out / "runs" / run.name), "config": tree,
                "log": str(self.out / "logs" / f"{run.name}.log"), "metric": self.plan.experiment.compare.metric,
                "keep_checkpoints": self.plan.experiment.keep_checkpoints}  # fmt: skip

    def _sft_job(self, warm: WarmStart) -> dict[str, Any]:
        options = {"from_scratch": warm.from_scratch, "steps": warm.steps, "lr": warm.lr, "batch_size": warm.batch_size}
        return {"kind": "sft", "name": f"warm start {warm.name}", "needs": None, "out": str(self.out / "warm_starts" / warm.name), "warm": warm.name,
                "log": str(self.out / "logs" / f"warm-start-{warm.name}.log"), "config": to_tree(self.plan.warm_configs[warm.name]),
                "options": options}  # fmt: skip

    def _admit(self, warm: WarmStart) -> None:
        """Check the gate of a warm start that is there."""
        record = json.loads((self.out / "warm_starts" / warm.name / "sft.json").read_text(encoding="utf-8"))
        score = record["evaluation"].get("pass@1")
        if warm.gate is not None and (score is None or not warm.gate[0] <= score <= warm.gate[1]):
            raise UsageError(f"warm start {warm.name!r}", got=f"held-out pass@1 {score}", expected=f"between {warm.gate[0]:g} and {warm.gate[1]:g}",
                             do="Take another seed or other steps for it, or widen its gate.")  # fmt: skip
        self.made.add(warm.name)

    def _stop(self, _number: int, _frame: object) -> None:
        """The first signal lets every run write a checkpoint after its update; the second stops them at once."""
        self._signals += 1
        for worker in self.workers:
            if worker.job:
                worker.process.send_signal(signal.SIGTERM)

    def _next_job(self) -> dict[str, Any] | None:
        """The first job whose warm start is there."""
        for job in self.waiting:
            if job["needs"] is None or job["needs"] in self.made:
                self.waiting.remove(job)
                return job
        return None

    def _hand_out(self) -> None:
        while not self._signals and len(self.workers) < min(self.jobs, len(self.waiting) + sum(bool(w.job) for w in self.workers)):
            self._start()
        for worker in self.workers:
            if worker.ready and worker.job is None and not self._signals and (job := self._next_job()) is not None:
                worker.give(job)

    def _start(self) -> None:
        log = self.out / "logs" / f"worker-{len(self.workers)}.log"
        with log.open("ab") as errors:
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True, env={**os.environ, **_THREADS},
            )  # fmt: skip
        worker = _Worker(process, log, time.monotonic())
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self.workers.append(worker)

    def _hear(self, worker: _Worker) -> None:
        stream: IO[bytes] | None = worker.process.stdout
        assert stream is not None
        data = stream.read()
        if data is None:
            return
        if not data:
            self._bury(worker)
            return
        *lines, worker.pending = (worker.pending + data).split(b"\n")
        for line in lines:
            self._answered(worker, json.loads(line))

    def _answered(self, worker: _Worker, answer: dict[str, Any]) -> None:
        if answer["status"] == "ready":
            worker.ready, self._bad_starts = True, 0
            self.starting += time.monotonic() - worker.began
            return
        job, worker.job = worker.job, None
        if job is not None:
            self._ended(job, answer)

    def _ended(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        self.own += answer["seconds"]
        self.ended += 1
        if job["kind"] == "sft":
            self.board.say(f"{job['name']}: {answer['status']} {answer['message']}".rstrip() + f", {answer['seconds']:.0f} s")
            if answer["status"] == "finished":
                self._admit(next(w for w in self.plan.experiment.warm_start if w.name == job["warm"]))
            elif answer["status"] == "failed":
                raise EngineError(job["name"], got=answer["message"], expected="a model", do=f"See {job['log']}.")
            return
        if answer["status"] == "failed":
            self.failures[job["name"]] = answer["message"]
        self.board.ended(job["name"], answer["status"], answer["seconds"], answer.get("score"), answer["message"])

    def _bury(self, worker: _Worker) -> None:
        """A worker is gone: its run failed, and another takes its place when there is work."""
        assert worker.process.stdout is not None
        self._selector.unregister(worker.process.stdout)
        self.workers.remove(worker)
        code = worker.process.wait()
        worker.process.stdout.close()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if worker.job is not None:
            status = "interrupted" if self._signals else "failed"
            message = f"its process died ({how}); last words: {last_line(Path(worker.job['log'])) or 'none'}"
            self._ended(worker.job, {"status": status, "message": message, "seconds": time.monotonic() - worker.job_began})
        elif not worker.ready and not self._signals:
            self._bad_starts += 1
            if self._bad_starts >= _MOST_STARTS:
                raise EngineError("worker process", got=f"{how} before it was ready: {last_line(worker.log)}", expected="a process that starts",
                                  do=f"See {worker.log}.")  # fmt: skip

    def _close(self) -> None:
        """Let idle workers go; those still at a job (the sweep was given up) get a signal and end after their checkpoint."""
        for worker in self.workers:
            if worker.process.stdin is not None:
                worker.process.stdin.close()
            if worker.job or not worker.ready:
                worker.process.send_signal(signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            if worker.process.stdout is not None:
                worker.process.stdout.close()
        self._selector.close()
        self.board.close()
