"""One integer resumes the order of prompts, wherever it stands."""

import pytest
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import CheckpointError, DataError
from nearpolicy.tasks.order import PromptOrder

QUICK = settings(deadline=None, derandomize=True, database=None, max_examples=50)


@QUICK
@given(st.integers(1, 30), st.integers(0, 5), st.lists(st.integers(0, 40), max_size=6))
def test_every_epoch_is_a_permutation_however_it_is_taken(n, seed, takes):
    order = PromptOrder(n, seed)
    taken = [i for t in takes for i in order.take(t)]
    assert order.cursor == len(taken)
    assert order.epoch == len(taken) // n
    assert taken == PromptOrder(n, seed).take(len(taken))
    whole = PromptOrder(n, seed).take(3 * n)
    for epoch in range(3):
        assert sorted(whole[epoch * n : (epoch + 1) * n]) == list(range(n))


@QUICK
@given(st.integers(1, 12), st.integers(0, 30))
def test_resume_at_any_cursor_also_at_the_end_of_an_epoch(n, at):
    straight = PromptOrder(n, 1)
    straight.take(at)
    resumed = PromptOrder(n, 1)
    resumed.load_state_dict(straight.state_dict())
    assert resumed.take(25) == straight.take(25)


def test_epochs_and_seeds_differ_and_index_does_not_move():
    order = PromptOrder(50, 0)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert first != list(range(50))
    assert first != PromptOrder(50, 1).take(50)
    assert [order.index(c) for c in (75, 3, 75)] == [second[25], first[3], second[25]]
    assert order.cursor == 100


def test_endless_rows_come_in_order():
    order = PromptOrder(None, 0)
    assert order.take(3) + order.take(2) == [0, 1, 2, 3, 4]
    assert order.epoch == 0


def test_refusals():
    with pytest.raises(DataError, match="0 rows"):
        PromptOrder(0, 0)
    for other in (PromptOrder(5, 0), PromptOrder(4, 1), PromptOrder(None, 0)):
        with pytest.raises(CheckpointError, match="Prompt order"):
            other.load_state_dict(PromptOrder(4, 0).state_dict())
