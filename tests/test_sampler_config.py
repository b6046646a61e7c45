"""`sampler.*`: what is refused, what is warned about, and the way from the configuration to an engine."""

import pickle

import numpy as np
import pytest
import torch

from nearpolicy.build import TINY, check, config_for
from nearpolicy.build_sampler import VllmFactory, build_sampler, close, policy_logp, publish, worker_factory
from nearpolicy.check import build_method, refuse
from nearpolicy.errors import EngineError, UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import load_model
from nearpolicy.sampler.factory import TorchFactory
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sampler.vllm_sampler import VllmSampler
from tests.sampler.fake_vllm import FakeVllm

VLLM = ["tiny", "sampler.kind=vllm"]


def warnings_of(*parts):
    config = config_for(parts)
    return refuse(config, build_method(config))


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        (["log.behavior_entropy=true"], r"log\.behavior_entropy: got true with sampler\.kind = vllm; .*no entropies"),
        (["rollout.source=relay", "rollout.cut.kind=top_entropy", "rollout.cut.k=2"], r"rollout\.cut\.kind: got top_entropy"),
        (["schedule.kind=async", "schedule.reuse_kv=true"], r"schedule\.reuse_kv"),
        (["schedule.kind=async", "schedule.workers=2", "sampler.server=http://host:1"], r"2 with one sampler\.server; expected 1"),
    ],
)
def test_what_the_engine_cannot_do(setting, match):
    with pytest.raises(UsageError, match=match) as error:
        warnings_of(*VLLM, *setting)
    assert "\n" not in str(error.value)


def test_keys_of_a_local_engine_with_a_server():
    with pytest.raises(UsageError, match=r"dtype, kv_cache_gb: keys of an engine started here"):
        config_for([*VLLM, "sampler.server=http://host:1", "sampler.dtype=bfloat16", "sampler.kv_cache_gb=2"])
    with pytest.raises(UsageError, match=r"sampler\.kind"):
        config_for(["tiny", "sampler.server=http://host:1"])
    with pytest.raises(UsageError, match="sampler"):
        config_for(["tiny", "sampler.kind=sglang"])


def test_log_probs_taken_as_they_are_are_warned_about():
    assert any("computes otherwise than the trainer" in w for w in warnings_of(*VLLM))
    for deals in ("ratio.denominator=proximal", "method.correction=token_truncate"):
        assert not any("computes otherwise" in w for w in warnings_of(*VLLM, deals))
    assert not any("computes otherwise" in w for w in warnings_of("tiny"))
    # A correction between two engines acts in float32 too.
    assert any("cannot act" in w for w in warnings_of("tiny", "method.correction=token_truncate"))
    assert not any("cannot act" in w for w in warnings_of(*VLLM, "method.correction=token_truncate"))


def test_check_needs_no_engine():
    assert 'kind = "vllm"' in check(config_for([*VLLM, "ratio.denominator=proximal"]))


@pytest.fixture
def policy():
    model, tokenizer = load_model(TINY)
    return HFPolicy(model, tokenizer=tokenizer, dtype="float32", token_budget=4096)


def test_factories_are_picklable(policy):
    config = config_for([*VLLM, "schedule.kind=async", "schedule.worker_threads=3", "task.max_prompt_tokens=40", "rollout.max_tokens=56"])
    factory = worker_factory(config, TINY, policy)
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert isinstance(factory, VllmFactory)
    assert (factory.longest, factory.threads, factory.dtype) == (96, 3, "float32")
    torch_factory = worker_factory(config_for(["tiny", "schedule.kind=async"]), TINY, policy)
    assert isinstance(torch_factory, TorchFactory)


def test_an_asynchronous_run_evaluates_with_the_embedded_sampler(policy):
    config = config_for([*VLLM, "schedule.kind=async"])
    assert isinstance(build_sampler(config, TINY, policy), TorchSampler)


def test_a_response_must_fit_the_model(policy):
    with pytest.raises(UsageError, match=r"rollout\.max_tokens: got 300; expected less than the model's 256"):
        VllmFactory.of(config_for([*VLLM, "rollout.max_tokens=300"]), TINY, policy)


def test_policy_logp_is_the_trainers_own(policy):
    ids = [3, 5, 7, 2, 9]
    with torch.no_grad():
        rows = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    np.testing.assert_allclose(policy_logp(policy, ids), want, atol=1e-5)


@pytest.fixture
def served():
    model, tokenizer = load_model(TINY)
    fake = FakeVllm(model, tokenizer, longest=256)
    yield fake
    fake.close()


def test_a_server_is_published_to_and_compared(served, policy):
    said = []
    config = config_for([*VLLM, f"sampler.server={served.url}"])
    sampler = build_sampler(config, TINY, policy, say=said.append)
    assert isinstance(sampler, VllmSampler)
    assert (sampler.version, served.weight_version) == (0, "0")
    served.seen.clear()
    publish(config, sampler, policy, 0)
    assert served.seen == []  # it holds them
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(1.1)
    publish(config, sampler, policy, 1)
    assert served.paths()[-1] == "/inference/v1/generate"  # the fixed prompt, after the weights
    served.faults["keep_old"] = True
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(1.1)
    with pytest.raises(EngineError, match="acknowledged an update"):
        publish(config, sampler, policy, 2)
    close(sampler)
    close(sampler)
    assert said == []


def test_a_server_that_computes_another_model(served, policy):
    """Digests of packed projections say nothing; the fixed prompt does."""
    served.packed = True
    served.faults["keep_projections"] = True
    with torch.no_grad():
        for name, value in policy.model.named_parameters():
            if "_proj" in name:
                value.mul_(3.0)
    with pytest.raises(EngineError, match="fixed prompt after publishing version 0"):
        build_sampler(config_for([*VLLM, f"sampler.server={served.url}"]), TINY, policy)
    config = config_for([*VLLM, f"sampler.server={served.url}", "sampler.probe=false"])
    close(build_sampler(config, TINY, policy))  # nobody asked
