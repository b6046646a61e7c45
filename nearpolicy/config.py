"""The configuration's schema: one frozen tree; below it there are only arguments. `nearpolicy.layers` reads it from files and overrides.

Unions are tagged by `kind`. Method options are checked by the method's own row
(`nearpolicy.methods`), where their defaults live.
"""

import math
import sys
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from nearpolicy.tasks.sandbox import MEMORY_MB, TIMEOUT_S, TOTAL_S

MOST_RESPONSES = 1_048_576
"""Responses in one rollout batch."""
MOST_TOKENS = 1_000_000
"""Tokens in a prompt, and in a response."""
MOST_UPDATES = 100_000_000
"""Optimizer updates of a run, and of a pause between two events in it."""


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) <= _LARGEST:  # NaN, infinity and whole numbers that no float holds
        raise ValueError("must be a finite number")
    return value


_LARGEST = sys.float_info.max


def _none(value: Any) -> Any:
    return None if value == "none" else value


def _options(section: BaseModel) -> dict[str, Any]:
    """Extra keys of a section that names a row; "none" switches an option off, but is the name of a kernel."""
    return {k: v if k == "kernel" else _none(v) for k, v in (section.__pydantic_extra__ or {}).items()}


Off = BeforeValidator(_none)
"""TOML has no null: the word "none" switches off what is on by default."""
Real = Annotated[float, BeforeValidator(_number)]
"""A number: no truth value, no text."""
Whole = Annotated[int, Strict()]
"""A whole number: no truth value, no text, no fraction."""
Flag = Annotated[bool, Strict()]
"""true or false: no number, no text."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False)


class Lora(_Section):
    """Low-rank adapters (extra `lora`)."""

    rank: Whole = Field(16, ge=1, le=65_536)
    """Rank of each adapter."""
    alpha: Real = Field(32.0, gt=0, le=1e6)
    """Scale: the update is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules that get an adapter, by name."""


class Model(_Section):
    """What is trained."""

    path: str = "tiny"
    """A Hugging Face folder, or `tiny` or `tiny-teacher` (shipped), or `smollm2` (extra; converted once into the user's cache)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. Master weights are float32. `auto` takes bfloat16 only where the hardware is faster at it."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shared_prompts: Literal["auto", "off"] = "auto"
    """Compute the prompt of a group once in the update, where that saves work."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights."""


class Reward(_Section):
    """One reward function."""

    function: str
    """`exact`, `number`, `math_verify`, `code`, `arithmetic`, or an import path `package.module:function` or `file.py:function` with the signature
    (prompts, completions, **columns) -> list of float or None."""
    weight: Real = Field(1.0, ge=-1e6, le=1e6)
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
    max_prompt_tokens: Whole = Field(1024, ge=1, le=MOST_TOKENS)
    """Longest prompt."""
    long_prompts: Literal["error", "skip"] = "error"
    """What to do with a longer one."""
    heldout: Whole = Field(256, ge=0, le=100_000)
    """Held-out prompts for evaluation."""
    rewards: tuple[Reward, ...] = ()
    """Reward functions; empty takes the task's own."""
    workers: Whole = Field(1, ge=1, le=1024)
    """Reward worker processes."""
    deadline: Real = Field(5.0, gt=0, le=86_400)
    """Seconds a reward may take for one response before its worker is killed."""


class ArithmeticTask(_Task):
    """A labelled chain of one-digit operations with a scratchpad; endless, made on the fly."""

    kind: Literal["arithmetic"] = "arithmetic"
    modulus: Whole = Field(5, ge=2, le=10)
    """Digits are taken modulo this."""
    num_ops: Whole = Field(8, ge=1, le=8)
    """Operations in the chain."""
    strategies: Whole | None = None
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


class CodeTask(_Task):
    """Problems that are solved by a program, which is run against the tests of its row in a sandbox (needs bubblewrap)."""

    kind: Literal["code"]
    path: str = "problems"
    """File or folder of the training rows, or `problems`: the small ones that ship."""
    heldout_path: str | None = None
    """File or folder of the held-out rows; None splits `heldout` rows off by a keyed hash (the shipped problems have their own)."""
    prompt_column: str | None = None
    """Column of the prompt; None looks for prompt, question, problem or messages."""
    split: str | None = None
    """Split of a data set folder."""
    deadline: Real = Field(20.0, gt=0, le=86_400)
    """Seconds a reward may take for one response before its worker is killed; above `total` + `timeout`."""
    timeout: Real = Field(TIMEOUT_S, gt=0, le=3600)
    """Seconds for each test of a program."""
    total: Real = Field(TOTAL_S, gt=0, le=3600)
    """Seconds for all tests of a program together; those not begun by then have failed."""
    memory_mb: Whole = Field(MEMORY_MB, ge=64, le=1_048_576)
    """MiB of memory for a program."""
    partial: Flag = False
    """Reward the share of the tests passed instead of all or nothing."""
    allow_unsandboxed: Flag = False
    """Run programs without walls where there is no sandbox: they can then do whatever this process may do."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the verifier."""
        return {name: getattr(self, name) for name in ("timeout", "total", "memory_mb", "partial", "allow_unsandboxed")}


Task = Annotated[ArithmeticTask | ReasoningGymTask | RowsTask | CodeTask, Field(discriminator="kind")]


class LengthRatioCut(_Section):
    """Keep a share of each stored response."""

    kind: Literal["length_ratio"] = "length_ratio"
    ratio: Real = Field(0.7, ge=0, le=1)
    """Share of its tokens that is kept, rounded half to even; 1 replays it as it is."""


class TopEntropyCut(_Section):
    """Cut at one of the stored response's positions of highest entropy, drawn uniformly."""

    kind: Literal["top_entropy"]
    k: Whole = Field(8, ge=1, le=MOST_TOKENS)
    """Positions to draw from."""
    at: Literal["before", "after"] = "before"
    """`before` has the token at the position written anew, `after` keeps it."""


class RandomRatioCut(_Section):
    """Keep a share of each stored response, drawn uniformly."""

    kind: Literal["random_ratio"]
    low: Real = Field(0.0, ge=0, le=1)
    """Smallest share."""
    high: Real = Field(1.0, ge=0, le=1)
    """Largest share."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self


class FunctionCut(_Section):
    """Cut where a function of one's own says."""

    kind: Literal["function"]
    function: str
    """`package.module:function` or `file.py:function` with the signature (length, entropies, rng) -> tokens kept, 0 to length."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to it."""


Cut = Annotated[LengthRatioCut | TopEntropyCut | RandomRatioCut | FunctionCut, Field(discriminator="kind")]


class Demonstrations(_Section):
    """Worked solutions as rows of each group (LUFFY). Without `path` and `column` the task's own are taken."""

    per_group: Whole = Field(1, ge=1, le=MOST_RESPONSES)
    """Members of each group that are demonstrations; the policy writes the others."""
    column: str | None = None
    """Column of the data that holds them: a text, token ids, or a list of several of either."""
    path: str | None = None
    """File of records with `id` or `prompt` to find the row by, and the solution (under `column`, or demonstration, completion, solution or
    response)."""


class Rollout(_Section):
    """What is sampled."""

    source: str = "fresh"
    """Who writes the responses."""
    prompts: Whole = Field(64, ge=1, le=MOST_RESPONSES)
    """Prompts in a rollout batch (P)."""
    group_size: Whole = Field(8, ge=1, le=MOST_RESPONSES)
    """Responses to each prompt (G)."""
    max_tokens: Whole = Field(64, ge=1, le=MOST_TOKENS)
    """Longest response."""
    temperature: Real = Field(1.0, gt=0, le=1e6)
    """Sampling temperature; log-probs are of the scaled distribution in sampler and trainer alike."""
    top_p: Real = Field(1.0, gt=0, le=1)
    """Must be 1 in training: importance weights need the full distribution."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Any of these ends a response."""
    max_rows: Whole = Field(512, ge=1, le=MOST_RESPONSES)
    """Responses decoded at the same time."""
    dynamic_sampling: Flag = False
    """Reject groups whose rewards are all equal and draw others (DAPO)."""
    max_redraws: Whole = Field(8, ge=1, le=1_000_000)
    """Rounds of redrawing before the run stops with a clear message."""
    overlong_buffer: Whole | None = Field(None, ge=1, le=MOST_TOKENS)
    """Tokens before `max_tokens` over which the soft length penalty grows to -1 (DAPO); None = off."""
    mask_truncated: Flag = False
    """Leave responses cut by the limit out of the loss."""
    demonstrations: Demonstrations | None = None
    """Worked solutions as rows of each group; needs a method that has a weight for them (luffy)."""

    @property
    def cut_name(self) -> str:
        """What counts of truncation tokens are kept under; empty where nothing is cut."""
        return ""


class FreshRollout(Rollout):
    """Every response is written whole by the current policy."""

    source: Literal["fresh"] = "fresh"
    """Who writes the responses: the current policy."""


class RelayRollout(Rollout):
    """Responses are begun by an earlier policy and finished by the current one (Thinking Seeds)."""

    source: Literal["relay"]
    """Who writes the responses: a policy of up to `refresh` rollout batches ago the beginning, the current policy the rest."""
    refresh: Whole = Field(16, ge=1, le=65_536)
    """Rollout batches in a cycle (T): at its start the current policy writes responses for all of them. The first is used as it is; of the
    others a prefix is kept. 1 is `source = "fresh"`."""
    cut: Cut = LengthRatioCut()
    """Where stored responses are cut."""
    relayed_per_group: Annotated[Whole, Field(ge=0, le=MOST_RESPONSES)] | None = None
    """Members of each group that are relayed; the current policy writes the others whole. None = all (but demonstrations)."""
    prefix: Literal["per_sample", "shared_in_group"] = "per_sample"
    """`per_sample`: each relayed member goes on from a stored response of its own; `shared_in_group`: all from one."""
    prefix_tokens: Literal["train", "mask"] = "train"
    """`train` weighs prefix tokens by the ratio to the policy that wrote them; `mask` leaves them out of the loss."""
    reserve: Real = Field(0.25, ge=0, le=100)
    """Groups stored besides, as a share of the cycle's groups, to replace those that dynamic sampling rejects; what goes beyond is written fresh."""
    bank_limit: Whole = Field(4096, ge=1, le=2**40)
    """Largest seed bank on disk, MiB; a cycle that could need more is refused before the run."""

    @property
    def cut_name(self) -> str:
        """The kind of the cut, or the function's import path."""
        return self.cut.function if isinstance(self.cut, FunctionCut) else self.cut.kind

    @property
    def relayed(self) -> int:
        """Members of each group that are relayed."""
        shown = self.demonstrations.per_group if self.demonstrations is not None else 0
        return self.group_size - shown if self.relayed_per_group is None else self.relayed_per_group

    @property
    def stored_groups(self) -> int:
        """Groups in the seed bank of a cycle: those of batches 2 to T, and a reserve where groups can be rejected."""
        if self.refresh == 1:
            return 0
        reserve = math.ceil(self.reserve * self.refresh * self.prompts) if self.dynamic_sampling else 0
        return (self.refresh - 1) * self.prompts + reserve

    @property
    def stored_responses(self) -> int:
        """Responses in the seed bank of a cycle."""
        return self.stored_groups * (min(self.relayed, 1) if self.prefix == "shared_in_group" else self.relayed)


class SyncSchedule(_Section):
    """Sample a batch, reuse it for N sequential updates, sample again."""

    kind: Literal["sync"] = "sync"
    updates_per_rollout: Whole = Field(1, ge=1, le=MOST_RESPONSES)
    """Updates each rollout batch is split into (N). N = 1 is on-policy; the last mini-batch is N - 1 updates old."""


class Method(BaseModel):
    """The row that weighs tokens, by name, and its options (`nearpolicy methods` lists them)."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    name: str = "vespo"
    """Name of the row."""

    @property
    def options(self) -> dict[str, Any]:
        """The options given ("none" is None); defaults live in the row."""
        return _options(self)


class ScoringModel(_Section):
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


class Reference(_Section):
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
        return _options(self)


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
    normalize_std: Flag | None = None
    """Divide by the group's standard deviation; None takes the method's own habit."""


class Train(_Section):
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if self.min_lr > self.lr:
            raise ValueError("min_lr must not exceed lr")
        return self


class Eval(_Section):
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


class Checkpoint(_Section):
    """When the run can be gone on from."""

    every: Whole = Field(100, ge=1, le=MOST_UPDATES)
    """Updates between checkpoints; the last update always writes one."""
    keep: Annotated[Annotated[Whole, Field(ge=1)] | None, Off] = 3
    """Newest checkpoints kept (one from before an alarm is kept besides); "none" keeps all."""


class Log(_Section):
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


class Config(_Section):
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
    schedule: SyncSchedule = SyncSchedule()
    method: Method = Method()
    teacher: Teacher | None = None
    reference: Reference = Reference()
    distill: Distill | None = None
    ratio: Ratio = Ratio()
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
    "schedule": _kinds("kind", SyncSchedule),
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
