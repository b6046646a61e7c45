"""Figures of a comparison as SVG text: panels of curves with bands, and the last evaluation against an axis. Same input, same bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nearpolicy.sweep.compare import FEW, CellResult, Comparison
from nearpolicy.sweep.tables import MARK, layout
from nearpolicy.trainer.rundir import write_atomic

PANEL_WIDTH, WIDE_PANEL, PANEL_HEIGHT = 240, 380, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 24, 34
HEAD, LEGEND = 30, 26
COLOURS = ("#1769aa", "#c2410c", "#15803d", "#7e22ce", "#be185d", "#0d8fa8", "#7a6a00", "#52525b")
DASHES = ("", "7 4", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel with its band."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of the grid."""

    title: str
    curves: Sequence[Curve]


def write_figures(comparison: Comparison, folder: Path) -> list[str]:
    """Write curves over updates and over sampled tokens, and the summary when there is an axis to draw it against; returns the file names."""
    if not any(c.finished for c in comparison.cells):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    metric = comparison.plan.experiment.compare.metric.removeprefix("eval/")
    figures = {
        "curves.svg": grid(f"{comparison.plan.name}: held-out {metric} over updates", _curves(comparison, tokens=False), "updates", metric),
        "curves_tokens.svg": grid(f"{comparison.plan.name}: held-out {metric} over sampled tokens", _curves(comparison, tokens=True),
                                  "sampled tokens (thousands)", metric),
    }  # fmt: skip
    axes = layout(comparison)
    if len(axes) > 1:
        across = comparison.plan.axes[axes[1]]
        ticks = list(dict.fromkeys(c.cell.labels[axes[1]] for c in comparison.cells))
        title = f"{comparison.plan.name}: last evaluation, {metric}"
        figures["final.svg"] = grid(title, [_summary(comparison, axes)], across, metric, labels=ticks)
    for name, text in figures.items():
        write_atomic(folder / name, text)
    return list(figures)


def _curves(c: Comparison, *, tokens: bool) -> list[list[Panel]]:
    """Rows of panels: one line a value of the first axis of the layout."""
    axes = layout(c)
    lines, columns, rows = (axes[i] if i < len(axes) else None for i in range(3))
    others = [i for i in range(len(c.plan.axes)) if i not in (lines, columns, rows)]

    def label(cell: CellResult, axis: int | None) -> str:
        return "" if axis is None else cell.cell.labels[axis]

    out: list[list[Panel]] = []
    for key in dict.fromkeys((label(x, rows), *(x.cell.labels[i] for i in others)) for x in c.cells):
        row = [x for x in c.cells if (label(x, rows), *(x.cell.labels[i] for i in others)) == key]
        panels = []
        for column in dict.fromkeys(label(x, columns) for x in row):
            members = [x for x in row if label(x, columns) == column and x.finished]
            named = [(columns, column), (rows, key[0]), *zip(others, key[1:], strict=True)]
            title = ", ".join(f"{c.plan.axes[i]} = {text}" for i, text in named if i is not None)
            panels.append(Panel(title, [_curve(x, label(x, lines) or c.plan.name, tokens=tokens) for x in members]))
        out.append(panels)
    return out


def _curve(cell: CellResult, label: str, *, tokens: bool) -> Curve:
    x = [float(t) / 1000 for t in cell.token_E] if tokens else [float(s) for s in cell.step_E]
    name = f"{label}{MARK if cell.few else ''}"
    return Curve(name, x, [i.mean for i in cell.curve_E], [i.low for i in cell.curve_E], [i.high for i in cell.curve_E])


def _summary(c: Comparison, axes: Sequence[int]) -> list[Panel]:
    """The last evaluation against the second axis, one panel for each value of the others."""
    ticks = list(dict.fromkeys(x.cell.labels[axes[1]] for x in c.cells))
    others = [i for i in range(len(c.plan.axes)) if i not in axes[:2]]
    panels = []
    for key in dict.fromkeys(tuple(x.cell.labels[i] for i in others) for x in c.cells):
        members = [x for x in c.cells if tuple(x.cell.labels[i] for i in others) == key and x.finished]
        curves = []
        for label in dict.fromkeys(x.cell.labels[axes[0]] for x in members):
            mine = [(ticks.index(x.cell.labels[axes[1]]), x) for x in members if x.cell.labels[axes[0]] == label]
            final = [x.statistics["final"] for _, x in mine]
            few = MARK if any(x.few for _, x in mine) else ""
            curves.append(Curve(label + few, [float(i) for i, _ in mine], [f.mean for f in final], [f.low for f in final], [f.high for f in final]))
        panels.append(Panel(", ".join(f"{c.plan.axes[i]} = {text}" for i, text in zip(others, key, strict=True)), curves))
    return panels


