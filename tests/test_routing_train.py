"""Routing replay in whole runs and configurations; the mismatch that it takes away, measured on the shipped mixture of experts."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from nearpolicy import build
from nearpolicy.build import DATA, check, config_for, train
from nearpolicy.check import build_method, refuse
from nearpolicy.check_routing import Experts, experts_in
from nearpolicy.errors import DataError, NearPolicyError, UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import load_model
from nearpolicy.policy.routing import NOT_RECORDED
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.records import join_arrays, pack, split_arrays, unpack
from nearpolicy.rollout import Batch, Outcome, Prompt, Rollout, Score, Scored, StopReason, collate
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.tasks.arithmetic import ArithmeticTask
from nearpolicy.trainer.step import score_recorded, score_trained

SMALL = ["moe-tiny", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=24", "schedule.updates_per_rollout=4", "train.steps=6",
         "train.lr=1e-3", "task.heldout=0", "log.rollouts_every=0", "threads=1", "model.dtype=float32", "checkpoint.every=3"]  # fmt: skip


class InProcess:
    """The reward pool's place without its start-up time; a reward that differs inside groups."""

    def __init__(self, reward, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def score(self, items):
        return [Score(reward=0.1 * i.completion.count("1"), outcome=Outcome.SCORE) for i in items]


@pytest.fixture(scope="module", autouse=True)
def in_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "RewardPool", InProcess)
        yield


