"""What an experiment expects of its own numbers (`[[expect]]`), held against what its runs came to.

An expectation is a range for the mean of a cell, or for the mean difference of two cells, fixed when the file was written. Numbers of
another machine differ: another order of summation gives other samples after a few updates, so a range holds the noise of a few seeds.
"""

import math
from dataclasses import dataclass

from nearpolicy.sweep.compare import Comparison, difference
from nearpolicy.sweep.experiment import Expect


@dataclass(frozen=True, slots=True)
class Checked:
    """One expectation and what was found."""

    expect: Expect
    found: float
    """Mean over the finished runs; NaN where a cell has none."""

    @property
    def holds(self) -> bool:
        """Whether it lies within, the ends included."""
        return self.expect.within[0] <= self.found <= self.expect.within[1]

    @property
    def what(self) -> str:
        """For people: the cell, what it is compared with, and the statistic."""
        e = self.expect
        cell, minus = (", ".join(labels.values()) for labels in (e.cell, e.minus))
        return f"{cell or 'the cell'}{f' minus {minus}' if minus else ''}: {e.statistic}"

    @property
    def line(self) -> str:
        """For people: what, found and expected."""
        low, high = self.expect.within
        found = "no finished run" if math.isnan(self.found) else f"{self.found:.3f}"
        return f"{self.what} {found}, expected {low:g} to {high:g}"


def check_expectations(c: Comparison) -> list[Checked]:
    """Every `[[expect]]` of the experiment, in its order."""
    return [Checked(e, _found(c, e)) for e in c.plan.experiment.expect]


def _found(c: Comparison, e: Expect) -> float:
    by_labels = {cell.cell.labels: cell for cell in c.cells}
    first = by_labels[tuple(e.cell[axis] for axis in c.plan.axes)]
    if not e.minus:
        return first.statistics[e.statistic].mean if first.finished else math.nan
    second = by_labels[tuple(e.minus.get(axis, e.cell[axis]) for axis in c.plan.axes)]
    if not first.finished or not second.finished:
        return math.nan
    return difference(first, second, c.plan.experiment.compare, c.updates, c.tokens).statistics[e.statistic].mean
