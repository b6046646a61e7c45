"""Runs a program that a model wrote, in namespaces of its own, and says how it ended.

bubblewrap (`bwrap`) builds the walls: process, network, IPC, host name, cgroup and mount namespaces; nothing to see but the system's
programs and libraries and this interpreter, read-only; a private /tmp of limited size, the only place to write; no /proc, no /etc, no home;
an empty environment; a new session; an end with its parent. Inside, each process is limited in address space, processor time, processes,
open files and file size, and the system call filter of `nearpolicy.tasks.syscalls` holds. From outside the driver keeps the clock and looks
at the memory of the whole tree and at the number of files ten times a second; whatever goes beyond is ended with everything it started.

Started by root, the program runs under a user id that nothing else has: the limit of processes does not hold for root. Started by anybody
else it runs in a user namespace.

Light: reward workers import this. No torch.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import marshal
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.tasks.inside import wire
from nearpolicy.tasks.syscalls import seccomp_filter

End = Literal["ok", "failed", "timeout", "output", "memory", "files", "died", "tests"]
"""How a step ended: `ok`; `failed` (an exception, a wrong answer of a test, an exit code); `timeout`; `output`, `memory` and `files` (beyond
those limits); `died` (a signal, or it ended its own surroundings); `tests` (the tests are at fault, and say nothing of the program)."""

TIMEOUT_S = 3.0
"""Default seconds for each step."""
TOTAL_S = 8.0
"""Default seconds for all tests of a program together."""
MEMORY_MB = 512
"""Default MiB of memory for a program."""
START_S = 10.0
"""Seconds that a sandbox may take to start."""
PACKAGES = ("numpy",)
"""Besides the standard library a program may import these, where they are installed."""
_GRACE_S = 1.0
_TICK_S = 0.1
_MIB = 2**20
_SLACK_MB = 64
_MOST_FILES = 4096
_OPEN_FILES = 64
# What runs inside arrives over the connection, compiled: there is no file of it to see, and nothing to compile at every start.
_BOOT = """
import marshal, os, sys
fd, data = int(sys.argv[1]), b""
size = int.from_bytes(os.read(fd, 4), "big")
while len(data) < size:
    data += os.read(fd, size - len(data))
for name, code in marshal.loads(data):
    sys.modules[name] = module = type(sys)(name)
    exec(code, module.__dict__)
