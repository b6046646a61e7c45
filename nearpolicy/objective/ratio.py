"""Log ratios and log weights: the only place that subtracts log-probs, sums them over a sequence or segment, and clamps.

    log_ratio[b, t] = logp[b, t] - log_denominator[b, t]                     (nats; 0 at tokens that are not trained)
    token      log_weight[b, t] = log_ratio[b, t]
    sequence   log_weight[b]    = sum_t log_ratio[b, t]                       (log W, the product ratio)
    geometric  log_weight[b]    = sum_t log_ratio[b, t] / T_b                 (log s, GSPO, arXiv 2507.18071)
    sqrt       log_weight[b]    = sum_t log_ratio[b, t] / sqrt(T_b)           (length ablation of VESPO, arXiv 2602.10693)

A sequence weight is exp of a sum, so nothing is clamped before the sum; the clamp to [-LIMIT, LIMIT] comes once, at the end, and the
value before it is returned too, so that raw statistics can be logged.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearpolicy.errors import DataError, UsageError

LIMIT = 20.0
"""Bound of a log weight, in nats: exp(20) = 4.9e8 is finite in float32 with room for a product with an advantage."""

ROUNDING = 1e-3
"""How far above 0 a log-prob may lie, in nats: what rounding in half precision explains."""

LEVELS = ("token", "sequence", "geometric", "sqrt")
"""How token log ratios become a log weight."""


class LogWeight(NamedTuple):
    """A log weight and what the clamp did to it."""

    value: Tensor
    """After the clamp: [B, T] at token level or with segments, else [B, 1]."""
    raw: Tensor
    """Before the clamp, same shape."""
    share: Tensor | float
    """Part of a sequence's literal objective that one token carries: 1 / (T * d log_weight / d logp), so that summing `share * f`
    over the tokens gives an objective whose gradient per token is phi. 1 at token and geometric level, 1 / T for the product."""


def clamp(log_weight: Tensor) -> Tensor:
    """Limit a log weight to [-LIMIT, LIMIT] nats: the only numerical clamp of the package."""
    return log_weight.clamp(-LIMIT, LIMIT)


def denominator(
    logp_behavior_BT: Float[Tensor, "B T"],
    logp_proximal_BT: Float[Tensor, "B T"] | None,
    *,
    which: str,
    foreign_BT: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """The log-probs a ratio is taken against.

    Args:
        which: `behavior` (the policy that sampled each token) or `proximal` (the trainer's recomputation at the start of the batch).
        foreign_BT: True at tokens that the proximal policy did not write (a relayed prefix, Thinking Seeds, arXiv 2601.21476; what a response
            in flight was begun with): these keep `logp_behavior` whatever `which` says, or the ratio would leave out how far the policy had
            already moved.
    Raises:
        UsageError: `which` is unknown, or is `proximal` and there are no proximal log-probs.
    """
    if which == "behavior":
        return logp_behavior_BT
    if which != "proximal":
        raise UsageError("ratio denominator", got=repr(which), expected="'behavior' or 'proximal'", do="Name one of the two.")
    if logp_proximal_BT is None:
        raise UsageError(
            "ratio denominator 'proximal'", got="no logp_proximal", expected="the trainer's own log-probs at the start of the rollout batch",
            do="Pass logp_proximal, or take the ratio to the behaviour policy and drop the correction.",
        )  # fmt: skip
    return logp_proximal_BT if foreign_BT is None else torch.where(foreign_BT, logp_behavior_BT, logp_proximal_BT)


def log_ratio(logp_BT: Float[Tensor, "B T"], log_denominator_BT: Float[Tensor, "B T"], *, mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """`logp - log_denominator` at the trained tokens and exactly 0 elsewhere, whatever padding holds."""
    return (logp_BT - log_denominator_BT).masked_fill(~mask_BT, 0.0)


def before(x_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Sum over the tokens before each one, sum_{k<t} x_k, of anything that is 0 outside the response: the log-likelihood or drift of a prefix."""
    return x_BT.cumsum(1) - x_BT


def log_weight(
    log_ratio_BT: Float[Tensor, "B T"],
    mask_BT: Bool[Tensor, "B T"],
    *,
    level: str,
    relayed_BT: Bool[Tensor, "B T"] | None = None,
    extra_BX: Float[Tensor, "B X"] | None = None,
) -> LogWeight:
    """Token log ratios to log weights at one level.

    Args:
        log_ratio_BT: 0 outside `mask_BT`.
        mask_BT: tokens that count in the sum and in T.
        level: one of `LEVELS`.
        relayed_BT: None takes W and T over all masked tokens (scope `response`); otherwise over the token's own segment, the relayed
            prefix or everything after it (scope `segment`), and the result is [B, T].
        extra_BX: added to the sum before it is divided and clamped (a sequence-level log correction); with segments it joins the part
            after the prefix. Not used at token level.
    Raises:
        UsageError: unknown level.
    """
    if level not in LEVELS:
        raise UsageError("ratio level", got=repr(level), expected=" | ".join(LEVELS), do="Name one of these.")
    if level == "token":
        return LogWeight(clamp(log_ratio_BT), log_ratio_BT, 1.0)
    if relayed_BT is None:
        total, count = log_ratio_BT.sum(1, keepdim=True), mask_BT.sum(1, keepdim=True)
        total = total if extra_BX is None else total + extra_BX
    else:
        prefix = log_ratio_BT.masked_fill(~relayed_BT, 0.0).sum(1, keepdim=True)
        rest = log_ratio_BT.masked_fill(relayed_BT, 0.0).sum(1, keepdim=True)
        total = torch.where(relayed_BT, prefix, rest if extra_BX is None else rest + extra_BX)
        count = torch.where(relayed_BT, (mask_BT & relayed_BT).sum(1, keepdim=True), (mask_BT & ~relayed_BT).sum(1, keepdim=True))
    length = count.clamp(min=1).to(total.dtype)
    if level == "sequence":
        return LogWeight(clamp(total), total, 1.0 / length)
    if level == "sqrt":
        root = length.sqrt()
        raw = total / root
        return LogWeight(clamp(raw), raw, 1.0 / root)
    raw = total / length
    return LogWeight(clamp(raw), raw, 1.0)


def check_logp(mask_BT: Bool[Tensor, "B T"], **columns: Tensor | None) -> None:
    """Refuse what is no log-prob at masked tokens: missing, infinite, or above `ROUNDING`. Reads the device, like `check_finite`.

    Raises:
        DataError: names the column, the row and the token.
    """
    check_finite(mask_BT, **columns)
    for name, column in columns.items():
        if column is None:
            continue
        bad = (column > ROUNDING) & mask_BT
        if bool(bad.any()):
            row, token = (int(i) for i in bad.nonzero()[0])
            raise DataError(
                f"policy_loss: {name}", got=f"{float(column[row, token])} at row {row}, column {token}", expected="log-probs, which are 0 at most",
                do="Pass natural logarithms of probabilities, not logits, negated values or probabilities.",
            )  # fmt: skip


def check_finite(mask_BT: Bool[Tensor, "B T"], **columns: Tensor | None) -> None:
    """Refuse missing (NaN) and non-finite values at masked tokens. Reads the device: call it only where that is cheap.

    Raises:
        DataError: names the column, the row and the token.
    """
    for name, column in columns.items():
        if column is None:
            continue
        bad = ~torch.isfinite(column) & mask_BT
        if bool(bad.any()):
            row, token = (int(i) for i in bad.nonzero()[0])
            value = float(column.expand_as(mask_BT)[row, token])
            raise DataError(
                f"policy_loss: {name}", got=f"{value} at row {row}, column {token}", expected="a finite number at every trained token",
                do="Mask the token, or mend whatever produced it (a sampler that returned no log-prob, an overflow in the forward pass).",
            )  # fmt: skip
