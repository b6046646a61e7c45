"""The learning rate, and an update against one written out by hand."""

import itertools
import math

import pytest
import torch

from nearpolicy.methods import method, policy_loss
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.trainer.step import StepOptions, Stepper, learning_rate, score_all
from tests.builders import random_batch


def test_learning_rate_by_hand():
    common = {"peak": 1.0, "steps": 10, "floor": 0.1}
    assert [learning_rate(s, warmup=3, decay="constant", **common) for s in (0, 1, 2, 3, 9)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = [learning_rate(s, warmup=0, decay="linear", **common) for s in range(10)]
    assert (linear[0], linear[-1]) == (1.0, pytest.approx(0.1))
    assert all(a - b == pytest.approx(0.1) for a, b in itertools.pairwise(linear))
    cosine = [learning_rate(s, warmup=0, decay="cosine", **common) for s in range(10)]
    assert cosine[0] == 1.0
    assert cosine[-1] == pytest.approx(0.1)
    assert cosine[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 4 / 9)))
    assert learning_rate(0, warmup=0, decay="linear", peak=1.0, steps=1, floor=0.0) == 1.0


def stepper(token_budget=16384, name="vespo", **options):
    model = tiny_model(seed=1)
    policy = HFPolicy(model, tokenizer=character_tokenizer(), token_budget=token_budget)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    settings = {"grad_clip": None, "kl_coefficient": 0.0, "kl_estimator": "k2", "entropy_coefficient": 0.0} | options
    return Stepper(policy, method(name, **({"max_length": 8} if name == "dr_grpo" else {})), optimizer, StepOptions(**settings), lambda step: 1.0)


def change(s, batch):
    before = [p.detach().clone() for p in s.policy.trainable_parameters()]
    result = s.update(batch, 0)
    return [b - p.detach() for b, p in zip(before, s.policy.trainable_parameters(), strict=True)], result


@pytest.mark.parametrize("name", ["vespo", "grpo", "gspo", "dr_grpo", "topr", "m2po"])
def test_the_update_is_the_gradient_whatever_the_micro_batches(name):
    batch = random_batch(rows=8, group_size=2, seed=2)
    whole, result = change(stepper(name=name), batch)
    split, parts = change(stepper(name=name, token_budget=40), batch)
    scale = max(float(g.abs().max()) for g in whole)
    for a, b in zip(whole, split, strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * scale
    for key, value in result.metrics.items():
        if not key.startswith("time/"):
            assert parts.metrics[key].value == pytest.approx(value.value, rel=1e-3, abs=1e-5), key
    assert torch.allclose(result.weight_BT, parts.weight_BT, atol=1e-5)


def test_kl_and_entropy_enter_the_gradient_by_hand():
    import dataclasses

    batch = random_batch(rows=4, group_size=2, seed=3)
    s = stepper(kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.2)
    reference = score_all(stepper().policy, batch) - 0.1 * batch.response_mask_BT
    batch = dataclasses.replace(batch, logp_reference_BT=reference, logp_behavior_BT=score_all(s.policy, batch))
    got, _ = change(s, batch)
    policy = stepper().policy
    out = policy.score(batch, entropy_grad=True)
    loss = policy_loss("vespo", logp=out.logp_BT, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT, mask=batch.mask_BT).loss
    mask = batch.mask_BT
    kl = (out.logp_BT - reference)[mask].square().mean() / 2
    total = loss + 0.3 * kl - 0.2 * out.entropy_BT[mask].mean()
    want = torch.autograd.grad(total, policy.trainable_parameters())
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5 * float(b.abs().max()) + 1e-7)


def test_clipping_scales_the_whole_gradient():
    batch = random_batch(rows=4, group_size=2, seed=4)
    free, result = change(stepper(), batch)
    norm = result.metrics["train/grad_norm"].value
    clipped, _ = change(stepper(grad_clip=norm / 4), batch)
    for a, b in zip(free, clipped, strict=True):
        assert torch.allclose(a / 4, b, atol=1e-6 * norm)


def test_an_all_masked_batch_changes_nothing_and_is_counted():
    import dataclasses

    batch = random_batch(rows=4, group_size=2, seed=5)
    batch = dataclasses.replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    moved, result = change(stepper(), batch)
    assert all(not m.any() for m in moved)
    assert result.metrics["data/empty_rows"].value == 4
    assert result.metrics["train/grad_norm"].value == 0


def test_rows_without_advantage_are_measured_and_not_differentiated(monkeypatch):
    """Equal rewards give exactly no gradient: the update is the one of the other rows, and the metrics are those of all rows."""
    import dataclasses

    batch = random_batch(rows=8, group_size=2, seed=6)
    advantage = batch.advantage_BT.clone()
    advantage[2:6] = 0
    batch = dataclasses.replace(batch, advantage_BT=advantage)
    s = stepper()
    assert s._with_gradient(batch) == ([0, 1, 6, 7], [2, 3, 4, 5])
    quick, result = change(s, batch)
    slow = stepper()
    monkeypatch.setattr(Stepper, "_with_gradient", lambda self, b: (list(range(len(b))), []))
    full, everything = change(slow, batch)
    scale = max(float(g.abs().max()) for g in full)
    for a, b in zip(quick, full, strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * scale
    for key, value in everything.metrics.items():
        if not key.startswith("time/"):
            assert result.metrics[key].value == pytest.approx(value.value, rel=1e-3, abs=1e-5), key
    monkeypatch.undo()
    assert stepper(entropy_coefficient=0.1)._with_gradient(batch)[1] == []
    assert stepper(name="m2po")._with_gradient(batch)[1] == []


def test_an_update_without_any_signal_still_moves_adams_moments():
    import dataclasses

    batch = random_batch(rows=4, group_size=2, seed=7)
    s = stepper()
    s.optimizer = torch.optim.AdamW(s.policy.trainable_parameters(), lr=0.1, weight_decay=0.0)
    s.update(batch, 0)
    first = s.policy.trainable_parameters()[0].detach().clone()
    s.update(dataclasses.replace(batch, advantage_BT=torch.zeros_like(batch.advantage_BT)), 1)
    assert not torch.equal(first, s.policy.trainable_parameters()[0])
    assert {int(state["step"]) for state in s.optimizer.state.values()} == {2}
