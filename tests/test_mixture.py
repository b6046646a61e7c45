"""A teacher's signal beside a reward, against the formula."""

import pytest
import torch

from nearpolicy.errors import UsageError
from nearpolicy.methods import method, policy_loss
from nearpolicy.mixture import Mixture


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    columns = {name: -torch.rand(3, 6, dtype=torch.float64) for name in ("logp", "logp_behavior", "logp_proximal", "logp_teacher")}
    return {**columns, "mask": mask, "response_mask": mask, "advantage": torch.randn(3, 6, dtype=torch.float64) * mask}


def test_add_is_reward_plus_coefficient_times_weight_times_discrepancy(inputs):
    made = Mixture(row=method("iw_opd", gamma=0.7), coefficient=0.25).advantage(inputs)
    d = (inputs["logp_teacher"] - inputs["logp_proximal"]) * inputs["mask"]
    drift = d.abs()
    before = drift.cumsum(1) - drift
    last = inputs["mask"].sum(1) - 1
    w = 1 + 0.7 * (1 - before / before.gather(1, last[:, None]))
    want = inputs["advantage"] + 0.25 * w * d
    assert torch.allclose(made[inputs["mask"]], want[inputs["mask"]], atol=1e-12)
    assert (made[~inputs["mask"]] == 0).all()


def test_weigh_multiplies_the_reward_by_the_weight(inputs):
    row = method("iw_opd", gamma=0.7)
    made = Mixture(row=row, use="weigh").advantage(inputs)
    weight = policy_loss(row, **{**inputs, "logp_behavior": inputs["logp"], "advantage": None}).weight  # ratio 1: the weight alone
    assert torch.allclose(made, inputs["advantage"] * weight.where(inputs["mask"], 0.0), atol=1e-12)
    flat = Mixture(row=method("iw_opd", gamma=0.0), use="weigh").advantage(inputs)
    assert torch.equal(flat, inputs["advantage"])


def test_coefficient_zero_and_equal_models_leave_the_reward_alone(inputs):
    assert torch.equal(Mixture(row=method("opd"), coefficient=0.0).advantage(inputs), inputs["advantage"])
    inputs["logp_teacher"] = inputs["logp_proximal"]
    assert torch.equal(Mixture(row=method("iw_opd")).advantage(inputs), inputs["advantage"])


def test_a_mixture_over_a_distillation_kernel_equals_the_row_with_both(inputs):
    """grpo with opd mixed in at coefficient 1 is the row opd given a reward's advantage: same kernel, same aggregate."""
    row = method("opd")
    mixed = Mixture(row=row).advantage(inputs)
    a = policy_loss(method("grpo", aggregate="token_mean"), **{**inputs, "advantage": mixed})
    b = policy_loss(row, **inputs)
    assert torch.allclose(a.loss, b.loss, atol=1e-14)


def test_the_curriculum_moves_with_progress(inputs):
    mixture = Mixture(row=method("opd", profile="curriculum", fraction=0.0, multiplier=3.0), use="weigh")
    assert torch.equal(mixture.at(0.0).advantage(inputs), inputs["advantage"])
    assert torch.allclose(mixture.at(1.0).advantage(inputs), 3 * inputs["advantage"])


def test_rows_that_cannot_be_mixed_are_refused():
    with pytest.raises(UsageError, match="distillation row"):
        Mixture(row=method("grpo"))
    for row in (method("opd"), method("exopd"), method("iw_exopd")):
        with pytest.raises(UsageError, match="weight"):
            Mixture(row=row, use="weigh")
