"""The configuration's schema: one frozen tree; below it there are only arguments. `nearpolicy.layers` reads it from files and overrides.

Unions are tagged by `kind`. Method options are checked by the method's own row (`nearpolicy.methods`), where their defaults live. Larger sections
have modules of their own and are imported from here: `config_data`, `config_engine`.
"""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nearpolicy.config_base import MOST_RESPONSES, MOST_UPDATES, Flag, Off, Real, Section, Whole, given_options
from nearpolicy.config_data import (
    ArithmeticTask as ArithmeticTask,
    CodeTask as CodeTask,
    Cut as Cut,
    Demonstrations as Demonstrations,
    FreshRollout as FreshRollout,
    FunctionCut as FunctionCut,
    LengthRatioCut as LengthRatioCut,
    RandomRatioCut as RandomRatioCut,
    ReasoningGymTask as ReasoningGymTask,
    RelayRollout as RelayRollout,
    Reward as Reward,
    Rollout as Rollout,
    RowsTask as RowsTask,
    Task as Task,
    TopEntropyCut as TopEntropyCut,
)
from nearpolicy.config_engine import (
    AsyncSchedule as AsyncSchedule,
    Ray as Ray,
    ReplaySchedule as ReplaySchedule,
    SyncSchedule as SyncSchedule,
    TorchEngine as TorchEngine,
    VllmEngine as VllmEngine,
)


class Lora(Section):
    """Low-rank adapters (extra `lora`)."""

    rank: Whole = Field(16, ge=1, le=65_536)
    """Rank of each adapter."""
    alpha: Real = Field(32.0, gt=0, le=1e6)
    """Scale: the update is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter, by name."""


class Model(Section):
    """What is trained."""

    path: str = "tiny"
    """A Hugging Face folder, or `tiny`, `tiny-teacher` or `tiny-moe` (shipped), or `smollm2` (extra; converted once into the user's cache)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. Master weights are float32. `auto` takes bfloat16 only where the hardware is faster at it."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shared_prompts: Literal["auto", "off"] = "auto"
    """Compute the prompt of a group once in the update, where that saves work."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights."""


class Method(BaseModel):
    """The row that weighs tokens, by name, and its options (`nearpolicy methods` lists them)."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: str = "vespo"
    """Name of the row."""

    @property
    def options(self) -> dict[str, Any]:
        """The options given ("none" is None); defaults live in the row."""
        return given_options(self)


class ScoringModel(Section):
    """A fixed model that scores responses."""

    path: str | None = None
    """Hugging Face folder (`tiny`, `tiny-teacher` and `smollm2` are known by name). With `server` its config.json and tokenizer alone are read."""
    server: str | None = None
    """URL of a vLLM server (`http://host:8000`) that holds the model and is asked for prompt log-probs; None loads it into this process."""
    served_name: str | None = None
    """Name under which the server knows the model; None takes the first that it lists."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights in this process; None computes as the student does, so that equal models agree exactly."""
    token_budget: Annotated[Whole, Field(ge=1, le=1_000_000_000)] | None = None
    """Tokens scored at once; None is `train.token_budget`."""
    extra_rows: Literal["refuse", "drop"] = "refuse"
    """An output layer with more rows than the student's (`drop`: they are left out of its distribution)."""
    timeout: Real = Field(120.0, gt=0, le=86_400)
    """Seconds that one request to the server may take."""
    retries: Whole = Field(3, ge=0, le=1000)
    """Times a failed request is sent again, after 1, 2, 4, ... at most 30 s; then the run stops with a checkpoint."""


class Teacher(ScoringModel):
    """Whose log-probs are distilled, or only measured where the method does not read them."""

    temperature: Annotated[Real, Field(gt=0, le=1e6)] | None = None
    """Temperature of the teacher's distribution; None is the rollout's."""
    signal: Literal["token", "full_vocabulary"] = "token"
    """`token` compares log-probs of the sampled token; `full_vocabulary` takes the exact reverse KL at every position (opd and iw_opd, one teacher
    in this process)."""
    column: str | None = None
    """Column of the data that names the teacher of each row (task.kind = rows)."""
    routes: dict[str, ScoringModel] = Field(default_factory=dict)
    """Value of `column` -> a teacher, with the keys above but `temperature`."""


