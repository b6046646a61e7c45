"""Reward functions in killable worker processes, with a deadline for each sample.

Whatever a reward function does (hang in C code, exit, crash, fill memory, close its pipes), `RewardPool.score` returns one Score for each
item, in order. Every item has one of four outcomes: score, abstain, timeout, error; only the first carries a reward.

Items travel in chunks; results come back one by one, so that the parent always knows which item a worker is at and since when. A worker
past the deadline gets SIGKILL at once, with everything it started; its current item is a timeout and the rest of its chunk goes back to
the queue.

Own code rather than pebble: that is LGPL, takes 4 s over a worker that ignores SIGTERM, and has an open report of lost tasks. Executors
and `multiprocessing.Pool` end with their first hung worker.
"""

import math
import os
import pickle
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, Self

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.protocols import ScoreItem
from nearpolicy.rollout import Outcome, Score
from nearpolicy.tasks.functions import RewardSpec
from nearpolicy.tasks.process import START_TIMEOUT_S, Worker, await_ready, failure_text

MAX_CHUNK = 64
"""Most items sent to a worker at once."""
MAX_FAILED_STARTS = 3
"""Replacements in a row that fail to start before the remaining items of a call are errors."""
_CHUNKS_PER_WORKER = 4


def _kill_all(workers: list[Worker], owner: int) -> None:
    """Also runs at interpreter exit; a forked child of the owner must leave its workers alone."""
    if os.getpid() == owner:
        for worker in workers:
            worker.kill()
        workers.clear()


