"""Child of `bench.train`, run in TRL's own environment: one `GRPOTrainer.train()` with the settings of the case.

TRL is set up in its favour where a setting only costs time: no gradient checkpointing (on by default), no logging, no checkpoints, no
progress bar, the fused optimizer, one forward pass a mini-batch. `steps_per_generation` = N, so that N mini-batches are cut from one generation batch
and trained once each (`num_iterations` = 1).
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.common import device_mb, peak_mb

PRECISION = {"float32": (False, torch.float32), "autocast": (True, torch.float32), "bfloat16": (True, torch.bfloat16)}
"""dtype of a case -> (bf16 autocast, dtype of the weights)."""


class Clock(TrainerCallback):
    """When each update ended: wall time, and processor time of this process."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimizer update is done."""
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())


def config(spec: dict[str, Any]) -> GRPOConfig:
    """The case as TRL's arguments."""
    N = spec["updates_per_rollout"]
    autocast, _ = PRECISION[spec["dtype"]]
    return GRPOConfig(
        output_dir=str(Path(spec["scratch"]) / "trl"), per_device_train_batch_size=spec["prompts"] * spec["group"] // N, steps_per_generation=N,
        gradient_accumulation_steps=1, num_iterations=1, num_generations=spec["group"], max_completion_length=spec["max_tokens"],
        max_steps=N * (spec["batches"] + 1), loss_type=spec["loss"], beta=0.0, temperature=1.0, learning_rate=spec["lr"],
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, max_grad_norm=1.0, optim="adamw_torch_fused",
        shuffle_dataset=False, bf16=autocast, use_cpu=spec["device"] == "cpu", gradient_checkpointing=False, logging_strategy="no",
        save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip


def reward_function(spec: dict[str, Any]) -> Callable[..., list[float | None]]:
    """The same function as on the other side, with the case's options."""
    module, _, name = spec["reward"].partition(":")
    function = getattr(importlib.import_module(module), name)

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        return list(function(prompts=prompts, completions=completions, **{**columns, **spec["reward_options"]}))

    return reward


@dataclass(slots=True)
class Span:
    """One call: when, and what it returned."""

    start: float
    end: float
    value: Any


def timed(trainer: GRPOTrainer, name: str) -> list[Span]:
    """Every later call of the trainer's method `name`."""
    inner, spans = getattr(trainer, name), list[Span]()

    def outer(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        value = inner(*args, **kwargs)
        spans.append(Span(start, time.perf_counter(), value))
        return value

    setattr(trainer, name, outer)
    return spans


def main() -> None:
    """Read the settings, train, write the result."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], local_files_only=True)
    rows = [json.loads(line) for line in Path(spec["prompts_file"]).read_text(encoding="utf-8").splitlines()]
    if tokenizer([r["prompt"] for r in rows])["input_ids"] != [r["ids"] for r in rows]:
        raise SystemExit("error: TRL's tokens of the prompts differ from ours")
    # Nested columns (generator metadata) do not fit an Arrow table, and no reward of a case reads them.
    columns = [k for k, v in rows[0]["columns"].items() if isinstance(v, str | int | float)]
    data = Dataset.from_list([{"prompt": r["prompt"], **{k: r["columns"][k] for k in columns}} for r in rows])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=PRECISION[spec["dtype"]][1], local_files_only=True)
    clock = Clock()
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward_function(spec), args=config(spec), train_dataset=data, processing_class=tokenizer, callbacks=[clock]
    )
    batches, generations = timed(trainer, "_generate_and_score_completions"), timed(trainer, "_generate")
    trainer.train()
    N = spec["updates_per_rollout"]
    first, last = clock.ends[N - 1], clock.ends[-1]
    seconds = last - first

    def share(of: list[Span]) -> float:
        return sum(span.end - span.start for span in of if span.start >= first) / seconds

    masks = [span.value["completion_mask"] for span in batches if span.start >= first]
    result = {
        "seconds": seconds, "cpu_seconds": clock.cpu[-1] - clock.cpu[N - 1], "updates": len(clock.ends),
        "samples": spec["prompts"] * spec["group"] * spec["batches"], "generation_batches": len(batches),
        "shares": {"sample": share(generations), "score and log-probs": share(batches) - share(generations), "update": 1 - share(batches)},
        "response_length": sum(float(m.sum()) for m in masks) / sum(len(m) for m in masks),
        "peak_mb": peak_mb(), "device_mb": device_mb(spec["device"]), "threads": torch.get_num_threads(),
    }  # fmt: skip
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
