"""What the page's script draws: columns thinned to a budget, histograms summed over spans of steps, samples trimmed. JSON values only."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nearpolicy.report.charts import CHARTS, Chart, leftovers
from nearpolicy.report.positions import position_payload
from nearpolicy.report.read import Column, Run
from nearpolicy.report.samples import Sample

POINTS, TOKENS = 120_000, 16_000
"""Most points of all columns together and most sample tokens, at scale 1."""
CELLS, COLUMNS_OF_HEAT = 49, 90
"""Cells of a histogram (odd, so that equal values fall into the middle one), and steps (or spans of steps) of a heat map."""
PROMPT_CHARACTERS, MORE_CHARTS = 4_000, 120
"""Most characters of a sample's prompt, and most charts under "More metrics", at scale 1."""


def payload(runs: Sequence[Run], scale: float) -> dict[str, Any]:
    """Everything the script reads. `scale` in (0, 1] shrinks the budgets when a page came out too large."""
    extra = [banded(c, runs) for c in leftovers(n for run in runs for n in run.columns)[: max(int(MORE_CHARTS * scale), 1)]]
    charts = [banded(c, runs) for c in CHARTS if present(c, runs)]
    wanted = {m for c in (*charts, *extra) for m in c.metrics} | {n for run in runs for n in run.columns if n.startswith("eval/pass@")}
    columns = sum(len(wanted & run.columns.keys()) for run in runs)
    points = max(int(POINTS * scale / max(columns, 1)), 20)
    tokens = max(int(TOKENS * scale / max(sum(len(run.samples) for run in runs), 1)), 24)
    grids = {n: g for c in charts if c.kind in ("histogram", "heatmap") for n in c.metrics if (g := grid(runs, n)) is not None}
    return {
        "runs": [
            {
                "name": run.name,
                "alarms": [[a.step, a.alarm] for a in run.alarms[:500]],
                **shared_columns({n: c for n, c in run.columns.items() if n in wanted}, points),
                "histograms": {n: h for n, borders in grids.items() if (h := histogram(run, n, borders)) is not None},
                "positions": position,
                "samples": [trimmed(s, tokens, max(int(PROMPT_CHARACTERS * scale), 200)) for s in run.samples],
            }
            for run, position in zip(runs, position_payload(runs, scale), strict=True)
        ],
        "charts": [described(c, runs) for c in charts],
        "more": [described(c, runs) for c in extra],
    }


def present(chart: Chart, runs: Sequence[Run]) -> bool:
    """True when some run has something to draw in this chart."""
    if chart.kind in ("histogram", "heatmap"):
        return any(counted(run, chart.lines[0].metric) is not None for run in runs)
    if chart.kind == "passk":
        return any(len(pass_at_k(run)) > 1 for run in runs)
    wanted = [f"{line.metric}/p50" if chart.kind == "quantiles" else line.metric for line in chart.lines]
    return any(run.columns[m].finite for run in runs for m in wanted if m in run.columns)


def banded(chart: Chart, runs: Sequence[Run]) -> Chart:
    """The chart with a band for each line whose metric has `/low` and `/high` columns in some run."""
    if chart.kind != "lines":
        return chart
    names = {n for run in runs for n in run.columns}
    lines = [replace(x, low=f"{x.metric}/low", high=f"{x.metric}/high") if {f"{x.metric}/low", f"{x.metric}/high"} <= names else x
             for x in chart.lines]  # fmt: skip
    return replace(chart, lines=tuple(lines))


def described(chart: Chart, runs: Sequence[Run]) -> dict[str, Any]:
    """The chart with unit, direction and text of its first known metric."""
    known = [run.spec(line.metric) for line in chart.lines for run in runs]
    spec = next((s for s in known if s.text or s.unit), None)
    lines = [
        {"metric": line.metric, "label": line.label, "low": line.low, "high": line.high}
        for line in chart.lines
        if chart.kind != "lines" or any(line.metric in run.columns for run in runs)
    ]
    return {
        "id": chart.id, "section": chart.section, "title": chart.title, "kind": chart.kind, "log": chart.log, "smooth": chart.smooth, "lines": lines,
        "unit": "fraction" if chart.kind == "passk" else spec.unit if spec else "", "direction": spec.direction if spec else "none",
        "text": chart.text if chart.text is not None else spec.text if spec else "",
    }  # fmt: skip


def pass_at_k(run: Run) -> list[tuple[int, float]]:
    """(k, pass@k) of the last evaluation, in order of k."""
    out = []
    for name, column in run.columns.items():
        k = name.removeprefix("eval/pass@")
        if k != name and k.isdigit() and column.finite:
            out.append((int(k), column.finite[-1]))
    return sorted(out)


def shared_columns(columns: dict[str, Column], points: int) -> dict[str, Any]:
    """`{"x": [...], "columns": {name: {"y"} or {"x", "y"}}}`: a column without its own x uses the most common one, so steps are stored once."""
    thinned = {name: thin(column, points) for name, column in columns.items()}
    counts = Counter(tuple(column.step) for column in thinned.values())
    common = list(counts.most_common(1)[0][0]) if counts else []
    return {
        "x": common,
        "columns": {
            name: {"y": rounded(c.value)} if c.step == common else {"x": c.step, "y": rounded(c.value)} for name, c in thinned.items()
        },
    }  # fmt: skip


