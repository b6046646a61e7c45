"""What trainer and engine differ by: by hand, on the right tokens, merged exactly, and in a run's own update."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.diagnostics.mismatch import REFUSE_KL, WARN_KL, age_zero, mismatch_metrics
from nearpolicy.diagnostics.position import NAME
from nearpolicy.methods import method
from nearpolicy.metrics import MISMATCH_EDGES, TABLE, merge, to_floats
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.trainer.step import StepOptions, Stepper, score_all
from tests.builders import random_batch

F64 = torch.float64


def test_by_hand():
    trainer = torch.tensor([[-1.0, -2.0, -3.0, 7.0]], dtype=F64)
    engine = torch.tensor([[-1.5, -2.0, -2.0, 0.0]], dtype=F64)
    where = torch.tensor([[True, True, True, False]])
    d = (0.5, 0.0, -1.0)
    got = mismatch_metrics(trainer, engine, where)
    assert got["mismatch/tokens"].value == 3
    assert got["mismatch/abs_mean"].value == 0.5
    assert got["mismatch/kl_k1"].value == pytest.approx(0.5 / 3, rel=1e-15)
    assert got["mismatch/kl_k3"].value == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3, rel=1e-14)
    assert got["mismatch/ratio_max"].value == pytest.approx(math.e, rel=1e-15)  # the engine's is e times the trainer's


def test_k3_of_a_distribution_is_its_kl():
    """Over the engine's own distribution, k1 and k3 both average to KL(engine || trainer) exactly."""
    engine = torch.tensor([0.5, 0.25, 0.25], dtype=F64).log()
    trainer = torch.tensor([0.2, 0.3, 0.5], dtype=F64).log()
    kl = float((engine.exp() * (engine - trainer)).sum())
    parts = dict.fromkeys(("mismatch/kl_k1", "mismatch/kl_k3"), 0.0)
    for token in range(3):
        got = mismatch_metrics(trainer[None, token : token + 1], engine[None, token : token + 1], torch.ones(1, 1, dtype=torch.bool))
        for name in parts:
            parts[name] += float(engine[token].exp()) * got[name].value
    assert parts["mismatch/kl_k1"] == pytest.approx(kl, rel=1e-12)
    assert parts["mismatch/kl_k3"] == pytest.approx(kl, rel=1e-12)


def test_the_quantiles_are_those_of_the_sizes():
    """99 tokens off by 1e-4 (inside one bin of an eighth of a decade) and two by 1: p50 lies in the first bin, p99 in the other's."""
    d = torch.cat([torch.full((99,), 1e-4), torch.tensor([1.0, -1.0])]).double()
    floats = to_floats(mismatch_metrics(d[None], torch.zeros(1, 101, dtype=F64), torch.ones(1, 101, dtype=torch.bool)), counts=False)
    width = 10 ** (1 / 8)
    assert 1e-4 / width <= floats["mismatch/abs/p50"] <= 1e-4 * width
    assert 1 / width <= floats["mismatch/abs/p99"] <= width
    assert MISMATCH_EDGES[0] == 0.0
    assert list(MISMATCH_EDGES) == sorted(set(MISMATCH_EDGES))


def test_nothing_measured_is_missing_and_not_zero():
    none = torch.zeros(2, 3, dtype=torch.bool)
    got = to_floats(mismatch_metrics(torch.zeros(2, 3), torch.zeros(2, 3), none), counts=False)
    assert got.pop("mismatch/tokens") == 0
    assert all(math.isnan(v) for v in got.values())


