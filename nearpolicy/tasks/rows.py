"""Rows of a task, and the task read from files.

A row is a prompt (a string, or chat messages) and the columns its verifier reads. Files are read and checked whole before any model is
loaded; every complaint names file and line. Reward workers may import this module: no torch.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nearpolicy.errors import DataError, UsageError
from nearpolicy.tasks.functions import Reward, RewardSpec
from nearpolicy.tasks.readers import read_records

__all__ = ["Columns", "FileTask", "ListRows", "Message", "Reward", "RewardSpec", "Row", "Task", "TaskRows", "load_rows", "split_heldout"]

Message = dict[str, Any]
"""A chat message: `role` and `content`."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "reward_model.ground_truth")
DEMONSTRATION_COLUMNS = ("demonstration", "completion", "response")
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a task."""

    id: str
    """Unique within the task."""
    prompt: str | list[Message]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What the verifier may read. `answer` is set whenever the data has one under any of its names; the other columns are as they were."""


class TaskRows(Protocol):
    """A sequence of rows, finite or made on the fly without end."""

    size: int | None
    """Number of rows; None is endless (`len` then raises TypeError)."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def row(self, i: int) -> Row:
        """Row i >= 0, always the same for the same i. IndexError outside."""
        ...


class Task(Protocol):
    """What is trained on: prompts, held-out prompts, and how responses are rewarded."""

    @property
    def train(self) -> TaskRows:
        """Rows trained on."""
        ...

    @property
    def heldout(self) -> TaskRows:
        """Rows for evaluation only."""
        ...

    @property
    def reward(self) -> RewardSpec:
        """The reward used when the configuration names none."""
        ...

    def demonstration(self, row: Row, index: int = 0) -> str | None:
        """A solution for supervised training, a function of (row, index); None when the task has none."""
        ...


class ListRows:
    """Rows held in memory."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = tuple(rows)
        self.size: int | None = len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> Row:
        """Row i, 0 <= i < size; IndexError outside."""
        if i < 0:
            raise IndexError(f"row {i}")
        return self._rows[i]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns to read; None looks for the usual ones, in order. A dot goes into a nested record."""

    prompt: str | None = None
    """None: prompt, question, problem, messages."""
    answer: str | None = None
    """None: answer, ground_truth, solution, reward_model.ground_truth."""
    id: str | None = None
    """None: `id` where there is one, else file and line."""
    adapt: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
    """(place, record) -> the record that is read in its stead; it may refuse one with a DataError."""


def load_rows(path: str | Path, *, columns: Columns | None = None, needs_answer: bool = False, split: str | None = None) -> list[Row]:
    """All rows of a file or folder (see `read_records`), checked.

    Args:
        needs_answer: a row without an answer is an error (the verifier reads it).
        split: split of a dataset folder.
    Raises:
        DataError: no rows, columns that are not there, a prompt that is neither text nor messages, a row without an answer, two rows of one
            id, or contents that cannot be read.
        UsageError: a package that is not installed.
    """
    columns = columns or Columns()
    rows: list[Row] = []
    seen: dict[str, str] = {}
    names: tuple[str, str | None] | None = None
    for where, record in read_records(path, split=split):
        record = columns.adapt(where, record) if columns.adapt else record
        names = names or _find_columns(path, record, columns, needs_answer)
        row = _row(where, record, names, columns.id, needs_answer)
        if row.id in seen:
            raise DataError(where, got=f"the id {row.id!r} of {seen[row.id]} again", expected="ids that differ", do="Make them unique.")
        seen[row.id] = where
        rows.append(row)
    if not rows:
        raise DataError(f"Data {path}", got="no rows: it is empty", expected="at least one row", do="Fill it or correct the path.")
    return rows


def _find_columns(path: str | Path, record: dict[str, Any], columns: Columns, needs_answer: bool) -> tuple[str, str | None]:
    """Names of the prompt and answer columns, from the first record."""

    def find(kind: str, name: str | None, usual: Sequence[str]) -> str | None:
        candidates = [name] if name else usual
        for candidate in candidates:
            if _get(record, candidate) is not _MISSING:
                return candidate
        if name is None and kind == "answer" and not needs_answer:
            return None
        raise DataError(f"Data {path}", got=f"the columns {', '.join(record) or '(none)'}", expected=f"a column {' or '.join(candidates)}",
                        do=f"Rename it, or set task.{kind}_column.")  # fmt: skip

    prompt = find("prompt", columns.prompt, PROMPT_COLUMNS)
    assert prompt is not None
    return prompt, find("answer", columns.answer, ANSWER_COLUMNS)


_MISSING = object()


def _get(record: Mapping[str, Any], name: str) -> Any:
    """A column; a dotted name goes into nested records unless a column has that very name."""
    if name in record:
        return record[name]
    found: Any = record
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _row(where: str, record: dict[str, Any], names: tuple[str, str | None], id_column: str | None, needs_answer: bool) -> Row:
    prompt_name, answer_name = names
    prompt = _checked_prompt(where, prompt_name, _get(record, prompt_name))
    columns = {key: value for key, value in record.items() if key != prompt_name}
    if answer_name is not None:
        answer = _get(record, answer_name)
        if answer is _MISSING or answer is None or answer == "" or answer == []:
            if needs_answer:
                raise DataError(where, got=f"no {answer_name}", expected="an answer in every row, which the reward reads", do="Fill or drop the row.")
        else:
            columns["answer"] = answer
    given = _get(record, id_column or "id")
    if given is _MISSING or given is None:
        if id_column:
            raise DataError(where, got=f"no {id_column}", expected="an id in every row", do="Fill it, or leave the id column unset.")
        given = where
    return Row(str(given), prompt, columns)


def _checked_prompt(where: str, name: str, prompt: Any) -> str | list[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise DataError(f"{where}: {name}", got=repr(message)[:_MAX_SHOWN], expected="messages with text under role and content",
                                do="Mend or drop the row.")  # fmt: skip
        if prompt[-1]["role"] == "assistant":
            raise DataError(f"{where}: {name}", got="messages that end with the assistant's", expected="a turn for the model to answer",
                            do="Cut the last message, or keep it in a column of its own.")  # fmt: skip
        return [dict(message) for message in prompt]
    shown = "nothing" if prompt is _MISSING or prompt is None else repr(prompt)[:_MAX_SHOWN]
    raise DataError(f"{where}: {name}", got=shown, expected="a text or a list of messages", do="Mend or drop the row.")


def split_heldout(rows: Sequence[Row], heldout: float, *, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Split rows into (train, heldout) by a keyed hash of the prompt, each part in file order.

    Equal prompts fall on one side, so a repeated prompt never leaks. The prompts with the lowest hashes are held out: which of two prompts
    goes first depends on the seed and on them alone, not on the order of the file.

    Args:
        heldout: a fraction in (0, 1) of the distinct prompts (rounded up), or a whole number >= 1 of them.
    Raises:
        UsageError: a number outside these bounds.
        DataError: nothing would be left to train on.
    """
    if not (0 < heldout < 1 or (heldout >= 1 and heldout == int(heldout))):
        raise UsageError("Held-out rows", got=heldout, expected="a fraction in (0, 1) or a whole number >= 1", do="Set task.heldout.")
    keys = [_prompt_hash(row.prompt, seed) for row in rows]
    distinct = sorted(set(keys))
    count = math.ceil(len(distinct) * heldout) if heldout < 1 else int(heldout)
    if count >= len(distinct):
        raise DataError("Held-out rows", got=f"{count} of {len(distinct)} distinct prompts", expected="some left to train on",
                        do="Lower task.heldout, add rows or name a held-out file.")  # fmt: skip
    limit = distinct[count]
    return [r for r, k in zip(rows, keys, strict=True) if k >= limit], [r for r, k in zip(rows, keys, strict=True) if k < limit]


