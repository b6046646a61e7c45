"""The tiny model, its tokenizer, and the shipped warm start."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nearpolicy.policy.tiny import character_tokenizer, make_tiny, tiny_model
from nearpolicy.tasks.arithmetic import ALPHABET, ArithmeticTask, arithmetic

SHIPPED = Path(str(files("nearpolicy.tasks"))) / "data" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=ALPHABET))
def test_tokenizer_has_one_token_a_character_and_round_trips(tokenizer, text: str):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text


def test_tokenizer_specials(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 32
    assert tokenizer.bos_token is None
    assert tokenizer.chat_template is None
    assert tokenizer("1 Z\n")["input_ids"] == [4, 2, 2, 2]
    assert tokenizer("1<eos>")["input_ids"] == [4, 1]


def test_folder_loads_as_it_is(tmp_path: Path, tokenizer):
    folder = make_tiny(tmp_path / "tiny", seed=3)
    model, loaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 125_312
    assert model.dtype == torch.float32
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert loaded("3a+4=#2")["input_ids"] == tokenizer("3a+4=#2")["input_ids"]
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for name, value in tiny_model(seed=3).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    a, b, c = (tiny_model(seed=s).state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert abs(float(a["model.layers.0.mlp.up_proj.weight"].std()) - 0.05) < 0.002


def test_shipped_warm_start_is_the_model_that_its_note_says():
    note = json.loads((SHIPPED / "sft.json").read_text())
    assert 0.98 <= note["evaluation"]["greedy"] <= 1
    assert 0.3 <= note["evaluation"]["pass@1"] <= 0.5
    weights = load_file(SHIPPED / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == 125_312
    assert (SHIPPED / "model.safetensors").stat().st_size < 600_000


def test_shipped_warm_start_is_noise_limited():
    """Greedy decoding of 64 held-out prompts: an independent check with the plainest loop there is."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(SHIPPED).eval(), AutoTokenizer.from_pretrained(SHIPPED)
    task = ArithmeticTask()
    rows = [task.heldout.row(i) for i in range(64)]
    ids = torch.tensor(tokenizer([r.prompt for r in rows])["input_ids"])
    start = ids.shape[1]
    with torch.inference_mode():
        for _ in range(task.max_tokens):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    texts = []
    for row in ids[:, start:].tolist():
        assert tokenizer.eos_token_id in row
        texts.append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]))
    rewards = arithmetic([r.prompt for r in rows], texts, answer=[r.columns["answer"] for r in rows])
    assert sum(rewards) >= 61
