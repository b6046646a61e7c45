"""The configuration's schema: one frozen tree; below it there are only arguments. `nearpolicy.layers` reads it from files and overrides.

Unions are tagged by `kind`. Method options are checked by the method's own row
(`nearpolicy.methods`), where their defaults live.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _none(value: Any) -> Any:
    return None if value == "none" else value


Off = BeforeValidator(_none)
"""TOML has no null: the word "none" switches off what is on by default."""
Real = Annotated[float, BeforeValidator(_finite)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)


class Lora(_Section):
    """Low-rank adapters (extra `lora`)."""

    rank: int = Field(16, ge=1)
    """Rank of each adapter."""
    alpha: Real = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter, by name."""


class Model(_Section):
    """What is trained."""

    path: str = "tiny"
    """A Hugging Face folder, or `tiny` (shipped), or `smollm2` (extra; converted once into the user's cache)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. Master weights are float32. `auto` takes bfloat16 only where the hardware is faster at it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shared_prompts: Literal["auto", "off"] = "auto"
    """Compute the prompt of a group once in the update, where that saves work."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights."""


class Reward(_Section):
    """One reward function."""

    function: str
    """`exact`, `number`, `math_verify`, `arithmetic`, or an import path `package.module:function` or `file.py:function` with the signature
    (prompts, completions, **columns) -> list of float or None."""
    weight: Real = 1.0
    """Its weight in the sum over the functions that did not abstain."""
    name: str = ""
    """Names its part of the score; empty takes the function's own name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to it."""


class _Task(_Section):
    system_prompt: str | None = None
    """Put in front of every prompt as a system message."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Render prompts with the tokenizer's chat template; `auto` does so when it has one."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the template (for example `enable_thinking = false`)."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt."""
    long_prompts: Literal["error", "skip"] = "error"
    """What to do with a longer one."""
    heldout: int = Field(256, ge=0)
    """Held-out prompts for evaluation."""
    rewards: tuple[Reward, ...] = ()
    """Reward functions; empty takes the task's own."""
    workers: int = Field(1, ge=1)
    """Reward worker processes."""
    deadline: Real = Field(5.0, gt=0)
    """Seconds a reward may take for one response before its worker is killed."""


class ArithmeticTask(_Task):
    """A labelled chain of one-digit operations with a scratchpad; endless, made on the fly."""

    kind: Literal["arithmetic"] = "arithmetic"
    modulus: int = Field(5, ge=2, le=10)
    """Digits are taken modulo this."""
    num_ops: int = Field(8, ge=1, le=8)
    """Operations in the chain."""
    strategies: int | None = None
    """Set to 3 for the variant with a leading strategy digit and a hidden key."""


class ReasoningGymTask(_Task):
    """Any reasoning-gym data set (extra `gym`)."""

    kind: Literal["reasoning_gym"]
    name: str
    """Name of the data set, for example `products`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of its generator."""
    verifier: Literal["own", "number"] = "own"
    """`own` scores with the data set's `score_answer`, `number` compares the last number of the response."""


class RowsTask(_Task):
    """Rows from JSONL (plain or compressed), Parquet (extra `parquet`) or a Hugging Face data set folder (extra `datasets`)."""

    kind: Literal["rows"]
    path: str
    """File or folder of the training rows."""
    heldout_path: str | None = None
    """File or folder of the held-out rows; None splits `heldout` rows off by a keyed hash."""
    prompt_column: str | None = None
    """Column of the prompt; None looks for prompt, question, problem or messages."""
    answer_column: str | None = None
    """Column of the answer; None looks for answer, ground_truth or solution."""
    split: str | None = None
    """Split of a data set folder."""


Task = Annotated[ArithmeticTask | ReasoningGymTask | RowsTask, Field(discriminator="kind")]


class Rollout(_Section):
    """What is sampled."""

    source: Literal["fresh"] = "fresh"
    """Who writes the responses: `fresh` = the current policy writes all of each."""
    prompts: int = Field(64, ge=1)
    """Prompts in a rollout batch (P)."""
    group_size: int = Field(8, ge=1)
    """Responses to each prompt (G)."""
    max_tokens: int = Field(64, ge=1)
    """Longest response."""
    temperature: Real = Field(1.0, gt=0)
    """Sampling temperature; log-probs are of the scaled distribution in sampler and trainer alike."""
    top_p: Real = Field(1.0, gt=0, le=1)
    """Must be 1 in training: importance weights need the full distribution."""
    stop_strings: tuple[str, ...] = ()
    """Any of these ends a response."""
    max_rows: int = Field(512, ge=1)
    """Responses decoded at the same time."""
    dynamic_sampling: bool = False
    """Reject groups whose rewards are all equal and draw others (DAPO)."""
    max_redraws: int = Field(8, ge=1)
    """Rounds of redrawing before the run stops with a clear message."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens before `max_tokens` over which the soft length penalty grows to -1 (DAPO); None = off."""
    mask_truncated: bool = False
    """Leave responses cut by the limit out of the loss."""


