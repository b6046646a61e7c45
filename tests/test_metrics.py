"""Merging the parts of any split gives the value of the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from nearpolicy.metrics import LOG_RATIO_EDGES, TABLE, Ess, Histogram, Max, Mean, Sum, merge, to_floats


def test_two_ranks_with_uneven_counts():
    """12 and 4 tokens with 3 hits each: 6/16, not the mean of 3/12 and 3/4."""
    assert Mean(3, 12).merge(Mean(3, 4)).value == 0.375


def test_a_count_of_zero_is_missing_and_not_zero():
    assert math.isnan(Mean(0, 0).value)
    assert math.isnan(Ess.of(torch.zeros(0)).value)
    assert math.isnan(Histogram.of(torch.zeros(0)).value)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40), st.data())
def test_any_split_merges_to_the_whole(values, data):
    cut = data.draw(st.integers(0, len(values)))
    x = torch.tensor(values, dtype=torch.float64)
    for make in (lambda v: Mean(v.sum(), len(v)), lambda v: Sum(v.sum()), Ess.of, Histogram.of):
        whole, parts = make(x), make(x[:cut]).merge(make(x[cut:]))
        assert parts.value == pytest.approx(whole.value, rel=1e-9, abs=1e-9, nan_ok=True)


def test_ess_in_log_space():
    weights = torch.tensor([0.5, 1.0, 1.5, 4.0], dtype=torch.float64)
    assert Ess.of(weights.log()).value == pytest.approx(2.5128205128205128 / 4, abs=1e-12)
    assert Ess.of(torch.tensor([1e4, 0.0])).value == pytest.approx(0.5)
    assert Ess.of(torch.full((7,), -1e4)).value == pytest.approx(1.0)


@given(st.lists(st.floats(-100, 100), min_size=5, max_size=200), st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.99]))
def test_a_quantile_is_within_one_bin(values, q):
    x = np.array(values)
    got = Histogram.of(torch.tensor(values, dtype=torch.float64)).quantile(q)
    edges = np.array(LOG_RATIO_EDGES)
    near = np.quantile(x, q, method="inverted_cdf")
    k = int(np.searchsorted(edges, near))
    assert edges[max(k - 1, 0)] <= got <= edges[min(k, len(edges) - 1)]


def test_histograms_with_other_edges_do_not_merge():
    with pytest.raises(ValueError, match="edges"):
        Histogram.of(torch.ones(2), (0.0, 1.0)).merge(Histogram.of(torch.ones(2)))


def test_merge_keeps_names_that_some_parts_lack():
    out = merge([{"a": Mean(1, 2)}, {"a": Mean(1, 2), "b": Max(3)}])
    assert out["a"].value == 0.5
    assert out["b"].value == 3
    assert to_floats({"h": Histogram.of(torch.tensor([1.0]))})["h/p50"] == pytest.approx(1.0, rel=0.4)


def test_the_table_has_units_and_directions():
    for spec in TABLE.values():
        assert "/" in spec.name
        assert spec.direction in {"up", "down", "band", "none"}, spec
        assert spec.unit
        assert spec.text
