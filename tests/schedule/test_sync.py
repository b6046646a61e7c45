"""The sync schedule on a fake sampler: ages, slices, dynamic sampling, masking, and a resume in the middle of everything."""

import math

import numpy as np
import pytest
import torch

from nearpolicy.errors import DataError, EngineError
from nearpolicy.protocols import SamplingParams
from nearpolicy.records import join_arrays, pack, split_arrays
from nearpolicy.rollout import Outcome, Prompt, Score, StopReason
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule, split_rows
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.testing.fakes import FakeSampler

V = 5


class Judge:
    """Scores by a plain function of the item; implements Verifier."""

    def __init__(self, judge):
        self.judge = judge

    def score(self, items):
        return [self.judge(i) for i in items]

    def close(self):
        pass


def by_length(item):
    return Score(reward=float(len(item.completion) % 3), outcome=Outcome.SCORE)


def build(judge=by_length, annotate=lambda b: b, **changes):
    options = {
        "prompts": 4, "group_size": 4, "updates_per_rollout": 4, "baseline": "mean", "normalize_std": False, "dynamic_sampling": False,
        "max_redraws": 3, "max_tokens": 6, "overlong_buffer": None, "mask_truncated": False,
    } | changes  # fmt: skip
    sampler = FakeSampler(torch.zeros(V, V))
    params = SamplingParams(max_tokens=6, eos_ids=frozenset({0}), seed=1)
    return SyncSchedule(
        SyncOptions(**options), source=FreshSource(sampler, params), verifier=Judge(judge),
        prompt_at=lambda c: Prompt(id=str(c), token_P=np.array([1 + c % 4]), text="", columns={"answer": str(c)}),
        publish=lambda version: setattr(sampler, "version", version), annotate=annotate,
    )  # fmt: skip


def test_a_batch_is_used_for_n_updates_and_grows_old():
    schedule = build()
    ages, groups = [], []
    for version in range(8):
        batch = schedule.next(version)
        assert len(batch) == 4
        ages.append(schedule.metrics()["stale/age_max"].value)
        groups.append(set(batch.group_B.tolist()))
        assert set(batch.version_BT[batch.response_mask_BT].tolist()) == {version - version % 4}
    assert ages == [0, 1, 2, 3, 0, 1, 2, 3]
    assert groups == [{i} for i in range(8)]


def test_slices_are_equal_and_groups_stay_whole():
    assert split_rows(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match="divisor"):
        split_rows(8, 3)


def test_advantages_are_those_of_the_whole_group():
    schedule = build(updates_per_rollout=8)
    rows = [schedule.next(0) for _ in range(8)]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        reward = torch.cat([first.reward_B, second.reward_B])
        advantage = torch.cat([b.advantage_BT[b.response_mask_BT.any(1)].amax(1) + b.advantage_BT.amin(1) for b in (first, second)])
        assert torch.allclose(advantage, reward - reward.mean())


def test_unscored_responses_are_left_out_and_counted():
    def judge(item):
        return by_length(item) if len(item.completion) != 2 else Score(reward=math.nan, outcome=Outcome.TIMEOUT)

    schedule = build(judge, updates_per_rollout=1)
    batch, metrics = schedule.next(0), schedule.metrics()
    missing = batch.reward_B.isnan()
    assert missing.any()
    assert not batch.mask_BT[missing].any()
    assert not batch.advantage_BT[missing].any()
    assert metrics["reward/timeout"].value == missing.sum()
    for group in batch.group_B.unique():
        mine = (batch.group_B == group) & ~missing
        total = batch.advantage_BT[mine].sum(1) / batch.response_mask_BT[mine].sum(1)
        assert total.sum().abs() < 1e-5


def test_no_score_at_all_stops_with_the_reason():
    schedule = build(lambda i: Score(reward=math.nan, outcome=Outcome.ERROR, message="broken"))
    with pytest.raises(EngineError, match="broken"):
        schedule.next(0)


