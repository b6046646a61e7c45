"""Synthetic run directories, written as the trainer writes them."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

SPECS = [
    ("reward/mean", "reward", "up", "mean reward of the scored responses of the rollout batch", "reward"),
    ("eval/pass@1", "fraction", "up", "mean score on the held-out prompts at the evaluation temperature", None),
    ("policy/entropy", "nats", "band", "mean entropy at the trained tokens", "entropy"),
    ("policy/kl_behavior_k3", "nats", "down", "k3 estimate", "approx_kl"),
    ("weight/ess_raw", "fraction", "up", "effective sample size of W over the responses", None),
    ("weight/log_sequence", "nats", "band", "log of the product ratio W of each response", None),
    ("weight/dead_frac", "fraction", "down", "responses whose sequence weight has died", None),
    ("ratio/clip_frac", "fraction", "band", "trained tokens whose gradient the kernel sets to zero", None),
    ("ratio/outside_frac", "fraction", "band", "trained tokens outside the reference band", None),
    ("response/truncated_frac", "fraction", "down", "responses cut by the length limit", None),
    ("train/grad_norm", "norm", "band", "global gradient norm before clipping", None),
]
MAGNITUDES = [10 ** (k / 8) for k in range(-32, 33)]
EDGES = [*(-m for m in reversed(MAGNITUDES)), 0.0, *MAGNITUDES]
FULL_CHARTS = {
    "reward", "pass1", "passk", "entropy", "kl", "log-perplexity", "objective", "grad-norm", "ess", "dead", "clip", "age", "log-weight", "log-ratio",
    "log-weight-histogram", "log-weight-heatmap", "length", "truncated", "tokens", "step-time",
}  # fmt: skip


def _quantiles(name: str, values: np.ndarray) -> dict:
    counts = np.bincount(np.searchsorted(EDGES, values, side="left"), minlength=len(EDGES) + 1)
    return {f"{name}/p{q:02d}": float(np.quantile(values, q / 100)) for q in (1, 10, 50, 90, 99)} | {f"{name}/hist": counts.tolist()}


def _train_row(rng: np.random.Generator, step: int, steps: int, speed: float) -> dict:
    done, drift = 1 - math.exp(-speed * step / steps), 0.02 + 0.25 * (step % 8)
    row = {
        "step": step, "kind": "train", "time": 0.21 * step,
        "policy/entropy": 0.9 - 0.5 * done + rng.normal(0, 0.02),
        "policy/kl_behavior_k1": drift * 0.04, "policy/kl_behavior_k3": drift * 0.05 * rng.uniform(0.7, 1.3), "policy/kl_reference": 0.3 * done,
        "policy/objective": rng.normal(0, 0.05), "policy/loss": None if step == 7 else rng.normal(0, 0.05),
        "train/grad_norm": rng.lognormal(-0.5, 0.5),
        "weight/ess_raw": math.exp(-drift), "weight/dead_frac": min(0.3 * drift * rng.uniform(), 1),
        "ratio/clip_frac": 0.05 * drift * rng.uniform(0.5, 1.5),
        "ratio/outside_frac": 0.1 * drift, "stale/age_mean": step % 8, "stale/age_max": step % 8 + 1, "time/step_s": 0.2 * rng.uniform(0.9, 1.2),
        "time/update_s": 0.11, "time/tokens_per_s": 5200 * rng.uniform(0.9, 1.1), "train/lr": 3e-4, "time/memory_mb": 410.0,
        **_quantiles("weight/log_sequence", rng.normal(-drift**2 / 2, drift, 64)),
        **_quantiles("ratio/log_token", rng.standard_t(3, 512) * drift * 0.2),
    }  # fmt: skip
    if step % 8 == 1:  # metrics of a rollout batch are logged with its first update
        row |= {
            "reward/mean": 0.3 + 0.65 * done + rng.normal(0, 0.03), "response/length": 24 - 6 * done, "response/truncated_frac": 0.1 * (1 - done),
            "response/log_perplexity": 0.7 - 0.4 * done, "data/tokens_sampled": 900 * step, "time/sample_s": 0.5, "time/score_s": 0.08,
        }  # fmt: skip
    return row


def _eval_row(rng: np.random.Generator, step: int, steps: int, speed: float) -> dict:
    p = 0.32 + 0.62 * (1 - math.exp(-speed * step / steps))
    ks = {f"eval/pass@{k}": 1 - (1 - p) ** k for k in (2, 4, 8)}
    return {"step": step, "kind": "eval", "time": 0.21 * step, "eval/pass@1": p, "eval/pass@1/low": p - 0.04, "eval/pass@1/high": p + 0.04,
            "eval/greedy": min(p + 0.03, 1), "eval/length": 21.5, "time/eval_s": 0.4, **ks}  # fmt: skip


def rollout_row(rng: np.random.Generator, step: int, sample: int, *, tokens: list[str], prefix: int = 0) -> dict:
    n = len(tokens)
    return {
        "step": step, "group": step * 4 + sample // 4, "sample": sample % 4, "prompt": "17+25*3-(8+4)=", "text": "".join(tokens), "tokens": tokens,
        "logp_behavior": rng.normal(-0.4, 0.3, n).clip(-9, 0).tolist(), "version": [max(step - 9, 0)] * prefix + [max(step - 1, 0)] * (n - prefix),
        "weight": None if sample == 3 else np.exp(rng.normal(-0.2, 1.0, n)).tolist(), "advantage": float(rng.normal()),
        "reward": None if sample == 3 else float(sample % 2), "outcome": "timeout" if sample == 3 else "score",
        "stop": "length" if sample == 2 else "eos",
        "prefix_length": prefix, "source": "relay" if prefix else "fresh",
    }  # fmt: skip


def make_run(path: Path, *, seed: int = 0, steps: int = 120, speed: float = 4.0, method: str = "vespo",
             status: str | None = "finished",
             tokens: list[str] | None = None, prompt: str | None = None,
             alarm: str = "entropy left its band: 0.09 nats", tail: str = "") -> Path:  # fmt: skip
    """A run directory with every file; returns `path`."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    rows: list[dict] = [_eval_row(rng, 0, steps, speed)]
    for step in range(1, steps + 1):
        rows.append(_train_row(rng, step, steps, speed))
        if step % 20 == 0:
            rows.append(_eval_row(rng, step, steps, speed))
        if step == steps // 2:
            rows.append({"step": step, "kind": "alarm", "time": 0.21 * step, "alarm": "entropy", "message": alarm})
    if status:
        rows.append(
            {"step": steps, "kind": "event", "time": 0.21 * steps + 1, "event": status, "message": "out of memory" if status == "failed" else ""}
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    (path / "run.toml").write_text(
        f'seed = {seed}\n[method]\nname = "{method}"\n[schedule]\nkind = "sync"\nupdates_per_rollout = 8\n[train]\nsteps = {steps}\nlr = 3e-4\n'
    )
    (path / "env.json").write_text(json.dumps({"python": "3.11.9", "torch": "2.13.0", "hardware": {"cpu": "example", "threads": 2}}))
    (path / "metrics_table.json").write_text(json.dumps([dict(zip(("name", "unit", "direction", "text", "trl"), s, strict=True)) for s in SPECS]))
    (path / "histogram_edges.json").write_text(json.dumps({"weight/log_sequence": EDGES, "ratio/log_token": EDGES}))
    (path / "rollouts").mkdir()
    words = tokens or list("17+25*3-(8+4)\n=17+75-12\n=92-12\n=80\n")
    for step in (1, steps // 2, steps):
        with gzip.open(path / "rollouts" / f"step-{step:06d}.jsonl.gz", "wt") as f:
            for sample in range(4):
                row = rollout_row(rng, step, sample, tokens=words[: len(words) - sample], prefix=min(8, len(words) - sample) if sample == 1 else 0)
                f.write(json.dumps(row | ({"prompt": prompt} if prompt else {})) + "\n")
    return path


@pytest.fixture
def one_run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "arithmetic-vespo")
