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
