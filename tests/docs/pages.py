"""What the tests of the documentation read: pages, fenced blocks, links, inline code."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(p for p in DOCS.rglob("*.md") if "notes" not in p.parts)]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Every fenced block of this language, in order."""
    out = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        out += [Block(page, text.count("\n", 0, m.start()) + 2, m[2]) for m in _BLOCK.finditer(text) if m[1] == language]
    return out


def commands() -> list[tuple[str, str]]:
    """(where, command) of every `$ ` line in console blocks."""
    return [(b.id, line.removeprefix("$ ")) for b in blocks("console") for line in b.text.splitlines() if line.startswith("$ ")]


def prose(page: Path) -> str:
    """The page without fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def inline_code(text: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as python-markdown makes them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in found}


def links(page: Path) -> list[str]:
    """Targets of links and images that stay inside the project."""
    return [t for t in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(page)) if "://" not in t]