def _prompt_hash(prompt: str | list[Message], seed: int) -> bytes:
    text = json.dumps(prompt, sort_keys=True)
    return hashlib.blake2b(text.encode(), key=f"heldout {seed}".encode(), digest_size=16).digest()


class FileTask:
    """A task read from files.

    Args:
        path: file or folder of the rows (`read_records`).
        heldout_path: file or folder of the held-out rows; None splits `heldout` of the rows off (`split_heldout`).
        columns: names of the columns to read.
        reward: the reward; its functions are imported here, to learn whether they read the answer.
        split: (train, held-out) splits of dataset folders.
        answers: False takes rows without an answer although the reward reads it.
    Raises:
        DataError, UsageError: as `load_rows` and `split_heldout`; with `heldout_path`, ids need only differ within each file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        heldout_path: str | Path | None = None,
        heldout: float = 256,
        columns: Columns | None = None,
        reward: RewardSpec | None = None,
        split: tuple[str | None, str | None] = (None, None),
        seed: int = 0,
        answers: bool = True,
    ) -> None:
        self.reward = reward or RewardSpec.single("number")
        needs_answer = answers and self.reward.needs_answer
        rows = load_rows(path, columns=columns, needs_answer=needs_answer, split=split[0])
        held: list[Row] = []
        if heldout_path is not None:
            held = load_rows(heldout_path, columns=columns, needs_answer=needs_answer, split=split[1])
        elif heldout:
            rows, held = split_heldout(rows, heldout, seed=seed)
        self.train, self.heldout = ListRows(rows), ListRows(held)

    def demonstration(self, row: Row, index: int = 0) -> str | None:
        """The row's column demonstration, completion or response, whichever comes first; None when it has none of them."""
        return next((str(row.columns[name]) for name in DEMONSTRATION_COLUMNS if row.columns.get(name)), None)
