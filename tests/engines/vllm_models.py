"""A model small enough to start vLLM on in seconds, with shapes that its CPU kernels take, and a tokenizer of one letter a token."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tests.contract.sampler_suite import VOCAB

LETTERS = "abcdefghijkl"


def model_of(seed: int = 0):
    """Random weights, log-probs far from uniform. vLLM's CPU attention wants heads of 32 at least."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def letters() -> PreTrainedTokenizerFast:
    """Token i is the i-th letter."""
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def write(folder: Path, seed: int = 0) -> Path:
    """The model's folder, tokenizer included."""
    model_of(seed).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def scores(model, weights):
    """ids -> log-probs of each but the first, by this model with these weights: what `VllmSampler.compare` is given."""
    model.eval().load_state_dict(weights)

    def score(ids):
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()

    return score
