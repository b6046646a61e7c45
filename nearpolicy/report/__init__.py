"""Run directories to one self-contained HTML page; no torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from nearpolicy.errors import UsageError
from nearpolicy.report.cells import HISTOGRAM_CELLS, Cell, together
from nearpolicy.report.page import render
from nearpolicy.report.read import Run, read_run

__all__ = ["MAX_BYTES", "Cell", "Run", "read_run", "write_cells_report", "write_report"]

MAX_BYTES = 3_000_000
"""Upper bound of the page's size."""

_SCALES = (1.0, 0.5, 0.25, 0.1, 0.04, 0.01)


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the report of one or several runs; the page opens offline from a file.

    Args:
        run_dirs: run directories (`run.toml`, `env.json`, `metrics.jsonl`, `rollouts/`), in the order of the legend. A directory named
            twice is shown once.
        out: the file to write; in an existing directory, `report.html`. Written aside and renamed, so a reader never sees half a page.
    Returns:
        The path of the page, smaller than `MAX_BYTES`: long columns, samples and texts are thinned until it is.
    Raises:
        UsageError: no run directory, or a path that cannot be written.
        DataError: a directory that is not a run, or has no metrics yet.
    """
    paths = list({Path(p).resolve(): Path(p) for p in run_dirs}.values())
    if not paths:
        raise UsageError("report", got="no run directory", expected="at least one", do="Name the directory given to `nearpolicy train --out`.")
    return _page([read_run(path, name=name) for path, name in zip(paths, _names(paths), strict=True)], out)


def write_cells_report(cells: Sequence[Cell], out: Path) -> Path:
    """Write the report of a sweep: each cell as one line, the mean over its seeds with a band. As `write_report` otherwise.

    Args:
        cells: name, runs and bands of each; cells beyond the first eight are switched on by their name in the legend.
    Raises:
        UsageError: no cell, or a path that cannot be written.
    """
    if not cells:
        raise UsageError("report", got="no cell with a finished run", expected="at least one", do="Wait for the first run.")
    return _page([together(cell, histograms=len(cells) <= HISTOGRAM_CELLS) for cell in cells], out)


def _page(runs: Sequence[Run], out: Path) -> Path:
    page = b""
    for scale in _SCALES:
        # A lone surrogate, which JSON allows and UTF-8 does not, becomes a question mark: Chromium dies on saving a page that holds one.
        page = render(runs, scale).encode("utf-8", errors="replace")
        if len(page) < MAX_BYTES:
            break
    else:
        raise UsageError("report", got=f"{len(runs)} runs whose page has {len(page):,} bytes", expected=f"less than {MAX_BYTES:,}",
                         do="Report fewer runs at once.")  # fmt: skip
    return _write(page, Path(out))


def _names(paths: Sequence[Path]) -> list[str]:
    """Directory names, with as many parents as it takes to tell them apart."""
    parts = [p.resolve().parts for p in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def _write(page: bytes, out: Path) -> Path:
    out = out / "report.html" if out.is_dir() else out
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        aside.write_bytes(page)
        os.replace(aside, out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"report: {out}", got=f"{error.strerror}", expected="a path that can be written", do="Choose another with --out.") from None
    return out
