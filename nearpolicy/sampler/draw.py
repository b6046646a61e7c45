"""Drawing tokens by inverse CDF, with exact log-probs.

One uniform a row decides the token, so a draw is a function of its logits and its key. With x = logits / temperature, m = max x and
e_v = exp(x_v - m):  token = min {v : sum_{w<=v} e_w > u Z},  Z = sum e,  logp = x_token - m - log Z,  entropy = log Z - sum e (x - m) / Z.

A float32 running sum over a vocabulary of 50,000 drifts by more than a rare token's probability, and a float64 one costs more than a
forward step of a small model. So large vocabularies go in two levels: float32 sums over blocks of 256 tokens, a float64 running sum over
the blocks, then a float64 running sum inside the chosen block, with the remainder rescaled to that block's own sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 256
_DIRECT = 1024  # up to this vocabulary one float64 running sum is the faster of the two


class Draw(NamedTuple):
    """Tokens drawn and what the policy says of them. Non-finite logits show as a non-finite `logp_B`."""

    token_B: Tensor
    """Token ids, int64 [B]."""
    logp_B: Tensor
    """Log-prob of the temperature-scaled distribution before top-p and top-k, float32 [B], nats."""
    entropy_B: Tensor | None
    """Entropy of that distribution, float32 [B], nats; None when not asked for."""


def draw(
    logits_BV: Tensor, uniform_B: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None, entropy: bool = False
) -> Draw:
    """Draw one token a row.

    Args:
        logits_BV: any float dtype; -inf forbids a token. Not changed.
        uniform_B: float64 in [0, 1), one a row.
        temperature: divides the logits; 0 takes the largest logit (the first of equals) and reports log-probs at temperature 1.
        top_p: keep the most likely tokens up to and including the one with which their probability reaches top_p.
        top_k: keep the k most likely tokens.
        entropy: also return the entropy (one more pass over the vocabulary).
    """
    x_BV = logits_BV.float()
    if temperature not in (0.0, 1.0):
        x_BV = x_BV / temperature
    max_B1 = x_BV.amax(-1, keepdim=True)
    mass_BV = (x_BV - max_B1).exp_()
    V = mass_BV.shape[-1]
    if V <= _DIRECT:
        cumulative = mass_BV.double().cumsum(-1)
        block_BN = None
    else:
        if V % _BLOCK:
            mass_BV = torch.nn.functional.pad(mass_BV, (0, -V % _BLOCK))
        block_BN = mass_BV.view(len(mass_BV), -1, _BLOCK).sum(-1)
        cumulative = block_BN.cumsum(-1, dtype=torch.float64)
    total_B1 = cumulative[:, -1:]
    if temperature == 0.0:
        token_B1 = x_BV.argmax(-1, keepdim=True)
    elif top_p < 1.0 or (top_k is not None and top_k < V):
        kept_BV = mass_BV[:, :V].double().mul_(_nucleus(mass_BV[:, :V], top_p, top_k))
        token_B1 = _invert(kept_BV.cumsum(-1), uniform_B[:, None])
    elif block_BN is None:
        token_B1 = _invert(cumulative, uniform_B[:, None])
    else:
        token_B1 = _two_level(mass_BV, block_BN, cumulative, uniform_B[:, None])
    token_B1 = token_B1.clamp_(max=V - 1)  # a row that is not finite may point into the padding
    logp_B1 = (x_BV.gather(1, token_B1) - max_B1).double() - total_B1.log()
    entropy_B = None
    if entropy:
        # Summed pairwise: a plain float32 dot product over 50,000 tokens is off by 1e-4.
        weighted_BV = (x_BV - max_B1).mul_(mass_BV[:, :V])
        mean_B = weighted_BV.sum(-1)
        if bool(mean_B.isnan().any()):  # 0 * -inf: a forbidden token adds nothing
            mean_B = weighted_BV.nan_to_num_(nan=0.0).sum(-1)
        entropy_B = (total_B1.squeeze(1).log() - mean_B.double() / total_B1.squeeze(1)).float()
    return Draw(token_B1.squeeze(1), logp_B1.squeeze(1).float(), entropy_B)


def _invert(cumulative: Tensor, uniform_B1: Tensor) -> Tensor:
    """First index whose running sum exceeds u times the total: never an index without mass."""
    return _first_above(cumulative, uniform_B1 * cumulative[:, -1:])


def _first_above(cumulative: Tensor, target_B1: Tensor) -> Tensor:
    total_B1 = cumulative[:, -1:]
    # Rounding may lift the target to the total itself, behind every token.
    target_B1 = torch.minimum(target_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulative, target_B1, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _two_level(mass_BV: Tensor, block_BN: Tensor, cumulative_BN: Tensor, uniform_B1: Tensor) -> Tensor:
    target_B1 = uniform_B1 * cumulative_BN[:, -1:]
    block_B1 = _first_above(cumulative_BN, target_B1)
    inside_B1 = (target_B1 - (cumulative_BN.gather(1, block_B1) - block_BN.gather(1, block_B1))).clamp_(min=0.0)
    rows = torch.arange(len(mass_BV), device=mass_BV.device)
    within = mass_BV.view(len(mass_BV), -1, _BLOCK)[rows, block_B1.squeeze(1)].cumsum(-1, dtype=torch.float64)
    # The float32 block sum and the float64 one differ in the last digits; without rescaling the block's last tokens would pay for it.
    return block_B1 * _BLOCK + _first_above(within, inside_B1 * within[:, -1:] / block_BN.gather(1, block_B1))


def _nucleus(mass_BV: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """True at the tokens that top-p and top-k keep; equal tokens are kept in vocabulary order. At least one token stays."""
    sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.double().cumsum(-1)
    keep_BV = before_BV - sorted_BV < top_p * before_BV[:, -1:]
    if top_k is not None:
        keep_BV[:, top_k:] = False
    return torch.zeros_like(keep_BV).scatter_(1, order_BV, keep_BV)
