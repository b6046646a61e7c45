"""The methods, one row each, and `policy_loss`.

A row is data: kernel (with its ratio level), distillation signal, options with defaults, default aggregation and advantages, formula and
source. A new method is a new row. Defaults are each paper's; where the paper and its public code differ, the difference is stated and,
where it matters, is an option value. `nearpolicy methods` and the documentation are generated from these rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torch import Tensor

from nearpolicy.errors import UsageError, nearest
from nearpolicy.objective import distill, loss
from nearpolicy.objective.aggregate import AGGREGATES, Count
from nearpolicy.objective.correction import CORRECTIONS
from nearpolicy.objective.distill import Signal
from nearpolicy.objective.kernels import KERNELS
from nearpolicy.objective.loss import LossOutput, Parts, Statistics
from nearpolicy.options import Option, choice, flag, number, pair, resolve, whole

__all__ = ["METHODS", "LossOutput", "Method", "Row", "method", "policy_loss"]


NO_CAP = 1e9
"""Largest cap on a ratio: no weight reaches it (`ratio.LIMIT`)."""


def _clip(low: float | None, high: float | None) -> dict[str, Option]:
    return {
        "clip_low": number(low, "how far the ratio may fall below 1 before a token with A < 0 loses its gradient", low=0, off=True),
        "clip_high": number(high, "how far the ratio may rise above 1 before a token with A >= 0 loses its gradient", low=0, off=True),
    }


_DUAL = {"dual_clip": number(None, "ratio beyond which a token with A < 0 loses its gradient (verl: 3.0)", low=1, above=True, off=True)}
_VESPO = {
    "c_pos": pair((2.0, 3.0), "(c1, c2) of the kernel W^c1 exp(c2 (1 - W)) where A >= 0"),
    "c_neg": pair((3.0, 2.0), "(c1, c2) where A < 0"),
    "length_norm": choice(None, "divide log W by sqrt(T) or T before the kernel (ablations)", (None, "sqrt", "mean")),
}
_SAPO = {
    "tau_pos": number(1.0, "temperature of the sigmoid gate where A >= 0", low=0, above=True),
    "tau_neg": number(1.05, "temperature where A < 0", low=0, above=True),
}
_CISPO = {
    "floor": number(0.0, "smallest weight", low=0),
    "cap": number(5.0, "largest weight, an absolute ratio (verl: 1 + 0.2; TRL recommends 5.0, ScaleRL)", low=0, high=NO_CAP, above=True),
}
_M2PO = {
    "budget": number(0.04, "largest mean squared log ratio of the trust-region candidates, nats^2", low=0, above=True),
    "variant": choice("paper", "how dropped tokens count against the budget", ("paper", "released_code")),
}
_LUFFY = _clip(0.2, 0.2) | {
    "gamma": number(0.1, "shape of the demonstration weight gamma p / (p + gamma)^2", low=0, above=True),
    "variant": choice("paper", "released_script: clip_low = clip_high = None and aggregate = constant, unless they are set",
                      ("paper", "released_script")),
}  # fmt: skip
_GMPO = {
    "clip_low": number(0.4, "largest fall of a token's log ratio, nats, where A < 0", low=0),
    "clip_high": number(0.4, "largest rise of a token's log ratio, nats, where A >= 0", low=0),
}
_KERNEL_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "none": {}, "ppo": _clip(0.2, 0.2) | _DUAL, "gspo": _clip(3e-4, 4e-4) | _DUAL, "sapo": _SAPO, "vespo": _VESPO, "cispo": _CISPO,
    "gmpo": _GMPO, "topr": {}, "m2po": _M2PO,
}  # fmt: skip
"""What a kernel adds to a distillation row that names it."""

_DISTILL = {
    "kernel": choice("ppo", "kernel of the importance ratio, with that kernel's own options", tuple(_KERNEL_OPTIONS)),
    "student": choice(
        "proximal", "whose log-probs the teacher's are compared with; proximal falls back to behaviour when there are none",
        ("proximal", "behavior", "current"),
    ),
}  # fmt: skip
_PREFIX_WEIGHT = {
    "gamma": number(0.5, "strength of the prefix weight: 1 + gamma (1 - F)", low=0),
    "normalizer": choice(
        "before_last", "F divides by the drift before the last token (article) or of all tokens (released code, TRL)", ("before_last", "all_tokens")
    ),
}
_EXTRAPOLATION = {"extrapolation": number(1.25, "lambda: 1 is OPD, above 1 goes beyond the teacher along teacher - reference", low=0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method as data."""

    name: str
    kernel: str
    """Key of `KERNELS`; for distillation rows the default, replaced by the option `kernel`."""
    formula: str
    source: str
    differences: str
    """How public code differs from the paper, and which we follow."""
    aggregate: str
    normalize_std: bool
    """Whether the paper divides group advantages by their standard deviation."""
    baseline: str | None = "mean"
    """Baseline of group advantages; None where the method needs no reward."""
    options: Mapping[str, Option] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Value of the option `variant` -> defaults of other options under it."""
    signal: Callable[..., Signal] | None = None
    signal_options: tuple[str, ...] = ()

    def all_options(self, kernel: str | None = None) -> dict[str, Option]:
        """Own options, those of the kernel and the common ones, by name."""
        own = {**self.options, **(_KERNEL_OPTIONS[kernel or self.kernel] if self.signal is not None else {})}
        return {**own, **_common(self.aggregate)}

    @property
    def level(self) -> str:
        """Ratio level under the defaults."""
        return KERNELS[self.kernel].level


def _common(aggregate: str) -> dict[str, Option]:
    return {
        "aggregate": choice(aggregate, "how tokens add up", AGGREGATES),
        "max_length": whole(None, "response limit in tokens, for aggregate = constant"),
        "denominator": choice(
            None, "policy the ratio is taken to; None is behavior, and proximal under a correction", (None, "behavior", "proximal")
        ),
        "ratio_scope": choice("segment", "sequence ratios over the token's own segment (relayed prefix | rest) or the whole response",
                              ("segment", "response")),
        "correction": choice(None, "trainer/engine correction", (None, *CORRECTIONS)),
        "correction_low": number(None, "lower bound of the correction ratio; None is the correction's own", low=0, above=True, off=True),
        "correction_cap": number(None, "upper bound of the correction ratio; None is the correction's own", low=0, high=NO_CAP, above=True, off=True),
    }  # fmt: skip


_OPD_OPTIONS = {
    "profile": choice(None, "fixed weight by position", (None, "prefix", "suffix", "amplify_prefix", "curriculum")),
    "fraction": number(0.3, "share of the response the profile picks (curriculum: where it starts)", low=0, high=1),
    "multiplier": number(1.5, "weight of the amplified part", low=0),
    "progress": number(0.0, "share of training done, set by the trainer (curriculum)", low=0, high=1),
    "curriculum": choice("linear", "how the fraction grows to 1: linear (article) or cosine (released code)", ("linear", "cosine")),
}
_IW_OPTIONS = _PREFIX_WEIGHT | {
    "signed": flag(False, "add up signed discrepancies instead of their size"),
    "weight": choice("surrogate", "remaining share of the drift, or the teacher/student ratio of the prefix", ("surrogate", "ideal")),
    "alpha": number(1.0, "exponent of the ideal weight", low=0),
    "partition": choice("position", "normaliser of the ideal weight: its mean at each position over the batch, or 1", ("position", "one")),
    "blend": flag(True, "1 + gamma * weight instead of the weight alone"),
    "reverse": flag(False, "share of the drift before the token instead of what remains: late tokens up (a control)"),
}

_ROWS = (
    Row(
        name="reinforce", kernel="none", aggregate="token_mean", normalize_std=False,
        formula="phi = 1", source="Williams 1992, Machine Learning 8",
        differences="None: no importance ratio, so stale data is trained on as if it were fresh.",
    ),
    Row(
        name="grpo", kernel="ppo", aggregate="sequence_mean", normalize_std=True, options=_clip(0.2, 0.2) | _DUAL,
        formula="phi = r [A >= 0: r <= 1 + clip_high; A < 0: r >= 1 - clip_low]", source="DeepSeekMath, arXiv 2402.03300, eq. 3; clip 0.2 of PPO",
        differences="verl and TRL default to token_mean today, verl adds dual_clip = 3.0 and clamps token log ratios at 20; the paper's KL term "
        "(beta 0.04) is the trainer's option.",
    ),
    Row(
        name="dapo", kernel="ppo", aggregate="token_mean", normalize_std=True, options=_clip(0.2, 0.28) | _DUAL,
        formula="phi = r [A >= 0: r <= 1.28; A < 0: r >= 0.8]", source="DAPO, arXiv 2503.14476, eq. 8",
        differences="verl adds dual_clip = 3.0. Dynamic sampling and overlong shaping act on data and reward, not here.",
    ),
    Row(
        name="dr_grpo", kernel="ppo", aggregate="constant", normalize_std=False, options=_clip(0.2, 0.2) | _DUAL,
        formula="phi as grpo; every token weighs 1 / (sequences * max_length)", source="Dr.GRPO, arXiv 2503.20783",
        differences="verl's seq-mean-token-sum-norm does not divide by the number of sequences.",
    ),
    Row(
        name="gspo", kernel="gspo", aggregate="sequence_mean", normalize_std=True, options=_clip(3e-4, 4e-4) | _DUAL,
        formula="phi = s [A >= 0: s <= 1 + clip_high; A < 0: s >= 1 - clip_low], s = exp(mean log r)", source="GSPO, arXiv 2507.18071, eq. 5 and 13",
        differences="With an advantage per token this is GSPO-token. AReaL aggregates by token_mean.",
    ),
    Row(
        name="sapo", kernel="sapo", aggregate="sequence_mean", normalize_std=True, options=_SAPO,
        formula="phi = 4 p (1 - p) r, p = sigmoid(tau (r - 1))", source="SAPO, arXiv 2511.20347",
        differences="AReaL aggregates by token_mean.",
    ),
    Row(
        name="vespo", kernel="vespo", aggregate="token_mean", normalize_std=False, options=_VESPO,
        formula="phi = W^c1 exp(c2 (1 - W)), W = exp(sum log r)", source="VESPO, arXiv 2602.10693",
        differences="The released scripts divide advantages by their std (the paper does not), take the sign from the first column, floor log W at "
        "-18.4 and average per micro-batch; we do none of these.",
    ),
    Row(
        name="cispo", kernel="cispo", aggregate="token_mean", normalize_std=True, options=_CISPO,
        formula="phi = clip(r, floor, cap)", source="MiniMax-M1, arXiv 2506.13585, eq. 4; cap of ScaleRL, arXiv 2510.13786",
        differences="verl clips to [0.8, 1.2]; TRL falls back to a cap of 0.2, which makes every weight 0.2.",
    ),
    Row(
        name="gmpo", kernel="gmpo", aggregate="sequence_mean", normalize_std=True, options=_GMPO,
        formula="phi = exp(mean clip(log r)) [log r not clipped]", source="GMPO, arXiv 2507.20673",
        differences="verl averages over empty rows too.",
    ),
    Row(
        name="topr", kernel="topr", aggregate="sequence_sum", normalize_std=False,
        formula="phi = 1 where A >= 0, min(W, 1) where A < 0", source="TOPR, arXiv 2503.14286",
        differences="The sign is the advantage's, where the paper takes the reward's with a baseline of choice. ROLL clips per token.",
    ),
    Row(
        name="m2po", kernel="m2po", aggregate="token_mean", normalize_std=True, options=_M2PO,
        formula="phi = r, 0 for the candidates (A > 0, r > 1 or A < 0, r < 1) of largest (log r)^2 until their mean is within the budget",
        source="M2PO, arXiv 2510.01161, algorithm 1",
        differences="variant = released_code lets dropped tokens still cost the threshold, and so drops more. Both act on the whole optimizer batch; "
        "the released code acts per micro-batch.",
    ),
    Row(
        name="luffy", kernel="luffy", aggregate="token_mean", normalize_std=False, options=_LUFFY,
        variants={"released_script": {"clip_low": None, "clip_high": None, "aggregate": "constant"}},
        formula="phi = r with the PPO clip; demonstrations: gamma p / (p + gamma)^2", source="LUFFY, arXiv 2504.14945, eq. 7 to 10",
        differences="variant = released_script runs unclipped and divides by the response limit, as the released script does (which leaves out "
        "the division by the number of sequences).",
    ),
    Row(
        name="opd", kernel="ppo", aggregate="token_mean", normalize_std=False, baseline=None, options=_DISTILL | _OPD_OPTIONS, signal=distill.opd,
        signal_options=tuple(_OPD_OPTIONS),
        formula="A = log pi_teacher - log pi_student; phi of the kernel times the profile", source="On-Policy Distillation, Thinking Machines 2025",
        differences="tinker's loss has no clip (kernel = cispo with a large cap, or clip_low = clip_high = None); slime adds the signal to a reward.",
    ),
    Row(
        name="iw_opd", kernel="ppo", aggregate="token_mean", normalize_std=False, baseline=None, options=_DISTILL | _IW_OPTIONS,
        signal=distill.iw_opd, signal_options=tuple(_IW_OPTIONS),
        formula="A as opd; phi times w, w = 1 + gamma (1 - F), F = drift before the token / drift", source="IW-OPD, arXiv 2606.22600",
        differences="The article's normalizer leaves the last token out (weight exactly 1); the released code and TRL take all tokens "
        "(normalizer = all_tokens). TRL uses no ratio (kernel = none); the released code adds dual_clip = 3.0.",
    ),
    Row(
        name="exopd", kernel="ppo", aggregate="token_mean", normalize_std=False, baseline=None, options=_DISTILL | _EXTRAPOLATION,
        signal=distill.exopd, signal_options=tuple(_EXTRAPOLATION),
        formula="A = log pi_teacher - log pi_student + (lambda - 1)(log pi_teacher - log pi_reference)",
        source="G-OPD / ExOPD, arXiv 2602.12125, eq. 6",
        differences="Equation 14 prints the opposite sign (it minimises); the released code and we maximise. The code adds dual_clip = 3.0.",
    ),
    Row(
        name="iw_exopd", kernel="ppo", aggregate="token_mean", normalize_std=False, baseline=None,
        options=_DISTILL | _EXTRAPOLATION | _PREFIX_WEIGHT
        | {"form": choice("modulate", "where the prefix weight enters", ("modulate", "modulate_excess", "scale"))},
        signal=distill.iw_exopd, signal_options=("extrapolation", "gamma", "normalizer", "form"),
        formula="modulate: lambda w in place of lambda; modulate_excess: 1 + (lambda - 1) w; scale: exopd's A times w",
        source="IW-OPD, arXiv 2606.22600",
        differences="The article names the combination without a formula; scale is what the released code computes with both switches on.",
    ),
)  # fmt: skip

METHODS: Mapping[str, Row] = MappingProxyType({row.name: row for row in _ROWS})
"""Every method by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A row with its options resolved. Build with `method(name, **options)`."""

    row: Row
    options: Mapping[str, Any]
    """Every option with its value; read-only."""
    given: Mapping[str, Any]
    """The options that were set by name; the others are the row's defaults."""
    parts: Parts

    @property
    def name(self) -> str:
        """The row's name."""
        return self.row.name

    @property
    def level(self) -> str:
        """Ratio level: token, sequence, geometric or sqrt."""
        return self.parts.kernel.at(self.options)

    @property
    def formula(self) -> str:
        """The row's formula, plain text."""
        return self.row.formula

    @property
    def source(self) -> str:
        """Paper and equation."""
        return self.row.source

    @property
    def normalize_std(self) -> bool:
        """Whether the paper divides group advantages by their standard deviation."""
        return self.row.normalize_std

    @property
    def baseline(self) -> str | None:
        """Baseline of group advantages by the paper; None for rows that need no reward."""
        return self.row.baseline

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns the trainer must provide: of logp_proximal, logp_teacher, logp_reference.

        `policy_loss` itself lets logp_proximal be missing where it only is the student of a distillation signal.
        """
        return loss.needed(self.parts)

    @property
    def needs_advantage(self) -> bool:
        """False for distillation rows, whose advantage is the signal (a reward's advantage may still be added)."""
        return self.parts.signal is None

    @property
    def needs_statistics(self) -> bool:
        """True when micro-batches need `prepare` of the whole optimizer batch."""
        return self.parts.needs_statistics

    def prepare(self, columns: Mapping[str, Tensor | None]) -> Statistics:
        """Statistics of the whole optimizer batch, for `policy_loss(..., statistics=...)`; empty when the row needs none.

        Args:
            columns: the tensors of `policy_loss` by name (logp, logp_behavior, mask, ...) over the whole optimizer batch.
        """
        if not self.needs_statistics:
            return {}
        return loss.statistics_of(self.parts, loss.columns(**columns))  # type: ignore[arg-type]

    def at(self, progress: float) -> "Method":
        """The method at this share of training (0 to 1): changes the curriculum's `progress`, nothing else."""
        if self.options.get("profile") != "curriculum":
            return self
        return self.with_options(progress=progress)

    def with_options(self, **options: Any) -> "Method":
        """The method with some options replaced. A new `kernel` starts from that kernel's own defaults."""
        kept = self.given
        if options.get("kernel", self.options.get("kernel")) != self.options.get("kernel"):
            kept = {name: value for name, value in kept.items() if name not in _KERNEL_OPTIONS[self.options["kernel"]]}
        return method(self.name, **{**kept, **options})

    def __repr__(self) -> str:
        return f"method({self.name!r}{''.join(f', {k}={v!r}' for k, v in self.given.items())})"


def method(name: str, **options: Any) -> Method:
    """The method `name` with these options; the others keep the row's defaults.

    Raises:
        UsageError: an unknown method or option (the nearest is named), a value out of range, or options that exclude one another.
    """
    row = METHODS.get(name)
    if row is None:
        raise UsageError("method", got=repr(name), expected="a known method", do=nearest(name, METHODS))
    given, kernel = options, row.kernel
    if "variant" in options and isinstance(options["variant"], str):
        options = {**row.variants.get(options["variant"], {}), **options}
    if row.signal is not None:
        kernel = resolve(f"method {name!r}", _DISTILL, {k: v for k, v in options.items() if k == "kernel"})["kernel"]
    values = _settle(f"method {name!r}", resolve(f"method {name!r}", row.all_options(kernel), options))
    frozen = MappingProxyType(values)
    return Method(
        row,
        frozen,
        MappingProxyType(dict(given)),
        Parts(kernel=KERNELS[kernel], signal=row.signal, signal_options=row.signal_options, options=frozen),
    )


def _settle(owner: str, o: dict[str, Any]) -> dict[str, Any]:
    """Fill the defaults that depend on other options, and refuse pairs that contradict."""
    if o["correction"] is None:
        for name in ("correction_low", "correction_cap"):
            if o[name] is not None:
                raise UsageError(f"{owner}: option {name}", got=o[name], expected="None without a correction", do="Name the correction it bounds.")
        o["denominator"] = o["denominator"] or "behavior"
    else:
        if o["denominator"] == "behavior":
            raise UsageError(
                f"{owner}: option denominator", got="'behavior' with a correction", expected="'proximal'",
                do="The correction is proximal/behaviour: with the ratio to behaviour it would count twice. Leave denominator out.",
            )  # fmt: skip
        o["denominator"] = "proximal"
        kind = CORRECTIONS[o["correction"]]
        o["correction_low"] = kind.low if o["correction_low"] is None else o["correction_low"]
        o["correction_cap"] = kind.cap if o["correction_cap"] is None else o["correction_cap"]
    if o.get("reverse") and o["weight"] == "ideal":
        raise UsageError(f"{owner}: option reverse", got="true with weight = 'ideal'", expected="weight = 'surrogate'", do="Only a share has a rest.")
    for low, high in (("correction_low", "correction_cap"), ("floor", "cap")):
        if o.get(low) is not None and o[low] > o[high]:
            raise UsageError(f"{owner}: option {low}", got=o[low], expected=f"at most {high} = {o[high]}", do="Swap the bounds.")
    return o


@lru_cache(maxsize=128)
def _plain(name: str) -> Method:
    return method(name)


def policy_loss(
    method: str | Method, *, logp: Tensor, logp_behavior: Tensor, advantage: Tensor | None = None, mask: Tensor,
    response_mask: Tensor | None = None, logp_proximal: Tensor | None = None, logp_teacher: Tensor | None = None,
    logp_reference: Tensor | None = None, prefix_length: Tensor | None = None, off_policy: Tensor | None = None, older: Tensor | None = None,
    num_tokens: Count | None = None, num_sequences: Count | None = None, statistics: Statistics | None = None,
    options: Mapping[str, Any] | None = None, check: bool | None = None,
) -> LossOutput:  # fmt: skip
    """The loss of one micro-batch: `-sum aggregate * sg[weight] * A * logp`.

    Args:
        method: a name of `METHODS`, or `method(name, **options)`.
        logp: log-probs with gradient, [B, T], nats; half precision is promoted to float32, float64 stays.
        logp_behavior: log-probs under the policy that sampled each token, [B, T].
        advantage: [B] or [B, T]. Distillation rows need none; given one, the two signals add.
        mask: tokens trained on, [B, T], bool or 0/1.
        response_mask: tokens that exist (context, drift, position); None means `mask`.
        logp_proximal, logp_teacher, logp_reference: [B, T], when the method needs them (`Method.needs`).
        prefix_length: [B], tokens of a relayed prefix at the start of each response; they keep `logp_behavior` as denominator and no
            correction acts on them.
        off_policy: [B], True at demonstration rows (LUFFY).
        older: [B, T], True at tokens that an older policy than the proximal one wrote (responses in flight over a publication, groups that
            waited); treated as a relayed prefix is, but inside the segment in which they stand. None: the proximal policy wrote them all.
        num_tokens, num_sequences: trained tokens and rows with a trained token of the whole optimizer batch over all devices; None
            means this batch is everything. With them the losses and gradients of micro-batches add up to the batch's.
        statistics: `method.prepare(columns)` of the whole optimizer batch, for rows that need it (`Method.needs_statistics`).
        options: options on top of the method's.
        check: read the values and refuse what cannot be meant (Raises); None checks on the CPU only, where that costs no synchronisation.
    Returns:
        loss (scalar), weight and advantage (detached [B, T]) and metrics.
    Raises:
        UsageError: unknown names, options out of range, a column that the method needs and did not get, that is no tensor or lies on another
            device than `logp`, a count that is no number, statistics that lack what the method needs.
        DataError: shapes that differ; with `check`, a non-finite or positive log-prob at a trained token (row and column are named), masks that
            hold more than 0 and 1, prefix lengths outside the response, counts of 0 for a batch with trained tokens.
    """
    chosen = _plain(method) if isinstance(method, str) else method
    if not isinstance(chosen, Method):
        raise UsageError("policy_loss: method", got=f"a {type(method).__name__}", expected="a method's name, or method(name, **options)",
                         do="nearpolicy.METHODS lists the names.")  # fmt: skip
    for name, given in (("options", options), ("statistics", statistics)):
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(f"policy_loss: {name}", got=f"a {type(given).__name__}", expected="a mapping by name, or None", do="Pass a dict.")
    if options:
        chosen = chosen.with_options(**options)
    columns = loss.columns(
        logp=logp, logp_behavior=logp_behavior, mask=mask, response_mask=response_mask, advantage=advantage, logp_proximal=logp_proximal,
        logp_teacher=logp_teacher, logp_reference=logp_reference, prefix_length=prefix_length, off_policy=off_policy,
        older=older,
    )  # fmt: skip
    if off_policy is not None and chosen.parts.kernel.demonstration is None and bool(off_policy.any()):
        raise UsageError(
            f"policy_loss: method {chosen.name!r}", got="demonstration rows (off_policy)", expected="rows that a policy sampled",
            do="Only 'luffy' has a weight for tokens without behaviour log-probs; leave the demonstrations out or use it.",
        )  # fmt: skip
    reads = check if check is not None else logp.device.type == "cpu"
    if reads:
        loss.check_flags(mask=mask, response_mask=response_mask, off_policy=off_policy, older=older)
        loss.check(chosen.parts, columns)
        loss.check_prefix(prefix_length, columns.response_mask)
    out = loss.compute(chosen.parts, columns, num_tokens=num_tokens, num_sequences=num_sequences, statistics=statistics)
    if reads:  # the counts' types were checked on the way
        loss.check_counts(columns, num_tokens=num_tokens, num_sequences=num_sequences)
    return out
