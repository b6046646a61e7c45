"""Tiny random models and batches for the policy tests."""

import numpy as np
import torch

from nearpolicy.rollout import Batch, Outcome, Rollout, Score, Scored, StopReason, collate

VOCAB = 32


def tiny(kind: str, **changes: object) -> torch.nn.Module:
    """A random model of one architecture with weights large enough to make log-probs far from uniform."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    gpt2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
    configs = {
        "qwen3": lambda: Qwen3Config(**{**common, **changes}),
        "llama": lambda: LlamaConfig(**{**common, **changes}),
        "qwen3_moe": lambda: Qwen3MoeConfig(**{**common, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **changes}),
        "mixtral": lambda: MixtralConfig(**{**common, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}),
        "gpt2": lambda: GPT2Config(**{**gpt2, "bos_token_id": None, "eos_token_id": 1, **changes}),
        "mistral": lambda: MistralConfig(**{**common, "sliding_window": 4, **changes}),
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs[kind]())


def batch_of(rows: list[tuple[int, int, int]], *, seed: int = 0, temperature: list[float] | float = 1.0, vocab: int = VOCAB) -> Batch:
    """Rows of (group, prompt length, response length); rows of one group and prompt length have one prompt."""
    rng = np.random.default_rng(seed)
    prompts: dict[tuple[int, int], np.ndarray] = {}
    scored = []
    for i, (group, p, r) in enumerate(rows):
        prompt = prompts.setdefault((group, p), rng.integers(2, vocab, p))
        rollout = Rollout(
            prompt_id=str(group), group=group, sample=i, prompt_P=prompt, response_T=rng.integers(2, vocab, r),
            logp_behavior_T=np.zeros(r, dtype=np.float32), version_T=np.zeros(r, dtype=np.int64), stop=StopReason.EOS,
            temperature=temperature[i] if isinstance(temperature, list) else temperature,
        )  # fmt: skip
        scored.append(Scored(rollout=rollout, score=Score(reward=0.0, outcome=Outcome.SCORE)))
    return collate(scored, advantage_B=rng.standard_normal(len(rows)).tolist())