def thin(column: Column, points: int) -> Column:
    """At most about `points` points: of each bucket of neighbours the smallest and the largest value stay, so a spike of one step survives.

    A bucket without a number becomes one gap. Columns within the budget are returned as they are.
    """
    n = len(column.step)
    if n <= points:
        return column
    step, value = [], []
    for bucket in np.array_split(np.arange(n), max(points // 2, 1)):
        known = [int(i) for i in bucket if column.value[i] is not None]
        kept = (
            sorted({min(known, key=lambda i: column.value[i] or 0.0), max(known, key=lambda i: column.value[i] or 0.0)})
            if known
            else [int(bucket[0])]
        )
        step += [column.step[i] for i in kept]
        value += [column.value[i] for i in kept]
    return Column(step, value)


def rounded(values: Sequence[float | None], digits: int = 5) -> list[float | int | None]:
    """Values with few significant digits, as the page needs no more; whole numbers without a point."""
    return [None if v is None else (int(r) if (r := float(f"{v:.{digits}g}")).is_integer() and abs(r) < 1e15 else r) for v in values]


def counted(run: Run, name: str) -> tuple[np.ndarray, list[int], np.ndarray] | None:
    """(edges [E], steps [S], counts [S, E + 1]) of a histogram metric; None when it has no counts or no edges that fit them."""
    edges = run.edges.get(name, [])
    rows = [(step, counts) for step, counts in run.histograms.get(name, []) if edges and len(counts) == len(edges) + 1 and np.sum(counts) > 0]
    return (np.asarray(edges, float), [s for s, _ in rows], np.asarray([c for _, c in rows], float)) if rows else None


def grid(runs: Sequence[Run], name: str) -> np.ndarray | None:
    """Borders [CELLS + 1] of equal cells that hold 99.6 % of every run's values (at least 0.1 wide in all); None when no run has any."""
    ends = []
    for run in runs:
        if (found := counted(run, name)) is not None:
            edges, _, counts = found
            cdf = np.cumsum(counts.sum(0))[:-1] / counts.sum()
            inside = np.flatnonzero((cdf > 0.002) & (cdf < 0.998))
            # The cell that crosses either quantile belongs to the range; with all values in one bin, that bin's own edges.
            low = inside[0] - 1 if len(inside) else int(np.searchsorted(cdf, 0.5)) - 1
            high = inside[-1] + 1 if len(inside) else low + 1
            ends.append((edges[max(low, 0)], edges[min(high, len(edges) - 1)]))
    if not ends:
        return None
    low, high = min(e[0] for e in ends), max(e[1] for e in ends)
    pad = max(0.1 - (high - low), 0.0) / 2
    return np.linspace(low - pad, high + pad, CELLS + 1)


def histogram(run: Run, name: str, borders: np.ndarray) -> dict[str, Any] | None:
    """First, last and all steps of a histogram metric as shares of equal cells; None when the run has none.

    "First" and "last" sum the counts of a tenth of the logged steps each (at least one): counts of fixed bins add exactly. The fixed bins
    are read as evenly filled, the open outer ones as sitting on their edge, as quantiles are; what lies beyond the borders counts in the
    outermost cells.
    """
    if (found := counted(run, name)) is None:
        return None
    edges, steps, counts = found
    n = len(steps)
    tenth = max(math.ceil(n / 10), 1)

    def share(rows: np.ndarray) -> list[float]:
        total = counts[rows].sum(0)
        cdf = np.interp(borders, edges, np.cumsum(total)[:-1] / total.sum(), left=0.0, right=1.0)
        cdf[0], cdf[-1] = 0.0, 1.0
        return [float(f"{v:.4g}") for v in np.diff(cdf).clip(0)]

    def ends(rows: np.ndarray) -> list[int]:
        return [steps[rows[0]], steps[rows[-1]]]

    first, last = np.arange(tenth), np.arange(n - tenth, n)
    width = math.ceil(n / COLUMNS_OF_HEAT)
    spans = [np.arange(i, min(i + width, n)) for i in range(0, n, width)]
    return {
        "borders": [float(f"{b:.5g}") for b in borders], "first": share(first), "first_steps": ends(first), "last": share(last),
        "last_steps": ends(last), "heat": [share(rows) for rows in spans], "heat_steps": [ends(rows) for rows in spans],
    }  # fmt: skip


def trimmed(sample: Sample, tokens: int, characters: int = PROMPT_CHARACTERS) -> dict[str, Any]:
    """A sample with at most `tokens` tokens (beginning and end; `head` says where the gap is) and `characters` of its prompt."""
    n = len(sample.tokens)
    head = n if n <= tokens else 2 * tokens // 3
    tail = 0 if n <= tokens else tokens - head

    def cut(values: Sequence[Any]) -> list[Any]:
        return [*values[:head], *(values[n - tail :] if tail else ())]

    def column(values: list[float | None] | None) -> list[Any] | int | None:
        if values is None:
            return None
        kept = rounded(cut(values), 4)
        return kept[0] if kept and isinstance(kept[0], int) and all(v == kept[0] for v in kept) else kept

    prompt = sample.prompt
    if len(prompt) > characters:
        half = characters // 2
        prompt = f"{prompt[:half]} [... {len(prompt) - 2 * half} characters left out ...] {prompt[-half:]}"
    return {
        "step": sample.step, "group": sample.group, "sample": sample.sample, "why": sample.why, "prompt": prompt,
        "tokens": [t[:400] for t in cut(sample.tokens)], "length": n, "head": head, "logp": column(sample.logp_behavior),
        "version": column(sample.version), "weight": column(sample.weight), "advantage": sample.advantage, "reward": sample.reward,
        "outcome": sample.outcome, "stop": sample.stop, "prefix_length": sample.prefix_length, "source": sample.source,
    }  # fmt: skip
