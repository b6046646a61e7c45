"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases when asked for.

A row is `{"step", "kind", "time", name: value, ...}`: `step` counts optimizer updates, `time` is in seconds since the start of the run
(what lies between an interruption and its resume is left out). `kind` is one of `KINDS`: `train`, `eval`, `alarm` (with `alarm` and `message`)
or `event` (with `event`, such as `finished`, `interrupted`, `failed`, and `message`). Numbers that are not finite are written as null.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from nearpolicy.errors import UsageError

KINDS = ("train", "eval", "alarm", "event")
"""What a row may be."""

TrackerValue = float | Sequence[float] | str | None
"""A number, histogram counts, a word, or missing."""


class Tracker(Protocol):
    """Takes rows. Steps never decrease within one tracker."""

    def log(self, step: int, kind: str, values: Mapping[str, TrackerValue]) -> None:
        """Record one row; it survives the death of the process once this returns (as far as the backend allows)."""
        ...

    def close(self) -> None:
        """Write what is pending and let go; idempotent."""
        ...


class JsonlTracker:
    """Appends rows to a file, each flushed with its newline, so that a killed run leaves at most one torn line.

    Args:
        path: the file; its folder must exist.
        resume_at: optimizer updates of the checkpoint that the run goes on from: rows of later steps are removed, since they will be written
            again. None keeps every whole row. A torn last line is removed either way, and the rewrite is made aside and renamed.
        clock: seconds, monotonic.
    Raises:
        UsageError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        try:
            elapsed = _mend(self.path, resume_at)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"metrics file {self.path}", got=f"{error.strerror}", expected="a file that can be written", do="Choose another --out."
            ) from None
        self._clock = clock
        self._start = clock() - elapsed

    def log(self, step: int, kind: str, values: Mapping[str, TrackerValue]) -> None:
        """Append one row. `time` is the tracker's clock unless `values` brings its own.

        Raises:
            UsageError: an unknown kind, a value named `step` or `kind`, or a closed tracker.
        """
        if kind not in KINDS:
            raise UsageError("metrics row: kind", got=repr(kind), expected=" or ".join(KINDS), do="Use one of them.")
        if taken := {"step", "kind"} & values.keys():
            raise UsageError("metrics row: value names", got=", ".join(sorted(taken)), expected="names other than step and kind", do="Rename them.")
        if self._file.closed:
            raise UsageError(f"metrics file {self.path}", got="a row after close()", expected="an open tracker", do="Close it last.")
        row = {"step": int(step), "kind": kind, "time": round(self._clock() - self._start, 4)}
        row |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def _plain(value: TrackerValue) -> Any:
    """A JSON value: whole numbers stay whole, numbers that are not finite become None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    number = float(value)
    return number if math.isfinite(number) else None


def _mend(path: Path, resume_at: int | None) -> float:
    """Leave only whole rows up to `resume_at` in the file; returns the time of the last of them, in seconds."""
    if not path.exists():
        return 0.0
    lines = path.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    elapsed = 0.0
    for line in lines:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if resume_at is None or step <= resume_at:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
            if isinstance(seconds := row.get("time"), int | float):
                elapsed = float(seconds)
    if kept != lines:
        aside = path.with_name(f".{path.name}.part")
        with aside.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    return elapsed


class TensorBoardTracker:
    """TensorBoard event files through tensorboardX (extra `tensorboard`): numbers as scalars, counts as histograms, words as text.

    Args:
        folder: where the event files go.
        edges: bin edges of each histogram metric, E edges for E + 1 counts; counts without edges are left out.
        resume_at: TensorBoard hides events of this step and later that an earlier process wrote.
    Raises:
        UsageError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, edges: Mapping[str, Sequence[float]] | None = None, resume_at: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _missing("tensorboardX", "tensorboard") from None
        self._writer = SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)
        self._edges = {name: list(e) for name, e in (edges or {}).items()}

    def log(self, step: int, kind: str, values: Mapping[str, TrackerValue]) -> None:
        """Add one row; missing numbers are skipped."""
        words = {n: v for n, v in values.items() if isinstance(v, str)}
        if words:
            self._writer.add_text(kind, ", ".join(f"{n}: {v}" for n, v in words.items()), step)
        for name, value in values.items():
            if isinstance(value, str):
                continue
            plain = _plain(value)
            if isinstance(plain, list):
                self._histogram(name.removesuffix("/hist"), plain, step)
            elif plain is not None:
                self._writer.add_scalar(name, plain, step)
        self._writer.flush()

    def _histogram(self, name: str, counts: list[float], step: int) -> None:
        edges = self._edges.get(name)
        total = sum(counts)
        if not edges or len(counts) != len(edges) + 1 or not total:
            return
        # The outermost bins are open: they stand at their edge, as quantiles read them.
        middles = [edges[0], *((a + b) / 2 for a, b in pairwise(edges)), edges[-1]]
        filled = [m for m, n in zip(middles, counts, strict=True) if n]
        self._writer.add_histogram_raw(
            name, min=filled[0], max=filled[-1], num=total, sum=sum(m * n for m, n in zip(middles, counts, strict=True)),
            sum_squares=sum(m * m * n for m, n in zip(middles, counts, strict=True)), bucket_limits=[*edges, math.nextafter(edges[-1], math.inf)],
            bucket_counts=counts, global_step=step,
        )  # fmt: skip

    def close(self) -> None:
        """Close the event file; idempotent."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases (extra `wandb`), offline by default: nothing leaves the machine until `wandb sync` is run.

    Args:
        folder: where the run's files go.
        project, name: as shown by W&B.
        config: the resolved configuration.
        mode: `offline`, `online` or `disabled`.
    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(
        self, folder: Path, *, project: str = "nearpolicy", name: str | None = None, config: Mapping[str, Any] | None = None, mode: str = "offline"
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "wandb") from None
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(config or {}), mode=mode)
        # Rows carry their step as a value: W&B drops rows whose own step goes back, as after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, kind: str, values: Mapping[str, TrackerValue]) -> None:
        """Send one row; missing numbers and histogram counts (their quantiles are scalars already) are skipped."""
        plain = {name: p for name, value in values.items() if (p := _plain(value)) is not None and not isinstance(p, list)}
        self._run.log({"step": int(step), "kind": kind, **plain})

    def close(self) -> None:
        """Finish the run; idempotent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _missing(library: str, extra: str) -> UsageError:
    return UsageError(
        f"tracker {extra}", got=f"no module {library}", expected="the library to be installed", do=f'Run: pip install "nearpolicy[{extra}]"'
    )
