"""How far into the response: token index, relative position, bins, profiles, and where a stored response is cut.

Positions count response tokens that exist (`response_mask`), from 0; a token masked out of the loss still has a position.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nearpolicy.errors import UsageError

PROFILES = ("prefix", "suffix", "amplify_prefix", "curriculum")
"""Names of the position profiles."""

TOKEN_EDGES = tuple(2**k for k in range(16))
"""First token of each absolute bin but the first: bins 0, 1, 2-3, 4-7, ..., 32768 and later."""


def index(response_mask_BT: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Index of each response token in its response, from 0; meaningless outside the response (at least -1)."""
    return response_mask_BT.cumsum(1) - 1


def relayed(response_mask_BT: Bool[Tensor, "B T"], prefix_length_B: Tensor) -> Bool[Tensor, "B T"]:
    """True at the first `prefix_length_B` (int [B]) tokens of each response."""
    return response_mask_BT & (index(response_mask_BT) < prefix_length_B[:, None])


def relative(response_mask_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Index / response length, in [0, 1); 0 outside the response."""
    length = response_mask_BT.sum(1, keepdim=True).clamp(min=1)
    return (index(response_mask_BT).clamp(min=0) / length).masked_fill(~response_mask_BT, 0.0)


def bins(response_mask_BT: Bool[Tensor, "B T"], num_bins: int = 10) -> Int[Tensor, "B T"]:
    """Bin of relative position, min(num_bins - 1, floor(num_bins * t / length)) in whole numbers; -1 outside the response."""
    return bin_of(index(response_mask_BT), response_mask_BT.sum(1, keepdim=True), num_bins).masked_fill(~response_mask_BT, -1)


def bin_of(index_X: Int[Tensor, "*X"], length_X: Tensor, num_bins: int) -> Int[Tensor, "*X"]:
    """The same from the index of each token and the length of its response."""
    return (index_X * num_bins).div(length_X.clamp(min=1), rounding_mode="floor").clamp(max=num_bins - 1)


def token_bins(response_mask_BT: Bool[Tensor, "B T"], edges: Sequence[int] = TOKEN_EDGES) -> Int[Tensor, "B T"]:
    """Bin of the token index: the number of edges at or below it, 0 to len(edges); -1 outside the response."""
    return token_bin_of(index(response_mask_BT), edges).masked_fill(~response_mask_BT, -1)


def token_bin_of(index_X: Int[Tensor, "*X"], edges: Sequence[int] = TOKEN_EDGES) -> Int[Tensor, "*X"]:
    """The same from the index of each token."""
    return torch.bucketize(index_X, _on(index_X.device, tuple(edges)), right=True)


@lru_cache(maxsize=8)
def _on(device: torch.device, edges: tuple[int, ...]) -> Tensor:
    return torch.tensor(edges, device=device)


def fraction_count(length_B: Int[Tensor, "*B"], fraction: float) -> Int[Tensor, "*B"]:
    """ceil(fraction * length), and no more than that when the product is a whole number up to rounding (0.1 * 30 gives 3)."""
    return (length_B.double() * fraction - 1e-9).ceil().long()


def curriculum_fraction(progress: float, *, start: float, shape: str = "linear") -> float:
    """Share of the response that the manual curriculum amplifies: from `start` at progress 0 to 1 at progress 1.

    Source: arXiv 2606.22600, ablations ("manual curriculum"): linear in the article, `cosine` (half a period) in its code.
    """
    rise = progress if shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return start + (1 - start) * rise


def profile(
    response_mask_BT: Bool[Tensor, "B T"], *, kind: str, fraction: float, multiplier: float = 1.5, progress: float = 0.0, shape: str = "linear"
) -> Float[Tensor, "B T"]:
    """A fixed weight by position, over the response's own length; the loss still divides by all trained tokens.

    Args:
        kind: `prefix` weighs the first ceil(fraction * length) tokens 1 and the rest 0; `suffix` the last ones; `amplify_prefix` the
            first ones `multiplier` and the rest 1; `curriculum` likewise with the fraction growing to 1 as `progress` goes from 0 to 1.
    Source: the ablations of arXiv 2606.22600 (suffix is its mirror image).
    Raises:
        UsageError: unknown kind.
    """
    if kind not in PROFILES:
        raise UsageError("position profile", got=repr(kind), expected=" | ".join(PROFILES), do="Name one of these, or None.")
    at = index(response_mask_BT)
    length = response_mask_BT.sum(1, keepdim=True)
    if kind == "suffix":
        return (at >= length - fraction_count(length, fraction)).float() * response_mask_BT
    share = curriculum_fraction(progress, start=fraction, shape=shape) if kind == "curriculum" else fraction
    early = (at < fraction_count(length, share)) & response_mask_BT
    if kind == "prefix":
        return early.float()
    return torch.ones_like(early, dtype=torch.float32) + early * (multiplier - 1.0)


def length_cut(length: int, ratio: float) -> int:
    """Tokens of a stored response that stay: round(length * ratio), halves to the even number (Thinking Seeds, arXiv 2601.21476).

    Raises:
        UsageError: ratio outside [0, 1] or a negative length.
    """
    if not 0 <= ratio <= 1 or length < 0:
        raise UsageError(
            "length_cut", got=f"length {length}, ratio {ratio}", expected="length >= 0 and a ratio in [0, 1]", do="Cut inside the response."
        )
    return round(length * ratio)


def entropy_cuts(entropy_T: Sequence[float] | Tensor, k: int, *, where: str = "before") -> list[int]:
    """Prefix lengths at the k highest-entropy positions, ascending; one of them is then drawn uniformly (arXiv 2601.21476).

    Args:
        entropy_T: entropy of the sampling distribution at each token, nats. Ties go to the earlier token.
        where: `before` leaves the position itself to be sampled again; `after` keeps its token.
    Returns fewer than k lengths for shorter responses, none for an empty one.
    Raises:
        UsageError: k < 1, or an unknown `where`.
    """
    if k < 1 or where not in ("before", "after"):
        raise UsageError("entropy_cuts", got=f"k = {k}, where = {where!r}", expected="k >= 1 and where 'before' or 'after'", do="Correct the cut.")
    values = [float(e) for e in entropy_T]
    top = sorted(range(len(values)), key=lambda t: (-values[t], t))[:k]
    return sorted(t + (where == "after") for t in top)