def run(out, *more, resume=False):
    train(config_for([*SMALL, *more]), out, resume=resume, report=False, say=lambda _: None)
    return (out / "checkpoints" / "step-000006" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Final weights by replay, with a noisy sampler."""
    folder = tmp_path_factory.mktemp("runs")
    return {replay: run(folder / replay, f"routing.replay={replay}", "routing.sampler_noise=0.2") for replay in ("off", "r2", "r3")}


def test_the_three_ways_differ(runs):
    assert len(set(runs.values())) == 3


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_resume_in_the_middle_of_a_rollout_batch_is_exact(runs, replay, tmp_path):
    # The checkpoint after update 3 holds the rest of a batch of four updates, with its experts.
    options = (f"routing.replay={replay}", "routing.sampler_noise=0.2")
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "run", *options, "train.steps=3")
    assert run(tmp_path / "run", *options, resume=True) == runs[replay]


def test_r2_replays_what_the_first_update_chose(tmp_path, monkeypatch):
    seen = []
    score = HFPolicy.score

    def watched(self, batch, **options):
        if self.replays_routes and torch.is_grad_enabled():
            seen.append(batch.routes is not None and bool((batch.routes != NOT_RECORDED).any()))
        return score(self, batch, **options)

    monkeypatch.setattr(HFPolicy, "score", watched)
    run(tmp_path / "run")
    assert len(seen) >= 4  # a mini-batch without a signal needs no gradient
    assert all(seen)


def test_r3_with_relayed_prefixes_and_a_proximal_denominator(tmp_path):
    more = ["rollout.source=relay", "rollout.refresh=2", "routing.replay=r3", "ratio.denominator=proximal", "schedule.updates_per_rollout=2"]
    assert run(tmp_path / "run", *more)


def test_r2_with_masked_rows_and_a_proximal_denominator(tmp_path):
    assert run(tmp_path / "run", "rollout.mask_truncated=true", "ratio.denominator=proximal", "method.name=grpo", "rollout.max_tokens=56")


def test_recording_of_rows_that_are_not_trained():
    model, _ = load_model(DATA / "tiny_moe")
    policy = HFPolicy(model, dtype="float32", routing_replay=True)
    rollouts = [rollout(i, response) for i, response in enumerate((5, 1, 9))]
    batch = collate([scored(r) for r in rollouts], advantage_B=[1.0, 1.0, 1.0], train_B=[True, False, True])
    logp, recorded = score_recorded(policy, batch)
    assert (logp[1] == 0).all()
    assert ((recorded.routes != NOT_RECORDED).all(-1).all(-1).sum(1) == torch.tensor([7, 3, 11])).all()
    assert torch.equal(score_trained(policy, recorded), logp)


# --- data ---------------------------------------------------------------------------------------------------------------------------------------


def rollout(group=0, response=4, prompt=3, **changes):
    rng = np.random.default_rng(group)
    own = {
        "prompt_id": "p", "group": group, "sample": 0, "prompt_P": rng.integers(3, 32, prompt), "response_T": rng.integers(3, 32, response),
        "logp_behavior_T": np.zeros(response, np.float32), "version_T": np.zeros(response, np.int64), "stop": StopReason.EOS,
    }  # fmt: skip
    return Rollout(**{**own, **changes})


def scored(r):
    return Scored(rollout=r, score=Score(reward=0.0, outcome=Outcome.SCORE))


def routes(tokens=6, layers=2, k=2, low=0):
    return np.random.default_rng(tokens).integers(low, 8, (tokens, layers, k)).astype(np.int16)


@pytest.mark.parametrize(("wrong", "message"), [
    (routes(7), r"int16 \(7, 2, 2\) for 3 prompt and 4 response tokens; expected int16 \(6, layers, experts a token\)"),
    (routes(5), r"\(5, 2, 2\)"), (routes()[..., 0], r"\(6, 2\)"), (routes().astype(np.int64), "int64"), (routes() - 8, "at context token 0"),
])  # fmt: skip
def test_rollouts_refuse_records_of_the_wrong_length_or_kind(wrong, message):
    with pytest.raises(DataError, match=message):
        rollout(routes=wrong)


def test_batches_carry_routes_through_rows_and_records():
    first, second = rollout(0, 4, routes=routes(6)), rollout(1, 2, 1, routes=routes(2))
    batch = collate([scored(first), scored(second)], advantage_B=[1.0, -1.0])
    assert batch.routes.shape == (2, 7, 2, 2)
    assert batch.routes.dtype == torch.int16
    assert batch.routes[0, :6].tolist() == first.routes.tolist()
    assert batch.routes[1, :2].tolist() == second.routes.tolist()
    assert (batch.routes[1, 2:] == NOT_RECORDED).all()
    assert (batch.routes[0, 6:] == NOT_RECORDED).all()
    assert batch.rows([1]).routes.tolist() == batch.routes[1:, :3].tolist()
    for value in (batch, scored(first)):
        tree, arrays = split_arrays(pack(value))
        back = unpack(type(value), join_arrays(json.loads(json.dumps(tree)), arrays))
        kept = back.routes if isinstance(back, Batch) else back.rollout.routes
        assert kept.tolist() == (value.routes if isinstance(value, Batch) else first.routes).tolist()


def test_records_from_before_routes_are_read():
    tree = pack(rollout())
    del tree["routes"]
    assert unpack(Rollout, tree).routes is None
    del tree["stop"]
    with pytest.raises(KeyError):
        unpack(Rollout, tree)


@pytest.mark.parametrize("other", [rollout(1), rollout(1, routes=routes(6, layers=3)), rollout(1, routes=routes(6, k=1))])
def test_rows_of_a_batch_have_routes_alike(other):
    with pytest.raises(DataError, match="collate: routes"):
        collate([scored(rollout(routes=routes())), scored(other)], advantage_B=[0.0, 0.0])


# --- configuration ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "message"), [
    (["moe-tiny", "schedule.updates_per_rollout=1"], r"r2 with one update for each rollout batch .*raise schedule\.updates_per_rollout"),
    (["moe-tiny", "routing.replay=r3", "rollout.demonstrations.per_group=1", "method.name=luffy"], r"r3 with rollout\.demonstrations"),
    (["moe-tiny", "schedule.kind=async", "routing.replay=r3", "schedule.reuse_kv=true"], r"r3 with schedule\.reuse_kv"),
    (["moe-tiny", "schedule.kind=async", "routing.replay=off", "routing.sampler_noise=0.1", "schedule.reuse_kv=true"], r"sampler_noise: got 0\.1"),
    (["moe-tiny", "schedule.kind=async"], r"schedule\.kind = async"),
    (["moe-tiny", "sampler.kind=vllm", "routing.replay=r3"], r"r3 with sampler\.kind = vllm.*r2 records in the trainer"),
    (["moe-tiny", "sampler.kind=vllm", "routing.sampler_noise=0.1"], r"routing\.sampler_noise: got 0\.1 with sampler\.kind = vllm"),
])  # fmt: skip
def test_replay_that_cannot_act_is_refused(parts, message):
    config = config_for(parts)
    with pytest.raises(UsageError, match=message):
        refuse(config, build_method(config))


@pytest.mark.parametrize(("option", "shown"), [("routing.replay=r2", "routing.replay = r2"), ("routing.sampler_noise=0.1", "sampler_noise = 0.1")])
@pytest.mark.parametrize("start", [check, lambda config: train(config, "never-made", say=lambda _: None)])
def test_a_model_without_experts_is_refused_before_anything_is_made(option, shown, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NearPolicyError, match=f"a model without experts with {re.escape(option.split('=')[0])}"):
        start(config_for(["tiny", option]))
    assert not list(tmp_path.iterdir())


def test_check_says_what_the_records_take():
    wanted = "routing records: 2 layers x 2 of 8 experts x 2 bytes = 8 bytes a context token; at most 0.4 MiB for a rollout batch of 512 responses"
    assert wanted in check(config_for(["moe-tiny", "task.max_prompt_tokens=40"]))
    assert "routing records" not in check(config_for(["moe-tiny", "routing.replay=off"]))
    noisy = config_for(["moe-tiny", "routing.sampler_noise=0.1"])
    assert any("made worse on purpose" in w for w in refuse(noisy, build_method(noisy)))


@pytest.mark.parametrize(("document", "found"), [
    ({"num_hidden_layers": 3, "num_experts": 128, "num_experts_per_tok": 8}, Experts(3, 128, 8)),
    ({"num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, Experts(1, 4, 2)),
    ({"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}, Experts(4, 8, 2)),
    ({"num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1}, Experts(3, 16, 4)),
    ({"text_config": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 1}}, Experts(2, 4, 1)),
    ({"num_hidden_layers": 4, "num_experts": 0}, None), ({"num_hidden_layers": 4}, None),
])  # fmt: skip
def test_experts_are_read_from_the_configuration(document, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert experts_in(tmp_path) == found
    assert found is None or found.token_bytes == 2 * found.layers * found.top_k


# --- mismatch -----------------------------------------------------------------------------------------------------------------------------------


def mismatch(name, *, dtype=None, noise=0.0):
    """k3 estimate of KL(sampler || trainer) by token, in nats, without and with replay of the sampler's experts (equal for a dense model)."""
    model, tokenizer = load_model(DATA / name)
    sparse, task = name == "tiny_moe", ArithmeticTask()
    prompts = [np.array(tokenizer(task.train.row(i).prompt)["input_ids"]) for i in range(8)]
    requests = [Request(ticket=i, prompt=Prompt(id=str(i), token_P=ids, text="")) for i, ids in enumerate(prompts)]
    sampler = TorchSampler(model, tokenizer, dtype=dtype, router_noise=noise)
    rollouts = sampler.sample(requests, 8, SamplingParams(max_tokens=56, eos_ids=frozenset({1}), routes=sparse))
    batch = collate([scored(r) for r in rollouts], advantage_B=[0.0] * len(rollouts))

    def gap(policy, data):
        with torch.no_grad():
            log_ratio = (policy.score(data).logp_BT - batch.logp_behavior_BT)[batch.response_mask_BT].double()
        return float((log_ratio.exp() - 1 - log_ratio).mean())

    live = gap(HFPolicy(model, dtype="float32"), replace(batch, routes=None))
    return live, gap(HFPolicy(model, dtype="float32", routing_replay=True), batch) if sparse else live


@pytest.fixture(scope="module")
def dense():
    """A dense model sampled in bf16 and scored in fp32."""
    return mismatch("tiny", dtype=torch.bfloat16)[0]


def test_equal_engines_agree_with_and_without_replay():
    live, replayed = mismatch("tiny_moe")
    assert max(live, replayed) < 1e-9


def test_replay_brings_bf16_sampling_to_the_dense_level(dense):
    """Whether bfloat16 alone flips experts, and so what replay takes away, is the processor's affair: see the noisy router below for that."""
    _, replayed = mismatch("tiny_moe", dtype=torch.bfloat16)
    assert 0.3 * dense < replayed < 2 * dense


def test_replay_takes_the_flips_of_a_noisy_router_away(dense):
    live, replayed = mismatch("tiny_moe", dtype=torch.bfloat16, noise=0.05)
    assert live > 2 * replayed
    assert replayed < 5 * dense  # what is left is the error of the gates themselves
