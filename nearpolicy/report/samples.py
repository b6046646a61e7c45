"""Sample responses for the report: which rows of `rollouts/*.jsonl.gz` are worth reading.

A row is `{"step", "group", "sample", "prompt", "text", "tokens": [str], "logp_behavior": [nats], "version": [int], "weight": [float] | null,
"advantage", "reward": float | null, "outcome", "stop", "prefix_length", "source"}`. Of at most `MAX_STEPS` steps spread over the run, each
shows the responses that tell most: highest and lowest reward, smallest mean token weight, longest.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_STEPS = 4
"""Steps of which responses are shown."""
MAX_ROWS = 2_000
"""Rows read of one file: bounds the time on long runs."""

_COLUMNS = ("logp_behavior", "version", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response. The per-token columns are as long as `tokens`, or None when the row lacks them."""

    step: int
    group: int
    sample: int
    why: str
    """Why it was picked."""
    prompt: str
    tokens: list[str]
    logp_behavior: list[float | None] | None
    version: list[float | None] | None
    weight: list[float | None] | None
    advantage: float | None
    reward: float | None
    outcome: str
    stop: str
    prefix_length: int
    source: str


def read_samples(folder: Path, notes: list[str]) -> list[Sample]:
    """At most `MAX_STEPS` x 4 samples of the run, in order of steps; what cannot be read is said in `notes`."""
    files = spread(sorted(folder.glob("*.jsonl.gz"), key=_natural), MAX_STEPS) if folder.is_dir() else []
    by_step: dict[int, list[dict[str, Any]]] = {}
    for file in files:
        for row in _rows(file, notes):
            by_step.setdefault(row["step"], []).append(row)
    return [sample for step in spread(sorted(by_step), MAX_STEPS) for sample in _pick(by_step[step])]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)] if most > 1 else [items[-1]]


def _natural(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", path.name)], path.name


def _rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Whole rows. A killed run leaves a torn stream: what lies before the tear is used."""
    skipped = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines):
                if number >= MAX_ROWS:
                    break
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row
                else:
                    skipped += 1
    except (EOFError, OSError, zlib.error) as error:
        notes.append(f"rollouts/{path.name} is incomplete ({type(error).__name__}); the rows before the break are used.")
    if skipped:
        notes.append(f"rollouts/{path.name}: {skipped} lines are not whole rows and were skipped.")


def _pick(rows: list[dict[str, Any]]) -> list[Sample]:
    """The responses of one step that tell most, without repeats; ties go to the first row."""
    picks: dict[int, list[str]] = {}

    def choose(why: str, scores: list[float | None]) -> None:
        known = [i for i, s in enumerate(scores) if s is not None]
        if known:
            picks.setdefault(max(known, key=lambda i: scores[i] or 0.0), []).append(why)

    rewards = [_number(row.get("reward")) for row in rows]
    choose("highest reward", rewards)
    if len({r for r in rewards if r is not None}) > 1:
        choose("lowest reward", [None if r is None else -r for r in rewards])
    weights = [_mean(row.get("weight")) for row in rows]
    if len({w for w in weights if w is not None}) > 1:
        choose("smallest mean weight", [None if w is None else -w for w in weights])
    choose("longest", [float(len(t)) if isinstance(t := row.get("tokens"), list) else None for row in rows])
    return [_sample(rows[i], ", ".join(why)) for i, why in picks.items()] or [_sample(row, "first") for row in rows[:1]]


def _sample(row: dict[str, Any], why: str) -> Sample:
    raw = row.get("tokens")
    tokens = [str(t) for t in raw] if isinstance(raw, list) else [str(row.get("text", ""))]
    columns: dict[str, list[float | None] | None] = {}
    for name in _COLUMNS:
        value = row.get(name)
        columns[name] = [_number(v) for v in value] if isinstance(value, list) and len(value) == len(tokens) else None
    return Sample(
        step=row["step"], group=_integer(row.get("group")), sample=_integer(row.get("sample")), why=why,
        prompt=str(row.get("prompt", "")), tokens=tokens,
        logp_behavior=columns["logp_behavior"], version=columns["version"], weight=columns["weight"], advantage=_number(row.get("advantage")),
        reward=_number(row.get("reward")), outcome=str(row.get("outcome", "")), stop=str(row.get("stop", "")),
        prefix_length=_integer(row.get("prefix_length")), source=str(row.get("source", "")),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _mean(values: Any) -> float | None:
    numbers = [n for v in values if (n := _number(v)) is not None] if isinstance(values, list) else []
    return sum(numbers) / len(numbers) if numbers else None
