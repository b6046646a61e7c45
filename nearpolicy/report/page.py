"""Puts the page together: one HTML file that needs no network, no server and no other file.

Everything that a run wrote (prompts, responses, messages, configuration) is untrusted text. In the markup it is escaped; in the data block
every `<`, `>` and `&` is a JSON escape, and the script only ever assigns it as text. A content policy names the hashes of the page's
scripts, so that even markup that slipped through could neither run nor load anything.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from nearpolicy.report.charts import SECTIONS
from nearpolicy.report.continuation import continuation_section
from nearpolicy.report.payload import payload
from nearpolicy.report.positions import position_section, truncation_section
from nearpolicy.report.read import Run
from nearpolicy.report.summary import differences, duration, flatten, key_numbers, time_shares, verdict

CONFIG_CHARACTERS = 40_000
"""Most characters of a run's configuration and of its environment, at scale 1."""
ALARMS = 200
"""Most alarms listed, at scale 1."""
SHOWN = 8
"""Runs drawn at first, one for each colour; report.js knows the same number."""
ARROWS = {"up": ("↑", "more is better"), "down": ("↓", "less is better"), "band": ("↕", "should leave neither side")}
"""Sign and meaning of a metric's direction."""


def asset(name: str) -> str:
    """A file of the report's `assets` folder."""
    return (files("nearpolicy.report") / "assets" / name).read_text(encoding="utf-8")


def render(runs: Sequence[Run], scale: float = 1.0) -> str:
    """The page of these runs. `scale` in (0, 1] shrinks data, samples and texts when a page came out too large."""
    data = payload(runs, scale)
    scripts = [_inline(asset("uPlot.iife.min.js")), _inline(asset("positions.js")), _inline(asset("report.js"))]
    hashes = " ".join("'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'" for s in scripts)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [_header(runs), _notes(runs), _key_numbers(runs), _toolbar(runs)]
    body += [_section(name, [c for c in data["charts"] if c["section"] == name]) for name in SECTIONS]
    body += [position_section(runs, [run["positions"] for run in data["runs"]]), truncation_section(runs, scale)]
    body += [continuation_section(runs)]
    body += [_time(runs), _samples(data), _alarms(runs, scale), _more(data["more"]), _config(runs, scale)]
    return "\n".join((
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; script-src {hashes}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)} · nearpolicy</title>", f"<!-- The charts are drawn by uPlot 1.6.\n{asset('uPlot.LICENSE.txt')}-->",
        f"<style>{asset('uPlot.min.css')}\n{asset('report.css')}</style>", "</head>", "<body>", "<main>", *(part for part in body if part), "</main>",
        '<div id="tip" role="tooltip" hidden></div>', f'<script type="application/json" id="data">{_json(data)}</script>',
        *(f"<script>{s}</script>" for s in scripts), "</body>", "</html>", "",
    ))  # fmt: skip


def _inline(script: str) -> str:
    """A script as an element's content; the vendored and own sources must not close the element."""
    assert "</script" not in script.lower(), "an asset would end its own script element"
    return script


