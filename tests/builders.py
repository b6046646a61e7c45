"""Random batches for tests, the same for the same seed."""

import numpy as np
import torch

from nearpolicy.rollout import Batch, Outcome, Rollout, Score, Scored, StopReason, collate


def random_batch(*, rows: int, group_size: int, seed: int, vocab: int = 20, temperature: float = 1.0) -> Batch:
    """Groups of `group_size` rows sharing a prompt of 3 to 9 tokens, responses of 1 to 12, behaviour log-probs near a random model's."""
    draw = np.random.default_rng(seed)
    scored = []
    for group in range(rows // group_size):
        prompt = draw.integers(3, vocab, size=draw.integers(3, 10))
        for sample in range(group_size):
            T = int(draw.integers(1, 13))
            rollout = Rollout(
                prompt_id=f"p{group}", group=group, sample=sample, prompt_P=prompt, response_T=draw.integers(3, vocab, size=T),
                logp_behavior_T=(-3.37 + 0.1 * draw.standard_normal(T)).astype(np.float32), version_T=np.zeros(T, dtype=np.int64),
                temperature=temperature, stop=StopReason.EOS,
            )  # fmt: skip
            scored.append(Scored(rollout=rollout, score=Score(reward=float(draw.random()), outcome=Outcome.SCORE)))
    return collate(scored, advantage_B=torch.from_numpy(draw.standard_normal(len(scored))).float())
