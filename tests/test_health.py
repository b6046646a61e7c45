"""The health check: an engine that agrees passes; each fault that can hide behind a mismatch is found and named, and nothing is written."""

import copy
import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from nearpolicy import build
from nearpolicy.build import assemble, config_for, model_folder
from nearpolicy.cli import cli
from nearpolicy.diagnostics.mismatch import REFUSE_KL, WARN_KL
from nearpolicy.errors import DataError
from nearpolicy.health import examine, follows
from nearpolicy.methods import method
from nearpolicy.rollout import StopReason
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sampler.weights import weights_digest

SMALL = ["tiny", "device=cpu", "threads=1", "task.heldout=0", "rollout.prompts=12", "rollout.group_size=4"]


@pytest.fixture(scope="module")
def parts():
    with assemble(config_for(SMALL), model_folder("tiny"), say=lambda text: None) as made:
        made.publish(1)
        yield made


class Engine:
    """An engine that changes what the honest one was asked, or what it answered."""

    def __init__(self, honest, asks=lambda params: params, answers=lambda rollout: rollout):
        self.honest, self.asks, self.answers, self.version = honest, asks, answers, honest.version

    def sample(self, requests, n, params):
        return [self.answers(r) for r in self.honest.sample(requests, n, self.asks(params))]


def found(parts, engine, *, temperature=1.0, name="vespo", **options):
    prompts = [parts.prompts.at(i) for i in range(12)]
    params = dataclasses.replace(parts.params, temperature=temperature)
    return examine(parts.policy, engine, method(name, **options), prompts, params, n=4)


def column(**columns):
    return lambda r: replace(r, **{name: made(r) for name, made in columns.items()})


def test_the_trainer_s_own_sampler_is_healthy(parts):
    health = found(parts, parts.sampler)
    assert health.faults == []
    assert health.warnings == []
    assert health.responses == 48
    assert health.values["mismatch/abs_mean"] < 1e-5
    assert health.values["mismatch/kl_k3"] < 1e-9
    assert health.repeat < 1e-4
    assert health.weight_at_one == (1.0, 1.0)
    assert health.weight[0] == pytest.approx(1, abs=1e-3)
    assert health.ess == pytest.approx(1, abs=1e-6)
    assert len(health.by_position) == 10
    assert health.lines()[-1].startswith("verdict: healthy")


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "topr", "m2po", "gmpo", "cispo", "iw_opd", "exopd", "luffy"])
def test_every_weight_is_one_at_age_zero(parts, name):
    health = found(parts, parts.sampler, name=name)
    assert health.weight_at_one == pytest.approx((1, 1), abs=1e-6)
    assert health.faults == []


def test_options_that_cut_every_weight_are_named(parts):
    health = found(parts, parts.sampler, name="cispo", cap=0.2)
    assert health.weight_at_one == pytest.approx((0.2, 0.2))
    assert health.faults == ["cispo: weights from 0.2 to 0.2 where every ratio is 1: its options cut them"]


@pytest.mark.parametrize(("asked", "applied"), [(1.0, 0.6), (1.0, 1.4), (0.7, 1.0)])
def test_another_temperature_is_found_and_its_value_named(parts, asked, applied):
    """The engine samples at its own temperature, gives log-probs of that, and says what it was asked for."""
    engine = Engine(parts.sampler, asks=lambda p: dataclasses.replace(p, temperature=applied), answers=column(temperature=lambda r: asked))
    (fault,) = found(parts, engine, temperature=asked).faults
    assert fault.startswith(f"temperature: the engine's log-probs are those at {applied:g}")
    assert ("raw logits" in fault) == (applied == 1.0)
    assert fault.endswith(f"the run's temperature is {asked:g}")


def test_an_engine_that_admits_its_temperature_is_named_too(parts):
    engine = Engine(parts.sampler, asks=lambda p: dataclasses.replace(p, temperature=0.6))
    faults = found(parts, engine).faults
    assert faults[0] == "temperature: responses sampled at 0.6, the run's is 1"


@pytest.mark.parametrize(("shift", "whose"), [(1, "the token before it"), (-1, "the token after it")])
def test_log_probs_shifted_by_one_are_found(parts, shift, whose):
    engine = Engine(parts.sampler, answers=column(logp_behavior_T=lambda r: np.roll(r.logp_behavior_T, shift)))
    (fault,) = found(parts, engine).faults
    assert fault == f"shifted by one: the engine's log-prob of a token is that of {whose}"


