"""The section on continuation gaps: how often student and teacher reach a right answer from the student's own prefixes."""

from collections.abc import Sequence
from html import escape
from typing import Any

from nearpolicy.report.read import Run, read_json

SIDES = (("student", "Student"), ("teacher", "Teacher"), ("gap", "Gap"))
MOST_FILES = 4
"""Checkpoints shown of a run, the last ones."""
MOST_ROWS = 99


def continuation_section(runs: Sequence[Run]) -> str:
    """A table for each measured checkpoint; empty when nothing was measured."""
    parts = []
    for run in runs:
        head = f"{escape(run.name)}: " if len(runs) > 1 else ""
        for path in sorted((run.path / "continuation").glob("*.json"))[-MOST_FILES:]:
            document = read_json(path, run.notes)
            if isinstance(document, dict) and (rows := _rows(document)):
                parts.append(f"<h3>{head}<code>{escape(path.stem)}</code></h3>{_facts(document)}{_table(rows)}")
    if not parts:
        return ""
    return (
        '<section id="continuation"><h2>Continuation gap</h2><p class="hint">The student\'s own responses, cut at a share of their length and '
        f"finished by both models with the same noise: share of right answers, with 95 % intervals over prompts.</p>{''.join(parts)}</section>"
    )


def _facts(document: dict[str, Any]) -> str:
    kl = _cell(document.get("kl"))
    return (
        f'<p class="hint">teacher <code>{escape(str(document.get("teacher", "?")))}</code>, {escape(str(document.get("prompts", "?")))} prompts × '
        f"{escape(str(document.get('samples', '?')))} responses, temperature {escape(str(document.get('temperature', '?')))}; token KL {kl} nats</p>"
    )


def _rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = document.get("continuation_gap")
    return [r for r in rows if isinstance(r, dict) and _number(r.get("fraction"))][:MOST_ROWS] if isinstance(rows, list) else []


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for _, title in SIDES)
    body = "".join(
        f'<tr><th scope="row">{100 * row["fraction"]:g} %</th>'
        + "".join(f"<td>{_cell(row.get(side))}{_bar(row.get(side)) if side == 'gap' else ''}</td>" for side, _ in SIDES) + "</tr>"
        for row in rows
    )  # fmt: skip
    return f'<table class="bars"><thead><tr><th scope="col">kept</th>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: Any) -> str:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_number, value)):
        return "–"
    return f"{value[0]:.3f} <small>[{value[1]:.3f}, {value[2]:.3f}]</small>"


def _bar(value: Any) -> str:
    whole = isinstance(value, list) and len(value) == 3 and _number(value[0])
    return f' <i class="cutbar" style="width:{60 * min(max(value[0], 0.0), 1.0):.1f}%"></i>' if whole else ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
