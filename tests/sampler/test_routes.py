"""Experts recorded while sampling: every context token, under the weights that wrote the suffix."""

import numpy as np
import pytest
import torch

from nearpolicy.errors import UsageError
from nearpolicy.policy.routing import Routers
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prefix, Prompt, StopReason
from nearpolicy.sampler.cache import RecomputeForward
from nearpolicy.sampler.torch import TorchSampler
from tests.policy.models import VOCAB, tiny

KINDS = ("qwen3_moe", "mixtral")


def requests(count=6, prefixes=None, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Request(ticket=i, prompt=Prompt(id=f"p{i}", token_P=rng.integers(2, VOCAB, int(rng.integers(1, 9))), text=""), prefixes=prefixes)
        for i in range(count)
    ]


def params(**changes):
    return SamplingParams(**{"max_tokens": 12, "eos_ids": frozenset({3, 7}), "routes": True, **changes})


def own_routes(model, rollout):
    """Experts of one row run alone."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_P, rollout.response_T]))[None, :-1]
    with torch.no_grad(), Routers(model).recording() as recorder:
        model(input_ids=ids, use_cache=False)
        return recorder.take().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_every_context_token_has_the_experts_of_the_row_alone(kind):
    # Rows end at different times and move between slots; prompts are prefilled padded and copied to their group.
    model = tiny(kind).eval()
    rollouts = TorchSampler(model, None, max_rows=5).sample(requests(), 3, params())
    assert {r.stop for r in rollouts} == {StopReason.EOS, StopReason.LENGTH}
    for r in rollouts:
        assert r.routes.dtype == np.int16
        assert r.routes.tolist() == own_routes(model, r).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_recording_changes_nothing_else(kind):
    sampler = TorchSampler(tiny(kind).eval(), None, max_rows=5)
    for plain, recorded in zip(sampler.sample(requests(), 3, params(routes=False)), sampler.sample(requests(), 3, params()), strict=True):
        assert plain.routes is None
        assert plain.response_T.tolist() == recorded.response_T.tolist()
        assert plain.logp_behavior_T.tolist() == recorded.logp_behavior_T.tolist()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in sampler.model.modules())


def prefix(length, *, stop=None):
    return Prefix(token_T=np.arange(length) + 8, logp_behavior_T=np.full(length, -1.0, np.float32), version_T=np.zeros(length, np.int64), stop=stop)


@pytest.mark.parametrize("kind", KINDS)
def test_relayed_prefixes_are_recorded_under_the_weights_that_write_the_suffix(kind):
    model, other = tiny(kind).eval(), tiny(kind, initializer_range=0.2).eval()
    shared = prefix(4)
    ends = [prefix(3), None, shared, shared, prefix(2, stop=StopReason.EOS), prefix(12), prefix(0)]
    sampler = TorchSampler(model, None, max_rows=3)
    sampler.load(other.state_dict(), 5)
    rollouts = sampler.sample(requests(2, prefixes=ends), len(ends), params())
    assert [r.prefix_length for r in rollouts[:7]] == [3, 0, 4, 4, 2, 12, 0]
    assert [r.num_sampled > 0 for r in rollouts[:7]] == [True, True, True, True, False, False, True]
    for r in rollouts:
        assert r.routes.tolist() == own_routes(model, r).tolist()  # the sampler's model now holds the other weights


def test_only_finished_rows():
    model = tiny("qwen3_moe").eval()
    rollouts = TorchSampler(model, None, max_rows=2).sample(requests(2, prefixes=[prefix(2, stop=StopReason.EOS)] * 2), 2, params())
    assert all(r.num_sampled == 0 and r.routes.tolist() == own_routes(model, r).tolist() for r in rollouts)


def test_recomputation_records_too():
    model = tiny("qwen3_moe").eval()
    sampler = TorchSampler(model, None, max_rows=4)
    with pytest.warns(UserWarning, match="which is slow"):
        sampler._forward = RecomputeForward(model, "a test")
    for r in sampler.sample(requests(3, prefixes=[prefix(3), None]), 2, params()):
        assert r.routes.tolist() == own_routes(model, r).tolist()


def test_more_than_256_experts_fit():
    model = tiny("qwen3_moe", num_experts=300, num_experts_per_tok=4, moe_intermediate_size=4).eval()
    rollouts = TorchSampler(model, None).sample(requests(8), 2, params())
    assert max(r.routes.max() for r in rollouts) > 255
    assert all(r.routes.tolist() == own_routes(model, r).tolist() for r in rollouts)


def test_noise_lasts_while_sampling_and_differs_by_version():
    model = tiny("qwen3_moe").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noisy = TorchSampler(model, None, router_noise=0.3)
    first, again = (noisy.sample(requests(), 2, params(routes=False)) for _ in range(2))
    assert [r.logp_behavior_T.tolist() for r in first] == [r.logp_behavior_T.tolist() for r in again]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    noisy.version = 1
    later, clean = noisy.sample(requests(), 2, params(routes=False)), TorchSampler(model, None).sample(requests(), 2, params(routes=False))
    logp = [float(rollouts[0].logp_behavior_T[0]) for rollouts in (first, later, clean)]
    assert len(set(logp)) == 3


def test_noise_is_taken_back_when_sampling_fails(monkeypatch):
    model = tiny("qwen3_moe").eval()
    weight = model.model.layers[0].mlp.gate.weight
    before, place = weight.detach().clone(), weight.data_ptr()
    sampler = TorchSampler(model, None, router_noise=0.3)

    def broken(*args):
        assert not torch.equal(weight, before)
        raise RuntimeError("broken")

    monkeypatch.setattr(sampler._forward, "decode", broken)
    with pytest.raises(RuntimeError, match="broken"):
        sampler.sample(requests(), 2, params())
    assert torch.equal(weight, before)
    assert weight.data_ptr() == place
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_without_experts_is_refused():
    with pytest.raises(UsageError, match="a model without experts"):
        TorchSampler(tiny("qwen3").eval(), None).sample(requests(), 1, params())
