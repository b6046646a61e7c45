"""Tokens per second of sampling on SmolLM2-135M: the embedded sampler, transformers' generate, vLLM on the CPU. 64 rows (8 prompts x 8) x 64 tokens.

Each engine is a process of its own that loads once and measures when asked; the engines take turns. Every response runs to its limit (no id ends
one), so all write the same number of tokens. `bench/sampler.py` is the hand tool for other shapes; its engines are used here.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.common import OURS, VLLM, BenchError, Range, Server, ratio_verdict, run_child, serve, table

PROMPTS, GROUP, TOKENS, PROMPT_TOKENS = 8, 8, 64, 50
TARGETS = {("generate", "float32"): 1.0, ("generate", "bfloat16"): 1.0, ("vllm", "float32"): 1.5, ("vllm", "bfloat16"): 1.15}
ENGINES = {"nearpolicy": OURS, "generate": OURS, "vllm": VLLM}

Say = Callable[[str], None]


def prompt_ids(vocabulary: int) -> list[list[int]]:
    """The same prompts for every engine: speed does not depend on what they say."""
    return [[(7919 * (i + 1) * (j + 3)) % (vocabulary - 100) + 50 for j in range(PROMPT_TOKENS)] for i in range(PROMPTS)]


def measure(
    *, quick: bool = False, pairs: int | None = None, model: str | None = None, device: str = "cpu", threads: int = 2, say: Say = print
) -> dict[str, Any]:  # fmt: skip
    """Every engine in both dtypes.

    Args:
        quick: one pair.
        model: a Hugging Face folder; None is SmolLM2.
    """
    import torch  # not at the top: vLLM's child imports this file in an environment without nearpolicy

    from nearpolicy.policy.loading import fast_bfloat16

    pairs = pairs or (1 if quick else 7)
    folder = model or run_child("sampling", {"where": True}, threads=1)["folder"]
    runs: dict[str, dict[str, list[float]]] = {}
    failed: dict[str, str] = {}
    # On a CPU without bfloat16 matrix products half precision is several times slower than float32.
    for dtype in ("float32", "bfloat16") if device != "cpu" or fast_bfloat16(torch.device("cpu")) else ("float32",):
        servers: dict[str, Server] = {}
        runs[dtype] = {name: [] for name in ENGINES}
        try:
            for name, python in ENGINES.items():
                extra = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} if name == "vllm" else None
                spec = {"engine": name, "dtype": dtype, "model": folder, "device": device}
                try:
                    servers[name] = Server("sampling", spec, python=python, threads=threads, extra=extra)
                except BenchError as error:
                    failed[f"{name} {dtype}"] = str(error)
                    say(f"{name} {dtype}: {error}")
            for pair in range(pairs):
                for name in list(servers):
                    try:
                        got = servers[name].ask(seed=pair)
                    except BenchError as error:
                        failed[f"{name} {dtype}"] = str(error)
                        servers.pop(name).close()
                        continue
                    runs[dtype][name].append(got["tokens"] / got["seconds"])
                    say(f"pair {pair + 1} {name} {dtype}: {runs[dtype][name][-1]:.1f} tokens/s")
        finally:
            for server in servers.values():
                server.close()
    verdicts = {
        f"{peer} {dtype}": ratio_verdict(runs[dtype]["nearpolicy"], runs[dtype][peer], target)
        for (peer, dtype), target in TARGETS.items()
        if dtype in runs and runs[dtype][peer] and runs[dtype]["nearpolicy"]
    }
    return {"runs": runs, "failed": failed, "verdicts": verdicts, "pairs": pairs, "threads": threads}


def render(result: dict[str, Any]) -> str:
    """Markdown."""
    rows: list[tuple[object, ...]] = [
        (name, dtype, Range.of(values).text(), len(values)) for dtype, by in result["runs"].items() for name, values in by.items() if values
    ]
    rows += [(*label.split(), f"did not run: `{why}`", 0) for label, why in result["failed"].items()]
    lines = [
        f"SmolLM2-135M, {PROMPTS} prompts of {PROMPT_TOKENS} tokens x {GROUP} responses of {TOKENS} tokens, {result['threads']} threads; the sampler "
        "also returns exact log-probs, the peers do not.",
        "", table(("engine", "dtype", "tokens/s, median (min-max)", "runs"), rows), "",
    ]  # fmt: skip
    for name, v in result["verdicts"].items():
        lines.append(f"- {v['ratio']:.2f}x {name} (pairs {v['low']:.2f}-{v['high']:.2f}); target {v['target']:g}x: {v['verdict']}")
    return "\n".join(lines)


def _torch_engine(spec: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The embedded sampler or generate, by the classes of `bench/sampler.py`."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from bench.sampler import ENGINES as TORCH

    torch.set_num_threads(spec["threads"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]), local_files_only=True).eval().to(spec["device"])
    model.generation_config.eos_token_id = None
    engine = TORCH[spec["engine"]](model, PROMPTS * GROUP)
    prompts = np.array(prompt_ids(model.config.vocab_size), dtype=np.int64)
    engine.run(prompts, GROUP, 4, [], 0)  # warm up: buffers, thread pool

    def run(seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        tokens = engine.run(prompts, GROUP, TOKENS, [], seed)
        seconds = time.perf_counter() - start
        assert tokens == PROMPTS * GROUP * TOKENS, tokens
        return {"tokens": tokens, "seconds": seconds}

    return run


def _vllm_engine(spec: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """vLLM offline: one request a prompt with n samples; its prefix cache is emptied before each run."""
    from vllm import LLM, SamplingParams

    # On a GPU the other engines hold their memory too.
    room = {"gpu_memory_utilization": 0.5} if spec["device"] != "cpu" else {}
    llm = LLM(model=spec["model"], dtype=spec["dtype"], max_model_len=256, max_num_seqs=PROMPTS * GROUP, seed=0, disable_log_stats=True, **room)
    prompts: Any = [{"prompt_token_ids": ids} for ids in prompt_ids(49_152)]

    def run(seed: int, tokens: int = TOKENS) -> dict[str, Any]:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed, detokenize=False)
        out = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        written = sum(len(o.token_ids) for request in out for o in request.outputs)
        assert written == PROMPTS * GROUP * tokens, written
        return {"tokens": written, "seconds": seconds}

    run(0, tokens=4)
    return run


def main() -> None:
    """A child: serve one engine, or say where the model lies."""
    text = sys.argv[1]
    if text.endswith(".json"):
        from pathlib import Path

        from nearpolicy.build import model_folder

        spec = json.loads(Path(text).read_text())
        Path(spec["result"]).write_text(json.dumps({"folder": str(model_folder("smollm2"))}))
        return
    spec = json.loads(text)
    run = _vllm_engine(spec) if spec["engine"] == "vllm" else _torch_engine(spec)
    serve({}, run)


if __name__ == "__main__":
    main()
