"""Which groups a schedule throws away: counted by difficulty (mean reward) and by how long they took, since what is slow or hard is dropped first."""

import math
from collections.abc import Mapping, Sequence

import torch

from nearpolicy.metrics import Layout, Table
from nearpolicy.rollout import Scored

NAME = "discard"
"""Key of the table among a schedule's metrics, and head of the names of its columns."""
DIFFICULTIES = 5
"""Bins of a group's mean reward: fifths of [0, 1], what lies outside in the first and last; one more bin for groups without a reward."""
DURATIONS = 11
"""Bins of the seconds a group took to write: below 1, 2, 4, ... 512, and the rest."""
REASONS = ("over_age", "no_signal")
"""Why a group is rejected."""

LAYOUT = Layout(
    rows=("groups", *REASONS),
    axes={"difficulty": slice(0, DIFFICULTIES + 1), "duration": slice(DIFFICULTIES + 1, DIFFICULTIES + 1 + DURATIONS)},
    reads={f"{reason}_frac": (reason, "groups") for reason in REASONS},
)
"""`groups` counts all that were taken or rejected since the start of the run."""


def difficulty_bin(scored: Sequence[Scored]) -> int:
    """Bin of the mean reward of a group's scored responses; `DIFFICULTIES` when none has a reward."""
    rewards = [s.score.reward for s in scored if not math.isnan(s.score.reward)]
    if not rewards:
        return DIFFICULTIES
    return min(max(math.floor(sum(rewards) / len(rewards) * DIFFICULTIES), 0), DIFFICULTIES - 1)


def duration_bin(seconds: float) -> int:
    """0 below a second, k for 2^(k-1) <= seconds < 2^k, `DURATIONS` - 1 for all above."""
    return 0 if seconds < 1 else min(math.floor(math.log2(seconds)) + 1, DURATIONS - 1)


def discard_table(counts: Mapping[str, int]) -> Table:
    """The ledger's counts as a table, since the start of the run."""
    bins = [f"/{axis}/{k}" for axis, size in (("difficulty", DIFFICULTIES + 1), ("duration", DURATIONS)) for k in range(size)]
    rejected = [[float(counts.get(f"rejected/{reason}{b}", 0)) for b in bins] for reason in REASONS]
    taken = [float(counts.get(f"taken{b}", 0)) for b in bins]
    groups = [sum(column) for column in zip(taken, *rejected, strict=True)]
    return Table(torch.tensor([groups, *rejected], dtype=torch.float64), LAYOUT)