def grid(title: str, rows: Sequence[Sequence[Panel]], x_label: str, y_label: str, *, labels: Sequence[str] | None = None) -> str:
    """An SVG of panels with one scale for all, a legend below.

    Args:
        labels: names of x = 0, 1, ...; None draws a numeric axis.
    """
    curves = [c for row in rows for panel in row for c in panel.curves]
    xs, ys = [x for c in curves for x in c.x], [y for c in curves for y in (*c.low, *c.high)]
    x_low, x_high = (-0.3, len(labels) - 0.7) if labels is not None else (min(xs), max(xs))
    x_high = x_high if x_high > x_low else x_low + 1
    y_ticks = round_values(min(0.0, *ys), max(*ys, 1e-9), 5)
    names = list(dict.fromkeys(c.label for c in curves))
    across = max(len(row) for row in rows)
    panel_width = PANEL_WIDTH if across > 2 else WIDE_PANEL
    legend = _legend(names)
    width, height = max(across * panel_width, LEFT + 7 * len(title), round(legend[1])), HEAD + len(rows) * PANEL_HEIGHT + LEGEND
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>", f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" fill="#18181b">{escape(title)}</text>',
    ]  # fmt: skip
    for r, row in enumerate(rows):
        for k, panel in enumerate(row):
            left, top = k * panel_width, HEAD + r * PANEL_HEIGHT
            scale = _Scale(left + LEFT, left + panel_width - RIGHT, x_low, x_high, top + PANEL_HEIGHT - BOTTOM, top + TOP, y_ticks[0], y_ticks[-1])
            x_ticks = (
                [(float(i), label) for i, label in enumerate(labels)]
                if labels is not None
                else [(t, f"{t:g}") for t in round_values(x_low, x_high, 4) if x_low <= t <= x_high]
            )
            out += _frame(panel.title, scale, x_ticks, y_ticks, x_label, y_label if k == 0 else "")
            for curve in panel.curves:
                out += _drawn(curve, scale, names.index(curve.label), points=labels is not None)
    return "\n".join([*out, f'<g transform="translate(0 {height})">', *legend[0], "</g>", "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    left: float
    right: float
    x_low: float
    x_high: float
    bottom: float
    top: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)


def _frame(title: str, s: _Scale, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float], x_label: str, y_label: str) -> list[str]:
    out = [f'<text x="{s.left:.1f}" y="{s.top - 7:.1f}" font-size="11" fill="#18181b">{escape(title)}</text>']
    for t in y_ticks:
        out.append(f'<path d="M{s.left:.1f} {s.y(t):.1f}H{s.right:.1f}" stroke="#e4e4e7"/>')
        out.append(f'<text x="{s.left - 5:.1f}" y="{s.y(t) + 3.5:.1f}" text-anchor="end" fill="#3f3f46">{t:g}</text>')
    for t, text in x_ticks:
        out.append(f'<text x="{s.x(t):.1f}" y="{s.bottom + 13:.1f}" text-anchor="middle" fill="#3f3f46">{escape(text)}</text>')
    out.append(f'<text x="{(s.left + s.right) / 2:.1f}" y="{s.bottom + 26:.1f}" text-anchor="middle" fill="#3f3f46">{escape(x_label)}</text>')
    if y_label:
        middle = (s.top + s.bottom) / 2
        out.append(f'<text transform="translate({s.left - 34:.1f} {middle:.1f}) rotate(-90)" text-anchor="middle" fill="#3f3f46">'
                   f"{escape(y_label)}</text>")  # fmt: skip
    return out


def _drawn(curve: Curve, s: _Scale, place: int, *, points: bool) -> list[str]:
    """The band and the line; with `points`, intervals as bars and a mark at each value."""
    colour, dash = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
    style = f'stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")
    shift = (place - 2) * 0.04 if points else 0.0  # bars of several lines stand side by side
    xs = [s.x(x + shift) for x in curve.x]
    line = _path(xs, curve.y, s.y)
    if points:
        bars = "".join(f"M{x:.1f} {s.y(a):.1f}V{s.y(b):.1f}" for x, a, b in zip(xs, curve.low, curve.high, strict=True))
        marks = [f'<circle cx="{x:.1f}" cy="{s.y(y):.1f}" r="2.6" fill="{colour}"/>' for x, y in zip(xs, curve.y, strict=True)]
        return [f'<path d="{bars}" stroke="{colour}" stroke-opacity="0.6" stroke-width="1.4"/>', f'<path d="{line}" fill="none" {style}/>', *marks]
    band = _path(xs, curve.high, s.y) + _path(xs[::-1], curve.low[::-1], s.y).replace("M", "L", 1) + "Z"
    return [f'<path d="{band}" fill="{colour}" fill-opacity="0.15"/>', f'<path d="{line}" fill="none" {style}/>']


def _path(xs: Sequence[float], ys: Sequence[float], at_y: Callable[[float], float]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {at_y(y):.1f}" for i, (x, y) in enumerate(zip(xs, ys, strict=True)))


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    """(drawing above y = 0, its right end)."""
    out, at = [], float(LEFT)
    for place, name in enumerate(names):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        style = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        out.append(f'<path d="M{at:.0f} -12h20" {style}/><text x="{at + 25:.0f}" y="-8" fill="#18181b">{escape(name)}</text>')
        at += 25 + 14 + 6 * len(name)
    if any(MARK in n for n in names):
        out.append(f'<text x="{at:.0f}" y="-8" fill="#71717a">{MARK} fewer than {FEW} seeds</text>')
        at += 130
    return out, at


def round_values(low: float, high: float, about: int) -> list[float]:
    """Round values from at most `low` to at least `high`, about this many: steps of 1, 2 or 5 times a power of ten."""
    raw = max(high - low, 1e-12) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
