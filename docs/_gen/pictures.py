"""The pictures of docs/async.md as SVG text: when groups are written and trained on, what becomes of responses in flight, which ratio a token has."""

from html import escape

WIDTH = 720
INK, PALE, LINE = "#18181b", "#52525b", "#a1a1aa"
VERSIONS = ("#bfdbfe", "#fed7aa", "#bbf7d0")
"""Fill of what the first, second and third published weights wrote."""


def pages() -> dict[str, str]:
    """Path below docs/ -> text."""
    return {"img/async-age.svg": age(), "img/async-in-flight.svg": in_flight(), "img/async-ratios.svg": ratios()}


def _svg(title: str, height: int, parts: list[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="4" fill="#ffffff"/>',
        _text(16, 22, title, size=13),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, fill: str, text: str = "", *, height: int = 26, dash: bool = False) -> str:
    edge = f'stroke="{LINE}"' + (' stroke-dasharray="3 3"' if dash else "")
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="3" fill="{fill}" {edge}/>'
    return box + (_text(x + width / 2, y + height / 2 + 4, text, anchor="middle") if text else "")


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{PALE}" fill="none"/><circle cx="{to_x:g}" cy="{to_y:g}" r="2.5" fill="{PALE}"/>'


def _caption(y: float, *lines: str) -> list[str]:
    return [_text(16, y + 16 * i, line, fill=PALE) for i, line in enumerate(lines)]


def age() -> str:
    """Batches beside updates, K = 2 and max_age = 2: one update and one batch each take one unit of time."""
    every, bound, updates, unit, left = 2, 2, 6, 92.0, 108.0
    parts = [_text(16, 64, "trainer"), _text(16, 152, "workers")]
    for u in range(updates):
        x = left + unit * (u + 0.5)
        parts.append(_box(x, 46, unit - 6, "#f4f4f5", f"update {u}"))
    for v in range(0, updates + 1, every):
        x = left + unit * (v + 0.5) - 3
        parts.append(f'<path d="M{x:g} 36V186" stroke="{LINE}" stroke-dasharray="4 3"/>')
        parts.append(_text(x, 202, f"weights of version {v}", fill=PALE, size=11, anchor="middle" if v < updates else "end"))
    for b in range(updates + 1):
        started = max(b - 1, 0) // every * every  # batch b is begun while update b - 1 runs
        x = left + unit * (b - 0.5)
        parts.append(_box(x, 134, unit - 6, VERSIONS[started // every], f"batch {b}"))
        if b < updates:
            parts.append(_arrow(x + unit - 6, 134, x + unit + 4, 72))
            parts.append(_text(x + unit + 12, 108, f"age {b - started}", size=11, fill=PALE))
            assert b - started <= bound
    parts += _caption(
        228,
        f"schedule.sync_every = {every}, schedule.max_age = {bound}. Colours are versions. An age counts updates from the weights that wrote a group",
        "to the update that trains on it. A fourth batch under the first weights would be 3 updates old: it is not begun.",
    )
    return _svg("Staleness: workers are a batch ahead of the trainer", 258, parts)


def in_flight() -> str:
    """One response over one publication, under each option."""
    first, second = VERSIONS[:2]
    parts = [
        _text(16, 54, 'in_flight = "keep"'),
        _text(16, 110, 'in_flight = "finish"'),
        _text(16, 166, "reuse_kv = true"),
        f'<path d="M400 34V190" stroke="{LINE}" stroke-dasharray="4 3"/>',
        _text(400, 206, "publication of version 4", fill=PALE, anchor="middle"),
        _box(160, 38, 236, first, "version 2"),
        _box(404, 38, 34, "#ffffff", dash=True),
        _box(442, 38, 200, second, "version 4"),
        _text(404, 78, "tokens so far are read again under version 4", size=11, fill=PALE),
        _box(160, 94, 436, first, "version 2, to its end"),
        _text(606, 111, "then load", size=11, fill=PALE),
        _box(160, 150, 236, first, "version 2"),
        _box(404, 150, 210, second, "version 4, on the old cache"),
    ]
    parts += _caption(
        230,
        "Every token keeps the log-prob and the version of the weights that sampled it. With reuse_kv no weights assign exactly",
        "the second part's log-probs: such responses are marked, and counted as async/reused_cache_frac.",
    )
    return _svg("A response in flight when weights are published", 260, parts)


def ratios() -> str:
    """A relayed response whose suffix was kept over a publication, trained on at version 5."""
    cells = (
        (112, 170, "#e4e4e7", "version 0, a relayed prefix", "its own log-probs", "none", "not counted"),
        (286, 190, VERSIONS[0], "version 3", "its own log-probs", "none", "2 updates"),
        (480, 190, VERSIONS[1], "version 5", "its own, or the trainer's", "trainer against engine", "0"),
    )
    parts = [_text(16, y, text) for y, text in ((63, "written by"), (103, "ratio to"), (131, "correction"), (159, "age"))]
    for x, width, fill, name, *rows in cells:
        parts.append(_box(x, 46, width, fill, name))
        parts += [_text(x + width / 2, 103 + 28 * i, text, anchor="middle") for i, text in enumerate(rows)]
    parts += _caption(
        194,
        "The policy holds 5 updates. The ratio to whoever wrote a token holds drift and mismatch together. Under",
        "ratio.denominator = proximal the trainer's recomputation stands in for the sampler where both hold the same version;",
        "a correction acts there and nowhere else.",
    )
    return _svg("Which policy a token is compared with", 240, parts)
