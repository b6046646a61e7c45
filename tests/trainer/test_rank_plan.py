"""Central plans: every row once, as many micro-batches on every rank, the token budget kept."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import UsageError
from nearpolicy.policy.packing import families, plan_microbatches
from nearpolicy.policy.rank_plan import empty_row, plan_ranks
from tests.builders import random_batch
from tests.policy.models import batch_of


def cost(batch, rows, padded):
    """Tokens that these rows cost together: written out from what the layouts are, not from the planner."""
    part = batch.rows(rows)
    prompt, response = part.prompt_length_B.tolist(), part.response_mask_BT.sum(1).tolist()
    if padded:
        return len(rows) * max(p + r for p, r in zip(prompt, response, strict=True))
    return sum(prompt[rows[0]] for rows in families(part)) + sum(response)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=24)


@settings(deadline=None, max_examples=200)
@given(rows=ROWS, budget=st.integers(1, 120), ranks=st.integers(1, 5), padded=st.booleans())
def test_every_row_once_in_equal_counts_within_the_budget(rows, budget, ranks, padded):
    batch = batch_of(rows)
    steps = plan_ranks(batch, budget, ranks, padded=padded)
    assert all(len(step) == ranks for step in steps)
    assert sorted(row for step in steps for part in step for row in part) == list(range(len(rows)))
    for step in steps:
        assert step[0], "the first rank has rows in every step"
        for part in step:
            assert part == sorted(part)
            assert len(part) <= 1 or cost(batch, part, padded) <= budget
    assert steps == plan_ranks(batch, budget, ranks, padded=padded)
    empty = sum(not part for step in steps for part in step)
    assert empty < ranks, "no step is empty altogether, and none could be saved"


@settings(deadline=None, max_examples=100)
@given(rows=ROWS, budget=st.integers(1, 120), padded=st.booleans())
def test_a_part_of_a_plan_is_one_micro_batch_for_who_computes_it(rows, budget, padded):
    batch = batch_of(rows)
    for part in (part for step in plan_ranks(batch, budget, 2, padded=padded) for part in step if part):
        assert plan_microbatches(batch.rows(part), budget, padded=padded) == [list(range(len(part)))]


def test_two_ranks_with_475_and_100_tokens_and_a_budget_of_100():
    """Lengths that a split by rows would leave in five steps on one rank and one on the other."""
    batch = batch_of([(k, 1, 94) for k in range(5)] + [(5, 1, 99)])
    assert plan_ranks(batch, 100, 2) == [[[5], [0]], [[1], [2]], [[3], [4]]]


def test_one_group_is_cut_so_that_each_rank_has_a_part_and_whole_groups_stay():
    batch = random_batch(rows=8, group_size=8, seed=0)
    ((first, second),) = plan_ranks(batch, 16_384, 2)
    assert first
    assert second
    groups = random_batch(rows=32, group_size=4, seed=0)
    for part in (part for step in plan_ranks(groups, 16_384, 2) for part in step):
        assert all(part.count(4 * (row // 4) + k) == 1 for row in part for k in range(4))


def test_more_ranks_than_rows_leaves_empty_steps():
    batch = random_batch(rows=2, group_size=1, seed=0)
    (step,) = plan_ranks(batch, 16_384, 3)
    assert sorted(map(len, step)) == [0, 1, 1]


def test_an_empty_row_is_one_token_without_a_response():
    batch = random_batch(rows=3, group_size=1, seed=0)
    empty = empty_row(batch)
    assert empty.token_BT.tolist() == batch.token_BT[:1, :1].tolist()
    assert (empty.num_tokens, empty.num_sequences, int(empty.response_mask_BT.sum())) == (0, 0, 0)
    assert torch.equal(empty.prompt_length_B, torch.ones(1, dtype=torch.long))


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"ranks": 0}])
def test_a_budget_and_a_rank_at_least(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        plan_ranks(random_batch(rows=2, group_size=1, seed=0), **{"token_budget": 9, "ranks": 1} | wrong)
