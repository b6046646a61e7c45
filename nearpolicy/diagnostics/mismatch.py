"""How far trainer and engine are apart on tokens that both wrote under the same weights.

An engine samples token t with log-prob mu_t; the trainer, holding the very weights of that version, gives it pi_t. In exact arithmetic they are
equal. What is left is precision, kernels, routing, or a fault: another temperature, a shift by one, old weights. It is measured on tokens of
age 0 (version = updates done), in the forward pass of the update that trains on them first, before any weight moved: no extra pass. Older
tokens differ because the policy moved, which `policy/kl_behavior_*` and `ratio/*` show.

    d_t = pi_t - mu_t            (nats)
    k1  = mean -d_t              KL(engine || trainer), unbiased, may be negative
    k3  = mean exp(d_t) - 1 - d_t    the same, each term >= 0 (Schulman 2020)

Bounds: WARN_KL and REFUSE_KL are on k3, nats per token. The shipped tiny model gives 5e-14 with both sides in float32 and 2e-5 with the sampler in
bfloat16. At 0.1 nats per token the log weight of a hundred tokens is 10 nats off: no importance weight can be meant.
"""

import torch
from torch import Tensor

from nearpolicy.metrics import MISMATCH_EDGES, Max, Mean, Metrics, Sum
from nearpolicy.objective import ratio
from nearpolicy.objective.measure import histogram
from nearpolicy.objective.stats import kl_estimate
from nearpolicy.rollout import Batch

WARN_KL = 0.01
"""k3 above which a correction is worth its while."""
REFUSE_KL = 0.1
"""k3 above which something is wrong that no correction mends."""


def age_zero(batch: Batch, updates: int, *, within_BT: Tensor | None = None) -> Tensor:
    """Tokens that the policy of this version itself wrote, bool [B, T].

    Args:
        updates: updates that the trainer's weights contain.
        within_BT: tokens looked at; None is every response token. A relayed prefix is older, demonstrations have version -1: neither is in it.
    """
    return (batch.version_BT == updates) & (batch.response_mask_BT if within_BT is None else within_BT)


def gap(logp_BT: Tensor, logp_behavior_BT: Tensor, where_BT: Tensor) -> Tensor:
    """d = trainer - engine at `where_BT`, 0 elsewhere, detached, float64 [B, T]."""
    return ratio.log_ratio(logp_BT.detach().double(), logp_behavior_BT.double(), mask_BT=where_BT)


@torch.no_grad()
def mismatch_metrics(logp_BT: Tensor, logp_behavior_BT: Tensor, where_BT: Tensor) -> Metrics:
    """What trainer and engine differ by over the tokens `where_BT`; means are NaN where there is none. Reads nothing off the device.

    Args:
        logp_BT: the trainer's log-probs, before any weight moved, [B, T].
        logp_behavior_BT: the engine's, [B, T].
        where_BT: `age_zero`, bool [B, T].
    """
    d_BT = gap(logp_BT, logp_behavior_BT, where_BT)
    size_BT, tokens = d_BT.abs(), where_BT.sum()
    zero = torch.zeros_like(d_BT)
    top = ratio.clamp(size_BT).masked_fill(~where_BT, -torch.inf).amax().exp() if size_BT.numel() else zero.sum()
    return {
        "mismatch/tokens": Sum(tokens),
        "mismatch/abs_mean": Mean(size_BT.sum(), tokens),
        "mismatch/abs": histogram(size_BT, where_BT, MISMATCH_EDGES),
        "mismatch/kl_k1": Mean(kl_estimate(zero, d_BT, estimator="k1").sum(), tokens),
        "mismatch/kl_k3": Mean(kl_estimate(zero, d_BT, estimator="k3").sum(), tokens),
        "mismatch/ratio_max": Max(torch.where(tokens > 0, top, torch.nan)),
    }
