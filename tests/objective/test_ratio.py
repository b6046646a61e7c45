"""Log weights at every level and scope, by hand; the clamp; the errors."""

import pytest
import torch

from nearpolicy.errors import DataError, UsageError
from nearpolicy.objective import ratio
from nearpolicy.objective.aggregate import token_weights

F64 = torch.float64
LR = torch.tensor([[0.1, 0.2, -0.4, 0.0], [1.0, -0.5, 0.0, 0.0]], dtype=F64)
MASK = torch.tensor([[True, True, True, True], [True, True, False, False]])


@pytest.mark.parametrize(
    ("level", "expected"),
    [("sequence", [[-0.1], [0.5]]), ("geometric", [[-0.025], [0.25]]), ("sqrt", [[-0.05], [0.5 / 2**0.5]]), ("token", LR.tolist())],
)
def test_levels(level, expected):
    torch.testing.assert_close(ratio.log_weight(LR, MASK, level=level).value, torch.tensor(expected, dtype=F64))


def test_segments_have_their_own_sum_and_length():
    relayed = torch.tensor([[True, True, False, False], [False, False, False, False]])
    total = ratio.log_weight(LR, MASK, level="sequence", relayed_BT=relayed).value
    torch.testing.assert_close(total, torch.tensor([[0.3, 0.3, -0.4, -0.4], [0.5, 0.5, 0.5, 0.5]], dtype=F64))
    mean = ratio.log_weight(LR, MASK, level="geometric", relayed_BT=relayed).value
    torch.testing.assert_close(mean, torch.tensor([[0.15, 0.15, -0.2, -0.2], [0.25] * 4], dtype=F64))


def test_a_sequence_correction_joins_the_part_after_the_prefix():
    relayed = torch.tensor([[True, True, False, False], [False, False, False, False]])
    extra = torch.tensor([[10.0], [1.0]], dtype=F64)
    total = ratio.log_weight(LR, MASK, level="sequence", relayed_BT=relayed, extra_BX=extra).value
    torch.testing.assert_close(total, torch.tensor([[0.3, 0.3, 9.6, 9.6], [1.5] * 4], dtype=F64))


def test_the_clamp_comes_once_after_the_sum():
    lr = torch.tensor([[30.0, -25.0]], dtype=F64)
    weight = ratio.log_weight(lr, torch.ones_like(lr, dtype=torch.bool), level="sequence")
    assert weight.value.item() == 5.0  # clamping the tokens first would give 0
    beyond = ratio.log_weight(torch.tensor([[30.0, 25.0]], dtype=F64), torch.ones(1, 2, dtype=torch.bool), level="sequence")
    assert (beyond.value.item(), beyond.raw.item()) == (20.0, 55.0)


def test_padding_never_enters():
    garbage = torch.tensor([[-1.0, torch.nan, -torch.inf]], dtype=F64)
    lr = ratio.log_ratio(garbage, torch.zeros(1, 3, dtype=F64), mask_BT=torch.tensor([[True, False, False]]))
    assert lr.tolist() == [[-1.0, 0.0, 0.0]]


def test_a_relayed_prefix_keeps_its_own_denominator():
    behavior, proximal = torch.full((1, 3), -1.0), torch.full((1, 3), -2.0)
    relayed = torch.tensor([[True, False, False]])
    assert ratio.denominator(behavior, proximal, which="proximal", foreign_BT=relayed).tolist() == [[-1.0, -2.0, -2.0]]
    assert ratio.denominator(behavior, proximal, which="behavior", foreign_BT=relayed) is behavior


def test_errors_name_what_is_wrong():
    with pytest.raises(UsageError, match="no logp_proximal"):
        ratio.denominator(torch.zeros(1, 1), None, which="proximal")
    with pytest.raises(UsageError, match="'theta'"):
        ratio.denominator(torch.zeros(1, 1), None, which="theta")
    with pytest.raises(UsageError, match="'word'"):
        ratio.log_weight(LR, MASK, level="word")
    column = torch.zeros(2, 4)
    column[1, 1] = torch.nan
    with pytest.raises(DataError, match=r"logp_behavior: got nan at row 1, column 1"):
        ratio.check_finite(MASK, logp_behavior=column)
    column[1, 1], column[1, 3] = 0.0, torch.nan
    ratio.check_finite(MASK, logp_behavior=column)  # masked: may hold anything


# Two responses of length 1 and 3 with values 1 and 2 a token: a worked example of the four aggregations.
AGG_MASK = torch.tensor([[True, False, False], [True, True, True]])
VALUE = torch.tensor([[1.0, 0.0, 0.0], [2.0, 2.0, 2.0]], dtype=F64)


@pytest.mark.parametrize(("aggregate", "total"), [("token_mean", 1.75), ("sequence_mean", 1.5), ("sequence_sum", 3.5), ("constant", 0.875)])
def test_aggregates(aggregate, total):
    weights = token_weights(AGG_MASK, aggregate=aggregate, dtype=F64, max_length=4)
    assert (weights * VALUE).sum().item() == pytest.approx(total, abs=1e-15)


@pytest.mark.parametrize(("aggregate", "weight"), [("token_mean", 1 / 3), ("sequence_mean", 1 / 3), ("sequence_sum", 1.0), ("constant", 0.2)])
def test_a_fully_masked_row_is_no_sequence(aggregate, weight):
    mask = torch.tensor([[True, True, True], [False, False, False]])
    weights = (token_weights(mask, aggregate=aggregate, dtype=F64, max_length=5) * mask).expand(2, 3)
    assert weights[0].tolist() == [weight] * 3
    assert weights[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_an_empty_batch_divides_by_one(aggregate):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.isfinite(token_weights(mask, aggregate=aggregate, max_length=3)).all()


def test_global_counts_replace_the_batch_s_own():
    assert token_weights(AGG_MASK, aggregate="token_mean", dtype=F64, num_tokens=8).item() == 0.125
    assert token_weights(AGG_MASK, aggregate="sequence_sum", dtype=F64, num_sequences=torch.tensor(4)).item() == 0.25
    with pytest.raises(UsageError, match="num_tokens"):
        token_weights(AGG_MASK, aggregate="token_mean", num_tokens=float("nan"))
    with pytest.raises(UsageError, match="max_length"):
        token_weights(AGG_MASK, aggregate="constant")
    with pytest.raises(UsageError, match="'token_mean'"):
        token_weights(AGG_MASK, aggregate="tokenmean")


def test_the_sum_before_a_token_leaves_the_token_out():
    x_BT = torch.tensor([[1.0, -2.0, 4.0, 0.0], [0.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    assert ratio.before(x_BT).tolist() == [[0.0, 1.0, -1.0, 3.0], [0.0, 0.0, 3.0, 3.0]]
