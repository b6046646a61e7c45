"""Runs that differ by their seed alone, as one: mean of every column, with the range over seeds as `<metric>/low` and `<metric>/high`."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nearpolicy.report.read import Alarm, Column, Counts, Run

HISTOGRAM_CELLS = 8
"""Cells of one page up to which histograms are drawn: their size grows with cells x steps."""


class Cell(NamedTuple):
    """One line of the page's legend."""

    name: str
    runs: Sequence[Run]
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = {}
    """Metric -> (mean, low, high) at each of its steps, in place of the mean and range over seeds."""


def together(cell: Cell, *, histograms: bool) -> Run:
    """The runs of a cell as one run: columns at the steps that all seeds logged, counts of histograms summed, alarms of all."""
    first = cell.runs[0]
    names = [n for n in first.columns if all(n in run.columns for run in cell.runs) and not n.endswith(("/low", "/high"))]
    columns: dict[str, Column] = {}
    for name in names:
        steps, table = _aligned([run.columns[name] for run in cell.runs])
        if not steps:
            continue
        given = cell.bands.get(name)
        rows = [*map(list, zip(*given, strict=True))] if given and len(given) == len(steps) else [table.mean(0), table.min(0), table.max(0)]
        columns[name] = Column(steps, [_number(v) for v in rows[0]])
        if len(cell.runs) > 1 or given:
            columns[f"{name}/low"], columns[f"{name}/high"] = (Column(steps, [_number(v) for v in row]) for row in rows[1:])
    ends = [run.status for run in cell.runs]
    status = "finished" if all(s == "finished" for s in ends) else f"{ends.count('finished')} of {len(ends)} finished"
    return Run(
        name=cell.name, path=first.path, status=status, status_message="", steps=first.steps,
        seconds=sum(run.seconds for run in cell.runs) / len(cell.runs), columns=columns, histograms=_summed(cell.runs) if histograms else {},
        edges=first.edges, specs=first.specs, alarms=sorted({Alarm(a.step, a.alarm, f"seed {_seed(run)}: {a.message}") for run in cell.runs
                                                             for a in run.alarms}),
        tables=_averaged(cell.runs) if histograms else {}, position_edges=first.position_edges,
        config=first.config, config_text=first.config_text, environment=first.environment, samples=[],
        notes=[f"{run.name}: {note}" for run in cell.runs for note in run.notes],
    )  # fmt: skip


def _aligned(columns: Sequence[Column]) -> tuple[list[int], Counts]:
    """(steps that all have, values [seeds, steps]); NaN = not a number there."""
    shared = sorted(set(columns[0].step).intersection(*(c.step for c in columns[1:])))
    rows = [dict(zip(c.step, c.value, strict=True)) for c in columns]
    return shared, np.array([[math.nan if (v := row[s]) is None else v for s in shared] for row in rows], dtype=np.float64)


def _summed(runs: Sequence[Run]) -> dict[str, list[tuple[int, Counts]]]:
    """Histogram counts of all seeds together: fixed bins add exactly."""
    out: dict[str, list[tuple[int, Counts]]] = {}
    for name in runs[0].histograms:
        by_step = [dict(run.histograms.get(name, [])) for run in runs]
        shared = [s for s in by_step[0] if all(s in rows and len(rows[s]) == len(by_step[0][s]) for rows in by_step)]
        out[name] = [(s, np.sum([rows[s] for rows in by_step], 0)) for s in shared]
    return out


def _averaged(runs: Sequence[Run]) -> dict[str, list[tuple[int, list[float | None]]]]:
    """Values by position: the mean over the seeds that have one in that bin."""
    out: dict[str, list[tuple[int, list[float | None]]]] = {}
    for name in runs[0].tables:
        by_step = [dict(run.tables.get(name, [])) for run in runs]
        for step, values in runs[0].tables[name]:
            rows = [own[step] for own in by_step if step in own and len(own[step]) == len(values)]
            bins = [[v for v in column if v is not None] for column in zip(*rows, strict=True)]
            out.setdefault(name, []).append((step, [sum(b) / len(b) if b else None for b in bins]))
    return out


def _seed(run: Run) -> object:
    return run.setting("seed")


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
