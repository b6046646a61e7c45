"""The comparison of a sweep's runs: numbers of each run, and of each cell with intervals by bootstrap over seeds and prompts.

A run's curve is its held-out score at each evaluation. From it:

    final      the last evaluation                           best   the highest
    auc        area under the curve over updates / updates   drop   the largest fall below an earlier evaluation
    equal_updates, equal_tokens   the score at the most updates, and the most sampled tokens, that every finished run reached; linear between
               evaluations, and of several evaluations with the same tokens the last counts

A cell's number is the mean over its finished runs. Its interval: seeds are drawn with replacement, and in each drawn seed its held-out
prompts (Efron 1979; two stages, Davison & Hinkley 1997, section 3.8); where all seeds share their prompts these are drawn once for all.
Every statistic is computed anew on each drawn curve, and the percentiles taken. A difference of two cells uses the same draws for both
over the seeds they share (with equal prompts), so what they have in common cancels; without shared seeds the draws are independent and it
is marked unpaired. With few seeds such intervals are too narrow: cells below `FEW` are marked. Largest and smallest values of noisy curves
(best, drop) are biased upwards, alike in all cells.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from nearpolicy.errors import DataError
from nearpolicy.report.read import Column, Run, read_run
from nearpolicy.sweep.experiment import Cell, Compare, Plan, PlannedRun, Statistic

Array = np.ndarray[Any, np.dtype[np.float64]]
FEW = 3
"""Cells with fewer finished seeds are marked in every table."""
STATISTICS = get_args(Statistic)
"""Numbers that get an interval."""


class Interval(NamedTuple):
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run of the plan came to. The arrays are empty unless it has finished."""

    planned: PlannedRun
    status: str
    """finished, failed, interrupted, or `not run`."""
    message: str
    commit: str
    step_E: Array
    """Updates done at each evaluation."""
    token_E: Array
    """Response tokens decoded until then."""
    value_EP: Array
    """Score of each held-out prompt; NaN = missing."""
    prompts: str
    """Digest of the held-out prompts."""
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether it counts."""
        return self.status == "finished"

    @property
    def key(self) -> tuple[int, str]:
        """What pairs it with a run of another cell."""
        return self.planned.seed, self.planned.group

    @property
    def score_E(self) -> Array:
        """The curve."""
        return np.nanmean(self.value_EP, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell: means over its finished runs."""

    cell: Cell
    runs: tuple[RunResult, ...]
    """All, finished or not."""
    statistics: dict[str, Interval]
    """Empty without a finished run."""
    collapsed: int
    """Finished runs whose last evaluation is below `compare.collapse` of their best."""
    reached: tuple[float, ...]
    """Updates to `compare.target` of each finished run, linear between evaluations; infinite when it was not reached."""
    groups: dict[str, float]
    """Settings that go with the seeds -> mean last evaluation."""
    step_E: Array
    curve_E: tuple[Interval, ...]
    token_E: Array

    @property
    def finished(self) -> tuple[RunResult, ...]:
        """The runs that count."""
        return tuple(r for r in self.runs if r.finished)

    @property
    def few(self) -> bool:
        """Fewer finished seeds than an interval needs."""
        return len(self.finished) < FEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A cell minus its baseline."""

    cell: Cell
    baseline: Cell
    seeds: int
    """Runs on the smaller side: pairs, where it is paired."""
    paired: bool
    statistics: dict[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything the tables and figures are made from."""

    plan: Plan
    cells: tuple[CellResult, ...]
    differences: tuple[Difference, ...]
    updates: float
    """Of the equal-updates view; NaN without a finished run."""
    tokens: float
    """Of the equal-tokens view."""

    @property
    def runs(self) -> list[RunResult]:
        """All runs in the order of the plan."""
        return [r for c in self.cells for r in c.runs]


def compare(plan: Plan, out: Path, *, runs: Mapping[str, Run] | None = None) -> Comparison:
    """Read the run directories of a sweep and compare its cells.

    Args:
        runs: run directories that were read before, by name.
    Raises:
        DataError: a finished run without the per-prompt results of its evaluations.
    """
    results = {p.name: read_result(p, out / "runs" / p.name, plan.experiment.compare.metric, (runs or {}).get(p.name)) for p in plan.runs}
    finished = [r for r in results.values() if r.finished]
    updates = min((float(r.step_E[-1]) for r in finished), default=math.nan)
    tokens = min((float(r.token_E[-1]) for r in finished), default=math.nan)
    options = plan.experiment.compare
    by_cell: dict[Cell, list[RunResult]] = {cell: [] for cell in plan.cells}
    for planned in plan.runs:
        by_cell[planned.cell].append(results[planned.name])
    cells = tuple(_cell_result(cell, members, options, updates, tokens) for cell, members in by_cell.items())
    differences = _differences(plan, cells, updates, tokens) if options.baseline else ()
    return Comparison(plan=plan, cells=cells, differences=tuple(differences), updates=updates, tokens=tokens)


