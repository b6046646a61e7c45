"""The torch sampler beyond the contract: sharing, windows, recomputation, precision, loading, errors."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config, Qwen3NextConfig

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prefix, Prompt, StopReason
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sampler.weights import weights_digest
from nearpolicy.testing.fakes import FakeTokenizer

V = 24
_COMMON = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 96, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_COMMON),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=3),
    "gemma2": lambda: Gemma2Config(**{**_COMMON, "initializer_range": 0.1}, sliding_window=3, query_pre_attn_scalar=8),
    "qwen3_windows": lambda: Qwen3Config(**_COMMON, layer_types=["sliding_attention", "full_attention"], sliding_window=4, use_sliding_window=True),
}


def model_of(kind="qwen3", seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)


def requests(lengths=(3, 11, 5), **options):
    rng = np.random.default_rng(0)
    return [Request(ticket=i, prompt=Prompt(id=f"p{i}", token_P=rng.integers(2, V, n), text=""), **options) for i, n in enumerate(lengths)]


def reference(model, rollout):
    """The model's own teacher-forced log-probs of the response."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_P, rollout.response_T]))
    with torch.no_grad():
        rows = model.eval()(ids[None], use_cache=False).logits[0, len(rollout.prompt_P) - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, torch.from_numpy(rollout.response_T)[:, None])[:, 0].numpy()


def assert_exact(model, out, atol=1e-4):
    for r in out:
        np.testing.assert_allclose(r.logp_behavior_T, reference(model, r), atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "qwen3_windows"])
def test_sliding_windows_and_soft_caps_stay_on_the_cache(kind):
    model = model_of(kind)
    if kind == "gemma2":
        model.set_attn_implementation("eager")  # what transformers itself needs for soft caps
    sampler = TorchSampler(model, None, max_rows=4)
    assert sampler.cached
    out = sampler.sample(requests(), 3, SamplingParams(max_tokens=12, eos_ids=frozenset({2, 3})))
    assert_exact(model, out)


def test_windows_with_prefixes():
    model = model_of("qwen3_windows")
    sampler = TorchSampler(model, None)
    whole = sampler.sample(requests(), 2, SamplingParams(max_tokens=12))
    stored = [Prefix(token_T=r.response_T[:7], logp_behavior_T=r.logp_behavior_T[:7], version_T=r.version_T[:7]) for r in whole]
    again = sampler.sample(
        [Request(ticket=q.ticket, prompt=q.prompt, prefixes=stored[2 * i : 2 * i + 2]) for i, q in enumerate(requests())],
        2, SamplingParams(max_tokens=12),
    )  # fmt: skip
    assert [r.response_T.tolist() for r in again] == [r.response_T.tolist() for r in whole]
    assert_exact(model, again)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_last_layer_of_a_prefill_works_on_last_tokens_alone(kind):
    model = model_of(kind)
    if kind == "gemma2":
        model.set_attn_implementation("eager")
    sampler = TorchSampler(model, None)
    whole = sampler.sample(requests(), 2, SamplingParams(max_tokens=12))
    stored = [Prefix(token_T=r.response_T[:7], logp_behavior_T=r.logp_behavior_T[:7], version_T=r.version_T[:7]) for r in whole]
    relayed = [Request(ticket=q.ticket, prompt=q.prompt, prefixes=stored[2 * i : 2 * i + 2]) for i, q in enumerate(requests())]
    seen = ([], [])
    for layer, lengths in zip(model.model.layers, seen, strict=True):
        layer.mlp.act_fn.register_forward_pre_hook(lambda _, args, lengths=lengths: lengths.append(args[0].shape[1]))
    again = sampler.sample(relayed, 2, SamplingParams(max_tokens=12))
    assert max(seen[0]) == 11  # the longest prompt
    assert set(seen[1]) == {1}
    assert not model.model.layers[-1].mlp._forward_pre_hooks
    assert [r.response_T.tolist() for r in again] == [r.response_T.tolist() for r in whole]
    assert_exact(model, again)


