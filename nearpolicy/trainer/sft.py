"""Supervised training on (prompt, completion) pairs: warm starts and teachers.

The loss of a step is the mean negative log-likelihood of the completion tokens (end-of-sequence token included) of its batch,

    loss = -sum_{b, t in completion} log pi(token[b, t] | tokens[b, <t]) / (number of completion tokens in the batch),

in nats per token; prompt and padding are masked. AdamW with linear warm-up and cosine decay to zero. Two runs with one seed on one machine
and thread count give the same bits. The model comes in as an object: any causal LM whose forward takes `labels` and
`num_items_in_batch`, as those of Hugging Face do.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import CheckpointError, DataError, EngineError, UsageError
from nearpolicy.protocols import Request, Sampler, SamplingParams, ScoreItem, Verifier
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Array, Prompt, Score

IGNORED = -100
"""Label of prompt and padding columns; no token has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """How to train. The defaults make the shipped warm start.

    Raises:
        UsageError: a value outside its range.
    """

    steps: int = 450
    """Optimizer updates."""
    batch_size: int = 64
    """Pairs in one update."""
    lr: float = 8e-3
    """Peak learning rate."""
    warmup: int = 50
    """Updates of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moment decays."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None = off."""
    token_budget: int = 16384
    """Tokens (padding included) in one forward and backward pass. The loss does not depend on it."""
    max_length: int = 2048
    """Longest prompt + completion in tokens; a longer pair is an error."""
    seed: int = 0
    """Seed of dropout, and of sampling in evaluations."""

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[bool, str]] = {
            "steps": (self.steps >= 1, ">= 1"),
            "batch_size": (self.batch_size >= 1, ">= 1"),
            "lr": (0 < self.lr < math.inf, "a finite number > 0"),
            "warmup": (self.warmup >= 0, ">= 0"),
            "betas": (all(0 <= b < 1 for b in self.betas), "two numbers in [0, 1)"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "a finite number >= 0"),
            "grad_clip": (self.grad_clip is None or 0 < self.grad_clip < math.inf, "a finite number > 0, or None"),
            "token_budget": (self.token_budget >= 1, ">= 1"),
            "max_length": (self.max_length >= 2, ">= 2"),
        }
        for name, (good, expected) in ranges.items():
            if not good:
                raise UsageError(f"SFT option {name}", got=getattr(self, name), expected=expected, do=f"Set {name} within its range.")

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step` (from 0): linear up over `warmup` updates, then half a cosine that would reach 0 at `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


class Example(NamedTuple):
    """One pair as token ids."""

    id: str
    """Names the row in error messages."""
    prompt_P: Array
    """Prompt ids, int64 [P], P >= 1."""
    response_T: Array
    """Completion ids, the end-of-sequence token last, int64 [T], T >= 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftProgress:
    """What the progress callback is told after each update."""

    step: int
    """Updates done, from 1."""
    steps: int
    loss: float
    """Of this update, nats per token."""
    lr: float
    grad_norm: float
    """Before clipping."""
    seconds: float
    """Since training began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResult:
    """What a run gave."""

    losses: list[float] = field(repr=False)
    """Of every update, nats per token."""
    evaluation: dict[str, float]
    """What the evaluation returned (`greedy`, `pass@1`); empty without one."""
    seconds: float
    """Training time without the evaluation."""


Evaluate = Callable[[Mapping[str, Tensor], int], Mapping[str, float]]
"""(weights by name, updates done) -> named numbers."""


class _Rows(Protocol):
    def row(self, i: int) -> Any: ...


class _Task(Protocol):
    @property
    def train(self) -> _Rows: ...
    def demonstration(self, row: Any, index: int) -> str | None: ...


