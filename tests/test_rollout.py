"""Rollouts are complete at birth; masks come from lengths; batches slice and come back exactly."""

import dataclasses

import numpy as np
import pytest
import torch

from nearpolicy.errors import DataError
from nearpolicy.records import join_arrays, pack, split_arrays, unpack
from nearpolicy.rollout import Batch, Outcome, Rollout, Score, Scored, Source, StopReason, collate


def rollout(prompt=(5, 6), response=(7, 8, 9), **changes):
    T = len(response)
    values = {
        "prompt_id": "p", "group": 3, "sample": 0, "prompt_P": np.array(prompt), "response_T": np.array(response, dtype=np.int64),
        "logp_behavior_T": np.linspace(-1, -0.1, T).astype(np.float32), "version_T": np.arange(T), "stop": StopReason.EOS,
    }  # fmt: skip
    return Rollout(**(values | changes))


def scored(*args, reward=1.0, **changes):
    outcome = Outcome.SCORE if reward == reward else Outcome.ERROR
    return Scored(rollout=rollout(*args, **changes), score=Score(reward=reward, outcome=outcome))


def test_masks_come_from_lengths_when_pad_is_eos():
    """ids [5, 6, 2, 2, 2] with pad = eos = 2 and true length 3: the real EOS is trained, the padding is not."""
    batch = collate([scored((5,), (6, 2)), scored((5,), (6, 7, 8, 2))], advantage_B=[1.0, -1.0])
    assert batch.response_mask_BT.int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch.position_BT.tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 2, 3]]
    assert batch.advantage_BT.tolist() == [[0, 1, 1, 0, 0], [0, -1, -1, -1, -1]]
    assert batch.version_BT.tolist() == [[-1, 0, 1, -1, -1], [-1, 0, 1, 2, 3]]
    assert (batch.num_tokens, batch.num_sequences) == (6, 2)


def test_an_empty_completion_is_a_row_without_tokens():
    batch = collate([scored((5, 6), ()), scored((5,), (6,))], advantage_B=[1.0, 1.0])
    assert batch.num_tokens == 1
    assert batch.num_sequences == 1


def test_an_unscored_row_is_masked_and_its_reward_is_missing():
    batch = collate([scored(), scored(reward=float("nan"))], advantage_B=[1.0, 0.0], train_B=[True, False])
    assert batch.mask_BT.any(1).tolist() == [True, False]
    assert batch.response_mask_BT.any(1).tolist() == [True, True]
    assert batch.reward_B.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logp_behavior_T": np.zeros(2, np.float32)}, "2 values for 3"),
        ({"logp_behavior_T": np.array([0, np.nan, 0], np.float32)}, "nan at response token 1 (id 8)"),
        ({"logp_behavior_T": np.array([0, 0, -np.inf], np.float32)}, "-inf at response token 2"),
        ({"logp_behavior_T": None}, "None"),
        ({"version_T": np.zeros(4)}, "version_T"),
        ({"prefix_length": 4}, "prefix_length"),
        ({"entropy_T": np.zeros(1)}, "entropy_T"),
    ],
)
def test_a_wrong_rollout_names_sample_and_token(changes, says):
    with pytest.raises(DataError) as error:
        rollout(**changes)
    assert says in str(error.value)
    assert "'p'" in str(error.value)


def test_the_age_of_a_relayed_response_is_that_of_its_sampled_tokens():
    """A 3-token relayed prefix and 5 sampled tokens."""
    version = np.array([2, 2, 2, 7, 7, 7, 7, 7])
    r = rollout(response=range(8), version_T=version, prefix_length=3, source=Source.RELAY)
    assert (r.num_sampled, r.oldest_version) == (5, 7)
    assert rollout(response=(1, 2), prefix_length=2, version_T=np.zeros(2)).oldest_version is None


def test_slices_are_trimmed_and_agree():
    batch = collate([scored((5,), (6, 2)), scored((5, 4, 3), (6, 7, 8, 2))], advantage_B=[1.0, -1.0])
    first = batch.rows([0])
    assert first.token_BT.tolist() == [[5, 6, 2]]
    assert batch.rows([1, 0]).group_B.tolist() == [3, 3]
    assert torch.equal(batch.rows([1]).logp_behavior_BT[0], batch.logp_behavior_BT[1])


def test_batches_refuse_what_does_not_fit():
    batch = collate([scored(), scored()], advantage_B=[1.0, 1.0])
    with pytest.raises(DataError, match="mask_BT"):
        dataclasses.replace(batch, mask_BT=torch.ones_like(batch.mask_BT))
    with pytest.raises(DataError, match="logp_teacher_BT"):
        dataclasses.replace(batch, logp_teacher_BT=torch.zeros(2, 4))
    with pytest.raises(DataError, match="0 rollouts"):
        collate([], advantage_B=[])
    with pytest.raises(DataError, match="1 of 2 rows"):
        collate([scored(), dataclasses.replace(scored(), logp_teacher_T=np.zeros(3, np.float32))], advantage_B=[0.0, 0.0])


def test_records_come_back_bit_for_bit():
    batch = collate([scored((5,), (6, 2)), scored(reward=float("nan"))], advantage_B=[1.0, 0.1])
    rows = [scored(), scored(reward=float("nan"), entropy_T=np.ones(3, np.float32))]
    tree, arrays = split_arrays({"batch": pack(batch), "rows": [pack(r) for r in rows]}, "s")
    back = join_arrays(tree, arrays)
    again = unpack(Batch, back["batch"])
    for f in dataclasses.fields(Batch):
        a, b = getattr(batch, f.name), getattr(again, f.name)
        assert (a.equal(b) or a.isnan().equal(b.isnan())) if isinstance(a, torch.Tensor) else a == b, f.name
    for old, new in zip(rows, [unpack(Scored, r) for r in back["rows"]], strict=True):
        assert np.array_equal(old.rollout.logp_behavior_T, new.rollout.logp_behavior_T)
        assert old.rollout.stop is new.rollout.stop
        assert old.score.outcome is new.score.outcome
        assert (old.score.reward == new.score.reward) or (old.score.reward != old.score.reward and new.score.reward != new.score.reward)