def _json(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _swatch(index: int) -> str:
    return f'<i class="swatch c{index % 8}"></i>'


def _header(runs: Sequence[Run]) -> str:
    cards = []
    for i, run in enumerate(runs):
        v = verdict(run)
        status = re.sub(r"[^a-z]+", "-", v.status)
        outcome = f'<p class="outcome"><span>{escape(v.outcome_label)}</span> {escape(v.outcome)}</p>' if v.outcome else ""
        message = f'<p class="message">{escape(run.status_message)}</p>' if run.status_message else ""
        facts = " · ".join(escape(f) for f in v.facts)
        calm = "alarmed" if run.alarms else "calm"
        cards.append(
            f'<article class="verdict"><h2>{_swatch(i)}{escape(v.name)} <b class="status {status}">{escape(v.status)}</b></h2>{outcome}'
            f'<p class="facts">{facts} · <span class="{calm}">{escape(v.alarms)}</span></p>{message}</article>'
        )
    return f'<header><p class="brand">nearpolicy report</p>{"".join(cards)}</header>'


def _notes(runs: Sequence[Run]) -> str:
    items = [f"<li>{escape(f'{run.name}: {note}' if len(runs) > 1 else note)}</li>" for run in runs for note in run.notes[:20]]
    return f'<aside class="notes"><ul>{"".join(items)}</ul></aside>' if items else ""


def _run_heads(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return "<th></th>"
    return "".join(f'<th scope="col">{_swatch(i)}{escape(run.name)}</th>' for i, run in enumerate(runs))


def _key_numbers(runs: Sequence[Run]) -> str:
    rows = [
        f'<tr title="{escape(row.text)}"><th scope="row">{escape(row.label)}</th>'
        + "".join(f"<td>{escape(c)}{f' <small>{escape(row.unit)}</small>' if row.unit and c != '–' else ''}</td>" for c in row.cells) + "</tr>"
        for row in key_numbers(runs)
    ]  # fmt: skip
    if not rows:
        return ""
    head = f"<thead><tr><th></th>{_run_heads(runs)}</tr></thead>" if len(runs) > 1 else ""
    caption = "Arrows go from the first to the last tenth of the run (pass@1: first and last evaluation, with its interval)."
    return (
        f'<section id="numbers"><h2>Key numbers</h2><div class="scroll"><table class="numbers">{head}<tbody>{"".join(rows)}</tbody></table></div>'
        f'<p class="hint">{caption}</p></section>'
    )


def _toolbar(runs: Sequence[Run]) -> str:
    legend = "".join(
        f'<button type="button" class="run" data-run="{i}" aria-pressed="{"true" if i < SHOWN else "false"}">{_swatch(i)}{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    return (
        f'<nav class="toolbar" aria-label="Charts"><div class="legend">{legend if len(runs) > 1 else ""}</div>'
        '<label>Smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0.6"></label>'
        '<span class="hint">Drag to zoom, double-click to reset; ← → move the cursor of a focused chart.</span></nav>'
    )


def _figure(chart: dict[str, Any]) -> str:
    sign, meaning = ARROWS.get(chart["direction"], ("", ""))
    arrow = f' <abbr title="{meaning}">{sign}</abbr>' if sign else ""
    unit = f' <span class="unit">{escape(chart["unit"])}</span>' if chart["unit"] and chart["unit"] != "value" else ""
    key = ""
    lines = [line for line in chart["lines"] if line["label"]]
    if len(lines) > 1:
        key = '<p class="key">' + "".join(f'<span class="dash{i}">{escape(line["label"])}</span>' for i, line in enumerate(lines)) + "</p>"
    return (
        f'<figure data-chart="{escape(chart["id"])}" tabindex="0" aria-label="{escape(chart["title"])}">'
        f"<figcaption><h3>{escape(chart['title'])}{unit}"
        f'{arrow}</h3><p class="text">{escape(chart["text"])}</p>{key}</figcaption><div class="plot"></div><p class="readout">&nbsp;</p></figure>'
    )


def _section(name: str, charts: list[dict[str, Any]]) -> str:
    if not charts:
        return ""
    return f'<section><h2>{escape(name)}</h2><div class="grid">{"".join(map(_figure, charts))}</div></section>'


def _time(runs: Sequence[Run]) -> str:
    """Stacked bars: where the wall time went."""
    bars, labels = [], []
    for i, run in enumerate(runs):
        shares = time_shares(run)
        whole = sum(seconds for _, seconds in shares)
        labels += [label for label, _ in shares if label not in labels]
        parts = "".join(
            f'<i class="part {label}" style="width:{100 * seconds / whole:.2f}%" title="{label}: {duration(seconds)}">'
            f"{f'{100 * seconds / whole:.0f} %' if seconds / whole > 0.06 else ''}</i>"
            for label, seconds in shares
        )
        if shares:
            name = f"{_swatch(i)}{escape(run.name)}" if len(runs) > 1 else "whole run"
            bars.append(f'<tr><th scope="row">{name}</th><td><div class="bar">{parts}</div></td><td class="sum">{duration(whole)}</td></tr>')
    if not bars:
        return ""
    key = "".join(f'<span><i class="part {label}"></i>{label}</span>' for label in labels)
    return f'<section id="time"><h2>Where the time went</h2><p class="key">{key}</p><table class="bars">{"".join(bars)}</table></section>'


def _samples(data: dict[str, Any]) -> str:
    if not any(run["samples"] for run in data["runs"]):
        return ""
    options = "".join(f'<option value="{i}">{escape(run["name"])}</option>' for i, run in enumerate(data["runs"]) if run["samples"])
    pick = f'<label>Run <select id="sample-run">{options}</select></label>' if len(data["runs"]) > 1 else ""
    return (
        f'<section id="samples"><h2>Sample responses</h2><div class="toolbar">{pick}<label>Colour by <select id="sample-colour">'
        '<option value="weight">token weight</option><option value="logp">log-prob</option><option value="version">policy version</option>'
        '</select></label><span id="sample-scale" class="scale"></span></div><div id="sample-list"></div></section>'
    )


def _alarms(runs: Sequence[Run], scale: float) -> str:
    alarms = [(a, i) for i, run in enumerate(runs) for a in run.alarms]
    if not alarms:
        return ""
    most = max(int(ALARMS * scale), 10)
    rows = [
        f"<tr><td>{a.step:,}</td><td>{_swatch(i) + escape(runs[i].name) + ': ' if len(runs) > 1 else ''}<b>{escape(a.alarm)}</b></td>"
        f"<td>{escape(a.message[:500])}</td></tr>"
        for a, i in sorted(alarms)[:most]
    ]
    more = f'<p class="hint">{len(alarms) - most} later alarms are not listed.</p>' if len(alarms) > most else ""
    head = '<thead><tr><th scope="col">Step</th><th scope="col">Alarm</th><th scope="col">What happened</th></tr></thead>'
    table = f'<table class="alarms">{head}<tbody>{"".join(rows)}</tbody></table>'
    return f'<section id="alarms"><h2>Alarms</h2><div class="scroll">{table}</div>{more}</section>'


def _more(charts: list[dict[str, Any]]) -> str:
    if not charts:
        return ""
    grid = f'<div class="grid">{"".join(map(_figure, charts))}</div>'
    return f'<section><details id="more"><summary>More metrics ({len(charts)})</summary>{grid}</details></section>'


def _config(runs: Sequence[Run], scale: float) -> str:
    parts = ["<section><h2>Configuration and environment</h2>"]
    if len(runs) > 1 and (rows := differences(runs)):
        body = "".join(f"<tr><th>{escape(k)}</th>{''.join(f'<td>{escape(v[:200])}</td>' for v in vs)}</tr>" for k, vs in rows[:200])
        head = f"<thead><tr><th>Settings that differ</th>{_run_heads(runs)}</tr></thead>"
        parts.append(f'<div class="scroll"><table class="numbers">{head}<tbody>{body}</tbody></table></div>')
    most = max(int(CONFIG_CHARACTERS * scale), 1000)
    for i, run in enumerate(runs):
        name = f" of {_swatch(i)}{escape(run.name)}" if len(runs) > 1 else ""
        environment = "\n".join(f"{key} = {value}" for key, value in flatten(run.environment).items())
        for label, text in (("Resolved configuration", run.config_text), ("Environment", environment)):
            if text:
                shown = escape(text[:most]) + (f"\n[... {len(text) - most} characters left out ...]" if len(text) > most else "")
                parts.append(f"<details><summary>{label}{name}</summary><pre>{shown}</pre></details>")
    return "".join(parts) + "</section>"
