"""A sampler spread over rollout workers, for what a source writes ahead (the seed bank of a relay): it blocks, the schedule's work goes on."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from nearpolicy.errors import EngineError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Rollout
from nearpolicy.schedule.workers import Died, Event, Finished, Job, Workers


class SharedWorkers:
    """Implements `Workers` on others, for a schedule and a `PooledSampler` at once: events of the schedule's jobs wait for its own `poll`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._events: deque[Event] = deque()
        self.version = -1
        """Last published; -1 before the first."""

    @property
    def count(self) -> int:
        """Workers."""
        return self._workers.count

    def free(self, worker: int) -> int:
        """Groups that this worker can take now."""
        return self._workers.free(worker)

    def submit(self, worker: int, jobs: Sequence[Job]) -> None:
        """Have these groups written."""
        self._workers.submit(worker, jobs)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give every worker these weights."""
        self._workers.publish(weights, version)
        self.version = version

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened to the schedule's jobs since the last call."""
        if not self._events:
            return self._workers.poll(timeout_s)
        out = list(self._events)
        self._events.clear()
        return out

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def poll_for(self, tickets: Mapping[int, Job], timeout_s: float) -> tuple[list[Finished], list[int]]:
        """(groups complete, tickets lost with their worker) among these tickets; everything else is kept for `poll`."""
        done: list[Finished] = []
        lost: list[int] = []
        for event in self._workers.poll(timeout_s):
            if isinstance(event, Finished):
                (done if event.ticket in tickets else self._events).append(event)
                continue
            lost += [t for t in event.tickets if t in tickets]
            if others := [t for t in event.tickets if t not in tickets]:
                self._events.append(Died(worker=event.worker, tickets=others, reason=event.reason))
        return done, lost


class PooledSampler:
    """Implements `Sampler` over workers. Its tickets must not be in flight for anybody else.

    Args:
        wait_s: longest time without a group from any worker.
    """

    def __init__(self, workers: SharedWorkers, *, wait_s: float) -> None:
        self.workers, self.wait_s = workers, wait_s

    @property
    def version(self) -> int:
        """Version of the loaded weights."""
        return self.workers.version

    @version.setter
    def version(self, version: int) -> None:
        raise AttributeError("a published version is set by load()")

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Publish to every worker."""
        self.workers.publish(weights, version)

    def sample(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Rollout]:
        """n rollouts a request, flat, in request order: equal shares to the workers, as they have room. A group whose worker died is written
        again with fresh noise.

        Raises:
            EngineError: nothing came for `wait_s`, or what a worker raised.
        """
        waiting = deque(Job(request=request, n=n, params=params) for request in requests)
        flying: dict[int, Job] = {}
        out: dict[int, Sequence[Rollout]] = {}
        since = time.monotonic()
        while len(out) < len(requests):
            self._hand_out(waiting, flying)
            done, lost = self.workers.poll_for(flying, min(self.wait_s, 1.0))
            for event in done:
                del flying[event.ticket]
                out[event.ticket] = event.rollouts
            for ticket in lost:
                job = flying.pop(ticket)
                waiting.append(replace(job, request=replace(job.request, attempt=job.request.attempt + 1)))
            if done or lost:
                since = time.monotonic()
            elif (silent := time.monotonic() - since) > self.wait_s:
                some = ", ".join(str(t) for t in list(flying)[:4])
                raise EngineError(
                    "rollout workers", got=f"nothing for {silent:.0f} s while {len(flying)} groups were written ahead (tickets {some} ...)",
                    expected=f"a group within schedule.wait_s = {self.wait_s:g} s", do="Look at the workers, or raise schedule.wait_s.",
                )  # fmt: skip
        return [rollout for request in requests for rollout in out[request.ticket]]

    def _hand_out(self, waiting: deque[Job], flying: dict[int, Job]) -> None:
        for worker, size in enumerate(shares(len(waiting), [self.workers.free(w) for w in range(self.workers.count)])):
            jobs = [waiting.popleft() for _ in range(size)]
            if jobs:
                flying |= {job.request.ticket: job for job in jobs}
                self.workers.submit(worker, jobs)


def shares(count: int, free: Sequence[int]) -> list[int]:
    """How many of `count` groups each worker gets: as equal as its room allows, the first ones in front."""
    given = [0] * len(free)
    for _ in range(min(count, sum(free))):
        worker = max(range(len(free)), key=lambda w: (given[w] < free[w], -given[w], -w))
        given[worker] += 1
    return given
