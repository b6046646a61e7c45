"""The relay on a table of logits: who writes which token in which batch of a cycle, with what noise, and what a resume depends on."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from nearpolicy.protocols import SamplingParams
from nearpolicy.randomness import Stream
from nearpolicy.records import join_arrays, pack, split_arrays
from nearpolicy.rollout import Outcome, Prompt, Score, Source, StopReason
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
from nearpolicy.sources.cuts import length_ratio, random_ratio, top_entropy
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.sources.relay import RelayOptions, RelaySource
from nearpolicy.testing.fakes import FakeSampler

ORACLES = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
V, P, G, LIMIT = 8, 4, 4, 10


class Recording(FakeSampler):
    """A fake that keeps what it was asked."""

    def __init__(self, seed=0):
        super().__init__(torch.randn(V, V, generator=torch.Generator().manual_seed(seed)))
        self.asked = []

    def sample(self, requests, n, params):
        self.asked.append((list(requests), n, params))
        return super().sample(requests, n, params)


class Judge:
    """Score by what the response is; odd prompts without signal when `flat`."""

    def __init__(self, flat=False):
        self.flat = flat

    def score(self, items):
        return [
            Score(reward=1.0 if self.flat and int(i.columns["answer"]) % 2 else float(len(i.completion) % 3), outcome=Outcome.SCORE) for i in items
        ]

    def close(self):
        pass


def options(T=4, **changes):
    base = {"refresh": T, "relayed": G, "shared": False, "groups": (T - 1) * P, "chunk": P, "entropy": False}
    return RelayOptions(**(base | changes))


def schedule(folder, cut=None, *, relay=None, updates=1, flat=False, dynamic=False, mask_prefix=False, run="me", eos=(0,)):
    sampler = Recording()
    params = SamplingParams(max_tokens=LIMIT, eos_ids=frozenset(eos), seed=3)
    source = FreshSource(sampler, params) if cut is None else RelaySource(sampler, params, cut, options=relay or options(), folder=folder, run=run)

    def publish(version):
        table = torch.randn(V, V, generator=torch.Generator().manual_seed(1000 + version))
        sampler.load({"logits": table}, version)

    made = SyncSchedule(
        SyncOptions(
            prompts=P, group_size=G, updates_per_rollout=updates, baseline="mean", normalize_std=False, dynamic_sampling=dynamic, max_redraws=9,
            max_tokens=LIMIT, overlong_buffer=None, mask_truncated=False, mask_prefix=mask_prefix,
        ),
        source=source, verifier=Judge(flat), publish=publish, annotate=lambda b: b,
        prompt_at=lambda c: Prompt(id=str(c), token_P=np.array([1 + c % (V - 1)]), text="", columns={"answer": str(c)}),
    )  # fmt: skip
    return made, sampler


def equal(a, b):
    for name in ("token_BT", "logp_behavior_BT", "version_BT", "advantage_BT", "mask_BT", "prefix_length_B", "group_B", "reward_B"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.stop_B == b.stop_B


def test_the_worked_schedule(tmp_path):
    """T = 4: batch 1 whole from the current policy, batches 2 to 4 a prefix from the snapshot, then a new snapshot."""
    made, _ = schedule(tmp_path, length_ratio(0.5))
    for version, case in enumerate(ORACLES["seeds_T_schedule"]):
        batch, metrics = made.next(version), made.metrics()
        assert case["T"] == 4
        inside = batch.response_mask_BT
        prefix = inside & (batch.position_BT < batch.prefix_length_B[:, None])
        assert set(batch.version_BT[inside & ~prefix].tolist()) == {version}
        if case["index_in_cycle"] == 1:
            assert set(batch.source_B) == {Source.FRESH}
            assert not prefix.any()
            assert metrics["relay/relayed_frac"].value == 0
        else:
            assert set(batch.source_B) == {Source.RELAY}
            assert set(batch.version_BT[prefix].tolist()) == {case["behavior_snapshot"] - 1}
            assert metrics["relay/prefix_age"].value == case["prefix_age_in_rollout_batches"]
        assert metrics["stale/age_max"].value == 0


def test_the_prefix_is_the_seeds_and_the_rest_is_new(tmp_path):
    made, sampler = schedule(tmp_path, length_ratio(0.6))
    made.next(0)
    stored = {t: made.source.bank.group(t) for t in range(P, 4 * P)}
    sampler.asked.clear()
    made.next(1)
    (requests, n, params), *rest = sampler.asked
    assert (n, params.stream, params.max_tokens, rest) == (G, Stream.ROLLOUT, LIMIT, [])
    assert [r.ticket for r in requests] == list(range(P, 2 * P))
    for s in made.last_scored:
        r = s.rollout
        seed = stored[r.group][r.sample]
        k = round(0.6 * len(seed.token_T))
        assert r.prefix_length == k
        assert r.response_T[:k].tolist() == seed.token_T[:k].tolist()
        assert r.logp_behavior_T[:k].tobytes() == seed.logp_behavior_T[:k].tobytes()
        assert len(r.response_T) <= LIMIT
        if k < len(seed.token_T):
            assert r.num_sampled >= 1


def test_suffixes_never_replay_the_noise_of_their_seeds(tmp_path):
    """Under equal weights a suffix with its seed's noise would be its seed."""
    made, _ = schedule(tmp_path, length_ratio(0.5), eos=())
    made.publish = lambda version: setattr(made.source.sampler, "version", version)
    made.next(0)
    seeds = {(t, i): p.token_T.tolist() for t in range(P, 2 * P) for i, p in enumerate(made.source.bank.group(t))}
    made.next(1)
    same = sum(s.rollout.response_T.tolist() == seeds[s.rollout.group, s.rollout.sample] for s in made.last_scored)
    assert same <= 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("how", ["ratio 0", "none relayed", "T = 1"])
