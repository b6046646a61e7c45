"""Tokens per second of the embedded sampler against transformers' generate: same model, prompts, lengths, threads; runs take turns.

Useful tokens count: those up to and including a response's end. Both return sampled tokens at temperature 1; the sampler also returns their
exact log-probs, which generate does not (scores of every step would have to be kept). Random weights: speed does not depend on them, and the
share of responses that end early is set by `--eos`, a set of ids at random (0: every response runs to its limit).

    python bench/sampler.py                              # the tiny default: 64 prompts x 8, 26 + 48 tokens, vocabulary 32
    OMP_NUM_THREADS=2 python bench/sampler.py smollm2    # SmolLM2-135M's shape: 8 prompts x 8, 50 + 64 tokens
    python bench/sampler.py smollm2 --dtype bfloat16 --prompts 32
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prompt
from nearpolicy.sampler.torch import TorchSampler

SHAPES: dict[str, tuple[Callable[[], Any], int, int, int]] = {  # config, prompts, prompt tokens, response tokens
    "tiny": (
        lambda: Qwen3Config(
            vocab_size=32, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05,
        ),
        64, 26, 48,
    ),
    "smollm2": (
        lambda: LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=2048, tie_word_embeddings=True,
        ),
        8, 50, 64,
    ),
}  # fmt: skip


class Ours:
    """TorchSampler on the model itself."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.sampler = TorchSampler(model, None, max_rows=max_rows)

    def run(self, prompts: np.ndarray, group: int, tokens: int, eos: list[int], seed: int) -> int:
        """Useful tokens of one call."""
        requests = [Request(ticket=i, prompt=Prompt(id=str(i), token_P=ids, text="")) for i, ids in enumerate(prompts)]
        out = self.sampler.sample(requests, group, SamplingParams(max_tokens=tokens, eos_ids=frozenset(eos), seed=seed))
        return sum(len(r.response_T) for r in out)


class Generate:
    """transformers' generate with its dynamic cache, in batches of `max_rows`."""

    def __init__(self, model: Any, max_rows: int) -> None:
        self.model, self.max_rows = model, max_rows

    def run(self, prompts: np.ndarray, group: int, tokens: int, eos: list[int], seed: int) -> int:
        """Useful tokens of one call."""
        torch.manual_seed(seed)
        ids = torch.from_numpy(prompts.repeat(group, 0)).to(self.model.device)
        useful = 0
        for batch in ids.split(self.max_rows):
            out = self.model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=True, max_new_tokens=tokens, top_k=None, top_p=None, pad_token_id=0,
                eos_token_id=eos or None,
            )[:, batch.shape[1] :]  # fmt: skip
            ended = torch.isin(out, torch.tensor(eos, dtype=torch.long, device=out.device))
            useful += int(torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1]).sum())
        return useful


ENGINES = {"generate": Generate, "nearpolicy": Ours}


def main() -> None:
    """Interleave the engines; print one line a run and the median ratio with its range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--eos", type=int, default=0, help="number of ids that end a response")
    parser.add_argument("--rows", type=int, default=512, help="most responses in flight, for both")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    config, prompts, prompt_tokens, tokens = SHAPES[args.shape]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=getattr(torch, args.dtype)).eval()
    V = model.config.vocab_size
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, (args.prompts or prompts, prompt_tokens))
    eos = sorted(rng.choice(V, args.eos, replace=False).tolist())
    work = (ids, args.group, args.tokens or tokens, eos)
    engines = {name: engine(model, args.rows) for name, engine in ENGINES.items()}
    for engine in engines.values():  # warm up: buffers, thread pool
        engine.run(ids[: max(1, len(ids) // 8)], args.group, 4, eos, 0)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for pair in range(args.pairs):
        for name, engine in engines.items():
            start = time.perf_counter()
            useful = engine.run(*work, pair)
            rates[name].append(useful / (time.perf_counter() - start))
            print(f"pair {pair + 1} {name:10s} {rates[name][-1]:10.1f} tokens/s ({useful} tokens)", flush=True)
    ratios = [a / b for a, b in zip(rates["nearpolicy"], rates["generate"], strict=True)]
    print(
        f"{args.shape} {args.dtype}, {ids.shape[0]} x {args.group} x {work[2]} tokens, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, values in rates.items():
        print(f"{name}: median {statistics.median(values):.1f} tokens/s (min {min(values):.1f}, max {max(values):.1f})")
    print(f"nearpolicy / generate: median {statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f}, {args.pairs} pairs)")


if __name__ == "__main__":
    main()
