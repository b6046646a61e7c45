"""Rollout workers in this process: no thread, no clock, so that an asynchronous schedule can be run step by step and bit for bit again."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from torch import Tensor

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.rollout import Rollout
from nearpolicy.sampler.continuation import Flight, InterruptibleSampler
from nearpolicy.schedule.workers import Died, Event, Finished, Job


class LocalWorkers:
    """Implements `Workers`: sampling happens inside `poll`, one worker after the other.

    Args:
        samplers: one a worker. They keep what is published: with work in flight over a publication they must not share the trainer's weights.
        capacity: groups that each worker takes at a time.
        in_flight: `finish` writes responses in flight to their end before a publication; `keep` goes on with them under the new weights.
        slice_steps: decode steps of one `poll`, after which every worker is left with what it has; None writes to the end.
    """

    def __init__(
        self, samplers: Sequence[InterruptibleSampler], *, capacity: int, in_flight: str = "finish", slice_steps: int | None = None
    ) -> None:  # fmt: skip
        if capacity < 1 or not samplers or (slice_steps is not None and slice_steps < 1):
            raise UsageError("LocalWorkers", got=f"{len(samplers)} samplers, capacity {capacity}, slice_steps {slice_steps}",
                             expected="at least one of each", do="Give it a worker with room for a group.")  # fmt: skip
        if in_flight not in ("finish", "keep"):
            raise UsageError("LocalWorkers: in_flight", got=repr(in_flight), expected="finish or keep", do="Choose one of them.")
        self.capacity, self.keep, self.slice_steps = capacity, in_flight == "keep", slice_steps
        self._flights = [Flight(sampler) for sampler in samplers]
        self._began: dict[int, float] = {}
        self._events: deque[Event] = deque()

    @property
    def count(self) -> int:
        """Workers."""
        return len(self._flights)

    def free(self, worker: int) -> int:
        """Groups that this worker can take now."""
        return self.capacity - len(self._flights[worker].tickets)

    def submit(self, worker: int, jobs: Sequence[Job]) -> None:
        """Have these groups written; groups that ask for the same are decoded together.

        Raises:
            ValueError: more than `free`.
        """
        if len(jobs) > self.free(worker):
            raise ValueError(f"worker {worker}: {len(jobs)} groups for {self.free(worker)} places")
        for (n, params), some in groupby(jobs, key=lambda job: (job.n, job.params)):
            self._flights[worker].add([job.request for job in some], n, params)
        self._began |= dict.fromkeys((job.request.ticket for job in jobs), time.perf_counter())

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give every worker these weights; with `finish`, what is in flight is written to its end first.

        Raises:
            EngineError: a sampler that holds another version afterwards.
        """
        for worker, flight in enumerate(self._flights):
            if not self.keep and flight.tickets:
                self._finished(worker, flight.run())
            flight.sampler.load(weights, version)
            if flight.sampler.version != version:
                raise EngineError(f"worker {worker}", got=f"version {flight.sampler.version} after a publication", expected=str(version),
                                  do="The engine acknowledged weights that it does not hold; mend it.")  # fmt: skip

    def poll(self, timeout_s: float) -> list[Event]:
        """One slice of every worker, and what came of it. Waits only when there is nothing to write."""
        if not self._events:
            for worker, flight in enumerate(self._flights):
                if flight.tickets:
                    self._finished(worker, flight.run(None if self.slice_steps is None else _after(self.slice_steps)))
            if not any(flight.tickets for flight in self._flights) and not self._events:
                time.sleep(min(timeout_s, 0.01))
        out = list(self._events)
        self._events.clear()
        return out

    def kill(self, worker: int, reason: str = "killed") -> None:
        """Lose everything that this worker has in flight, as if it had died; another stands in its place."""
        self._events.append(Died(worker=worker, tickets=tuple(self._flights[worker].drop()), reason=reason))

    def close(self) -> None:
        """Nothing to end."""

    def _finished(self, worker: int, done: Sequence[tuple[int, list[Rollout]]]) -> None:
        now = time.perf_counter()
        for ticket, rollouts in done:
            self._events.append(Finished(worker=worker, ticket=ticket, rollouts=rollouts, seconds=now - self._began.pop(ticket)))


def _after(steps: int) -> Callable[[], bool]:
    """An interrupt before decode step number `steps`, counted from 0."""
    asked = -1

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        return asked >= steps

    return interrupt
