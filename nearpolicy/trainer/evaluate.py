"""Evaluation: avg@n and unbiased pass@k on fixed prompts, with intervals by bootstrap over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nearpolicy.errors import UsageError
from nearpolicy.objective.stats import bootstrap_interval, pass_at_k
from nearpolicy.protocols import Request, Sampler, SamplingParams, ScoreItem, Verifier
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Array, Prefix, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of n responses to each prompt, and what follows from them."""

    reward_PN: Array
    """Reward of each response, float64 [prompts, n]; NaN = unscored."""
    length_PN: Array
    """Response tokens."""
    ks: tuple[int, ...]
    full_marks: float
    """A response is correct when its reward reaches this."""
    rollouts: tuple[Rollout, ...]

    @property
    def scored(self) -> Array:
        """Scored responses of each prompt, int64 [prompts]."""
        return (~np.isnan(self.reward_PN)).sum(1)

    @property
    def right(self) -> Array:
        """Responses of each prompt that reach full marks, int64 [prompts]."""
        return (np.nan_to_num(self.reward_PN, nan=-np.inf) >= self.full_marks).sum(1)

    def pass_at(self, k: int) -> Array:
        """Unbiased pass@k of each prompt with at least k scored responses, float64."""
        return np.array([pass_at_k(int(n), int(c), k) for n, c in zip(self.scored, self.right, strict=True) if n >= k])

    def average(self) -> Array:
        """Mean reward of each prompt with a scored response (avg@n), float64."""
        known = self.scored > 0
        return np.nansum(self.reward_PN[known], 1) / self.scored[known]

    def by_prompt(self) -> dict[str, Array]:
        """pass@k and avg@n of every prompt in order, float64 [prompts], NaN where a prompt has too few scored responses."""
        counts = list(zip(self.scored, self.right, strict=True))
        out = {f"pass@{k}": np.array([pass_at_k(int(n), int(c), k) if n >= k else np.nan for n, c in counts]) for k in self.ks}
        known = self.scored > 0
        mean = np.nansum(self.reward_PN, 1) / np.maximum(self.scored, 1)
        return out | {f"avg@{self.reward_PN.shape[1]}": np.where(known, mean, np.nan)}

    def values(self, prefix: str = "eval") -> dict[str, float]:
        """Metric rows: pass@k and avg@n with 95 % intervals, mean length, unscored share."""
        out: dict[str, float] = {}
        n = self.reward_PN.shape[1]
        for name, per_prompt in [(f"pass@{k}", self.pass_at(k)) for k in self.ks] + [(f"avg@{n}", self.average())]:
            if len(per_prompt):
                interval = bootstrap_interval(torch.from_numpy(per_prompt))
                out |= {f"{prefix}/{name}": interval.mean, f"{prefix}/{name}/low": interval.low, f"{prefix}/{name}/high": interval.high}
        out[f"{prefix}/length"] = float(self.length_PN.mean())
        out[f"{prefix}/unscored_frac"] = float(np.isnan(self.reward_PN).mean())
        return out


def evaluate(
    sampler: Sampler,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    ks: Sequence[int] = (1,),
    full_marks: float = 1.0,
    prefixes: Sequence[Sequence[Prefix | None]] | None = None,
    stream: Stream = Stream.EVAL,
) -> Evaluation:
    """Sample n responses to each prompt and score them.

    The noise is keyed by the prompt's place and the sample, not by the step: two evaluations of one run differ by their weights alone.

    Args:
        full_marks: reward from which a response counts as right.
        prefixes: for each prompt the n beginnings to go on from (relay inference); None = nothing.
        stream: whose noise the samples draw from.
    Raises:
        UsageError: no prompts, or a k above n.
    """
    if not prompts:
        raise UsageError("evaluation", got="0 held-out prompts", expected="at least one", do="Raise task.heldout or give a held-out file.")
    if bad := [k for k in ks if not 1 <= k <= n]:
        raise UsageError("pass@k", got=f"k = {bad[0]} with n = {n} samples", expected="1 <= k <= n", do="Raise the samples or lower k.")
    requests = [Request(ticket=i, prompt=p, prefixes=None if prefixes is None else prefixes[i]) for i, p in enumerate(prompts)]
    rollouts = sampler.sample(requests, n, replace(params, stream=stream, entropy=False))
    scores = verifier.score([ScoreItem.of(p, r) for p, r in zip([p for p in prompts for _ in range(n)], rollouts, strict=True)])
    return Evaluation(
        reward_PN=np.array([s.reward for s in scores], dtype=np.float64).reshape(len(prompts), n),
        length_PN=np.array([len(r.response_T) for r in rollouts]).reshape(len(prompts), n),
        ks=tuple(ks),
        full_marks=full_marks,
        rollouts=tuple(rollouts),
    )
