"""Code tasks: the verifier `code`, which runs the program in a response against the tests of its row, and the task made of such rows.

A program is judged as nothing but what it does: outputs are compared here, outside the sandbox; assertions run in a process that the program
cannot reach (`nearpolicy.tasks.inside`). Reward workers load this: no torch.
"""

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearpolicy.errors import DataError, UsageError
from nearpolicy.tasks.functions import VERIFIERS, RewardSpec
from nearpolicy.tasks.programs import Case, RowTests, program_of, read_tests
from nearpolicy.tasks.rows import Columns, FileTask
from nearpolicy.tasks.sandbox import MEMORY_MB, TIMEOUT_S, TOTAL_S, Limits, Ran, Session, require, unavailable
from nearpolicy.tasks.verifiers import text_of

PROBLEMS = "problems"
"""Path of the problems that come with the package: 24 to train on, 6 held out."""
TOLERANCE = 1e-6
"""Relative and absolute difference at which two decimals are equal."""
_DATA = Path(__file__).parent / "data"
_MARGIN_S = 2.0
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_SAMPLE_INTRODUCTION = "Your code should pass tests like this one:"


# ------------------------------------------------------------------------------------------------------------------ verifier


def code(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    timeout: float = TIMEOUT_S,
    total: float = TOTAL_S,
    memory_mb: int = MEMORY_MB,
    partial: bool = False,
    allow_unsandboxed: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the program in the completion passes every test of the row, else 0.0; a completion without a program is 0.0.

    A program beyond its limits (time, memory, output, processes, files) is wrong, not unscored. Tests that are at fault themselves (they do
    not parse, raise before the program is asked, never call it) raise, so that the row is an error.

    Args:
        timeout: seconds for each test.
        total: seconds for all tests of a completion together; what has not begun by then has failed.
        memory_mb: MiB for the program.
        partial: the share of the tests passed instead of all or nothing; every test is then run.
        allow_unsandboxed: run programs without walls where there is no sandbox. They can then do whatever this process may do.
    Raises:
        ValueError: a row without tests or with tests at fault.
        UsageError: no sandbox, or options out of range. EngineError: a sandbox that does not start.
    """
    limits = _limits(timeout=timeout, total=total, memory_mb=memory_mb)
    require(unsandboxed=allow_unsandboxed)
    out: list[float | None] = []
    for i, completion in enumerate(completions):
        tests = read_tests({name: values[i] for name, values in columns.items()}, prompts[i])
        source = program_of(text_of(completion), tests)
        out.append(0.0 if source is None else _score(source, tests, limits, total, partial, allow_unsandboxed))
    return out


def _limits(*, timeout: float = TIMEOUT_S, total: float = TOTAL_S, memory_mb: int = MEMORY_MB, **_: Any) -> Limits:
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total <= 3600:
        raise UsageError("Reward code: total", got=repr(total), expected="seconds above 0, at most 3600", do="Change total.")
    return Limits(timeout=timeout, memory_mb=memory_mb)


def _warm_up(*, allow_unsandboxed: bool = False, **_: Any) -> None:
    require(unsandboxed=allow_unsandboxed)


code.warm_up = _warm_up  # type: ignore[attr-defined]


def _score(source: str, tests: RowTests, limits: Limits, total: float, partial: bool, allow_unsandboxed: bool) -> float:
    due, passed = time.monotonic() + total, 0
    # A sandbox where there is one: the flag allows to go without, it does not ask for it.
    with Session(source, limits, unsandboxed=allow_unsandboxed and bool(unavailable())) as session:
        every: tuple[Case | str, ...] = (*tests.cases, *tests.checks)
        for test in every:
            good = time.monotonic() < due and run_test(session, test, tests)
            passed += good
            if not good and (not partial or time.monotonic() >= due):
                break
    return passed / len(tests) if partial else float(passed == len(tests))


def run_test(session: Session, test: Case | str, tests: RowTests) -> bool:
    """Whether the session's program passes one case or check.

    Raises:
        ValueError: the tests are at fault.
    """
    if isinstance(test, str):
        done = session.check(test, entry=tests.entry, prelude=tests.prelude)
    else:
        done = session.run(test.given) if tests.function is None else session.call(tests.function, test.given)
    if done.end == "tests":
        raise ValueError(f"the row's tests are at fault: {done.message}")
    return done.end == "ok" and (isinstance(test, str) or right(done, test, script=tests.function is None))


def right(done: Ran, case: Case, *, script: bool) -> bool:
    """Whether what a program wrote or returned is what a case expects."""
    same = same_output if script else same_value
    return any(same(done.output, expected) for expected in case.expected)


def same_output(got: str, expected: str) -> bool:
    """Equal word by word (blanks and line breaks only separate); decimals by value, to `TOLERANCE`."""
    ours, theirs = got.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _close(a, b) for a, b in zip(ours, theirs, strict=True))


def _close(a: str, b: str) -> bool:
    if a.lstrip("-+").isdigit() and b.lstrip("-+").isdigit():
        return False  # whole numbers are exact
    if not (_DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b)):
        return False
    return math.isclose(float(a), float(b), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(got: Any, expected: Any) -> bool:
    """Equal as JSON would have it (tuples are lists, keys are text); numbers with a fraction to `TOLERANCE`."""
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(same_value(a, b) for a, b in zip(got, expected, strict=True))
    if isinstance(got, dict) and isinstance(expected, dict):
        ours, theirs = ({str(k): v for k, v in d.items()} for d in (got, expected))
        return ours.keys() == theirs.keys() and all(same_value(v, theirs[k]) for k, v in ours.items())
    if isinstance(got, float) and isinstance(expected, int | float) and not isinstance(expected, bool):
        try:
            return math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:
            return False
    return bool(got == expected)


# ---------------------------------------------------------------------------------------------------------------------- task


def code_task(path: str = PROBLEMS, *, heldout_path: str | None = None, heldout: float = 256, prompt_column: str | None = None,
              split: str | None = None, reward: RewardSpec | None = None) -> FileTask:  # fmt: skip
    """Rows with tests as a task (formats: `programs.read_tests`), each read and checked here.

    Args:
        path: file or folder, or `PROBLEMS`; the held-out problems are then their own.
        heldout, heldout_path, split: as for `FileTask`.
        reward: None is `code` with its defaults.
    Raises:
        DataError: as `load_rows`, and rows without tests, or with tests that do not parse. UsageError: as `FileTask`.
    """
    if path == PROBLEMS:
        path, heldout_path = str(_DATA / "problems.jsonl"), heldout_path or str(_DATA / "problems-heldout.jsonl")
    columns = Columns(prompt=prompt_column, adapt=adapt)
    return FileTask(path, heldout_path=heldout_path, heldout=heldout, columns=columns, reward=reward or RewardSpec.single("code"),
                    split=(split, split))  # fmt: skip


def adapt(where: str, record: dict[str, Any]) -> dict[str, Any]:
    """A record as `load_rows` takes it: a prompt that names the function, the id, a demonstration in a fenced block. Its tests are checked.

    Raises:
        DataError: no tests, or tests that make no sense.
    """
    record = dict(record)
    if "prompt" not in record and record.get("test_list") and isinstance(record.get("text"), str):
        record["prompt"] = record.pop("text")  # MBPP
    try:
        tests = read_tests(record, record.get("prompt"))
    except (ValueError, TypeError) as error:
        raise DataError(where, got=str(error), expected="tests in a format that is read (docs: code-tasks)", do="Mend or drop the row.") from None
    samples = record.get("test_list")
    if isinstance(samples, list | tuple) and samples and isinstance(record.get("prompt"), str) and not tests.prelude:
        record["prompt"] = f"{record['prompt'].rstrip()}\n\n{_SAMPLE_INTRODUCTION}\n\n{samples[0]}\n"
    if record.get("id") is None and record.get("task_id") is not None:
        record["id"] = record["task_id"]
    solution = record.get("canonical_solution") or (record.get("code") if record.get("test_list") else None)
    if isinstance(solution, str) and not record.get("demonstration"):
        record["demonstration"] = f"```python\n{(tests.prelude + solution).strip()}\n```"
    return record


def check_rewards(spec: RewardSpec, deadline_s: float) -> None:
    """Refuse rewards that run code where there is no sandbox, or whose tests may take longer than the reward's own deadline.

    A worker killed at its deadline leaves the response unscored; the verifier's own clock must strike first and score it 0.

    Raises:
        UsageError: naming the key.
    """
    for reward in spec.rewards:
        if reward.path != VERIFIERS["code"]:
            continue
        require(unsandboxed=bool(reward.options.get("allow_unsandboxed", False)))
        longest = reward.options.get("total", TOTAL_S) + _limits(**reward.options).timeout + _MARGIN_S
        if deadline_s < longest:
            raise UsageError("task.deadline", got=f"{deadline_s:g} s for a reward that runs code",
                             expected=f"at least {longest:g} s = total + timeout + {_MARGIN_S:g}", do="Raise it, or lower total.")  # fmt: skip