class RewardPool:
    """Scores responses with the functions of a spec; implements `protocols.Verifier`.

    `score` may be called from several threads (one runs at a time). The pool is a context manager. Printed output of reward functions is
    dropped. Workers have one thread for numerical libraries and a fixed hash seed unless the environment says otherwise.

    Args:
        spec: the reward functions. Those that do not come with the package are imported in worker processes only.
        workers: worker processes, >= 1.
        deadline_s: seconds that one item may take, all functions together, > 0.
        memory_mb: limit of a worker's data segment in MiB (beyond it the function gets MemoryError); None is no limit.
        start_timeout_s: seconds a worker may take to import the functions. Not charged to any item.
    Raises:
        UsageError: a function cannot be imported (in time) or called, or does not take its options; or a value outside its bounds.
        EngineError: no process can be started.
    """

    def __init__(
        self, spec: RewardSpec, *, workers: int, deadline_s: float, memory_mb: int | None = 4096, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        if workers < 1:
            raise UsageError("Reward pool: workers", got=workers, expected="at least 1", do="Give it a worker.")
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise UsageError("Reward pool: deadline_s", got=deadline_s, expected="seconds above 0", do="Give each sample some time.")
        spec.functions(timeout_s=start_timeout_s)
        self.spec, self.deadline_s = spec, deadline_s
        self.counts: Counter[Outcome] = Counter()
        """Items scored so far, by outcome."""
        self.restarts = 0
        """Workers replaced so far."""
        self._names = [r.name for r in spec.rewards]
        try:
            functions = [(r.name, r.path, r.weight, dict(r.options)) for r in spec.rewards]
            self._setup = pickle.dumps({"functions": functions, "memory_mb": memory_mb})
        except Exception as error:
            raise UsageError("Reward options", got=str(error), expected="values that can be pickled", do="Pass plain values.") from error
        self._cwd, self._start_timeout_s = os.getcwd(), start_timeout_s
        self._lock = threading.RLock()
        self._closed = False
        self._failed_starts, self._failure = 0, ""
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        try:
            for _ in range(workers):
                self._workers.append(Worker(self._setup, self._cwd, start_timeout_s))
            for worker in self._workers:
                await_ready(worker, [r.path for r in spec.rewards], start_timeout_s)
        except OSError as error:
            self.close()
            raise EngineError("Reward worker start", got=error, expected="a new process", do="Lower task.workers.") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; idempotent. Items not scored by then are errors."""
        self._closed = True
        with self._lock:
            self._finalizer()

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score for each item, in order. Never raises for anything a reward function does.

        An interrupt (Ctrl-C) is passed on; the pool stays usable.
        """
        with self._lock:
            results: list[Score | None] = [None] * len(items)
            blobs = [self._pack(k, item, results) for k, item in enumerate(items)]
            pending = deque(k for k, blob in enumerate(blobs) if blob is not None)
            self._failed_starts = 0
            try:
                while not self._closed and (pending or any(w.flight for w in self._workers)):
                    self._hand_out(pending, blobs, results)
                    self._collect(pending, results)
            except BaseException:
                # Half a chunk is still coming from these; the next call must not read it.
                for worker in [w for w in self._workers if w.flight]:
                    self._replace(worker)
                raise
            scores = [s or _failed(Outcome.ERROR, "the reward pool is closed") for s in results]
            self.counts.update(s.outcome for s in scores)
            return scores

    def _pack(self, k: int, item: ScoreItem, results: list[Score | None]) -> bytes | None:
        try:
            return pickle.dumps((item.prompt, item.completion, dict(item.columns)))
        except Exception as error:
            results[k] = _failed(Outcome.ERROR, f"cannot be sent to a worker: {type(error).__name__}: {error}")
            return None

    def _hand_out(self, pending: deque[int], blobs: list[bytes | None], results: list[Score | None]) -> None:
        """Give idle workers chunks: large ones first, single items at the end, so that all workers finish together."""
        if self._failed_starts >= MAX_FAILED_STARTS:
            while pending:
                results[pending.popleft()] = _failed(Outcome.ERROR, f"no worker starts: {self._failure}")
            return
        for worker in list(self._workers):
            if not pending:
                return
            if worker.starting or worker.flight:
                continue
            size = min(MAX_CHUNK, math.ceil(len(pending) / (_CHUNKS_PER_WORKER * len(self._workers))))
            keys = [pending.popleft() for _ in range(size)]
            if worker.process.poll() is not None or not worker.send(keys, blobs, self.deadline_s):
                pending.extendleft(reversed(keys))
                self._replace(worker)

    def _collect(self, pending: deque[int], results: list[Score | None]) -> None:
        """Wait for the next event, take all results that are there, then end what is past its time."""
        waiting = [w for w in self._workers if w.starting or w.flight]
        if not waiting:
            return
        timeout = max(0.0, min(w.due for w in waiting) - time.monotonic())
        ready = wait([w.connection for w in waiting], timeout)
        for worker in waiting:
            if worker.connection in ready:
                self._drain(worker, pending, results)
        now = time.monotonic()
        for worker in waiting:
            if worker.connection.closed or now < worker.due or not (worker.starting or worker.flight) or worker.readable():
                continue
            if worker.starting:
                self._start_failed(worker, f"not ready after {self._start_timeout_s:g} s")
                continue
            results[worker.flight.popleft()] = _failed(Outcome.TIMEOUT, f"no result within {self.deadline_s:g} s")
            self._give_back(worker, pending)

    def _drain(self, worker: Worker, pending: deque[int], results: list[Score | None]) -> None:
        """Take every message that is there. A message that makes no sense counts as the end of the worker."""
        try:
            while worker.readable():
                message = worker.receive()
                if worker.starting:
                    if message[0] != "ready":
                        self._start_failed(worker, failure_text(message[1]))
                        return
                    worker.starting, self._failed_starts = False, 0
                else:
                    score = self._read(message)
                    results[worker.flight.popleft()] = score
                    worker.due = time.monotonic() + self.deadline_s
        except (EOFError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            why = worker.ending() if isinstance(error, EOFError | OSError) else "it wrote to its connection"
            if worker.starting:
                self._start_failed(worker, f"it died while importing the functions ({why})")
                return
            if worker.flight:
                results[worker.flight.popleft()] = _failed(Outcome.ERROR, f"the reward's process died ({why})")
            self._give_back(worker, pending)

    def _read(self, message: Any) -> Score:
        outcome, reward, parts, text = message
        return Score(
            reward=float(reward), outcome=Outcome(outcome), message=str(text),
            parts={name: float(part) for name, part in zip(self._names, parts, strict=False)},
        )  # fmt: skip

    def _give_back(self, worker: Worker, pending: deque[int]) -> None:
        """Queue what the worker had not begun, in front, and replace it."""
        pending.extendleft(reversed(worker.flight))
        worker.flight.clear()
        self._replace(worker)

    def _start_failed(self, worker: Worker, why: str) -> None:
        self._failed_starts += 1
        self._failure = why
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        worker.flight.clear()
        if self._closed:
            return
        self.restarts += 1
        try:
            self._workers[self._workers.index(worker)] = Worker(self._setup, self._cwd, self._start_timeout_s)
        except OSError as error:
            # The dead worker keeps its place; the next hand-out tries again.
            self._failed_starts += 1
            self._failure = str(error)


def _failed(outcome: Outcome, message: str) -> Score:
    return Score(reward=math.nan, outcome=outcome, message=" ".join(message.split()))
