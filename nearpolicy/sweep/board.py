"""What a sweep shows while it runs: a live table on a terminal, one plain line for each ended run elsewhere."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

TAIL = 400
"""Bytes of a log that are read for its last line."""


class Board:
    """Counts, what runs now, time left.

    Args:
        total: runs of the sweep.
        done: those that an earlier sweep ended well.
        jobs: worker processes, for the time left.
    """

    def __init__(self, total: int, *, done: int, jobs: int, console: Console | None = None) -> None:
        self.total, self.done, self.failed, self.jobs = total, done, 0, jobs
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._seconds: list[float] = []
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        if self._live:
            self._live.start()

    def ended(self, name: str, status: str, seconds: float, score: float | None = None, message: str = "") -> None:
        """A run came to its end."""
        good = status == "finished"
        self.done += good
        self.failed += status == "failed"
        self._seconds += [seconds] if good else []
        shown = "" if score is None else f", score {score:.3f}"
        why = f": {message}" if message else ""
        if good:
            self.say(f"[{self.done}/{self.total}] {name}: {seconds:.1f} s{shown}; left {self.left(0)}")
        else:
            self.say(f"{name}: {status}{why}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def refresh(self, running: Mapping[str, tuple[float, Path]]) -> None:
        """Draw the table anew.

        Args:
            running: name of each job at work -> (when it was begun, in seconds of `time.monotonic`; its log).
        """
        if self._live:
            self._live.update(self._table(running), refresh=True)

    def left(self, running: int) -> str:
        """Time left, from the mean of the runs that ended here; half of each running one counts as done."""
        if not self._seconds:
            return "?"
        waiting = self.total - self.done - self.failed - running
        seconds = round(sum(self._seconds) / len(self._seconds) * (waiting + running / 2) / self.jobs)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def close(self) -> None:
        """End the live table; idempotent."""
        if self._live:
            self._live.stop()
            self._live = None

    def _table(self, running: Mapping[str, tuple[float, Path]]) -> Group:
        waiting = self.total - self.done - self.failed - len(running)
        head = f"done {self.done}  running {len(running)}  failed {self.failed}  waiting {max(waiting, 0)}  left {self.left(len(running))}"
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, (began, log) in running.items():
            table.add_row(name, f"{time.monotonic() - began:.0f} s", Text(last_line(log), overflow="ellipsis", no_wrap=True))
        return Group(Text(head), table)


def last_line(log: Path) -> str:
    """The last line of a log; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - TAIL, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
