"""Responses in flight: interrupted anywhere with the same weights, nothing changes; with new ones, every token keeps the version that wrote it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prefix, Prompt, Source, StopReason
from nearpolicy.sampler.continuation import Flight
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.testing.fakes import FakeSampler, FakeTokenizer

V = 12
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
PARAMS = SamplingParams(max_tokens=14, eos_ids=frozenset({0}), seed=3, entropy=True)


def model(seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, initializer_range=0.4, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


MAKE = {
    "torch": lambda: TorchSampler(model(), FakeTokenizer()),
    "few rows": lambda: TorchSampler(model(), FakeTokenizer(), max_rows=3),
    "fake": lambda: FakeSampler(TABLE),
}


def requests(prefix=None):
    """Three groups; the second has a relayed prefix on its first member, and one that ended inside it on its second."""
    ended = Prefix(token_T=np.array([4, 0]), logp_behavior_T=np.float32([-1, -2]), version_T=np.array([0, 0]), entropy_T=np.float32([1, 1]),
                   stop=StopReason.EOS)  # fmt: skip
    relayed = Prefix(token_T=np.array([5, 6, 7]), logp_behavior_T=np.float32([-1, -1.5, -3]), version_T=np.array([0, 0, 0]),
                     entropy_T=np.float32([1, 2, 3]))  # fmt: skip
    return [
        Request(ticket=t, prompt=Prompt(id=f"p{t}", token_P=np.array([1 + t, 2, 3]), text=""), prefixes=[relayed, ended, None] if t == 1 else None)
        for t in range(3)
    ]


def after(steps):
    """Interrupts at the call number `steps` (from 0), and again at each call after it."""
    count = iter(range(10**6))
    return lambda: next(count) >= steps


def in_slices(flight, slices, between=lambda: None):
    out = dict(flight.run(after(slices[0])))
    for steps in slices[1:]:
        between()
        out |= dict(flight.run(after(steps)))
    between()
    return out | dict(flight.run())


def flown(sampler, slices, between=lambda: None):
    flight = Flight(sampler)
    flight.add(requests(), 3, PARAMS)
    out = in_slices(flight, slices, between)
    assert not flight.tickets
    return [r for t in sorted(out) for r in out[t]]


@pytest.fixture(params=MAKE, scope="module")
def kind(request):
    """(make a sampler, what it writes uninterrupted)."""
    make = MAKE[request.param]
    return make, make().sample(requests(), 3, PARAMS)


def same(got, want, *, exact):
    for a, b in zip(got, want, strict=True):
        assert a.response_T.tolist() == b.response_T.tolist()
        assert a.version_T.tolist() == b.version_T.tolist()
        assert (a.group, a.sample, a.stop, a.prefix_length, a.source, a.text) == (b.group, b.sample, b.stop, b.prefix_length, b.source, b.text)
        for x, y in ((a.logp_behavior_T, b.logp_behavior_T), (a.entropy_T, b.entropy_T)):
            np.testing.assert_allclose(x, y, atol=0 if exact else 2e-5, rtol=0)


@settings(max_examples=10, deadline=None)
@given(slices=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_interrupted_anywhere_with_the_same_weights_nothing_changes(kind, slices):
    """Tokens are equal; log-probs up to the rounding of the second prefill."""
    make, want = kind
    same(flown(make(), slices), want, exact=False)


def test_never_interrupted_is_one_call_bit_for_bit(kind):
    make, want = kind
    flight = Flight(make())
    flight.add(requests(), 3, PARAMS)
    same([r for _, group in flight.run() for r in group], want, exact=True)


def test_an_interrupted_call_hands_over_what_it_has(kind):
    make, want = kind
    got = make().sample(requests(), 3, PARAMS, interrupt=after(5))
    unfinished = [r.stop is StopReason.ABORTED for r in got]
    assert any(unfinished)
    for a, b, aborted in zip(got, want, unfinished, strict=True):
        T = len(a.response_T)
        assert a.response_T.tolist() == b.response_T[:T].tolist()
        assert aborted == (len(b.response_T) > T)
        assert a.stop is (StopReason.ABORTED if aborted else b.stop)


@pytest.mark.parametrize("slices", [[2, 3], [4], [1, 1, 1]])
def test_tokens_keep_the_version_and_the_log_prob_of_the_weights_that_wrote_them(slices):
    """Against each version's own teacher-forced log-probs over the whole context."""
    models = [model(seed) for seed in range(len(slices) + 1)]
    sampler = TorchSampler(model(0), None)
    version = iter(range(1, 10))

    def publish():
        v = next(version)
        sampler.load(models[v].state_dict(), v)

    out = flown(sampler, slices, publish)
    assert any(len(set(r.version_T[r.prefix_length :].tolist())) > 1 for r in out)
    for r in out:
        own = r.version_T[r.prefix_length :]
        assert (np.diff(own) >= 0).all()
        ids = torch.from_numpy(np.concatenate([r.prompt_P, r.response_T]))[None]
        with torch.no_grad():
            logp = [m.eval()(ids).logits[0, len(r.prompt_P) - 1 : -1].log_softmax(-1) for m in models]
        for t in range(r.prefix_length, len(r.response_T)):
            assert r.logp_behavior_T[t] == pytest.approx(float(logp[r.version_T[t]][t, r.response_T[t]]), abs=1e-4)


