"""What a relayed rollout batch costs to sample: full responses, and the last 30 % of the same responses after a stored prefix, in turns.

Noise belongs to a token's position, so a response that goes on from its own first tokens is the same response: both sides write equal tokens, and the
lengths are equal by construction. `tiny` is the shipped model, whose responses end by themselves, with the rollout batch of
`experiments/thinking-seeds`; `tiny, many` is eight such batches at once; `smollm2` has SmolLM2-135M's shape with random weights and responses of
full length.
"""

import time
from collections.abc import Callable
from typing import Any

from bench.common import Range, bound_verdict, run_child, run_part, table

Say = Callable[[str], None]
RATIO = 0.7
SHAPES = {"tiny": (8, 8, 56, 0.5), "tiny, many": (64, 8, 56, 0.5), "smollm2": (8, 8, 64, 0.75)}
"""Prompts, group size, response limit, target of the time by that of full responses."""


def measure(*, quick: bool = False, pairs: int | None = None, model: str | None = None, device: str = "cpu", say: Say = print) -> dict[str, Any]:
    """Both shapes, one thread for the tiny one, two for the other.

    Raises:
        RuntimeError: another device than the CPU.
    """
    if device != "cpu":
        raise RuntimeError("this section measures the CPU")
    out: dict[str, Any] = {}
    for name in SHAPES:
        repeat = pairs or (1 if quick else 15 if name != "smollm2" else 5)
        out[name] = run_child("relay", {"part": "sampling", "name": name, "repeat": repeat}, threads=2 if name == "smollm2" else 1)
        say(f"relay, {name}: ratios {[round(a / b, 3) for a, b in zip(out[name]['relayed_s'], out[name]['full_s'], strict=True)]}")
    return out


def render(result: dict[str, Any]) -> str:
    """Markdown."""
    rows, lines = [], []
    for name, (_, _, _, target) in SHAPES.items():
        r = result[name]
        ratios = [a / b for a, b in zip(r["relayed_s"], r["full_s"], strict=True)]
        rows.append((name, r["responses"], f"{r['full_tokens']:,}", f"{r['relayed_tokens']:,}", f"{r['kept_tokens']:,}",
                     Range.of(r["full_s"]).text("{:.3f}"), Range.of(r["relayed_s"]).text("{:.3f}"), len(ratios)))  # fmt: skip
        lines.append(f"- {name}: {Range.of(ratios).text('{:.2f}')} of the time of full responses; target at most {target}: "
                     f"**{bound_verdict(ratios, at_most=target)}**; tokens decoded = full - kept: "
                     f"**{'holds' if r['relayed_tokens'] == r['full_tokens'] - r['kept_tokens'] and r['equal'] else 'does not hold'}**")  # fmt: skip
    head = ("model", "responses", "tokens decoded, full", "relayed", "kept", "seconds, full", "seconds, relayed", "pairs")
    return "\n".join([f"Prefixes of {RATIO:.0%} of each response (length_ratio).", "", table(head, rows), "", *lines])


def sampling(spec: dict[str, Any]) -> dict[str, Any]:
    """Full and relayed batches in turns."""
    import numpy as np

    from bench.update import _smollm2
    from nearpolicy.build import SHIPPED
    from nearpolicy.objective.position import length_cut
    from nearpolicy.policy.loading import load_model
    from nearpolicy.protocols import Request, SamplingParams
    from nearpolicy.rollout import Prompt
    from nearpolicy.sampler.torch import TorchSampler
    from nearpolicy.sources.bank import beginning

    name = spec["name"]
    prompts, n, limit, _ = SHAPES[name]
    rng = np.random.default_rng(0)
    if name != "smollm2":
        from nearpolicy.build import Prompts, build_task, config_for
        from nearpolicy.build_policy import keep_freed_memory

        keep_freed_memory()  # as a run of this model does

        model, tokenizer = load_model(SHIPPED["tiny"])
        config = config_for(["tiny"])
        made = Prompts(build_task(config)[0], tokenizer, config, lambda _: None)
        given, eos = [made.at(k) for k in range(prompts)], frozenset({int(tokenizer.eos_token_id)})
    else:
        model, eos = _smollm2(), frozenset()
        given = [Prompt(id=str(k), token_P=rng.integers(3, 49_152, 50), text="") for k in range(prompts)]
    sampler = TorchSampler(model, None, max_rows=prompts * n)
    params = SamplingParams(max_tokens=limit, eos_ids=eos)
    requests = [Request(ticket=k, prompt=prompt) for k, prompt in enumerate(given)]
    full = sampler.sample(requests, n, params)
    prefixes = [beginning(r, length_cut(len(r.response_T), RATIO)) for r in full]
    relayed = [Request(ticket=k, prompt=prompt, prefixes=prefixes[k * n : (k + 1) * n]) for k, prompt in enumerate(given)]
    again = sampler.sample(relayed, n, params)
    seconds: dict[str, list[float]] = {"full_s": [], "relayed_s": []}
    for _ in range(spec["repeat"]):
        for side, batch in (("full_s", requests), ("relayed_s", relayed)):
            start = time.perf_counter()
            sampler.sample(batch, n, params)
            seconds[side].append(time.perf_counter() - start)
    return {
        **seconds, "responses": len(full), "full_tokens": sum(r.num_sampled for r in full), "relayed_tokens": sum(r.num_sampled for r in again),
        "kept_tokens": sum(len(p.token_T) for p in prefixes),
        "equal": all(np.array_equal(a.response_T, b.response_T) for a, b in zip(full, again, strict=True)),
    }  # fmt: skip


if __name__ == "__main__":
    run_part({"sampling": sampling})
