"""The verifiers that come with the package: plain functions in TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`.

A completion is a string, or a list of messages when the prompt is one (as TRL hands it over). Verifiers need no clock of their own: the
pool kills what runs too long. An answer that makes no sense raises, so that the row is counted as an error and not as a wrong response.
Standard library only; math-verify (extra `math`) is imported on first use.
"""

import importlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from nearpolicy.errors import UsageError

_UNSIGNED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
_NUMBER = re.compile(
    rf"(?:(?<![A-Za-z0-9_.)\]}}])(?P<sign>[-+\u2212]\$?))?(?:\\[dt]?frac\s*\{{\s*(?P<top>-?[0-9]+)\s*\}}\s*\{{\s*(?P<bottom>-?[0-9]+)\s*\}}"
    rf"|(?<![A-Za-z0-9_])(?P<value>{_UNSIGNED})(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z]))?(?:\s?/\s?(?P<over>[0-9]+(?:\.[0-9]+)?))?)"
)
_MAX_DIGITS = 4000  # beyond it Python refuses to read an integer
_MAX_SHOWN = 60


def needs_answer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward function as a reader of the column `answer`, so that rows without one are refused when they are loaded."""
    function.needs_answer = True  # type: ignore[attr-defined]
    return function


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the contents of its messages joined."""
    return completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None when there is none.

    Reads signs (ASCII or Unicode minus; a minus after a digit, letter or bracket is a subtraction), thousands commas (`1,234.5`; `1,2` are
    two numbers), decimals (`.5`), fractions (`3/4`, `\\frac{3}{4}`) and exponents of up to three digits. A decimal comma is not read, a
    percent sign and units are passed over. A fraction over 0, or more than 4,000 digits, counts as no number.
    """
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if match is None or len(match[0]) > _MAX_DIGITS:
        return None
    try:
        if match["top"] is not None:
            value = Fraction(int(match["top"]), int(match["bottom"]))
        else:
            value = Fraction(match["value"].replace(",", "") + (match["exponent"] or "")) / Fraction(match["over"] or 1)
    except ZeroDivisionError:
        return None
    return -value if (match["sign"] or "+")[0] in "-\u2212" else value


def _answers(answer: Any) -> list[str]:
    """An answer as the list of those accepted."""
    found = [str(a) for a in answer] if isinstance(answer, list | tuple) else [] if answer is None else [str(answer)]
    if not found:
        raise ValueError("the row has no answer")
    return found


@needs_answer
def exact(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], ignore_case: bool = False, **_: Any) -> list[float | None]:
    """1.0 where the completion is the answer (or one of a list of them), blanks around both stripped; else 0.0.

    Raises:
        ValueError: a row has no answer.
    """

    def plain(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return [float(plain(text_of(c)) in [plain(a) for a in _answers(right)]) for c, right in zip(completions, answer, strict=True)]


@needs_answer
def number(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], tolerance: float = 0.0, **_: Any) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of the answer (`... #### 72` is 72), else 0.0. See `last_number`.

    Args:
        tolerance: |got - answer| <= tolerance * |answer| counts as equal; 0 compares exactly, as fractions.
    Raises:
        ValueError: an answer holds no number.
    """
    out: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        got = last_number(text_of(completion))
        hit = False
        for text in _answers(right):
            want = last_number(text)
            if want is None:
                raise ValueError(f"the answer {text[:_MAX_SHOWN]!r} holds no number")
            hit = hit or (got is not None and abs(got - want) <= Fraction(tolerance) * abs(want))
        out.append(float(hit))
    return out


def load_math_verify(**_: Any) -> Any:
    """The module math_verify.

    Raises:
        UsageError: the extra `math` is not installed.
    """
    try:
        return importlib.import_module("math_verify")
    except ImportError as error:
        raise UsageError("Verifier math_verify", got=str(error), expected="the package math-verify",
                         do="Install it: pip install 'nearpolicy[math]'.") from error  # fmt: skip


@needs_answer
def math_verify(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where math-verify finds an expression in the completion equivalent to the answer (LaTeX or plain), else 0.0.

    Its own time limits are off: they need the main thread and turn a timeout into "wrong"; the pool is the clock. It evaluates what the
    completion holds, which the pool contains in time and memory but does not sandbox.

    Raises:
        UsageError: the extra `math` is not installed.
        ValueError: an answer that it cannot parse.
    """
    library = load_math_verify()
    out: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        got = library.parse(text_of(completion), parsing_timeout=None)
        hit = False
        for text in _answers(right):
            # Bare LaTeX is only read between dollars.
            want = library.parse(text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"${text}$", parsing_timeout=None)
            if not want:
                raise ValueError(f"math-verify cannot parse the answer {text[:_MAX_SHOWN]!r}")
            hit = hit or bool(library.verify(want, got, timeout_seconds=None))
        out.append(float(hit))
    return out


math_verify.warm_up = load_math_verify  # type: ignore[attr-defined]
