"""Live progress: a rich table on a terminal, one plain line every few steps elsewhere (a log shows nothing of a live display)."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("pass@1", "eval/pass@1", "{:.3f}"),
    ("entropy", "policy/entropy", "{:.4f}"),
    ("outside band", "ratio/outside_frac", "{:.1%}"),
    ("clipped", "ratio/clip_frac", "{:.1%}"),
    ("weight", "weight/mean", "{:.3f}"),
    ("raw ESS", "weight/ess_raw", "{:.2f}"),
    ("grad norm", "train/grad_norm", "{:.2f}"),
    ("tokens/s", "time/tokens_per_s", "{:.0f}"),
)


class Progress:
    """Shows the newest value of each quantity, the step and the time left.

    Args:
        total: updates of the run.
        start: updates done before (after a resume).
        lines: about how many plain lines a run prints when not on a terminal.
    """

    def __init__(self, total: int, *, start: int = 0, lines: int = 24, console: Console | None = None) -> None:
        self.total, self.start = total, start
        self.console = console or Console(file=sys.stdout, highlight=False)
        self.every = max(1, total // lines)
        self._values: dict[str, Any] = {}
        self._began = time.monotonic()
        self._live = Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        if self._live:
            self._live.start()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """New values at this step."""
        self._values |= {k: v for k, v in values.items() if isinstance(v, float | int) and not math.isnan(v)}
        if self._live:
            self._live.update(self._table(step))
        elif step % self.every == 0 or step in (self.start + 1, self.total):
            shown = "  ".join(f"{label} {text}" for label, text in self._cells())
            self.console.print(f"step {step}/{self.total}  {shown}  left {self._left(step)}", markup=False, soft_wrap=True)

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """New evaluation values: a line of their own when not on a terminal."""
        if self._live:
            self.update(step, values)
            return
        self._values |= {k: v for k, v in values.items() if isinstance(v, float | int) and not math.isnan(v)}
        shown = [k for k in values if k.startswith("eval/pass@") and not k.endswith(("/low", "/high"))]
        text = "  ".join(f"{k.removeprefix('eval/')} {values[k]:.3f} [{values[f'{k}/low']:.3f}, {values[f'{k}/high']:.3f}]" for k in shown)
        self.console.print(f"step {step}/{self.total}  held-out {text}", markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that stays (alarms, checkpoints passed over)."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """End the live display; idempotent."""
        if self._live:
            self._live.stop()
            self._live = None

    def _cells(self) -> list[tuple[str, str]]:
        return [(label, form.format(self._values[name])) for label, name, form in SHOWN if name in self._values]

    def _left(self, step: int) -> str:
        done = step - self.start
        if done <= 0:
            return "?"
        seconds = round((time.monotonic() - self._began) / done * (self.total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if seconds >= 3600 else f"{seconds // 60}:{seconds % 60:02d}"

    def _table(self, step: int) -> Table:
        table = Table(show_header=True, header_style="dim", box=None, padding=(0, 2))
        cells = [("step", f"{step}/{self.total}"), *self._cells(), ("left", self._left(step))]
        for label, _ in cells:
            table.add_column(label, justify="right")
        table.add_row(*(text for _, text in cells))
        return table
