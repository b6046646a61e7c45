"""Line plots as SVG text, drawn with arithmetic alone: the same input gives the same bytes, and nothing is loaded from anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 62
COLORS = ("#1769aa", "#c2410c", "#15803d", "#7e22ce", "#52525b")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line; a NaN breaks it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def chart(title: str, curves: Sequence[Curve], *, x_label: str, y_label: str, y_top: float | None = None) -> str:
    """An SVG figure of these curves.

    Args:
        y_top: values above it are cut off at the upper border; None shows them all.
    """
    xs = [x for c in curves for x in c.x]
    ys = [y for c in curves for y in c.y if not math.isnan(y)]
    low, high = min(0.0, *ys), max(ys)
    high = min(high, y_top) if y_top is not None else high
    if high - low < 1e-12:
        high = low + 1.0
    y_ticks = ticks(low, high, 5)
    x_ticks = [t for t in ticks(min(xs), max(xs), 6) if min(xs) - 1e-12 <= t <= max(xs) + 1e-12]
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])

    def at_x(x: float) -> float:
        return LEFT + (x - min(xs)) / (max(xs) - min(xs)) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (min(y, high) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" fill="#18181b">{escape(title)}</text>',
    ]
    for t in y_ticks:
        out.append(f'<path d="M{LEFT} {at_y(t):.1f}H{WIDTH - RIGHT}" stroke="#e4e4e7"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at_y(t) + 4:.1f}" text-anchor="end" fill="#3f3f46">{number(t)}</text>')
    for t in x_ticks:
        out.append(f'<path d="M{at_x(t):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{"#a1a1aa" if abs(t) < 1e-12 else "#f4f4f5"}"/>')
        out.append(f'<text x="{at_x(t):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" fill="#3f3f46">{number(t)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - BOTTOM + 31}" text-anchor="middle" fill="#3f3f46">{escape(x_label)}</text>')
    out.append(
        f'<text transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.1f}) rotate(-90)" text-anchor="middle" fill="#3f3f46">{escape(y_label)}</text>'
    )
    at = LEFT
    for k, curve in enumerate(curves):
        style = f'stroke="{COLORS[k % len(COLORS)]}" stroke-width="2"' + (f' stroke-dasharray="{DASHES[k]}"' if DASHES[k % len(DASHES)] else "")
        out.append(f'<path d="{_path(curve, at_x, at_y, high)}" fill="none" {style}/>')
        out.append(f'<path d="M{at} {HEIGHT - 14}h22" {style}/><text x="{at + 27}" y="{HEIGHT - 10}" fill="#18181b">{escape(curve.label)}</text>')
        at += 27 + 14 + round(6.1 * len(curve.label))
    return "\n".join([*out, "</svg>", ""])


def _path(curve: Curve, at_x, at_y, high: float) -> str:  # type: ignore[no-untyped-def]
    parts, pen_up = [], True
    for x, y in zip(curve.x, curve.y, strict=True):
        if math.isnan(y) or y > high + 1e-9:
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{at_x(x):.1f} {at_y(y):.1f}")
        pen_up = False
    return "".join(parts)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values from below `low` to above `high`, about this many: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def number(x: float) -> str:
    """A tick's label."""
    return f"{0.0 if abs(x) < 1e-12 else x:g}"
