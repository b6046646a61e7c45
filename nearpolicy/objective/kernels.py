"""Kernels: what a log weight is worth. phi multiplies `A * grad logp`; phi(0) = 1 (LUFFY's demonstration kernel excepted).

Every phi takes the log weight (already clamped, any shape) and `positive` (True where A >= 0; broadcasts against it) and returns the
gradient weight, finite in float32 over the clamp's range. Where a paper has a literal objective f with phi = w f'(w), it stands beside
its kernel as `<name>_objective`; where the paper writes `sg[phi] * A * logp` (REINFORCE, CISPO, TOPR) there is none and the
objective is that expression itself. w below is exp(log weight): r per token, W or s per sequence.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[float, float] | list[float]


def one(log_weight: Tensor, positive: Tensor) -> Tensor:
    """phi = 1: no importance weight (REINFORCE, Williams 1992)."""
    return torch.ones_like(log_weight)


def ratio(log_weight: Tensor, positive: Tensor) -> Tensor:
    """phi = w: the importance weight, unclipped."""
    return log_weight.exp()


def ratio_objective(log_weight: Tensor, positive: Tensor) -> Tensor:
    """f = w."""
    return log_weight.exp()


def ppo(log_weight: Tensor, positive: Tensor, *, clip_low: float | None, clip_high: float | None, dual_clip: float | None = None) -> Tensor:
    """phi = w where the clipped objective has a gradient, else 0 (Schulman 2017; GRPO, arXiv 2402.03300, eq. 3; DAPO, arXiv 2503.14476).

    Zero where A >= 0 and w > 1 + clip_high, where A < 0 and w < 1 - clip_low, and with `dual_clip` = c > 1 (arXiv 1912.09729) where
    A < 0 and w > c. None turns a bound off. For A < 0 the weight grows without bound when w does, unless `dual_clip` is set.
    """
    w = log_weight.exp()
    high = None if clip_high is None else w <= 1 + clip_high
    low = None if clip_low is None else w >= 1 - clip_low
    if dual_clip is not None:
        low = w <= dual_clip if low is None else low & (w <= dual_clip)
    if high is None and low is None:
        return w
    always = torch.ones_like(w, dtype=torch.bool)
    return w * torch.where(positive, always if high is None else high, always if low is None else low)


def ppo_objective(log_weight: Tensor, positive: Tensor, *, clip_low: float | None, clip_high: float | None, dual_clip: float | None = None) -> Tensor:
    """f with f * A = min(w A, clip(w) A), and max(that, c A) for A < 0 with dual clip."""
    w = log_weight.exp()
    up = w if clip_high is None else w.clamp(max=1 + clip_high)
    down = w if clip_low is None else w.clamp(min=1 - clip_low)
    return torch.where(positive, up, down if dual_clip is None else down.clamp(max=dual_clip))


def sapo(log_weight: Tensor, positive: Tensor, *, tau_pos: float, tau_neg: float) -> Tensor:
    """phi = 4 p (1 - p) w with p = sigmoid(tau (w - 1)) (SAPO, arXiv 2511.20347). Largest above w = 1: 1.575 at w = 2.06 for tau = 1."""
    w = log_weight.exp()

    def side(tau: float) -> Tensor:
        x = tau * (w - 1)
        return 4 * torch.sigmoid(x) * torch.sigmoid(-x) * w

    return side(tau_pos) if tau_pos == tau_neg else torch.where(positive, side(tau_pos), side(tau_neg))


def sapo_objective(log_weight: Tensor, positive: Tensor, *, tau_pos: float, tau_neg: float) -> Tensor:
    """f = sigmoid(tau (w - 1)) * 4 / tau."""
    x = log_weight.exp() - 1
    return torch.where(positive, torch.sigmoid(tau_pos * x) * (4 / tau_pos), torch.sigmoid(tau_neg * x) * (4 / tau_neg))


def vespo(log_weight: Tensor, positive: Tensor, *, c_pos: Pair, c_neg: Pair) -> Tensor:
    """phi = W^c1 exp(c2 (1 - W)), computed as exp(c2 + c1 log W - c2 W) (VESPO, arXiv 2602.10693). Peak at W = c1 / c2."""
    w = log_weight.exp()

    def side(c: Pair) -> Tensor:
        return (c[1] + c[0] * log_weight - c[1] * w).exp()

    return torch.where(positive, side(c_pos), side(c_neg))


def vespo_objective(log_weight: Tensor, positive: Tensor, *, c_pos: Pair, c_neg: Pair) -> Tensor:
    """f(W) = e^c2 c2^-c1 gamma(c1, c2 W), the lower incomplete gamma function: the surrogate with W f'(W) = phi."""
    w = log_weight.exp()

    def side(c: Pair) -> Tensor:
        scale = math.exp(c[1] - c[0] * math.log(c[1]) + math.lgamma(c[0]))
        return scale * torch.special.gammainc(torch.full_like(w, c[0]), c[1] * w)

    return torch.where(positive, side(c_pos), side(c_neg))


def cispo(log_weight: Tensor, positive: Tensor, *, floor: float, cap: float) -> Tensor:
    """phi = clip(w, floor, cap), never zero unless floor and w are (CISPO, MiniMax-M1, arXiv 2506.13585)."""
    return log_weight.exp().clamp(floor, cap)


def topr(log_weight: Tensor, positive: Tensor) -> Tensor:
    """phi = 1 for A >= 0 and min(W, 1) for A < 0 (TOPR, arXiv 2503.14286)."""
    down = log_weight.clamp(max=0.0).exp()
    return torch.where(positive, torch.ones_like(down), down)


