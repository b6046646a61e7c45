"""The fakes agree with each other: what FakeSampler reports is what FakePolicy scores."""

import numpy as np
import pytest
import torch

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Outcome, Prompt, Score, Scored, collate
from nearpolicy.testing.fakes import FakePolicy, FakeSampler, FakeTokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_policy_scores_what_the_sampler_reports(temperature):
    policy = FakePolicy(torch.randn(7, 7))
    sampler = FakeSampler(torch.zeros(7, 7))
    sampler.load(policy.state_dict(), 4)
    requests = [Request(ticket=i, prompt=Prompt(id=str(i), token_P=np.arange(1, 2 + i), text="")) for i in range(3)]
    params = SamplingParams(max_tokens=6, eos_ids=frozenset({0}), temperature=temperature, entropy=True)
    out = sampler.sample(requests, 3, params)
    batch = collate([Scored(rollout=r, score=Score(reward=0.0, outcome=Outcome.SCORE)) for r in out], advantage_B=[1.0] * 9)
    logp_BT, entropy_BT = policy.score(batch)
    torch.testing.assert_close(logp_BT.detach(), batch.logp_behavior_BT, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_BT, batch.entropy_behavior_BT, atol=1e-5, rtol=0)
    assert not entropy_BT.requires_grad
    (-logp_BT.sum()).backward()
    assert policy.logits.grad.abs().sum() > 0


def test_tokenizer_shows_and_skips_special_tokens():
    tokenizer = FakeTokenizer(special=[2])
    assert tokenizer.encode("abd") == [0, 1, 3]
    assert tokenizer.decode([0, 2, 3]) == "a<2>d"
    assert tokenizer.decode([0, 2, 3], skip_special_tokens=True) == "ad"
