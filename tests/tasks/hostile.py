"""A reward function that does whatever the completion says; loaded by file path into reward workers."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time


class _Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def _raise(error):
    raise error


def _hang_ignoring_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def _print_without_end():
    while True:
        print("x" * 10_000)
        sys.stderr.write("y" * 10_000)


def _write_junk():
    for fd in range(3, 32):
        with contextlib.suppress(OSError):
            os.write(fd, b"\x00\x00\x00\x05junk!")
    return [1.0]


def _fork_and_hang():
    if os.fork() == 0:
        with open(os.environ["HOSTILE_CHILD"], "w") as f:
            f.write(str(os.getpid()))
        time.sleep(60)
    time.sleep(60)


def _start(how, then):
    """A process in a session of its own: `plain`, with an empty environment (`bare`), or without its parent (`daemon`)."""
    command = ["sh", "-c", "echo $$ >> " + os.environ["HOSTILE_CHILD"] + "; exec sleep 60"]
    if how == "daemon":
        subprocess.run(["sh", "-c", "setsid " + " ".join([*command[:2], f"'{command[2]}'"]) + " &"], check=True)
    else:
        subprocess.Popen(command, start_new_session=True, env={"PATH": os.environ["PATH"]} if how == "bare" else None)
    while not os.path.exists(os.environ["HOSTILE_CHILD"]):
        time.sleep(0.01)
    return then()


def _hang_blocking_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(60)


def _close_everything():
    os.closerange(3, 256)
    time.sleep(60)


def _die_later():
    os.environ["HOSTILE"] = "1"
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return [1.0]


def _slow(seconds):
    time.sleep(seconds)
    return [1.0]


def _hog():
    held = []
    while True:
        held.append(bytearray(2**24))


ACTS = {
    "none": lambda: [None],
    "raise": lambda: _raise(ValueError("on\npurpose")),
    "unreadable": lambda: _raise(_Unreadable()),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "sys.exit": lambda: sys.exit(0),
    "nan": lambda: [float("nan")],
    "inf": lambda: [float("inf")],
    "two": lambda: [1.0, 0.0],
    "empty": list,
    "scalar": lambda: 1.0,
    "text": lambda: ["1.0"],
    "dict": lambda: {0: 1.0},
    "nothing": lambda: None,
    "unpicklable": lambda: [lambda: 0],
    "recursion": lambda: ACTS["recursion"](),
    "memory": lambda: [float(len(bytearray(2**45)))],
    "hog": _hog,
    "power": lambda: [float(len(str(eval("10**10**10"))))],
    "regex": lambda: [float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))],
    "sleep": lambda: time.sleep(60),
    "sigterm": _hang_ignoring_sigterm,
    "print": _print_without_end,
    "fork": _fork_and_hang,
    "blocked": _hang_blocking_signals,
    "huge": lambda: [1e300],
    "large": lambda: [3e38],
    "plain": lambda: _start("plain", lambda: [1.0]),
    "bare": lambda: _start("bare", lambda: [1.0]),
    "daemon": lambda: _start("daemon", lambda: [1.0]),
    "plain_hang": lambda: _start("plain", lambda: time.sleep(60)),
    "plain_exit": lambda: _start("plain", lambda: os._exit(3)),
    "close": _close_everything,
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "junk": _write_junk,
    "alarm": _die_later,
    "pause": lambda: _slow(0.2),
    "torch": lambda: [float("torch" in sys.modules)],
    "hello": lambda: print("hello " * 100_000) or [0.5],
    "pid": lambda: [float(os.getpid())],
}


def act(prompts, completions, log=None, **columns):
    """The act that the completion names, or the number that it is."""
    (completion,) = completions
    if log is not None:
        with open(log, "a") as f:
            f.write(completion + "\n")
    name = completion.partition(" ")[0]
    return ACTS[name]() if name in ACTS else [float(completion)]


def half(completions):
    """Names no prompts and takes no columns."""
    return [0.5 for _ in completions]


def only_odd(prompts, completions, **columns):
    """Abstains on even numbers."""
    return [1.0 if int(c) % 2 else None for c in completions]


def seen(prompts, completions, answer, metadata=None, bonus=0, **columns):
    """Fails unless everything arrives as TRL hands it over."""
    assert completions == [[{"role": "assistant", "content": "hi"}]]
    assert prompts == [[{"role": "user", "content": "p"}]]
    assert (answer, metadata, columns) == (["7"], [{"a": [1]}], {"level": [3]})
    return [bonus]


NOT_A_FUNCTION = 3
