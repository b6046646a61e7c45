"""Every sampler against the contract: the fake, and the torch sampler on several architectures."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.testing.fakes import FakeSampler
from tests.contract.sampler_suite import TOKENIZER, VOCAB, SamplerSuite

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4, bos_token_id=None, eos_token_id=1
    ),
}


def model_of(kind):
    """A random model with log-probs far from uniform."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]())


class TestFake(SamplerSuite):
    def make(self, max_rows=None):
        return FakeSampler(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)), tokenizer=TOKENIZER)

    def reference(self, sampler, ids):
        return torch.from_numpy(sampler.logits_VV[ids])

    def constant(self, sampler, logits):
        return {"logits": torch.tensor(logits).expand(VOCAB, VOCAB)}

    def other(self, sampler):
        return {"logits": torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))}


class TorchSuite(SamplerSuite):
    kind = "qwen3"

    def make(self, **options):
        return TorchSampler(model_of(self.kind), TOKENIZER, **options)

    def reference(self, sampler, ids):
        with torch.no_grad():
            return sampler.model.eval()(torch.as_tensor(ids)[None], use_cache=False).logits[0].float()

    def constant(self, sampler, logits):
        return _constant_head(sampler.model, logits)

    def other(self, sampler):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(CONFIGS[self.kind]()).state_dict()


def _constant_head(model, logits):
    """Weights under which the next token has these logits in every context.

    Blocks add nothing, and row v of the embedding and of the head (tied or not) is (logit_v + c, 0, ...) with c making all positive: the final
    norm takes the size of a token's own embedding away and leaves (sqrt(D), 0, ...), which the head turns into logit_v + c."""
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    values = torch.tensor(logits, dtype=torch.float64)
    scale = float(model.config.get_text_config().hidden_size ** 0.5)  # RMS norm of (x, 0, ...) is (sqrt(D), 0, ...)
    shifted = values - values.min() + 40.0
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
            weights[name][:, 0] = (shifted / scale).to(weights[name].dtype)
        if name.endswith(("model.norm.weight",)):
            weights[name][:] = 1.0
    if "transformer.ln_f.bias" in weights:  # a layer norm keeps no sign: its bias does
        weights["transformer.ln_f.bias"][0] = scale
    return weights


class TestQwen3(TorchSuite):
    pass


class TestLlama(TorchSuite):
    kind = "llama"


class TestQwen3Moe(TorchSuite):
    kind = "qwen3_moe"


class TestGPT2(TorchSuite):
    kind = "gpt2"
