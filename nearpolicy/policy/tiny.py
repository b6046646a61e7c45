"""The tiny model of the embedded default: a Qwen3-architecture causal LM with a character vocabulary, as a plain Hugging Face folder.

2 layers, hidden 64, 4 heads over 2 key/value heads of 16, MLP 256, 32 characters, tied embeddings: 125,312 parameters. The initial
standard deviation is 0.05; with the usual 0.02 a model this narrow starts so flat that a short supervised run does not reach exactness.

`tiny-moe` is its sparse sister: a Qwen3-MoE-architecture model, the same but for its MLPs: 8 experts of 64, 2 for each token, gates normalised
over the two: 224,640 parameters.
"""

from pathlib import Path
from typing import Any

import torch

from nearpolicy.tasks.arithmetic import ALPHABET

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
"""The architecture; keys of `transformers.Qwen3Config`."""

TINY_MOE: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key != "intermediate_size"},
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""The sparse architecture; keys of `transformers.Qwen3MoeConfig`."""


def character_tokenizer(alphabet: str = ALPHABET) -> Any:
    """A fast tokenizer with one token a character, after <pad> = 0, <eos> = 1, <unk> = 2; no BOS, no chat template.

    `decode(encode(text)) == text` for text over the alphabet; any other character becomes <unk>.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False, model_max_length=256
    )  # fmt: skip


def tiny_model(*, seed: int = 0, vocab_size: int | None = None, experts: bool = False, **overrides: Any) -> Any:
    """A freshly initialised model in float32.

    Args:
        seed: of the weights; the global torch generator is left as it was.
        vocab_size: None is that of `character_tokenizer()`.
        experts: the sparse architecture.
        overrides: other values for keys of `TINY` or of `transformers.Qwen3Config` (`TINY_MOE`, `Qwen3MoeConfig`).
    """
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    kind, shape = (Qwen3MoeConfig, TINY_MOE) if experts else (Qwen3Config, TINY)
    config = kind(**{"vocab_size": vocab_size or 3 + len(ALPHABET), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, **shape, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def make_tiny(folder: str | Path, *, seed: int = 0, experts: bool = False) -> Path:
    """Write a freshly initialised tiny model (with `experts` the sparse one) and its tokenizer to `folder` and return it.

    `AutoModelForCausalLM` and `AutoTokenizer` load the folder as it is. Files of the same names are replaced.
    """
    path = Path(folder)
    tiny_model(seed=seed, experts=experts).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
