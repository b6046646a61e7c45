"""Advantages of groups of responses to one prompt, and the overlong penalty that is added to their rewards."""

from typing import NamedTuple

import torch
from torch import Tensor

from nearpolicy.errors import DataError, UsageError

EPS = 1e-6
"""Added to the standard deviation, as verl's GRPO estimator does (TRL adds 1e-4)."""
STD_FLOOR = 1e-4
"""Smallest standard deviation a group is divided by: rewards that differ by rounding must not become advantages of size one."""
BASELINES = ("mean", "leave_one_out", None)
"""Group baselines."""


class GroupAdvantages(NamedTuple):
    """Advantages and what became of the groups."""

    advantage_B: Tensor
    """One a response, reward units (or standard deviations), float32 or float64 as the rewards; 0 where unscored."""
    scored_B: Tensor
    """False at unscored (NaN) responses, which must be masked out of the loss; bool [B]."""
    num_groups: int
    no_signal_groups: int
    """Groups with a baseline whose scored rewards are all equal (a single scored member included), and groups with none scored."""
    floored_groups: int
    """Groups whose standard deviation was raised to the floor."""
    unscored: int
    """Responses without a reward."""


def group_advantages(
    reward_B: Tensor, group_B: Tensor, *, baseline: str | None = "mean", normalize_std: bool, std_floor: float = STD_FLOOR
) -> GroupAdvantages:
    """Advantages within groups; members of a group may lie anywhere in the batch.

        mean            A_i = R_i - mean(R)                                     (GRPO without std, Dr.GRPO, arXiv 2503.20783)
        leave_one_out   A_i = R_i - mean of the others = (R_i - mean) n / (n-1) (RLOO, arXiv 2402.14740)
        None            A_i = R_i
        normalize_std   A_i / (max(std, std_floor) + 1e-6), std with n - 1      (GRPO, arXiv 2402.03300; equals verl's estimator)

    Args:
        reward_B: [B]; NaN = unscored: left out of its group, advantage 0.
        group_B: group id of each response, whole numbers, [B].
        std_floor: in reward units, >= 0.
    Equal rewards (max - min = 0, tested before any division) give exactly 0; so does a group of one scored member under a baseline.
    Computed in float64, returned in the rewards' type (at least float32).
    Raises:
        UsageError: unknown baseline, a negative floor, or `normalize_std` without a baseline.
        DataError: shapes that differ, or an infinite reward.
    """
    if baseline not in BASELINES or not std_floor >= 0 or (baseline is None and normalize_std):
        raise UsageError("group_advantages", got=f"baseline = {baseline!r}, normalize_std = {normalize_std}, std_floor = {std_floor}",
                         expected="baseline 'mean', 'leave_one_out' or None (then without std), std_floor >= 0",
                         do="Correct the option.")  # fmt: skip
    if reward_B.ndim != 1 or reward_B.shape != group_B.shape:
        raise DataError("group_advantages", got=f"rewards {tuple(reward_B.shape)}, groups {tuple(group_B.shape)}", expected="two [B] tensors",
                        do="Give one group id for each reward.")  # fmt: skip
    if bool(torch.isinf(reward_B).any()):
        row = int(torch.isinf(reward_B).nonzero()[0])
        raise DataError("group_advantages: reward", got=f"{float(reward_B[row])} at row {row}", expected="a finite number, or NaN for unscored",
                        do="Mend the reward function.")  # fmt: skip
    dtype = torch.promote_types(reward_B.dtype, torch.float32)
    reward = reward_B.double()
    scored = ~torch.isnan(reward)
    ids, member = torch.unique(group_B, return_inverse=True)
    G = len(ids)

    def per_group(values: Tensor) -> Tensor:
        return values.new_zeros(G).index_add_(0, member, values)

    count = per_group(scored.double())
    filled = reward.masked_fill(~scored, 0.0)
    top = reward.new_full((G,), -torch.inf).scatter_reduce_(0, member, reward.masked_fill(~scored, -torch.inf), "amax")
    bottom = reward.new_full((G,), torch.inf).scatter_reduce_(0, member, reward.masked_fill(~scored, torch.inf), "amin")
    spread = (count > 0) & (top > bottom)
    if baseline is None:
        advantage = filled
        silent = count == 0
    else:
        mean = per_group(filled) / count.clamp(min=1)
        advantage = (reward - mean[member]).masked_fill(~scored | ~spread[member], 0.0)
        silent = ~spread
    floored = torch.zeros_like(spread)
    if normalize_std:
        std = (per_group(advantage.square()) / (count - 1).clamp(min=1)).sqrt()
        floored = spread & (std < std_floor)
        advantage = advantage / (std.clamp(min=std_floor) + EPS)[member]
    if baseline == "leave_one_out":
        advantage = advantage * (count / (count - 1).clamp(min=1))[member]
    return GroupAdvantages(advantage.to(dtype), scored, G, int(silent.sum()), int(floored.sum()), int((~scored).sum()))


def overlong_penalty(length_B: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), to be added to the reward; in [-1, 0], float64 [B].

        0                                            length <= max_length - buffer
        (max_length - buffer - length) / buffer      up to max_length
        -1                                           beyond

    Raises:
        UsageError: buffer outside 1 .. max_length.
    """
    if not 1 <= buffer <= max_length:
        raise UsageError("overlong_penalty: buffer", got=buffer, expected=f"1 to max_length = {max_length} tokens", do="Shorten the buffer.")
    return ((max_length - buffer - length_B.double()) / buffer).clamp(-1.0, 0.0)
