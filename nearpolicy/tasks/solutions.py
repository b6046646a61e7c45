"""Where demonstrations come from: the task itself, a column of its data, or a file of solutions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nearpolicy.errors import DataError, UsageError
from nearpolicy.rollout import Prompt
from nearpolicy.tasks.arithmetic import ArithmeticTask
from nearpolicy.tasks.readers import read_records
from nearpolicy.tasks.rows import DEMONSTRATION_COLUMNS, Task

Solutions = Callable[[Prompt], Sequence[Any]]
"""Prompt -> worked solutions, texts or lists of token ids; empty where there are none."""

SOLUTION_COLUMNS = (*DEMONSTRATION_COLUMNS, "solution", "solutions")


def of_task(task: Task) -> Solutions:
    """The task's own right solutions: the arithmetic task writes them out (long, then short), data files have them in a column
    (demonstration, completion or response).

    Raises:
        UsageError: the task has none.
    """
    if isinstance(task, ArithmeticTask):

        def written(prompt: Prompt) -> list[str]:
            text = str(prompt.columns["prompt"])
            strategy = None if task.strategies is None else task.hidden_strategy(text)
            return [task.solution(text, long=long, strategy=strategy) for long in (True, False)]

        return written
    row = task.train.row(0)
    name = next((name for name in DEMONSTRATION_COLUMNS if row.columns.get(name)), None)
    if name is None:
        raise UsageError("rollout.demonstrations", got=f"a task whose rows have none ({', '.join(row.columns) or 'no columns'})",
                         expected=" or ".join(DEMONSTRATION_COLUMNS), do="Set rollout.demonstrations.column or .path.")  # fmt: skip
    return of_column(name)


def of_column(name: str) -> Solutions:
    """The solutions in this column of the task's data: a text, a list of token ids, or a list of several of either."""
    return lambda prompt: several(prompt.columns.get(name))


def of_file(path: str | Path, column: str | None = None) -> Solutions:
    """The solutions in a file of records (see `read_records`), found by `id`, else by `prompt`; several records of one row add up.

    Args:
        column: holds the solution; None takes the first of `SOLUTION_COLUMNS` that the record has.
    Raises:
        DataError: a file that cannot be read, or a record without id and prompt, or without a solution.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    for where, record in read_records(path):
        key = next(((name, str(record[name])) for name in ("id", "prompt") if record.get(name) is not None), None)
        names = [column] if column else SOLUTION_COLUMNS
        value = next((record[name] for name in names if record.get(name)), None)
        if key is None or value is None:
            raise DataError(where, got=f"the columns {', '.join(record) or '(none)'}", expected=f"id or prompt, and {' or '.join(names)}",
                            do="Mend the record, or set rollout.demonstrations.column.")  # fmt: skip
        found.setdefault(key, []).extend(several(value))
    if not found:
        raise DataError(f"Data {path}", got="no records: it is empty", expected="solutions", do="Fill it or correct the path.")

    def look_up(prompt: Prompt) -> list[Any]:
        return found.get(("id", prompt.id)) or found.get(("prompt", str(prompt.columns.get("prompt", prompt.text)))) or []

    return look_up


def several(value: Any) -> list[Any]:
    """One solution or a list of them as a list: a list of whole numbers is one solution in token ids."""
    if value is None or value == "":
        return []
    if isinstance(value, list | tuple) and not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return list(value)
    return [value] if isinstance(value, str) or value else []
