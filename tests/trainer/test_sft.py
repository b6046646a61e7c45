"""Supervised training: the loss, its independence of micro-batches, determinism, what is written, and bad input."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearpolicy.errors import CheckpointError, DataError, EngineError, UsageError
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.rollout import Outcome, Prompt, Rollout, Score, StopReason
from nearpolicy.tasks.arithmetic import ArithmeticTask
from nearpolicy.trainer.sft import IGNORED, Example, SftOptions, accuracy_evaluator, collate, micro_batches, run_sft, save_sft, task_examples

SHORT = SftOptions(steps=6, batch_size=8, lr=3e-3, warmup=2)


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope="module")
def example(tokenizer):
    return task_examples(ArithmeticTask(num_ops=2), tokenizer)


def make(**overrides):
    return tiny_model(seed=0, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1, **overrides)


def by_hand(model: torch.nn.Module, batch: list[Example]) -> torch.Tensor:
    """Mean over completion tokens, one row at a time, the shift spelt out."""
    losses = []
    for e in batch:
        ids = torch.from_numpy(np.concatenate([e.prompt_P, e.response_T]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        P = len(e.prompt_P)
        losses.append(cross_entropy(logits[P - 1 : -1], ids[P:], reduction="none"))
    return torch.cat(losses).mean()


def test_examples_are_prompt_and_demonstration_with_eos(tokenizer):
    task = ArithmeticTask(num_ops=2)
    example = task_examples(task, tokenizer)(7)
    row = task.train.row(7)
    assert tokenizer.decode(example.prompt_P) == row.prompt
    assert tokenizer.decode(example.response_T) == task.demonstration(row, 7) + "<eos>"
    assert example.id == row.id


def test_examples_read_rows_by_index_and_render(tokenizer):
    class Task:
        train = SimpleNamespace(row=lambda i: SimpleNamespace(id=f"r{i}", prompt=str(i)))

        def demonstration(self, row, index):
            return f"{row.prompt}={index}"

    def render(row):
        return Prompt(id=row.id, token_P=np.array([9, 9], dtype=np.int64), text="??")

    example = task_examples(Task(), tokenizer, render=render, index=lambda i: i % 3)(5)
    assert (example.id, example.prompt_P.tolist(), tokenizer.decode(example.response_T)) == ("r2", [9, 9], "2=5<eos>")


def test_collate_masks_prompt_and_padding():
    ids_BT, label_BT = collate([Example("a", np.array([5, 6]), np.array([7, 1])), Example("b", np.array([8]), np.array([1]))])
    assert ids_BT.tolist() == [[5, 6, 7, 1], [8, 1, 0, 0]]
    assert label_BT.tolist() == [[IGNORED, IGNORED, 7, 1], [IGNORED, 1, IGNORED, IGNORED]]


def test_micro_batches_keep_to_the_budget_and_lose_nothing(example):
    batch = [example(i) for i in range(9)]
    for budget in (1, 50, 100, 10_000):
        parts = micro_batches(batch, budget)
        assert sorted(e.id for part in parts for e in part) == sorted(e.id for e in batch)
        for part in parts:
            assert len(part) == 1 or len(part) * max(len(e.prompt_P) + len(e.response_T) for e in part) <= budget
    assert len(micro_batches(batch, 1)) == 9
    assert len(micro_batches(batch, 10_000)) == 1


@pytest.mark.parametrize("token_budget", [1, 60, 10_000])
def test_first_update_equals_adam_on_the_token_mean_by_hand(example, token_budget: int):
    options = SftOptions(steps=1, batch_size=5, warmup=1, lr=1e-2, weight_decay=0.1, grad_clip=0.05, token_budget=token_budget)
    model, reference = make().double(), make().double()
    result = run_sft(model, example, options=options)
    loss = by_hand(reference, [example(i) for i in range(5)])
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    assert norm > 0.05
    assert result.losses == [pytest.approx(float(loss.detach()), rel=1e-6)]
    for (name, got), start in zip(model.named_parameters(), reference.parameters(), strict=True):
        g = start.grad * 0.05 / norm
        expected = start * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-8)
        # A gradient this near zero has no stable sign-like step.
        sure = g.abs() > 1e-6
        assert torch.allclose(got[sure], expected[sure], rtol=0, atol=2e-5), name


def test_loss_falls_and_progress_tells_every_update(example):
    seen = []
    result = run_sft(make(), example, options=replace(SHORT, steps=40), progress=seen.append)
    assert [p.step for p in seen] == list(range(1, 41))
    assert [p.loss for p in seen] == result.losses
    assert np.mean(result.losses[-5:]) < 0.8 * np.mean(result.losses[:3])
    assert seen[0].lr == pytest.approx(1.5e-3)
    assert all(p.grad_norm > 0 and p.seconds >= 0 for p in seen)


def test_learning_rate_by_hand():
    options = SftOptions(steps=10, warmup=2, lr=4.0)
    assert [options.lr_at(s) for s in (0, 1, 2, 6)] == pytest.approx([2.0, 4.0, 4.0, 2.0])
    assert options.lr_at(9) == pytest.approx(2.0 * (1 + math.cos(math.pi * 7 / 8)))
    assert SftOptions(steps=3, warmup=0).lr_at(0) == SftOptions().lr
    assert SftOptions(steps=3, warmup=10).lr_at(2) == pytest.approx(SftOptions().lr * 0.3)


def test_equal_runs_are_equal_bit_for_bit_and_seeds_differ(example, tokenizer, tmp_path: Path):
    folders = []
    for name, seed, model_seed in (("a", 0, 0), ("b", 0, 0), ("c", 0, 1)):
        torch.manual_seed(len(folders))
        options = replace(SHORT, seed=seed)
        model = tiny_model(seed=model_seed)
        result = run_sft(model, example, options=options, evaluate=lambda weights, step: {"greedy": 0.5, "pass@1": 0.25})
        folders.append(save_sft(tmp_path / name, model, tokenizer, result=result, options=options, facts={"task": {"num_ops": 2}}))
    a, b, c = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in folders)
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_saved_folder_loads_and_records_the_run(example, tokenizer, tmp_path: Path):
    model = make()
    told: list[int] = []

    def evaluate(weights: Mapping[str, torch.Tensor], step: int) -> dict[str, float]:
        told.append(step)
        assert torch.equal(weights["model.embed_tokens.weight"], model.model.embed_tokens.weight)
        return {"greedy": 0.75, "pass@1": 0.5}

    result = run_sft(model, example, options=SHORT, evaluate=evaluate)
    folder = save_sft(tmp_path / "sub" / "out", model, tokenizer, result=result, options=SHORT, facts={"task": {"num_ops": 2}})
    record = json.loads((folder / "sft.json").read_text())
    assert told == [6]
    assert record["evaluation"] == result.evaluation == {"greedy": 0.75, "pass@1": 0.5}
    assert record["options"] == {**json.loads(json.dumps(SHORT_FIELDS)), "betas": [0.9, 0.95]}
    assert record["task"] == {"num_ops": 2}
    assert (record["loss_first"], record["loss_last"]) == (result.losses[0], result.losses[-1])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("3a+1=")["input_ids"] == tokenizer("3a+1=")["input_ids"]


SHORT_FIELDS = {name: getattr(SHORT, name) for name in SftOptions.__dataclass_fields__}


class Echo:
    """A sampler that answers 1 greedily and 0 at temperature 1, and a verifier of `answer` that leaves one prompt unscored."""

    version = 0

    def sample(self, requests, n, params):
        self.params = params
        return [
            Rollout(
                prompt_id=r.prompt.id,
                group=r.ticket,
                sample=0,
                prompt_P=r.prompt.token_P,
                response_T=np.array([4]),
                stop=StopReason.EOS,
                logp_behavior_T=np.zeros(1),
                version_T=np.zeros(1),
                text="1" if params.temperature == 0 else "0",
            )
            for r in requests
        ]

    def load(self, weights, version):
        self.version, self.weights = version, weights

    def score(self, items):
        self.prompts = [i.prompt for i in items]
        right = [float(i.completion == i.columns["answer"]) for i in items]
        scores = [Score(reward=r, outcome=Outcome.SCORE) for r in right]
        return [*scores[:-1], Score(reward=math.nan, outcome=Outcome.ABSTAIN)]

    def close(self):
        pass


def test_accuracy_evaluator_gives_mean_reward_of_what_was_scored():
    fake = Echo()
    prompts = [
        Prompt(id=str(i), token_P=np.array([5]), text="t", columns={"answer": a, **({"prompt": "given"} if i == 0 else {})})
        for i, a in enumerate(["1", "1", "0", "1"])
    ]
    evaluate = accuracy_evaluator(fake, fake, prompts, max_tokens=3, eos_ids=frozenset({1}), seed=9)
    weights = {"w": torch.ones(1)}
    assert evaluate(weights, 12) == {"greedy": pytest.approx(2 / 3), "pass@1": pytest.approx(1 / 3)}
    assert (fake.version, fake.weights) == (12, weights)
    assert (fake.params.max_tokens, fake.params.eos_ids, fake.params.seed) == (3, frozenset({1}), 9)
    assert fake.prompts == ["given", "t", "t", "t"]
    assert math.isnan(accuracy_evaluator(fake, fake, prompts[:1], max_tokens=3, eos_ids=frozenset())(weights, 1)["greedy"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0}, {"batch_size": 0}, {"lr": float("nan")}, {"lr": 0.0}, {"lr": float("inf")}, {"warmup": -1}, {"betas": (0.9, 1.0)},
        {"weight_decay": -0.1}, {"grad_clip": 0.0}, {"token_budget": 0}, {"max_length": 1},
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong: dict):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SftOptions(**wrong)


def test_rows_that_cannot_be_trained_on_are_named(tokenizer):
    class Silent:
        train = SimpleNamespace(row=lambda i: SimpleNamespace(id=f"r{i}", prompt="" if i else "3"))

        def demonstration(self, row, index):
            return "4" if index else None

    example = task_examples(Silent(), tokenizer)
    with pytest.raises(DataError, match=r"r0.*no demonstration"):
        example(0)
    with pytest.raises(DataError, match=r"r1.*empty prompt"):
        example(1)
    with pytest.raises(UsageError, match="eos_token"):
        task_examples(Silent(), SimpleNamespace(eos_token_id=None))


def test_a_pair_that_is_too_long_is_refused(example):
    with pytest.raises(DataError, match=r"arithmetic-train-0.*max_length"):
        run_sft(make(), example, options=replace(SHORT, max_length=10))


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(example):
    model = make()
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(EngineError, match="update 1"):
        run_sft(model, example, options=SHORT)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())


def test_a_folder_that_cannot_be_written_is_one_clear_error(example, tokenizer, tmp_path: Path):
    result = run_sft(make(), example, options=replace(SHORT, steps=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Choose another folder"):
        save_sft(tmp_path / "file" / "out", make(), tokenizer, result=result, options=SHORT)
