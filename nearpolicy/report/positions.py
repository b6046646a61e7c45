"""The section by position in the response, and the tokens at the cuts of relayed runs: data for the script, markup, limits.

A run's rows are the lists `position/<quantity>/<axis>` of its train rows (one value a bin, null where nothing was measured) with the inner
borders of the bins from `position_edges.json`; the tokens come from `truncation_tokens.json`.
"""

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from nearpolicy.report.read import Run
from nearpolicy.report.samples import spread

NUMBERS = 150_000
"""Most numbers of all tables together, at scale 1."""
MOST_STEPS = 60
"""Most rows drawn of one run."""
TOKENS = 15
"""Most tokens listed for each side of a cut, at scale 1."""

FIGURES = (
    ("entropy", "Entropy", ("entropy",)),
    ("entropy_behavior", "Behaviour entropy", ("entropy_behavior", "surprisal_behavior")),
    ("clip_frac", "Clip share", ("clip_frac",)),
    ("abs_log_ratio", "|log ratio|", ("abs_log_ratio",)),
    ("log_ratio", "Log ratio", ("log_ratio",)),
    ("raw_weight", "Raw weight", ("raw_weight",)),
    ("weight", "Gradient weight", ("weight",)),
    ("weight_mass", "Weight mass", ("weight_mass",)),
    ("gradient_share", "Gradient share", ("gradient_share",)),
    ("advantage_mass", "Advantage mass", ("advantage_mass",)),
    ("kl_teacher", "Token KL to the teacher", ("kl_teacher",)),
    ("prefix_log_ratio", "Prefix drift: log teacher / student", ("prefix_log_ratio",)),
    ("prefix_logp_student", "Prefix log-likelihood, student", ("prefix_logp_student",)),
    ("prefix_logp_teacher", "Prefix log-likelihood, teacher", ("prefix_logp_teacher",)),
    ("signal_weight", "Weight on the teacher's signal", ("signal_weight",)),
    ("mismatch", "Mismatch of trainer and engine", ("mismatch",)),
    ("mismatch_kl", "KL(engine || trainer), k3", ("mismatch_kl",)),
    ("age", "Age", ("age",)),
    ("tokens", "Trained tokens", ("tokens",)),
)
"""Figure, title and the quantities it may draw: the first that the run has. A quantity that none names gets a figure under its own name."""

_NAME = re.compile(r"position/\w+/\w+", re.ASCII)

AXES = {"rel": "tenths of the response", "abs": "token index"}
"""Name of each axis in the page."""


def position_payload(runs: Sequence[Run], scale: float) -> list[dict[str, Any]]:
    """For each run `{"steps", "bins": {axis: [label]}, "tables": {"quantity/axis": [[value of each bin] for each step]}}`; {} without tables."""
    width = sum(len(rows[0][1]) for run in runs for name, rows in run.tables.items() if rows and _NAME.fullmatch(name)) or 1
    most = max(min(int(NUMBERS * scale / width), MOST_STEPS), 2)
    return [_payload(run, most) for run in runs]


def _payload(run: Run, most: int) -> dict[str, Any]:
    steps = spread(sorted({step for rows in run.tables.values() for step, _ in rows}), most)
    bins = {axis: labels(axis, run.position_edges.get(axis, [])) for axis in AXES}
    tables: dict[str, list[list[float | None]]] = {}
    for name, rows in run.tables.items():
        own = dict(rows)
        axis = name.rpartition("/")[2]
        if not _NAME.fullmatch(name) or not bins.get(axis) or any(len(values) > len(bins[axis]) for values in own.values()):
            continue  # no name of ours, or a run of another version, whose bins are not known
        tables[name.removeprefix("position/")] = [_short(own.get(step, [])) for step in steps]
    used = {axis: max((len(r) for n, t in tables.items() if n.endswith(f"/{axis}") for r in t), default=0) for axis in AXES}
    return {"steps": steps, "bins": {axis: bins[axis][:n] for axis, n in used.items() if n}, "tables": tables} if tables else {}


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None else float(f"{v:.4g}") for v in values]


def labels(axis: str, edges: Sequence[float]) -> list[str]:
    """A name for each bin between the inner borders: `0-10 %` ... for shares, `0`, `1`, `2-3` ... for tokens; [] without borders."""
    if not edges:
        return []
    if axis == "rel":
        ends = [0.0, *edges, 1.0]
        return [f"{100 * a:.0f}–{100 * b:.0f} %" for a, b in pairwise(ends)]
    starts = [0, *(int(e) for e in edges)]
    return [f"{a}" if b == a + 1 else f"{a}–{b - 1}" for a, b in pairwise(starts)] + [f"{starts[-1]}+"]


