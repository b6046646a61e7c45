"""Options of methods: each has a default, a meaning and a range, written once where a row declares it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpolicy.errors import UsageError, nearest

LARGEST = 1e6
"""Size of the largest number an option takes: powers and exponentials of it must not leave the floats by themselves."""
LONGEST = 1_000_000
"""Largest whole number, in tokens."""


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


def number(default: float | None, text: str, *, low: float = -LARGEST, high: float = LARGEST, above: bool = False, off: bool = False) -> Option:
    """A number in [low, high], or (low, high] with `above`; None as well with `off`."""

    def parse(value: Any) -> float | None:
        if value is None and off:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if not low <= value <= high or (above and value == low):  # NaN is in no range; a huge whole number never becomes a float
            raise ValueError
        return float(value)

    bounds = f"{'>' if above else '>='} {low:g} and <= {high:g}"
    return Option(default, text, f"a number {bounds}" + (", or None (off)" if off else ""), parse)


def whole(default: int | None, text: str) -> Option:
    """A whole number from 1 to LONGEST, or None."""

    def parse(value: Any) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST:
            raise ValueError
        return value

    return Option(default, text, f"a whole number >= 1 and <= {LONGEST}, or None", parse)


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
    """Two positive numbers."""

    def parse(value: Any) -> tuple[float, float]:
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError
        one = number(None, "", low=0, above=True)
        return (one.parse(value[0]), one.parse(value[1]))

    return Option(default, text, f"two numbers > 0 and <= {LARGEST:g}", parse)


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
