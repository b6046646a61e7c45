"""Positions, bins, profiles and cuts."""

import json
from pathlib import Path

import pytest
import torch

from nearpolicy.errors import UsageError
from nearpolicy.objective import position

SCALARS = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]
MASK = torch.tensor([[False, True, True, True, True], [False, False, True, True, False], [False] * 5])


def row(length, columns=30):
    return (torch.arange(columns) < length)[None]


def test_index_counts_response_tokens_from_zero():
    assert position.index(MASK)[0].tolist()[1:] == [0, 1, 2, 3]
    assert position.index(MASK)[1].tolist()[2:4] == [0, 1]
    assert position.relative(MASK).tolist() == [[0, 0, 0.25, 0.5, 0.75], [0, 0, 0, 0.5, 0], [0] * 5]


def test_relayed_marks_the_first_response_tokens():
    marked = position.relayed(MASK, torch.tensor([2, 1, 0]))
    assert marked.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0] * 5]


@pytest.mark.parametrize("length", [3, 7, 10, 25])
def test_bins(length):
    assert position.bins(row(length))[0, :length].tolist() == SCALARS["position_bins"][f"len_{length}"]
    assert position.bins(row(length))[0, length:].tolist() == [-1] * (30 - length)


def test_a_whole_share_is_not_rounded_up():
    lengths = torch.arange(0, 400)
    for tenths in range(1, 11):
        expected = [-((-n * tenths) // 10) for n in lengths.tolist()]  # ceil in whole numbers
        assert position.fraction_count(lengths, tenths / 10).tolist() == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("prefix", [1, 1, 0, 0]), ("suffix", [0, 0, 1, 1]), ("amplify_prefix", [1.5, 1.5, 1, 1])],
)
def test_profiles_on_four_tokens_and_three_tenths(kind, expected):
    out = position.profile(MASK, kind=kind, fraction=0.3)  # ceil(1.2) = 2 tokens
    assert out[0, 1:].tolist() == expected


def test_the_curriculum_grows_from_the_fraction_to_the_whole():
    def amplified(progress, shape):
        return int((position.profile(row(20, 20), kind="curriculum", fraction=0.3, progress=progress, shape=shape) == 1.5).sum())

    assert [amplified(p, "linear") for p in (0.0, 0.5, 1.0)] == [6, 13, 20]
    assert [amplified(p, "cosine") for p in (0.0, 0.5, 1.0)] == [6, 13, 20]
    assert amplified(0.25, "cosine") == 9 < amplified(0.25, "linear") == 10


@pytest.mark.parametrize("length", [int(n) for n in SCALARS["seeds_truncation_round"]["cases"]])
def test_length_cut_rounds_half_to_even(length):
    assert position.length_cut(length, 0.7) == SCALARS["seeds_truncation_round"]["cases"][str(length)]["half_even"]


def test_length_cut_keeps_nothing_and_everything():
    assert (position.length_cut(9, 0.0), position.length_cut(9, 1.0), position.length_cut(0, 0.7)) == (0, 9, 0)
    with pytest.raises(UsageError, match="ratio"):
        position.length_cut(9, 1.1)


def test_entropy_cuts():
    oracle = SCALARS["entropy_truncation"]
    assert position.entropy_cuts(oracle["entropy"], oracle["k"]) == oracle["prefix_lengths_cut_before"]
    assert position.entropy_cuts(oracle["entropy"], oracle["k"], where="after") == oracle["prefix_lengths_cut_after"]
    assert position.entropy_cuts([1.0, 1.0, 1.0], 2) == [0, 1]
    assert position.entropy_cuts([], 2) == []
    assert position.entropy_cuts(torch.tensor([0.5]), 4) == [0]
    with pytest.raises(UsageError, match="k = 0"):
        position.entropy_cuts([1.0], 0)


def test_unknown_profile():
    with pytest.raises(UsageError, match="'middle'"):
        position.profile(MASK, kind="middle", fraction=0.3)
