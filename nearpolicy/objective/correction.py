"""Trainer/engine correction: the ratio between the trainer's own log-probs and those of whoever sampled the token.

    log k[b, t] = logp_proximal - logp_behavior         at tokens the correction acts on, 0 elsewhere
    K[b] = exp(sum_t log k)                              over those tokens

It acts on trained tokens that the proximal policy's version wrote: not on a relayed prefix or on what an older version wrote of a response
(their ratio is taken to their own policy, and holds mismatch and drift together) and not on demonstrations. With most kernels the weight
multiplies phi; with product-level kernels the log weight joins log W instead, and only gates multiply after it. A token that a correction
removes leaves both W and the loss; the loss still divides by all trained tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearpolicy.objective import ratio


@dataclass(frozen=True, slots=True)
class Kind:
    """One correction: its ratio level, what happens beyond the bounds, and its default bounds."""

    level: str
    action: str
    """`truncate` limits the weight to the bounds, `mask` sets it to 0 beyond them, `gate` is 1 within and 0 beyond."""
    low: float | None
    cap: float
    text: str


CORRECTIONS: Mapping[str, Kind] = {
    "token_truncate": Kind("token", "truncate", None, 2.0, "min(k, cap) per token (TIS)"),
    "token_mask": Kind("token", "mask", None, 2.0, "k where k <= cap, else 0, per token (MIS)"),
    "token_band": Kind("token", "mask", 0.5, 5.0, "k where low <= k <= cap, else 0, per token (IcePop, arXiv 2510.18855)"),
    "sequence_truncate": Kind("sequence", "truncate", None, 2.0, "min(K, cap) on every token of the sequence"),
    "sequence_mask": Kind("sequence", "mask", None, 2.0, "K where K <= cap, else 0, on every token of the sequence"),
    "geometric_band": Kind("geometric", "gate", 0.999, 1.001, "the sequence stays where low <= K^(1/T) <= cap"),
}
"""Every correction by name, with its default bounds. A `correction_low` bounds truncations and masks from below as well."""


class Correction(NamedTuple):
    """What a correction does to a batch."""

    weight: Tensor | None
    """Multiplies phi, [B, T]; 1 where the correction does not act. None when nothing is to be multiplied."""
    log_token: Tensor | None
    """Joins the token log ratios of a product-level kernel, [B, T]."""
    log_sequence: Tensor | None
    """Joins its log W, [B, 1]."""
    removed: Tensor
    """Tokens whose weight is 0, bool [B, T]."""
    leaves_sum: bool
    """The removed tokens leave W and T too (token level)."""
    value: Tensor
    """The correction weight at the tokens it acts on, for metrics, [B, T]."""


def correct(
    logp_proximal_BT: Float[Tensor, "B T"],
    logp_behavior_BT: Float[Tensor, "B T"],
    *,
    acting_BT: Bool[Tensor, "B T"],
    kind: str,
    low: float | None,
    cap: float,
    fold: bool,
) -> Correction:
    """The correction `kind` (a key of `CORRECTIONS`) with bounds `low` (None: no lower bound) and `cap` on the ratio.

    Bounds are compared in log space and belong to the permitted range.
    """
    spec = CORRECTIONS[kind]
    log_k = ratio.log_ratio(logp_proximal_BT, logp_behavior_BT, mask_BT=acting_BT)
    lw = ratio.log_weight(log_k, acting_BT, level=spec.level)
    log_low, log_cap = (-math.inf if low is None else math.log(low)), math.log(cap)
    if spec.action == "truncate":
        log_value, inside = lw.raw.clamp(log_low, log_cap), None
    else:
        log_value, inside = lw.raw, (lw.raw >= log_low) & (lw.raw <= log_cap)
    if inside is None:
        removed = torch.zeros_like(acting_BT)
    else:
        removed = acting_BT & ~inside
        log_value = log_value.masked_fill(~inside, 0.0)
    value = torch.ones_like(log_k) if spec.action == "gate" else log_value.exp().expand_as(log_k)
    value = value.masked_fill(removed, 0.0).masked_fill(~acting_BT, 1.0)
    by_token = spec.level == "token"
    if not fold or spec.action == "gate":
        return Correction(value, None, None, removed, by_token, value)
    gate = None if inside is None else (~removed).to(value.dtype)
    if by_token:
        return Correction(gate, log_value.masked_fill(removed, 0.0), None, removed, True, value)
    return Correction(gate, None, log_value, removed, False, value)
