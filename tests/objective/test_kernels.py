"""Kernels against their definition, autograd of their literal objectives, and worked values."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.methods import METHODS, method
from nearpolicy.objective import kernels
from nearpolicy.objective.kernels import KERNELS
from nearpolicy.objective.ratio import LIMIT

SCALARS = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
RL = [name for name, row in METHODS.items() if row.signal is None]
CALLS = {name: (METHODS[name].kernel, KERNELS[METHODS[name].kernel].arguments(method(name).options)) for name in RL}
F64 = torch.float64


def both_signs(x):
    return torch.stack([x, x]), torch.tensor([[True], [False]])


@pytest.mark.parametrize("name", RL)
def test_phi_of_zero_drift_is_exactly_one(name):
    kernel, arguments = CALLS[name]
    x, positive = both_signs(torch.zeros(1, dtype=F64))
    assert torch.equal(KERNELS[kernel].phi(x, positive, **arguments), torch.ones(2, 1, dtype=F64))


@pytest.mark.parametrize("name", RL)
def test_phi_is_finite_and_not_negative_over_the_clamped_range_in_float32(name):
    kernel, arguments = CALLS[name]
    x, positive = both_signs(torch.linspace(-LIMIT, LIMIT, 4001))
    phi = KERNELS[kernel].phi(x, positive, **arguments)
    assert phi.dtype == torch.float32
    assert torch.isfinite(phi).all()
    assert (phi >= 0).all()
    if KERNELS[kernel].objective is not None:
        assert torch.isfinite(KERNELS[kernel].objective(x, positive, **arguments)).all()


@pytest.mark.parametrize("name", [n for n in RL if KERNELS[METHODS[n].kernel].objective is not None])
def test_phi_is_the_derivative_of_the_literal_objective_by_the_log_weight(name):
    kernel, arguments = CALLS[name]
    x, positive = both_signs(torch.linspace(-6, 3, 181, dtype=F64) + 0.003)  # off the kinks of the clip
    x.requires_grad_()
    (slope,) = torch.autograd.grad(KERNELS[kernel].objective(x, positive, **arguments).sum(), x)
    torch.testing.assert_close(slope, KERNELS[kernel].phi(x, positive, **arguments).detach(), rtol=1e-9, atol=1e-12)


def test_dual_clip_is_the_derivative_too():
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    x, positive = both_signs(torch.linspace(-2, 2, 101, dtype=F64) + 0.003)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(kernels.ppo_objective(x, positive, **options).sum(), x)
    torch.testing.assert_close(slope, kernels.ppo(x, positive, **options).detach())


GRID = {
    "ppo_02": lambda x, p: kernels.ppo(x, p, clip_low=0.2, clip_high=0.2),
    "dapo_02_028": lambda x, p: kernels.ppo(x, p, clip_low=0.2, clip_high=0.28),
    "dapo_dual3": lambda x, p: kernels.ppo(x, p, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "sapo": lambda x, p: kernels.sapo(x, p, tau_pos=1.0, tau_neg=1.05),
    "vespo": lambda x, p: kernels.vespo(x, p, c_pos=(2.0, 3.0), c_neg=(3.0, 2.0)),
    "cispo_cap5": lambda x, p: kernels.cispo(x, p, floor=0.0, cap=5.0),
    "topr": kernels.topr,
    "tis2": lambda x, p: kernels.cispo(x, p, floor=0.0, cap=2.0),
}


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("side", ["pos", "neg"])
def test_worked_shape_values(name, side):
    # Ratio 0.8, 1.2 and 3.0 lie on a clip's edge, where the last bit of exp(log r) decides.
    points = [p for p in SCALARS["phi_grid"] if not any(math.isclose(p["r"], edge) for edge in (0.8, 1.2, 1.28, 3.0))]
    assert len(points) >= 8
    x = torch.tensor([p["r"] for p in points], dtype=F64).log()
    expected = torch.tensor([p[side][name] for p in points], dtype=F64)
    torch.testing.assert_close(GRID[name](x, torch.tensor(side == "pos")), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", SCALARS["vespo_surrogate"]["cases"], ids=str)
def test_vespo_surrogate_equals_the_incomplete_gamma_values(case):
    c = (case["c1"], case["c2"])
    x = torch.tensor([math.log(case["W"])], dtype=F64)
    sign = torch.tensor([True])
    assert kernels.vespo_objective(x, sign, c_pos=c, c_neg=c).item() == pytest.approx(case["f"], abs=1e-9)
    assert kernels.vespo(x, sign, c_pos=c, c_neg=c).item() == pytest.approx(case["phi"], abs=1e-9)


@pytest.mark.parametrize("side", ["pos", "neg"])
def test_vespo_peaks_at_c1_over_c2(side):
    at, top = SCALARS["length_norm"]["vespo"][side]
    x = torch.tensor([math.log(at) - 0.01, math.log(at), math.log(at) + 0.01], dtype=F64)
    phi = kernels.vespo(x, torch.tensor(side == "pos"), c_pos=(2.0, 3.0), c_neg=(3.0, 2.0))
    assert phi[1].item() == pytest.approx(top, abs=1e-12)
    assert phi[1] > phi[0]
    assert phi[1] > phi[2]


@pytest.mark.parametrize("point", SCALARS["luffy_shape"], ids=lambda p: str(p["p"]))
def test_luffy_demonstration_shape(point):
    x = torch.tensor(point["p"], dtype=F64).log()
    assert kernels.luffy_objective(x, gamma=0.1).item() == pytest.approx(point["f"], abs=1e-12)
    assert kernels.luffy(x, gamma=0.1).item() == pytest.approx(point["df_times_p"], abs=1e-12)


def drop_by_hand(values, candidates, budget):
    """M2PO's rule as it is written: drop the largest candidate while the mean of the rest exceeds the budget."""
    left = sorted((v, i) for i, v in enumerate(values) if candidates[i])
    while left and sum(v for v, _ in left) / len(left) > budget:
        left.pop()
    return {i for i, c in enumerate(candidates) if c} - {i for _, i in left}


