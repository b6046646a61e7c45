"""Relay inference on fake samplers whose every probability is known, and the refusals."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.objective.position import length_cut
from nearpolicy.objective.stats import pass_at_k
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.protocols import SamplingParams
from nearpolicy.report.relay import chart, relay_page, ticks
from nearpolicy.rollout import Outcome, Prompt, Score, StopReason
from nearpolicy.testing.fakes import FakeSampler
from nearpolicy.trainer.relay_inference import check_earlier, relay_inference

A, B, C, END = 0, 1, 2, 3
PROMPTS = [Prompt(id=str(i), token_P=np.array([C]), text="c") for i in range(6)]
PARAMS = SamplingParams(max_tokens=6, eos_ids=frozenset({END}), seed=5)


def table(first, then):
    """Logits: what follows the prompt (c), and what follows a and b; end of sequence follows with a fifth of the mass."""
    rows = torch.full((4, 4), -30.0)
    rows[C, [A, B]] = torch.tensor(first).log()
    rows[A, [A, B, END]] = torch.tensor([*then, 0.2]).log()
    rows[B, [A, B, END]] = torch.tensor([*then, 0.2]).log()
    return rows


class StartsWithB:
    """Right: the first letter is b."""

    def score(self, items):
        return [Score(reward=float(item.completion.startswith("b")), outcome=Outcome.SCORE) for item in items]

    def close(self):
        pass


EARLIER = FakeSampler(table((0.5, 0.5), (0.4, 0.4)), version=3)
NARROW = FakeSampler(table((1 - 1e-9, 1e-9), (0.8, 1e-9)), version=9)


def relay(fractions=(0.0, 0.5, 1.0), n=8, ks=(1, 2, 8), current=NARROW):
    return relay_inference(current, EARLIER, StartsWithB(), PROMPTS, PARAMS, n=n, ks=ks, fractions=fractions)


def test_prefix_and_suffix_are_whose_they_should_be():
    made = relay()
    for before, after in zip(made.earlier.rollouts, made.relayed[0.5].rollouts, strict=True):
        kept = length_cut(len(before.response_T), 0.5)
        assert after.prefix_length == kept
        assert after.response_T[:kept].tolist() == before.response_T[:kept].tolist()
        assert after.version_T.tolist() == [3] * kept + [9] * (len(after.response_T) - kept)
        assert B not in after.response_T[kept:].tolist()  # the narrow model writes none


def test_fraction_0_is_the_single_model_and_fraction_1_the_earlier_one():
    made = relay()
    for at, other in ((0.0, made.single), (1.0, made.earlier)):
        for a, b in zip(made.relayed[at].rollouts, other.rollouts, strict=True):
            assert a.response_T.tolist() == b.response_T.tolist()
            assert a.stop == b.stop
        assert np.array_equal(made.relayed[at].reward_PN, other.reward_PN)
    assert {r.stop for r in made.relayed[1.0].rollouts} == {StopReason.EOS, StopReason.LENGTH}


def test_the_two_models_draw_from_different_noise():
    made = relay(current=EARLIER)
    assert [r.response_T.tolist() for r in made.single.rollouts] != [r.response_T.tolist() for r in made.earlier.rollouts]


def test_a_model_that_lost_a_solution_gets_it_back_from_the_beginning():
    """The narrow model never begins with b; relayed responses do as often as the earlier model's, whose first letter is kept."""
    made = relay(n=16, ks=(1, 16))
    assert not made.single.reward_PN.any()
    kept = np.array([r.prefix_length > 0 for r in made.relayed[0.5].rollouts]).reshape(6, 16)
    assert np.array_equal(made.relayed[0.5].reward_PN, made.earlier.reward_PN * kept)
    document = made.document()
    assert document["curves"]["single"]["16"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "prompts": 6}
    assert document["differences"]["0.5"]["single"]["16"]["mean"] == document["curves"]["relay 0.5"]["16"]["mean"] == 1.0
    assert document["differences"]["1"]["earlier"] == {k: {"mean": 0.0, "low": 0.0, "high": 0.0, "prompts": 6} for k in ("1", "16")}


