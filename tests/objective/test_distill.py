"""Distillation signals and prefix weights."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import DataError, UsageError
from nearpolicy.methods import method, policy_loss
from nearpolicy.objective.distill import remaining_mass

F64 = torch.float64
STUDENT = torch.tensor([[-0.5, -1.2, -0.3], [-2.0, -0.7, -1.1]], dtype=F64)
TEACHER = torch.tensor([[-0.2, -1.5, -0.25], [-1.0, -2.2, -0.9]], dtype=F64)
REFERENCE = torch.tensor([[-0.6, -1.0, -0.4], [-2.2, -0.9, -1.0]], dtype=F64)
MASK = torch.ones(2, 3)
DISTILL = ["opd", "iw_opd", "exopd", "iw_exopd"]


def loss(name, teacher=TEACHER, student=STUDENT, reference=REFERENCE, mask=MASK, **more):
    options = more.pop("options", {})
    return policy_loss(name, logp=student, logp_behavior=student, mask=mask, logp_teacher=teacher, logp_reference=reference, options=options, **more)


@pytest.mark.parametrize("name", DISTILL)
def test_equal_models_give_zero_exactly(name):
    logp = STUDENT.clone().requires_grad_()
    out = policy_loss(name, logp=logp, logp_behavior=STUDENT, mask=MASK, logp_teacher=STUDENT, logp_reference=STUDENT)
    out.loss.backward()
    assert (out.advantage == 0).all()
    assert (logp.grad == 0).all()


def test_zero_drift_weighs_every_token_one_plus_gamma():
    assert loss("iw_opd", teacher=STUDENT).weight.tolist() == [[1.5] * 3] * 2
    assert loss("iw_opd", teacher=STUDENT, options={"gamma": 0.2, "normalizer": "all_tokens"}).weight.tolist() == [[1.2] * 3] * 2
    one = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]])
    assert loss("iw_opd", mask=one).weight[:, 0].tolist() == [1.5, 1.5]


def test_the_first_token_weighs_one_plus_gamma_and_under_before_last_the_last_exactly_one():
    weight = loss("iw_opd").weight
    assert weight[:, 0].tolist() == [1.5, 1.5]
    assert weight[:, -1].tolist() == [1.0, 1.0]
    assert (loss("iw_opd", options={"normalizer": "all_tokens"}).weight[:, -1] > 1).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8), st.sampled_from(["before_last", "all_tokens"]))
def test_remaining_mass_equals_the_sums_and_never_rises(drift, normalizer):
    T = len(drift)
    d = torch.tensor([[*drift, 9.0]], dtype=F64)
    mask = torch.tensor([[True] * T + [False]])
    out = remaining_mass(d.masked_fill(~mask, 0.0), mask, normalizer=normalizer)[0, :T].tolist()
    total = sum(abs(x) for x in (drift if normalizer == "all_tokens" else drift[:-1]))
    for t in range(T):
        expected = 1.0 if total == 0 else 1 - sum(abs(x) for x in drift[:t]) / total
        assert out[t] == pytest.approx(expected, abs=1e-9)
    assert all(a >= b - 1e-12 for a, b in pairwise(out))


def test_drift_runs_over_the_response_not_over_the_trained_tokens():
    trained = torch.tensor([[0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    masked = loss("iw_opd", mask=trained, response_mask=MASK).weight
    full = loss("iw_opd").weight
    assert torch.equal(masked[0, 1:], full[0, 1:])
    assert masked[0, 0] == 0


def test_exopd_with_lambda_one_is_opd_and_needs_no_reference():
    out = loss("exopd", reference=None, options={"extrapolation": 1})
    assert torch.equal(out.advantage, loss("opd").advantage)
    assert method("exopd", extrapolation=1).needs == {"logp_teacher", "logp_proximal"}
    assert method("exopd").needs == {"logp_teacher", "logp_proximal", "logp_reference"}
    with pytest.raises(UsageError, match="no logp_reference"):
        loss("exopd", reference=None)


def test_the_three_forms_of_iw_exopd_meet_in_their_limits():
    opd = loss("opd").advantage
    w = loss("iw_opd").weight
    extra = TEACHER - REFERENCE
    excess = loss("iw_exopd", options={"extrapolation": 1, "form": "modulate_excess"})
    assert torch.equal(excess.advantage, opd)
    scale = loss("iw_exopd", options={"extrapolation": 1, "form": "scale"})
    torch.testing.assert_close(scale.weight * scale.advantage, w * opd)
    modulate = loss("iw_exopd", options={"extrapolation": 1, "form": "modulate"})
    torch.testing.assert_close(modulate.advantage, w * extra - (STUDENT - REFERENCE))
    for form in ("modulate", "modulate_excess", "scale"):  # gamma 0: w = 1, all are ExOPD
        out = loss("iw_exopd", options={"gamma": 0, "form": form})
        torch.testing.assert_close(out.weight * out.advantage, loss("exopd").advantage)


def test_student_chooses_whose_log_probs_the_teacher_s_are_compared_with():
    current, behavior, proximal = STUDENT + 0.3, STUDENT, STUDENT + 0.1
    args = {"logp": current, "logp_behavior": behavior, "logp_proximal": proximal, "mask": MASK, "logp_teacher": TEACHER}
    for student, column in (("current", current), ("behavior", behavior), ("proximal", proximal)):
        torch.testing.assert_close(policy_loss("opd", **args, options={"student": student}).advantage, TEACHER - column)
    del args["logp_proximal"]
    torch.testing.assert_close(policy_loss("opd", **args).advantage, TEACHER - behavior)


def test_a_reward_advantage_adds_to_the_weighted_signal():
    reward = torch.tensor([2.0, -1.0], dtype=F64)
    signal = loss("iw_opd")
    mixed = loss("iw_opd", advantage=reward)
    torch.testing.assert_close(mixed.advantage, reward[:, None] + signal.weight * signal.advantage)
    assert (mixed.weight == 1).all()


def test_any_kernel_with_its_own_options():
    logp = STUDENT + torch.tensor([[0.5, -0.4, 0.2], [0.1, 0.9, -0.3]], dtype=F64)
    args = {"logp": logp - 2, "logp_behavior": STUDENT - 2, "mask": MASK, "logp_teacher": TEACHER - 2}  # log-probs, all below 0
    r = (logp - STUDENT).exp()
    capped = policy_loss("opd", **args, options={"kernel": "cispo", "cap": 1.3})
    torch.testing.assert_close(capped.weight, r.clamp(max=1.3))
    assert (policy_loss("opd", **args, options={"kernel": "none"}).weight == 1).all()
    W = r.prod(1, keepdim=True)
    advantage = TEACHER - STUDENT
    phi = torch.where(advantage >= 0, W**2 * (3 * (1 - W)).exp(), W**3 * (2 * (1 - W)).exp())
    torch.testing.assert_close(policy_loss("opd", **args, options={"kernel": "vespo"}).weight, phi)
    with pytest.raises(UsageError, match="'clip_low'"):
        method("opd", kernel="cispo", clip_low=0.2)


def test_the_ideal_weight_divides_by_the_mean_at_each_response_index():
    """Rows begin in different columns: the mean is over response indices, not columns."""
    student = torch.tensor([[0.0, -1.0, -1.0, -1.0], [-1.0, -1.0, 0.0, 0.0]], dtype=F64)
    teacher = torch.tensor([[0.0, -0.5, -2.0, -1.0], [-1.4, -1.0, 0.0, 0.0]], dtype=F64)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    out = policy_loss("iw_opd", logp=student, logp_behavior=student, mask=mask, logp_teacher=teacher, options={"weight": "ideal", "blend": False})
    r = [[1.0, math.exp(0.5), math.exp(-0.5)], [1.0, math.exp(-0.4)]]
    Z = (r[0][1] + r[1][1]) / 2
    torch.testing.assert_close(out.weight, torch.tensor([[0, 1, r[0][1] / Z, 1.0], [1, r[1][1] / Z, 0, 0]], dtype=F64))


def test_the_curriculum_follows_the_progress():
    m = method("opd", profile="curriculum", fraction=0.3)
    early, late = (policy_loss(m.at(p), logp=STUDENT, logp_behavior=STUDENT, mask=MASK, logp_teacher=TEACHER).weight for p in (0.0, 1.0))
    assert early.tolist() == [[1.5, 1.0, 1.0]] * 2
    assert late.tolist() == [[1.5] * 3] * 2
    plain = method("opd")
    assert plain.at(0.5) is plain


def test_bad_teachers_are_refused():
    with pytest.raises(DataError, match=r"logp_teacher: got shape \(2, 2\)"):
        loss("opd", teacher=TEACHER[:, :2])
    with pytest.raises(UsageError, match="no logp_teacher"):
        policy_loss("opd", logp=STUDENT, logp_behavior=STUDENT, mask=MASK)
    broken = TEACHER.clone()
    broken[1, 2] = torch.nan
    with pytest.raises(DataError, match="logp_teacher: got nan at row 1, column 2"):
        loss("opd", teacher=broken)


def test_an_empty_response_is_no_sequence():
    mask = torch.tensor([[1.0, 1.0, 1.0], [0, 0, 0]])
    out = loss("iw_opd", mask=mask)
    alone = policy_loss("iw_opd", logp=STUDENT[:1], logp_behavior=STUDENT[:1], mask=mask[:1], logp_teacher=TEACHER[:1])
    assert out.loss == alone.loss
    assert out.metrics["data/empty_rows"].value == 1


def test_reversed_weights_are_the_mirror_of_the_surrogate():
    logp = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)).requires_grad_()
    teacher = (logp + torch.tensor([[-0.1, 0.2, -0.3, 0.1]])).detach()
    columns = {"logp": logp, "logp_behavior": logp.detach(), "logp_teacher": teacher, "mask": torch.ones(1, 4, dtype=torch.bool)}
    forward, back = (policy_loss(method("iw_opd", gamma=1.0, reverse=r), **columns).weight for r in (False, True))
    assert torch.allclose(forward + back, torch.full((1, 4), 3.0, dtype=torch.float64))
    assert torch.allclose(back, torch.tensor([[1.0, 1 + 1 / 6, 1.5, 2.0]], dtype=torch.float64))
    with pytest.raises(UsageError, match="reverse"):
        method("iw_opd", reverse=True, weight="ideal")
