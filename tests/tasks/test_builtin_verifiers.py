"""The built-in verifiers on worked cases."""

from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from nearpolicy.tasks.verifiers import exact, last_number, math_verify, number

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the answer is 42.", 42),
        ("5 - 3", 3),
        ("5-3", 3),
        ("x = -3", -3),
        ("(-7)", -7),
        ("\u22124", -4),
        ("+5", 5),
        ("-$5", -5),
        ("- 3", 3),
        ("1,234.5", Fraction(2469, 2)),
        ("1,2", 2),
        ("12,345,6", 6),
        (".5", Fraction(1, 2)),
        ("wait...5", 5),
        ("1/2", Fraction(1, 2)),
        ("-3 / 4", Fraction(-3, 4)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\dfrac{ 3 }{ -4 }", Fraction(-3, 4)),
        ("2e3", 2000),
        ("50%", 50),
        ("12cm", 12),
        ("答案是7。", 7),
        ("3 then CO2", 3),
        ("10**10**10", 10),
        ("1 and 1/0", None),
        ("none at all", None),
        ("", None),
        ("7" * 5000, None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == value


@QUICK
@given(st.fractions(), st.sampled_from(["so it is ", "= ", "a\n", ""]), st.sampled_from(["", ".", " units", "\n"]))
def test_every_fraction_is_read_back(value, before, after):
    assert last_number(f"{before}{value}{after}") == value


@QUICK
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_every_decimal_is_read_back_with_and_without_commas(value):
    assert last_number(f"{value}") == last_number(f"{value:,}") == Fraction(value)


@QUICK
@given(st.text("0123456789,./-+eEx $\\frac{}\u2212\u00bd\u0663"))
def test_any_text_is_safe(text):
    assert last_number(text) is None or isinstance(last_number(text), Fraction)


def test_number():
    completions = ["1, 2, so 3", "3.0", "6/2", "30", "nothing", [{"role": "assistant", "content": "it is 3"}]]
    assert number([""] * 6, completions, answer=["3"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert number([""], ["72"], answer=["Half of 144 is 72.\n#### 72"]) == [1.0]
    assert number([""], ["0.5"], answer=[0.5]) == [1.0]
    assert number(["", ""], ["0.333", "0.34"], answer=["1/3", "1/3"], tolerance=0.01) == [1.0, 0.0]
    assert number(["", ""], ["4", "5"], answer=[["3", "4"], ["3", "4"]]) == [1.0, 0.0]
    for bad in ("none", None, []):
        with pytest.raises(ValueError, match=r"number|no answer"):
            number([""], ["3"], answer=[bad])


def test_exact():
    assert exact([""] * 3, [" yes\n", "Yes", "yes."], answer=["yes"] * 3) == [1.0, 0.0, 0.0]
    assert exact([""], ["YES"], answer=["yes"], ignore_case=True) == [1.0]
    with pytest.raises(ValueError, match="no answer"):
        exact([""], ["x"], answer=[None])


def test_math_verify():
    completions = [r"so $\frac{2}{4}$", "0.5", r"\boxed{1/2}", "$2$", "no idea"]
    assert math_verify([""] * 5, completions, answer=[r"\frac{1}{2}"] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert math_verify([""], ["$(1, 2]$"], answer=["$(1,2]$"]) == [1.0]
    with pytest.raises(ValueError, match="cannot parse"):
        math_verify([""], ["$1$"], answer=["$"])