def test_the_document_is_made_from_its_counts():
    document = json.loads(json.dumps(relay().document()))
    assert (document["samples"], document["prompts"], document["k"], document["fractions"]) == (8, 6, [1, 2, 8], [0.0, 0.5, 1.0])
    for name, curve in document["curves"].items():
        counts = document["counts"][name]
        for k in (1, 2, 8):
            each = [pass_at_k(n, c, k) for n, c in zip(counts["scored"], counts["right"], strict=True)]
            assert curve[str(k)]["mean"] == pytest.approx(sum(each) / 6)
            assert curve[str(k)]["low"] <= curve[str(k)]["mean"] <= curve[str(k)]["high"]
    for other in ("single", "earlier"):
        for k in ("1", "2", "8"):
            gap = document["differences"]["0.5"][other][k]
            assert gap["mean"] == pytest.approx(document["curves"]["relay 0.5"][k]["mean"] - document["curves"][other][k]["mean"])
            assert gap["low"] <= gap["mean"] <= gap["high"]
    assert document["kept"]["0"] == 0
    assert document["kept"]["1"] == document["length"]["earlier"]


def test_the_difference_is_paired():
    """Prompts differ and the models do not: the difference is 0 with an interval of no width, wide as the curves' own are."""
    document = relay(fractions=(1.0,), n=2, ks=(1,)).document()
    own = document["curves"]["relay 1"]["1"]
    assert own["high"] > own["low"]
    assert document["differences"]["1"]["earlier"]["1"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "prompts": 6}


def test_unscored_responses_are_missing_on_both_sides():
    class Abstains(StartsWithB):
        def score(self, items):
            scores = super().score(items)
            return [Score(reward=float("nan"), outcome=Outcome.ABSTAIN) if i < 8 else s for i, s in enumerate(scores)]

    made = relay_inference(NARROW, EARLIER, Abstains(), PROMPTS, PARAMS, n=8, ks=(8,), fractions=(0.5,)).document()
    assert made["differences"]["0.5"]["single"]["8"]["prompts"] == 5
    assert made["counts"]["single"]["scored"][0] == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_fractions_outside_0_and_1_are_refused(fraction):
    with pytest.raises(UsageError, match="fraction"):
        relay(fractions=(0.5, fraction))


def test_k_above_the_samples_is_refused():
    with pytest.raises(UsageError, match="k = 9 with n = 8"):
        relay(ks=(1, 9))


def test_another_vocabulary_or_architecture_is_refused():
    tokenizer, model = character_tokenizer(), tiny_model(seed=1)
    check_earlier(model, tokenizer, tiny_model(seed=2), character_tokenizer(), name="x")
    with pytest.raises(CheckpointError, match=r"another vocabulary.*tokens differ"):
        check_earlier(model, tokenizer, model, character_tokenizer("abc"), name="x")
    with pytest.raises(CheckpointError, match=r"another architecture.*mlp\.gate_proj"):
        check_earlier(model, tokenizer, tiny_model(intermediate_size=128), tokenizer, name="x")
    with pytest.raises(CheckpointError, match=r"another architecture \(model.layers.1"):
        check_earlier(tiny_model(num_hidden_layers=1), tokenizer, model, tokenizer, name="x")

    class Other(Qwen3ForCausalLM):
        pass

    with pytest.raises(CheckpointError, match=r"another architecture \(Other\)"):
        check_earlier(
            model, tokenizer, Other(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, intermediate_size=8)), tokenizer, name="x"
        )


def page():
    made = {"checkpoint": "a<b>", "earlier": "c", "temperature": 1.0, "top_p": 1.0, **relay().document()}
    return relay_page({"eval": made}), made


def test_the_page_holds_the_numbers_and_nothing_foreign():
    html, made = page()
    assert html.count("<svg") == 2
    assert html.count("<polyline") == 5 + 3
    assert "a&lt;b&gt;" in html
    assert "<b>" not in html
    assert re.findall(r'(?:src|href)="', html) == []
    mean = 100 * made["curves"]["earlier"]["8"]["mean"]
    assert f"{mean:.2f} <small>" in html
    assert html.count('<th scope="row">relay') == 3 + 6


def test_a_chart_without_points_says_so():
    assert "Not enough" in chart([], zero=False)


def test_ticks_are_round():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-0.013, 0.021) == [-0.01, 0.0, 0.01, 0.02]
    assert 0.0 in ticks(-1e-3, 2e-3)
