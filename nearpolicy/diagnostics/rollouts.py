"""What a rollout batch looks like before any training on it."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from nearpolicy.metrics import Max, Mean, Metrics, Sum
from nearpolicy.rollout import Array, Outcome, Scored, Source


def repetition(token_T: Array, n: int = 4) -> float:
    """Share of the n-grams of a response that occurred earlier in it: 0 for all distinct, near 1 for a loop, 0 below n + 1 tokens."""
    if len(token_T) <= n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(token_T, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def rollout_metrics(scored: Sequence[Scored]) -> Metrics:
    """Rewards, outcomes, lengths, repetition and log-perplexity of the policy's responses; demonstrations stand apart under names of their own."""
    shown = [s for s in scored if s.rollout.source is Source.DEMONSTRATION]
    if shown:
        scored = [s for s in scored if s.rollout.source is not Source.DEMONSTRATION]
    rewards = np.array([s.score.reward for s in scored])
    known = rewards[~np.isnan(rewards)]
    outcomes = Counter(s.score.outcome for s in scored)
    lengths = np.array([len(s.rollout.response_T) for s in scored])
    # A sample keeps the cost of the n-gram count flat in the batch size.
    looked_at = scored[:: max(1, len(scored) // 64)]
    logps = [s.rollout.logp_behavior_T for s in scored if s.rollout.logp_behavior_T is not None]
    num_logps = sum(len(x) for x in logps)
    sum_logp = float(sum(x.sum(dtype=np.float64) for x in logps))
    return _demonstrations(shown, len(scored)) | {
        "reward/mean": Mean(float(known.sum()), len(known)),
        "reward/std": Mean(float(known.std() * len(known)) if len(known) else 0.0, len(known)),
        "reward/unscored_frac": Mean(len(scored) - len(known), len(scored)),
        "reward/abstain": Sum(outcomes[Outcome.ABSTAIN]),
        "reward/timeout": Sum(outcomes[Outcome.TIMEOUT]),
        "reward/error": Sum(outcomes[Outcome.ERROR]),
        "response/length": Mean(float(lengths.sum()), len(lengths)),
        "response/length_max": Max(float(lengths.max())),
        "response/truncated_frac": Mean(sum(s.rollout.truncated for s in scored), len(scored)),
        "response/repetition": Mean(sum(repetition(s.rollout.response_T) for s in looked_at), len(looked_at)),
        "response/log_perplexity": Mean(-sum_logp, num_logps),
    }


def _demonstrations(shown: Sequence[Scored], others: int) -> Metrics:
    """Share, reward and length of demonstration rows; nothing without any."""
    if not shown:
        return {}
    rewards = [s.score.reward for s in shown if s.score.reward == s.score.reward]
    return {
        "demonstration/frac": Mean(len(shown), len(shown) + others),
        "demonstration/reward": Mean(sum(rewards), len(rewards)),
        "demonstration/length": Mean(sum(len(s.rollout.response_T) for s in shown), len(shown)),
    }
