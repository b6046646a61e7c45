"""Tokens at the cuts: counted once a relayed response, by strategy and side."""

import json
from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from nearpolicy.diagnostics.truncation import MOST, TruncationTokens
from nearpolicy.rollout import Outcome, Rollout, Score, Scored, Source, StopReason, collate


def scored(response, kept, *, source=Source.RELAY):
    T = len(response)
    rollout = Rollout(
        prompt_id="p", group=0, sample=0, prompt_P=np.array([90, 91, 92]), response_T=np.array(response, dtype=np.int64),
        logp_behavior_T=np.full(T, -1.0, np.float32), version_T=np.zeros(T, np.int64), prefix_length=kept, stop=StopReason.EOS, source=source,
    )  # fmt: skip
    return Scored(rollout=rollout, score=Score(reward=1.0, outcome=Outcome.SCORE))


def batch(*rows):
    return collate(list(rows), advantage_B=[0.0] * len(rows))


def decode(ids):
    return [f"t{i}" for i in ids]


def test_both_sides_of_a_cut_by_hand():
    counts = TruncationTokens()
    counts.add(batch(scored([5, 6, 7], 2), scored([8, 6, 7, 7], 2), scored([5, 9], 1), scored([1, 2], 0, source=Source.FRESH)), "length_ratio")
    counts.add(batch(scored([4, 7], 0), scored([5, 6], 2)), "length_ratio")  # nothing kept; ended inside what was kept
    counts.add(batch(scored([5, 6], 1)), "top_entropy")
    assert counts.table(decode) == {
        "length_ratio": {
            "responses": 5, "uncut": 1, "finished": 1,
            "last_kept": [["t6", 6, 3], ["t5", 5, 1]],
            "first_new": [["t7", 7, 2], ["t4", 4, 1], ["t9", 9, 1]],
        },
        "top_entropy": {"responses": 1, "uncut": 0, "finished": 0, "last_kept": [["t5", 5, 1]], "first_new": [["t6", 6, 1]]},
    }  # fmt: skip


def test_runs_without_relay_count_nothing():
    counts = TruncationTokens()
    counts.add(batch(scored([5, 6], 0, source=Source.FRESH)), "")
    assert counts.table(decode) == {}


def test_the_most_frequent_are_listed():
    counts = TruncationTokens()
    counts.add(batch(*(scored([5, 100 + i], 1) for i in range(MOST + 5)), scored([5, 120], 1)), "cut")
    listed = counts.table(decode)["cut"]["first_new"]
    assert len(listed) == MOST
    assert listed[0] == ["t120", 120, 2]
    assert listed[1] == ["t100", 100, 1]


rows = st.lists(st.tuples(st.lists(st.integers(3, 9), min_size=1, max_size=5), st.integers(0, 5)), min_size=1, max_size=8)


@given(rows=rows, cut=st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_any_split_and_a_checkpoint_in_between_give_the_same_counts(rows, cut):
    made = [scored(response, min(kept, len(response))) for response, kept in rows]
    whole = TruncationTokens()
    whole.add(batch(*made), "cut")
    first = TruncationTokens()
    for part in (made[:cut], made[cut:]):
        resumed = TruncationTokens()
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        if part:
            resumed.add(batch(*part), "cut")
        first = resumed
    assert first.table(decode) == whole.table(decode)


def test_a_prefix_that_is_masked_out_of_the_loss_is_counted_as_well():
    made = batch(scored([5, 6, 7], 2))
    counts = TruncationTokens()
    counts.add(replace(made, mask_BT=made.mask_BT & False), "cut")
    assert counts.table(decode)["cut"]["first_new"] == [["t7", 7, 1]]
