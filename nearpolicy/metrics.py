"""Values that merge exactly, and the one table of metric names.

The law of this module: merging the parts of any split gives the value of the whole. A mean carries its numerator and denominator, a
quantile comes from a histogram with fixed edges, an effective sample size carries its log-sums. Nothing here synchronises a device
until `.value` is read.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Value(Protocol):
    """A metric that can be merged with another of its kind and read as a float."""

    def merge(self, other: Self) -> Self:
        """The value of both parts together."""
        ...

    @property
    def value(self) -> float:
        """The metric; NaN when nothing was measured."""
        ...


class _Readable:
    """`float(metric)` and a short repr for every kind of value."""

    __slots__ = ()

    def __float__(self) -> float:
        return self.value  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({float(self):.6g})"


def _scalar(x: Tensor | float) -> Tensor:
    return x.detach() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)


class Mean(_Readable):
    """total / count. `Mean(2.0, 4)` has value 0.5; a count of 0 gives NaN (missing, not zero)."""

    __slots__ = ("count", "total")

    def __init__(self, total: Tensor | float, count: Tensor | float) -> None:
        self.total, self.count = _scalar(total), _scalar(count)

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total.double() + other.total.double(), self.count.double() + other.count.double())

    @property
    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else math.nan


class Sum(_Readable):
    """A total or a count."""

    __slots__ = ("total",)

    def __init__(self, total: Tensor | float) -> None:
        self.total = _scalar(total)

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total.double() + other.total.double())

    @property
    def value(self) -> float:
        return float(self.total)


class Max(_Readable):
    """The largest value seen; NaN when none was."""

    __slots__ = ("top",)

    def __init__(self, top: Tensor | float) -> None:
        self.top = _scalar(top)

    def merge(self, other: "Max") -> "Max":
        return Max(torch.fmax(self.top.double(), other.top.double()))

    @property
    def value(self) -> float:
        return float(self.top)


class Ess(_Readable):
    """Effective sample size as a fraction of the samples: (sum w)^2 / (n sum w^2), from log weights, before any clamp.

    `Ess.of(log_weight_N)`; 1.0 for equal weights, 1/n when one dominates. Source: Kish (1965).
    """

    __slots__ = ("count", "log_sum", "log_sum_sq")

    def __init__(self, log_sum: Tensor | float, log_sum_sq: Tensor | float, count: Tensor | float) -> None:
        self.log_sum, self.log_sum_sq, self.count = _scalar(log_sum), _scalar(log_sum_sq), _scalar(count)

    @classmethod
    def of(cls, log_weight_N: Tensor) -> "Ess":
        x = log_weight_N.detach().double().reshape(-1)
        if not x.numel():
            return cls(-math.inf, -math.inf, 0.0)
        return cls(torch.logsumexp(x, 0), torch.logsumexp(2 * x, 0), float(x.numel()))

    def merge(self, other: "Ess") -> "Ess":
        return Ess(
            torch.logaddexp(self.log_sum.double(), other.log_sum.double()),
            torch.logaddexp(self.log_sum_sq.double(), other.log_sum_sq.double()),
            self.count.double() + other.count.double(),
        )

    @property
    def value(self) -> float:
        count = float(self.count)
        return math.exp(2 * float(self.log_sum) - float(self.log_sum_sq)) / count if count else math.nan


_MAGNITUDES = [10 ** (k / 8) for k in range(-32, 33)]  # 1e-4 ... 1e4, eight bins a decade
LOG_RATIO_EDGES: tuple[float, ...] = (*(-m for m in reversed(_MAGNITUDES)), 0.0, *_MAGNITUDES)
"""Edges for log ratios and log weights, in nats: signed, eight bins a decade from 1e-4 to 1e4, and 0."""


MISMATCH_EDGES: tuple[float, ...] = (0.0, *(10 ** (k / 8) for k in range(-64, 17)))
"""Edges for what trainer and engine differ by, in nats: 0, and eight bins a decade from 1e-8 to 1e2."""

HISTOGRAMS = {"weight/log_sequence": LOG_RATIO_EDGES, "ratio/log_token": LOG_RATIO_EDGES, "mismatch/abs": MISMATCH_EDGES}
"""Edges of every histogram metric, by name: what the report and the trackers draw counts with."""


class Histogram(_Readable):
    """Counts in fixed bins; quantiles by linear interpolation inside a bin. `.value` is the median.

    Bin k holds edges[k-1] < x <= edges[k]; the first and last bins are open. Two histograms merge only with equal edges.
    """

    __slots__ = ("counts", "edges")

    def __init__(self, counts: Tensor, edges: tuple[float, ...] = LOG_RATIO_EDGES) -> None:
        self.counts, self.edges = counts.detach(), edges

    @classmethod
    def of(cls, x_N: Tensor, edges: tuple[float, ...] = LOG_RATIO_EDGES) -> "Histogram":
        x = x_N.detach().double().reshape(-1)
        bins = torch.bucketize(x, torch.tensor(edges, dtype=torch.float64, device=x.device))
        return cls(torch.bincount(bins, minlength=len(edges) + 1).double(), edges)

    def merge(self, other: "Histogram") -> "Histogram":
        if self.edges != other.edges:
            raise ValueError("histograms with different edges do not merge")
        return Histogram(self.counts + other.counts.to(self.counts.device), self.edges)

    def quantile(self, q: float) -> float:
        """The q-quantile, within one bin's width; NaN when empty."""
        counts = self.counts.tolist()
        total = sum(counts)
        if not total:
            return math.nan
        target, seen = q * total, 0.0
        for k, n in enumerate(counts):
            if n and seen + n >= target:
                low = self.edges[max(k - 1, 0)]
                high = self.edges[min(k, len(self.edges) - 1)]
                return low + (high - low) * min(max((target - seen) / n, 0.0), 1.0)
            seen += n
        return self.edges[-1]

    @property
    def value(self) -> float:
        return self.quantile(0.5)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the rows and bins of a `Table` are, and which columns are read from them."""

    rows: tuple[str, ...]
    """Names of the sums; the first counts what fell into a bin."""
    axes: Mapping[str, slice]
    """Name of each set of bins -> its place among all bins. Everything counted falls into one bin of every axis."""
    reads: Mapping[str, tuple[str, str | None]]
    """Column -> (row, row it is divided by); None divides by the row's sum over the axis: a share."""