class SyncSchedule(_Section):
    """Sample a batch, reuse it for N sequential updates, sample again."""

    kind: Literal["sync"] = "sync"
    updates_per_rollout: int = Field(1, ge=1)
    """Updates each rollout batch is split into (N). N = 1 is on-policy; the last mini-batch is N - 1 updates old."""


class Method(BaseModel):
    """The row that weighs tokens, by name, and its options (`nearpolicy methods` lists them)."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: str = "vespo"
    """Name of the row."""

    @property
    def options(self) -> dict[str, Any]:
        """The options given ("none" is None); defaults live in the row."""
        return {k: _none(v) for k, v in (self.__pydantic_extra__ or {}).items()}


class Ratio(_Section):
    """Against what the current policy is weighed."""

    denominator: Literal["behavior", "proximal"] | None = None
    """`behavior`: log-probs of the sampler; `proximal`: the trainer's own recomputation at the start of the rollout batch. None takes
    behavior, and proximal under a correction."""
    scope: Literal["response", "segment"] | None = None
    """Whether sequence weights run over the whole response or over the token's own segment; None takes the method's default."""


class Advantage(_Section):
    """From rewards to advantages."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted inside a group."""
    normalize_std: bool | None = None
    """Divide by the group's standard deviation; None takes the method's own habit."""


class Train(_Section):
    """The optimizer."""

    steps: int = Field(100, ge=1)
    """Optimizer updates."""
    lr: Real = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup: int = Field(0, ge=0)
    """Updates of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    min_lr: Real = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    betas: tuple[Real, Real] = (0.9, 0.999)
    """Adam's moment decays."""
    weight_decay: Real = Field(0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: Annotated[Annotated[Real, Field(gt=0)] | None, Off] = 1.0
    """Largest global gradient norm; "none" = off."""
    token_budget: int = Field(16384, ge=1)
    """Tokens (padding included) in one forward and backward pass. Loss and gradient do not depend on it."""
    kl_coefficient: Real = Field(0.0, ge=0)
    """Weight of the KL penalty to the initial model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of that penalty; each has the gradient of KL(policy || reference)."""
    entropy_coefficient: Real = 0.0
    """Weight of the entropy bonus."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError("min_lr must not exceed lr")
        return self


class Eval(_Section):
    """Evaluation on the held-out prompts."""

    every: int = Field(20, ge=0)
    """Updates between evaluations; 0 = only at the end."""
    samples: int = Field(1, ge=1)
    """Responses to each held-out prompt (n)."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k; each at most `samples`."""
    temperature: Real = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: Real = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 is fine in evaluation."""
    greedy: bool = False
    """Also report the greedy response's score."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(k < 1 or k > self.samples for k in self.k):
            raise ValueError(f"each k must lie in 1..samples = {self.samples}")
        return self


class Checkpoint(_Section):
    """When the run can be gone on from."""

    every: int = Field(100, ge=1)
    """Updates between checkpoints; the last update always writes one."""
    keep: Annotated[Annotated[int, Field(ge=1)] | None, Off] = 3
    """Newest checkpoints kept (one from before an alarm is kept besides); "none" keeps all."""


class Log(_Section):
    """What is recorded."""

    every: int = Field(1, ge=1)
    """Updates between lines of metrics.jsonl."""
    rollouts_every: int = Field(50, ge=0)
    """Updates between recorded sample responses; 0 = never."""
    rollouts: int = Field(8, ge=1)
    """Responses recorded each time."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Further trackers (extras); metrics.jsonl is always written."""


class Config(_Section):
    """A run."""

    seed: int = Field(0, ge=0)
    """Everything random is a function of this."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:0` ...; `auto` takes a GPU when there is one."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None leaves torch's own choice, or one for models too small to share."""
    model: Model = Model()
    task: Task = ArithmeticTask()
    rollout: Rollout = Rollout()
    schedule: SyncSchedule = SyncSchedule()
    method: Method = Method()
    ratio: Ratio = Ratio()
    advantage: Advantage = Advantage()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


VARIANTS: dict[str, tuple[str, dict[str, set[str]]]] = {
    "task": (
        "arithmetic",
        {"arithmetic": set(ArithmeticTask.model_fields), "reasoning_gym": set(ReasoningGymTask.model_fields), "rows": set(RowsTask.model_fields)},
    ),
    "schedule": ("sync", {"sync": set(SyncSchedule.model_fields)}),
}
"""Sections that come in kinds: the default kind, and the fields of each."""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted leaf key, for error hints and the reference page."""
    out: list[str] = []
    for name, field in model.model_fields.items():
        variants = [t for t in _section_types(field.annotation) if t is not Reward]
        if variants:
            for variant in variants:
                out += [k for k in known_keys(variant, f"{prefix}{name}.") if k not in out]
        else:
            out.append(prefix + name)
    return out


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [t for arg in getattr(annotation, "__args__", ()) for t in _section_types(arg)]
