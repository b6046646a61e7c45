"""pass@k, ESS, KL estimators and bootstrap intervals."""

import json
import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import UsageError
from nearpolicy.objective.stats import bootstrap_interval, ess, kl_estimate, kl_penalty, paired_difference, pass_at_k

SCALARS = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
F64 = torch.float64


@pytest.mark.parametrize("case", SCALARS["pass_at_k"], ids=str)
def test_pass_at_k_worked_values(case):
    assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["value"], abs=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_draws_without_a_right_answer(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws), abs=1e-12)


def test_pass_at_k_corners():
    assert pass_at_k(4, 1, 4) == 1.0
    with pytest.raises(UsageError, match="k = 5"):
        pass_at_k(4, 1, 5)
    with pytest.raises(UsageError, match="c = 5"):
        pass_at_k(4, 5, 1)


def test_ess():
    oracle = SCALARS["ess"]
    log_weight = torch.tensor(oracle["weights_logspace"], dtype=F64)
    assert ess(log_weight).item() == pytest.approx(oracle["ess"], abs=1e-12)
    assert (ess(log_weight) / 4).item() == pytest.approx(oracle["ess_fraction"], abs=1e-12)
    assert ess(log_weight + 5000).item() == pytest.approx(oracle["ess"], abs=1e-9)
    chi = SCALARS["chi2"]
    assert (ess(torch.tensor(chi["w"], dtype=F64).log()) / 3).item() == pytest.approx(1 / (1 + chi["chi2"]), abs=1e-12)
    assert ess(torch.zeros(0)).item() == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_plain_derivatives(estimator):
    oracle = SCALARS["kl"]
    logp = torch.tensor(oracle["logp"], dtype=F64, requires_grad=True)
    reference = torch.tensor(oracle["ref"], dtype=F64)
    value = kl_estimate(logp, reference, estimator=estimator)
    torch.testing.assert_close(value.detach(), torch.tensor(oracle[estimator], dtype=F64), rtol=0, atol=1e-12)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(slope, torch.tensor(oracle[f"grad_{estimator}"], dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_keeps_the_value(estimator):
    logp, reference = torch.tensor([-1.0, -0.2, -2.5]), torch.tensor([-1.3, -0.5, -1.5])
    assert torch.equal(kl_penalty(logp, reference, estimator=estimator), kl_estimate(logp, reference, estimator=estimator))
    with pytest.raises(UsageError, match="'k4'"):
        kl_penalty(logp, reference, estimator="k4")


def test_bootstrap_is_deterministic_and_covers():
    generator = torch.Generator().manual_seed(5)
    hits = 0
    for trial in range(60):
        interval = bootstrap_interval(torch.rand(40, generator=generator), resamples=400, seed=trial)
        hits += interval.low <= 0.5 <= interval.high
    assert 50 <= hits <= 60  # 95 % nominal
    x = torch.rand(40, generator=generator)
    assert bootstrap_interval(x) == bootstrap_interval(x)
    assert bootstrap_interval(x, seed=1) != bootstrap_interval(x)


def test_bootstrap_interval_has_the_width_of_the_standard_error():
    x = torch.arange(200, dtype=F64)
    interval = bootstrap_interval(x)
    expected = 2 * 1.96 * x.std(correction=0).item() / math.sqrt(200)
    assert interval.high - interval.low == pytest.approx(expected, rel=0.06)
    assert interval.mean == 99.5


def test_bootstrap_corners():
    assert bootstrap_interval(torch.tensor([0.25])) == (0.25, 0.25, 0.25, 1)
    assert bootstrap_interval(torch.tensor([1.0, float("nan"), 1.0])) == (1.0, 1.0, 1.0, 2)
    empty = bootstrap_interval(torch.zeros(0))
    assert empty.num == 0
    assert math.isnan(empty.mean)
    with pytest.raises(UsageError, match="level"):
        bootstrap_interval(torch.zeros(3), level=1.0)


def test_paired_difference_is_narrower_than_the_spread_of_either():
    base = torch.linspace(0, 1, 50, dtype=F64)
    better = base + 0.1
    interval = paired_difference(better, base)
    assert interval.mean == pytest.approx(0.1)
    assert interval.high - interval.low < 1e-9
    with pytest.raises(UsageError, match="shapes"):
        paired_difference(base, base[:3])