class Table(_Readable):
    """Sums by bin, float64 [rows, bins], all of one layout in one tensor, so that merging is one addition and exact. `.value` is the count."""

    __slots__ = ("layout", "sums")

    def __init__(self, sums: Tensor, layout: Layout) -> None:
        self.sums, self.layout = sums.detach(), layout

    def merge(self, other: "Table") -> "Table":
        if self.layout is not other.layout:
            raise ValueError("tables of different layouts do not merge")
        return Table(self.sums + other.sums.to(self.sums.device), self.layout)

    @property
    def value(self) -> float:
        return float(self.sums[0, next(iter(self.layout.axes.values()))].sum())

    def columns(self) -> dict[str, list[float]]:
        """`column/axis` -> one value a bin, six digits, NaN where nothing was measured; empty bins at the end are left out."""
        out: dict[str, list[float]] = {}
        sums = self.sums.cpu()
        for axis, where in self.layout.axes.items():
            part = sums[:, where]
            filled = torch.nonzero(part[0])
            part = part[:, : int(filled[-1]) + 1 if len(filled) else 0]
            row = dict(zip(self.layout.rows, part, strict=True))
            out[f"{self.layout.rows[0]}/{axis}"] = part[0].long().tolist()
            for name, (top, bottom) in self.layout.reads.items():
                values = row[top] / (row[top].sum() if bottom is None else row[bottom])
                if bool(values.isfinite().any()):
                    out[f"{name}/{axis}"] = [float(f"{v:.6g}") if math.isfinite(v) else math.nan for v in values.tolist()]
        return out


AnyValue = Mean | Sum | Max | Ess | Histogram | Table
"""Every kind of value."""

Metrics = dict[str, AnyValue]
"""Metric name -> mergeable value, as `policy_loss(...).metrics` and the trainer return them."""


def merge(parts: Iterable[Mapping[str, AnyValue]]) -> Metrics:
    """The metrics of all parts together; a name missing from a part counts as not measured there."""
    out: Metrics = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out[name].merge(value) if name in out else value  # type: ignore[arg-type]
    return out


