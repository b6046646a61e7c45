"""Rollout workers as Ray actors: on this machine, or on a cluster. The only file that imports ray.

One actor is one `writer.Writer`. Weights go once into the object store for each publication and are read there by every worker of a node, without
a copy. Ray restarts nothing by itself: a worker that is gone is made again here, with the newest weights, and its jobs are reported.
"""

import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.sampler.publish import SamplerFactory, pack
from nearpolicy.schedule.workers import Died, Event, Finished, Job, usable_cpus
from nearpolicy.schedule.writer import Failure, Writer

SMALLEST_STORE_MB = 128
"""Ray refuses an object store below 75 MB."""
COPIES = 4
"""Versions of the weights that the object store has room for: the newest, those that workers still write under, and one on its way in."""
CONNECT_S = 10.0
END_S = 15.0
"""Seconds for workers to end before they are killed."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
}
"""Read by Ray when it is imported: it tells nobody of this run, and keeps its remarks for itself."""


def ray_module() -> Any:
    """The library, imported on first use.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UsageError("schedule.kind = async", got=f"no Ray ({' '.join(str(error).split())})", expected="the extra `ray`",
                         do='Install it: pip install "nearpolicy[ray]".') from None  # fmt: skip
    return ray


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How many workers, what each may use, and where."""

    workers: int
    cpus: int
    """CPUs for each worker."""
    gpus: float
    """GPUs for each worker."""
    groups: int
    """Groups that a worker decodes together."""
    keep: bool
    """Publications interrupt responses, which go on under the new weights."""
    reuse_kv: bool = False
    """With `keep`: they go on upon the cache that the old weights filled."""
    wait_s: float
    """Deadline of every wait."""
    address: str | None
    """Of a cluster (`host:port`, or `auto`); None starts Ray here."""
    store_mb: int | None
    """Object store of a Ray started here; None has room for COPIES of the weights."""
    restarts: int
    """Times in a row that a worker may die without having finished a group."""


@dataclass(slots=True)
class _Worker:
    """One actor and the calls that are on their way to it."""

    actor: Any
    calls: dict[Any, tuple[str, float]] = field(default_factory=dict)
    """Reference of an answer -> what was asked, and when."""
    tickets: list[int] = field(default_factory=list)
    pid: int | None = None
    host: str = ""
    deaths: int = 0
    """In a row."""


class RayWorkers:
    """Implements `Workers`. Starts or joins Ray, starts the actors, and returns while they load.

    Args:
        factory: makes a worker's sampler in its process; picklable.
        weights_mb: size of the weights, for the object store of a Ray that is started here.

    Raises:
        UsageError: Ray is not installed, no cluster at the address, or fewer CPUs or GPUs than the workers need.
    """

    def __init__(self, factory: SamplerFactory, *, options: RayOptions, weights_mb: float = 0.0) -> None:
        self.ray, self.options, self.factory = ray_module(), options, factory
        self.count = options.workers
        self._closed = False
        self._parcel: tuple[Any, int] | None = None
        self._folder: Path | None = None
        self._workers: list[_Worker] = []
        self._pids: set[int] = set()
        self._owner = not self.ray.is_initialized()
        if self._owner:
            self._connect(weights_mb)
        try:
            self._check_resources()
            self._class = self.ray.remote(Writer)
            for _ in range(self.count):
                self._workers.append(self._make())
        except BaseException:
            self.close()
            raise

    # Ray itself

    def _connect(self, weights_mb: float) -> None:
        o = self.options
        quiet = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False, "namespace": f"nearpolicy-{os.getpid()}"}
        _hush()
        with _own_signals():
            if o.address is not None:
                check_address(o.address)
                quiet.pop("include_dashboard")
                try:
                    self.ray.init(address=o.address, **quiet)
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise UsageError("ray.address", got=f"{o.address} ({_line(error)})", expected="a running cluster of this Ray and Python version",
                                     do="Start one with `ray start --head`, or remove ray.address to use this machine.") from None  # fmt: skip
                return
            store_mb = o.store_mb if o.store_mb is not None else max(SMALLEST_STORE_MB, int(COPIES * weights_mb) + 64)
            self._folder = _short_folder()
            if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray writes one into the home folder
            try:
                self.ray.init(num_cpus=usable_cpus(), object_store_memory=store_mb * 2**20, _temp_dir=str(self._folder), **quiet)
            except Exception as error:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise EngineError("Ray", got=f"no start on this machine ({_line(error)})", expected="a local Ray",
                                  do="Check memory, /dev/shm and the temporary folder, or join a cluster with ray.address.") from None  # fmt: skip

    def _check_resources(self) -> None:
        o, there = self.options, self.ray.cluster_resources()
        for kind, each, word in (("CPU", float(o.cpus), "schedule.worker_threads"), ("GPU", o.gpus, "schedule.worker_gpus")):
            have = float(there.get(kind, 0))
            if o.workers * each > have:
                where = "this machine" if o.address is None else "the cluster"
                raise UsageError(f"schedule.workers x {word}", got=f"{o.workers} x {each:g} = {o.workers * each:g} {kind}s",
                                 expected=f"at most the {have:g} of {where}", do="Lower one of them, or join a larger cluster.")  # fmt: skip

    def _make(self) -> _Worker:
        """An actor, starting; with the newest weights, if any were published."""
        o = self.options
        actor = self._class.options(
            num_cpus=o.cpus, num_gpus=o.gpus, max_concurrency=4, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD",
        ).remote(self.factory, keep=o.keep, reuse_kv=o.reuse_kv, wait_s=o.wait_s)  # fmt: skip
        worker = _Worker(actor)
        self._call(worker, "start", actor.start.remote())
        if self._parcel is not None:
            self._call(worker, "load", actor.load.remote(self._parcel[0]))
        return worker

    @staticmethod
    def _call(worker: _Worker, what: str, ref: Any) -> None:
        worker.calls[ref] = (what, time.monotonic())

    # The seam

    def free(self, worker: int) -> int:
        """`options.groups` for a worker that writes nothing, else 0: groups that are decoded together end together."""
        return 0 if self._workers[worker].tickets else self.options.groups

    def submit(self, worker: int, jobs: Sequence[Job]) -> None:
        """Have these groups written; the worker holds the weights published last when it begins."""
        if self._parcel is None:
            raise ValueError("submit before the first publish")
        if not jobs:
            return
        w = self._workers[worker]
        if w.tickets:
            raise ValueError(f"worker {worker} is writing {w.tickets}")
        w.tickets = [job.request.ticket for job in jobs]
        self._call(w, "write", w.actor.write.remote(list(jobs), self._parcel[1]))

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """One copy into the object store; the copy before it goes when the last worker has left it. The first call waits until all workers hold it.

        Raises:
            EngineError: a worker that cannot be started or does not take the weights.
        """
        first = self._parcel is None
        self._parcel = (self.ray.put(pack(weights, version)), version)
        for w in self._workers:
            self._call(w, "load", w.actor.load.remote(self._parcel[0], first))
        if first:
            deadline = time.monotonic() + self.options.wait_s
            while any(w.calls for w in self._workers):
                self._poll(min(1.0, max(0.0, deadline - time.monotonic())))

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call, at most `timeout_s` later.

        Raises:
            EngineError: an error inside a worker, in its own words; one that died too often in a row; one that does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            events = self._poll(max(0.0, deadline - time.monotonic()))
            if events or time.monotonic() >= deadline:
                return events

    def _poll(self, timeout_s: float) -> list[Event]:
        """One wait for any answer."""
        asked = {ref: i for i, w in enumerate(self._workers) for ref in w.calls}
        if not asked:
            time.sleep(timeout_s)
            return []
        refs = list(asked)
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        events: list[Event] = []
        for ref in ready:
            index = asked[ref]
            if ref in self._workers[index].calls:  # not of an actor that was found dead just now
                events += self._answered(index, ref)
        self._check_deadlines()
        return events

    def _answered(self, index: int, ref: Any) -> list[Event]:
        w, errors = self._workers[index], self.ray.exceptions
        what, _ = w.calls.pop(ref)
        try:
            answer = self.ray.get(ref, timeout=self.options.wait_s)
        except errors.RayTaskError as error:
            raise self._failed(index, _line(error.cause if error.cause is not None else error)) from None
        except errors.GetTimeoutError:
            raise self._failed(index, f"its answer did not arrive within {self.options.wait_s:g} s") from None
        except errors.RayError as error:
            return self._died(index, error)
        if isinstance(answer, Failure):
            raise self._failed(index, answer.line)
        if what == "start":
            w.pid, w.host = answer.pid, answer.host
            if answer.host == socket.gethostname():
                self._pids.add(answer.pid)
        if what != "write":
            return []
        w.tickets, w.deaths = [], 0
        return [Finished(worker=index, ticket=t, rollouts=r, seconds=s) for t, r, s in pickle.loads(answer)]  # bytes that our own actor wrote

    def _died(self, index: int, error: BaseException) -> list[Event]:
        """Report the jobs of a worker that is gone, and put another in its place."""
        w = self._workers[index]
        reason = f"{self._name(index)} is gone: {_line(error)}"
        if w.deaths >= self.options.restarts:
            raise EngineError(f"rollout worker {index}", got=f"{w.deaths + 1} deaths in a row without a finished group (the last: {reason})",
                              expected=f"at most {self.options.restarts}", do="Look for what ends it (memory?), or raise ray.restarts.")  # fmt: skip
        with suppress(Exception):  # one that only cannot be reached must not write on
            self.ray.kill(w.actor, no_restart=True)
        fresh = self._make()
        fresh.deaths = w.deaths + 1
        self._workers[index] = fresh
        return [Died(worker=index, tickets=w.tickets, reason=reason)]

    def _check_deadlines(self) -> None:
        """An actor that is asked to load answers at once, whatever it is writing; one that starts has `wait_s`."""
        now = time.monotonic()
        for index, w in enumerate(self._workers):
            for what, since in w.calls.values():
                if what != "write" and now - since > self.options.wait_s:
                    raise self._failed(index, f"no answer to {what!r} for {now - since:.0f} s")

    def _failed(self, index: int, line: str) -> EngineError:
        return EngineError(self._name(index), got=line, expected="responses", do="The run can be gone on with once that is mended.")

    def _name(self, index: int) -> str:
        w = self._workers[index]
        return f"rollout worker {index}" + (f" (pid {w.pid} on {w.host})" if w.pid is not None else "")

    def close(self) -> None:
        """End the actors, and Ray if it was started or joined here; idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):  # processes that a sampler has started would outlive it
            if ends := [w.actor.end.remote() for w in self._workers if w.pid is not None]:
                self.ray.wait(ends, num_returns=len(ends), timeout=END_S)
        for w in self._workers:
            with suppress(Exception):
                self.ray.kill(w.actor, no_restart=True)
        self._workers, self._parcel = [], None
        if self._owner:
            with _own_signals(), suppress(Exception):
                self.ray.shutdown()
        _end(self._pids)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def check_address(address: str) -> None:
    """Refuse an address that nobody answers at, within seconds: Ray itself would try for minutes.

    Raises:
        UsageError: not `auto` or `host:port`, or nobody there.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "//" in address or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise UsageError("ray.address", got=repr(address), expected="host:port of the head node, or auto",
                         do="Give the address that `ray start --head` printed (ray:// clients cannot share memory with the workers).")  # fmt: skip
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise UsageError("ray.address", got=f"nobody at {address} ({error.strerror or error})", expected="a running cluster",
                         do="Start one with `ray start --head`, or remove ray.address to use this machine.") from None  # fmt: skip


def _short_folder() -> Path:
    """A folder for Ray's session: its sockets' paths must stay below 108 characters."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="nearpolicy-ray-", dir=base if len(base) <= 24 else "/tmp"))


def _line(error: BaseException) -> str:
    """What an error of Ray says, in one line: its first lines, without the table of identifiers in the middle."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(" ".join(lines).split())[:300]


def _hush() -> None:
    """Ray's remarks about deaths that are reported here anyway stay off the terminal; it has no setting for them."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets handlers and an exception hook of its own while it connects; ours stay."""
    hook = sys.excepthook
    try:
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        yield
    finally:
        sys.excepthook = hook
        with suppress(ValueError):  # not the main thread: Ray set none
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(pids: set[int]) -> None:
    """Wait for workers of this machine to end, and kill what does not."""
    deadline = time.monotonic() + END_S
    left = {pid for pid in pids if _is_worker(pid)}
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {pid for pid in left if _is_worker(pid)}
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _is_worker(pid: int) -> bool:
    """Whether the process still is a Ray worker (a number may have been given to another)."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
