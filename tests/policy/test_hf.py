"""HFPolicy: one log-prob whatever the layout, gradients, LoRA, checkpoints, bad folders."""

import copy
import json

import pytest
import torch

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import ALIGNMENT, LoraOptions, load_model

from .models import VOCAB, batch_of, tiny

ROWS = [(0, 5, 3), (0, 5, 0), (0, 5, 20), (1, 3, 1), (1, 3, 7), (2, 9, 5), (3, 4, 6), (3, 5, 6), (0, 5, 9)]
TEMPERATURES = [1.0, 0.7, 1.0, 1.0, 0.5, 1.0, 1.0, 2.0, 1.0]
KINDS = ("qwen3", "llama", "qwen3_moe", "gpt2")


def gradient(policy, batch, rows=None):
    """Gradient of a policy-loss-like weighted sum, over micro-batches when `rows` are given."""
    for p in policy.trainable_parameters():
        p.grad = None
    for part in rows or [list(range(len(batch)))]:
        piece = batch.rows(part)
        (policy.score(piece).logp_BT * piece.advantage_BT).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.trainable_parameters()])


def relative(a, b):
    return float((a - b).norm() / b.norm())


def own_logits(model, batch):
    """log-probs by one forward pass a row, alone, from the model's own logits: the definition."""
    out = torch.zeros(batch.token_BT.shape, dtype=torch.float64)
    for b in range(len(batch)):
        T = int(batch.prompt_length_B[b] + batch.response_mask_BT[b].sum())
        ids = batch.token_BT[b : b + 1, :T]
        logp = (model(input_ids=ids).logits[0].double() / float(batch.temperature_B[b])).log_softmax(-1)
        column = torch.arange(int(batch.prompt_length_B[b]), T)
        out[b, column] = logp[column - 1, ids[0, column]]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_rows_alone_padded_and_packed_agree(kind):
    # grouped_mm of the MoE experts has no float64; the float32 norms of qwen3 and llama bound their agreement in float64
    dtype, value, grad = {"gpt2": (torch.float64, 1e-12, 1e-12), "qwen3_moe": (torch.float32, 1e-5, 1e-5)}.get(kind, (torch.float64, 1e-6, 1e-6))
    model = tiny(kind).to(dtype).eval()
    batch = batch_of(ROWS, temperature=TEMPERATURES)
    with torch.no_grad():
        want = own_logits(copy.deepcopy(model), batch)
    plain, packed = HFPolicy(copy.deepcopy(model), shared_prompts="off"), HFPolicy(model)
    assert packed.shares_prompts, packed.sharing_refused
    assert not plain.shares_prompts
    for policy in (plain, packed):
        got = policy.score(batch)
        torch.testing.assert_close(got.logp_BT.double(), want, rtol=0, atol=value)
        assert (got.logp_BT[~batch.response_mask_BT] == 0).all()
        assert (got.entropy_BT[~batch.response_mask_BT] == 0).all()
        assert not got.entropy_BT.requires_grad
        for b in range(len(batch)):
            alone = policy.score(batch.rows([b])).logp_BT[0]
            torch.testing.assert_close(alone, got.logp_BT[b, : len(alone)], rtol=0, atol=value)
    assert relative(gradient(packed, batch), gradient(plain, batch)) < grad


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_lengths_3_and_40_in_one_batch(kind):
    model = tiny(kind).eval()
    batch = batch_of([(0, 2, 1), (1, 2, 38), (2, 2, 1), (2, 2, 38)])
    with torch.no_grad():
        want = own_logits(copy.deepcopy(model), batch)
        for shared in ("off", "auto"):
            got = HFPolicy(copy.deepcopy(model), shared_prompts=shared).score(batch).logp_BT
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared", ["off", "auto"])
def test_gradient_does_not_depend_on_the_split(shared):
    policy = HFPolicy(tiny("qwen3"), shared_prompts=shared)
    batch = batch_of([(0, 4, 1), (0, 4, 7), (1, 3, 3), (1, 3, 9)])
    whole = gradient(policy, batch)
    for split in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 2, 1, 0]]):
        assert relative(gradient(policy, batch, split), whole) < 2e-6
    policy.token_budget = 12
    assert len(policy.plan(batch)) > 1
    assert relative(gradient(policy, batch, policy.plan(batch)), whole) < 2e-6
    with torch.no_grad():
        split_logp = policy.score(batch).logp_BT
    torch.testing.assert_close(split_logp, policy.score(batch).logp_BT.detach(), rtol=0, atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradient():
    model = tiny("qwen3")
    batch = batch_of(ROWS)
    want = gradient(HFPolicy(copy.deepcopy(model)), batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = HFPolicy(model)
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    assert policy.shares_prompts
    assert relative(gradient(policy, batch), want) < 1e-6
    assert calls == 2  # once forward, once again in backward


def test_sliding_windows_are_not_packed():
    model = tiny("mistral").eval()
    policy = HFPolicy(copy.deepcopy(model))
    assert policy.sharing_refused is not None
    assert "sliding" in policy.sharing_refused
    batch = batch_of([(0, 5, 12), (0, 5, 3)])
    with torch.no_grad():
        torch.testing.assert_close(policy.score(batch).logp_BT.double(), own_logits(model, batch), rtol=0, atol=1e-5)


def test_no_response_token_gives_zero_loss_and_gradient():
    policy = HFPolicy(tiny("qwen3"))
    assert torch.equal(gradient(policy, batch_of([(0, 3, 0), (0, 3, 0)])), torch.zeros_like(gradient(policy, batch_of([(0, 3, 2)]))))


def test_dropout_is_off():
    policy = HFPolicy(tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train())
    batch = batch_of([(0, 3, 4)])
    policy.model.train()
    assert torch.equal(policy.score(batch).logp_BT, policy.score(batch).logp_BT)


def test_a_transformed_logit_is_refused():
    model = tiny("qwen3")
    model.register_forward_hook(lambda m, a, out: type(out)(logits=out.logits * 3))
    with pytest.raises(CheckpointError, match="logits"):
        HFPolicy(model)


def test_bfloat16_autocast_keeps_float32_weights_and_one_path():
    policy = HFPolicy(tiny("qwen3"), dtype="bfloat16")
    batch = batch_of(ROWS)
    low, full = (p.score(batch).logp_BT.detach() for p in (policy, HFPolicy(copy.deepcopy(policy.model), dtype="float32")))
    assert low.dtype == torch.float32
    assert 1e-4 < float((low - full).abs().max()) < 1.0
    assert all(p.dtype == torch.float32 for p in policy.trainable_parameters())
    assert gradient(policy, batch).dtype == torch.float32


@pytest.fixture
def folder(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, **{chr(95 + i): i for i in range(2, VOCAB)}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<pad>")), pad_token="<pad>", eos_token="<eos>")
    path = tmp_path / "model"
    HFPolicy(tiny("qwen3", tie_word_embeddings=True), tokenizer=tokenizer).save(path)
    return path


def test_save_and_load_are_exact(folder):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_model(folder)
    assert len(tokenizer) == VOCAB
    batch = batch_of(ROWS)
    policy = HFPolicy(model, tokenizer=tokenizer)
    original = HFPolicy(tiny("qwen3", tie_word_embeddings=True))
    assert torch.equal(policy.score(batch).logp_BT, original.score(batch).logp_BT)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.config._attn_implementation == "sdpa"
    assert all(torch.equal(v, policy.published_weights()[k]) for k, v in plain.state_dict().items())
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    assert "lm_head.weight" not in state
    with torch.no_grad():
        for p in policy.trainable_parameters():
            p.mul_(1.5)
    assert not torch.equal(policy.score(batch).logp_BT, original.score(batch).logp_BT)
    policy.load_state_dict(state)
    assert torch.equal(policy.score(batch).logp_BT, original.score(batch).logp_BT)
    with pytest.raises(CheckpointError, match="names or shapes"):
        policy.load_state_dict({})


def test_lora_trains_adapters_and_publishes_merged_weights(folder, tmp_path):
    model, tokenizer = load_model(folder, lora=LoraOptions(rank=2, alpha=4.0))
    policy = HFPolicy(model, tokenizer=tokenizer)
    batch = batch_of(ROWS)
    assert 0 < sum(p.numel() for p in policy.trainable_parameters()) < sum(p.numel() for p in model.parameters()) / 3
    base = copy.deepcopy(policy.published_weights())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (policy.score(batch).logp_BT * batch.advantage_BT).sum().backward()
        optimizer.step()
    merged = policy.published_weights()
    changed = [k for k in base if not torch.equal(base[k], merged[k])]
    assert changed
    assert all("proj" in k for k in changed)
    policy.save(tmp_path / "merged")
    again, _ = load_model(tmp_path / "merged")
    assert set(merged) == set(again.state_dict())
    torch.testing.assert_close(HFPolicy(again).score(batch).logp_BT, policy.score(batch).logp_BT, rtol=0, atol=5e-5)
    assert merged["model.embed_tokens.weight"].data_ptr() == model.get_input_embeddings().weight.data_ptr()
    with pytest.raises(UsageError, match="lora"):
        load_model(folder, lora=LoraOptions(target_modules=("nothing_like_it",)))


def test_bad_folders_are_said_in_one_line(folder, tmp_path):
    def refused(path, *words):
        with pytest.raises(CheckpointError) as e:
            load_model(path)
        assert "\n" not in str(e.value)
        assert all(w in str(e.value) for w in words), str(e.value)

    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    refused(tmp_path / "absent", "absent", "no such folder")
    refused("nobody/nothing-here", "no such folder")
    weights.write_bytes(data[: len(data) // 2])
    refused(folder, "model", "Copy the folder again")
    weights.write_bytes(b"\x00" * 64)
    refused(folder, "model")
    weights.write_bytes(b"")
    refused(folder, "model")
    weights.unlink()
    refused(folder, "safetensors weights")
    weights.write_bytes(data)
    load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    refused(folder, "missing keys", "layers.2")
    (folder / "config.json").write_text("{")
    refused(folder)
    (folder / "config.json").unlink()
    refused(folder, "no config.json")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()
    refused(folder, "no tokenizer")


@pytest.fixture
def said(capfd):
    """What was printed or logged by transformers since the last call; its own settings must come back."""
    import logging

    from transformers.utils import logging as transformers_logging

    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Lines()
    logger.addHandler(handler)
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    def read() -> str:
        assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
        out = "".join([*lines, *capfd.readouterr()])
        lines.clear()
        return out

    yield read
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": 16}, r"mismatched keys, e\.g\. [a-z0-9_.]+weight;"),
        ({"num_attention_heads": 3, "hidden_size": "wide"}, r"config\.json: got .*hidden_size"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing keys"),
        ({"model_type": "no_such_model"}, "no_such_model"),
    ],
)
def test_a_refused_folder_prints_nothing(folder, said, change, match):
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    said()
    with pytest.raises(CheckpointError, match=match) as e:
        load_model(folder)
    assert "\n" not in str(e.value)
    assert said() == ""
    if "missing" in match:  # what is not printed above
        AutoModelForCausalLM.from_pretrained(folder)
        assert "LOAD REPORT" in said()


@pytest.mark.parametrize(("bad", "count"), [(float("nan"), 1), (float("inf"), 1), (-float("inf"), 2)])
def test_weights_that_are_not_finite_are_named(folder, bad, count):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].view(-1)[:count] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{count} of 1536 values of model\.layers\.1\.mlp\.up_proj\.weight NaN or infinite"):
        load_model(folder)
    model = tiny("qwen3")
    model.load_state_dict(weights, strict=False)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight NaN or infinite"):
        HFPolicy(model)


@pytest.mark.parametrize("pad", range(0, 64, 8))
def test_where_weights_lie_in_their_file_changes_no_bit(folder, pad):
    """A mapped file's tensors begin wherever its header ends; a product with one row rounds otherwise at odd addresses."""
    from safetensors.torch import load_file, save_file

    original = load_model(folder)[0]
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "pt", "pad": "x" * pad})
    model = load_model(folder)[0]
    assert {value.data_ptr() % ALIGNMENT for value in model.parameters()} == {0}
    token = torch.tensor([[5]])
    with torch.no_grad():
        assert torch.equal(model(token).logits, original(token).logits)


def test_weights_whose_sum_overflows_are_finite(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:2] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model, _ = load_model(folder)
    assert model.model.norm.weight[0].detach().item() == pytest.approx(3e38)


def test_loading_with_checkpointed_activations_and_saving_print_and_warn_nothing(folder, tmp_path, said):
    said()
    model, tokenizer = load_model(folder, gradient_checkpointing=True)
    policy = HFPolicy(model, tokenizer=tokenizer)
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    policy.save(tmp_path / "again")
    assert said() == ""


def test_unknown_options_are_refused(folder):
    with pytest.raises(UsageError, match="dtype"):
        load_model(folder, dtype="float8")
    with pytest.raises(UsageError, match="shared_prompts"):
        HFPolicy(tiny("qwen3"), shared_prompts="maybe")
    with pytest.raises(UsageError, match="dtype"):
        HFPolicy(tiny("qwen3"), dtype="half")