def test_a_token_that_the_trainer_finds_impossible_is_counted_and_finite():
    got = mismatch_metrics(torch.tensor([[-1e4]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert got["mismatch/abs_mean"].value == 1e4
    assert got["mismatch/kl_k3"].value == pytest.approx(1e4 - 1)
    assert got["mismatch/ratio_max"].value == pytest.approx(math.exp(20))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_parts_merge_to_the_whole(seed, split):
    generator = torch.Generator().manual_seed(seed)
    trainer, engine = torch.randn(6, 5, generator=generator, dtype=F64), torch.randn(6, 5, generator=generator, dtype=F64)
    where = torch.rand(6, 5, generator=generator) < 0.6
    parts = []
    for part in range(3):
        rows = [b for b in range(6) if split[b] == part]
        if rows:
            parts.append(mismatch_metrics(trainer[rows], engine[rows], where[rows]))
    whole, merged = to_floats(mismatch_metrics(trainer, engine, where)), to_floats(merge(parts))
    assert set(whole) == set(merged)
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name


def test_every_name_is_in_the_table():
    names = set(mismatch_metrics(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)))
    assert names == {name for name in TABLE if name.startswith("mismatch/")}
    assert 0 < WARN_KL < REFUSE_KL


def test_age_zero_is_the_version_of_the_weights_and_nothing_else():
    batch = random_batch(rows=4, group_size=2, seed=1)
    version = torch.where(batch.response_mask_BT, torch.where(batch.position_BT < 2, 3, 5), -1)
    batch = replace(batch, version_BT=version, mask_BT=batch.response_mask_BT & (torch.arange(4)[:, None] > 0))
    late = batch.response_mask_BT & (batch.position_BT >= 2)
    assert torch.equal(age_zero(batch, 5), late)
    assert torch.equal(age_zero(batch, 5, within_BT=batch.mask_BT), late & batch.mask_BT)
    assert not age_zero(batch, 4).any()
    assert not (age_zero(batch, 0) | age_zero(batch, 5))[:, 0].any()  # neither prompt nor padding, whose version is -1


def stepper(**options):
    policy = HFPolicy(tiny_model(seed=1), tokenizer=character_tokenizer(), token_budget=options.pop("token_budget", 16384))
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    settings = StepOptions(grad_clip=None, kl_coefficient=0.0, kl_estimator="k2", entropy_coefficient=0.0)
    return Stepper(policy, method("grpo"), optimizer, settings, lambda step: 1.0)


@pytest.mark.parametrize("token_budget", [16384, 40])
def test_the_update_measures_it_before_any_weight_moves(token_budget):
    """The engine's log-probs are the trainer's own plus 0.25 on even tokens: exactly that is found, although the update then moves the weights."""
    s = stepper(token_budget=token_budget)
    batch = random_batch(rows=8, group_size=2, seed=2)
    off = 0.25 * (batch.position_BT % 2 == 0) * batch.response_mask_BT
    batch = replace(batch, logp_behavior_BT=score_all(s.policy, batch) + off)
    metrics = s.update(batch, 0).metrics
    even = float((off > 0).sum() / batch.response_mask_BT.sum())
    assert metrics["mismatch/abs_mean"].value == pytest.approx(0.25 * even, abs=1e-6)
    assert metrics["mismatch/kl_k1"].value == pytest.approx(0.25 * even, abs=1e-6)
    assert metrics["mismatch/kl_k3"].value == pytest.approx(even * (math.exp(-0.25) - 1 + 0.25), abs=1e-6)
    assert metrics["mismatch/ratio_max"].value == pytest.approx(math.exp(0.25), rel=1e-5)
    assert metrics["mismatch/tokens"].value == batch.num_tokens
    columns = metrics[NAME].columns()
    one_token = batch.response_mask_BT & (batch.position_BT == 0)
    assert columns["mismatch/abs"][0] == pytest.approx(0.25, abs=1e-6)  # token 0 is even, token 1 odd
    assert columns["mismatch/abs"][1] == pytest.approx(0.0, abs=1e-6)
    assert int(one_token.sum()) == 8
    assert columns["mismatch_kl/abs"][0] == pytest.approx(math.exp(-0.25) - 0.75, abs=1e-6)
    assert len(columns["mismatch/rel"]) == 10


def test_older_tokens_are_not_measured():
    s = stepper()
    batch = random_batch(rows=4, group_size=2, seed=3)
    drifted = torch.where(batch.position_BT < 3, -50.0, score_all(s.policy, batch))
    version = torch.where(batch.response_mask_BT, torch.where(batch.position_BT < 3, 6, 7), -1)
    metrics = s.update(replace(batch, logp_behavior_BT=drifted * batch.response_mask_BT, version_BT=version), 7).metrics
    assert metrics["mismatch/abs_mean"].value < 1e-5
    assert metrics["mismatch/tokens"].value == int((batch.mask_BT & (batch.position_BT >= 3)).sum())
    columns = metrics[NAME].columns()
    assert math.isnan(columns["mismatch/abs"][0])  # token 0 was written by version 6 everywhere: missing, not 0


def test_an_update_on_older_tokens_alone_says_nothing():
    metrics = stepper().update(random_batch(rows=4, group_size=2, seed=4), 1).metrics
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert "mismatch/rel" not in metrics[NAME].columns()
