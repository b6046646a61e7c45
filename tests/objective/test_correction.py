"""Trainer/engine corrections by hand, folded into W or multiplied after the kernel."""

import math

import pytest
import torch

from nearpolicy.methods import method, policy_loss
from nearpolicy.objective.correction import CORRECTIONS, correct

F64 = torch.float64
K = [[0.4, 1.0, 3.0, 0.25], [1.5, 1.2, 1.0, 1.0]]  # proximal / behaviour
ALL = torch.ones(2, 4, dtype=torch.bool)


def made(kind, *, low=None, cap=2.0, fold=False, acting=ALL):
    return correct(torch.tensor(K, dtype=F64).log(), torch.zeros(2, 4, dtype=F64), acting_BT=acting, kind=kind, low=low, cap=cap, fold=fold)


@pytest.mark.parametrize(
    ("kind", "low", "cap", "expected"),
    [
        ("token_truncate", None, 2.0, [[0.4, 1.0, 2.0, 0.25], [1.5, 1.2, 1.0, 1.0]]),
        ("token_truncate", 0.5, 2.0, [[0.5, 1.0, 2.0, 0.5], [1.5, 1.2, 1.0, 1.0]]),
        ("token_mask", None, 2.0, [[0.4, 1.0, 0.0, 0.25], [1.5, 1.2, 1.0, 1.0]]),
        ("token_band", 0.5, 5.0, [[0.0, 1.0, 3.0, 0.0], [1.5, 1.2, 1.0, 1.0]]),
        ("sequence_truncate", None, 1.5, [[0.3] * 4, [1.5] * 4]),
        ("sequence_mask", None, 1.5, [[0.3] * 4, [0.0] * 4]),
        ("geometric_band", 0.8, 1.2, [[0.0] * 4, [1.0] * 4]),  # 0.3^(1/4) = 0.74, 1.8^(1/4) = 1.16
    ],
)
def test_weights(kind, low, cap, expected):
    torch.testing.assert_close(made(kind, low=low, cap=cap).weight, torch.tensor(expected, dtype=F64))


def test_it_acts_on_no_other_token():
    acting = torch.tensor([[False, True, True, True], [False] * 4])
    out = made("sequence_truncate", cap=0.5, acting=acting)
    torch.testing.assert_close(out.weight, torch.tensor([[1.0, 0.5, 0.5, 0.5], [1.0] * 4], dtype=F64))


