"""What the update costs: fraction of the machine's matrix-product rate, share of objective and metrics, time per token, memory over many updates.

Four children, each a fresh process: `roofline` and `objective` on SmolLM2-135M's shape with random weights (speed does not depend on them),
`tokens` and `memory` on the tiny default.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import Range, bound_verdict, peak_mb, run_child, run_part, table

Say = Callable[[str], None]


def measure(*, quick: bool = False, pairs: int | None = None, model: str | None = None, threads: int = 2, say: Say = print) -> dict[str, Any]:
    """All four parts.

    Args:
        quick: few repetitions.
        model: folder of the tiny model; None is the shipped one.
    """
    repeat = pairs or (1 if quick else 7)
    out: dict[str, Any] = {"repeat": repeat}
    parts: dict[str, tuple[int, dict[str, Any]]] = {
        "roofline": (threads, {"repeat": repeat}),
        "objective": (threads, {"repeat": repeat}),
        "tokens": (1, {"repeat": max(2, repeat), "sizes": [1024, 4096, 16_384] if quick else [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]}),
        "memory": (1, {"updates": 48 if quick else 200}),
    }
    for part, (count, settings) in parts.items():
        out[part] = run_child("update", {"part": part, "model": model or "tiny", **settings}, threads=count) | {"threads": count}
        say(f"update, {part}: " + json.dumps({k: v for k, v in out[part].items() if isinstance(v, int | float | str)}))
    return out


def render(result: dict[str, Any]) -> str:
    """Markdown."""
    r, o, t, m = (result[k] for k in ("roofline", "objective", "tokens", "memory"))
    fraction, share = Range.of(r["fractions"]), Range.of(o["shares"])
    rows = [(f"{n:,}", Range.of(v).text("{:.1f}")) for n, v in zip(t["sizes"], t["us_per_token"], strict=True)]
    medians = [statistics.median(v) for v in t["us_per_token"]]
    return "\n".join([
        f"**Matrix-product rate of the update** (SmolLM2-135M, {r['rows']} rows, {r['packed_tokens']} tokens computed, float32, "
        f"{r['threads']} threads). "
        f"Forward and backward do {r['model_gflop']:.0f} GFLOP by the shapes that are computed (forward counted by torch's flop counter, backward "
        f"twice that; recomputation in the log-probs not counted: with it {r['executed_gflop']:.0f}). A {r['gemm']}^3 product in turns with it: "
        f"{Range.of(r['gemm_gflops']).text()} GFLOP/s; update {Range.of(r['update_s']).text('{:.2f}')} s, optimizer step included. "
        f"Fraction {fraction.text('{:.2f}')}; target 0.5: **{bound_verdict(r['fractions'], at_least=0.5)}**.",
        "",
        f"**Objective and metrics** (same batch): loss, its gradient to the log-probs, metrics of the update and of the rollout batch, row of "
        f"`metrics.jsonl`: {Range.of(o['objective_ms']).text()} ms of an update of {Range.of(o['update_ms']).text('{:.0f}')} ms "
        "(sampling not counted): "
        f"{share.text('{:.2%}')}; target 2 %: **{bound_verdict(o['shares'], at_most=0.02)}**.",
        "",
        "**Time per token against tokens per batch** (tiny default, one thread, prompt and response tokens of padless rows):", "",
        table(("tokens in the batch", "us/token, median (min-max)"), rows), "",
        f"Largest median / smallest: {max(medians) / min(medians):.2f}; widest range of one size: {t['noise']:.2f}: "
        f"**{t['verdict']}** (flat within noise).",
        "",
        f"**Memory over {m['updates']} updates** (tiny default, N = 16): resident {m['first_mb']:.0f} MB at update {m['from']}, "
        f"{m['last_mb']:.0f} MB at the end; Theil-Sen slope {m['slope_kb']:+.1f} kB/update: **{m['verdict']}** "
        "(at most 1 % of the resident memory over the run).",
    ])  # fmt: skip


def _batch(rows: int, group: int, prompt: int, response: int, vocabulary: int) -> Any:
    """Random groups of equal length with behaviour log-probs near those of a uniform policy."""
    import numpy as np

    from nearpolicy.rollout import Outcome, Rollout, Score, Scored, StopReason, collate

    rng = np.random.default_rng(0)
    scored = []
    for b in range(rows):
        if b % group == 0:
            prompt_ids = rng.integers(3, vocabulary, prompt)
        rollout = Rollout(
            prompt_id=str(b // group), group=b // group, sample=b % group, prompt_P=prompt_ids, response_T=rng.integers(3, vocabulary, response),
            logp_behavior_T=np.full(response, -float(np.log(vocabulary)), np.float32), version_T=np.zeros(response, np.int64), stop=StopReason.LENGTH,
        )  # fmt: skip
        scored.append(Scored(rollout=rollout, score=Score(reward=float(b % 2), outcome=Outcome.SCORE)))
    return collate(scored, advantage_B=[1.0 if b % 2 else -1.0 for b in range(rows)]), scored


def _stepper(model: Any, budget: int = 16_384) -> Any:
    import torch

    from nearpolicy.methods import method
    from nearpolicy.policy.hf import HFPolicy
    from nearpolicy.trainer.step import StepOptions, Stepper

    policy = HFPolicy(model, dtype="float32", token_budget=budget)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    return Stepper(policy, method("vespo"), optimizer, StepOptions(grad_clip=1.0, kl_coefficient=0.0, kl_estimator="k3", entropy_coefficient=0.0),
                   lambda _: 1e-6)  # fmt: skip


def _smollm2() -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def roofline(spec: dict[str, Any]) -> dict[str, Any]:
    """Updates and large matrix products in turns."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from nearpolicy.policy.packing import pack

    batch, _ = _batch(64, 8, 50, 16, 49_152)
    stepper = _stepper(_smollm2())
    stepper.update(batch, 0)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        stepper.policy.score(batch)
    # The counter knows addmm and not its in-place form, by which the log-probs' backward sums its products.
    in_place: Any = {torch.ops.aten.addmm_: lambda _, a, b, *__, **___: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as both:
        stepper.update(batch, 0)
    model_flop, executed = 3 * forward.get_total_flops(), both.get_total_flops()
    n = 3072
    a, b = torch.randn(n, n), torch.randn(n, n)
    a @ b
    gemm, update = [], []
    for i in range(spec["repeat"]):
        gemm.append(2 * n**3 / min(_seconds(lambda: a @ b) for _ in range(3)) / 1e9)
        update.append(_seconds(lambda i=i: stepper.update(batch, i)))  # type: ignore[misc]
    return {
        "rows": len(batch), "packed_tokens": pack(batch, "cpu").num_tokens, "model_gflop": model_flop / 1e9, "executed_gflop": executed / 1e9,
        "gemm": n, "gemm_gflops": gemm, "update_s": update, "peak_mb": peak_mb(),
        "fractions": [model_flop / 1e9 / s / g for s, g in zip(update, gemm, strict=True)],
    }  # fmt: skip


def objective(spec: dict[str, Any]) -> dict[str, Any]:
    """The update, and in turns everything in it and around it that is neither model nor optimizer."""
    import torch

    from nearpolicy.diagnostics.rollouts import rollout_metrics
    from nearpolicy.methods import policy_loss
    from nearpolicy.metrics import Mean, merge, to_floats
    from nearpolicy.trainer.alarms import Alarms
    from nearpolicy.trainer.trackers import JsonlTracker

    batch, scored = _batch(64, 8, 50, 16, 49_152)
    stepper, alarms = _stepper(_smollm2()), Alarms()
    tracker = JsonlTracker(Path(spec["scratch"]) / "metrics.jsonl")
    logp = (batch.logp_behavior_BT + 0.1 * torch.randn(batch.token_BT.shape)).requires_grad_()

    def own(step: int) -> None:
        out = policy_loss(stepper.method, logp=logp, **stepper._columns(batch), num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
        out.loss.backward()
        metrics = merge([{**out.metrics, **rollout_metrics(scored), "train/grad_norm": Mean(1.0, 1)}])
        values = to_floats(metrics)
        alarms.watch(step, values)
        tracker.log(step, "train", values)

    stepper.update(batch, 0)
    own(0)
    update, mine = [], []
    for i in range(spec["repeat"]):
        update.append(_seconds(lambda i=i: stepper.update(batch, i)))  # type: ignore[misc]
        mine.append(statistics.median(_seconds(lambda i=i: own(i + 1)) for _ in range(5)))  # type: ignore[misc]
    tracker.close()
    return {
        "update_ms": [1000 * s for s in update], "objective_ms": [1000 * s for s in mine],
        "shares": [m / u for m, u in zip(mine, update, strict=True)],
    }  # fmt: skip


def tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """Updates of batches of different sizes in turns, on the tiny model with the default token budget."""
    from nearpolicy.build import model_folder
    from nearpolicy.policy.loading import load_model

    prompt, response, group = 26, 38, 8
    stepper = _stepper(load_model(model_folder(spec["model"]), dtype="float32", device="cpu")[0])
    batches = [_batch(n // (prompt + response), group, prompt, response, 32)[0] for n in spec["sizes"]]
    times: list[list[float]] = [[] for _ in batches]
    for batch in batches:
        stepper.update(batch, 0)
    for _ in range(spec["repeat"]):
        for batch, own in zip(batches, times, strict=True):
            count = len(batch) * (prompt + response)
            again = max(1, 8192 // count)  # small batches are timed over several updates
            own.append(1e6 * _seconds(lambda b=batch, k=again: [stepper.update(b, 0) for _ in range(k)]) / count / again)  # type: ignore[misc]
    medians = [statistics.median(v) for v in times]
    noise = max((max(v) - min(v)) / m for v, m in zip(times, medians, strict=True))
    flat = max(medians) / min(medians) - 1 <= noise
    # Less time per token in larger batches is no growth: only a rise from some smaller batch to a larger one counts against it.
    rise = max(b / a for i, a in enumerate(medians) for b in medians[i:]) - 1
    verdict = "holds" if flat else "holds (falls with size, rises nowhere)" if rise <= noise else "does not hold"
    return {"sizes": spec["sizes"], "us_per_token": times, "noise": noise, "rise": rise, "verdict": verdict, "peak_mb": peak_mb()}


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Resident memory from `metrics.jsonl` of a run without evaluation; the first quarter fills caches and is left out."""
    from nearpolicy import build

    n = spec["updates"]
    out = Path(spec["scratch"]) / "run"
    keys = (f"train.steps={n}", "schedule.updates_per_rollout=16", "task.heldout=0", "eval.every=0", "checkpoint.every=1000000", "threads=1")
    build.train(build.config_for(["tiny", *keys, f"model.path={json.dumps(spec['model'])}"]), out, say=lambda _: None)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    series = [(r["step"], r["time/memory_mb"]) for r in rows if r.get("kind") == "train"][n // 4 :]
    slopes = [(b - a) / (j - i) for k, (i, a) in enumerate(series) for j, b in series[k + 1 :]]
    slope = statistics.median(slopes)
    holds = slope * n <= 0.01 * series[-1][1]
    return {
        "updates": n, "from": series[0][0], "first_mb": series[0][1], "last_mb": series[-1][1], "slope_kb": 1024 * slope,
        "series": series[:: max(1, len(series) // 30)], "verdict": "holds" if holds else "does not hold",
    }  # fmt: skip


PARTS = {"roofline": roofline, "objective": objective, "tokens": tokens, "memory": memory}


if __name__ == "__main__":
    run_part(PARTS)