def luffy(log_p: Tensor, *, gamma: float) -> Tensor:
    """phi = gamma p / (p + gamma)^2 on demonstration tokens, p = pi(token) (LUFFY, arXiv 2504.14945). Largest, 1/4, at p = gamma; not 1 at p = 1."""
    p = log_p.exp()
    return gamma * p / (p + gamma).square()


def luffy_objective(log_p: Tensor, *, gamma: float) -> Tensor:
    """f = p / (p + gamma)."""
    p = log_p.exp()
    return p / (p + gamma)


def gmpo_clip(log_ratio_BT: Tensor, positive: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """One-sided clip of token log ratios before their mean: at most clip_high for A >= 0, at least -clip_low for A < 0 (GMPO, arXiv 2507.20673).

    A clipped token still counts in the mean by its clipped value but gets no gradient.
    """
    return torch.where(positive, log_ratio_BT.clamp(max=clip_high), log_ratio_BT.clamp(min=-clip_low))


def m2po_candidates(log_ratio_BT: Tensor, advantage_BX: Tensor) -> Tensor:
    """Tokens that a further step would move further away: A > 0 and r > 1, or A < 0 and r < 1 (M2PO, arXiv 2510.01161)."""
    return log_ratio_BT * advantage_BX > 0


def m2po_threshold(log_ratio_BT: Tensor, advantage_BX: Tensor, mask_BT: Tensor, *, budget: float, variant: str) -> dict[str, Tensor]:
    """The squared log ratio from which candidates are dropped, over the whole optimizer batch.

    `paper`: while the mean of (log r)^2 over the remaining candidates exceeds `budget` (nats^2), the largest is dropped.
    `released_code`: dropped ones still cost the threshold, sum min((log r)^2, tau^2) <= budget * candidates, so it drops more.
    The threshold lies halfway between the last kept and the first dropped value, so that recomputed log-probs fall on the same side;
    equal values are dropped together. inf when nothing is dropped.
    """
    candidate = (m2po_candidates(log_ratio_BT, advantage_BX) & mask_BT).reshape(-1)
    moment = log_ratio_BT.double().square().reshape(-1)
    sorted_N = torch.where(candidate, moment, torch.inf).sort().values
    total = candidate.sum()
    rank = torch.arange(1, sorted_N.numel() + 1, device=sorted_N.device)
    real = rank <= total
    running = sorted_N.masked_fill(~real, 0.0).cumsum(0)
    if variant == "paper":
        fits = running <= budget * rank
    else:
        fits = running + (total - rank) * sorted_N.masked_fill(~real, 0.0) <= budget * total
    kept = (fits & real).sum()
    edge = torch.nn.functional.pad(torch.nn.functional.pad(sorted_N, (1, 0)), (0, 1), value=torch.inf)
    # take, not indexing: an index tensor of no dimensions would be read from the device.
    return {"m2po_threshold": edge.take(torch.stack([kept, kept + 1])).mean()}


def m2po_keep(log_ratio_BT: Tensor, advantage_BX: Tensor, threshold: Tensor) -> Tensor:
    """True where the token keeps its gradient: not a candidate, or below the threshold."""
    return ~(m2po_candidates(log_ratio_BT, advantage_BX) & (log_ratio_BT.double().square() >= threshold))


Phi = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel as data: its level, functions and the options these take."""

    phi: Phi
    objective: Phi | None = None
    """f of the literal objective; None when that is `sg[phi] * A * logp` itself."""
    level: str = "token"
    level_option: tuple[str, Mapping[Any, str]] | None = None
    """Option that chooses the level, and its values."""
    options: tuple[str, ...] = ()
    """Options that `phi`, `objective` and `clip` take."""
    clip: Phi | None = None
    """Applied to token log ratios before they are summed; tokens it changes get no gradient."""
    budget: bool = False
    """Candidates beyond M2PO's second-moment threshold get no gradient (needs batch statistics)."""
    folds_correction: bool = False
    """The log correction joins the log weight before phi (product-level kernels); otherwise the correction multiplies after it."""
    demonstration: tuple[Phi, Phi] | None = None
    """phi and f for demonstration rows, of log p; they take `gamma`."""

    def at(self, options: Mapping[str, Any]) -> str:
        """The ratio level under these options."""
        return self.level if self.level_option is None else self.level_option[1][options[self.level_option[0]]]

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of `phi` among these options."""
        return {name: options[name] for name in self.options}


_CLIP = ("clip_low", "clip_high", "dual_clip")
KERNELS: Mapping[str, Kernel] = {
    "none": Kernel(phi=one),
    "ppo": Kernel(phi=ppo, objective=ppo_objective, options=_CLIP),
    "gspo": Kernel(phi=ppo, objective=ppo_objective, options=_CLIP, level="geometric"),
    "sapo": Kernel(phi=sapo, objective=sapo_objective, options=("tau_pos", "tau_neg")),
    "vespo": Kernel(
        phi=vespo,
        objective=vespo_objective,
        options=("c_pos", "c_neg"),
        level="sequence",
        folds_correction=True,
        level_option=("length_norm", {None: "sequence", "sqrt": "sqrt", "mean": "geometric"}),
    ),
    "cispo": Kernel(phi=cispo, options=("floor", "cap")),
    "gmpo": Kernel(phi=ratio, objective=ratio_objective, level="geometric", clip=gmpo_clip),
    "topr": Kernel(phi=topr, level="sequence", folds_correction=True),
    "m2po": Kernel(phi=ratio, objective=ratio_objective, budget=True),
    "luffy": Kernel(phi=ppo, objective=ppo_objective, options=("clip_low", "clip_high"), demonstration=(luffy, luffy_objective)),
}
"""Every kernel by name; a method's row names one, a distillation row takes any but `luffy` by its `kernel` option."""