class Reference(Section):
    """The base model of ExOPD's extrapolation and of the KL penalty."""

    path: str | None = None
    """Hugging Face folder; None is the initial model."""


class Distill(BaseModel):
    """The teacher's signal beside a reward, with any method that trains on rewards; further keys are options of the row `name`."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: Literal["opd", "iw_opd", "exopd", "iw_exopd"] = "opd"
    """Row that makes the signal."""
    use: Literal["add", "weigh"] = "add"
    """`add`: advantage = the reward's + coefficient * the signal, weighted; `weigh`: the reward's advantage times the row's weight (IW-OPD's, or a
    profile of opd), without the signal."""
    coefficient: Real = Field(1.0, ge=0, le=1e6)
    """Factor on the signal."""

    @property
    def options(self) -> dict[str, Any]:
        """The options given ("none" is None); defaults live in the row."""
        return given_options(self)


class Routing(Section):
    """To which experts tokens go in the update of a mixture of experts."""

    replay: Literal["off", "r2", "r3"] = "off"
    """`off`: those that the router at hand chooses. `r2`: those that the trainer's own pass chose before the first update of the rollout batch.
    `r3`: those that the sampler chose."""
    sampler_noise: Real = Field(0.0, ge=0, le=100)
    """For experiments: a random error of the sampler's router weights, as a share of their root mean square, another one for each version."""


class Ratio(Section):
    """Against what the current policy is weighed."""

    denominator: Literal["behavior", "proximal"] | None = None
    """`behavior`: log-probs of the sampler; `proximal`: the trainer's own recomputation at the start of the rollout batch. None takes
    behavior, and proximal under a correction."""
    scope: Literal["response", "segment"] | None = None
    """Whether sequence weights run over the whole response or over the token's own segment; None takes the method's default."""


class Advantage(Section):
    """From rewards to advantages."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted inside a group."""
    normalize_std: Flag | None = None
    """Divide by the group's standard deviation; None takes the method's own habit."""


class Train(Section):
    """The optimizer."""

    steps: Whole = Field(100, ge=1, le=MOST_UPDATES)
    """Optimizer updates."""
    lr: Real = Field(1e-6, gt=0, le=1e3)
    """Peak learning rate of AdamW."""
    warmup: Whole = Field(0, ge=0)
    """Updates of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    min_lr: Real = Field(0.0, ge=0)
    """Learning rate at the end of the decay."""
    betas: tuple[Real, Real] = (0.9, 0.999)
    """Adam's moment decays."""
    weight_decay: Real = Field(0.0, ge=0, le=1e3)
    """Decoupled weight decay."""
    grad_clip: Annotated[Annotated[Real, Field(gt=0)] | None, Off] = 1.0
    """Largest global gradient norm; "none" = off."""
    token_budget: Whole = Field(16384, ge=1, le=1_000_000_000)
    """Tokens (padding included) in one forward and backward pass. Loss and gradient do not depend on it."""
    kl_coefficient: Real = Field(0.0, ge=0, le=1e6)
    """Weight of the KL penalty to the initial model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of that penalty; each has the gradient of KL(policy || reference)."""
    entropy_coefficient: Real = Field(0.0, ge=-1e6, le=1e6)
    """Weight of the entropy bonus."""
    rank_deadline: Real = Field(600.0, gt=0, le=86_400)
    """Seconds that ranks started by torchrun wait for one another before the run ends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError("min_lr must not exceed lr")
        return self


class Eval(Section):
    """Evaluation on the held-out prompts."""

    every: Whole = Field(20, ge=0, le=MOST_UPDATES)
    """Updates between evaluations; 0 = only at the end."""
    samples: Whole = Field(1, ge=1, le=65_536)
    """Responses to each held-out prompt (n)."""
    k: tuple[Whole, ...] = (1,)
    """The k of pass@k; each at most `samples`."""
    temperature: Real = Field(1.0, ge=0, le=1e6)
    """0 is greedy."""
    top_p: Real = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 is fine in evaluation."""
    greedy: Flag = False
    """Also report the greedy response's score."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(k < 1 or k > self.samples for k in self.k):
            raise ValueError(f"each k must lie in 1..samples = {self.samples}")
        return self


class Checkpoint(Section):
    """When the run can be gone on from."""

    every: Whole = Field(100, ge=1, le=MOST_UPDATES)
    """Updates between checkpoints; the last update always writes one."""
    keep: Annotated[Annotated[Whole, Field(ge=1)] | None, Off] = 3
    """Newest checkpoints kept (one from before an alarm is kept besides); "none" keeps all."""


class Log(Section):
    """What is recorded."""

    every: Whole = Field(1, ge=1, le=MOST_UPDATES)
    """Updates between lines of metrics.jsonl."""
    rollouts_every: Whole = Field(50, ge=0, le=MOST_UPDATES)
    """Updates between recorded sample responses; 0 = never."""
    rollouts: Whole = Field(8, ge=1, le=MOST_RESPONSES)
    """Responses recorded each time."""
    behavior_entropy: Flag = False
    """Have the sampler store the entropy at every token (one more pass over the vocabulary), for the curves by position."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Further trackers (extras); metrics.jsonl is always written."""


