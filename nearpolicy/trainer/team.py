"""Ranks that train together: one that decides and others that do as told. torch.distributed carries everything; who started the processes is not
asked (torchrun, Ray Train, Slurm: whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT).

Rank 0 makes every decision and calls; the others serve calls. A call is a bell in the store (which may be long in coming: rank 0 samples, scores,
evaluates between two), then the shares from rank 0, the work, the answers to rank 0. Every wait but that for the bell ends at the deadline; the wait
for the bell ends when rank 0 has shown no sign of life for as long.

An error outside of a collective (sampling, loading) is an answer like another: rank 0 raises it, and the others serve on. So is one that all ranks
find together (a gradient that is not finite). Any other error in the middle of a collective ends the team: the reason is left in the store, the
process ends, its closed connections wake the others, and rank 0 says the reason.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from nearpolicy.errors import EngineError, NearPolicyError, UsageError

BEAT_S = 1.0
"""Seconds between two signs of life of a rank."""
_GO_ON = "Mend it, then go on with --resume."
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Handler = Callable[[Any], Any]
"""A share -> an answer, both picklable (rank 0's own are handed over as they are)."""


class Lost(EngineError):
    """A rank is gone or silent: nothing more can be done together."""


def world() -> tuple[int, int]:
    """(rank, ranks) of this process as its environment says; (0, 1) where it says nothing.

    Raises:
        UsageError: a part of the environment is missing or no number.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return 0, 1
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError("WORLD_SIZE", got=f"{size!r} without {', '.join(missing)}", expected="all of " + ", ".join(_VARIABLES),
                         do="Start with torchrun --nproc-per-node N -m nearpolicy train ..., or unset WORLD_SIZE.")  # fmt: skip
    rank = os.environ["RANK"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError("RANK", got=f"{rank!r} with WORLD_SIZE = {size!r}", expected="a number below WORLD_SIZE", do="Start with torchrun.")
    return int(rank), int(size)


class Team:
    """This process among the ranks.

    Args:
        device: `auto` takes the GPU of LOCAL_RANK where there is one, else the CPU; `cuda` likewise.
        deadline_s: seconds that ranks wait for one another.
        collective: names of the calls whose handlers meet the other ranks inside.
        agreed: errors that all ranks raise together.
    Raises:
        UsageError: as `world`, or a device that all ranks of a machine would share.
        Lost: not every rank came within the deadline.
    """

    def __init__(self, *, device: str, deadline_s: float, collective: frozenset[str], agreed: tuple[type[NearPolicyError], ...]) -> None:
        self.rank, self.size = world()
        self.deadline_s, self.collective, self.agreed = deadline_s, collective, agreed
        self.device = _device(device)
        self.handlers: dict[str, Handler] = {}
        self._bells, self._broken = 0, ""
        patience = timedelta(seconds=deadline_s)
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=patience)))
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            self._root = store
            self._store = PrefixStore("nearpolicy", store)
            self._store.set_timeout(patience)
            dist.init_process_group(backend, store=PrefixStore("group", store), rank=self.rank, world_size=self.size, timeout=patience)
            self._control = dist.new_group(backend="gloo", timeout=patience)
        except (RuntimeError, ValueError, OSError) as error:
            raise Lost(f"rank {self.rank} of {self.size}", got=_first_line(error), expected=f"all ranks within {deadline_s:g} s",
                       do="Start every rank (torchrun does), and look at the messages of the others.") from error  # fmt: skip
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="sign of life")
        self._beating.start()

    def mesh(self) -> Any:
        """All ranks in one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.size,))

    def call(self, name: str, shares: Sequence[Any]) -> list[Any]:
        """Have every rank handle its share, this one too; the answers by rank. Rank 0 alone calls.

        Raises:
            NearPolicyError: what a rank raised, its rank named.
            Lost: a rank is gone, now or at an earlier call.
        """
        if self._broken:
            raise Lost("ranks", got=f"no team any more ({self._broken})", expected="all ranks", do=_GO_ON)
        try:
            self._ring()
            dist.scatter_object_list([None], [_packed((name, share)) if k else b"" for k, share in enumerate(shares)], src=0, group=self._control)
            own, error = self._handle(name, shares[0])
            answers: list[Any] = [None] * self.size
            dist.gather_object(None, answers, dst=0, group=self._control)
        except BaseException as failure:
            self._broken = _first_line(failure)
            if (told := self._explained(failure)) is failure:
                raise
            raise told from failure
        if error is not None:
            raise error
        others = [_unpacked(answer) for answer in answers[1:]]
        for rank, answer in enumerate(others, 1):
            if isinstance(answer, _Refusal):
                raise answer.error(rank)
        return [own, *others]

    def serve(self) -> int:
        """Handle calls until rank 0 ends the team; returns the exit code that it ended with. Nothing is printed unless rank 0 cannot.

        SIGINT and SIGTERM are left to rank 0, which may still have a checkpoint to gather.
        """
        with suppress(ValueError):  # not the main thread: the caller owns the signals
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        try:
            while True:
                self._await_bell()
                box: list[Any] = [None]
                dist.scatter_object_list(box, None, src=0, group=self._control)
                name, share = _unpacked(box[0])
                if name == "end":
                    self.end()
                    return int(share)
                answer, error = self._handle(name, share)
                dist.gather_object(_packed(answer if error is None else _Refusal.of(error)), None, dst=0, group=self._control)
        except Exception as failure:
            return self._leave(failure)

    def end(self, code: int = 0) -> None:
        """Let the others go (rank 0); leave (all). Idempotent."""
        if self._ended.is_set():
            return
        if self.rank == 0 and not self._broken:
            with suppress(Exception):
                self._ring()
                dist.scatter_object_list([None], [_packed(("end", code))] * self.size, src=0, group=self._control)
        elif self.rank == 0:
            self._leave_reason(self._broken)
        self._still()
        if not self._broken:
            self._broken = "it has ended"
            with suppress(Exception):
                dist.destroy_process_group()

    def _handle(self, name: str, share: Any) -> tuple[Any, Exception | None]:
        """The answer, or an error after which the ranks still stand together."""
        try:
            return self.handlers[name](share), None
        except Exception as error:
            if name in self.collective and not isinstance(error, self.agreed):
                raise
            return None, error

    def _ring(self) -> None:
        self._store.set(f"bell/{self._bells}", "1")
        if self._bells > 1:  # every rank has answered the call before the last
            self._store.delete_key(f"bell/{self._bells - 2}")
        self._bells += 1

    def _await_bell(self) -> None:
        key, alive, seen = f"bell/{self._bells}", b"", time.monotonic()
        while True:
            try:
                self._store.wait([key], timedelta(seconds=min(5.0, self.deadline_s)))
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # not yet
                if (beat := self._read("beat/0")) != alive:
                    alive, seen = beat, time.monotonic()
                elif time.monotonic() - seen >= self.deadline_s:
                    raise
                continue
            self._bells += 1
            return

    def _beat(self) -> None:
        count, store = 0, PrefixStore("nearpolicy", self._root.clone())  # a client of its own: waits on the other hold it
        with suppress(Exception):  # the store went with its owner: the waits find out
            while not self._ended.wait(BEAT_S):
                count += 1
                store.set(f"beat/{self.rank}", str(count))

    def _still(self) -> None:
        """No more signs of life, and no thread inside the store when the interpreter ends: it would take the process down (SIGABRT)."""
        self._ended.set()
        self._beating.join(10 * BEAT_S)

    def _read(self, key: str) -> bytes:
        """The value under this key, b"" where there is none."""
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _leave_reason(self, text: str) -> None:
        with suppress(Exception):
            self._store.set(f"reason/{self.rank}", text or "stopped")

    def _reasons(self) -> dict[int, str]:
        """What ranks left behind."""
        with suppress(Exception):
            return {rank: text.decode() for rank in range(self.size) if (text := self._read(f"reason/{rank}"))}
        return {}

    def _silent(self) -> list[int]:
        """Ranks without a sign of life over some beats."""
        with suppress(Exception):
            before = [self._read(f"beat/{rank}") for rank in range(self.size)]
            time.sleep(3 * BEAT_S)
            return [rank for rank, beat in enumerate(before) if rank != self.rank and self._read(f"beat/{rank}") == beat]
        return []

    def _explained(self, failure: BaseException) -> BaseException:
        """What rank 0 raises: a rank's own reason, that a rank is gone, or its own error."""
        if not _is_torn(failure):
            self._leave_reason(f"rank 0: {_first_line(failure)}")
            return failure
        reasons = {rank: text for rank, text in self._reasons().items() if rank}
        if reasons:
            rank, text = next(iter(reasons.items()))
            return Lost(f"rank {rank}", got=text, expected="every rank to go on", do=_GO_ON)
        gone = ", ".join(map(str, self._silent()))
        self._leave_reason("rank 0: a rank is gone")
        return Lost(f"rank {gone}" if gone else "ranks", got=f"no sign of life ({_first_line(failure)})" if gone else _first_line(failure),
                    expected=f"an answer within {self.deadline_s:g} s", do=_GO_ON)  # fmt: skip

    def _leave(self, failure: Exception) -> int:
        """End this rank after an error in the middle of a collective, or because the others are gone. Returns the exit code."""
        self._broken = _first_line(failure)
        if not _is_torn(failure):
            self._leave_reason(self._broken)
            if self.device.type == "cuda":  # a collective of NCCL notices late that a rank is gone: rank 0 may be ended before it speaks
                sys.stderr.write(f"error: rank {self.rank}: {self._broken}\n")
        elif not self._reachable() or (not self._reasons() and 0 in self._silent()):
            sys.stderr.write(f"error: rank {self.rank}: rank 0 is gone ({self._broken}). Go on with --resume.\n")
        self._still()
        return 1

    def _reachable(self) -> bool:
        try:
            self._store.check(["beat/0"])
        except Exception:
            return False
        return True


