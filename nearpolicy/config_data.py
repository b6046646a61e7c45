"""The configuration's schema, what is trained on: tasks and their rewards, rollouts, relays, demonstrations."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from nearpolicy.config_base import MOST_RESPONSES, MOST_TOKENS, Flag, Real, Section, Whole
from nearpolicy.tasks.sandbox import MEMORY_MB, TIMEOUT_S, TOTAL_S


class Reward(Section):
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


class _Task(Section):
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


class LengthRatioCut(Section):
    """Keep a share of each stored response."""

    kind: Literal["length_ratio"] = "length_ratio"
    ratio: Real = Field(0.7, ge=0, le=1)
    """Share of its tokens that is kept, rounded half to even; 1 replays it as it is."""


class TopEntropyCut(Section):
    """Cut at one of the stored response's positions of highest entropy, drawn uniformly."""

    kind: Literal["top_entropy"]
    k: Whole = Field(8, ge=1, le=MOST_TOKENS)
    """Positions to draw from."""
    at: Literal["before", "after"] = "before"
    """`before` has the token at the position written anew, `after` keeps it."""


class RandomRatioCut(Section):
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


class FunctionCut(Section):
    """Cut where a function of one's own says."""

    kind: Literal["function"]
    function: str
    """`package.module:function` or `file.py:function` with the signature (length, entropies, rng) -> tokens kept, 0 to length."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments handed to it."""


Cut = Annotated[LengthRatioCut | TopEntropyCut | RandomRatioCut | FunctionCut, Field(discriminator="kind")]


class Demonstrations(Section):
    """Worked solutions as rows of each group (LUFFY). Without `path` and `column` the task's own are taken."""

    per_group: Whole = Field(1, ge=1, le=MOST_RESPONSES)
    """Members of each group that are demonstrations; the policy writes the others."""
    column: str | None = None
    """Column of the data that holds them: a text, token ids, or a list of several of either."""
    path: str | None = None
    """File of records with `id` or `prompt` to find the row by, and the solution (under `column`, or demonstration, completion, solution or
    response)."""


class Rollout(Section):
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