class Config(Section):
    """A run."""

    seed: Whole = Field(0, ge=0, le=2**63 - 1)
    """Everything random is a function of this."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:0` ...; `auto` takes a GPU when there is one."""
    threads: Whole | None = Field(None, ge=1, le=4096)
    """CPU threads of torch; None leaves torch's own choice, at most two for small models. Results are equal bit for bit for an equal number."""
    model: Model = Model()
    task: Task = ArithmeticTask()
    rollout: Annotated[FreshRollout | RelayRollout, Field(discriminator="source")] = FreshRollout()
    schedule: Annotated[SyncSchedule | AsyncSchedule | ReplaySchedule, Field(discriminator="kind")] = SyncSchedule()
    ray: Ray = Ray()
    sampler: Annotated[TorchEngine | VllmEngine, Field(discriminator="kind")] = TorchEngine()
    method: Method = Method()
    teacher: Teacher | None = None
    reference: Reference = Reference()
    distill: Distill | None = None
    ratio: Ratio = Ratio()
    routing: Routing = Routing()
    advantage: Advantage = Advantage()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


class Kinds(NamedTuple):
    """A section that comes in kinds."""

    tag: str
    """The key that names the kind."""
    default: str
    fields: dict[str, set[str]]
    """Kind -> its keys."""


def _kinds(tag: str, *variants: type[BaseModel]) -> Kinds:
    names = [variant.model_fields[tag].annotation.__args__[0] for variant in variants]  # type: ignore[union-attr]
    return Kinds(tag, names[0], {name: set(variant.model_fields) for name, variant in zip(names, variants, strict=True)})


VARIANTS: dict[str, Kinds] = {
    "task": _kinds("kind", ArithmeticTask, ReasoningGymTask, RowsTask, CodeTask),
    "rollout": _kinds("source", FreshRollout, RelayRollout),
    "rollout.cut": _kinds("kind", LengthRatioCut, TopEntropyCut, RandomRatioCut, FunctionCut),
    "schedule": _kinds("kind", SyncSchedule, AsyncSchedule, ReplaySchedule),
    "sampler": _kinds("kind", TorchEngine, VllmEngine),
}
"""Sections that come in kinds, by dotted name; the first kind is the default."""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted leaf key, for error hints and the reference page."""
    out: list[str] = []
    for name, field in model.model_fields.items():
        variants = [t for t in _section_types(field.annotation) if t not in (Reward, ScoringModel)]
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