def test_a_relay_that_keeps_nothing_is_the_plain_run_bit_for_bit(tmp_path, dynamic, how):
    relay = {"ratio 0": options(), "none relayed": options(relayed=0), "T = 1": options(T=1)}[how]
    cut = length_ratio(0.0 if how == "ratio 0" else 0.7)
    plain, _ = schedule(tmp_path, updates=2, dynamic=dynamic, flat=dynamic)
    made, _ = schedule(tmp_path, cut, relay=relay, updates=2, dynamic=dynamic, flat=dynamic)
    for version in range(12):
        equal(made.next(version), plain.next(version))
        ours, theirs = made.metrics(), plain.metrics()
        for name in theirs:
            if not name.startswith("time") and name != "data/tokens_sampled":
                np.testing.assert_equal(ours[name].value, theirs[name].value, err_msg=name)
    assert (made.tokens_sampled > plain.tokens_sampled) == (how == "ratio 0")


def test_ratio_one_replays_stored_responses_as_they_are(tmp_path):
    made, sampler = schedule(tmp_path, length_ratio(1.0))
    made.next(0)
    sampler.asked.clear()
    before = made.tokens_sampled
    for version in (1, 2, 3):
        batch, metrics = made.next(version), made.metrics()
        assert set(batch.version_BT[batch.response_mask_BT].tolist()) == {0}
        assert torch.equal(batch.prefix_length_B, batch.response_mask_BT.sum(1))
        assert set(batch.stop_B) <= {StopReason.EOS, StopReason.LENGTH}
        assert metrics["relay/finished_in_prefix_frac"].value == 1
        assert metrics["relay/tokens_decoded"].value == 0
        assert metrics["stale/age_max"].value == 0
    assert made.tokens_sampled == before
    assert all(p.stop is not None for requests, _, _ in sampler.asked for r in requests for p in r.prefixes)


