"""Aggregation: how much one trained token weighs in the loss. The only division by a number of tokens or sequences.

    token_mean     1 / num_tokens                     (DAPO, arXiv 2503.14476, eq. 8)
    sequence_mean  1 / (num_sequences * T_b)          (GRPO, arXiv 2402.03300, eq. 3)
    sequence_sum   1 / num_sequences                  (REINFORCE, TOPR on sequences)
    constant       1 / (num_sequences * max_length)   (Dr.GRPO, arXiv 2503.20783)

The counts are arguments: they are those of the whole optimizer batch over all devices, so that losses and gradients of micro-batches add
up to the batch's. A row without a trained token is no sequence.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from nearpolicy.errors import UsageError, nearest

AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "constant")
"""Names of the aggregations."""

Count = int | float | Tensor


def token_weights(
    mask_BT: Bool[Tensor, "B T"],
    *,
    aggregate: str,
    dtype: torch.dtype = torch.float32,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Weight of each trained token: shape [], [1, 1] or [B, 1], to be multiplied with values that are 0 at masked tokens.

    Args:
        mask_BT: tokens trained on.
        num_tokens: trained tokens of the whole optimizer batch; None means this batch is everything.
        num_sequences: rows with a trained token in the whole optimizer batch; None likewise.
        max_length: tokens, for `constant` only.
    Counts of 0 act as 1: an all-masked batch gives a loss of 0, not NaN.
    Raises:
        UsageError: unknown aggregate, a count that is no number, negative or NaN, or `constant` without max_length.
    """
    for name, count in (("num_tokens", num_tokens), ("num_sequences", num_sequences)):
        _checked(count, name)
    if aggregate == "token_mean":
        return 1.0 / _count(num_tokens, "num_tokens", mask_BT, dtype)
    if aggregate not in AGGREGATES:
        raise UsageError("aggregate", got=repr(aggregate), expected=" | ".join(AGGREGATES), do=nearest(aggregate, AGGREGATES))
    rows = _count(num_sequences, "num_sequences", mask_BT, dtype)
    if aggregate == "sequence_mean":
        return 1.0 / (rows * mask_BT.sum(1, keepdim=True).clamp(min=1))
    if aggregate == "sequence_sum":
        return 1.0 / rows
    if max_length is None:
        raise UsageError("aggregate 'constant'", got="max_length = None", expected="the response limit, in tokens", do="Set the option max_length.")
    return 1.0 / (rows * max_length)


def _checked(value: Count | None, name: str) -> None:
    """Refuse what is no count, whether this aggregate reads it or not."""
    if value is None or (isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < torch.inf:
        got = f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise UsageError(name, got=got, expected="a count of 0 or more (a number, or a tensor with one)",
                         do="Pass the count over the whole optimizer batch, or None.")  # fmt: skip


def _count(value: Count | None, name: str, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    if value is None:
        own = mask_BT.sum() if name == "num_tokens" else mask_BT.any(1).sum()
        return own.clamp(min=1).to(dtype)
    if isinstance(value, Tensor):
        return value.reshape(()).to(device=mask_BT.device, dtype=dtype).clamp(min=1)
    return mask_BT.new_full((), max(value, 1), dtype=dtype)