def noisy(parts, share):
    model = copy.deepcopy(parts.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.add_(share * p.std() * torch.randn(p.shape, generator=generator))
    engine = TorchSampler(model, parts.tokenizer)
    engine.version = 1  # it acknowledged the update
    return engine


def test_other_weights_are_found(parts):
    health = found(parts, noisy(parts, 0.5))
    assert health.values["mismatch/kl_k3"] > REFUSE_KL
    (fault,) = health.faults
    assert "other weights" in fault
    assert health.lines()[-1].startswith("verdict: refused")


def test_weights_that_are_a_little_off_are_warned_about(parts):
    health = found(parts, noisy(parts, 0.17))
    assert WARN_KL < health.values["mismatch/kl_k3"] < REFUSE_KL
    assert health.faults == []
    (warning,) = health.warnings
    assert "correction" in warning
    assert health.lines()[-1].startswith("verdict: usable with care")


class Stale(Engine):
    """An engine that acknowledges an update and keeps old weights."""

    def load(self, weights, version):
        self.version = version


def test_an_engine_that_keeps_old_weights_is_found_and_an_honest_one_is_left_as_it_was(parts):
    before = weights_digest(parts.policy.published_weights())
    prompt = parts.prompts.at(0)
    assert not follows(Stale(parts.sampler), parts.policy.published_weights(), prompt, parts.params)
    assert follows(parts.sampler, parts.policy.published_weights(), prompt, parts.params)
    assert weights_digest(parts.policy.published_weights()) == before  # they are the trainer's own tensors
    assert parts.sampler.version == 1
    apart = TorchSampler(copy.deepcopy(parts.model), parts.tokenizer, dtype=torch.bfloat16)
    apart.load(parts.policy.published_weights(), 1)
    held = apart.digest()
    assert follows(apart, parts.policy.published_weights(), prompt, parts.params)
    assert apart.digest() == held


def test_bfloat16_is_a_difference_and_no_fault(parts):
    engine = TorchSampler(copy.deepcopy(parts.model), parts.tokenizer, dtype=torch.bfloat16)
    engine.load(parts.policy.published_weights(), 1)
    health = found(parts, engine)
    assert health.faults == []
    assert 1e-4 < health.values["mismatch/abs_mean"] < 0.1
    assert health.values["mismatch/kl_k3"] < REFUSE_KL


def test_tokens_drawn_at_another_temperature_than_reported_are_found(parts):
    """The log-probs are right for the run's temperature, so no mismatch shows: but the tokens are too likely."""

    def relabelled(rollout):
        return replace(rollout, temperature=1.0, logp_behavior_T=next(honest))

    cold = parts.sampler.sample(
        [build_request(parts, i) for i in range(12)], 4, dataclasses.replace(parts.params, temperature=0.5)
    )  # fmt: skip
    honest = iter(rescored(parts, cold))
    engine = Engine(parts.sampler, asks=lambda p: dataclasses.replace(p, temperature=0.5), answers=relabelled)
    health = found(parts, engine)
    assert health.values["mismatch/abs_mean"] < 1e-5
    (fault,) = health.faults
    assert fault.startswith("sampling: the tokens drawn are likelier than the reported distribution has them")


def build_request(parts, i):
    from nearpolicy.protocols import Request

    return Request(ticket=i, prompt=parts.prompts.at(i))


def rescored(parts, rollouts):
    from nearpolicy.rollout import Outcome, Score, Scored, collate
    from nearpolicy.trainer.step import score_all

    unscored = Score(reward=math.nan, outcome=Outcome.ABSTAIN)
    batch = collate([Scored(rollout=replace(r, temperature=1.0), score=unscored) for r in rollouts], advantage_B=[0.0] * len(rollouts))
    logp = score_all(parts.policy, batch)
    return [logp[b][batch.response_mask_BT[b]].numpy() for b in range(len(rollouts))]


def without_last(r):
    if r.stop is not StopReason.EOS:
        return r
    return replace(r, response_T=r.response_T[:-1], logp_behavior_T=r.logp_behavior_T[:-1], version_T=r.version_T[:-1])


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (without_last, "ended by one do not contain it"),
        (lambda r: replace(r, stop=StopReason.LENGTH), "end in one and are called truncated"),
        (lambda r: replace(r, stop=StopReason.LENGTH), "are called truncated with fewer than"),
        (lambda r: replace(r, version_T=r.version_T - 1), "version: tokens of version 0 from an engine that holds version 1"),
    ],
)
def test_ends_and_versions_are_checked(parts, answers, says):
    assert any(says in fault for fault in found(parts, Engine(parts.sampler, answers=answers)).faults)


def test_an_engine_that_goes_on_after_the_end_is_named(parts):
    eos = next(iter(parts.params.eos_ids))

    def doubled(r):
        if r.stop is not StopReason.EOS:
            return r
        again = {"response_T": np.append(r.response_T, eos), "logp_behavior_T": np.append(r.logp_behavior_T, np.float32(-1.0))}
        return replace(r, version_T=np.append(r.version_T, r.version_T[-1]), **again)

    assert any("went on after an end-of-sequence token" in fault for fault in found(parts, Engine(parts.sampler, answers=doubled)).faults)


def test_a_missing_log_prob_is_an_error_and_no_figure(parts):
    engine = Engine(parts.sampler, answers=column(logp_behavior_T=lambda r: np.full_like(r.logp_behavior_T, np.nan)))
    with pytest.raises(DataError, match="finite log-probs"):
        found(parts, engine)


def test_the_command_says_it_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["health", *SMALL, "--prompts", "4"])
    assert result.exit_code == 0, result.output
    assert "verdict: healthy" in result.output
    assert "16 responses" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (lambda r: np.roll(r.logp_behavior_T, 1), "shifted by one"),
        (lambda r: r.logp_behavior_T, "update: the engine acknowledged"),
    ],
)
def test_the_command_fails_on_a_fault(tmp_path, monkeypatch, answers, says):
    monkeypatch.chdir(tmp_path)
    real = build.build_sampler
    said = column(logp_behavior_T=answers, version_T=lambda r: np.ones_like(r.version_T))  # it says that it holds what it was handed
    monkeypatch.setattr(build, "build_sampler", lambda *args, **kwargs: Stale(real(*args, **kwargs), answers=said))
    result = CliRunner().invoke(cli, ["health", *SMALL, "--prompts", "4"])
    assert result.exit_code == 1, result.output
    assert f"fault: {says}" in result.output
    assert f"error: health: got {says}" in result.output
    assert list(tmp_path.iterdir()) == []
