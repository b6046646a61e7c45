"""Tables of a comparison: CSV for machines, Markdown for people. The same bytes for the same runs.

results.csv      one row for each run: what every number is traced to (commit, configuration hash, seed, run directory)
cells.csv        one row for each cell: means, intervals, collapsed share, updates to the target, tokens, seconds
differences.csv  one row for each cell against its baseline
curves.csv       one row for each cell and evaluation
results.md       all of it to read
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from nearpolicy.sweep.compare import FEW, STATISTICS, CellResult, Comparison, Difference, Interval, RunResult, area, largest_drop
from nearpolicy.sweep.expect import Checked
from nearpolicy.trainer.rundir import write_atomic

MARK = "†"
"""Behind the number of a cell with too few seeds."""
MESSAGE_CHARACTERS = 200


def write_tables(
    comparison: Comparison, folder: Path, *, figures: Sequence[str] = (), timing: str = "", checked: Sequence[Checked] = ()
) -> Path:  # fmt: skip
    """Write every table into `folder` and return results.md.

    Args:
        figures: names of SVG files beside it that the page shows.
        timing: a line on the sweep's own cost.
        checked: what the experiment expects, and what was found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "results.csv", _csv(run_rows(comparison)))
    write_atomic(folder / "cells.csv", _csv(cell_rows(comparison)))
    write_atomic(folder / "curves.csv", _csv(curve_rows(comparison)))
    if comparison.differences:
        write_atomic(folder / "differences.csv", _csv(difference_rows(comparison)))
    write_atomic(folder / "results.md", markdown(comparison, figures=figures, timing=timing, checked=checked))
    return folder / "results.md"


def run_rows(c: Comparison) -> list[dict[str, str]]:
    """One row for each run of the plan, finished or not."""
    return [_run_row(c, r) for r in c.runs]


def _run_row(c: Comparison, r: RunResult) -> dict[str, str]:
    options = c.plan.experiment.compare
    row = dict(zip(c.plan.axes, r.planned.cell.labels, strict=True))
    row |= {"seed": str(r.planned.seed), "group": r.planned.group, "status": r.status, "run": r.planned.name, "commit": r.commit,
            "config": r.planned.config_hash}  # fmt: skip
    names = ("final", "best", "auc", "drop", "collapsed", "updates_to_target", "updates", "tokens", "seconds")
    if not r.finished:
        return row | dict.fromkeys(names, "") | {"message": " ".join(r.message.split())[:MESSAGE_CHARACTERS]}
    reached = next(u for x, u in zip(_cell_of(c, r).finished, _cell_of(c, r).reached, strict=True) if x is r)
    score_E = r.score_E
    values: list[float | str] = [
        float(score_E[-1]), float(score_E.max()), float(area(score_E, r.step_E)), float(largest_drop(score_E)),
        str(int(score_E[-1] < options.collapse * score_E.max())), reached, float(r.step_E[-1]), float(r.token_E[-1]), round(r.seconds, 1),
    ]  # fmt: skip
    return row | {n: v if isinstance(v, str) else _plain(v) for n, v in zip(names, values, strict=True)} | {"message": ""}


def _cell_of(c: Comparison, r: RunResult) -> CellResult:
    return next(cell for cell in c.cells if cell.cell == r.planned.cell)


def cell_rows(c: Comparison) -> list[dict[str, str]]:
    """One row for each cell."""
    rows = []
    for cell in c.cells:
        row = dict(zip(c.plan.axes, cell.cell.labels, strict=True)) | {"seeds": str(len(cell.finished)), "few_seeds": str(int(cell.few))}
        row["failed"] = str(sum(r.status == "failed" for r in cell.runs))
        for name in STATISTICS:
            row |= _interval_columns(name, cell.statistics.get(name))
        row |= {"collapsed": str(cell.collapsed), "collapsed_share": _plain(_share(cell)), "reached_target": str(_reached(cell)),
                "updates_to_target_median": _plain(median(cell.reached) if cell.reached else math.nan),
                "tokens": _plain(_mean(float(r.token_E[-1]) for r in cell.finished)),
                "seconds": _plain(_mean(r.seconds for r in cell.finished))}  # fmt: skip
        rows.append(row)
    return rows


def difference_rows(c: Comparison) -> list[dict[str, str]]:
    """One row for each cell that has a baseline."""
    rows = []
    for d in c.differences:
        row = dict(zip(c.plan.axes, d.cell.labels, strict=True)) | {"minus": d.baseline.name, "seeds": str(d.seeds), "paired": str(int(d.paired)),
                                                                    "few_seeds": str(int(d.seeds < FEW))}  # fmt: skip
        for name in STATISTICS:
            row |= _interval_columns(name, d.statistics[name])
        rows.append(row)
    return rows


