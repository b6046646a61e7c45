"""Routing replay: gates, hooks, and the policy that records (R2) and replays."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import LoraOptions, add_lora, checkpoint_activations
from nearpolicy.policy.packing import families
from nearpolicy.policy.routing import NOT_RECORDED, ROUTES, Routers, gate_weights
from tests.policy.models import VOCAB, batch_of, tiny

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "oracles.json").read_text())["scalars"]["routing_replay_gate"]
KINDS = ("qwen3_moe", "mixtral")
ROWS = [(0, 5, 7), (0, 5, 1), (0, 5, 4), (1, 2, 12), (1, 2, 0), (2, 9, 3), (3, 1, 1), (3, 1, 6)]


def doubled(model):
    """In float64, which the grouped products do not take."""
    model.set_experts_implementation("eager")
    return model.double().eval()


def policy(kind="qwen3_moe", *, double=False, **options):
    changes = options.pop("changes", {})
    model = tiny(kind, **changes).eval()
    return HFPolicy(doubled(model) if double else model, routing_replay=True, **{"dtype": "float32", **options})


def other_routes(p, batch, seed=0):
    """Random distinct experts of every context token of the batch."""
    _, routes = p.record(batch)
    E, draw = p._routers.num_experts, np.random.default_rng(seed)
    random = torch.from_numpy(draw.random((*routes.shape[:3], E)).argsort(-1)[..., : routes.shape[3]].astype(np.int16))
    # One prompt of a group has one set of experts.
    for rows in families(batch):
        P = int(batch.prompt_length_B[rows[0]])
        random[rows, :P] = random[rows[0], :P]
    return torch.where(routes == NOT_RECORDED, routes, random)


@pytest.mark.parametrize(
    ("form", "name"),
    [("normalized_softmax", "r3_paper_gate"), ("normalized_softmax", "megatron_post_softmax"), ("softmax", "megatron_pre_softmax_not_renormalised"),
     ("normalized_sigmoid", "sigmoid_normalised")],
)  # fmt: skip
def test_gate_equals_the_worked_case(form, name):
    logits, index = torch.tensor([ORACLE["train_logits"]], dtype=torch.float64), torch.tensor([ORACLE["replayed_idx"]])
    torch.testing.assert_close(gate_weights(logits, index, form=form)[0], torch.tensor(ORACLE[name], dtype=torch.float64), rtol=0, atol=1e-12)


def test_gradient_reaches_the_replayed_experts_and_with_a_full_softmax_all():
    index = torch.tensor([ORACLE["replayed_idx"]])
    for form, reached in (("normalized_softmax", [True, False, True, False]), ("softmax", [True] * 4)):
        logits = torch.tensor([ORACLE["train_logits"]], dtype=torch.float64, requires_grad=True)
        gate_weights(logits, index, form=form)[0, 0].backward()
        assert (logits.grad[0].abs() > 1e-12).tolist() == reached


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 9), st.data())
def test_normalised_gates_are_the_softmax_over_the_recorded_set(experts, data):
    k = data.draw(st.integers(1, experts))
    logits = torch.tensor(data.draw(st.lists(st.floats(-30, 30, width=32), min_size=experts, max_size=experts)), dtype=torch.float64)[None]
    index = torch.tensor(data.draw(st.permutations(range(experts)))[:k])[None]
    want = logits.gather(1, index).softmax(-1)
    torch.testing.assert_close(gate_weights(logits, index, form="normalized_softmax"), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("kind", "changes", "form"), [
    ("qwen3_moe", {"norm_topk_prob": True}, "normalized_softmax"), ("qwen3_moe", {"norm_topk_prob": False}, "softmax"),
    ("mixtral", {}, "normalized_softmax"),
])  # fmt: skip
def test_replay_of_own_routes_is_bit_exact(kind, changes, form, experts):
    model = tiny(kind, **changes).eval()
    model.set_experts_implementation(experts)
    routers = Routers(model)
    assert [r.form for r in routers._routers] == [form] * 2
    ids = torch.arange(18).view(2, 9) % VOCAB
    plain = model(input_ids=ids).logits
    routers.attach()
    with routers.recording() as recorder:
        assert torch.equal(model(input_ids=ids).logits, plain)  # nothing replayed: the model's own top k
        routes = recorder.take()
    assert routes.dtype == torch.int16
    with routers.replayed_everywhere():
        again = model(input_ids=ids, **routers.keywords(routes, ids.device)).logits
    assert torch.equal(again, plain)
    assert torch.equal(model(input_ids=ids).logits, plain)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("sharing", ["auto", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_replays_what_it_recorded_bit_for_bit(kind, sharing, bfloat16):
    p = policy(kind, shared_prompts=sharing, dtype="bfloat16" if bfloat16 else "float32")
    assert p.shares_prompts is (sharing == "auto")
    batch = batch_of(ROWS)
    scores, routes = p.record(batch)
    again = p.score(replace(batch, routes=routes))
    assert torch.equal(again.logp_BT, scores.logp_BT)
    assert torch.equal(again.entropy_BT, scores.entropy_BT)
    plain = HFPolicy(tiny(kind).eval(), dtype="bfloat16" if bfloat16 else "float32", shared_prompts=sharing).score(batch)
    assert torch.equal(plain.logp_BT, scores.logp_BT)


def test_recorded_columns_are_those_of_the_context():
    p = policy()
    batch = batch_of(ROWS)
    _, routes = p.record(batch)
    length_B = batch.prompt_length_B + batch.response_mask_BT.sum(1)
    for b, (_, _, response) in enumerate(ROWS):
        there = (routes[b] != NOT_RECORDED).all(-1).all(-1)
        assert there.tolist() == [t < length_B[b] - 1 and response > 0 for t in range(batch.token_BT.shape[1])]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_split_and_single_rows_agree_under_foreign_routes(kind):
    packed, plain = policy(kind, double=True), policy(kind, double=True, shared_prompts="off")
    batch = batch_of(ROWS)
    batch = replace(batch, routes=other_routes(packed, batch))
    want = packed.score(batch).logp_BT
    live = packed.record(batch)[0].logp_BT
    assert (want - live).abs().max() > 0.05  # the routes do something
    torch.testing.assert_close(plain.score(batch).logp_BT, want, rtol=0, atol=1e-6)
    for b in range(len(batch)):
        alone = packed.score(batch.rows([b])).logp_BT[0]
        torch.testing.assert_close(alone, want[b, : len(alone)], rtol=0, atol=1e-6)
    packed.token_budget = plain.token_budget = 13
    assert len(packed.plan(batch)) > 2
    with torch.no_grad():
        torch.testing.assert_close(packed.score(batch).logp_BT, want.float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(plain.score(batch).logp_BT, want.float(), rtol=0, atol=1e-6)


def test_recording_in_micro_batches_gives_the_same_routes():
    p, batch = policy(), batch_of(ROWS)
    scores, routes = p.record(batch)
    p.token_budget = 13
    parts, split = p.record(batch)
    assert torch.equal(routes, split)
    torch.testing.assert_close(parts.logp_BT, scores.logp_BT, rtol=0, atol=1e-5)


def test_a_prompt_that_went_to_other_experts_is_a_stem_of_its_own():
    p, batch = policy(double=True), batch_of([(0, 5, 4), (0, 5, 3), (0, 5, 2)])
    routes = other_routes(p, batch)
    routes[1, 2] = (routes[1, 2] + 1) % 4
    batch = replace(batch, routes=routes)
    assert families(batch) == [[0, 2], [1]]
    together = p.score(batch).logp_BT
    for b in range(3):
        alone = p.score(batch.rows([b])).logp_BT[0]
        torch.testing.assert_close(together[b, : len(alone)], alone, rtol=0, atol=1e-6)


def loss(p, batch):
    return (p.score(batch).logp_BT * batch.advantage_BT).sum()


@pytest.mark.parametrize("norm", [True, False])
def test_gradient_of_the_router_equals_finite_differences(norm):
    p = policy(double=True, changes={"norm_topk_prob": norm})
    for module in p.model.modules():  # transformers' norms fall to float32, too coarse for a difference of float64 losses
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, m=module: m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
    batch = batch_of(ROWS)
    batch = replace(batch, routes=other_routes(p, batch))
    loss(p, batch).backward()
    for layer in p.model.model.layers:
        weight = layer.mlp.gate.weight
        direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ends = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight += step * direction
                ends.append(float(loss(p, batch)))
                weight -= step * direction
        slope = float((weight.grad * direction).sum())
        assert abs(slope) > 1e-2
        assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("sharing", ["auto", "off"])
def test_checkpointed_layers_replay_in_backward_too(sharing):
    batch, grads = batch_of(ROWS), []
    for checkpointing in (False, True):
        model = doubled(tiny("qwen3_moe"))
        if checkpointing:
            checkpoint_activations(model)
        p = HFPolicy(model, dtype="float32", shared_prompts=sharing, routing_replay=True)
        assert p.model.training is checkpointing
        half = [replace(part, routes=other_routes(p, part)) for part in (batch.rows([0, 1, 2, 3]), batch.rows([4, 5, 6, 7]))]
        # Both forward passes before both backward passes: what a layer replays cannot be a memory of the last call.
        parts = [loss(p, part) for part in half]
        before = p._routers.replayed
        for part in parts:
            part.backward()
        assert p._routers.replayed - before == (2 * p._routers.num_layers if checkpointing else 0)
        grads.append({name: value.grad.clone() for name, value in p.model.named_parameters()})
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=0, atol=1e-9, msg=name)


def test_lora_beside_experts():
    pytest.importorskip("peft")
    model = doubled(tiny("qwen3_moe"))
    add_lora(model, LoraOptions(rank=2, target_modules=("q_proj", "v_proj")))
    p = HFPolicy(model, dtype="float32", routing_replay=True)
    batch = batch_of(ROWS)
    batch = replace(batch, routes=other_routes(p, batch))
    loss(p, batch).backward()
    assert all(x.grad is not None for x in p.trainable_parameters())
    alone = p.score(batch.rows([3])).logp_BT[0]
    torch.testing.assert_close(p.score(batch).logp_BT[3, : len(alone)], alone, rtol=0, atol=1e-6)


def test_routers_above_256_experts():
    p = policy(changes={"num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 4})
    batch = batch_of(ROWS)
    scores, routes = p.record(batch)
    assert routes.max() > 255
    assert torch.equal(p.score(replace(batch, routes=routes)).logp_BT, scores.logp_BT)


def test_two_experts_a_hair_apart():
    """Gate logits 1e-4 apart and bf16 noise: live routing flips, replay does not."""
    logits = torch.tensor([[1.0, 1.0001]])
    live = [logits.topk(1).indices.item(), logits.bfloat16().flip(-1).topk(1).indices.item()]
    noisy = torch.tensor([[1.00005, 1.0]])
    assert noisy.topk(1).indices.item() != live[0]
    kept = torch.tensor([[live[0]]])
    assert gate_weights(noisy, kept, form="softmax").item() == pytest.approx(gate_weights(logits, kept, form="softmax").item(), abs=1e-4)


class TestRefused:
    def test_no_routes(self):
        p = policy()
        with pytest.raises(DataError, match="a batch without routes"):
            p.score(batch_of(ROWS))
        with pytest.raises(DataError, match="a batch without routes"):
            p.head(batch_of(ROWS))

    @pytest.mark.parametrize("sharing", ["auto", "off"])
    def test_one_missing_token(self, sharing):
        p, batch = policy(shared_prompts=sharing), batch_of(ROWS)
        _, routes = p.record(batch)
        routes[3, 6] = NOT_RECORDED
        with pytest.raises(DataError, match=r"no experts for token 6 of row 3 \(group 1\)"):
            p.score(replace(batch, routes=routes))

    @pytest.mark.parametrize(("change", "message"), [
        (lambda r: torch.where(r == 0, torch.tensor(4, dtype=r.dtype), r), "expert 4; expected 0 to 3"),
        (lambda r: r[:, :, :1], r"\(1, 2\) layers and experts a token; expected \(2, 2\)"),
        (lambda r: r[..., :1], r"\(2, 1\) layers and experts a token"),
        (lambda r: torch.where((r == 0) & (torch.arange(2) == 1), torch.tensor(-2, dtype=r.dtype), r), "expert -2"),
    ])  # fmt: skip
    def test_routes_of_another_model(self, change, message):
        p, batch = policy(), batch_of(ROWS)
        with pytest.raises(DataError, match=message):
            p.score(replace(batch, routes=change(p.record(batch)[1])))

    def test_a_model_without_experts(self):
        with pytest.raises(UsageError, match=r"a model without experts.*routing\.replay=off"):
            HFPolicy(tiny("qwen3").eval(), routing_replay=True)

    def test_recording_without_replay(self):
        with pytest.raises(UsageError, match="routing_replay off"):
            HFPolicy(tiny("qwen3_moe").eval()).record(batch_of(ROWS))

    def test_a_router_with_gates_of_another_form(self):
        model = tiny("qwen3_moe").eval()
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: (out[0], out[1] * 2.5, out[2]))
        with pytest.raises(UsageError, match=r"router Qwen3MoeTopKRouter \(model\.layers\.0\.mlp\.gate\)"):
            Routers(model)

    def test_a_model_that_hands_nothing_down(self):
        model = tiny("qwen3_moe").eval()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != ROUTES}), with_kwargs=True)
        with pytest.raises(EngineError, match="0 of 2 routers replayed"):
            HFPolicy(model, routing_replay=True)

    def test_a_pass_of_another_length(self):
        model = tiny("qwen3_moe").eval()
        routers = Routers(model)
        routers.attach()
        with pytest.raises(DataError, match="4 tokens; expected 6"):
            model(input_ids=torch.ones(1, 6, dtype=torch.long), **routers.keywords(torch.zeros(4, 2, 2, dtype=torch.int16), torch.device("cpu")))
