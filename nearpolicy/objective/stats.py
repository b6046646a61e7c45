"""Estimators: pass@k, effective sample size, KL divergences, bootstrap intervals over prompts."""

from typing import NamedTuple

import torch
from torch import Tensor

from nearpolicy.errors import UsageError
from nearpolicy.objective import ratio

ESTIMATORS = ("k1", "k2", "k3")
"""KL estimators from one sample (Schulman 2020)."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k responses drawn from n, of which c are right, is right: 1 - C(n-c, k) / C(n, k).

    Unbiased for pass@k (Chen 2021, arXiv 2107.03374). Computed as 1 - prod_{i=n-c+1..n} (1 - k/i).
    Raises:
        UsageError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise UsageError("pass_at_k", got=f"n = {n}, c = {c}, k = {k}", expected="1 <= k <= n and 0 <= c <= n",
                         do="Sample at least k responses for each prompt.")  # fmt: skip
    if n - c < k:
        return 1.0
    missed = 1.0
    for i in range(n - c + 1, n + 1):
        missed *= 1.0 - k / i
    return 1.0 - missed


def ess(log_weight_N: Tensor) -> Tensor:
    """Effective sample size (sum w)^2 / sum w^2 of log weights, in samples: between 1 and N (Kish 1965). Divide by N for the fraction.

    For weights of mean one, ESS / N = 1 / (1 + chi^2). 0 for no samples; log weights of any size, since the sums stay in log space.
    """
    if not log_weight_N.numel():
        return log_weight_N.new_zeros(())
    return (2 * torch.logsumexp(log_weight_N, 0) - torch.logsumexp(2 * log_weight_N, 0)).exp()


def logit_gradient_norm(logp: Tensor, entropy: Tensor) -> Tensor:
    """Norm of d logp / d logits of each token, elementwise, from its log-prob and the entropy of its distribution (nats) alone.

    The gradient is onehot - p, so with q the chosen token's alternatives, renormalised,

        norm^2 = (1 - p)^2 (1 + sum q^2)  >=  (1 - p)^2 (1 + exp(-H(q))),   H(q) = (H - h(p)) / (1 - p),   h(p) = -p log p - (1-p) log(1-p)

    since sum q^2 >= exp(-H(q)) (Jensen). What is returned is that lower bound: exact when the alternatives are equally likely (two tokens,
    one alternative, uniform), and at most a factor sqrt(2) low whatever they are. sum p^2 itself would be one more pass over the vocabulary
    for every token. The logits are those of the sampling distribution, after division by the temperature. 0 where p = 1; in float32 H(q) drowns in
    rounding where p is within 1e-6 of 1, which moves the result by no more than that factor.
    """
    dtype = torch.promote_types(torch.promote_types(logp.dtype, entropy.dtype), torch.float32)
    x, h = logp.to(dtype).clamp(max=0.0), entropy.to(dtype)
    rest = -torch.expm1(x)
    own = -x.exp() * x - torch.xlogy(rest, rest)
    among = ((h - own) / rest).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(min=0.0)
    return rest * (1 + (-among).exp_()).sqrt_()


def kl_estimate(logp: Tensor, logp_reference: Tensor, *, estimator: str) -> Tensor:
    """One-sample estimate of KL(pi || ref) for x ~ pi, elementwise, nats; with d = logp - logp_reference:

        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, >= 0
        k3 = exp(-d) - 1 + d      unbiased, >= 0

    Differentiating these as they stand gives expected gradients of 0 (k1), grad KL(pi || ref) (k2) and grad KL(ref || pi) (k3); as a
    loss term use `kl_penalty`. k3 limits |d| by the one clamp.
    Raises:
        UsageError: unknown estimator.
    """
    _known(estimator)
    d = logp - logp_reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    return torch.expm1(-ratio.clamp(d)) + d


def kl_penalty(logp: Tensor, logp_reference: Tensor, *, estimator: str, logp_behavior: Tensor | None = None) -> Tensor:
    """The estimate as a loss term: value of `kl_estimate`, expected gradient that of KL(pi || ref).

    x ~ pi: grad KL = E[d grad logp]. k1 alone has no such gradient, so its detached value multiplies the score function; k2 differentiates
    to it; k3 is its own derivative (1 - exp(-d)) plus its detached value times the score function, which together are again d. All three
    thus share one gradient, d * grad logp, and differ in value only.

    Args:
        logp: with gradient, any shape. Per token the gradient is that of each token's KL given its prefix (the effect on later prefixes is
            left out, as usual); with log-probs summed over the response it is that of the KL between responses.
        logp_behavior: when x was sampled by another policy mu: value and gradient are multiplied by pi / mu (clamped), which makes both
            unbiased again (DeepSeek-V3.2, arXiv 2512.02556). None: x ~ pi.
    Raises:
        UsageError: unknown estimator.
    """
    _known(estimator)
    with torch.no_grad():
        value = kl_estimate(logp, logp_reference, estimator=estimator)
        slope = logp - logp_reference
        if logp_behavior is not None:
            weight = ratio.clamp(logp - logp_behavior).exp()
            value, slope = value * weight, slope * weight
    return value + slope * (logp - logp.detach())


def _known(estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise UsageError("KL estimator", got=repr(estimator), expected=" | ".join(ESTIMATORS), do="Name one of these.")


class Interval(NamedTuple):
    """A mean over prompts and its bootstrap interval."""

    mean: float
    low: float
    high: float
    num: int
    """Prompts with a value."""


def bootstrap_interval(value_N: Tensor, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean over prompts with its percentile bootstrap interval (Efron 1979); deterministic for a seed.

    Args:
        value_N: one value for each prompt (e.g. its pass@k); NaN = missing, left out. Prompts are resampled, not responses: the responses to
            one prompt are not independent of it.
        level: coverage, in (0, 1).
    All NaN for no prompts; low = high = mean for one.
    Raises:
        UsageError: level outside (0, 1), fewer than 1 resample, values that are not [N].
    """
    if value_N.ndim != 1 or not 0 < level < 1 or resamples < 1:
        raise UsageError("bootstrap_interval", got=f"shape {tuple(value_N.shape)}, level = {level}, resamples = {resamples}",
                         expected="[N] values, level in (0, 1), resamples >= 1", do="Correct the argument.")  # fmt: skip
    x = value_N.detach().double().cpu()
    x = x[~torch.isnan(x)]
    N = len(x)
    if not N:
        return Interval(torch.nan, torch.nan, torch.nan, 0)
    generator = torch.Generator().manual_seed(seed)
    means = torch.empty(resamples, dtype=torch.float64)
    # In chunks, so that many prompts do not need a resamples x N table.
    chunk = max(1, 2_000_000 // N)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        means[start : start + rows] = x[torch.randint(N, (rows, N), generator=generator)].mean(1)
    tail = (1 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    mean = float(x.mean())
    return Interval(mean, min(low, mean), max(high, mean), N)


def paired_difference(a_N: Tensor, b_N: Tensor, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Mean of a - b over prompts that both have, with its bootstrap interval: pairs are resampled together.

    Raises:
        UsageError: shapes that differ, and as `bootstrap_interval`.
    """
    if a_N.shape != b_N.shape:
        raise UsageError("paired_difference", got=f"shapes {tuple(a_N.shape)} and {tuple(b_N.shape)}", expected="one value of each for every prompt",
                         do="Evaluate both on the same prompts.")  # fmt: skip
    return bootstrap_interval(a_N.double() - b_N.double(), level=level, resamples=resamples, seed=seed)
