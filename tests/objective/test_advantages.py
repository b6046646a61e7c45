"""Group advantages and the overlong penalty."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import DataError, UsageError
from nearpolicy.objective.advantages import group_advantages, overlong_penalty

SCALARS = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
ORACLE = SCALARS["advantages"]
R1001 = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
ZERO = torch.zeros(4, dtype=torch.long)


def advantages(reward, group=None, **options):
    reward = torch.as_tensor(reward, dtype=torch.float64)
    group = torch.zeros(len(reward), dtype=torch.long) if group is None else torch.as_tensor(group)
    return group_advantages(reward, group, **{"normalize_std": False, **options})


def test_without_std():
    assert advantages(R1001).advantage_B.tolist() == ORACLE["drgrpo_1001"]


def test_with_std_equals_the_sample_std_plus_1e_6():
    torch.testing.assert_close(
        advantages(R1001, normalize_std=True).advantage_B, torch.tensor(ORACLE["verl_grpo_1001"], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_leave_one_out():
    out = advantages(R1001, baseline="leave_one_out").advantage_B
    torch.testing.assert_close(out, torch.tensor(ORACLE["rloo_1001"], dtype=torch.float64), rtol=0, atol=1e-15)
    identity = SCALARS["rloo_identity"]
    torch.testing.assert_close(
        advantages(identity["R"], baseline="leave_one_out").advantage_B, torch.tensor(identity["loo"], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_a_demonstration_joins_the_mean_of_its_group():
    union = ORACLE["luffy_union_rewards_1plus7"]
    assert advantages(union["rewards"]).advantage_B.tolist() == union["A"]


@pytest.mark.parametrize("options", [{"normalize_std": True}, {}, {"baseline": "leave_one_out"}])
def test_equal_rewards_give_exactly_zero(options):
    out = group_advantages(torch.tensor([0.3] * 8), torch.zeros(8, dtype=torch.long), **{"normalize_std": False, **options})
    assert out.advantage_B.tolist() == [0.0] * 8
    assert (out.num_groups, out.no_signal_groups) == (1, 1)


@pytest.mark.parametrize("options", [{"normalize_std": True}, {}, {"baseline": "leave_one_out", "normalize_std": True}])
def test_a_group_of_one_gives_zero_and_is_counted(options):
    out = advantages([1.0, 1.0, 0.0], [7, 3, 3], **options)
    assert out.advantage_B[0] == 0
    assert out.no_signal_groups == 1


def test_no_baseline_keeps_the_reward():
    out = advantages([1.0, float("nan"), -2.0], [7, 3, 3], baseline=None)
    assert out.advantage_B.tolist() == [1.0, 0.0, -2.0]
    assert out.no_signal_groups == 0


def test_interleaved_groups_equal_the_groups_alone():
    reward = torch.tensor([1.0, 5.0, 0.0, 7.0, 0.5, 6.0])
    out = group_advantages(reward, torch.tensor([9, -4, 9, -4, 9, -4]), normalize_std=True).advantage_B
    for rows in ([0, 2, 4], [1, 3, 5]):
        alone = group_advantages(reward[rows], torch.zeros(3, dtype=torch.long), normalize_std=True).advantage_B
        assert torch.equal(out[rows], alone)


def test_an_unscored_response_is_left_out_of_its_group():
    out = advantages([1.0, float("nan"), 0.0, float("nan")], [0, 0, 0, 1])
    assert out.advantage_B.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert out.scored_B.tolist() == [True, False, True, False]
    assert (out.num_groups, out.no_signal_groups, out.unscored) == (2, 1, 2)


def test_a_std_below_the_floor_is_raised_and_counted():
    out = advantages([0.3, 0.3 + 1e-7, 1.0, 0.0], [0, 0, 1, 1], normalize_std=True)
    assert out.floored_groups == 1
    assert out.advantage_B[:2].abs().max() < 1e-3
    assert out.advantage_B[2].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-6))


@pytest.mark.parametrize("case", SCALARS["dapo_dynamic_sampling"], ids=lambda c: str(c["correct"]))
def test_groups_without_signal_are_those_that_dynamic_sampling_drops(case):
    reward = [1.0] * case["correct"] + [0.0] * (case["G"] - case["correct"])
    assert (advantages(reward).no_signal_groups == 0) is case["keep"]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=12), st.booleans())
def test_advantages_of_a_group_add_up_to_zero_and_do_not_depend_on_order(rows, std):
    reward = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    group = torch.tensor([g for _, g in rows])
    out = group_advantages(reward, group, normalize_std=std).advantage_B
    for g in group.unique():
        assert abs(out[group == g].sum().item()) < 1e-9 * (1 + out.abs().max().item())
    back = group_advantages(reward.flip(0), group.flip(0), normalize_std=std).advantage_B.flip(0)
    torch.testing.assert_close(out, back, rtol=1e-9, atol=1e-9)


def test_bad_input_is_refused():
    with pytest.raises(UsageError, match="median"):
        advantages(R1001, baseline="median")
    with pytest.raises(UsageError, match="baseline = None"):
        advantages(R1001, baseline=None, normalize_std=True)
    with pytest.raises(DataError, match="inf at row 1"):
        advantages([0.0, float("inf")])
    with pytest.raises(DataError, match=r"groups \(3,\)"):
        advantages(R1001, [0, 0, 0])


def test_overlong_penalty():
    oracle = SCALARS["dapo_overlong"]
    lengths = torch.tensor([int(n) for n in oracle["cases"]])
    out = overlong_penalty(lengths, max_length=oracle["Lmax"], buffer=oracle["Lcache"])
    assert out.tolist() == list(oracle["cases"].values())
    with pytest.raises(UsageError, match="buffer"):
        overlong_penalty(lengths, max_length=10, buffer=11)
