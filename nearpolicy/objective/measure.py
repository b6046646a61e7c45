"""What one loss call measures: values of `nearpolicy.metrics` under the names of its table. They merge exactly over micro-batches.

Nothing here reads the device: every value keeps its tensors until it is read.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nearpolicy.metrics import LOG_RATIO_EDGES, Ess, Histogram, Max, Mean, Metrics, Sum
from nearpolicy.objective import ratio
from nearpolicy.objective.correction import Correction

BAND = 0.2
"""Reference band of `ratio/outside_frac`: |r - 1| > 0.2, the same for every method so that curves compare."""
DEAD = 1e-3
"""A response whose largest phi lies below this trains on nothing."""


class Seen(NamedTuple):
    """Everything the metrics are made from; all detached."""

    mask_BT: Tensor
    own_BT: Tensor
    """Trained tokens that have a behaviour policy (no demonstrations)."""
    log_ratio_BT: Tensor
    log_weight: ratio.LogWeight
    phi: Tensor
    """Kernel and gate, before correction and profile; [B, T] or [B, 1]."""
    weight_BT: Tensor
    """The whole gradient weight; 0 at masked tokens."""
    advantage_BT: Tensor
    """0 at masked tokens."""
    loss: Tensor
    objective: Tensor
    correction: Correction | None
    acting_BT: Tensor | None
    coefficient_BT: Tensor
    """aggregate * advantage * weight: minus the gradient of the loss to each log-prob; 0 at masked tokens."""


@lru_cache(maxsize=8)
def _edges(device: torch.device, edges: tuple[float, ...]) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64, device=device)


def histogram(x: Tensor, where: Tensor, edges: tuple[float, ...] = LOG_RATIO_EDGES) -> Histogram:
    """Histogram of log ratios or log weights over the elements where `where` is True, without reading the device."""
    bin_N = torch.bucketize(x.double(), _edges(x.device, edges)).reshape(-1)
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=x.device).index_add_(0, bin_N, where.double().reshape(-1))
    return Histogram(counts, edges)


def _ess(log_W_B: Tensor, has_B: Tensor, rows: Tensor) -> Ess:
    """Log sums of W and W^2 over the rows that have one, sharing one exponential: half the cost of two logsumexp."""
    if not log_W_B.numel():
        return Ess(-torch.inf, -torch.inf, 0.0)
    x = log_W_B.double().masked_fill(~has_B, -torch.inf)
    top = x.amax().clamp(min=-1e300)
    w = (x - top).exp()
    return Ess(w.sum().log() + top, w.square().sum().log() + 2 * top, rows)


def measure(seen: Seen) -> Metrics:
    """Metrics of one call; each carries its own numerator and denominator."""
    mask, own, lr = seen.mask_BT, seen.own_BT, seen.log_ratio_BT
    tokens, own_B = mask.sum(), own.sum(1)
    own_tokens, has_B = own_B.sum(), own_B > 0
    rows = has_B.sum()
    phi = seen.phi.expand_as(mask) if seen.phi.shape[1] == 1 else seen.phi
    out: Metrics = {
        "policy/loss": Sum(seen.loss),
        "policy/objective": Sum(seen.objective),
        "data/empty_rows": Sum((~mask.any(1)).sum()),
        "advantage/mean": Mean(seen.advantage_BT.sum(), tokens),
        "advantage/abs_mean": Mean(seen.advantage_BT.abs().sum(), tokens),
        "weight/mean": Mean(seen.weight_BT.sum(), tokens),
        "weight/max": Max(seen.weight_BT.amax() if seen.weight_BT.numel() else seen.loss.new_tensor(torch.nan)),
        "ratio/clip_frac": Mean(((phi == 0) & mask).sum(), tokens),
    }
    # At token level the clamped log ratio is the log weight itself.
    clamped = seen.log_weight.value if seen.log_weight.raw is lr else ratio.clamp(lr)
    drift = torch.expm1(clamped).masked_fill(~own, 0.0)
    own_lr = lr.masked_fill(~own, 0.0) if own is not mask else lr
    log_W = own_lr.sum(1)
    out["ratio/outside_frac"] = Mean((drift.abs() > BAND).sum(), own_tokens)
    out["ratio/log_token"] = histogram(lr, own)
    out["ratio/clamped_frac"] = Mean(((seen.log_weight.raw.abs() > ratio.LIMIT) & own).sum(), own_tokens)
    out["policy/kl_behavior_k1"] = Mean(-log_W.sum(), own_tokens)
    out["policy/kl_behavior_k3"] = Mean(drift.sum() - log_W.sum(), own_tokens)
    out["weight/log_sequence"] = histogram(log_W, has_B)
    out["weight/ess_raw"] = _ess(log_W, has_B, rows)
    own_phi = phi * own
    phi_B = own_phi.sum(1) / own_B.clamp(min=1)
    out["weight/dead_frac"] = Mean(((own_phi.amax(1) < DEAD) & has_B).sum() if own_phi.numel() else 0.0, rows)
    out["weight/q_mean_w"] = Mean((phi_B * ratio.clamp(log_W).exp()).sum(), phi_B.sum())
    if seen.correction is not None and seen.acting_BT is not None:
        acting = seen.acting_BT.sum()
        out["correction/mean"] = Mean(seen.correction.value.masked_fill(~seen.acting_BT, 0.0).sum(), acting)
        out["correction/masked_frac"] = Mean(seen.correction.removed.sum(), acting)
    return out


def measure_budget(log_ratio_BT: Tensor, mask_BT: Tensor, candidate_BT: Tensor, keep_BT: Tensor) -> Metrics:
    """M2PO: mean squared log ratio of the candidates before the budget, and the share of trained tokens it drops."""
    candidate = candidate_BT & mask_BT
    return {
        "m2po/second_moment": Mean(log_ratio_BT.double().square().masked_fill(~candidate, 0.0).sum(), candidate.sum()),
        "m2po/dropped_frac": Mean((~keep_BT & mask_BT).sum(), mask_BT.sum()),
    }
