"""The reward worker process: imports the functions, then scores items one at a time and reports each as it is done.

Started by `nearpolicy.tasks.pool` with a connection (a socket) and a life line (the read end of a pipe that the parent never writes to).
Light on purpose: standard library only, no torch.

    parent -> worker   first {functions, memory_mb}, then lists of pickled items (prompt, completion, columns); or {probe: paths} alone
    worker -> parent   JSON: ["ready"] or ["failed", {what, got, expected, do}] once, then [outcome, reward, parts, message] for each
                       item, in order; to a probe ["ready", facts of each function] or ["failed", ...]
"""

import contextlib
import dataclasses
import fcntl
import inspect
import json
import math
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from nearpolicy.errors import NearPolicyError
from nearpolicy.tasks.functions import facts_of, load_function

_MAX_MESSAGE = 300
_RESERVED = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})
_MIB = 2**20

Result = tuple[str, float, list[float], str]
"""Outcome, reward (NaN unless the outcome is "score"), one part for each function that ran (NaN where it abstained), message."""


def main(connection_fd: int, life_fd: int) -> None:
    """Serve until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(life_fd)
    connection = Connection(connection_fd)
    setup = pickle.loads(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "probe" in setup:
        _answer(connection, lambda: [dataclasses.asdict(facts_of(load_function(path))) for path in setup["probe"]])
        os._exit(0)
    if setup["memory_mb"] is not None:
        limit, hard = setup["memory_mb"] * _MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    functions: list[Bound] = []
    _answer(connection, lambda: functions.extend(Bound(*one) for one in setup["functions"]))
    while True:
        try:
            blobs = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        for blob in blobs:
            result = judge(functions, blob)
            # An alarm left armed by one item must not go off in the next.
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(json.dumps(result).encode())


def _answer(connection: Connection, start: Callable[[], Any]) -> None:
    """Say ["ready", what `start` returned] or what went wrong; in that case the process ends."""
    try:
        reply = ["ready", start()]
        line = json.dumps(reply)
    except NearPolicyError as error:
        reply = ["failed", {"what": error.what, "got": str(error.got), "expected": error.expected, "do": error.do}]
        line = json.dumps(reply)
    except BaseException as error:
        failure = {"what": "Reward function in a worker process", "got": describe(error), "expected": "functions that can be imported there",
                   "do": "They are imported afresh, without the main module of this program."}  # fmt: skip
        line = json.dumps(["failed", failure])
    connection.send_bytes(line.encode())
    if line.startswith('["failed"'):
        os._exit(1)


def _die_with_parent(life_fd: int) -> None:
    """Have the kernel end this process group when the parent is gone, even inside C code that never returns.

    The life line hangs up when its write end closes; asynchronous I/O turns that into a signal to the group. On Linux it can be SIGKILL,
    which nothing blocks; elsewhere it is SIGIO, whose default is to end the process. (PR_SET_PDEATHSIG would fire when the thread that
    started the worker ends, and the pool is used from several.)
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        if hasattr(fcntl, "F_SETSIG"):
            fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:
        os._exit(0)


class Bound:
    """A reward function with its options, ready for one item at a time.

    A function without `**kwargs` is given only the columns that it names. `warm_up(**options)`, where a function has it, is called here,
    so that slow imports are not charged to the first item.
    """

    def __init__(self, name: str, path: str, weight: float, options: Mapping[str, Any]) -> None:
        self.name, self.weight, self.options = name, weight, dict(options)
        self.function: Callable[..., Any] = load_function(path)
        self.accepts: frozenset[str] | None = None
        with contextlib.suppress(TypeError, ValueError):
            parameters = inspect.signature(self.function).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                self.accepts = frozenset(p.name for p in parameters)
        warm_up = getattr(self.function, "warm_up", None)
        if warm_up is not None:
            warm_up(**self.options)

    def __call__(self, prompt: Any, completion: str, columns: Mapping[str, Any]) -> float | None:
        """Its value for one item; None abstains.

        Raises:
            TypeError, ValueError: it returned no list, the wrong length, something that is no number, or a number that is not finite.
        """
        text: Any = completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
        arguments: dict[str, Any] = {key: [value] for key, value in columns.items() if key not in _RESERVED}
        arguments.update(self.options, prompts=[prompt], completions=[text])
        if self.accepts is not None:
            arguments = {key: value for key, value in arguments.items() if key in self.accepts}
        values = self.function(**arguments)
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise TypeError(f"returned a {type(values).__name__}, not a list with one value for each completion")
        if len(values) != 1:
            raise ValueError(f"returned {len(values)} values for 1 completion")
        value = values[0]
        if value is None:
            return None
        if isinstance(value, str | bytes):
            raise TypeError(f"returned a {type(value).__name__}, not a number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"returned {number}, not a finite number (None abstains)")
        return _within_float32(number, f"returned {number:g}")


def _within_float32(number: float, what: str) -> float:
    """`number`, unless it is infinite in float32, the dtype of rewards."""
    try:
        struct.pack("<f", number)  # the native format packs an infinity instead
    except OverflowError:
        raise ValueError(f"{what}, which is beyond float32") from None
    return number


def judge(functions: list[Bound], blob: bytes) -> Result:
    """Score one pickled item. The first function that fails makes the whole item an error: a failure is not a reward of 0."""
    parts: list[float] = []
    total, abstained, name = 0.0, True, ""
    try:
        item = pickle.loads(blob)
        for function in functions:
            name = function.name
            value = function(*item)
            parts.append(math.nan if value is None else value)
            if value is not None:
                total, abstained = total + function.weight * value, False
        if not math.isfinite(total):
            raise ValueError(f"the weighted sum is {total}")
        _within_float32(total, f"the weighted sum is {total:g}")
    except BaseException as error:
        return "error", math.nan, parts, f"{name}: {describe(error)}" if name else describe(error)
    return ("abstain", math.nan, parts, "all reward functions abstained") if abstained else ("score", total, parts, "")


def describe(error: BaseException) -> str:
    """An exception as one short line."""
    try:
        text = str(error)
    except BaseException:
        text = "(its message cannot be read)"
    line = " ".join(f"{type(error).__name__}: {text[: 4 * _MAX_MESSAGE]}".split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
