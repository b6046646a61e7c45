"""Reads one run directory into plain Python values. No torch, and nothing is written.

Files: `metrics.jsonl` (needed), `run.toml`, `env.json`, `metrics_table.json`, `histogram_edges.json`, `position_edges.json`,
`truncation_tokens.json`, `rollouts/*.jsonl.gz` (all optional: a missing or broken one becomes a note on the page, because a report of half a
run is worth more than none).

A row of `metrics.jsonl` is `{"step", "kind", "time", name: value, ...}`. `step` counts optimizer updates, `time` is in seconds since the
start, `kind` is `train`, `eval`, `alarm` (`alarm`, `message`) or `event` (`event`, `message`). The events that matter here are `finished`,
`interrupted` and `failed`; a run without one of them after its last update is still running or was killed.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearpolicy.errors import DataError
from nearpolicy.report.samples import Sample, read_samples

ENDED = ("finished", "interrupted", "failed")
"""Events that end a run."""
UNENDED = "no end recorded"
"""Status of a run without one: it is still running, or was killed."""

MOST_BINS = 100
"""Longest list that is read as values by position."""

Counts = np.ndarray[Any, np.dtype[np.float64]]
"""Histogram counts of one step, float64 [bins]."""

_RESERVED = frozenset({"step", "kind", "time"})


class Column(NamedTuple):
    """One metric over the run: `step` ascending, `value` None where the metric was not a finite number."""

    step: list[int]
    value: list[float | None]

    @property
    def finite(self) -> list[float]:
        """The values that are numbers, in order."""
        return [v for v in self.value if v is not None]


class Alarm(NamedTuple):
    """A metric left its band at this step."""

    step: int
    alarm: str
    message: str


class Spec(NamedTuple):
    """What a metric name means; empty strings for names that the run's table lacks."""

    unit: str = ""
    direction: str = "none"
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything the report shows of one run."""

    name: str
    path: Path
    status: str
    """One of `ENDED`, or `UNENDED`."""
    status_message: str
    steps: int
    """Optimizer updates done."""
    seconds: float
    """Wall time of the logged rows; time between an interruption and its resume is left out."""
    columns: dict[str, Column]
    histograms: dict[str, list[tuple[int, Counts]]]
    """Metric name -> (step, counts) in order of steps."""
    edges: dict[str, list[float]]
    specs: dict[str, Spec]
    alarms: list[Alarm]
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    samples: list[Sample]
    notes: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    tables: dict[str, list[tuple[int, list[float | None]]]] = field(default_factory=dict)
    """`position/quantity/axis` -> (step, value of each bin) in order of steps."""
    position_edges: dict[str, list[float]] = field(default_factory=dict)
    """Axis -> inner borders of its bins."""
    truncation: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Cut strategy -> `{"responses", "uncut", "finished", "last_kept", "first_new"}`, the last two as (text, token id, count)."""

    def spec(self, name: str) -> Spec:
        """Meaning of a metric; a derived name (`x/p50`, `x/low`) takes that of `x`."""
        return self.specs.get(name) or self.specs.get(name.rpartition("/")[0]) or Spec()

    def setting(self, dotted: str) -> Any:
        """A value of the resolved configuration (`"method.name"`), or None."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(path: Path, *, name: str | None = None) -> Run:
    """Read the run directory `path`.

    Raises:
        DataError: `path` is not a directory, or holds no `metrics.jsonl` with at least one whole train or eval row.
    """
    path = Path(path)
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        got = "no such directory" if not path.is_dir() else "a directory without metrics.jsonl"
        raise DataError(f"report: {path}", got=got, expected="a run directory", do="Name the directory given to `nearpolicy train --out`.")
    notes: list[str] = []
    rows = _Rows()
    try:
        for row in _json_lines(metrics, notes):
            rows.add(row)
    except OSError as error:
        raise DataError(f"report: {metrics}", got=str(error), expected="a readable file", do="Check its permissions.") from None
    if not rows.values and not rows.histograms:
        raise DataError(f"report: {metrics}", got="no whole train or eval row", expected="at least one", do="Wait for the first update of the run.")
    config_text = _text(path / "run.toml", notes)
    table = read_json(path / "metrics_table.json", notes, optional=True)
    edges = read_json(path / "histogram_edges.json", notes, optional=True)
    environment = read_json(path / "env.json", notes)
    return Run(
        name=name or path.resolve().name,
        path=path,
        status=rows.status,
        status_message=rows.status_message,
        steps=rows.steps,
        seconds=rows.seconds,
        columns={key: Column(*map(list, zip(*sorted(values.items()), strict=True))) for key, values in rows.values.items()},
        histograms={key: [(step, values[step]) for step in sorted(values)] for key, values in rows.histograms.items()},
        edges=_edges(edges),
        specs=_specs(table),
        alarms=sorted(rows.alarms),
        config=_toml(config_text, notes),
        config_text=config_text,
        environment=environment if isinstance(environment, dict) else {},
        samples=read_samples(path / "rollouts", notes),
        notes=notes,
        tables={key: [(step, values[step]) for step in sorted(values)] for key, values in rows.tables.items()},
        position_edges=_edges(read_json(path / "position_edges.json", notes, optional=True)),
        truncation=_truncation(read_json(path / "truncation_tokens.json", notes, optional=True)),
    )


class _Rows:
    """Folds rows into columns. A step logged twice (a resumed run) keeps its later values."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float | None]] = {}
        self.histograms: dict[str, dict[int, Counts]] = {}
        self.tables: dict[str, dict[int, list[float | None]]] = {}
        self.alarms: set[Alarm] = set()
        self.status, self.status_message = UNENDED, ""
        self.steps, self.seconds, self._last = 0, 0.0, 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        step, kind = int(row["step"]), row["kind"]
        self._clock(row.get("time"))
        if kind == "alarm":
            self.alarms.add(Alarm(step, str(row.get("alarm", "alarm")), str(row.get("message", ""))))
        elif kind == "event":
            if row.get("event") in ENDED:
                self.status, self.status_message = str(row["event"]), str(row.get("message") or "")
        elif kind in ("train", "eval"):
            if kind == "train":
                self.status, self.status_message = UNENDED, ""
            self.steps = max(self.steps, step)
            for name, value in row.items():
                if name not in _RESERVED:
                    self._value(name, step, value)

    def _value(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, list):
            if name.endswith("/hist") and (counts := _counts(value)) is not None:
                self.histograms.setdefault(name.removesuffix("/hist"), {})[step] = counts
            elif name.startswith("position/") and len(value) <= MOST_BINS and all(v is None or _is_number(v) for v in value):
                self.tables.setdefault(name, {})[step] = value
        elif value is None or _is_number(value):
            self.values.setdefault(name, {})[step] = float(value) if _is_number(value) else None

    def _clock(self, time: Any) -> None:
        if _is_number(time) and time >= 0:
            # A clock that jumped back was restarted by a resume: its time counts from zero again.
            self.seconds += time - self._last if time >= self._last else time
            self._last = time