def position_section(runs: Sequence[Run], positions: Sequence[dict[str, Any]]) -> str:
    """Toolbar and one figure for each quantity that some run has; empty without tables."""
    known = {name for own in positions for name in own.get("tables", {})}
    shown = [(name, title, own) for name, title, quantities in FIGURES
             if (own := [q for q in quantities if any(f"{q}/{axis}" in known for axis in AXES)])]  # fmt: skip
    named = {q for _, _, quantities in FIGURES for q in quantities}
    others = sorted({name.rpartition("/")[0] for name in known} - named)
    shown += [(name, name.replace("_", " ").capitalize(), [name]) for name in others]
    if not shown:
        return ""
    have = [i for i, own in enumerate(positions) if own]
    options = "".join(f'<option value="{i}">{escape(runs[i].name)}</option>' for i in have)
    together = '<option value="all">all runs, last rows</option>' if len(have) > 1 else ""
    pick = f'<label>Run <select id="position-run">{options}{together}</select></label>' if len(runs) > 1 else ""
    axes = "".join(f'<option value="{axis}">{name}</option>' for axis, name in AXES.items())
    figures = "".join(_figure(name, title, own, runs) for name, title, own in shown)
    return (
        '<section id="positions"><h2>By position in the response</h2><div class="toolbar">'
        f'{pick}<label>Position <select id="position-axis">{axes}</select></label><span id="position-scale" class="scale"></span></div>'
        '<p class="hint">Curves: one line a logged step, early to late by colour. Below: the same as a map, steps from left to right, the end of the '
        f'response at the top.</p><div class="grid">{figures}</div></section>'
    )


def _figure(name: str, title: str, quantities: Sequence[str], runs: Sequence[Run]) -> str:
    specs = [spec for q in quantities for run in runs if (spec := run.spec(f"position/{q}")).text]
    unit = f' <span class="unit">{escape(specs[0].unit)}</span>' if specs else ""
    text = escape(specs[0].text) if specs else ""
    return (
        f'<figure data-position="{name}" data-quantities="{" ".join(quantities)}" data-unit="{escape(specs[0].unit) if specs else ""}" '
        f'aria-label="{escape(title)} by position"><figcaption><h3>{escape(title)}{unit}</h3><p class="text">{text}</p></figcaption>'
        '<div class="plot"></div><div class="map"></div><p class="readout">&nbsp;</p></figure>'
    )


def truncation_section(runs: Sequence[Run], scale: float) -> str:
    """Bars and counts of the tokens on both sides of the cuts, for each run and strategy; empty without relayed responses."""
    most = max(int(TOKENS * scale), 3)
    parts = []
    for run in runs:
        for strategy, own in run.truncation.items():
            head = f"{escape(run.name)}: " if len(runs) > 1 else ""
            facts = f"{own['responses']:,} relayed responses, {own['uncut']:,} with nothing kept, {own['finished']:,} ended inside what was kept"
            sides = (("Last token kept", "last_kept"), ("First token written anew", "first_new"))
            tables = "".join(_bars(title, own[side], most) for title, side in sides)
            parts.append(f'<h3>{head}cut <code>{escape(strategy)}</code></h3><p class="hint">{facts}</p><div class="grid cuts">{tables}</div>')
    return f'<section id="truncation"><h2>Tokens at the cuts</h2>{"".join(parts)}</section>' if parts else ""


def _bars(title: str, rows: Sequence[tuple[str, int, int]], most: int) -> str:
    whole = sum(count for _, _, count in rows) or 1
    top = rows[0][2] if rows else 1
    body = "".join(
        f'<tr><th scope="row" title="token {token}"><code>{escape(visible(text))}</code></th><td><i class="cutbar" '
        f'style="width:{100 * count / top:.1f}%"></i></td><td class="sum">{count:,} <small>{100 * count / whole:.3g} %</small></td></tr>'
        for text, token, count in rows[:most]
    )
    rest = sum(count for _, _, count in rows[most:])
    last = f'<tr><th scope="row">{len(rows) - most} more listed</th><td></td><td class="sum">{rest:,}</td></tr>' if len(rows) > most else ""
    return f'<table class="bars"><caption>{escape(title)}</caption><tbody>{body}{last}</tbody></table>'


def visible(text: str) -> str:
    """A token with its white space shown, at most 40 characters."""
    for plain, sign in (("\n", "⏎"), ("\t", "⇥"), (" ", "␣")):
        text = text.replace(plain, sign)
    return text[:40] or "(empty)"
