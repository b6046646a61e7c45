"""The seam between the asynchronous schedule and whoever writes responses for it: in this process, or as Ray actors."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One group to write: what a worker is told. Picklable."""

    request: Request
    """Its ticket names the job."""
    n: int
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group is complete."""

    worker: int
    ticket: int
    rollouts: Sequence[Rollout]
    """n of them, samples in order; tokens of a response that was kept over publications carry the version that sampled each."""
    seconds: float
    """From the start of the job to its end, on the worker's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A worker is gone; another stands in its place, which holds the newest published weights."""

    worker: int
    tickets: Sequence[int]
    """Jobs that it had not finished: nothing of them is delivered later."""
    reason: str
    """One line."""


Event = Finished | Died


class Workers(Protocol):
    """Rollout workers, numbered from 0. None of the calls but `poll`, `close` and the first `publish` waits for sampling.

    Whether responses in flight over a publication are finished under the old weights or kept and continued under the new ones is a property of
    the implementation's options; either way a job submitted after `publish(w, v)` is written under v or later, and every token carries the
    version of the weights that gave its log-prob.
    """

    @property
    def count(self) -> int:
        """Workers."""
        ...

    def free(self, worker: int) -> int:
        """Groups that this worker can take now."""
        ...

    def submit(self, worker: int, jobs: Sequence[Job]) -> None:
        """Have these groups written; they are decoded together."""
        ...

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give every worker these weights. They are read before it returns.

        Raises:
            EngineError: a worker that holds other weights than it says.
        """
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits at most `timeout_s` for the first event.

        Raises:
            EngineError: an error inside a worker that sampling again would not mend, in the worker's own words.
        """
        ...

    def close(self) -> None:
        """End the workers; idempotent. Nothing is left behind: no process, no shared memory."""
        ...


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