def read_result(planned: PlannedRun, path: Path, metric: str, run: Run | None = None) -> RunResult:
    """One run directory as numbers."""
    empty = np.empty(0)
    status, message = "not run", ""
    if (path / "status.json").is_file():
        record = json.loads((path / "status.json").read_text(encoding="utf-8"))
        status, message = record["status"], record.get("message", "")
        status = "interrupted" if status == "running" else status
    if status != "finished":
        return RunResult(planned=planned, status=status, message=message, commit="", step_E=empty, token_E=empty, value_EP=empty.reshape(0, 0),
                         prompts="", seconds=math.nan)  # fmt: skip
    run = run or read_run(path)
    files = sorted((path / "evaluations").glob("step-*.json"))
    rows = [json.loads(f.read_text(encoding="utf-8")) for f in files]
    name = metric.removeprefix("eval/")
    if not rows or any(name not in row["values"] for row in rows):
        raise DataError(str(path), got=f"no {name} of each prompt in evaluations/", expected="one file for each evaluation", do="Run it again.")
    step_E = np.array([row["step"] for row in rows], dtype=np.float64)
    sampled = run.columns.get("data/tokens_sampled", Column([], []))
    known = [(s, v) for s, v in zip(sampled.step, sampled.value, strict=True) if v is not None]
    token_E = np.array([max((v for s, v in known if s <= step), default=0.0) for step in step_E])
    value_EP = np.array([[math.nan if v is None else v for v in row["values"][name]] for row in rows], dtype=np.float64)
    return RunResult(planned=planned, status=status, message="", commit=str(run.environment.get("commit") or "unknown"), step_E=step_E,
                     token_E=token_E, value_EP=value_EP, prompts=rows[-1]["prompts"], seconds=run.seconds)  # fmt: skip


def area(curve: Array, step_E: Array) -> Array:
    """Mean height under [..., E] curves over updates: trapezoids / updates; the value itself for a single evaluation."""
    return curve[..., 0] if len(step_E) == 1 else np.trapezoid(curve, step_E, axis=-1) / (step_E[-1] - step_E[0])


def largest_drop(curve: Array) -> Array:
    """Largest fall of [..., E] curves from an earlier evaluation to a later one; 0 for a curve that never falls."""
    return (np.maximum.accumulate(curve, -1) - curve).max(-1)


def reading(x_E: Array, x: float) -> Array:
    """Weights [E] that read a curve at x: linear between neighbours; of equal x_E the last; outside, the nearest end."""
    last = np.append(np.diff(x_E) > 0, True)
    places = np.flatnonzero(last)
    weight_E = np.zeros(len(x_E))
    at = float(np.interp(x, x_E[places], np.arange(len(places))))
    low = math.floor(at)
    weight_E[places[low]] += 1 - (at - low)
    if at > low:
        weight_E[places[low + 1]] += at - low
    return weight_E


def updates_to(step_E: Array, score_E: Array, target: float) -> float:
    """Updates until the curve first reaches `target`, linear between evaluations; infinite when it never does."""
    above = np.flatnonzero(score_E >= target)
    if not len(above):
        return math.inf
    e = int(above[0])
    if e == 0:
        return float(step_E[0])
    share = (target - score_E[e - 1]) / (score_E[e] - score_E[e - 1])
    return float(step_E[e - 1] + share * (step_E[e] - step_E[e - 1]))


def statistics_of(curve: Array, result: RunResult, updates: float, tokens: float) -> dict[str, Array]:
    """Every statistic of [..., E] curves of this run."""
    return {
        "final": curve[..., -1], "best": curve.max(-1), "auc": area(curve, result.step_E), "drop": largest_drop(curve),
        "equal_updates": curve @ reading(result.step_E, updates), "equal_tokens": curve @ reading(result.token_E, tokens),
    }  # fmt: skip


@lru_cache(maxsize=8)
def _prompt_weights(resamples: int, prompts: int, stream: int) -> Array:
    """How often each prompt is drawn, as shares, [resamples, prompts]."""
    return np.random.default_rng([stream, prompts]).multinomial(prompts, np.full(prompts, 1 / prompts), resamples) / prompts


