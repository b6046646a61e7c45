"""Write the generated pages: method pages and figures, recipes, configuration, metrics, alarms and command line.

    python docs/generate.py            # write them
    python docs/generate.py --check    # exit 1 when a committed page is not what the code says

Everything comes from the code (rows of `nearpolicy.METHODS`, docstrings, the metrics table, click), from docs/notes/*.md (hand-written parts
of the method pages) and docs/notes/values.toml. The output is the same bytes for the same input.
"""

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDERS = ("methods", "reference")
"""Wholly generated: a file in them that the generator does not write is deleted, or reported by --check."""


def generated() -> dict[str, str]:
    """Path below docs/ -> text."""
    sys.path.insert(0, str(DOCS))
    try:
        from _gen import methods, pictures, recipes, reference
    finally:
        sys.path.remove(str(DOCS))
    return {**methods.pages(), **pictures.pages(), **recipes.pages(), **reference.pages()}


def differences(pages: dict[str, str]) -> list[str]:
    """What would change on disk, one line each."""
    out = []
    for name, text in pages.items():
        path = DOCS / name
        if not path.exists():
            out.append(f"missing: docs/{name}")
        elif path.read_bytes() != text.encode():
            out.append(f"out of date: docs/{name}")
    return out + [f"left over: docs/{p.relative_to(DOCS)}" for p in leftovers(pages)]


def leftovers(pages: dict[str, str]) -> list[Path]:
    """Files in the generated folders that nothing writes any more."""
    found = [p for folder in FOLDERS for p in sorted((DOCS / folder).rglob("*")) if p.is_file()]
    return [p for p in found if str(p.relative_to(DOCS)) not in pages]


def main(words: list[str] | None = None) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args(words).check
    pages = generated()
    if check:
        found = differences(pages)
        print("\n".join([*found, "run: python docs/generate.py"] if found else ["docs: up to date"]))
        return 1 if found else 0
    for path in leftovers(pages):
        path.unlink()
    for name, text in pages.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    print(f"docs: {len(pages)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