def test_weights_loaded_in_passing_act_at_once_upon_the_old_cache_and_are_marked():
    """Without a cache (recomputation) the same call gives each version's own log-probs; with it the log-probs after the change are nobody's."""
    from nearpolicy.sampler.cache import RecomputeForward

    models = [model(seed) for seed in range(3)]

    def run(cached):
        sampler = TorchSampler(model(0), None)
        if not cached:
            with pytest.warns(UserWarning, match="slow"):
                sampler._forward = RecomputeForward(sampler.model, "been asked to")
        steps = iter(range(100))

        def refresh():
            step = next(steps)
            if step in (3, 5):
                sampler.load(models[step // 2].state_dict(), step // 2)

        flight = Flight(sampler)
        flight.add(requests(), 3, PARAMS)
        return [r for _, group in flight.run(refresh=refresh) for r in group]

    def errors(out):
        found = []
        for r in out:
            ids = torch.from_numpy(np.concatenate([r.prompt_P, r.response_T]))[None]
            with torch.no_grad():
                logp = [m.eval()(ids).logits[0, len(r.prompt_P) - 1 : -1].log_softmax(-1) for m in models]
            for t in range(r.prefix_length, len(r.response_T)):
                changed = bool((r.version_T[r.prefix_length : t + 1] != r.version_T[r.prefix_length]).any())
                found.append((changed, abs(r.logp_behavior_T[t] - float(logp[r.version_T[t]][t, r.response_T[t]]))))
        return [max(e for c, e in found if c == changed) for changed in (False, True)]

    with_cache, without = run(cached=True), run(cached=False)
    assert {v for r in with_cache for v in r.version_T.tolist()} == {0, 1, 2}
    changed = [len(set(r.version_T[r.prefix_length :].tolist())) > 1 for r in with_cache]
    assert any(changed)
    assert not all(changed)
    assert [r.reused_cache for r in with_cache] == changed
    assert not any(r.reused_cache for r in without)
    assert max(errors(without)) < 1e-4
    before, after = errors(with_cache)
    assert before < 1e-4
    assert after > 1e-3


def test_a_kept_response_is_not_a_relayed_one_and_a_relayed_one_stays_one():
    out = flown(TorchSampler(model(), None), [2, 2])
    assert [(r.source, r.prefix_length) for r in out if r.group != 1] == [(Source.FRESH, 0)] * 6
    assert [(r.source, r.prefix_length) for r in out if r.group == 1] == [(Source.RELAY, 3), (Source.RELAY, 2), (Source.FRESH, 0)]
    assert out[4].response_T.tolist() == [4, 0], "ended inside its prefix: nothing is sampled"


def test_a_shared_prefix_that_nothing_was_added_to_stays_one_object():
    flight = Flight(TorchSampler(model(), None))
    prefix = requests()[1].prefixes[0]
    flight.add([Request(ticket=0, prompt=requests()[0].prompt, prefixes=[prefix, prefix])], 2, PARAMS)
    assert flight.run(after(0)) == []
    again = flight._groups[0].again()
    assert again.prefixes[0] is again.prefixes[1] is prefix


def test_groups_that_join_later_and_groups_of_other_sizes():
    alone = {n: FakeSampler(TABLE).sample(requests()[:1], n, PARAMS) for n in (1, 2)}
    flight = Flight(FakeSampler(TABLE))
    flight.add(requests()[:1], 2, PARAMS)
    assert flight.run(after(1)) == []
    late = Request(ticket=9, prompt=requests()[0].prompt)
    flight.add([late], 1, PARAMS)
    with pytest.raises(ValueError, match="ticket 9"):
        flight.add([late], 1, PARAMS)
    done = dict(flight.run())
    assert [r.response_T.tolist() for r in done[0]] == [r.response_T.tolist() for r in alone[2]]
    assert done[9][0].group == 9
    assert len(done[9]) == 1


def test_dropped_groups_are_forgotten():
    flight = Flight(FakeSampler(TABLE))
    flight.add(requests(), 3, PARAMS)
    assert flight.drop() == [0, 1, 2]
    assert flight.run() == []