def winsorised_by_hand(values, candidates, budget):
    """The released rule: a candidate stays when capping all at its own value costs at most the budget."""
    pool = [v for v, c in zip(values, candidates, strict=True) if c]
    return {i for i, (v, c) in enumerate(zip(values, candidates, strict=True)) if c and sum(min(u, v) for u in pool) > budget * len(pool)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.0, 0.0, 2.0])), min_size=1, max_size=12), st.sampled_from([0.01, 0.04, 0.5]))
def test_m2po_drops_what_the_written_rules_drop(tokens, budget):
    lr = torch.tensor([[t[0] for t in tokens]], dtype=F64)
    advantage = torch.tensor([[t[1] for t in tokens]], dtype=F64)
    moment = [t[0] ** 2 for t in tokens]
    candidates = [t[0] * t[1] > 0 for t in tokens]
    if len(set(moment)) < len(moment):
        return  # ties are dropped together, unlike in the written rule
    for variant, rule in (("paper", drop_by_hand), ("released_code", winsorised_by_hand)):
        threshold = kernels.m2po_threshold(lr, advantage, torch.ones_like(lr, dtype=torch.bool), budget=budget, variant=variant)["m2po_threshold"]
        keep = kernels.m2po_keep(lr, advantage, threshold)[0].tolist()
        assert {i for i, k in enumerate(keep) if not k} == rule(moment, candidates, budget)


def test_m2po_ties_at_the_threshold_are_dropped_together():
    lr = torch.tensor([[0.1, 0.3, 0.3, 0.3]], dtype=F64)
    one = torch.ones_like(lr)
    threshold = kernels.m2po_threshold(lr, one, one.bool(), budget=0.05, variant="paper")["m2po_threshold"]
    assert kernels.m2po_keep(lr, one, threshold).tolist() == [[True, False, False, False]]
