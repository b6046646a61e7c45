"""The page of a relay inference: pass@k of every curve and the differences to the single model, as inline SVG, with the numbers as a table."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from nearpolicy.report.page import asset

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 300, 52, 34, 10, 14
"""Of a chart, in pixels."""


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    colour: int
    """Class c0 ... c7 of the report's style."""
    points: Sequence[tuple[int, float, float, float]]
    """(k, mean, low, high), ascending in k."""


def relay_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One HTML page that needs no other file. `results`: name -> `Relay.document` with `checkpoint` and `earlier`."""
    body = "".join(_section(name, made) for name, made in results.items())
    style = f"{asset('report.css')}\nsvg {{ width: 100%; height: auto; max-width: {WIDTH}px; font-size: 12px; }} svg text {{ fill: var(--muted); }}"
    style += "\nfigure .key span::before { content: none; } .scroll { margin-top: 16px; }"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>Relay inference · nearpolicy</title><style>{style}</style></head><body><main>"
        f'<p class="brand">nearpolicy relay inference</p>{body}</main></body></html>\n'
    )


def _section(name: str, made: Mapping[str, Any]) -> str:
    curves = [Series(curve, i % 8, _points(values)) for i, (curve, values) in enumerate(made["curves"].items())]
    colours = {s.name: s.colour for s in curves}
    gaps = [Series(f"relay {f}", colours[f"relay {f}"], _points(own["single"])) for f, own in made["differences"].items()]
    facts = (
        f"{made['prompts']:,} prompts x {made['samples']:,} samples, temperature {made['temperature']:g}, top-p {made['top_p']:g}. Single: "
        f"{made['checkpoint']}. Earlier: {made['earlier']}. Bands and bars: 95 % by bootstrap over prompts, differences paired by prompt."
    )
    kept = ", ".join(f"{tokens:.1f} tokens at {f}" for f, tokens in made["kept"].items())
    charts = "".join(
        f'<figure><figcaption><h3>{title}</h3><p class="text">{text}</p><p class="key">{_legend(series)}</p></figcaption>'
        f"{chart(series, zero=zero)}</figure>"
        for title, text, series, zero in (
            ("pass@k", "share of prompts solved by at least one of k responses", curves, False),
            ("Relayed minus single", "difference of pass@k on the same prompts", gaps, True),
        )
    )
    return (
        f'<section><h2>{escape(name)}</h2><p class="hint">{escape(facts)} Kept of the earlier responses on average: {escape(kept)}.</p>'
        f'<div class="grid">{charts}</div><div class="scroll">{_table(made)}</div></section>'
    )


def _points(values: Mapping[str, Mapping[str, Any]]) -> list[tuple[int, float, float, float]]:
    return sorted((int(k), v["mean"], v["low"], v["high"]) for k, v in values.items() if v["mean"] is not None)


def _legend(series: Sequence[Series]) -> str:
    return "".join(f'<span><i class="swatch c{s.colour}"></i>{escape(s.name)}</span>' for s in series)


def chart(series: Sequence[Series], *, zero: bool) -> str:
    """Lines with intervals over k (logarithmic): bands, or bars and a line at 0 for differences; empty without a point."""
    points = [p for s in series for p in s.points]
    if not points:
        return '<p class="hint">Not enough scored responses.</p>'
    ks = sorted({p[0] for p in points})
    low, high = min(p[2] for p in points), max(p[3] for p in points)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    pad = max(0.06 * (high - low), 0.005)
    low, high = (low - pad, high + pad) if zero else (max(low - pad, 0.0), min(high + pad, 1.0))
    sign = "+" if zero else ""
    span = math.log2(ks[-1] / ks[0]) or 1.0

    def x(k: int) -> float:
        return LEFT + 12 + (WIDTH - LEFT - RIGHT - 24) * (math.log2(k / ks[0]) / span if len(ks) > 1 else 0.5)

    def y(v: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - v) / (high - low)

    parts = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="var(--{"line" if v else "muted"})"/>'
             f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{100 * v:{sign}.3g} %</text>'
             for v in ticks(low, high)]  # fmt: skip
    parts += [f'<text x="{x(k):.1f}" y="{HEIGHT - 12}" text-anchor="middle">k = {k}</text>' for k in ks]
    for i, s in enumerate(series):
        shift = 5 * (i - (len(series) - 1) / 2) if zero else 0.0
        parts.append(f'<g class="c{s.colour}">{_line(s, lambda k, d=shift: x(k) + d, y, bars=zero)}</g>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _line(s: Series, x: Any, y: Any, *, bars: bool) -> str:
    path = " ".join(f"{x(k):.1f},{y(mean):.1f}" for k, mean, _, _ in s.points)
    dots = "".join(
        f'<circle cx="{x(k):.1f}" cy="{y(mean):.1f}" r="3" fill="currentColor"><title>{escape(s.name)}, k = {k}: {100 * mean:.2f} % '
        f"[{100 * low:.2f}, {100 * high:.2f}]</title></circle>" for k, mean, low, high in s.points
    )  # fmt: skip
    if bars:
        spread = "".join(f'<line x1="{x(k):.1f}" x2="{x(k):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="currentColor" stroke-width="1.3"/>'
                         for k, _, low, high in s.points)  # fmt: skip
    else:
        outline = [*((k, low) for k, _, low, _ in s.points), *((k, high) for k, _, _, high in reversed(s.points))]
        spread = f'<polygon points="{" ".join(f"{x(k):.1f},{y(v):.1f}" for k, v in outline)}" fill="currentColor" opacity="0.12"/>'
    return f'{spread}<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.8"/>{dots}'


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between `low` and `high`, at most `most` of them or one more."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _table(made: Mapping[str, Any]) -> str:
    ks = [str(k) for k in made["k"]]
    head = "".join(f'<th scope="col">pass@{k}</th>' for k in ks)
    rows = [(name, values, "{:.2f}") for name, values in made["curves"].items()]
    rows += [
        (f"relay {f} minus {other}", values, "{:+.2f}") for f, own in made["differences"].items() for other, values in own.items()
    ]  # fmt: skip
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{_cell(values[k], form)}</td>" for k in ks) + "</tr>"
        for name, values, form in rows
    )
    return f'<table class="numbers"><thead><tr><th>%</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: Mapping[str, Any], form: str) -> str:
    if value["mean"] is None:
        return "–"
    mean, low, high = (form.format(100 * value[end]) for end in ("mean", "low", "high"))
    return f"{mean} <small>[{low}, {high}]</small>"
