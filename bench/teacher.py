"""What a teacher costs: its scoring of a rollout batch against a bare forward pass, and memory with teacher, student and reference in one process.

`time` is one child on SmolLM2-135M's shape with random weights: `LocalTeacher.score` (rollouts in, log-probs out) and the model's own forward over
the same rows, padded, with logits at every position, in turns. `memory` are two children that run a few updates of a model with a
character vocabulary: by GRPO alone, and by ExOPD with a teacher and a reference model of the student's size beside it.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import Range, bound_verdict, peak_mb, run_child, run_part

Say = Callable[[str], None]
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
"""Shape of the model of `memory`: 33 million parameters."""


def measure(*, quick: bool = False, pairs: int | None = None, model: str | None = None, device: str = "cpu", say: Say = print) -> dict[str, Any]:
    """Both parts; random weights, so `model` is not read.

    Raises:
        RuntimeError: another device than the CPU, whose counters these are.
    """
    if device != "cpu":
        raise RuntimeError("this section measures the CPU")
    repeat = pairs or (2 if quick else 9)
    shape = {"rows": 8, "prompt": 40, "response": 24} if quick else {"rows": 32, "prompt": 50, "response": 64}
    out: dict[str, Any] = {"time": run_child("teacher", {"part": "time", "repeat": repeat, **shape}, threads=2)}
    say(f"teacher, time: ratios {out['time']['ratios']}")
    for name in ("rl", "distillation"):
        runs = [run_child("teacher", {"part": "memory", "run": name, "updates": 2 if quick else 4}, threads=2) for _ in range(1 if quick else 3)]
        out[name] = {"peak_mb": [r["peak_mb"] for r in runs], "weights_mb": runs[0]["weights_mb"]}
        say(f"teacher, memory of {name}: {out[name]['peak_mb']} MB, weights {out[name]['weights_mb']:.0f} MB")
    return out


def render(result: dict[str, Any]) -> str:
    """Markdown."""
    t, rl, both = result["time"], result["rl"], result["distillation"]
    extra = [max(0.0, b - 2 * both["weights_mb"]) / r for b, r in zip(both["peak_mb"], rl["peak_mb"], strict=True)]
    return "\n".join([
        f"**Scoring a rollout batch** (SmolLM2-135M's shape, {t['rows']} rows of {t['prompt']} prompt and up to {t['response']} response tokens, "
        f"groups of {t['group']}, float32): `LocalTeacher.score` {Range.of(t['score_s']).text('{:.2f}')} s, the model's own forward over the padded "
        f"rows {Range.of(t['forward_s']).text('{:.2f}')} s; {Range.of(t['ratios']).text('{:.2f}')}x; target at most 1.15: "
        f"**{bound_verdict(t['ratios'], at_most=1.15)}**. Without a shared prompt (groups of one): {Range.of(t['alone']).text('{:.2f}')}x: "
        f"**{bound_verdict(t['alone'], at_most=1.15)}**.",
        "",
        f"**Memory** ({both['weights_mb']:.0f} MB of float32 weights a model): peak of an RL run {Range.of(rl['peak_mb']).text('{:.0f}')} MB; with "
        f"teacher and reference beside the student {Range.of(both['peak_mb']).text('{:.0f}')} MB. Without the weights of the two that is "
        f"{Range.of(extra).text('{:.2f}')}x of the RL run's; target at most 1.2: **{bound_verdict(extra, at_most=1.2)}**.",
    ])  # fmt: skip


def _rollouts(spec: dict[str, Any], group: int) -> list[Any]:
    """Random responses of half to full length."""
    import numpy as np

    from nearpolicy.rollout import Rollout, StopReason

    rng = np.random.default_rng(0)
    out = []
    for b in range(spec["rows"]):
        if b % group == 0:
            prompt = rng.integers(3, 49_152, spec["prompt"])
        T = int(rng.integers(spec["response"] // 2, spec["response"] + 1))
        out.append(Rollout(
            prompt_id=str(b // group), group=b // group, sample=b % group, prompt_P=prompt, response_T=rng.integers(3, 49_152, T),
            logp_behavior_T=np.full(T, -10.8, np.float32), version_T=np.zeros(T, np.int64), stop=StopReason.LENGTH,
        ))  # fmt: skip
    return out


def scoring(spec: dict[str, Any]) -> dict[str, Any]:
    """Scoring and bare forwards in turns."""
    import torch

    from bench.update import _smollm2
    from nearpolicy.policy.hf import HFPolicy
    from nearpolicy.policy.teacher import LocalTeacher, as_batch

    model = _smollm2()
    teacher = LocalTeacher(HFPolicy(model, dtype="float32"))
    group = 8

    @torch.no_grad()
    def forward(token_BT: Any) -> None:
        model(input_ids=token_BT, use_cache=False)

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    found: dict[int, tuple[list[float], list[float]]] = {group: ([], []), 1: ([], [])}
    for size, (score, bare) in found.items():
        rollouts = _rollouts(spec, size)
        token_BT = as_batch(rollouts).token_BT
        for i in range(spec["repeat"] + 1):
            times = seconds(lambda r=rollouts: teacher.score(r)), seconds(lambda t=token_BT: forward(t))  # type: ignore[misc]
            if i:  # the first of each warms caches up
                score.append(times[0])
                bare.append(times[1])
    ratios = {size: [a / b for a, b in zip(*own, strict=True)] for size, own in found.items()}
    return {**{k: spec[k] for k in ("rows", "prompt", "response")}, "group": group, "score_s": found[group][0], "forward_s": found[group][1],
            "ratios": ratios[group], "alone": ratios[1]}  # fmt: skip


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak resident memory of a short run."""
    from nearpolicy import build
    from nearpolicy.policy.tiny import character_tokenizer, tiny_model

    folder = Path(spec["scratch"]) / "model"
    model = tiny_model(seed=0, **WIDE)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    del model
    path = json.dumps(str(folder))
    keys = [f"model.path={path}", f"train.steps={spec['updates']}", "rollout.prompts=8", "task.heldout=0", "eval.every=0",
            "checkpoint.every=1000000", "schedule.updates_per_rollout=1", "train.token_budget=4096"]  # fmt: skip
    keys += ["method.name=grpo"] if spec["run"] == "rl" else ["method.name=exopd", f"teacher.path={path}", f"reference.path={path}"]
    build.train(build.config_for(["tiny", *keys]), Path(spec["scratch"]) / "run", report=False, say=lambda _: None)
    return {"peak_mb": peak_mb(), "weights_mb": weights}


PARTS = {"time": scoring, "memory": memory}


if __name__ == "__main__":
    run_part(PARTS)