class Neighbours(torch.nn.Module):
    """A feed-forward block that also reads the token before: its last token alone is not enough."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def test_a_block_that_mixes_tokens_gets_all_of_them():
    model = model_of()
    fits = TorchSampler(model, None)._forward
    assert fits._last_mlp is model.model.layers[-1].mlp
    model.model.layers[-1].mlp = Neighbours(model.model.layers[-1].mlp)
    with pytest.warns(UserWarning, match="from the model's own"):  # decoding one token at a time cannot serve it either
        assert not TorchSampler(model, None).cached


class Lengths(torch.nn.Module):
    """A feed-forward block that refuses a part of the row."""

    def __init__(self, mlp, least):
        super().__init__()
        self.mlp, self.least = mlp, least

    def forward(self, x):
        if x.shape[0] > 1 and x.shape[1] < self.least(x):
            raise ValueError("not the row I was promised")
        return self.mlp(x)


def test_a_last_block_that_wants_whole_rows_keeps_the_cache():
    """Only the shortcut is given up."""
    model = model_of()
    lengths = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.model.layers[-1].mlp = Lengths(model.model.layers[-1].mlp, lambda x: lengths[-1])
    sampler = TorchSampler(model, None)
    assert sampler.cached
    assert sampler._forward._last_mlp is None
    assert_exact(model, sampler.sample(requests(), 2, SamplingParams(max_tokens=5)))


def linear_model():
    config = Qwen3NextConfig(
        **_COMMON, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_linear_attention_is_recomputed_and_said():
    model = linear_model()
    with pytest.warns(UserWarning, match="linear_attention"):
        sampler = TorchSampler(model, None, max_rows=3)
    assert not sampler.cached
    prefix = Prefix(token_T=np.array([5, 6]), logp_behavior_T=np.zeros(2, np.float32), version_T=np.zeros(2, np.int64))
    out = sampler.sample(requests((3, 7), prefixes=[None, prefix]), 2, SamplingParams(max_tokens=6, eos_ids=frozenset({2, 3, 4})))
    for r in out:
        p = r.prefix_length
        np.testing.assert_allclose(r.logp_behavior_T[p:], reference(model, r)[p:], atol=1e-4, rtol=0)


def test_attention_outside_the_registry_is_recomputed():
    class Odd(type(model_of("llama"))):
        @classmethod
        def _can_set_attn_implementation(cls):
            return False

    torch.manual_seed(0)
    model = Odd(CONFIGS["llama"]())
    with pytest.warns(UserWarning, match="registry"):
        slow = TorchSampler(model, None)
    params = SamplingParams(max_tokens=5)
    fast = TorchSampler(model_of("llama"), None).sample(requests(), 2, params)
    for a, b in zip(slow.sample(requests(), 2, params), fast, strict=True):
        assert a.response_T.tolist() == b.response_T.tolist()
        np.testing.assert_allclose(a.logp_behavior_T, b.logp_behavior_T, atol=1e-4)


def test_a_cache_that_disagrees_is_found_out():
    """A model whose forward depends on something the cache cannot know (here: on how many tokens come at once)."""

    class Odd(type(model_of("llama"))):
        def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **options):
            out = super().forward(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **options)
            out.logits = out.logits * (1 + input_ids.shape[1])
            return out

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="from the model's own"):
        assert not TorchSampler(Odd(CONFIGS["llama"]()), None).cached


def test_prompt_is_computed_once_for_its_group():
    model = model_of()
    sampler = TorchSampler(model, None)
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: seen.append(ids[0].numel()))
    sampler.sample(requests((9, 9)), 8, SamplingParams(max_tokens=4))
    hook.remove()
    assert seen == [18, 16, 16, 16]


def test_finished_rows_leave_and_waiting_rows_enter():
    model = model_of()
    sampler = TorchSampler(model, None, max_rows=8)
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, ids, out: seen.append(tuple(ids[0].shape)))
    out = sampler.sample(requests((4,) * 12), 4, SamplingParams(max_tokens=20, eos_ids=frozenset(range(6))))
    hook.remove()
    decoded = sum(rows for rows, length in seen if length == 1)
    assert decoded == sum(len(r.response_T) - 1 for r in out)  # not one step for a row that had ended
    assert max(rows for rows, length in seen if length == 1) <= 8
    assert_exact(model, out)


def test_shared_module_loads_without_copies_and_is_handed_back_as_it_was():
    model = model_of()
    model.train()
    model.model.layers[1].eval()
    sampler = TorchSampler(model, None)
    assert sampler.model is model
    before = {name: (value.data_ptr(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    sampler.load(model.state_dict(), 5)
    sampler.load(dict(model.named_parameters()), 6)
    assert {name: (value.data_ptr(), value._version) for name, value in model.state_dict(keep_vars=True).items()} == before
    implementation = model.config._attn_implementation
    sampler.sample(requests(), 2, SamplingParams(max_tokens=3))
    assert model.config._attn_implementation == implementation
    assert model.training
    assert not model.model.layers[1].training
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()  # nothing of inference mode is left in the module
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)  # an optimizer step is seen without any copy
    assert_exact(model, sampler.sample(requests(), 2, SamplingParams(max_tokens=3)))


def test_dropout_is_off_while_sampling():
    config = CONFIGS["llama"]()
    config.attention_dropout = 0.9
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    assert_exact(copy.deepcopy(model), TorchSampler(model, None).sample(requests(), 2, SamplingParams(max_tokens=3)))


def test_digest_compares_what_was_published():
    trainer = model_of(seed=1)
    sampler = TorchSampler(model_of(), None)
    for weights in (trainer.state_dict(), dict(trainer.named_parameters())):  # tied: two names, and one
        sampler.load(weights, 1)
        assert sampler.digest() == weights_digest(weights)
    with torch.no_grad():
        trainer.model.norm.weight[3] += 1e-6
    assert sampler.digest() != weights_digest(dict(trainer.named_parameters()))
    low = TorchSampler(model_of(), None, dtype=torch.bfloat16)
    low.load(trainer.state_dict(), 2)
    assert low.digest() == weights_digest(trainer.state_dict(), dtype=torch.bfloat16)
    assert weights_digest({"a": torch.zeros(2, 3)}) != weights_digest({"a": torch.zeros(3, 2)})
    assert weights_digest({"a": torch.zeros(2), "b": torch.ones(2)}) != weights_digest({"b": torch.zeros(2), "a": torch.ones(2)})


def test_missing_and_unknown_names_are_told_apart():
    sampler = TorchSampler(model_of("llama"), None)
    weights = model_of("llama", seed=1).state_dict()
    with pytest.raises(EngineError, match=r"1 missing, first 'lm_head.weight'"):
        sampler.load({n: v for n, v in weights.items() if n != "lm_head.weight"}, 1)
    with pytest.raises(EngineError, match=r"1 unknown, first 'lm_haed.weight'.*'lm_head.weight'"):
        sampler.load({**weights, "lm_haed.weight": weights["lm_head.weight"]}, 1)
    with pytest.raises(EngineError, match=r"lm_head.weight: got shape \(3, 16\); expected \(24, 16\)"):
        sampler.load({**weights, "lm_head.weight": torch.zeros(3, 16)}, 1)


def test_bfloat16_copy_of_a_float32_module():
    model = model_of("llama")
    sampler = TorchSampler(model, None, dtype=torch.bfloat16)
    assert sampler.model is not model
    assert model.dtype == torch.float32
    out = sampler.sample(requests(), 4, SamplingParams(max_tokens=6, entropy=True))
    for r in out:
        assert r.logp_behavior_T.dtype == np.float32
        gap = np.abs(r.logp_behavior_T - reference(sampler.model, r))
        assert gap.max() < 0.15  # bfloat16 logits of size 4 are 0.016 apart and the two paths round apart
        assert gap.mean() < 0.03
    sampler.load(model_of("llama", seed=1).state_dict(), 3)
    assert sampler.model.dtype == torch.bfloat16
    assert {int(v) for r in sampler.sample(requests(), 1, SamplingParams(max_tokens=2)) for v in r.version_T} == {3}


def test_merged_lora_weights_load():
    from peft import LoraConfig, get_peft_model

    base = model_of("llama")
    sampler = TorchSampler(model_of("llama"), None)
    lora = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with pytest.raises(EngineError, match="unknown"):
        sampler.load(lora.state_dict(), 1)
    merged = lora.merge_and_unload()
    sampler.load(merged.state_dict(), 1)
    out = sampler.sample(requests(), 2, SamplingParams(max_tokens=4))
    assert_exact(merged, out)
    assert max(np.abs(reference(base, r) - r.logp_behavior_T).max() for r in out) > 0.01


def test_cache_survives_changes_of_size():
    model = model_of()
    sampler = TorchSampler(model, None, max_rows=6)
    for lengths, n, T in (((3,), 1, 2), ((11, 2, 40), 4, 30), ((5,), 2, 3), ((60,), 3, 30)):
        assert_exact(model, sampler.sample(requests(lengths), n, SamplingParams(max_tokens=T)))


def test_equal_prompts_of_two_requests_share_and_differ():
    prompt = requests()[0].prompt
    a, b = TorchSampler(model_of(), None).sample([Request(ticket=i, prompt=prompt) for i in (0, 1)], 1, SamplingParams(max_tokens=12))
    assert a.response_T.tolist() != b.response_T.tolist()


@pytest.mark.parametrize(
    ("n", "change", "message"),
    [
        (0, {}, "n: got 0"),
        (1, {"max_tokens": 0}, "max_tokens: got 0"),
        (1, {"temperature": -0.1}, "temperature: got -0.1"),
        (1, {"temperature": float("nan")}, "temperature: got nan"),
        (1, {"top_p": 0.0}, "top_p: got 0.0"),
        (1, {"top_k": 0}, "top_k: got 0"),
        (1, {"eos_ids": frozenset({V})}, "eos_ids: got"),
        (1, {"stop_strings": ("",)}, "stop_strings"),
        (1, {"stop_strings": ("x",)}, "no tokenizer"),
    ],
)
def test_wrong_parameters(n, change, message):
    with pytest.raises(UsageError, match=message):
        TorchSampler(model_of(), None).sample(requests(), n, SamplingParams(**{"max_tokens": 3, **change}))


def test_wrong_requests():
    sampler = TorchSampler(model_of(), None)
    with pytest.raises(DataError, match=r"prompt 'p0'.*0 prompt tokens"):
        sampler.sample(requests((0,)), 1, SamplingParams(max_tokens=3))
    with pytest.raises(DataError, match=r"94 prompt tokens \+ at most 3 .*at most 96"):
        sampler.sample(requests((94,)), 1, SamplingParams(max_tokens=3))
    with pytest.raises(DataError, match=r"prefixes of prompt 'p0'.*got 1; expected one for each of the 2"):
        sampler.sample(requests((3,), prefixes=[None]), 2, SamplingParams(max_tokens=3))
    with pytest.raises(UsageError, match="max_rows"):
        TorchSampler(model_of(), None, max_rows=0)


def test_non_finite_logits_in_the_middle_name_the_token():
    model = model_of("llama")
    sampler = TorchSampler(model, None)
    steps = iter(range(100))

    def spoil(module, args, out):
        if next(steps) == 3:
            out[1, 0, 0] = float("nan")
        return out

    hook = model.lm_head.register_forward_hook(spoil)
    with pytest.raises(EngineError, match=r"prompt 'p0' \(group 0, sample 1\) at response token 3"):
        sampler.sample(requests((3,)), 2, SamplingParams(max_tokens=6))
    hook.remove()
    assert_exact(model, sampler.sample(requests(), 2, SamplingParams(max_tokens=6)))


def test_special_tokens_count_as_stop_strings_and_are_left_out_of_the_text():
    tokenizer = FakeTokenizer(special=[5])
    out = TorchSampler(model_of(), tokenizer).sample(requests(), 16, SamplingParams(max_tokens=20, stop_strings=("<5>",)))
    ended = [r for r in out if r.stop is StopReason.STOP_STRING]
    assert ended
    for r in ended:
        assert r.response_T.tolist().index(5) == len(r.response_T) - 1
        assert r.text == tokenizer.decode(r.response_T.tolist()[:-1])
