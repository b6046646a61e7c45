"""Jobs around training: warm start by supervised training, and evaluation of a checkpoint. Also what Python users call.

from nearpolicy.jobs import evaluate_checkpoint
numbers = evaluate_checkpoint("runs/first/checkpoints/step-000064", samples=16, ks="1,4,16")
"""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nearpolicy import build
from nearpolicy.build import Say, assemble, model_folder
from nearpolicy.config import Config
from nearpolicy.errors import EngineError, UsageError
from nearpolicy.layers import resolve, to_tree
from nearpolicy.policy.loading import load_model
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.tasks.order import PromptOrder
from nearpolicy.trainer.relay_inference import check_earlier, relay_inference
from nearpolicy.trainer.rundir import run_of, write_atomic


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
        from_scratch: random weights of the tiny architecture (the sparse one where `model.path` is `tiny-moe`) in place of those of `model.path`,
            drawn with `seed`.
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
        sparse = config.model.path == "tiny-moe"
        folder = make_tiny(scratch, seed=config.seed, experts=sparse) if from_scratch else model_folder(config.model.path)
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
            facts = {"task": to_tree(config)["task"], "model": f"tiny{'-moe' if sparse else ''}, from scratch" if from_scratch else config.model.path}
            save_sft(target, parts.model, parts.tokenizer, result=result, options=options, facts=facts)
    say("  ".join(f"{name} {value:.3f}" for name, value in result.evaluation.items()))
    return target


def _configs(
    folder: Path, parts: Sequence[str], suite: Path | None, samples: int | None, ks: str | None, temperature: float | None, top_p: float | None
) -> dict[str, Config]:
    """What to evaluate by name: the held-out prompts of the folder's run (or of the configuration) as `eval`, or each benchmark of a suite."""
    from nearpolicy.suites import find_suite, read_suite

    run = run_of(folder)
    base = build.config_for(parts, run)
    overrides: dict[str, Any] = {"k": _ks(ks)} if ks is not None else {}
    overrides |= {k: v for k, v in {"samples": samples, "temperature": temperature, "top_p": top_p}.items() if v is not None}
    if samples and ks is None:
        overrides["k"] = [k for k in base.eval.k if k <= samples]
    if suite is not None:
        return {b.name: b.configure(to_tree(base), folder, overrides) for b in read_suite(find_suite(suite))}
    return {"eval": resolve([to_tree(base), {"model": {"path": str(folder)}, "eval": overrides}])}


def evaluate_checkpoint(
    checkpoint: Path | str, parts: Sequence[str] = (), *, suite: Path | None = None, samples: int | None = None, ks: str | None = None,
    temperature: float | None = None, top_p: float | None = None, json_out: Path | None = None, say: Say = print,
) -> dict[str, float]:  # fmt: skip
    """Evaluate a model folder on its run's held-out prompts (or those of the configuration), or on the benchmarks of a suite.

    A checkpoint inside a run directory takes the run's configuration; `parts` go on top.
    """
    folder = model_folder(str(checkpoint))
    out: dict[str, float] = {}
    for name, config in _configs(folder, parts, suite, samples, ks, temperature, top_p).items():
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


def relay_checkpoints(
    checkpoint: Path | str, earlier: Path | str, parts: Sequence[str] = (), *, fractions: str = "0.5", suite: Path | None = None,
    samples: int | None = None, ks: str | None = None, temperature: float | None = None, top_p: float | None = None,
    json_out: Path | None = None, plot: Path | None = None, say: Say = print,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Relay inference: `earlier` writes the first part of each response, `checkpoint` the rest; pass@k against each alone.

    Args:
        fractions: shares that the earlier model writes, with commas between.
        plot: HTML page with the curves; None writes none.
    Returns:
        `trainer.relay_inference.Relay.document` of the held-out prompts (`eval`) or of each benchmark, with the names of the folders.
    Raises:
        UsageError: a fraction outside [0, 1], k above the samples.
        CheckpointError: `earlier` has another vocabulary or architecture.
    """
    from nearpolicy.report.relay import relay_page

    shares = _fractions(fractions)
    for path in (json_out, plot):  # an hour of sampling must not end in a folder that is not there
        if path is not None and not path.parent.is_dir():
            raise UsageError(str(path), got="no such folder", expected="a folder that exists", do=f"Create {path.parent} first.")
    folder, before = model_folder(str(checkpoint)), model_folder(str(earlier))
    out: dict[str, dict[str, Any]] = {}
    for name, config in _configs(folder, parts, suite, samples, ks, temperature, top_p).items():
        made = _relay(config, folder, before, shares, say)
        named = {"checkpoint": str(checkpoint), "earlier": str(earlier)}
        out[name] = {**named, "temperature": config.eval.temperature, "top_p": config.eval.top_p, **made}
        _say_relay(name, out[name], say)
    if json_out is not None:
        write_atomic(json_out, json.dumps(out, indent=1))
    if plot is not None:
        write_atomic(plot, relay_page(out))
        say(f"plot: {plot}")
    return out


def _relay(config: Config, folder: Path, before: Path, shares: Sequence[float], say: Say) -> dict[str, Any]:
    """Both models side by side on the prompts of one configuration."""
    with assemble(config, folder, say) as built:
        model, tokenizer = load_model(before, device=config.device)
        check_earlier(built.model, built.tokenizer, model, tokenizer, name=str(before))
        first = TorchSampler(model, tokenizer, max_rows=config.rollout.max_rows, dtype=torch.bfloat16 if built.policy.bfloat16 else None)
        built.publish(0)
        params = dataclasses.replace(built.params, temperature=config.eval.temperature, top_p=config.eval.top_p)
        relay = relay_inference(built.sampler, first, built.pool, built.prompts.heldout, params, n=config.eval.samples, ks=config.eval.k,
                                fractions=shares)  # fmt: skip
    return relay.document()


def _say_relay(name: str, made: dict[str, Any], say: Say) -> None:
    """The numbers, one line for each curve and k."""
    say(f"{name}: {made['prompts']} prompts x {made['samples']} samples, temperature {made['temperature']:g}, top-p {made['top_p']:g}; "
        f"beginnings by {made['earlier']}")  # fmt: skip

    def shown(value: dict[str, Any], form: str) -> str:
        if value["mean"] is None:
            return "not enough scored responses"
        mean, low, high = (format(value[end], form) for end in ("mean", "low", "high"))
        return f"{mean} [{low}, {high}]"

    for curve, values in made["curves"].items():
        others = made["differences"].get(curve.removeprefix("relay "))
        for k, value in values.items():
            gap = "" if others is None else "".join(f"  minus {other} {shown(by_k[k], '+.4f')}" for other, by_k in others.items())
            say(f"  {curve:12} pass@{k:<5} {shown(value, '.4f')}{gap}")


def _fractions(text: str) -> list[float]:
    """`0.3,0.5` as numbers in [0, 1]."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    # Curves are named by six digits.
    if not shares or not all(0 <= f <= 1 for f in shares) or len({f"{f:g}" for f in shares}) < len(set(shares)):
        raise UsageError("--relay-fraction", got=repr(text), expected="numbers from 0 to 1 that differ in six digits, for example 0.3,0.5",
                         do="Write the share of each response that the earlier checkpoint writes.")  # fmt: skip
    return shares
