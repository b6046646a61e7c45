"""The continuation gap on table models whose success from every prefix is known."""

import math

import numpy as np
import pytest
import torch

from nearpolicy.errors import UsageError
from nearpolicy.protocols import SamplingParams
from nearpolicy.rollout import Outcome, Prompt, Score
from nearpolicy.teacher_jobs import parse_fractions
from nearpolicy.testing.fakes import FakeSampler
from nearpolicy.trainer.continuation import Gap, continuation_gap

A, B, END = 1, 2, 0
PROMPTS = [Prompt(id=str(i), token_P=np.array([A]), text="") for i in range(40)]
PARAMS = SamplingParams(max_tokens=4, eos_ids=frozenset({END}))


def table(slip):
    """Writes `a` forever, and slips into `b` (from which nothing returns) with this probability at each token."""
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1 - slip, slip], [0.0, 0.0, 1.0]])
    return p.log()


class AllA:
    """Right when no `b` was written; every 7th response is not scored where `holes`."""

    def __init__(self, holes=False):
        self.holes = holes

    def score(self, items):
        return [
            Score(reward=math.nan, outcome=Outcome.ABSTAIN) if self.holes and i % 7 == 0
            else Score(reward=float(item.completion == "bbbb"), outcome=Outcome.SCORE)
            for i, item in enumerate(items)
        ]  # fmt: skip

    def close(self):
        pass


def measure(student, teacher, fractions, n=50, **kwargs):
    return continuation_gap(FakeSampler(student), FakeSampler(teacher), AllA(**kwargs), PROMPTS, PARAMS, fractions=fractions, n=n)


def test_success_by_fraction_is_the_known_one():
    """Four tokens, the student slips with 0.2 at each, the teacher never: from a prefix of k the teacher succeeds with 0.8^k, the student 0.8^4."""
    rows = measure(table(0.2), table(0.0), (0.0, 0.25, 0.5, 0.75, 1.0)).values()
    for k, row in enumerate(rows):
        assert row["teacher"][0] == pytest.approx(0.8**k, abs=0.03), k
        assert row["student"][0] == pytest.approx(0.8**4, abs=0.03), k
        assert row["gap"][0] == pytest.approx(row["teacher"][0] - row["student"][0], abs=1e-12)
        assert row["gap"][1] <= row["gap"][0] <= row["gap"][2]
        assert row["prompts"] == 40
    assert rows[-1]["gap"] == [0.0, 0.0, 0.0]  # nothing is left to write


def test_equal_models_have_no_gap_at_all_because_the_noise_is_shared():
    for row in measure(table(0.3), table(0.3), (0.0, 0.5)).values():
        assert row["gap"] == [0.0, 0.0, 0.0]
        assert 0 < row["student"][0] < 1


def test_unscored_responses_leave_both_sides():
    row = measure(table(0.2), table(0.0), (0.5,), holes=True).values()[0]
    assert row["gap"][0] == pytest.approx(row["teacher"][0] - row["student"][0], abs=1e-12)
    nothing = Gap(fractions=(0.5,), student_FPN=np.full((1, 2, 3), np.nan), teacher_FPN=np.ones((1, 2, 3)))
    assert nothing.values() == [{"fraction": 0.5, "prompts": 0, "student": [None] * 3, "teacher": [None] * 3, "gap": [None] * 3}]


def test_fractions_are_read_as_written():
    assert parse_fractions("0.5") == [0.5]
    assert parse_fractions("0.1,...,0.9") == pytest.approx([k / 10 for k in range(1, 10)])
    assert parse_fractions("0, 0.25, ..., 1") == [0.0, 0.25, 0.5, 0.75, 1.0]
    for bad in ("", "x", "0.1,1.5", "...", "0.1,...", "0,...,1", "0.1,...,0.95", "0.9,...,0.1", "0.001,...,0.9", "nan"):
        with pytest.raises(UsageError, match="--fractions"):
            parse_fractions(bad)


def test_nothing_to_measure_is_refused():
    with pytest.raises(UsageError, match="0 prompts"):
        continuation_gap(FakeSampler(table(0.1)), FakeSampler(table(0.1)), AllA(), [], PARAMS, fractions=(0.5,), n=1)
    with pytest.raises(UsageError, match="fractions"):
        measure(table(0.1), table(0.1), (1.5,))
