"""Cuts: inside the response whatever they are given, the worked cases, and a clear line for a function that misbehaves."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.randomness import generator
from nearpolicy.sources.cuts import length_ratio, random_ratio, tokens_kept, top_entropy

ORACLES = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
SHARE = st.floats(0, 1)
LENGTH = st.integers(0, 200)


def kept(cut, length, entropy=None, key=0):
    return tokens_kept(cut, length, entropy, generator(0, "cut", key), owner="prompt 'p', sample 0")


@given(LENGTH, SHARE)
def test_a_share_of_the_length(length, ratio):
    at = kept(length_ratio(ratio), length)
    assert 0 <= at <= length
    assert abs(at - ratio * length) <= 0.5


@given(LENGTH, st.tuples(SHARE, SHARE).map(sorted), st.integers(0, 1000))
def test_a_random_share_lies_within_its_bounds(length, bounds, key):
    low, high = bounds
    at = kept(random_ratio(low, high), length, key=key)
    assert round(low * length) <= at <= round(high * length)


@given(st.lists(st.floats(0, 12, width=32), max_size=60), st.integers(1, 70), st.sampled_from(["before", "after"]), st.integers(0, 1000))
def test_top_entropy_picks_one_of_the_highest(values, k, at, key):
    entropy = np.array(values, dtype=np.float32)
    cut = kept(top_entropy(k, at=at), len(entropy), entropy, key)
    assert 0 <= cut <= len(entropy)
    if len(entropy):
        place = cut - (at == "after")
        assert (entropy > entropy[place]).sum() < k
    else:
        assert cut == 0


def test_the_worked_case_of_the_entropy_cut_uniformly():
    case = ORACLES["entropy_truncation"]
    entropy = np.array(case["entropy"], dtype=np.float32)
    for at in ("before", "after"):
        drawn = [kept(top_entropy(case["k"], at=at), len(entropy), entropy, key) for key in range(600)]
        values, counts = np.unique(drawn, return_counts=True)
        assert values.tolist() == case[f"prefix_lengths_cut_{at}"]
        assert counts.min() > 150  # 200 expected, standard deviation 11.5


@pytest.mark.parametrize(("length", "case"), ORACLES["seeds_truncation_round"]["cases"].items())
def test_the_worked_cases_of_rounding(length, case):
    assert kept(length_ratio(ORACLES["seeds_truncation_round"]["ratio"]), int(length)) == case["half_even"]


def test_equal_keys_cut_alike_and_others_do_not():
    cut = random_ratio()
    first = [kept(cut, 1000, key=key) for key in range(20)]
    assert first == [kept(cut, 1000, key=key) for key in range(20)]
    assert len(set(first)) > 10


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: length_ratio(1.01), "1.01"), (lambda: length_ratio(-0.1), "-0.1"), (lambda: length_ratio(float("nan")), "nan"),
        (lambda: top_entropy(0), "k = 0"), (lambda: top_entropy(2, at="beside"), "beside"), (lambda: random_ratio(0.6, 0.5), "high = 0.5"),
        (lambda: random_ratio(-0.5, 0.5), "-0.5"), (lambda: random_ratio(0.5, 1.5), "1.5"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize("entropy", [None, np.array([0.1, np.nan, 0.2], dtype=np.float32)])
def test_top_entropy_needs_entropies(entropy):
    with pytest.raises(DataError, match="without entropies"):
        kept(top_entropy(2), 3, entropy)


def raises(length, entropy_T, rng):
    raise KeyError("nothing")


def exits(length, entropy_T, rng):
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (exits, "SystemExit: 0"),
        (lambda *_: -1, "got -1"), (lambda length, *_: length + 1, "got 6"), (lambda *_: 2.0, "got 2.0"), (lambda *_: True, "got True"),
        (lambda *_: None, "got None"), (raises, "KeyError"), (lambda length: 0, "TypeError"),
    ],
)  # fmt: skip
def test_a_function_outside_the_response_is_named_in_one_line(function, says):
    with pytest.raises(EngineError, match=says) as error:
        kept(function, 5)
    assert "prompt 'p', sample 0" in str(error.value)
    assert "\n" not in str(error.value)


def test_numpy_numbers_and_both_ends_are_fine():
    assert kept(lambda length, *_: np.int64(length), 5) == 5
    assert kept(lambda *_: 0, 5) == 0
