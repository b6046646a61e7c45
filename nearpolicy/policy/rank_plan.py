"""Which rank computes which rows, in which step: equal numbers of steps on every rank, none above the token budget.

Ranks that share a model's weights meet in every forward and backward pass, so each must make the same number of them. A rank that has no
rows left makes an empty one (`empty_row`).
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from nearpolicy.errors import UsageError
from nearpolicy.policy.packing import Costed, cut_families, fill_bins, fill_rectangles, row_lengths
from nearpolicy.rollout import Batch

Steps = list[list[list[int]]]
"""[step][rank] -> rows; an empty list is an empty step."""


def plan_ranks(batch: Batch, token_budget: int, ranks: int, *, padded: bool = False) -> Steps:
    """Micro-batches for each of `ranks`, balanced inside a step. With one rank every step is one micro-batch of `plan_microbatches`' kind.

    Every row appears once; no micro-batch costs more than `token_budget` tokens unless it is a single row; the first rank has rows in every step.
    Deterministic: equal batches give equal plans.

    Args:
        padded: as for `plan_microbatches`.
    Raises:
        UsageError: a budget or a number of ranks below 1.
    """
    for name, value in (("token_budget", token_budget), ("ranks", ranks)):
        if value < 1:
            raise UsageError(name, got=value, expected="at least 1", do="Use the number of tokens (or processes) that there is room for.")
    bins = _rectangles(row_lengths(batch), token_budget, ranks) if padded else _packed(batch, token_budget, ranks)
    bins = sorted((b for b in bins if b[1]), key=lambda b: (-b[0], b[1][0]))  # what is computed at the same time costs alike
    bins += [(0, [])] * (-len(bins) % ranks)
    return [[rows for _, rows in bins[k : k + ranks]] for k in range(0, len(bins), ranks)]


def _packed(batch: Batch, token_budget: int, ranks: int) -> list[Costed]:
    """Families stay together unless one of them is more than a rank's share."""
    total = sum(cost for cost, _ in cut_families(batch, token_budget))
    pieces = cut_families(batch, min(token_budget, max(-(-total // ranks), 1)))
    count = ranks * max(1, -(-total // (token_budget * ranks)))
    while (bins := fill_bins(pieces, count, token_budget)) is None:
        count += ranks
    return bins


def _rectangles(length_B: Sequence[int], token_budget: int, ranks: int) -> list[Costed]:
    """The smallest rectangles of which there are no more than the number that the budget needs, rounded up to whole steps."""
    count = -(-len(fill_rectangles(length_B, token_budget)) // ranks) * ranks
    low, high = 1, token_budget  # at `high` there are few enough
    while low < high:
        middle = (low + high) // 2
        if len(fill_rectangles(length_B, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return [(len(rows) * length_B[rows[0]], sorted(rows)) for rows in fill_rectangles(length_B, high)]


def empty_row(batch: Batch) -> Batch:
    """A row without a response: one token goes through the model, and loss and gradient are exactly zero."""
    first = batch.rows([0])
    names = [f.name for f in fields(first) if f.name.endswith("_BT") or f.name == "routes"]
    cut: dict[str, Any] = {name: v[:, :1] for name in names if (v := getattr(first, name)) is not None}
    zero = torch.zeros_like(cut["mask_BT"])
    changes = {"mask_BT": zero, "response_mask_BT": zero, "prompt_length_B": torch.ones_like(first.prompt_length_B)}
    return replace(first, **{**cut, **changes, "prefix_length_B": torch.zeros_like(first.prefix_length_B)})
