"""Jobs around training: warm start by supervised training, and evaluation of a checkpoint. Also what Python users call.

from nearpolicy.jobs import evaluate_checkpoint
numbers = evaluate_checkpoint("runs/first/checkpoints/step-000064", samples=16, ks="1,4,16")
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearpolicy import build
from nearpolicy.build import Say, assemble, model_folder
from nearpolicy.config import Config
from nearpolicy.errors import EngineError, UsageError
from nearpolicy.layers import resolve, to_tree
from nearpolicy.tasks.order import PromptOrder
from nearpolicy.trainer.rundir import write_atomic


def _ks(text: str) -> list[int]:
    """`1,2,4` as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise UsageError("--k", got=repr(text), expected="whole numbers with commas between, for example 1,2,4", do="Write the k of pass@k.")
    return [int(word) for word in words]


def sft(
    config: Config, out: Path | str, *, from_scratch: bool = False, steps: int | None = None, lr: float | None = None, batch_size: int | None = None,
    say: Say = print,
) -> Path:  # fmt: skip
    """Supervised training on the task's demonstrations; writes a Hugging Face folder and returns it.

    Args:
        from_scratch: random weights of the tiny architecture instead of `model.path`, drawn with `seed`.
        steps, lr, batch_size: None takes the defaults of `SftOptions`.
    """
    from nearpolicy.policy.tiny import make_tiny
    from nearpolicy.trainer.sft import SftOptions, SftProgress, accuracy_evaluator, run_sft, save_sft, task_examples

    given = {"steps": steps, "lr": lr, "batch_size": batch_size}
    options = SftOptions(**{k: v for k, v in given.items() if v is not None}, seed=config.seed)  # type: ignore[arg-type]
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--out {target}", got="it exists", expected="a new directory", do="Choose another --out.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny(scratch, seed=config.seed) if from_scratch else model_folder(config.model.path)
        with assemble(config, folder, say) as parts:
            every = max(1, options.steps // 20)

            def show(p: SftProgress) -> None:
                if p.step % every == 0 or p.step == p.steps:
                    say(f"step {p.step}/{p.steps}  loss {p.loss:.4f}  lr {p.lr:.2e}  grad norm {p.grad_norm:.2f}  {p.seconds:.0f} s")

            order = PromptOrder(parts.task.train.size, config.seed)
            example = task_examples(parts.task, parts.tokenizer, render=parts.prompts.render, index=order.index)
            score = accuracy_evaluator(
                parts.sampler, parts.pool, parts.prompts.heldout, max_tokens=parts.params.max_tokens, eos_ids=parts.params.eos_ids, seed=config.seed
            )
            parts.model.train()
            result = run_sft(parts.model, example, options=options, evaluate=score if parts.prompts.heldout else None, progress=show)
            parts.model.eval()
            facts = {"task": to_tree(config)["task"], "model": "tiny, from scratch" if from_scratch else config.model.path}
            save_sft(target, parts.model, parts.tokenizer, result=result, options=options, facts=facts)
    say("  ".join(f"{name} {value:.3f}" for name, value in result.evaluation.items()))
    return target


def evaluate_checkpoint(
    checkpoint: Path | str, parts: Sequence[str] = (), *, suite: Path | None = None, samples: int | None = None, ks: str | None = None,
    temperature: float | None = None, top_p: float | None = None, json_out: Path | None = None, say: Say = print,
) -> dict[str, float]:  # fmt: skip
    """Evaluate a model folder on its run's held-out prompts (or those of the configuration), or on the benchmarks of a suite.

    A checkpoint inside a run directory takes the run's configuration; `parts` go on top.
    """
    from nearpolicy.suites import find_suite, read_suite

    folder = model_folder(str(checkpoint))
    run = next((p for p in folder.resolve().parents if (p / "run.toml").exists()), None)
    base = build.config_for(parts, run)
    overrides: dict[str, Any] = {"k": _ks(ks)} if ks is not None else {}
    overrides |= {k: v for k, v in {"samples": samples, "temperature": temperature, "top_p": top_p}.items() if v is not None}
    if samples and ks is None:
        overrides["k"] = [k for k in base.eval.k if k <= samples]
    configs = {"eval": resolve([to_tree(base), {"model": {"path": str(folder)}, "eval": overrides}])}
    if suite is not None:
        configs = {b.name: b.configure(to_tree(base), folder, overrides) for b in read_suite(find_suite(suite))}
    out: dict[str, float] = {}
    for name, config in configs.items():
        with assemble(config, folder, say) as built:
            values = built.evaluate(0, name)
            if values[f"{name}/unscored_frac"] == 1.0:
                raise EngineError(f"{name}: {len(built.prompts.heldout)} prompts", got="not one response that the reward functions could score",
                                  expected="some scored", do="They abstained or failed on all: look at task.rewards and the answers.")  # fmt: skip
            if config.eval.greedy and f"{name}/greedy" not in values:
                say(f"{name}: no greedy response could be scored, so there is no greedy score")
            say(f"{name}: {len(built.prompts.heldout)} prompts x {config.eval.samples} samples, temperature {config.eval.temperature:g}, "
                f"top-p {config.eval.top_p:g}")  # fmt: skip
        for key in [k for k in values if not k.endswith(("/low", "/high"))]:
            low, high = values.get(f"{key}/low"), values.get(f"{key}/high")
            say(f"  {key.removeprefix(name + '/'):14} {values[key]:.4f}" + (f"  [{low:.4f}, {high:.4f}]" if low is not None else ""))
        out |= values
    if json_out is not None:
        write_atomic(json_out, json.dumps(out, indent=1))
    return out
