"""A recording drives the trainer to the same weights, bit for bit; what is damaged, missing or too large is said."""

import numpy as np
import pytest
import torch

from nearpolicy.errors import CheckpointError, DataError
from nearpolicy.methods import method
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.protocols import SamplingParams
from nearpolicy.rollout import Prompt
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sampler.weights import weights_digest
from nearpolicy.schedule.asynchronous import AsyncOptions, AsyncSchedule
from nearpolicy.schedule.local import LocalWorkers
from nearpolicy.schedule.replay import Recorder, ReplaySchedule, batch_file, load_batch, save_batch
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.trainer.step import StepOptions, Stepper
from tests.schedule.asyncs import BASE, Judge, build, gone_on, same, step


def learner():
    policy = HFPolicy(tiny_model(seed=2), tokenizer=character_tokenizer())
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    options = StepOptions(grad_clip=1.0, kl_coefficient=0.0, kl_estimator="k2", entropy_coefficient=0.0)
    return policy, Stepper(policy, method("vespo"), optimizer, options, lambda step: 1e-2)


def lagging(policy):
    """Two workers with weights of their own, groups in flight kept over publications, up to three updates old."""
    params = SamplingParams(max_tokens=10, eos_ids=frozenset({1}), seed=4)
    samplers = [TorchSampler(tiny_model(seed=2), character_tokenizer()) for _ in range(2)]
    return AsyncSchedule(
        AsyncOptions(prompts=2, sync_every=1, max_age=3, over_age="wait", wait_s=20, **BASE),
        workers=LocalWorkers(samplers, capacity=4, in_flight="keep", slice_steps=3), source=FreshSource(samplers[0], params),
        verifier=Judge(lambda item: float(item.completion.count("1"))),
        prompt_at=lambda cursor: Prompt(id=str(cursor), token_P=np.array([3 + cursor % 7, 4, 5 + cursor % 3]), text=""),
        weights=policy.published_weights, annotate=lambda batch: batch,
    )  # fmt: skip


def test_an_asynchronous_run_replayed_gives_the_same_weights(tmp_path):
    policy, stepper = learner()
    schedule = Recorder(lagging(policy), tmp_path, limit_bytes=2**24, say=pytest.fail)
    batches, oldest = [], 0
    for version in range(6):
        batches.append(schedule.next(version))
        oldest = max(oldest, schedule.metrics()["stale/age_max"].value)
        stepper.update(batches[-1], version)
    schedule.close()
    assert oldest >= 1, "the batches depend on what the workers did"
    again, second = learner()
    replay = ReplaySchedule(tmp_path)
    assert replay.updates == 6
    for version, batch in enumerate(batches):
        got = replay.next(version)
        same(got, batch)
        second.update(got, version)
        assert set(replay.metrics()) >= {"stale/age_mean", "stale/age_max"}
    assert replay.tokens_sampled == schedule.tokens_sampled
    assert weights_digest(again.published_weights()) == weights_digest(policy.published_weights())
    with pytest.raises(DataError, match="update 7 of a recording of 6"):
        replay.next(6)


def test_a_batch_survives_with_every_column(tmp_path):
    schedule = build()
    batch = step(schedule, 0)
    import dataclasses

    batch = dataclasses.replace(batch, logp_proximal_BT=torch.randn(batch.token_BT.shape)).recomputed_at(0)
    save_batch(tmp_path / "new" / "batch-000000.npz", batch, tokens_sampled=7)
    got, tokens = load_batch(tmp_path / "new" / "batch-000000.npz")
    assert tokens == 7
    for field in dataclasses.fields(batch):
        a, b = getattr(got, field.name), getattr(batch, field.name)
        assert type(a) is type(b), field.name
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def test_the_recorded_schedule_is_as_it_was(tmp_path):
    schedule, plain = Recorder(build(), tmp_path, limit_bytes=2**24, say=pytest.fail), build()
    for version in range(3):
        schedule.inner.at[0] = version
        same(schedule.next(version), step(plain, version))
        assert schedule.last_scored is schedule.inner.last_scored
        assert schedule.metrics().keys() == plain.metrics().keys()
    assert schedule.tokens_sampled == plain.tokens_sampled
    again = gone_on(schedule, Recorder(build(), tmp_path, limit_bytes=2**24, say=pytest.fail))
    assert again.tokens_sampled == plain.tokens_sampled


def test_a_run_gone_on_with_writes_later_updates_again(tmp_path):
    def recorder(limit=2**24):
        return Recorder(build(), tmp_path, limit_bytes=limit, say=pytest.fail)

    first = recorder()
    for version in range(4):
        step(first.inner, version) if version == 1 else None
        first.inner.at[0] = version
        first.next(version) if version != 1 else None
    names = [p.name for p in sorted(tmp_path.iterdir())]
    assert names == [f"batch-{k:06d}.npz" for k in (0, 2, 3)]
    assert ReplaySchedule(tmp_path).updates == 1, "up to the gap"
    second = recorder()
    second.next(1)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["batch-000000.npz", "batch-000001.npz"]
    assert ReplaySchedule(tmp_path).updates == 2


def test_a_recording_is_bounded_and_says_when_it_is_full(tmp_path):
    said = []
    probe = Recorder(build(), tmp_path / "probe", limit_bytes=2**24, say=said.append)
    probe.next(0)
    size = batch_file(tmp_path / "probe", 0).stat().st_size
    schedule = Recorder(build(), tmp_path / "r", limit_bytes=int(size * 2.5), say=said.append)
    for version in range(5):
        schedule.inner.at[0] = version
        schedule.next(version)
    assert ReplaySchedule(tmp_path / "r").updates == 2
    assert sum(p.stat().st_size for p in (tmp_path / "r").iterdir()) <= size * 2.5
    assert len(said) == 1
    assert "nothing more is recorded" in said[0]


def test_no_recording_a_damaged_one_and_a_full_disk(tmp_path):
    with pytest.raises(DataError, match="no recorded batches"):
        ReplaySchedule(tmp_path)
    path = batch_file(tmp_path, 0)
    save_batch(path, step(build(), 0), tokens_sampled=1)
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", whole[:200] + bytes(50) + whole[250:]):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=r"batch-000000.npz") as error:
            ReplaySchedule(tmp_path).next(0)
        assert "\n" not in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"schedule\.record"):
        save_batch(tmp_path / "file" / "batch-000000.npz", step(build(), 0), tokens_sampled=1)
