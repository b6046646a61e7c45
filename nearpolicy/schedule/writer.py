"""What runs inside a rollout worker's process: one sampler, the groups it writes, the weights it is given while it writes. Knows no Ray.

Calls come on several threads. At most one of them samples; a publication is left where the sampling thread finds it between two decode steps
(`keep`) or after the groups at hand (`finish`), and is loaded by whoever holds the sampler.
"""

import os
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nearpolicy.errors import EngineError, NearPolicyError
from nearpolicy.sampler.continuation import Flight, InterruptibleSampler
from nearpolicy.sampler.publish import Parcel, SamplerFactory, load_parcel
from nearpolicy.schedule.workers import Job


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as an answer: exceptions of other libraries do not travel well."""

    line: str
    """In the worker's own words, one line."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Our errors as they read, others with their kind in front."""
        text = " ".join(str(error).split())
        return cls(text if isinstance(error, NearPolicyError) else f"{type(error).__name__}: {text}")


@dataclass(frozen=True, slots=True)
class Started:
    """The sampler stands."""

    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class Held:
    """Weights arrived."""

    version: int | None
    """Version that the sampler holds now; None while it still writes under others."""


Written = bytes
"""Pickled list of (ticket, rollouts, seconds)."""


class Writer:
    """A rollout worker. Every method answers with a `Failure` instead of raising.

    Args:
        keep: publications interrupt sampling, and responses in flight go on under the new weights; else they are finished first.
        reuse_kv: with `keep`: weights are taken between two decode steps, and responses go on upon the cache that the old ones filled.
        wait_s: seconds to wait for weights that are on their way, and for the sampler.
    """

    def __init__(self, factory: SamplerFactory, *, keep: bool, wait_s: float, reuse_kv: bool = False) -> None:
        self._factory, self._keep, self._reuse_kv, self._wait_s = factory, keep, reuse_kv, wait_s
        self._sampler: InterruptibleSampler | None = None
        self._sampling = threading.Lock()
        self._arrived = threading.Condition()
        self._parcel: Parcel | None = None
        self._held = -1

    def start(self) -> Started | Failure:
        """Make the sampler."""
        try:
            with self._sampling:
                self._made()
            return Started(os.getpid(), socket.gethostname())
        except Exception as error:
            return Failure.of(error)

    def load(self, parcel: Parcel, wait: bool = False) -> Held | Failure:
        """Take these weights; with `wait`, answer only when the sampler holds them."""
        try:
            with self._arrived:
                if parcel.version > max(self._held, -1 if self._parcel is None else self._parcel.version):  # calls may overtake each other
                    self._parcel = parcel
                self._arrived.notify_all()
            if not self._sampling.acquire(timeout=self._wait_s if wait else 0):
                if wait:
                    raise EngineError("rollout worker", got=f"a sampler still busy after {self._wait_s:g} s", expected="it free",
                                      do="Raise schedule.wait_s if it only needs longer.")  # fmt: skip
                return Held(None)
            try:
                self._load()
                return Held(self._held)
            finally:
                self._sampling.release()
        except Exception as error:
            return Failure.of(error)

    def write(self, jobs: Sequence[Job], version: int) -> Written | Failure:
        """Write these groups under the weights of this version or newer ones."""
        try:
            with self._sampling:
                self._await(version)
                return pickle.dumps(self._write(jobs), protocol=5)
        except Exception as error:
            return Failure.of(error)

    def end(self) -> None:
        """Close a sampler that has something to close, in the middle of whatever it does."""
        close = getattr(self._sampler, "close", None)
        if close is not None:
            close()

    def _write(self, jobs: Sequence[Job]) -> list[tuple[int, list[object], float]]:
        flight, began = Flight(self._made()), time.perf_counter()
        for job in jobs:
            flight.add([job.request], job.n, job.params)
        out: list[tuple[int, list[object], float]] = []
        while flight.tickets:
            if self._keep and self._reuse_kv:
                done = flight.run(refresh=self._load)
            else:
                done = flight.run((lambda: self._parcel is not None) if self._keep else None)
            seconds = time.perf_counter() - began
            out += [(ticket, list(rollouts), seconds) for ticket, rollouts in done]
            self._load()
        return out

    def _made(self) -> InterruptibleSampler:
        """The sampler, made by the first call that needs it: calls come in no order."""
        if self._sampler is None:
            self._sampler = self._factory()  # type: ignore[assignment]
        assert self._sampler is not None
        return self._sampler

    def _await(self, version: int) -> None:
        """Hold at least these weights: what was published before a job may arrive after it."""
        deadline = time.monotonic() + self._wait_s
        self._load()
        while self._held < version:
            with self._arrived:
                if not self._arrived.wait_for(lambda: self._parcel is not None, timeout=deadline - time.monotonic()):
                    raise EngineError("rollout worker", got=f"no weights of version {version} after {self._wait_s:g} s", expected="them",
                                      do="The network or the object store is too slow: raise schedule.wait_s.")  # fmt: skip
            self._load()

    def _load(self) -> None:
        """Give the sampler the weights that wait for it; the caller holds it."""
        with self._arrived:
            parcel = self._parcel
        if parcel is None:
            return
        load_parcel(self._made(), parcel)
        with self._arrived:
            self._held = parcel.version
            if self._parcel is parcel:
                self._parcel = None