def curve_rows(c: Comparison) -> list[dict[str, str]]:
    """One row for each cell and evaluation."""
    rows = []
    for cell in c.cells:
        labels = dict(zip(c.plan.axes, cell.cell.labels, strict=True))
        for step, token, interval in zip(cell.step_E, cell.token_E, cell.curve_E, strict=True):
            rows.append(labels | {"updates": _plain(step), "tokens": _plain(token), **_interval_columns("score", interval)})
    return rows


def markdown(c: Comparison, *, figures: Sequence[str] = (), timing: str = "", checked: Sequence[Checked] = ()) -> str:
    """The page: definitions, pivots of the last evaluation, every cell, differences, expectations, what did not finish, provenance."""
    done = [r for r in c.runs if r.finished]
    o = c.plan.experiment.compare
    lines = [
        f"# Results of {c.plan.name}", "", "<!-- Written by nearpolicy sweep: run it again instead of editing. -->", "",
        f"{len(done)} of {len(c.runs)} runs finished, {len(c.cells)} cells. Score: `{o.metric}`. Intervals in brackets: {100 * o.level:g} %, "
        f"bootstrap over seeds and, within each, held-out prompts ({o.resamples} resamples). {MARK} marks a cell with fewer than {FEW} finished "
        "seeds: its interval says little.", "",
        f"A run has collapsed when its last evaluation is below {100 * o.collapse:g} % of its best. Drop: largest fall from an earlier evaluation to "
        f"a later one. AUC: mean height under the curve over updates. Equal updates: at {_number(c.updates)}; equal tokens: at {_number(c.tokens)} "
        "sampled tokens, the most that every finished run reached. "
        f"Updates to {o.target:g}: median over seeds, and how many got there.", "",
    ]  # fmt: skip
    if timing:
        lines += [timing, ""]
    for name in figures:
        lines += [f"![{Path(name).stem}]({name})", ""]
    lines += [*_pivots(c), *_cell_table(c), *_difference_table(c), *_expectations(checked), *_groups(c), *_unfinished(c), *_provenance(c, done)]
    return "\n".join(lines).rstrip() + "\n"


def _pivots(c: Comparison) -> list[str]:
    """The last evaluation: first axis down, second across, a table for each of the rest."""
    if len(c.plan.axes) < 2:
        return []
    down, across = layout(c)[:2]
    rest = [i for i in range(len(c.plan.axes)) if i not in (down, across)]
    lines = []
    for key in dict.fromkeys(tuple(cell.cell.labels[i] for i in rest) for cell in c.cells):
        members = [cell for cell in c.cells if tuple(cell.cell.labels[i] for i in rest) == key]
        title = ", ".join(f"{c.plan.axes[i]} = {label}" for i, label in zip(rest, key, strict=True))
        heads = list(dict.fromkeys(m.cell.labels[across] for m in members))
        lines += [f"## Last evaluation{f', {title}' if title else ''}", "", f"| {c.plan.axes[down]} | "
                  + " | ".join(f"{c.plan.axes[across]} = {h}" for h in heads) + " |", "|---" * (len(heads) + 1) + "|"]  # fmt: skip
        for label in dict.fromkeys(m.cell.labels[down] for m in members):
            found = {m.cell.labels[across]: m for m in members if m.cell.labels[down] == label}
            lines.append(f"| {label} | " + " | ".join(_shown(found[h], "final") if h in found else "–" for h in heads) + " |")
        lines.append("")
    return lines


def layout(c: Comparison) -> tuple[int, ...]:
    """Indices of the axes drawn as lines, columns and rows: those that `[figures]` names, then the others in order; shorter with fewer axes."""
    f = c.plan.experiment.figures
    named = {name: c.plan.axes.index(name) for name in (f.lines, f.columns, f.rows) if name}
    rest = iter([i for i in range(len(c.plan.axes)) if i not in named.values()])
    picked = [named[name] if name else next(rest, None) for name in (f.lines, f.columns, f.rows)]
    return tuple(i for i in picked if i is not None)


def _cell_table(c: Comparison) -> list[str]:
    lines = [
        "## Cells", "",
        "| " + " | ".join(c.plan.axes or ("cell",)) + " | seeds | final | best | AUC | drop | collapsed | updates to "
        f"{c.plan.experiment.compare.target:g} | equal updates | equal tokens | tokens | seconds |",
        "|---" * (len(c.plan.axes or ("cell",)) + 11) + "|",
    ]  # fmt: skip
    for cell in c.cells:
        failed = sum(r.status == "failed" for r in cell.runs)
        seeds = f"{len(cell.finished)}{MARK if cell.few else ''}" + (f" ({failed} failed)" if failed else "")
        reached = _reached(cell)
        updates = f"{_number(median(cell.reached))} ({reached} of {len(cell.finished)})" if reached else f"– (0 of {len(cell.finished)})"
        numbers = [_shown(cell, name) for name in ("final", "best", "auc", "drop")]
        equal = [_shown(cell, name) for name in ("equal_updates", "equal_tokens")]
        cost = [_number(_mean(float(r.token_E[-1]) for r in cell.finished)), _number(_mean(r.seconds for r in cell.finished))]
        collapsed = f"{cell.collapsed} of {len(cell.finished)}"
        lines.append("| " + " | ".join([*(cell.cell.labels or (c.plan.name,)), seeds, *numbers, collapsed, updates, *equal, *cost]) + " |")
    return [*lines, ""]