QUANTILES = {"p01": 0.01, "p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


def to_floats(metrics: Mapping[str, AnyValue], *, counts: bool = True) -> dict[str, float | list[float]]:
    """What is written to `metrics.jsonl`: floats; a histogram gives its quantiles as `name/p50` ... and, with `counts`, `name/hist`.

    With `counts`, a table gives a list for each of its columns as `name/column/axis`; without, nothing.
    """
    out: dict[str, float | list[float]] = {}
    for name, value in metrics.items():
        if isinstance(value, Histogram):
            for label, q in QUANTILES.items():
                out[f"{name}/{label}"] = value.quantile(q)
            if counts:
                out[f"{name}/hist"] = value.counts.tolist()
        elif isinstance(value, Table):
            out |= {f"{name}/{column}": values for column, values in value.columns().items()} if counts else {}
        else:
            out[name] = value.value
    return out


@dataclass(frozen=True, slots=True)
class Spec:
    """One row of the table: what a metric name means."""

    name: str
    unit: str
    direction: str
    """`up` (more is better), `down`, `band` (leave neither side), or `none`."""
    text: str
    trl: str | None = None
    """The name TRL logs for the same or nearest quantity."""


TABLE: dict[str, Spec] = {}
"""Every metric name the package emits. The docs, the report and the trackers read names, units and direction from here."""


def declare(name: str, unit: str, direction: str, text: str, trl: str | None = None) -> str:
    """Add a row to the table; a name is declared once."""
    if name in TABLE:
        raise ValueError(f"metric {name!r} is declared twice")
    TABLE[name] = Spec(name, unit, direction, text, trl)
    return name


for _row in (
    # reward and evaluation
    ("reward/mean", "reward", "up", "mean reward of the scored responses of the rollout batch", "reward"),
    ("reward/std", "reward", "none", "standard deviation of those rewards", "reward_std"),
    ("reward/no_signal_frac", "fraction", "down", "groups whose rewards are all equal: they train on nothing", "frac_reward_zero_std"),
    ("reward/floored_std", "groups", "down", "groups whose reward std was raised to the floor", None),
    ("reward/unscored_frac", "fraction", "down", "responses without a reward (abstain, timeout, error)", None),
    ("reward/abstain", "responses", "none", "responses on which the reward abstained", None),
    ("reward/timeout", "responses", "down", "responses whose reward ran past its deadline", None),
    ("reward/error", "responses", "down", "responses whose reward raised or returned no finite number", None),
    ("eval/pass@1", "fraction", "up", "mean score on the held-out prompts at the evaluation temperature", None),
    ("eval/greedy", "fraction", "up", "mean score of the greedy response on the held-out prompts", None),
    ("eval/length", "tokens", "none", "mean response length on the held-out prompts", None),
    # responses
    ("response/length", "tokens", "none", "mean response length of the rollout batch", "completions/mean_length"),
    ("response/length_max", "tokens", "none", "longest response of the rollout batch", "completions/max_length"),
    ("response/truncated_frac", "fraction", "down", "responses cut by the length limit", "completions/clipped_ratio"),
    ("response/repetition", "fraction", "down", "share of a response's 4-grams that occurred earlier in it", None),
    ("response/log_perplexity", "nats", "none", "minus the mean behaviour log-prob per response token", None),
    # policy
    ("policy/entropy", "nats", "band", "mean entropy of the next-token distribution at the trained tokens, current policy", "entropy"),
    ("policy/objective", "value", "none", "value of the method's literal objective: comparable within one method only", None),
    ("policy/loss", "value", "none", "value of the surrogate whose gradient is taken", "loss"),
    ("policy/kl_behavior_k1", "nats", "down", "mean of logp_behavior - logp over trained tokens (k1)", None),
    ("policy/kl_behavior_k3", "nats", "down", "k3 estimate of KL(behaviour || current) over trained tokens", None),
    ("policy/kl_reference", "nats", "down", "KL to the reference by the configured estimator", "kl"),
    # ratios and weights
    ("ratio/clip_frac", "fraction", "band", "trained tokens whose gradient the kernel sets to zero (sign-aware)", "clip_ratio/region_mean"),
    ("ratio/outside_frac", "fraction", "band", "trained tokens with |ratio - 1| outside the reference band 0.2, whatever the method", None),
    ("ratio/log_token", "nats", "band", "log ratio of each trained token, before any clamp", None),
    ("ratio/clamped_frac", "fraction", "down", "log weights beyond the numerical clamp", None),
    ("weight/log_sequence", "nats", "band", "log of the product ratio W of each response, before any clamp", None),
    ("weight/ess_raw", "fraction", "up", "effective sample size of W over the responses, before clamp and kernel", None),
    ("weight/mean", "weight", "band", "Z = E[phi]: mean gradient weight over trained tokens", None),
    ("weight/max", "weight", "none", "largest gradient weight", None),
    ("weight/dead_frac", "fraction", "down", "responses whose sequence weight has died (phi < 1e-3)", None),
    ("weight/q_mean_w", "weight", "band", "E_Q[W] = E[phi W] / E[phi] over responses", None),
    ("correction/mean", "weight", "band", "mean trainer/engine correction over the tokens it acts on", None),
    ("correction/masked_frac", "fraction", "down", "tokens removed or gated by the correction", None),
    # trainer against engine, at tokens of age 0
    ("mismatch/tokens", "tokens", "none", "trained tokens written by the very weights that train on them: what mismatch/* is measured on", None),
    ("mismatch/abs_mean", "nats", "down", "mean |trainer's log-prob - engine's| under equal weights", "sampling/sampling_logp_difference/mean"),
    ("mismatch/abs", "nats", "down", "|trainer's log-prob - engine's| of each token under equal weights", None),
    ("mismatch/kl_k1", "nats", "down", "mean of engine's - trainer's log-prob under equal weights (k1): KL(engine || trainer)", None),
    ("mismatch/kl_k3", "nats", "down", "k3 estimate of KL(engine || trainer) under equal weights", None),
    ("mismatch/ratio_max", "weight", "down", "largest ratio between trainer and engine on a token, either way up", None),
    ("m2po/second_moment", "nats^2", "band", "mean squared log ratio of the trust-region candidates before the budget", None),
    ("m2po/dropped_frac", "fraction", "band", "trained tokens dropped by the second-moment budget", None),
    # advantage
    ("advantage/mean", "reward", "none", "mean advantage over trained tokens", None),
    ("advantage/abs_mean", "reward", "none", "mean |advantage| over trained tokens", None),
    # by position in the response: a list for each set of bins, under /rel (tenths of the response) and /abs (tokens, powers of two)
    ("position/tokens", "tokens", "none", "trained tokens in the bin since the last row that had this list", None),
    ("position/entropy", "nats", "band", "mean entropy of the current policy", None),
    ("position/surprisal_behavior", "nats", "band", "mean of minus the behaviour log-prob: an unbiased estimate of the behaviour entropy", None),
    ("position/entropy_behavior", "nats", "band", "mean entropy of the sampling distribution, where the sampler stored it", None),
    ("position/clip_frac", "fraction", "band", "trained tokens whose gradient the kernel sets to zero", None),
    ("position/log_ratio", "nats", "band", "mean log ratio, before any clamp", None),
    ("position/abs_log_ratio", "nats", "down", "mean |log ratio|, before any clamp", None),
    ("position/raw_weight", "weight", "band", "mean ratio at the method's level that enters the kernel", None),
    ("position/weight", "weight", "band", "mean gradient weight", None),
    ("position/weight_mass", "fraction", "none", "share of the sum of gradient weights", None),
    ("position/advantage_mass", "fraction", "none", "share of the sum of |advantage|", None),
    ("position/gradient_share", "fraction", "none", "share of the summed norms of the loss gradient at the logits of each token", None),
    ("position/mismatch", "nats", "down", "mean |trainer's log-prob - engine's| at tokens of age 0", None),
    ("position/mismatch_kl", "nats", "down", "k3 estimate of KL(engine || trainer) at tokens of age 0", None),
    ("position/age", "updates", "down", "mean age of the tokens: updates done minus the version that sampled them", None),
    ("position/kl_teacher", "nats", "down", "mean of log student - log teacher at the sampled tokens: an estimate of the token KL", None),
    ("position/abs_gap_teacher", "nats", "down", "mean |log teacher - log student|", None),
    ("position/prefix_logp_student", "nats", "none", "log-likelihood of the response before the token under the student, mean", None),
    ("position/prefix_logp_teacher", "nats", "none", "log-likelihood of the response before the token under the teacher, mean", None),
    ("position/prefix_log_ratio", "nats", "band", "prefix drift: log teacher/student likelihood of the response before the token, mean", None),
    ("position/signal_weight", "weight", "none", "mean weight on the distillation signal (profile or prefix weight)", None),
    # distillation
    ("distill/kl", "nats", "down", "mean of log student - log teacher over trained tokens: an unbiased estimate of the mean token KL", None),
    ("distill/kl_k3", "nats", "down", "the same KL by the estimator k3", None),
    ("distill/abs_gap", "nats", "down", "mean |log teacher - log student| over trained tokens", None),
    ("distill/weight_mean", "weight", "none", "mean weight on the distillation signal over trained tokens", None),
    ("distill/full_kl_loss", "nats", "down", "weighted reverse KL over the whole vocabulary, as it enters the loss", None),
    # staleness
    ("stale/age_mean", "updates", "down", "mean age of the responses trained on", None),
    ("stale/age_max", "updates", "down", "largest age trained on", None),
    ("stale/responses", "responses", "none", "responses trained on by age (a list under /age: 0, 1, ... 31 updates, and older; asynchronous)", None),
    # asynchronous schedule
    ("async/mixed_frac", "fraction", "none", "responses of the batch whose tokens more than one version sampled", None),
    ("async/reused_cache_frac", "fraction", "down", "responses that were gone on with upon the cache of older weights (schedule.reuse_kv)", None),
    ("async/over_age", "groups", "down", "groups rejected since the last update for being over schedule.max_age; they are sampled again", None),
    ("async/drops_max", "groups", "down", "most times that one outstanding group was rejected for its age", None),
    ("async/ready", "groups", "none", "groups ready to be trained on, after the batch was taken", None),
    ("async/in_flight", "groups", "none", "groups being written when the batch was taken", None),
    ("async/unscored", "groups", "none", "groups written and not yet scored when the batch was taken", None),
    ("async/publications", "publications", "none", "publications of weights to the workers since the start", None),
    ("async/resampled", "groups", "down", "groups sampled again because their worker died or the run was gone on with, since the start", None),
    ("discard/groups", "groups", "none", "groups taken or rejected since the start, by mean reward (/difficulty) and writing time (/duration)", None),
    ("discard/over_age_frac", "fraction", "down", "share of those that were rejected for their age", None),
    ("discard/no_signal_frac", "fraction", "down", "share of those that dynamic sampling rejected", None),
    # relayed rollouts (Thinking Seeds)
    ("relay/relayed_frac", "fraction", "none", "responses of the rollout batch that go on from a stored prefix (a cut of 0 included)", None),
    ("relay/prefix_frac", "fraction", "none", "share of the rollout batch's response tokens that stand in a relayed prefix", None),
    ("relay/zero_cut_frac", "fraction", "none", "relayed responses of which nothing was kept", None),
    ("relay/finished_in_prefix_frac", "fraction", "none", "relayed responses that ended inside the kept prefix: nothing was sampled", None),
    ("relay/tokens_kept", "tokens", "none", "tokens of the rollout batch taken from the seed bank", None),
    ("relay/tokens_decoded", "tokens", "none", "tokens of the rollout batch decoded for it, the seed bank's not counted", None),
    ("relay/groups_without_seed", "groups", "down", "groups written fresh because the seed bank had none left for them", None),
    ("relay/prefix_age", "updates", "none", "mean age of the tokens in relayed prefixes at this update", None),
    ("relay/bank_tokens", "tokens", "none", "tokens decoded for the seed bank at the start of the cycle", None),
    ("relay/bank_bytes", "bytes", "none", "size of the seed bank on disk", None),
    # demonstrations (LUFFY)
    ("demonstration/frac", "fraction", "none", "demonstrations among the responses of the rollout batch", None),
    ("demonstration/reward", "reward", "up", "their mean reward; they are not in reward/*", None),
    ("demonstration/length", "tokens", "none", "their mean length", None),
    # data flow
    ("data/groups_rejected", "groups", "down", "groups rejected by dynamic sampling", None),
    ("data/redraws", "rounds", "down", "rounds of redrawing that dynamic sampling needed", None),
    ("data/tokens_trained", "tokens", "none", "response tokens in the loss of this update", None),
    ("data/tokens_sampled", "tokens", "none", "response tokens decoded since the start", "num_tokens"),
    ("data/empty_rows", "rows", "down", "rows without a trained token", None),
    # optimiser
    ("train/grad_norm", "norm", "band", "global gradient norm before clipping", "grad_norm"),
    ("train/lr", "lr", "none", "learning rate of this update", "learning_rate"),
    # time
    ("time/step_s", "s", "down", "wall time of the update, its share of sampling included", "step_time"),
    ("time/sample_s", "s", "down", "wall time of sampling the rollout batch", None),
    ("time/wait_s", "s", "down", "time that the trainer waited for groups (asynchronous)", None),
    ("time/score_s", "s", "down", "wall time of scoring the rollout batch", None),
    ("time/logprob_s", "s", "down", "wall time of recomputing proximal and reference log-probs", None),
    ("time/teacher_s", "s", "down", "wall time of the teacher's scoring of the rollout batch", None),
    ("time/update_s", "s", "down", "wall time of forward, backward and optimiser", None),
    ("time/eval_s", "s", "down", "wall time of evaluation", None),
    ("time/tokens_per_s", "tokens/s", "up", "response tokens sampled and trained per second, end to end", None),
    ("time/memory_mb", "MB", "down", "resident memory of the process (peak device memory on a GPU)", None),
):
    declare(*_row)
del _row
