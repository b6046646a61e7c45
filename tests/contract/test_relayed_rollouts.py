"""The boundary of a relayed rollout, end to end on the real sampler and policy: stored log-probs are those of whoever wrote each token."""

import copy

import numpy as np
import pytest
import torch

from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import LoraOptions, load_model
from nearpolicy.policy.tiny import make_tiny
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Outcome, Prompt, Score, Scored, Source, StopReason, collate
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sources.bank import cut_short

G, LIMIT, OLD, NEW = 3, 14, 4, 9
EOS = frozenset({1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def requests(prefixes=None):
    rng = np.random.default_rng(1)
    prompts = [Prompt(id=f"p{i}", token_P=rng.integers(3, 30, n), text="") for i, n in enumerate((4, 9, 2))]
    return [Request(ticket=i, prompt=p, prefixes=None if prefixes is None else prefixes[i * G : (i + 1) * G]) for i, p in enumerate(prompts)]


def seeds_of(sampler, entropy=True):
    """Whole responses of the old policy, as prefixes that a cut shortens."""
    from nearpolicy.rollout import Prefix

    out = sampler.sample(requests(), G, SamplingParams(max_tokens=LIMIT, eos_ids=EOS, stream=Stream.BANK, entropy=entropy))
    return [Prefix(token_T=r.response_T, logp_behavior_T=r.logp_behavior_T, version_T=r.version_T, entropy_T=r.entropy_T, stop=r.stop) for r in out]


def batch_of(rollouts):
    return collate([Scored(rollout=r, score=Score(reward=0.0, outcome=Outcome.SCORE)) for r in rollouts], advantage_B=[0.0] * len(rollouts))


def moved(policy, scale=0.3):
    """Other weights of the same policy: every trained tensor takes a step."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in policy.trainable_parameters():
            p.add_(scale * p.std().nan_to_num(0.1).clamp(min=0.05) * torch.randn(p.shape, generator=draw))


@pytest.mark.parametrize(
    ("kind", "largest", "mean"),
    # bfloat16 logits round apart on the two paths; the mean shows that nothing but rounding is in it.
    [("padded", 1e-4, 1e-5), ("packed", 1e-4, 1e-5), ("lora", 1e-4, 1e-5), ("bfloat16", 0.15, 0.03)],
)
def test_whole_responses_recomputed_under_both_policies(folder, kind, largest, mean):
    lora = LoraOptions(rank=2, alpha=8.0) if kind == "lora" else None
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    model, tokenizer = load_model(folder, device="cpu", lora=lora)
    policy = HFPolicy(model, tokenizer=tokenizer, dtype=dtype, shared_prompts="off" if kind == "padded" else "auto")
    assert policy.shares_prompts == (kind != "padded")
    plain, _ = load_model(folder, device="cpu")
    sampler = TorchSampler(plain, tokenizer, dtype=torch.bfloat16 if kind == "bfloat16" else None)
    if kind == "lora":
        moved(policy)  # adapters start at nothing
    sampler.load(policy.published_weights(), OLD)
    stored = seeds_of(sampler)
    kept = [len(s.token_T) * (1 + i % 3) // 4 for i, s in enumerate(stored)]
    old = copy.deepcopy(policy.state_dict())
    moved(policy)
    sampler.load(policy.published_weights(), NEW)
    out = sampler.sample(
        requests([cut_short(s, k) for s, k in zip(stored, kept, strict=True)]), G, SamplingParams(max_tokens=LIMIT, eos_ids=EOS, entropy=True)
    )
    assert [r.prefix_length for r in out] == kept
    assert 0 < sum(kept) < sum(len(r.response_T) for r in out)
    for r, seed, k in zip(out, stored, kept, strict=True):
        assert r.source is Source.RELAY
        assert r.version_T.tolist() == [OLD] * k + [NEW] * (len(r.response_T) - k)
        assert r.response_T[:k].tolist() == seed.token_T[:k].tolist()
        assert r.logp_behavior_T[:k].tobytes() == seed.logp_behavior_T[:k].tobytes()
        assert r.entropy_T[:k].tobytes() == seed.entropy_T[:k].tobytes()
        assert len(r.response_T) <= LIMIT
        assert r.text == tokenizer.decode(r.response_T.tolist(), skip_special_tokens=True)
    batch = batch_of(out)
    prefix_BT = batch.response_mask_BT & (batch.version_BT == OLD)
    suffix_BT = batch.response_mask_BT & (batch.version_BT == NEW)
    with torch.no_grad():
        new_BT = policy.score(batch).logp_BT
        policy.load_state_dict(old)
        old_BT = policy.score(batch).logp_BT
    for mask_BT, right_BT, wrong_BT in ((prefix_BT, old_BT, new_BT), (suffix_BT, new_BT, old_BT)):
        gap = (right_BT - batch.logp_behavior_BT)[mask_BT].abs()
        assert gap.max() <= largest
        assert gap.mean() <= mean
        assert (wrong_BT - batch.logp_behavior_BT)[mask_BT].abs().mean() > 3 * mean + 0.02  # the policies do differ


def seen(model):
    """Shapes of the ids of every forward from now on."""
    shapes = []
    model.register_forward_pre_hook(lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return shapes


def test_only_the_suffix_is_decoded_and_prefixes_take_one_pass(folder):
    model, tokenizer = load_model(folder, device="cpu")
    sampler = TorchSampler(model, tokenizer)
    stored = seeds_of(sampler)
    k = 6
    prefixes = [cut_short(s, min(k, len(s.token_T) - 1)) for s in stored]
    shapes = seen(model)
    out = sampler.sample(requests(prefixes), G, SamplingParams(max_tokens=LIMIT, eos_ids=frozenset()))
    prompts, extended, *steps = shapes
    assert prompts == (3, 9)  # each prompt once, padded to the longest
    lengths = [len(p.token_T) for p in prefixes if len(p.token_T)]
    assert len(lengths) > 2 * G
    assert extended == (len(lengths), max(lengths))
    assert all(length == 1 for _, length in steps)
    decoded = sum(rows for rows, _ in steps) + 3 * G  # the first token of each row comes from the prefill
    assert decoded == sum(r.num_sampled for r in out)


def test_a_shared_prefix_is_computed_once_for_its_group(folder):
    model, tokenizer = load_model(folder, device="cpu")
    sampler = TorchSampler(model, tokenizer)
    stored = seeds_of(sampler)
    one = [cut_short(s, len(s.token_T) - 2) for s in stored[::G]]
    params = SamplingParams(max_tokens=LIMIT, eos_ids=EOS, entropy=True)
    shapes = seen(model)
    shared = sampler.sample(requests([p for p in one for _ in range(G)]), G, params)
    assert shapes[0][0] == 3  # prompt and prefix of each group as one row
    assert all(length == 1 for _, length in shapes[1:])
    apart = sampler.sample(requests([copy.copy(p) for p in one for _ in range(G)]), G, params)
    for a, b in zip(shared, apart, strict=True):
        assert a.response_T.tolist() == b.response_T.tolist()
        assert (a.prefix_length, a.stop, a.version_T.tolist()) == (b.prefix_length, b.stop, b.version_T.tolist())
        np.testing.assert_allclose(a.logp_behavior_T, b.logp_behavior_T, atol=1e-5, rtol=0)
    assert len({tuple(r.response_T) for r in shared}) > 3


def test_a_group_with_shared_own_and_no_prefixes(folder):
    model, tokenizer = load_model(folder, device="cpu")
    sampler = TorchSampler(model, tokenizer, max_rows=4)
    stored = seeds_of(sampler)
    short = cut_short(stored[0], 3)
    mixed = [[short, short, None], [cut_short(stored[3], 2), None, cut_short(stored[4], 0)], [cut_short(stored[6], 4)] * 3]
    out = sampler.sample(requests([p for group in mixed for p in group]), G, SamplingParams(max_tokens=LIMIT, eos_ids=EOS))
    batch = batch_of(out)
    with torch.no_grad():
        logp_BT = HFPolicy(model, tokenizer=tokenizer).score(batch).logp_BT
    assert (logp_BT - batch.logp_behavior_BT).abs().max() < 1e-4
    assert batch.prefix_length_B.tolist() == [3, 3, 0, 2, 0, 0, 4, 4, 4]
    assert [s is Source.RELAY for s in batch.source_B] == [True, True, False, True, False, True, True, True, True]


def test_a_seed_that_ended_inside_the_kept_prefix_stays_finished(folder):
    model, tokenizer = load_model(folder, device="cpu")
    sampler = TorchSampler(model, tokenizer)
    stored = seeds_of(sampler)
    shapes = seen(model)
    out = sampler.sample(requests(stored), G, SamplingParams(max_tokens=LIMIT, eos_ids=EOS))
    assert shapes == []
    for r, seed in zip(out, stored, strict=True):
        assert (r.stop, r.num_sampled, r.oldest_version) == (seed.stop, 0, None)
        assert r.response_T.tolist() == seed.token_T.tolist()
    assert {r.stop for r in out} <= {StopReason.EOS, StopReason.LENGTH}