def _difference_table(c: Comparison) -> list[str]:
    if not c.differences:
        return []
    base = ", ".join(f"{axis} = {label}" for axis, label in c.plan.experiment.compare.baseline.items())
    lines = [
        f"## Differences to {base}", "", "Paired by seed and prompt unless it says otherwise. Bold: the interval excludes 0; with this many cells "
        f"about one in {round(1 / (1 - c.plan.experiment.compare.level))} does so by chance.", "",
        "| " + " | ".join(c.plan.axes) + " | pairs | final | AUC | drop | equal tokens |", "|---" * (len(c.plan.axes) + 5) + "|",
    ]  # fmt: skip
    for d in c.differences:
        pairs = f"{d.seeds}{MARK if d.seeds < FEW else ''}" + ("" if d.paired else " (unpaired)")
        lines.append("| " + " | ".join([*d.cell.labels, pairs, *(_signed(d, n) for n in ("final", "auc", "drop", "equal_tokens"))]) + " |")
    return [*lines, ""]


def _groups(c: Comparison) -> list[str]:
    """The last evaluation by the settings that go with the seeds, when there are several."""
    names = list(dict.fromkeys(r.planned.group for r in c.runs))
    if len(names) < 2:
        return []
    lines = ["## By what goes with the seeds", "", "Mean last evaluation (seeds).", "",
             "| " + " | ".join([*c.plan.axes, *(n or "as in the recipe" for n in names)]) + " |",
             "|---" * (len(c.plan.axes) + len(names)) + "|"]  # fmt: skip
    for cell in c.cells:
        count = {n: sum(r.planned.group == n for r in cell.finished) for n in names}
        shown = [f"{cell.groups[n]:.3f} ({count[n]})" if n in cell.groups else "–" for n in names]
        lines.append("| " + " | ".join([*cell.cell.labels, *shown]) + " |")
    return [*lines, ""]


def _expectations(checked: Sequence[Checked]) -> list[str]:
    if not checked:
        return []
    lines = ["## Expected", "", "| number | found | expected | holds |", "|---|---|---|---|"]
    for item in checked:
        low, high = item.expect.within
        lines.append(f"| {item.what} | {_plain(round(item.found, 3)) or '–'} | {low:g} to {high:g} | {'yes' if item.holds else '**no**'} |")
    return [*lines, ""]


def _unfinished(c: Comparison) -> list[str]:
    left = [r for r in c.runs if not r.finished]
    if not left:
        return []
    lines = ["## Not finished", "", "| run | status | message |", "|---|---|---|"]
    for r in left[:50]:
        message = " ".join(r.message.split())[:MESSAGE_CHARACTERS].replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {r.planned.name} | {r.status} | {message} |")
    return [*lines, *([f"| {len(left) - 50} more | | |"] if len(left) > 50 else []), ""]


def _provenance(c: Comparison, done: Sequence[RunResult]) -> list[str]:
    commits = sorted({r.commit for r in done})
    return ["## Where the numbers come from", "", f"Commit {', '.join(f'`{x}`' for x in commits) or 'none'}. `results.csv` has commit, configuration "
            "hash, seed and run directory of every run; the hash is of the resolved configuration without its output directory. Total: "
            f"{_number(sum(float(r.token_E[-1]) for r in done))} sampled tokens, {_number(sum(r.seconds for r in done))} s in the runs."]  # fmt: skip


def _interval_columns(name: str, interval: Interval | None) -> dict[str, str]:
    ends = interval or Interval(math.nan, math.nan, math.nan)
    return {name: _plain(ends.mean), f"{name}_low": _plain(ends.low), f"{name}_high": _plain(ends.high)}


def _shown(cell: CellResult, name: str) -> str:
    found = cell.statistics.get(name)
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]{MARK if cell.few else ''}" if found else "–"


def _signed(d: Difference, name: str) -> str:
    x = d.statistics[name]
    text = f"{x.mean:+.3f} [{x.low:+.3f}, {x.high:+.3f}]"
    return f"**{text}**" if x.low > 0 or x.high < 0 else text


def _share(cell: CellResult) -> float:
    return cell.collapsed / len(cell.finished) if cell.finished else math.nan


def _reached(cell: CellResult) -> int:
    return sum(math.isfinite(u) for u in cell.reached)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def _plain(value: float) -> str:
    """Six digits after the point at most; empty for what is missing or was never reached."""
    return "" if not math.isfinite(value) else f"{value:.6f}".rstrip("0").rstrip(".")


def _number(value: float) -> str:
    return "–" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _csv(rows: Sequence[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
