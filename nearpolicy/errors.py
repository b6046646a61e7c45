"""The few kinds of error a user can cause. Every message says what failed, what was got, what was expected and what to do.

The command line prints the message as one line and exits with `exit_code`; `--debug` shows the traceback. Each error is also the
built-in kind a Python caller would catch (`ValueError`, `RuntimeError`).
"""

import difflib
from collections.abc import Iterable


class NearPolicyError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, got: object, expected: str, do: str) -> None:
        self.what, self.got, self.expected, self.do = what, got, expected, do
        super().__init__(" ".join(f"{what}: got {got}; expected {expected}. {do}".split()))


class UsageError(NearPolicyError, ValueError):
    """A wrong argument, option or configuration key."""

    exit_code = 2


class DataError(NearPolicyError, ValueError):
    """Rows, prompts, rollouts or log-probs that cannot be trained on."""


class CheckpointError(NearPolicyError, RuntimeError):
    """A model folder or checkpoint that cannot be read or written."""


class EngineError(NearPolicyError, RuntimeError):
    """A sampler, teacher, worker or reward function that failed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known names closest to `name`, or all of them when none is close."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "Known: " + ", ".join(choices) + "."