class _Refusal:
    """An error on its way to rank 0."""

    def __init__(self, kind: type[NearPolicyError], what: str, got: str, expected: str, do: str) -> None:
        self.kind, self.what, self.got, self.expected, self.do = kind, what, got, expected, do

    @classmethod
    def of(cls, error: Exception) -> "_Refusal":
        if isinstance(error, NearPolicyError):
            return cls(type(error), error.what, str(error.got), error.expected, error.do)
        return cls(EngineError, "its work", _first_line(error), "none", _GO_ON)

    def error(self, rank: int) -> NearPolicyError:
        """To be raised by rank 0."""
        return self.kind(f"rank {rank}: {self.what}", got=self.got, expected=self.expected, do=self.do)


@contextmanager
def leading(team: Team | None) -> Iterator[None]:
    """The others are let go however this block ends, with its exit code."""
    code = 0
    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        raise
    finally:
        if team is not None:
            team.end(code)


def leave(code: int) -> NoReturn:
    """End a rank that has served. Not through the interpreter's end: threads of a torn team may wait there for each other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise UsageError("device", got=f"{name!r} for several ranks", expected="auto, cpu or cuda", do="Each rank takes the GPU of its LOCAL_RANK.")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UsageError("ranks", got=f"LOCAL_RANK {local} with {torch.cuda.device_count()} GPUs", expected="a GPU for each rank of a machine",
                         do="Lower --nproc-per-node, or set device=cpu.")  # fmt: skip
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _unpacked(data: Any) -> Any:
    """What another rank of this run packed."""
    return pickle.loads(data)


def _first_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, NearPolicyError) else f"{type(error).__name__}: {error}"
    line = " ".join((text.splitlines() or [""])[0].split())
    return line.split(". This is typically caused by")[0][:300]  # gloo's advice


def _is_torn(error: BaseException) -> bool:
    """A connection that broke or a wait that ran out, as torch and gloo say it."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Connection", "Timed out", "timeout", "Socket", "NCCL"))
