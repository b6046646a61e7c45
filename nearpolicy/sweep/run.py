"""A sweep from the file to the tables: plan, runs, comparison, report."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nearpolicy.errors import EngineError, NearPolicyError
from nearpolicy.report import Cell, write_cells_report
from nearpolicy.report.read import Run, read_run
from nearpolicy.sweep.board import Board
from nearpolicy.sweep.compare import Comparison, compare
from nearpolicy.sweep.driver import Driver, Timing, is_finished, sweep_directory, usable_cores
from nearpolicy.sweep.expect import Checked, check_expectations
from nearpolicy.sweep.experiment import Plan, make_plan, read_experiment
from nearpolicy.sweep.figures import write_figures
from nearpolicy.sweep.tables import write_tables
from nearpolicy.trainer.rundir import write_atomic

Say = Callable[[str], None]


class UnexpectedResult(NearPolicyError):
    """A number of the sweep lies outside the range that its file expects."""


def sweep(
    file: Path, *, out: Path | None = None, jobs: int | None = None, resume: bool = False, many: bool = False, results: Path | None = None,
    say: Say = print,
) -> Path:  # fmt: skip
    """Run an experiment and compare its runs; returns results.md.

    Args:
        out: the sweep's directory; None takes runs/<name>.
        jobs: worker processes, one torch thread each; None takes the usable cores.
        resume: go on in a directory that was begun before: finished runs stay, interrupted ones go on, failed ones are tried again.
        many: allow more than 10,000 cells.
        results: where tables and figures go; None takes <out>/results.
    Raises:
        UsageError: what is wrong with the file or the directory, before anything is started.
        SweepStopped: Ctrl-C, after the running runs wrote checkpoints.
        EngineError: some runs failed; the others are finished and in the tables.
        UnexpectedResult: a number lies outside what the file expects (`[[expect]]`); tables and report are written.
    """
    plan = make_plan(read_experiment(file), where=file.parent, many=many)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    where = out or Path("runs") / plan.name
    with sweep_directory(where, plan, resume=resume):
        board = Board(len(plan.runs), done=sum(is_finished(where / "runs" / r.name) for r in plan.runs), jobs=jobs or usable_cores())
        say(describe(plan) + f"; {board.done} finished before, {board.jobs} jobs, in {where}")
        driver = Driver(plan=plan, out=where, jobs=board.jobs, board=board)
        began = time.monotonic()
        try:
            timing = driver.run()
        finally:
            note(where, driver, time.monotonic() - began)
        say(timing_line(where))
        page, checked = write_results(plan, where, results or where / "results", say=say)
    if driver.failures:
        first = next(iter(driver.failures))
        raise EngineError(f"{len(driver.failures)} of {timing.runs} runs", got=f"{first}: {driver.failures[first]}", expected="all to finish",
                          do=f"The tables have the others; see {where / 'logs'} and try them again with --resume.")  # fmt: skip
    for item in checked:
        say(f"{'as expected' if item.holds else 'NOT as expected'}: {item.line}")
    if off := [item for item in checked if not item.holds]:
        raise UnexpectedResult(f"{len(off)} of {len(checked)} expectations", got=off[0].line, expected="all to hold",
                               do=f"Compare {page} with the experiment's README; another machine's numbers may differ by its noise.")  # fmt: skip
    return page


def describe(plan: Plan) -> str:
    """How large the grid is."""
    seeds = len(plan.runs) // len(plan.cells)
    axes = " x ".join(f"{len({c.labels[i] for c in plan.cells})} {name}" for i, name in enumerate(plan.axes)) or "1 cell"
    return f"{plan.name}: {axes} = {len(plan.cells)} cells x {seeds} seeds = {len(plan.runs)} runs"


def listing(plan: Plan) -> str:
    """The plan as text: one line for each run."""
    width = max(len(r.name) for r in plan.runs)
    rows = [f"{r.name:{width}}  {r.config_hash}  {r.cell.name}" + (f"  ({r.group})" if r.group else "") for r in plan.runs]
    return "\n".join([describe(plan), *rows])


def note(out: Path, driver: Driver, wall: float) -> None:
    """Add this start's seconds to timing.json."""
    if driver.ended:
        entry = Timing(jobs=driver.jobs, wall=wall, own=driver.own, starting=driver.starting, runs=driver.ended)
        write_atomic(out / "timing.json", json.dumps([*timings(out), asdict(entry)], indent=1))


def timings(out: Path) -> list[dict[str, float]]:
    """Entries of timing.json; [] when there is none."""
    file = out / "timing.json"
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def timing_line(out: Path) -> str:
    """What the sweep cost beyond its runs, all its starts together."""
    entries = timings(out)
    own, wall = sum(e["own"] for e in entries), sum(e["wall"] for e in entries)
    if not own:
        return "Nothing was left to run."
    busy, starting = sum(e["jobs"] * e["wall"] for e in entries), sum(e["starting"] for e in entries)
    return (
        f"Cost: {wall / 60:.1f} min wall, {own / 60:.1f} min inside {sum(e['runs'] for e in entries):.0f} jobs; overhead (jobs x wall - inside) "
        f"{100 * (busy - own) / own:.1f} % of it, of which starting workers {100 * starting / own:.1f} %, waiting and the rest "
        f"{100 * max(busy - own - starting, 0) / own:.1f} %."
    )


def write_results(plan: Plan, out: Path, folder: Path, *, say: Say) -> tuple[Path, list[Checked]]:
    """Tables and figures into `folder`, the HTML report into `out`, from what has finished; results.md and the expectations."""
    runs: dict[str, Run] = {}
    for r in plan.runs:
        if is_finished(out / "runs" / r.name):
            runs[r.name] = read_run(out / "runs" / r.name)
    comparison = compare(plan, out, runs=runs)
    figures = write_figures(comparison, folder)
    checked = check_expectations(comparison)
    page = write_tables(comparison, folder, figures=figures, timing=timing_line(out), checked=checked)
    if runs:
        report = write_cells_report(cells_of(comparison, runs), out / "report.html")
        say(f"report: {report}")
    return page, checked


def cells_of(comparison: Comparison, runs: dict[str, Run]) -> list[Cell]:
    """Cells with finished runs for the report: name, runs, and the intervals of the score at each evaluation."""
    metric = comparison.plan.experiment.compare.metric
    out = []
    for cell in comparison.cells:
        if cell.finished:
            bands = {metric: [(i.mean, i.low, i.high) for i in cell.curve_E]}
            name = f"{cell.cell.name}{' (fewer than three seeds)' if cell.few else ''}"
            out.append(Cell(name, [runs[r.planned.name] for r in cell.finished], bands))
    return out