def test_dynamic_sampling_keeps_groups_with_a_signal_and_counts_the_rest():
    """Prompts with an odd cursor have equal rewards."""

    def judge(item):
        return Score(reward=1.0, outcome=Outcome.SCORE) if int(item.columns["answer"]) % 2 else by_length(item)

    schedule = build(judge, dynamic_sampling=True, updates_per_rollout=1)
    batch, metrics = schedule.next(0), schedule.metrics()
    assert len(batch) == 16
    for group in batch.group_B.unique():
        mine = batch.reward_B[batch.group_B == group]
        assert mine.max() > mine.min()
    assert metrics["data/groups_rejected"].value == schedule.ledger.counts["rejected/no_signal"] > 0
    assert metrics["data/redraws"].value >= 1


def test_surplus_groups_wait_and_age():
    count = [0]

    def judge(item):
        count[0] += 1
        return Score(reward=0.0, outcome=Outcome.SCORE) if count[0] <= 12 else Score(reward=float(count[0]), outcome=Outcome.SCORE)

    schedule = build(judge, dynamic_sampling=True, updates_per_rollout=1)
    schedule.next(0)
    waiting = schedule.ledger.ready()
    assert waiting
    schedule.metrics()
    batch = schedule.next(5)
    assert set(waiting) <= set(batch.group_B.tolist())
    assert schedule.metrics()["stale/age_max"].value == 5


def test_a_task_without_signal_ends_in_one_clear_line():
    schedule = build(lambda i: Score(reward=1.0, outcome=Outcome.SCORE), dynamic_sampling=True)
    with pytest.raises(DataError, match="equal rewards") as error:
        schedule.next(0)
    assert "\n" not in str(error.value)


def test_truncated_responses_can_be_left_out_of_the_loss():
    schedule = build(mask_truncated=True, updates_per_rollout=1)
    batch = schedule.next(0)
    cut = torch.tensor([s is StopReason.LENGTH for s in batch.stop_B])
    assert cut.any()
    assert not cut.all()
    assert batch.mask_BT.any(1).tolist() == (~cut).tolist()


def test_a_batch_in_which_every_row_is_truncated_trains_on_nothing():
    schedule = build(mask_truncated=True, updates_per_rollout=1)
    schedule.source.params = SamplingParams(max_tokens=2, eos_ids=frozenset(), seed=1)
    batch = schedule.next(0)
    assert (batch.num_tokens, batch.num_sequences) == (0, 0)
    assert batch.response_mask_BT.any()


def test_the_length_penalty_enters_the_advantage_and_not_the_reward():
    schedule = build(lambda i: Score(reward=1.0, outcome=Outcome.SCORE), overlong_buffer=4, updates_per_rollout=1)
    batch = schedule.next(0)
    assert set(batch.reward_B.tolist()) == {1.0}
    assert batch.advantage_BT.abs().sum() > 0


@pytest.mark.parametrize("cut", [1, 2, 4, 5])
def test_gone_on_with_in_the_middle_of_everything(cut):
    """Half-used batch, surplus groups, cursor and ledger: the rest is the same bit for bit."""

    def judge(item):
        return Score(reward=1.0, outcome=Outcome.SCORE) if int(item.columns["answer"]) % 3 == 1 else by_length(item)

    whole, first = build(judge, dynamic_sampling=True), build(judge, dynamic_sampling=True)
    want = [whole.next(v) for v in range(9)][cut:]
    for version in range(cut):
        first.next(version)
    tree, arrays = split_arrays(pack(first.state_dict()), "s")
    second = build(judge, dynamic_sampling=True)
    second.load_state_dict(join_arrays(tree, arrays))
    for version, batch in enumerate(want, start=cut):
        got = second.next(version)
        assert torch.equal(got.token_BT, batch.token_BT)
        assert torch.equal(got.logp_behavior_BT, batch.logp_behavior_BT)
        assert torch.equal(got.advantage_BT, batch.advantage_BT)
        assert torch.equal(got.version_BT, batch.version_BT)
        assert got.stop_B == batch.stop_B
