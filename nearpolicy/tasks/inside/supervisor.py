"""The first process in a sandbox: carries out the driver's steps, each within its time, and leaves nothing behind.

driver -> supervisor   {program, users, limits, alone, packages}, then any number of steps:
                       {step: "run", stdin}   {step: "call", name, args}   {step: "load"}, then {step: "check", tests, entry, prelude}
supervisor -> driver   {"ready": true}, then {"end", "message", "output"} for each step; `end` as in `nearpolicy.tasks.sandbox.End`
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, signal  # type: ignore[import-not-found]  # without the names of all others

from nearpolicy.tasks.inside.judge import Line, judge
from nearpolicy.tasks.inside.program import run_to_end, serve
from nearpolicy.tasks.inside.wire import Closed, receive, send, suppress, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_CHUNK = 65536
_LOOK_MS = 5
PROGRAM, JUDGE = 0, 1
"""Index of their user ids."""


class Supervisor:
    """Carries out steps. `settings` is the driver's first frame."""

    def __init__(self, connection: int, settings: Mapping[str, Any]) -> None:
        self.connection, self.program = connection, settings["program"]
        self.limits: dict[str, int] = settings["limits"]
        self.users: list[int] | None = settings["users"]
        # Only the first process of its own process namespace may kill everything that it sees.
        self.alone = bool(settings["alone"]) and os.getpid() == 2 and os.getppid() == 1
        self.children: list[int] = []
        self.pipes: tuple[int, int] | None = None
        """Requests to and replies from a program that answers calls."""

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], user: int, stdio: tuple[int, int]) -> None:
        """A confined child that runs `work` with `stdio` as its input and output and only `keep` of the other descriptors."""
        pid = os.fork()
        if pid:
            self.children.append(pid)
            return
        try:
            os.setsid()
            for fd, own in enumerate(stdio):
                os.dup2(own, fd)
            low = 3
            for fd in sorted(keep):
                os.closerange(low, fd)
                low = fd + 1
            os.closerange(low, os.sysconf("SC_OPEN_MAX"))
            self._confine(user)
            work()
        finally:
            os._exit(1)

    def _confine(self, user: int) -> None:
        if self.users:
            number = self.users[user]
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        for name, value in self.limits.items():
            if name.startswith("RLIMIT_"):
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (value, value))
        signal(SIGINT, SIG_DFL if user == PROGRAM else SIG_IGN)

    def sweep(self) -> None:
        """End every process that steps have started, and those that they have started."""
        if self.alone:
            _kill(-1)
        for child in self.children:
            _kill(-child)
            _kill(child)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        self.children.clear()
        for fd in self.pipes or ():
            os.close(fd)
        self.pipes = None

    def run(self, stdin: str) -> dict[str, Any]:
        """The program's output on one input."""
        self.sweep()
        input_r, input_w = os.pipe()
        output_r, output_w = os.pipe()
        self.fork(lambda: run_to_end(self.program), (), PROGRAM, (input_r, output_w))
        os.close(input_r)
        os.close(output_w)
        pump = Pump(self.children[-1], input_w, output_r, stdin.encode("utf-8", "surrogatepass"))
        try:
            end = pump.until_gone(self.due(), self.limits["output"])
            message = {"timeout": "out of time", "output": f"more than {self.limits['output']} bytes of output"}.get(end, "")
            if end == "ok":
                end, message = _ended(os.waitpid(self.children.pop(), 0)[1])
        finally:
            self.sweep()
            pump.close()
        return {"end": end, "message": message, "output": pump.output.decode("utf-8", "replace")}

    def load(self) -> dict[str, Any]:
        """Start the program anew, ready to answer calls."""
        self.sweep()
        requests_r, requests_w = os.pipe()
        replies_r, replies_w = os.pipe()
        with _Null() as null:
            self.fork(lambda: serve(self.program, requests_r, replies_w), (requests_r, replies_w), PROGRAM, (null, null))
        os.close(requests_r)
        os.close(replies_w)
        self.pipes = requests_w, replies_r
        return _result("ok")

    def call(self, name: str, args: list[Any]) -> dict[str, Any]:
        """The encoded result of one of the program's functions. The program stays for the next call as long as nothing goes wrong."""
        due = self.due()
        if self.pipes is None:
            self.load()
        try:
            found = self._ask(["name", name], due)
            if found[0] == "v":
                if not isinstance(found[1], list) or found[1][0] != "o":
                    return _result("failed", f"{name} is no function")
                found = self._ask(["call", found[1][1], args, {}], due)
        except TimeoutError:
            self.sweep()
            return _result("timeout", "out of time")
        except (Closed, TypeError, LookupError) as error:
            self.sweep()
            return _result("died", text_of(error))
        return _result("ok", output=found[1]) if found[0] == "v" else _result("failed", f"{found[1]}: {found[2]}")

    def _ask(self, request: list[Any], due: float) -> Any:
        assert self.pipes is not None
        send(self.pipes[0], request)
        reply = receive(self.pipes[1], self.limits["output"], due)
        if not isinstance(reply, list) or len(reply) != 3:
            raise Closed("no answer")
        return reply

    def check(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The judge's verdict on the program that `load` has started before the tests arrived."""
        if self.pipes is None:
            return _result("died", "no program")
        requests, replies = self.pipes
        verdict_r, verdict_w = os.pipe()

        def work() -> None:
            send(verdict_w, judge(request, Line(requests, replies, self.limits["output"])))

        try:
            with _Null() as null:
                self.fork(work, (requests, replies, verdict_w), JUDGE, (null, null))
            os.close(verdict_w)
            verdict = receive(verdict_r, due=self.due())
        except TimeoutError:
            verdict = _result("timeout", "out of time")
        except Closed:
            verdict = _result("died", "the tests ended before their last line")
        finally:
            self.sweep()
            os.close(verdict_r)
        return _result(verdict["end"], verdict["message"])

    def due(self) -> float:
        """The monotonic time by which a step that begins now must be done."""
        return time.monotonic() + self.limits["timeout_ms"] / 1000

    def loop(self) -> None:
        """Steps until the driver closes the connection."""
        while True:
            try:
                request = receive(self.connection)
            except Closed:
                return
            step = request["step"]
            if step == "run":
                reply = self.run(request["stdin"])
            elif step == "call":
                reply = self.call(request["name"], request["args"])
            else:
                reply = self.load() if step == "load" else self.check(request)
            send(self.connection, reply)


class Pump:
    """Feeds a process its input and reads its output until it is gone."""

    def __init__(self, pid: int, input_w: int, output_r: int, data: bytes) -> None:
        self.output = bytearray()
        self._pid, self._data = pid, memoryview(data)
        self._input: int | None = input_w
        self._output = output_r
        self._poll = select.poll()
        for fd, event in ((input_w, select.POLLOUT), (output_r, select.POLLIN)):
            os.set_blocking(fd, False)
            self._poll.register(fd, event)
        self._life: int | None = None
        with suppress(AttributeError, OSError):  # kernels before 5.3: its end is looked for every now and then
            self._life = os.pidfd_open(pid)
            self._poll.register(self._life, select.POLLIN)
        if not data:
            self._close_input()

    def until_gone(self, due: float, most: int) -> str:
        """ "ok" when the process is gone, "timeout" past `due`, "output" when it has written more than `most` bytes."""
        while True:
            left = 1000 * (due - time.monotonic())
            if left <= 0:
                return "timeout"
            ready = dict(self._poll.poll(left if self._life is not None else min(left, _LOOK_MS)))
            if self._input in ready:
                self._feed()
            gone = self._life in ready if self._life is not None else os.waitid(os.P_PID, self._pid, _LOOK) is not None
            if self._output in ready or gone:
                self._read(most)
            if len(self.output) > most:
                return "output"
            if gone:
                return "ok"

    def _feed(self) -> None:
        assert self._input is not None
        try:
            self._data = self._data[os.write(self._input, self._data[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it reads no more, which is its right
            self._data = self._data[:0]
        if not self._data:
            self._close_input()

    def _read(self, most: int) -> None:
        """Take what is there, up to a little over `most` bytes in all."""
        while len(self.output) <= most:
            try:
                part = os.read(self._output, _CHUNK)
            except BlockingIOError:
                return
            if not part:
                with suppress(KeyError):
                    self._poll.unregister(self._output)
                return
            self.output += part

    def _close_input(self) -> None:
        if self._input is not None:
            self._poll.unregister(self._input)
            os.close(self._input)
            self._input = None

    def close(self) -> None:
        """Close its descriptors."""
        self._close_input()
        os.close(self._output)
        if self._life is not None:
            os.close(self._life)


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _result(end: str, message: str = "", output: Any = None) -> dict[str, Any]:
    return {"end": end, "message": message, "output": output}


class _Null:
    """A descriptor of the null device."""

    def __enter__(self) -> int:
        self._fd = os.open(os.devnull, os.O_RDWR)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _ended(status: int) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return ("failed", f"exit code {code}") if code else ("ok", "")
    from signal import Signals

    return "died", Signals(-code).name if -code in set(Signals) else f"signal {-code}"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, SIGKILL)


def main(connection: int) -> None:
    """Serve one program until the driver closes the connection."""
    signal(SIGINT, SIG_IGN)
    with _Null() as null:
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    settings = receive(connection)
    sys.path += settings["packages"]
    supervisor = Supervisor(connection, settings)
    send(connection, {"ready": True})
    try:
        supervisor.loop()
    finally:
        supervisor.sweep()
        os._exit(0)
