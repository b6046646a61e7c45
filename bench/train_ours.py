"""Child of `bench.train`: one nearpolicy run in this process, through the public entry `nearpolicy.build.train`. Also writes the shared prompts.

The settings of both sides come from one table (`bench.train.CASES`); this file turns them into configuration keys.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import device_mb, peak_mb


def overrides(spec: dict[str, Any], folder: str) -> list[str]:
    """The settings as `key=value`; whatever only reports (evaluation, checkpoints, sample responses) is off, `metrics.jsonl` stays on."""
    quote = json.dumps
    return [
        f"model.path={quote(folder)}", f"model.dtype={quote(spec['dtype'])}", f"device={quote(spec['device'])}", f"threads={spec['threads']}",
        *(f"task.{key}={value}" for key, value in spec["task"].items()), "task.heldout=0",
        f"rollout.prompts={spec['prompts']}", f"rollout.group_size={spec['group']}", f"rollout.max_tokens={spec['max_tokens']}",
        f"schedule.updates_per_rollout={spec['updates_per_rollout']}", f"train.steps={spec['updates_per_rollout'] * (spec['batches'] + 1)}",
        f"train.lr={spec['lr']}", f"method.name={quote(spec['loss'])}", "eval.every=0", "checkpoint.every=1000000", "log.rollouts_every=0",
    ]  # fmt: skip


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Rollout batch 0 warms up; seconds run from the end of its last update to the end of the last update of all."""
    from nearpolicy import build

    cpu: list[float] = []

    class Clocked(build.JsonlTracker):
        """Notes the processor time at the end of each update."""

        def log(self, step: int, kind: str, values: Any) -> None:
            super().log(step, kind, values)
            if kind == "train":
                cpu.append(time.process_time())

    build.JsonlTracker = Clocked  # type: ignore[misc]
    config = build.config_for([*spec["recipe"], *overrides(spec, spec["model"])])
    out = Path(spec["scratch"]) / "run"
    build.train(config, out, say=lambda _: None)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [r for r in lines if r.get("kind", "train") == "train" and "time/update_s" in r]
    N = spec["updates_per_rollout"]
    measured = rows[N:]
    seconds = rows[-1]["time"] - rows[N - 1]["time"]
    parts = {name: sum(r.get(f"time/{name}_s") or 0.0 for r in measured) for name in ("sample", "score", "logprob", "update")}
    return {
        "seconds": seconds,
        "cpu_seconds": cpu[-1] - cpu[N - 1],
        "samples": spec["prompts"] * spec["group"] * spec["batches"],
        "shares": {name: value / seconds for name, value in parts.items()} | {"rest": 1 - sum(parts.values()) / seconds},
        "response_length": sum(r["response/length"] for r in measured if "response/length" in r) / spec["batches"],
        "reward": sum(r["reward/mean"] for r in measured if "reward/mean" in r) / spec["batches"],
        "peak_mb": peak_mb(),
        "device_mb": device_mb(spec["device"]),
        "threads": _threads(),
    }


def prepare(spec: dict[str, Any]) -> dict[str, Any]:
    """Rendered prompts in the order of training, with the columns of the reward, for both sides; and where the model lies."""
    from transformers import AutoTokenizer

    from nearpolicy import build

    folder = build.model_folder(spec["model"])
    config = build.config_for([*spec["recipe"], *overrides(spec, str(folder))])
    task, reward = build.build_task(config)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = build.Prompts(task, tokenizer, config, lambda _: None)
    with open(spec["prompts_file"], "w", encoding="utf-8") as file:
        for i in range(spec["prompts"] * (spec["batches"] + 1)):
            p = prompts.at(i)
            columns = {k: v for k, v in p.columns.items() if k != "prompt"}
            file.write(json.dumps({"prompt": p.text, "ids": p.token_P.tolist(), "columns": columns}) + "\n")
    only = reward.rewards[0]
    return {"folder": str(folder), "reward": only.path, "reward_options": dict(only.options)}


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def main() -> None:
    """Read the settings, run, write the result."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    result = prepare(spec) if spec.get("prepare") else train(spec)
    Path(spec["result"]).write_text(json.dumps(result | {"process_s": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