def task_examples(
    task: _Task, tokenizer: Any, *, render: Callable[[Any], Prompt] | None = None, index: Callable[[int], int] | None = None
) -> Callable[[int], Example]:
    """Example i of a task: its i-th training row with demonstration i, an end-of-sequence token appended.

    Args:
        task: anything with `train.row(i)` and `demonstration(row, i)`.
        tokenizer: turns text into ids; prompts without special tokens unless `render` says otherwise.
        render: row -> Prompt, for messages and chat templates; None takes `row.prompt` as bare text.
        index: running number -> row index, for data sets that are read in epochs; None is the identity (endless tasks).
    Raises:
        UsageError: the tokenizer has no end-of-sequence token.
        DataError: (from the returned function) a row without demonstration or with an empty prompt.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UsageError("SFT", got="a tokenizer without eos_token", expected="one that ends sequences", do="Set tokenizer.eos_token.")

    def ids(text: str) -> Array:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def example(i: int) -> Example:
        row = task.train.row(i if index is None else index(i))
        text = task.demonstration(row, i)
        if text is None:
            raise DataError(
                f"SFT: row {row.id!r}", got="no demonstration", expected="a solution text for each row",
                do="Train on a task or data set whose rows carry solutions.",
            )  # fmt: skip
        prompt_P = ids(row.prompt) if render is None else np.asarray(render(row).token_P, dtype=np.int64)
        if not len(prompt_P):
            raise DataError(f"SFT: row {row.id!r}", got="an empty prompt", expected="at least one token", do="Remove the row.")
        return Example(str(row.id), prompt_P, np.append(ids(text), eos))

    return example


def run_sft(
    model: torch.nn.Module,
    example: Callable[[int], Example],
    *,
    options: SftOptions,
    evaluate: Evaluate | None = None,
    progress: Callable[[SftProgress], None] | None = None,
) -> SftResult:
    """Train `model` in place on examples 0, 1, ..., `batch_size` an update; evaluate once at the end.

    Raises:
        DataError: an example longer than `max_length`.
        EngineError: a loss or gradient norm that is not finite; the model is then as it was before that update.
    """
    device = next(model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=device.type == "cpu")
    model.train()
    losses: list[float] = []
    start = time.monotonic()
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        for step in range(options.steps):
            batch = [example(step * options.batch_size + j) for j in range(options.batch_size)]
            loss = _accumulate(model, batch, options, device)
            norm = float(torch.nn.utils.clip_grad_norm_(trained, options.grad_clip or math.inf))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise EngineError(
                    f"SFT update {step + 1}", got=f"loss {loss}, gradient norm {norm}", expected="finite numbers",
                    do="Lower the learning rate or look at the rows of this batch: " + ", ".join(e.id for e in batch[:3]) + ", ...",
                )  # fmt: skip
            lr = options.lr_at(step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            if progress is not None:
                seconds = time.monotonic() - start
                progress(SftProgress(step=step + 1, steps=options.steps, loss=loss, lr=lr, grad_norm=norm, seconds=seconds))
    seconds = time.monotonic() - start
    model.eval()
    found = {} if evaluate is None else {name: float(value) for name, value in evaluate(model.state_dict(), options.steps).items()}
    return SftResult(losses=losses, evaluation=found, seconds=seconds)


def _accumulate(model: torch.nn.Module, batch: Sequence[Example], options: SftOptions, device: torch.device) -> float:
    """Backward over the batch in micro-batches within the token budget; the loss is divided by the tokens of the whole batch."""
    for e in batch:
        if len(e.prompt_P) + len(e.response_T) > options.max_length:
            raise DataError(
                f"SFT: row {e.id!r}", got=f"{len(e.prompt_P)} + {len(e.response_T)} tokens", expected=f"at most {options.max_length} together",
                do="Raise max_length or remove the row.",
            )  # fmt: skip
    tokens = sum(len(e.response_T) for e in batch)
    total = 0.0
    for part in micro_batches(batch, options.token_budget):
        ids_BT, label_BT = collate(part)
        # Padding lies to the right, where causal attention does not look: no mask, and attention may take its fast causal path.
        loss = model(input_ids=ids_BT.to(device), labels=label_BT.to(device), num_items_in_batch=tokens, use_cache=False).loss
        loss.backward()
        total += float(loss.detach())
    return total


def micro_batches(batch: Sequence[Example], token_budget: int) -> list[list[Example]]:
    """Split a batch by length so that rows x longest row <= `token_budget` in each part (one row at least); the same parts every time."""
    parts: list[list[Example]] = []
    longest = 0
    for e in sorted(batch, key=lambda e: -len(e.prompt_P) - len(e.response_T)):
        if not parts or (len(parts[-1]) + 1) * longest > token_budget:
            parts.append([])
            longest = len(e.prompt_P) + len(e.response_T)
        parts[-1].append(e)
    return parts


def collate(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels, int64 [B, T]; label t is id t at completion tokens and `IGNORED` elsewhere (the model shifts)."""
    lengths = [len(e.prompt_P) + len(e.response_T) for e in examples]
    ids_BT = np.zeros((len(examples), max(lengths)), dtype=np.int64)
    label_BT = np.full_like(ids_BT, IGNORED)
    for b, e in enumerate(examples):
        P, L = len(e.prompt_P), lengths[b]
        ids_BT[b, :P] = e.prompt_P
        ids_BT[b, P:L] = label_BT[b, P:L] = e.response_T
    return torch.from_numpy(ids_BT), torch.from_numpy(label_BT)


def accuracy_evaluator(
    sampler: Sampler, verifier: Verifier, prompts: Sequence[Prompt], *, max_tokens: int, eos_ids: frozenset[int], seed: int = 0
) -> Evaluate:
    """An `Evaluate` that gives the mean reward over `prompts` of greedy responses (`greedy`) and of one sample each at temperature 1 (`pass@1`).

    Unscored responses are left out of the mean; with none scored it is NaN.
    """

    def mean_reward(temperature: float) -> float:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, eos_ids=eos_ids, stream=Stream.EVAL, seed=seed)
        rollouts = sampler.sample([Request(ticket=i, prompt=p) for i, p in enumerate(prompts)], 1, params)
        items = [ScoreItem.of(p, r) for p, r in zip(prompts, rollouts, strict=True)]
        scores: list[Score] = verifier.score(items)
        rewards = [s.reward for s in scores if not math.isnan(s.reward)]
        return sum(rewards) / len(rewards) if rewards else math.nan

    def evaluate(weights: Mapping[str, Tensor], step: int) -> Mapping[str, float]:
        sampler.load(weights, step)
        return {"greedy": mean_reward(0.0), "pass@1": mean_reward(1.0)}

    return evaluate


def save_sft(
    folder: str | Path, model: Any, tokenizer: Any, *, result: SftResult, options: SftOptions, facts: Mapping[str, Any] | None = None
) -> Path:
    """Write a plain Hugging Face folder and `sft.json` (options, last losses, evaluation, `facts` such as the task's options).

    Nothing in it depends on time or place, so equal runs write equal bytes.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    path = Path(folder)
    record = {
        "options": asdict(options),
        "loss_first": result.losses[0],
        "loss_last": result.losses[-1],
        "evaluation": result.evaluation,
        "torch_threads": torch.get_num_threads(),
        **(facts or {}),
    }
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        (path / "sft.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise CheckpointError("SFT", got=f"{e.strerror or e} at {path}", expected="a writable folder", do="Choose another folder.") from e
    return path