module.main(fd)
"""
_INSIDE = tuple(f"nearpolicy.tasks.inside.{name}" for name in ("wire", "program", "judge", "supervisor"))
"""In the order in which they import one another."""
_FLAGS = ("-I", "-S", "-B", "-X", "utf8")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
_SLOTS = itertools.count()
_SLOTS_EACH = 8
_FIRST_USER, _USERS = 2_000_000_000, 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use.

    Raises:
        UsageError: a value outside its bounds.
    """

    timeout: float = TIMEOUT_S
    """Seconds for each step, wall clock; also the processor time of each of its processes, rounded up."""
    memory_mb: int = MEMORY_MB
    """MiB of address space for each process, and (with 64 more for the sandbox's own) of memory for all together."""
    output_kb: int = 256
    """KiB of output, or of one returned value."""
    file_mb: int = 16
    """MiB in files, each and together."""
    processes: int = 16
    """Processes and threads at a time."""

    def __post_init__(self) -> None:
        bounds = {"timeout": (0, 3600), "memory_mb": (64, 2**20), "output_kb": (1, 2**16), "file_mb": (1, 2**14), "processes": (1, 4096)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value > 0
            if not good or (name != "timeout" and not isinstance(value, int)):
                raise UsageError(f"Code sandbox: {name}", got=repr(value), expected=f"a number from {low} to {high}", do=f"Change {name}.")

    def frame(self, spare_processes: int) -> dict[str, int]:
        """As the supervisor takes them."""
        memory, files = self.memory_mb * _MIB, self.file_mb * _MIB
        return {
            "timeout_ms": max(1, round(1000 * self.timeout)), "output": self.output_kb * 1024, "RLIMIT_AS": memory, "RLIMIT_FSIZE": files,
            "RLIMIT_CPU": int(self.timeout) + 1, "RLIMIT_NOFILE": _OPEN_FILES, "RLIMIT_NPROC": self.processes + spare_processes,
            "RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 0,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of one step."""

    end: End
    output: Any = None
    """What the program wrote (`run`) or the value it returned (`call`)."""
    message: str = ""
    """Why it did not end well, in one line."""


class Strange:
    """Stands for a returned value that is no plain data. Equal to nothing else."""


class Session:
    """One program in one sandbox, as a context manager; its steps run one after the other.

    Every `run` and `check` begins with a fresh process of the program; `call`s share one. Files in /tmp last as long as the session. A step
    beyond a limit that only ends with the sandbox closes the session: further steps say `died`.

    Args:
        source: the program, Python.
        unsandboxed: run it as an ordinary child process with the limits of each process but no walls: no protection against malice.
    Raises:
        EngineError: the sandbox does not start.
    """

    def __init__(self, source: str, limits: Limits | None = None, *, unsandboxed: bool = False) -> None:
        self.limits = limits or Limits()
        self._open, self._last_words = True, ""
        self._connection, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        users = None if unsandboxed else _users()
        try:
            with theirs, _filter() as filter_fd:
                command = _bare(theirs.fileno()) if unsandboxed else _walls(theirs.fileno(), filter_fd, self.limits, private=users is not None)
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors, close_fds=True, start_new_session=True,
                    pass_fds=(theirs.fileno(), filter_fd), env=_ENVIRONMENT, cwd="/",
                )  # fmt: skip
        except OSError as error:
            self._connection.close()
            self._errors.close()
            raise EngineError("Code sandbox", got=error, expected="a new process", do="See the limits of this machine.") from error
        settings = {
            "program": source, "users": users, "limits": self.limits.frame(0 if users else 4), "alone": not unsandboxed,
            "packages": ["/packages"] if not unsandboxed else sorted({str(p.parent) for p in _packages()}),
        }  # fmt: skip
        ready = self._exchange(settings, START_S, first=_inside())
        if ready != {"ready": True}:
            self._end(kill=True)
            raise EngineError("Code sandbox", got=self._last_words or "no sign of life", expected="a sandbox that starts",
                              do="Try it by hand: bwrap --ro-bind / / --unshare-pid true.")  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, stdin: str) -> Ran:
        """Run the program as a script on one input; `output` is what it wrote. Exit codes other than 0 are `failed`."""
        return self._step({"step": "run", "stdin": stdin})

    def call(self, name: str, args: list[Any]) -> Ran:
        """Call a function of the program (or a method of its class Solution); `output` is the value, a `Strange` when that is no plain data.

        Raises:
            wire.Unsupported: an argument that is no plain data.
        """
        done = self._step({"step": "call", "name": name, "args": [wire.encode(a) for a in args]})
        if done.end != "ok":
            return done
        try:
            return Ran("ok", wire.decode(done.output, lambda _: Strange()))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            return Ran("failed", message=f"returned no value: {wire.text_of(error)}")

    def check(self, tests: str, *, entry: str | None = None, prelude: str = "") -> Ran:
        """Run tests (Python source with assertions) against the program, in a process that the program cannot reach.

        Args:
            entry: the only name of the program that the tests use; `check(entry)` is called when they define `check` and call nothing
                themselves. None gives them every name that neither they nor Python define.
            prelude: run in front of the tests, in their process (helpers of a prompt).
        """
        loaded = self._step({"step": "load"})
        return self._step({"step": "check", "tests": tests, "entry": entry, "prelude": prelude}) if loaded.end == "ok" else loaded

    def close(self) -> None:
        """End the program and all it started; idempotent."""
        self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # an idle supervisor ends by itself, and bubblewrap reaps everything
        if kill or not self._ended():
            # The first process of the namespace takes all others along; bubblewrap then ends too. It comes last: who dies with it is orphaned.
            for pid in [*_tree(self._process.pid)[1:2], -self._process.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                if self._ended():
                    break
        self._process.wait()
        self._connection.close()
        self._errors.seek(0)
        self._last_words = " ".join(self._errors.read(2000).decode(errors="replace").split())
        self._errors.close()

    def _ended(self) -> bool:
        """Wait a little for the end. The supervisor holds the last copy of the other end of the connection: it goes when all is over."""
        due = time.monotonic() + _GRACE_S
        self._connection.settimeout(_GRACE_S)
        with contextlib.suppress(OSError):
            while self._connection.recv(65536) and time.monotonic() < due:
                pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, due - time.monotonic()))
        return self._process.returncode is not None

    def _step(self, request: dict[str, Any]) -> Ran:
        if not self._open:
            return Ran("died", message="the sandbox is closed")
        reply = self._exchange(request, self.limits.timeout + _GRACE_S)
        if isinstance(reply, Ran):
            self._end(kill=True)
            return reply
        try:
            return Ran(reply["end"], reply["output"], str(reply["message"]))
        except (TypeError, LookupError):
            self._end(kill=True)
            return Ran("died", message="it broke the sandbox's own connection")

    def _exchange(self, request: Any, seconds: float, *, first: bytes = b"") -> Any:
        """The reply to one frame (behind what is sent first); a Ran when there is none."""
        due, buffer = time.monotonic() + seconds, bytearray()
        most = 8 * self.limits.output_kb * 1024 + 65536  # JSON writes up to six characters for a byte
        body = json.dumps(request).encode()
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(first + struct.pack(">I", len(body)) + body)
            while len(buffer) < 4 or len(buffer) < 4 + struct.unpack(">I", buffer[:4])[0]:
                left = due - time.monotonic()
                if left <= 0:
                    return Ran("timeout", message="out of time")
                if not select.select([self._connection], [], [], min(left, _TICK_S))[0]:
                    beyond = _beyond(self._process.pid, self.limits)
                    if beyond is not None:
                        return beyond
                    continue
                part = self._connection.recv(65536)
                if not part or len(buffer) > most:
                    return Ran("died", message="it ended its sandbox" if not part else "it broke the sandbox's own connection")
                buffer += part
            return json.loads(buffer[4:])
        except TimeoutError:
            return Ran("timeout", message="out of time")
        except (OSError, ValueError, RecursionError) as error:
            return Ran("died", message=f"it ended its sandbox: {wire.text_of(error)}")