def _edges(document: Any) -> dict[str, list[float]]:
    """Lists of numbers by name; what is none is left out."""
    return {str(k): v for k, v in document.items() if isinstance(v, list)} if isinstance(document, dict) else {}


def _truncation(document: Any) -> dict[str, dict[str, Any]]:
    """Counts of the tokens at the cuts by strategy; strategies that are not whole are left out."""
    out: dict[str, dict[str, Any]] = {}
    for strategy, own in document.items() if isinstance(document, dict) else ():
        try:
            sides = {s: [(str(text), int(token), int(count)) for text, token, count in own[s]] for s in ("last_kept", "first_new")}
            out[str(strategy)] = {**{name: int(own[name]) for name in ("responses", "uncut", "finished")}, **sides}
        except (KeyError, TypeError, ValueError):
            continue
    return out


def _counts(value: list[Any]) -> Counts | None:
    """Histogram counts [bins]; None unless all are finite and not negative."""
    try:
        counts = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return counts if counts.ndim == 1 and bool((np.isfinite(counts) & (counts >= 0)).all()) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _json_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Whole rows of a metrics file; anything else is skipped and said in `notes`."""
    bad: list[int] = []
    number = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                whole = isinstance(row, dict) and isinstance(row["step"], int) and isinstance(row["kind"], str)
            except (ValueError, KeyError, RecursionError):
                whole = False
            if whole:
                yield row
            else:
                bad.append(number)
    if bad == [number]:
        notes.append(f"{path.name}: the last line is incomplete and was skipped (the run was killed while writing it).")
    elif bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{path.name}: {len(bad)} lines are not whole rows and were skipped (line {shown}).")


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    return ""


def _toml(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.append(f"run.toml is not valid TOML: {error}.")
        return {}


def read_json(path: Path, notes: list[str], *, optional: bool = False) -> Any:
    """A file's JSON; None, and a note, when it cannot be read (no note for a missing `optional` one)."""
    if optional and not path.exists():
        return None
    text = _text(path, notes)
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} is not valid JSON: {error}.")
        return None


def _specs(table: Any) -> dict[str, Spec]:
    """The run's own table of metrics (a list of {name, unit, direction, text, trl})."""
    rows = [row for row in table if isinstance(row, dict) and "name" in row] if isinstance(table, list) else []
    return {
        str(row["name"]): Spec(str(row.get("unit") or ""), str(row.get("direction") or "none"), str(row.get("text") or "")) for row in rows
    }  # fmt: skip
