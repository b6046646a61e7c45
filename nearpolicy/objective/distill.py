"""Distillation signals and prefix weights.

    d_t = logp_teacher - logp_student                         the discrepancy, nats: the OPD advantage of the sampled token
    ExOPD     A_t = d_t + (lambda - 1)(logp_teacher - logp_reference)                          (arXiv 2602.12125)
    IW-OPD    w_t = 1 + gamma (1 - F_t),  F_t = sum_{k<t} |d_k| / sum_k |d_k|,  A_t = d_t      (arXiv 2606.22600)

Discrepancies run over the tokens that exist (`response_mask`), trained or not; everything is 0 outside them.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nearpolicy.objective import position, ratio


class Sides(NamedTuple):
    """The two or three models a distillation signal compares, [B, T]."""

    teacher_BT: Tensor
    student_BT: Tensor
    reference_BT: Tensor | None
    response_mask_BT: Tensor

    def discrepancy(self) -> Tensor:
        """logp_teacher - logp_student at response tokens, else 0; exactly 0 where the two agree."""
        return ratio.log_ratio(self.teacher_BT, self.student_BT, mask_BT=self.response_mask_BT)

    def extra(self) -> Tensor:
        """logp_teacher - logp_reference at response tokens, else 0."""
        assert self.reference_BT is not None, "methods.py requires logp_reference before it gets here"
        return ratio.log_ratio(self.teacher_BT, self.reference_BT, mask_BT=self.response_mask_BT)


class Signal(NamedTuple):
    """Advantage of each token and the weight on it (None: 1)."""

    advantage_BT: Tensor
    weight_BT: Tensor | None = None


def opd(sides: Sides, *, profile: str | None, fraction: float, multiplier: float, progress: float, curriculum: str) -> Signal:
    """On-policy distillation, A_t = d_t, optionally weighted by a fixed profile over the response (`position.profile`)."""
    mask = sides.response_mask_BT
    if profile is None:
        return Signal(sides.discrepancy())
    weight = position.profile(mask, kind=profile, fraction=fraction, multiplier=multiplier, progress=progress, shape=curriculum)
    return Signal(sides.discrepancy(), weight)


def exopd(sides: Sides, *, extrapolation: float) -> Signal:
    """ExOPD (arXiv 2602.12125, eq. 6): reward extrapolation beyond the teacher; lambda = 1 is OPD and needs no reference."""
    d = sides.discrepancy()
    return Signal(d if extrapolation == 1 else d + (extrapolation - 1) * sides.extra())


def remaining_mass(
    discrepancy_BT: Float[Tensor, "B T"], response_mask_BT: Bool[Tensor, "B T"], *, normalizer: str, signed: bool = False
) -> Float[Tensor, "B T"]:
    """1 - F_t in [0, 1]: the share of the response's discrepancy that is still to come at token t (the token itself included).

    Args:
        normalizer: `before_last` divides by the sum over all tokens but the last (the article: the last weight is exactly 0);
            `all_tokens` by the sum over all (the released code and TRL).
        signed: sum d_k instead of |d_k|; the result is limited to [0, 1].
    A response whose normalizer is 0 (no drift, or a single token under `before_last`) has F = 0, so every token weighs 1 + gamma.
    """
    step = discrepancy_BT if signed else discrepancy_BT.abs()
    before = ratio.before(step)
    if normalizer == "all_tokens":
        total = step.sum(1, keepdim=True)
    else:
        last = response_mask_BT & (position.index(response_mask_BT) == response_mask_BT.sum(1, keepdim=True) - 1)
        # The exclusive prefix sum at the last token, read where it is rather than summed again: the last F is then exactly 1.
        total = before.masked_fill(~last, 0.0).sum(1, keepdim=True)
    share = before / total.where(total != 0, torch.inf)
    return (1.0 - share.masked_fill(~response_mask_BT, 0.0)).clamp(0.0, 1.0)


def ideal_log_weight(discrepancy_BT: Float[Tensor, "B T"], *, alpha: float) -> Float[Tensor, "B T"]:
    """log r_t^alpha = alpha * sum_{k<t} d_k, nats, limited by the one clamp: the teacher/student ratio of the prefix (arXiv 2606.22600, step I)."""
    return ratio.clamp(alpha * ratio.before(discrepancy_BT))


def partition(sides: Sides, *, alpha: float) -> dict[str, Tensor]:
    """log Z_t = log mean over responses of r_t^alpha at response index t, [L], over the whole optimizer batch.

    Without alpha < 1 the expectation is 1 for on-policy samples; the mean is its estimate.
    """
    mask = sides.response_mask_BT
    log_r = ideal_log_weight(sides.discrepancy(), alpha=alpha).double()
    at = position.index(mask).clamp(min=0)
    total = log_r.new_zeros(mask.shape[1]).index_add_(0, at.reshape(-1), (log_r.exp() * mask).reshape(-1))
    count = log_r.new_zeros(mask.shape[1]).index_add_(0, at.reshape(-1), mask.double().reshape(-1))
    # A response index that no row reaches has no mean; its entry is never read.
    return {"log_partition_L": torch.where(count > 0, (total / count.clamp(min=1)).log(), 0.0)}


def iw_weight(
    sides: Sides, *, gamma: float, normalizer: str, signed: bool, weight: str, alpha: float, partition: str, blend: bool,
    log_partition_L: Tensor | None, reverse: bool = False,
) -> Tensor:  # fmt: skip
    """The IW-OPD weight of each token, [B, T].

    base = 1 - F_t (`weight = "surrogate"`) or r_t^alpha / Z_t (`"ideal"`; `partition = "one"` takes Z = 1); the weight is
    1 + gamma * base with `blend` and base alone without. `reverse` takes the surrogate's F_t for 1 - F_t: the late tokens count more, a control.
    """
    d = sides.discrepancy()
    if weight == "surrogate":
        base = remaining_mass(d, sides.response_mask_BT, normalizer=normalizer, signed=signed)
        base = 1.0 - base if reverse else base
    else:
        log_base = ideal_log_weight(d, alpha=alpha)
        if partition == "position":
            assert log_partition_L is not None, "methods.py prepares it"
            log_Z = log_partition_L.to(log_base.dtype)
            log_base = log_base - log_Z[position.index(sides.response_mask_BT).clamp(0, len(log_Z) - 1)]
        base = log_base.exp()
    return 1.0 + gamma * base if blend else base


def iw_opd(
    sides: Sides, *, gamma: float, normalizer: str, signed: bool, weight: str, alpha: float, partition: str, blend: bool,
    log_partition_L: Tensor | None, reverse: bool = False,
) -> Signal:  # fmt: skip
    """Importance-weighted OPD: A_t = d_t, weighted by `iw_weight`."""
    w = iw_weight(
        sides, gamma=gamma, normalizer=normalizer, signed=signed, weight=weight, alpha=alpha, partition=partition, blend=blend,
        log_partition_L=log_partition_L, reverse=reverse,
    )  # fmt: skip
    return Signal(sides.discrepancy(), w)


def iw_exopd(sides: Sides, *, extrapolation: float, gamma: float, normalizer: str, form: str) -> Signal:
    """IW-ExOPD, in the three readings of "modulate lambda with the weight w_t" (w_t always from the OPD discrepancy).

    `modulate`         lambda_t = lambda w_t:            A_t = d_t + (lambda w_t - 1)(logp_teacher - logp_reference)
    `modulate_excess`  lambda_t = 1 + (lambda - 1) w_t:  A_t = d_t + (lambda - 1) w_t (logp_teacher - logp_reference)
    `scale`            A_t = ExOPD's, weighted by w_t (what the released code computes with both switches on)
    """
    d = sides.discrepancy()
    w = 1.0 + gamma * remaining_mass(d, sides.response_mask_BT, normalizer=normalizer)
    if form == "scale":
        return Signal(exopd(sides, extrapolation=extrapolation).advantage_BT, w)
    if form == "modulate":
        return Signal(d + (extrapolation * w - 1.0) * sides.extra())
    return Signal(d if extrapolation == 1 else d + (extrapolation - 1.0) * w * sides.extra())
