"""What the sections of a configuration are made of: strict numbers, limits, and the base of every section."""

import sys
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict

MOST_RESPONSES = 1_048_576
"""Responses in one rollout batch."""
MOST_TOKENS = 1_000_000
"""Tokens in a prompt, and in a response."""
MOST_UPDATES = 100_000_000
"""Optimizer updates of a run, and of a pause between two events in it."""


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) <= _LARGEST:  # NaN, infinity and whole numbers that no float holds
        raise ValueError("must be a finite number")
    return value


_LARGEST = sys.float_info.max


def _none(value: Any) -> Any:
    return None if value == "none" else value


def given_options(section: BaseModel) -> dict[str, Any]:
    """Extra keys of a section that names a row; "none" switches an option off, but is the name of a kernel."""
    return {k: v if k == "kernel" else _none(v) for k, v in (section.__pydantic_extra__ or {}).items()}


Off = BeforeValidator(_none)
"""TOML has no null: the word "none" switches off what is on by default."""
Real = Annotated[float, BeforeValidator(_number)]
"""A number: no truth value, no text."""
Whole = Annotated[int, Strict()]
"""A whole number: no truth value, no text, no fraction."""
Flag = Annotated[bool, Strict()]
"""true or false: no number, no text."""


class Section(BaseModel):
    """A table of the file: frozen, keys that it does not know refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)
