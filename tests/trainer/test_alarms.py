"""Alarms fire once, name the step, and fire before the reward falls."""

import math

import torch

from nearpolicy.trainer.alarms import Alarms, Band


def test_a_bandit_where_one_token_wins_alarms_before_the_reward_falls():
    """Exact policy gradient on a 4-armed bandit whose best-looking arm turns bad once it is all that is played: the entropy alarm comes first."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    alarms, rewards, fired = Alarms(), [], None
    for step in range(1, 400):
        p = torch.softmax(logits, 0)
        worth = torch.tensor([1.0 if p[0] < 0.995 else -1.0, 0.2, 0.2, 0.2], dtype=torch.float64)
        reward = p @ worth
        (gradient,) = torch.autograd.grad(reward, logits)
        rewards.append(reward.item())
        entropy = -(p * p.log()).sum().item()
        if fired is None and (news := alarms.watch(step, {"policy/entropy": entropy})):
            fired = news[0].step
            assert f"at step {step}" in news[0].message
        if rewards[-1] < max(rewards) - 0.3:
            break
        with torch.no_grad():
            logits += 0.5 * gradient
    assert fired is not None
    assert fired < step


def test_fires_once_until_the_band_is_entered_again():
    alarms = Alarms((Band(metric="x", low=1.0),))
    heard = [len(alarms.watch(i, {"x": v})) for i, v in enumerate([2, 0.5, 0.4, 2, 0.5])]
    assert heard == [0, 1, 0, 0, 1]


def test_patience_waits_for_values_in_a_row():
    alarms = Alarms((Band(metric="x", low=1.0, patience=3),))
    heard = [len(alarms.watch(i, {"x": v})) for i, v in enumerate([0, 0, 2, 0, 0, 0, 0])]
    assert heard == [0, 0, 0, 0, 0, 1, 0]


def test_relative_bounds_settle_first_and_missing_values_are_no_news():
    alarms = Alarms((Band(metric="x", relative_high=2.0, settle=3),))
    assert [len(alarms.watch(i, {"x": v})) for i, v in enumerate([1, 100, 1])] == [0, 0, 0]
    assert alarms.watch(4, {"x": math.nan}) == []
    assert alarms.watch(4, {}) == []
    assert len(alarms.watch(5, {"x": 2.1})) == 1


def test_state_comes_back():
    alarms = Alarms((Band(metric="x", low=1.0), Band(metric="y", relative_low=0.5, settle=2)))
    for i in range(3):
        alarms.watch(i, {"x": 0.0, "y": 1.0})
    other = Alarms(alarms.bands)
    other.load_state_dict(alarms.state_dict())
    assert other.watch(9, {"x": 0.0, "y": 0.4})[0].metric == "y"
