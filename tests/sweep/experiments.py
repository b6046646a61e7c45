"""Experiments and run directories of known numbers, written as a sweep writes them."""

import json

import numpy as np

from nearpolicy.sweep.experiment import Experiment, make_plan

METHODS = {"name": "method", "values": [{"label": "GRPO", "set": {"method.name": "grpo"}}, {"label": "VESPO", "set": {"method": {"name": "vespo"}}}]}
LRS = {"key": "train.lr", "values": [1e-4, 3e-4]}


def plan_of(**tree):
    return make_plan(Experiment.model_validate({"name": "e", **tree}))


def write_run(out, planned, curves_EP, *, steps=None, tokens=None, prompts="p", status="finished"):
    """A run directory whose prompts have these scores [evaluations][prompts] at these updates."""
    curves_EP = np.asarray(curves_EP, float)
    steps = list(steps or range(0, 10 * len(curves_EP), 10))
    tokens = list(tokens or [100 * s for s in steps])
    path = out / "runs" / planned.name
    (path / "evaluations").mkdir(parents=True)
    rows = []
    for step, token, value_P in zip(steps, tokens, curves_EP, strict=True):
        if step:
            rows.append({"step": step, "kind": "train", "time": step, "data/tokens_sampled": token, "reward/mean": 0.5})
        rows.append({"step": step, "kind": "eval", "time": step, "eval/pass@1": float(np.nanmean(value_P))})
        document = {"step": step, "prompts": prompts, "values": {"pass@1": [None if np.isnan(v) else float(v) for v in value_P]}}
        (path / "evaluations" / f"step-{step:06d}.json").write_text(json.dumps(document))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (path / "status.json").write_text(json.dumps({"status": status, "step": steps[-1], "message": ""}))
    (path / "env.json").write_text(json.dumps({"commit": "abc123"}))
    (path / "run.toml").write_text(f"seed = {planned.seed}\n")
    return path