def test_a_cut_of_nothing_is_legal_and_counted(tmp_path):
    made, _ = schedule(tmp_path, lambda length, entropy_T, rng: 0 if rng.random() < 0.5 else length // 2)
    made.next(0)
    made.metrics()
    batch = made.next(1)
    zero = made.metrics()["relay/zero_cut_frac"].value
    assert zero == (batch.prefix_length_B == 0).float().mean().item()
    assert 0 < zero < 1
    assert set(batch.source_B) == {Source.RELAY}


def test_some_members_of_each_group_are_relayed(tmp_path):
    made, sampler = schedule(tmp_path, length_ratio(0.5), relay=options(relayed=3))
    made.next(0)
    assert [n for _, n, _ in sampler.asked[:-1]] == [3, 3, 3]  # the bank's chunks, then batch 1
    made.next(1)
    assert Counter((s.rollout.sample, s.rollout.source) for s in made.last_scored) == {
        (0, Source.RELAY): P, (1, Source.RELAY): P, (2, Source.RELAY): P, (3, Source.FRESH): P
    }  # fmt: skip
    assert made.metrics()["relay/relayed_frac"].value == 0.75


def test_a_prefix_shared_in_the_group_is_one_object(tmp_path):
    made, sampler = schedule(tmp_path, random_ratio(0.2, 0.9), relay=options(shared=True, relayed=3), eos=())
    made.next(0)
    assert made.source.bank.header.seeds == 1
    sampler.asked.clear()
    made.next(1)
    for request in sampler.asked[0][0]:
        first, *others, fresh = request.prefixes
        assert all(p is first for p in others)
        assert fresh is None
    for t in range(P, 2 * P):
        relayed = [s.rollout for s in made.last_scored if s.rollout.group == t and s.rollout.source is Source.RELAY]
        k = relayed[0].prefix_length
        assert len({tuple(r.response_T[:k]) for r in relayed}) == 1
        assert len({tuple(r.response_T[k:]) for r in relayed}) > 1


def test_the_entropy_cut_has_its_entropies_and_rollouts_need_none(tmp_path):
    made, sampler = schedule(tmp_path, top_entropy(2), relay=options(entropy=True))
    made.next(0)
    assert [p.entropy for _, _, p in sampler.asked] == [True, True, True, False]
    seeds = {(t, i): p for t in range(P, 2 * P) for i, p in enumerate(made.source.bank.group(t))}
    batch = made.next(1)
    assert batch.entropy_behavior_BT is None
    for s in made.last_scored:
        entropy = seeds[s.rollout.group, s.rollout.sample].entropy_T
        assert (entropy > entropy[s.rollout.prefix_length]).sum() < 2


def test_masked_prefixes_stay_context_and_leave_the_loss(tmp_path):
    train, _ = schedule(tmp_path / "a", length_ratio(0.5))
    mask, _ = schedule(tmp_path / "b", length_ratio(0.5), mask_prefix=True)
    for version in range(3):
        a, b = train.next(version), mask.next(version)
        assert torch.equal(a.response_mask_BT, b.response_mask_BT)
        assert torch.equal(a.mask_BT, a.response_mask_BT)
        assert torch.equal(b.mask_BT, b.response_mask_BT & (b.position_BT >= b.prefix_length_B[:, None]))
        assert torch.equal(a.advantage_BT, b.advantage_BT)


def test_rejected_groups_are_replaced_from_the_reserve_and_then_fresh(tmp_path):
    """Half of the prompts have no signal: twice as many groups are drawn. A reserve of as many as the cycle needs, and some, covers that."""
    for reserve, without in ((6 * P, 0), (0, 1)):
        made, _ = schedule(tmp_path, length_ratio(0.5), relay=options(groups=3 * P + reserve), dynamic=True, flat=True)
        missing = 0
        for version in range(4):
            batch, metrics = made.next(version), made.metrics()
            missing += metrics["relay/groups_without_seed"].value if version else 0
            for group in batch.group_B.unique():
                assert batch.reward_B[batch.group_B == group].unique().numel() > 1
            if version == 1:
                assert Source.RELAY in batch.source_B
        assert (missing > 0) == bool(without)


def test_every_decoded_token_is_counted_once(tmp_path):
    made, sampler = schedule(tmp_path, length_ratio(0.5))
    total = 0
    real = FakeSampler.sample

    def counted(requests, n, params):
        nonlocal total
        out = real(sampler, requests, n, params)
        total += sum(r.num_sampled for r in out)
        return out

    sampler.sample = counted
    for version in range(6):
        made.next(version)
        assert made.tokens_sampled == total


CYCLE = {"updates": 2, "dynamic": True, "flat": True}


@pytest.fixture(scope="module", params=[False, True], ids=["per_sample", "shared"])
def uninterrupted(request, tmp_path_factory):
    """13 updates in one piece: T = 3, two updates a batch, so two cycles and one update."""
    args = CYCLE | {"relay": options(T=3, groups=2 * P + 2, shared=request.param)}
    whole, _ = schedule(tmp_path_factory.mktemp("whole"), random_ratio(), **args)
    batches, tokens = [], []
    for version in range(13):
        batches.append(whole.next(version))
        tokens.append(whole.tokens_sampled)
    return args, batches, tokens


@pytest.mark.parametrize("cut_at", [1, 2, 5, 6, 7])
def test_gone_on_with_anywhere_in_a_cycle(uninterrupted, tmp_path, cut_at):
    """At the end of a batch, inside one, at the end of a cycle, inside the next. The bank is a file that stays where it is."""
    args, batches, tokens = uninterrupted
    first, _ = schedule(tmp_path, random_ratio(), **args)
    for version in range(cut_at):
        first.next(version)
    state = first.state_dict()
    tree, arrays = split_arrays(pack(state), "s")
    assert len(list(tmp_path.iterdir())) == 1
    if not state["source"].get("files"):
        for file in tmp_path.iterdir():
            file.unlink()
    second, _ = schedule(tmp_path, random_ratio(), **args)
    second.load_state_dict(join_arrays(json.loads(json.dumps(tree)), arrays))
    for version in range(cut_at, 8 if cut_at < 7 else 13):
        equal(second.next(version), batches[version])
        assert second.tokens_sampled == tokens[version]


def test_one_bank_at_a_time_lies_on_disk(tmp_path):
    made, _ = schedule(tmp_path, length_ratio(0.5))
    for version in range(9):
        made.next(version)
        assert [p.name for p in tmp_path.iterdir()] == [f"seeds-{version - version % 4:06d}.safetensors"]