def bootstrap(results: Sequence[RunResult], *, resamples: int, updates: float, tokens: float, stream: int = 0) -> dict[str, Array]:
    """Resampled cell means of every statistic [resamples], and of the curve (`curve`, [resamples, E]).

    Equal seeds and prompts in the same order give equal draws for an equal `stream`: that is what pairs two cells.
    """
    S, E = len(results), len(results[0].step_E)
    shared = len({r.prompts for r in results}) == 1
    run_BS = np.random.default_rng([stream, 1_000_003, S]).integers(S, size=(resamples, S))
    total = {name: np.zeros(resamples) for name in STATISTICS}
    curve_BE = np.zeros((resamples, E))
    for slot in range(S):
        for k, result in enumerate(results):
            rows = np.flatnonzero(run_BS[:, slot] == k)
            weight = _prompt_weights(resamples, result.value_EP.shape[1], 64 * stream + (0 if shared else slot + 1))[rows]
            known = ~np.isnan(result.value_EP)
            curve = (weight @ np.nan_to_num(result.value_EP).T) / np.maximum(weight @ known.T, 1e-12)
            curve_BE[rows] += curve
            for name, value in statistics_of(curve, result, updates, tokens).items():
                total[name][rows] += value
    return {**{name: value / S for name, value in total.items()}, "curve": curve_BE / S}


def _interval(mean: float, resampled: Array, level: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, min(float(low), mean), max(float(high), mean))


def _means(results: Sequence[RunResult], updates: float, tokens: float) -> dict[str, float]:
    each = [statistics_of(r.score_E, r, updates, tokens) for r in results]
    return {name: float(np.mean([e[name] for e in each])) for name in STATISTICS}


def _cell_result(cell: Cell, runs: Sequence[RunResult], options: Compare, updates: float, tokens: float) -> CellResult:
    done = [r for r in runs if r.finished]
    none = np.empty(0)
    if not done:
        return CellResult(cell=cell, runs=tuple(runs), statistics={}, collapsed=0, reached=(), groups={}, step_E=none, curve_E=(), token_E=none)
    if any(not np.array_equal(r.step_E, done[0].step_E) for r in done):
        raise DataError(f"cell {cell.name}", got="seeds that were evaluated at different updates", expected="the same in one cell",
                        do="Take train.steps and eval.every out of the seeds' settings.")  # fmt: skip
    drawn = bootstrap(done, resamples=options.resamples, updates=updates, tokens=tokens)
    scores = [r.score_E for r in done]
    mean_E = np.mean(scores, 0)
    by_group: dict[str, list[float]] = {}
    for r in done:
        by_group.setdefault(r.planned.group, []).append(float(r.score_E[-1]))
    return CellResult(
        cell=cell, runs=tuple(runs),
        statistics={name: _interval(mean, drawn[name], options.level) for name, mean in _means(done, updates, tokens).items()},
        collapsed=sum(bool(s[-1] < options.collapse * s.max()) for s in scores),
        reached=tuple(updates_to(r.step_E, r.score_E, options.target) for r in done),
        groups={g: float(np.mean(v)) for g, v in by_group.items()},
        step_E=done[0].step_E, curve_E=tuple(_interval(float(m), drawn["curve"][:, e], options.level) for e, m in enumerate(mean_E)),
        token_E=np.mean([r.token_E for r in done], 0),
    )  # fmt: skip


def _differences(plan: Plan, cells: Sequence[CellResult], updates: float, tokens: float) -> list[Difference]:
    """Every cell minus the cell that has the baseline's labels instead of its own."""
    options = plan.experiment.compare
    by_labels = {c.cell.labels: c for c in cells}
    out = []
    for c in cells:
        labels = tuple(options.baseline.get(axis, label) for axis, label in zip(plan.axes, c.cell.labels, strict=True))
        other = by_labels[labels]
        if labels != c.cell.labels and c.finished and other.finished:
            out.append(difference(c, other, options, updates, tokens))
    return out


def difference(a: CellResult, b: CellResult, options: Compare, updates: float, tokens: float) -> Difference:
    """a - b: over the seeds they share when there are any, else of all, with independent draws."""
    mine, theirs = ({r.key: r for r in c.finished} for c in (a, b))
    shared = [k for k in mine if k in theirs and mine[k].prompts == theirs[k].prompts]
    left = [mine[k] for k in shared] or list(a.finished)
    right = [theirs[k] for k in shared] or list(b.finished)
    draws = [bootstrap(rs, resamples=options.resamples, updates=updates, tokens=tokens, stream=stream)
             for rs, stream in ((left, 0), (right, 0 if shared else 1))]  # fmt: skip
    means = [_means(rs, updates, tokens) for rs in (left, right)]
    found = {n: _interval(means[0][n] - means[1][n], draws[0][n] - draws[1][n], options.level) for n in STATISTICS}
    return Difference(cell=a.cell, baseline=b.cell, seeds=min(len(left), len(right)), paired=bool(shared), statistics=found)
