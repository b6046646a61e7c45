"""The method table as text, from the rows themselves: what `nearpolicy methods` prints and the docs are generated from."""

from typing import Any

from nearpolicy.methods import METHODS, Row, method


def default_text(value: Any) -> str:
    """A default as one writes it on the command line."""
    return "none" if value is None else str(list(value) if isinstance(value, tuple) else value).replace("True", "true").replace("False", "false")


def describe(name: str | None) -> str:
    """One method with every option, or a line for each method.

    Raises:
        UsageError: an unknown name.
    """
    if name is None:
        width = max(map(len, METHODS))
        rows = [f"{row.name:{width}}  {row.formula}\n{'':{width}}  {row.source}" for row in METHODS.values()]
        return "\n".join([*rows, "", "`nearpolicy methods NAME` shows a method's options."])
    return describe_row(method(name).row)


def describe_row(row: Row) -> str:
    """Formula, source, differences and options of one row."""
    options = row.all_options()
    width = max(map(len, options))
    values = method(row.name).options
    lines = [
        row.name,
        f"  {row.formula}",
        f"  source: {row.source}",
        f"  where public code differs: {row.differences}",
        f"  aggregate {row.aggregate}; advantages {'divided by' if row.normalize_std else 'not divided by'} the group's std",
        "  options:",
        *(f"    {n:{width}}  {default_text(values[n]):14}  {o.text}" for n, o in options.items()),
    ]
    return "\n".join(lines)
