"""A reward worker as its parent sees it: started, asked whether it is ready, ended with everything it started.

A worker is a plain interpreter, not a fork or a multiprocessing child: it never imports the parent's main module, holds no locks or
devices of it, and starts in a fraction of a second. `nearpolicy.tasks.worker` is its other side. Standard library only.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nearpolicy.errors import EngineError, UsageError

START_TIMEOUT_S = 30.0
"""Seconds that a worker may take to import the reward functions."""
MAX_MESSAGE_BYTES = 2**20
"""Longest message read from a worker."""
_IO_TIMEOUT_S = 10
_BOOT = "import sys; sys.path[:] = sys.argv[3].split(chr(0x1f)); from nearpolicy.tasks.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_MARK = "NEARPOLICY_REWARD_WORKER"
_MAX_ROUNDS = 50


class Worker:
    """One process: `starting` until it says ready, then idle or, with items in `flight`, busy.

    Args:
        setup: pickled first message (see `nearpolicy.tasks.worker`).
        cwd: working directory of the process.
        boot_s: seconds until `due`, the time by which it should be ready.
    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, setup: bytes, cwd: str, boot_s: float) -> None:
        ours, theirs = socket.socketpair()
        # A worker that stops reading or writes half a message must not stop the parent.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _IO_TIMEOUT_S, 0))
        life, self._life = os.pipe()
        self._mark = uuid.uuid4().hex
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(life), "\x1f".join(sys.path)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), life), start_new_session=True, cwd=cwd, env={**_ENVIRONMENT, **os.environ, _MARK: self._mark},
            )  # fmt: skip
        except BaseException:
            os.close(self._life)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(life)
        self.connection = Connection(ours.detach())
        self.starting = True
        self.flight: deque[int] = deque()
        self.due = time.monotonic() + boot_s
        with contextlib.suppress(OSError):
            self.connection.send_bytes(setup)

    def send(self, keys: Sequence[int], blobs: Sequence[bytes | None], deadline_s: float) -> bool:
        """Hand over a chunk; False when the worker is gone."""
        try:
            self.connection.send_bytes(pickle.dumps([blobs[k] for k in keys]))
        except OSError:
            return False
        self.flight.extend(keys)
        self.due = time.monotonic() + deadline_s
        return True

    def readable(self) -> bool:
        """True when a message, or the end of the connection, is there to read."""
        return not self.connection.closed and self.connection.poll(0)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the connection ended. ValueError: what came is no message.
        """
        return json.loads(self.connection.recv_bytes(MAX_MESSAGE_BYTES))

    def ending(self) -> str:
        """How the process ended: "SIGSEGV", "exit code 3", or that it lives on without its connection."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def kill(self) -> None:
        """SIGKILL the process and all it started, in sessions of their own too (Linux; elsewhere its process group); idempotent."""
        if self.connection.closed:
            return
        _end_family(self.process.pid if self.process.returncode is None else None, self._mark)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5.0)
        self.connection.close()
        os.close(self._life)
        self.starting = False


def await_ready(worker: Worker, paths: Sequence[str], timeout_s: float) -> Any:
    """What a starting worker says with "ready": None, or the facts of a probe.

    Args:
        paths: the reward functions it imports, for the message.
        timeout_s: the time it was given, for the message.
    Raises:
        UsageError: it does not import them in time, ends while it does, or says what is wrong with one.
    """
    what = f"Reward function {', '.join(map(repr, paths))}"
    expected, do = "a module that imports", "Look for what runs at its top level: only definitions belong there."
    if not worker.connection.poll(max(0.0, worker.due - time.monotonic())):
        raise UsageError(what, got=f"a module that did not import within {timeout_s:g} s", expected=expected, do=do)
    try:
        kind, *rest = worker.receive()
        if kind not in ("ready", "failed"):
            raise ValueError(kind)
    except (EOFError, OSError):
        got = f"a module that ended its process while it was imported ({worker.ending()})"
        raise UsageError(what, got=got, expected=expected, do=do) from None
    except (ValueError, TypeError) as error:
        raise UsageError(what, got="a module that wrote to the worker's connection", expected=expected, do=do) from error
    if kind == "failed":
        said: dict[str, str] = rest[0]
        raise UsageError(said["what"], got=said["got"], expected=said["expected"], do=said["do"])
    worker.starting = False
    return rest[0] if rest else None


def failure_text(said: Mapping[str, str]) -> str:
    """What a worker said of its failed start, as one line."""
    return f"{said['what']}: {said['got']}"


def probe(paths: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """Import functions in a process of their own and return what is to know of each (fields of `FunctionFacts`).

    Raises:
        UsageError: as `await_ready`.
        EngineError: no process can be started.
    """
    try:
        worker = Worker(pickle.dumps({"probe": list(paths)}), os.getcwd(), timeout_s)
    except OSError as error:
        raise EngineError("Reward worker start", got=error, expected="a new process", do="See the limits of this machine.") from error
    try:
        facts: list[dict[str, Any]] = await_ready(worker, paths, timeout_s)
        return facts
    finally:
        worker.kill()


def _end_family(root: int | None, mark: str) -> None:
    """Stop, then kill, a worker and its descendants. All are stopped first, so that none starts another or loses its parent meanwhile."""
    stopped: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        new = _family(root, mark) - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _family(root: int | None, mark: str) -> set[int]:
    """Processes that carry the worker's mark in their environment, `root`, and the descendants of all of these; empty without /proc.

    A daemon has lost its parent but keeps its environment; a child with an environment of its own keeps its parent.
    """
    children: dict[int, list[int]] = {}
    found = [] if root is None else [root]
    needle = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
            if needle in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    family: set[int] = set()
    while found:
        pid = found.pop()
        if pid not in family and pid > 1 and pid != os.getpid():
            family.add(pid)
            found.extend(children.get(pid, []))
    return family if children else set()