def test_a_product_level_kernel_takes_the_log_and_keeps_only_gates():
    truncated = made("token_truncate", fold=True)
    assert truncated.weight is None
    torch.testing.assert_close(truncated.log_token.exp(), torch.tensor([[0.4, 1.0, 2.0, 0.25], [1.5, 1.2, 1.0, 1.0]], dtype=F64))
    masked = made("token_mask", fold=True)
    assert masked.weight.tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    torch.testing.assert_close(masked.log_token.exp(), torch.tensor([[0.4, 1.0, 1.0, 0.25], [1.5, 1.2, 1.0, 1.0]], dtype=F64))
    sequence = made("sequence_mask", cap=1.5, fold=True)
    assert sequence.weight.tolist() == [[1.0] * 4, [0.0] * 4]
    assert sequence.log_sequence[0].item() == pytest.approx(math.log(0.3))
    gate = made("geometric_band", low=0.8, cap=1.2, fold=True)
    assert gate.log_token is None
    assert gate.log_sequence is None
    assert gate.weight.tolist() == [[0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_equal_log_probs_change_nothing(kind):
    logp = torch.tensor([[-0.3, -1.0], [-0.7, -0.2]], dtype=F64)
    args = {"logp": logp, "logp_behavior": logp - 0.1, "mask": torch.ones(2, 2), "advantage": torch.tensor([1.0, -1.0], dtype=F64)}
    for name in ("grpo", "vespo", "gspo"):
        plain = policy_loss(name, **args)
        corrected = policy_loss(name, **args, logp_proximal=logp - 0.1, options={"correction": kind})
        torch.testing.assert_close(corrected.weight, plain.weight, rtol=1e-14, atol=0)
        assert corrected.metrics["correction/mean"].value == 1.0
        assert corrected.metrics["correction/masked_frac"].value == 0.0


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_extreme_mismatch_stays_finite_in_float32(kind):
    proximal = torch.tensor([[0.0, -1e4], [-1e4, 0.0]])
    behavior = torch.tensor([[-1e4, 0.0], [-1e4, -1e4]])
    for name in ("grpo", "vespo", "topr", "gmpo"):
        out = policy_loss(
            name, logp=proximal, logp_behavior=behavior, logp_proximal=proximal, mask=torch.ones(2, 2), advantage=torch.tensor([1.0, -1.0]),
            options={"correction": kind},
        )  # fmt: skip
        assert torch.isfinite(out.weight).all()


def test_a_token_that_is_masked_leaves_w_and_the_loss():
    """VESPO with token_mask: the sequence weight is that of the other tokens, not 1e-14 for the whole sequence."""
    behavior = torch.tensor([[-5.0, -5.0, -5.0]], dtype=F64)
    proximal = torch.tensor([[-4.9, -2.0, -5.1]], dtype=F64)  # the second token's ratio is e^3
    logp = torch.tensor([[-4.8, -1.9, -5.0]], dtype=F64)
    out = policy_loss("vespo", logp=logp, logp_behavior=behavior, logp_proximal=proximal, mask=torch.ones(1, 3),
                      advantage=torch.tensor([1.0], dtype=F64), options={"correction": "token_mask"})  # fmt: skip
    W = math.exp((0.1 + 0.1) + (0.1 - 0.1))  # log pi/proximal and log proximal/behaviour of tokens 0 and 2
    phi = W**2 * math.exp(3 * (1 - W))
    torch.testing.assert_close(out.weight, torch.tensor([[phi, 0.0, phi]], dtype=F64))
    assert out.metrics["correction/masked_frac"].value == pytest.approx(1 / 3)


def test_relayed_prefixes_keep_their_denominator_and_no_correction_acts_on_them():
    behavior = torch.tensor([[-1.0, -1.2, -0.7]], dtype=F64)
    proximal = torch.tensor([[-9.0, -1.0, -0.9]], dtype=F64)
    logp = torch.tensor([[-1.1, -1.1, -0.8]], dtype=F64)
    out = policy_loss("cispo", logp=logp, logp_behavior=behavior, logp_proximal=proximal, mask=torch.ones(1, 3), prefix_length=torch.tensor([1]),
                      advantage=torch.tensor([1.0], dtype=F64), options={"correction": "token_truncate", "correction_cap": 1.1})  # fmt: skip
    expected = [math.exp(-0.1), math.exp(-0.1) * 1.1, math.exp(0.1) * math.exp(-0.2)]
    torch.testing.assert_close(out.weight, torch.tensor([expected], dtype=F64))


def test_defaults_of_the_bounds_are_the_correction_s_own():
    for kind, spec in CORRECTIONS.items():
        options = method("grpo", correction=kind).options
        assert (options["correction_low"], options["correction_cap"], options["denominator"]) == (spec.low, spec.cap, "proximal")


MIXED = {  # tokens 0 and 1 were written by an older version than the proximal one, 2 and 3 by the proximal one
    "logp": torch.tensor([[-1.1, -1.1, -0.8, -2.0]], dtype=F64),
    "logp_behavior": torch.tensor([[-1.0, -1.2, -0.7, -2.4]], dtype=F64),
    "logp_proximal": torch.tensor([[-9.0, -0.1, -0.9, -2.1]], dtype=F64),
    "mask": torch.ones(1, 4),
    "advantage": torch.tensor([1.0], dtype=F64),
}
OLDER = torch.tensor([[True, True, False, False]])
LOG_K = (-0.2, 0.3)  # proximal / behaviour at tokens 2 and 3
LOG_R = (-0.1, 0.1, 0.1, 0.1)  # pi / behaviour at 0 and 1, pi / proximal at 2 and 3


def test_older_tokens_of_a_mixed_response_keep_their_denominator_and_are_not_corrected():
    out = policy_loss("cispo", **MIXED, older=OLDER, options={"correction": "token_truncate", "correction_cap": 1.2})
    expected = [math.exp(r) * k for r, k in zip(LOG_R, [1.0, 1.0, math.exp(LOG_K[0]), 1.2], strict=True)]
    torch.testing.assert_close(out.weight, torch.tensor([expected], dtype=F64))
    assert out.metrics["correction/mean"].value == pytest.approx((math.exp(LOG_K[0]) + 1.2) / 2)  # over the tokens it acts on


@pytest.mark.parametrize(("kind", "cap"), [("token_truncate", 9.0), ("sequence_truncate", 9.0), ("token_mask", 9.0), ("sequence_mask", 9.0)])
def test_within_its_bounds_a_product_is_the_ratio_to_whoever_sampled_each_token(kind, cap):
    """VESPO: older tokens give pi / mu, the others pi / proximal * proximal / mu: W is pi / mu over the whole response, whatever the versions."""
    out = policy_loss("vespo", **MIXED, older=OLDER, options={"correction": kind, "correction_cap": cap})
    plain = policy_loss("vespo", **{k: v for k, v in MIXED.items() if k != "logp_proximal"})
    torch.testing.assert_close(out.weight, plain.weight, rtol=1e-14, atol=0)


def test_a_capped_product_of_a_mixed_response_by_hand():
    by_token = policy_loss("vespo", **MIXED, older=OLDER, options={"correction": "token_truncate", "correction_cap": 1.2})
    by_sequence = policy_loss("vespo", **MIXED, older=OLDER, options={"correction": "sequence_truncate", "correction_cap": 1.05})
    for out, log_k in ((by_token, LOG_K[0] + math.log(1.2)), (by_sequence, math.log(1.05))):
        W = math.exp(sum(LOG_R) + log_k)
        torch.testing.assert_close(out.weight, torch.full((1, 4), W**2 * math.exp(3 * (1 - W)), dtype=F64))


def test_gates_of_a_mixed_response_act_on_the_newer_tokens_alone():
    """K^(1/T) runs over the two tokens of the proximal version: exp(0.05) = 1.051."""
    inside = policy_loss("cispo", **MIXED, older=OLDER, options={"correction": "geometric_band", "correction_low": 0.9, "correction_cap": 1.06})
    beyond = policy_loss("cispo", **MIXED, older=OLDER, options={"correction": "geometric_band", "correction_low": 0.9, "correction_cap": 1.05})
    weights = [math.exp(r) for r in LOG_R]
    torch.testing.assert_close(inside.weight, torch.tensor([weights], dtype=F64))
    torch.testing.assert_close(beyond.weight, torch.tensor([[*weights[:2], 0.0, 0.0]], dtype=F64))
    assert beyond.metrics["correction/masked_frac"].value == 1.0


def test_a_masked_token_of_a_mixed_response_leaves_w_and_the_loss():
    out = policy_loss("vespo", **MIXED, older=OLDER, options={"correction": "token_mask", "correction_cap": 1.2})
    W = math.exp(LOG_R[0] + LOG_R[1] + LOG_R[2] + LOG_K[0])  # token 3 (k = 1.35) is out
    phi = W**2 * math.exp(3 * (1 - W))
    torch.testing.assert_close(out.weight, torch.tensor([[phi, phi, phi, 0.0]], dtype=F64))
    assert out.metrics["correction/masked_frac"].value == 0.5


def test_a_relayed_prefix_and_older_tokens_together():
    """Token 0 relayed, token 1 older, 2 and 3 of the proximal version: the segments of W are the prefix and everything after it."""
    out = policy_loss("vespo", **MIXED, older=OLDER, prefix_length=torch.tensor([1]), options={"correction": "token_truncate", "correction_cap": 9.0})
    prefix, rest = math.exp(LOG_R[0]), math.exp(sum(LOG_R[1:]) + sum(LOG_K))
    expected = [W**2 * math.exp(3 * (1 - W)) for W in (prefix, rest, rest, rest)]
    torch.testing.assert_close(out.weight, torch.tensor([expected], dtype=F64))


def test_no_older_token_is_the_same_as_not_saying_so():
    for name in ("cispo", "vespo", "gspo", "topr"):
        options = {"correction": "token_mask"}
        said = policy_loss(name, **MIXED, older=torch.zeros_like(OLDER), options=options)
        assert torch.equal(said.weight, policy_loss(name, **MIXED, options=options).weight)


def test_all_tokens_older_is_the_ratio_to_behaviour_and_no_correction():
    out = policy_loss("grpo", **MIXED, older=torch.ones_like(OLDER), options={"correction": "sequence_mask"})
    plain = policy_loss("grpo", **{k: v for k, v in MIXED.items() if k != "logp_proximal"})
    assert torch.equal(out.weight, plain.weight)
    assert math.isnan(out.metrics["correction/mean"].value)


def test_a_batch_knows_what_is_older_than_its_proximal_policy():
    from dataclasses import replace

    from tests.builders import random_batch

    batch = random_batch(rows=2, group_size=2, seed=0)
    assert batch.older_BT is None
    assert batch.recomputed_at(4) is batch  # there is nothing that was recomputed
    version = torch.where(batch.response_mask_BT, torch.where(batch.position_BT < 2, 3, 4), -1)
    batch = replace(batch, version_BT=version, logp_proximal_BT=batch.logp_behavior_BT.clone()).recomputed_at(4)
    assert torch.equal(batch.older_BT, batch.response_mask_BT & (batch.position_BT < 2))
    assert batch.rows([1]).older_BT.sum() == min(2, int(batch.response_mask_BT[1].sum()))
