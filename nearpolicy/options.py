"""Options of methods: each has a default, a meaning and a range, written once where a row declares it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method."""

    default: Any
    text: str
    """What it does, in one line."""
    expects: str
    """The values it takes, in words."""
    parse: Callable[[Any], Any]
    """The value in canonical form; raises ValueError when it is out of range."""


def number(default: float | None, text: str, *, low: float = -math.inf, high: float = math.inf, above: bool = False, off: bool = False) -> Option:
    """A finite number in [low, high], or (low, high] with `above`; None as well with `off`."""

    def parse(value: Any) -> float | None:
        if value is None and off:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        x = float(value)
        if not math.isfinite(x) or x > high or (x <= low if above else x < low):
            raise ValueError
        return x

    bounds = [] if low == -math.inf else [f"{'>' if above else '>='} {low:g}"]
    bounds += [] if high == math.inf else [f"<= {high:g}"]
    return Option(default, text, "a finite number" + "".join(f" {b}" for b in bounds) + (", or None (off)" if off else ""), parse)


def whole(default: int | None, text: str) -> Option:
    """A whole number of at least 1, or None."""

    def parse(value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError
        return value

    return Option(default, text, "a whole number >= 1, or None", parse)


def choice(default: str | None, text: str, choices: Sequence[str | None]) -> Option:
    """One of these names; None where it is among them."""

    def parse(value: Any) -> str | None:
        if (value is None or isinstance(value, str)) and value in choices:
            return value
        raise ValueError

    return Option(default, text, " | ".join("None" if c is None else c for c in choices), parse)


def flag(default: bool, text: str) -> Option:
    """True or False."""

    def parse(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    return Option(default, text, "true | false", parse)


def pair(default: tuple[float, float], text: str) -> Option:
    """Two finite positive numbers."""

    def parse(value: Any) -> tuple[float, float]:
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError
        one = number(None, "", low=0, above=True)
        return (one.parse(value[0]), one.parse(value[1]))

    return Option(default, text, "two numbers > 0", parse)


def resolve(owner: str, options: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of `owner` with the given values in place of the defaults.

    Raises:
        UsageError: a name that `owner` does not take (with the nearest one), or a value out of range.
    """
    for name in given:
        if name not in options:
            raise UsageError(f"{owner}: option", got=repr(name), expected="an option of this method", do=nearest(name, options))
    out: dict[str, Any] = {}
    for name, option in options.items():
        value = given.get(name, option.default)
        try:
            out[name] = option.parse(value)
        except ValueError:
            raise UsageError(f"{owner}: option {name}", got=repr(value), expected=option.expects, do=f"{name}: {option.text}.") from None
    return out