# ---------------------------------------------------------------------------------------------------------------- the walls


def _bare(connection: int) -> list[str]:
    """Command without a sandbox."""
    return [_interpreter(), *_FLAGS, "-c", _BOOT, str(connection)]


def _walls(connection: int, filter_fd: int, limits: Limits, *, private: bool) -> list[str]:
    """Command with one. `private`: the supervisor is root, without any power but to change user and to end what it started."""
    users = ["--cap-drop", "ALL", *(w for c in ("SETUID", "SETGID", "KILL") for w in ("--cap-add", f"CAP_{c}"))]
    if not private:
        users = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    environment = [w for name, value in _ENVIRONMENT.items() for w in ("--setenv", name, value)]
    devices = [w for name in ("null", "zero", "full", "random", "urandom") for w in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    return [
        "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", *users,
        "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv", *environment, *_rooms(), *devices,
        "--perms", "1777", "--size", str(limits.file_mb * _MIB), "--tmpfs", "/tmp", "--symlink", "/tmp", "/dev/shm",
        "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(filter_fd),
        "--", _interpreter(), *_FLAGS, "-c", _BOOT, str(connection),
    ]  # fmt: skip


@functools.cache
def _rooms() -> tuple[str, ...]:
    """What there is to read: system programs and libraries, this interpreter, the packages."""
    words = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            words += ["--ro-bind", name, name]
    rooms = {str(p): f"/packages/{p.name}" for p in _packages()}
    rooms |= {p: p for p in (sys.base_prefix, sys.base_exec_prefix) if not Path(p).is_relative_to("/usr")}
    # Folders on the way that bubblewrap makes by itself can be closed to other users.
    for folder in sorted({"/dev", *(str(p) for room in rooms.values() for p in Path(room).parents)} - {"/"}):
        words += ["--dir", folder]
    return (*words, *(word for source, room in rooms.items() for word in ("--ro-bind", source, room)))


@functools.cache
def _packages() -> tuple[Path, ...]:
    """Folders of the packages that programs may import, with the libraries that lie beside them."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            found += [p for p in (Path(place), Path(place).with_name(f"{name}.libs")) if p.is_dir()]
    return tuple(found)


@functools.cache
def _inside() -> bytes:
    """The code of the modules that run inside, as `_BOOT` reads it."""
    code = []
    for name in _INSIDE:
        loader = importlib.import_module(name).__spec__.loader  # type: ignore[union-attr]
        code.append((name, loader.get_code(name)))  # type: ignore[union-attr]
    data = marshal.dumps(code)
    return struct.pack(">I", len(data)) + data


def _interpreter() -> str:
    """The interpreter itself, not that of a virtual environment."""
    return os.path.realpath(str(getattr(sys, "_base_executable", "") or sys.executable))


@contextlib.contextmanager
def _filter() -> Iterator[int]:
    """A descriptor to read the system call filter from."""
    reading, writing = os.pipe()
    try:
        os.write(writing, seccomp_filter() or b"")
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def _users() -> list[int] | None:
    """Ids for program and judge that nothing else on the machine is likely to have; None unless root."""
    if os.geteuid() != 0:
        return None
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
    low, room = (_FIRST_USER, _USERS) if count > _FIRST_USER + _USERS else (first + count // 2, count // 4)
    slot = (os.getpid() * _SLOTS_EACH + next(_SLOTS) % _SLOTS_EACH) % room
    return [low + 2 * slot, low + 2 * slot + 1]


# ------------------------------------------------------------------------------------------------------- the view from above


def _tree(root: int) -> list[int]:
    """A process and its descendants, root first."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        with contextlib.suppress(OSError):  # a process, or one of its threads, may end at any moment
            for children in list(Path(f"/proc/{pid}/task").glob("*/children")):
                with contextlib.suppress(OSError):
                    todo += map(int, children.read_text().split())
    return found


def _beyond(root: int, limits: Limits) -> Ran | None:
    """What the tree has too much of: memory (anonymous and shared, MiB) or files."""
    tree, kb = _tree(root), 0
    for pid in tree:
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kb += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    if kb > 1024 * (limits.memory_mb + _SLACK_MB):
        return Ran("memory", message=f"more than {limits.memory_mb} MiB")
    with contextlib.suppress(OSError, IndexError):  # without a sandbox, or where another user's root cannot be looked into
        room = os.statvfs(f"/proc/{tree[1]}/root/tmp")
        if room.f_blocks * room.f_frsize <= limits.file_mb * _MIB and room.f_files - room.f_ffree > _MOST_FILES:
            return Ran("files", message=f"more than {_MOST_FILES} files")
    return None


# ------------------------------------------------------------------------------------------------------------------ whether


@functools.cache
def unavailable() -> str:
    """Why programs cannot be sandboxed here, in a few words; empty when one has been."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform}, which has no bubblewrap"
    if seccomp_filter() is None:
        return f"a {platform.machine()} machine, for which there is no system call filter"
    if shutil.which("bwrap", path=_ENVIRONMENT["PATH"]) is None:
        return "no program bwrap"
    try:
        with Session("print(6 * 7)", Limits(timeout=10)) as session:
            done = session.run("")
    except EngineError as error:
        return str(error.got)
    return "" if done == Ran("ok", "42\n") else f"a sandbox whose first program ended with {done.end}: {done.message}"


def require(*, unsandboxed: bool = False) -> None:
    """Refuse to go on where programs cannot be sandboxed and nobody has said that they may run without.

    Raises:
        UsageError: with the reason.
    """
    if not unsandboxed and unavailable():
        raise UsageError("Code sandbox", got=unavailable(), expected="bubblewrap 0.7 or later, allowed to make namespaces", do="Install it "
                         "(apt-get install bubblewrap), or set allow_unsandboxed = true to run what a model writes without walls.")  # fmt: skip
