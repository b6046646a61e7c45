"""The one loss: -sum aggregate * sg[weight] * A * logp, whatever the method.

Its gradient with respect to `logp[b, t]` is -aggregate * weight * A, which equals that of the paper's objective; the value of the paper's
literal objective is a metric. A method is its parts (kernel, distillation signal, options); nothing here asks for its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearpolicy.errors import DataError, UsageError
from nearpolicy.metrics import Metrics
from nearpolicy.objective import distill, kernels, position, ratio
from nearpolicy.objective.aggregate import Count, token_weights
from nearpolicy.objective.correction import Correction, correct
from nearpolicy.objective.distill import Sides, Signal
from nearpolicy.objective.kernels import Kernel
from nearpolicy.objective.measure import Seen, measure, measure_budget

Statistics = Mapping[str, Tensor]
"""What a row needs of the whole optimizer batch, by name; empty for most rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A method taken apart: what the loss is composed of."""

    kernel: Kernel
    signal: Callable[..., Signal] | None
    """Distillation signal, of `Sides` and its options."""
    signal_options: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def has_partition(self) -> bool:
        """The signal divides by a mean over the whole batch at each position."""
        return self.options.get("weight") == "ideal" and self.options.get("partition") == "position"

    @property
    def needs_statistics(self) -> bool:
        """True when the loss of a micro-batch depends on the whole optimizer batch beyond its counts."""
        return self.kernel.budget or self.has_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The inputs of a loss, in one floating type; masks are bool. Build with `columns(...)`."""

    logp: Tensor
    logp_behavior: Tensor
    mask: Tensor
    response_mask: Tensor
    advantage: Tensor | None
    logp_proximal: Tensor | None
    logp_teacher: Tensor | None
    logp_reference: Tensor | None
    relayed: Tensor | None
    off_policy: Tensor | None
    """[B, 1]."""
    older: Tensor | None
    """Tokens that an older policy than the proximal one wrote."""

    @property
    def own(self) -> Tensor:
        """Trained tokens that have a behaviour policy."""
        return self.mask if self.off_policy is None else self.mask & ~self.off_policy

    @property
    def foreign(self) -> Tensor | None:
        """Tokens that the proximal policy did not write: a relayed prefix, and what an older version wrote. None: it wrote them all."""
        if self.relayed is None or self.older is None:
            return self.older if self.relayed is None else self.relayed
        return self.relayed | self.older


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What `policy_loss` returns."""

    loss: Tensor
    """Scalar with gradient; 0 with zero gradient when nothing is trained."""
    weight: Tensor
    """Gradient weight of each token (kernel, gates, correction, profile), detached, [B, T]; 0 at masked tokens."""
    metrics: Metrics
    """Values of `nearpolicy.metrics` by name; merge them over micro-batches."""
    advantage: Tensor
    """The advantage each token was trained with (reward, distillation signal or their sum), detached, [B, T]; 0 at masked tokens."""
    seen: Seen
    """What the metrics were made from, token by token, for diagnostics that look closer."""


def columns(
    *, logp: Tensor, logp_behavior: Tensor, mask: Tensor, response_mask: Tensor | None = None, advantage: Tensor | None = None,
    logp_proximal: Tensor | None = None, logp_teacher: Tensor | None = None, logp_reference: Tensor | None = None,
    prefix_length: Tensor | None = None, off_policy: Tensor | None = None, older: Tensor | None = None,
) -> Columns:  # fmt: skip
    """Check types, devices and shapes, promote half precision to float32, turn 0/1 masks into bool.

    Raises:
        UsageError: a column that is no tensor, or lies on another device than `logp`; the argument is named.
        DataError: a column whose shape is not that of `logp` (rows for `prefix_length`, `off_policy` and a one-dimensional advantage).
    """
    _tensors(
        logp=logp, logp_behavior=logp_behavior, mask=mask, response_mask=response_mask, advantage=advantage, logp_proximal=logp_proximal,
        logp_teacher=logp_teacher, logp_reference=logp_reference, prefix_length=prefix_length, off_policy=off_policy,
        older=older,
    )  # fmt: skip
    if logp.ndim != 2 or not logp.is_floating_point():
        raise DataError("policy_loss: logp", got=f"{logp.dtype} of shape {tuple(logp.shape)}", expected="a floating [B, T] tensor",
                        do="Pass one log-prob for each token.")  # fmt: skip
    dtype = torch.promote_types(logp.dtype, torch.float32)

    def real(name: str, column: Tensor | None, *shapes: tuple[int, ...]) -> Tensor | None:
        if column is None:
            return None
        _shape(name, column, *(shapes or (tuple(logp.shape),)))
        return column.detach().to(dtype)

    def flags(name: str, column: Tensor, shape: tuple[int, ...]) -> Tensor:
        _shape(name, column, shape)
        return column if column.dtype is torch.bool else column != 0

    B = logp.shape[0]
    full = tuple(logp.shape)
    mask_BT = flags("mask", mask, full)
    response_BT = mask_BT if response_mask is None else flags("response_mask", response_mask, full)
    adv = real("advantage", advantage, (B,), (B, 1), full)
    if prefix_length is not None:
        _shape("prefix_length", prefix_length, (B,))
    behavior = real("logp_behavior", logp_behavior)
    assert behavior is not None
    return Columns(
        logp=logp.to(dtype), logp_behavior=behavior, mask=mask_BT, response_mask=response_BT,
        advantage=adv[:, None] if adv is not None and adv.ndim == 1 else adv,
        logp_proximal=real("logp_proximal", logp_proximal), logp_teacher=real("logp_teacher", logp_teacher),
        logp_reference=real("logp_reference", logp_reference),
        relayed=None if prefix_length is None else position.relayed(response_BT, prefix_length),
        off_policy=None if off_policy is None else flags("off_policy", off_policy, (B,))[:, None],
        older=None if older is None else flags("older", older, full),
    )  # fmt: skip


def _tensors(*, logp: object, **others: object) -> None:
    for name, column in {"logp": logp, **others}.items():
        required = name in ("logp", "logp_behavior", "mask")
        if column is None and not required:
            continue
        if not isinstance(column, Tensor):
            raise UsageError(f"policy_loss: {name}", got=f"a {type(column).__name__}", expected="a tensor" + ("" if required else ", or None"),
                             do="Convert it with torch.as_tensor.")  # fmt: skip
        if isinstance(logp, Tensor) and column.device != logp.device:
            raise UsageError(f"policy_loss: {name}", got=f"device {column.device}", expected=f"the device of logp, {logp.device}",
                             do="Move every column to one device.")  # fmt: skip


def _shape(name: str, column: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(column.shape) not in shapes:
        raise DataError(f"policy_loss: {name}", got=f"shape {tuple(column.shape)}", expected=" or ".join(str(s) for s in shapes),
                        do="Column t describes token t: pad every column like logp.")  # fmt: skip


def check(parts: Parts, c: Columns) -> None:
    """Read the values once and refuse what cannot be trained on.

    Raises:
        DataError: a non-finite value or a positive log-prob at a trained token, a trained token outside the response.
    """
    if bool((c.mask & ~c.response_mask).any()):
        raise DataError("policy_loss: mask", got="trained tokens outside response_mask", expected="a subset of response_mask",
                        do="response_mask marks every token of the response.")  # fmt: skip
    ratio.check_finite(c.mask, advantage=c.advantage)
    ratio.check_logp(c.mask, logp=c.logp.detach())
    # Only the columns that this method reads; a column that nobody reads may hold anything.
    reads_proximal = parts.options["denominator"] == "proximal" or parts.options["correction"] is not None
    ratio.check_logp(c.own, logp_behavior=c.logp_behavior, logp_proximal=c.logp_proximal if reads_proximal else None)
    if parts.signal is not None:
        ratio.check_logp(c.response_mask, logp_teacher=c.logp_teacher, logp_reference=c.logp_reference)


def check_flags(**columns: Tensor | None) -> None:
    """Refuse masks that hold anything but 0 and 1, before `columns` turns them into bool. Reads the device unless they are bool.

    Raises:
        DataError: names the mask and the value.
    """
    for name, column in columns.items():
        if column is None or column.dtype is torch.bool:
            continue
        bad = (column != 0) & (column != 1)
        if bool(bad.any()):
            raise DataError(f"policy_loss: {name}", got=f"the value {column[bad][0].item():g}", expected="0 and 1, or bool",
                            do="A mask says whether, not how much: put weights into the advantage.")  # fmt: skip


def check_prefix(prefix_length: Tensor | None, response_mask: Tensor) -> None:
    """Refuse prefix lengths that are not whole numbers from 0 to the length of their response. Reads the device.

    Raises:
        DataError: names the row.
    """
    if prefix_length is None:
        return
    length_B = response_mask.sum(1)
    bad = ~((prefix_length >= 0) & (prefix_length <= length_B) & (prefix_length == prefix_length.floor()))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise DataError("policy_loss: prefix_length", got=f"{prefix_length[row].item()} at row {row}, whose response has {int(length_B[row])} tokens",
                        expected="a whole number of tokens from 0 to the response's length",
                        do="Count the relayed tokens of each response.")  # fmt: skip


def check_counts(c: Columns, *, num_tokens: Count | None, num_sequences: Count | None) -> None:
    """Refuse counts of the whole optimizer batch that are 0 although this part of it has trained tokens. Reads the device.

    A count below this part's own is fine: trainers that average gradients over devices pass the mean over devices.
    Raises:
        DataError: names the count.
    """
    for name, count in (("num_tokens", num_tokens), ("num_sequences", num_sequences)):
        if count is not None and float(count) == 0 and bool(c.mask.any()):
            raise DataError(f"policy_loss: {name}", got="0, with trained tokens in this batch", expected="the count over the whole optimizer batch",
                            do="Sum it over all micro-batches and devices, or pass None.")  # fmt: skip


class _Drift(NamedTuple):
    log_ratio_BT: Tensor
    clipped_BT: Tensor | None
    log_weight: ratio.LogWeight
    correction: Correction | None
    acting_BT: Tensor | None


def signal(parts: Parts, c: Columns, statistics: Statistics) -> Signal:
    """The advantage of each token and the profile on it: the reward's, the distillation signal's, or their sum.

    With both, the signal's profile weighs the signal alone: A = A_reward + w_t * A_signal.
    Raises:
        UsageError: neither an advantage nor a teacher.
    """
    if parts.signal is None:
        if c.advantage is None:
            raise UsageError(
                "policy_loss", got="advantage = None", expected="advantages, [B] or [B, T]", do="Pass group_advantages(...).advantage_B."
            )
        return Signal(c.advantage)
    arguments = {name: parts.options[name] for name in parts.signal_options}
    if "partition" in arguments:
        arguments["log_partition_L"] = statistics.get("log_partition_L")
    made = parts.signal(sides(parts, c), **arguments)
    if c.advantage is None:
        return made
    term = made.advantage_BT if made.weight_BT is None else made.advantage_BT * made.weight_BT
    return Signal(c.advantage + term)


def sides(parts: Parts, c: Columns) -> Sides:
    """Teacher, student (by the option `student`) and reference.

    Raises:
        UsageError: no teacher, or no reference where the extrapolation needs one.
    """
    if c.logp_teacher is None:
        raise UsageError("policy_loss: distillation", got="no logp_teacher", expected="the teacher's log-probs, [B, T]", do="Pass logp_teacher.")
    if "logp_reference" in needed(parts) and c.logp_reference is None:
        raise UsageError("policy_loss: extrapolation", got="no logp_reference", expected="the base model's log-probs, [B, T]",
                         do="Pass logp_reference, or set extrapolation = 1 (OPD).")  # fmt: skip
    student = c.logp_behavior
    if parts.options["student"] == "current":
        student = c.logp.detach()
    elif parts.options["student"] == "proximal" and c.logp_proximal is not None:
        student = c.logp_proximal
    return Sides(c.logp_teacher, student, c.logp_reference, c.response_mask)


def needed(parts: Parts) -> frozenset[str]:
    """The optional columns that a trainer must provide for this method: of logp_proximal, logp_teacher, logp_reference."""
    o = parts.options
    columns: set[str] = set()
    if o["denominator"] == "proximal" or o.get("student") == "proximal":
        columns.add("logp_proximal")
    if parts.signal is not None:
        columns.add("logp_teacher")
        if "extrapolation" in o and (o["extrapolation"] != 1 or o.get("form") == "modulate"):
            columns.add("logp_reference")
    return frozenset(columns)


def statistics_of(parts: Parts, c: Columns) -> Statistics:
    """The row's statistics over the batch `c` (the whole optimizer batch): M2PO's threshold, the ideal weight's partition."""
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        if parts.has_partition:
            trained = c.response_mask & c.mask.any(1, keepdim=True)  # a teacher need not have scored the other rows
            out.update(distill.partition(sides(parts, c)._replace(response_mask_BT=trained), alpha=parts.options["alpha"]))
        if parts.kernel.budget:
            advantage = signal(parts, c, out).advantage_BT
            lr = _log_ratio(parts, c)
            out.update(
                kernels.m2po_threshold(lr, advantage, c.own, budget=parts.options["budget"], variant=parts.options["variant"])
            )  # fmt: skip
    return out


def _log_ratio(parts: Parts, c: Columns) -> Tensor:
    denominator = ratio.denominator(c.logp_behavior, c.logp_proximal, which=parts.options["denominator"], foreign_BT=c.foreign)
    if c.off_policy is not None:
        # A demonstration has no density of its own: the ratio is taken to 1, log p - 0 (LUFFY).
        denominator = denominator.masked_fill(c.off_policy, 0.0)
    return ratio.log_ratio(c.logp.detach(), denominator, mask_BT=c.mask)


def _drift(parts: Parts, c: Columns, positive: Tensor) -> _Drift:
    """Log ratios, the correction and the log weight."""
    o, kernel = parts.options, parts.kernel
    log_ratio = _log_ratio(parts, c)
    made: Correction | None = None
    acting: Tensor | None = None
    summed, mask, extra = log_ratio, c.mask, None
    if o["correction"] is not None:
        assert c.logp_proximal is not None, "the denominator is proximal under a correction, and was checked"
        acting = c.own if c.foreign is None else c.own & ~c.foreign
        made = correct(
            c.logp_proximal, c.logp_behavior, acting_BT=acting, kind=o["correction"], low=o["correction_low"], cap=o["correction_cap"],
            fold=kernel.folds_correction,
        )  # fmt: skip
        extra = made.log_sequence
        if made.leaves_sum:
            summed, mask = summed.masked_fill(made.removed, 0.0), mask & ~made.removed
        if made.log_token is not None:
            summed = summed + made.log_token
    clipped = None
    if kernel.clip is not None:
        clipped = kernel.clip(summed, positive, clip_low=o["clip_low"], clip_high=o["clip_high"])
    segments = c.relayed if o["ratio_scope"] == "segment" else None
    lw = ratio.log_weight(summed if clipped is None else clipped, mask, level=kernel.at(o), relayed_BT=segments, extra_BX=extra)
    return _Drift(log_ratio, None if clipped is None else clipped == summed, lw, made, acting)


def _kernel(
    parts: Parts, c: Columns, drift: _Drift, advantage: Tensor, positive: Tensor, statistics: Statistics
) -> tuple[Tensor, Tensor | None, Metrics]:
    """phi and f (None: the objective is `sg[phi] * A * logp`), [B, T] or [B, 1], with the kernel's gates applied, and the gate's metrics."""
    kernel, arguments = parts.kernel, parts.kernel.arguments(parts.options)
    x = drift.log_weight.value
    phi = kernel.phi(x, positive, **arguments)
    f = None if kernel.objective is None else kernel.objective(x, positive, **arguments)
    metrics: Metrics = {}
    if drift.clipped_BT is not None:
        phi = phi * drift.clipped_BT
    if kernel.budget:
        keep = kernels.m2po_keep(drift.log_ratio_BT, advantage, statistics["m2po_threshold"])
        phi, f = phi * keep, None if f is None else f * keep
        metrics = measure_budget(drift.log_ratio_BT, c.own, kernels.m2po_candidates(drift.log_ratio_BT, advantage), keep)
    if kernel.demonstration is not None and c.off_policy is not None:
        gamma = parts.options["gamma"]
        phi = torch.where(c.off_policy, kernel.demonstration[0](x, gamma=gamma), phi)
        f = None if f is None else torch.where(c.off_policy, kernel.demonstration[1](x, gamma=gamma), f)
    return phi, f, metrics


def compute(
    parts: Parts, c: Columns, *, num_tokens: Count | None = None, num_sequences: Count | None = None, statistics: Statistics | None = None
) -> LossOutput:
    """The loss, the weights and the metrics of one micro-batch.

    Args:
        num_tokens, num_sequences: counts of the whole optimizer batch; None means `c` is everything.
        statistics: `statistics_of` the whole optimizer batch; None computes them from `c` when it is everything.
    Raises:
        UsageError: counts say that `c` is a part of a batch, and a row that needs statistics got none.
    """
    if statistics is None:
        if parts.needs_statistics and (num_tokens is not None or num_sequences is not None):
            raise UsageError("policy_loss: statistics", got="None with global counts", expected="statistics of the whole optimizer batch",
                             do="Pass statistics=method.prepare(columns of the whole batch).")  # fmt: skip
        statistics = statistics_of(parts, c) if parts.needs_statistics else {}
    names = ["m2po_threshold"] * parts.kernel.budget + ["log_partition_L"] * parts.has_partition
    if missing := [name for name in names if name not in statistics]:
        raise UsageError("policy_loss: statistics", got=f"no {missing[0]}", expected="what method.prepare returns for this method",
                         do="Pass statistics=method.prepare(columns of the whole batch), or None for a whole batch.")  # fmt: skip
    o = parts.options
    with torch.no_grad():
        made = signal(parts, c, statistics)
        # expand, not copy: a row's advantage stays [B, 1] through the kernel.
        positive = made.advantage_BT >= 0
        drift = _drift(parts, c, positive)
        phi, f, metrics = _kernel(parts, c, drift, made.advantage_BT, positive, statistics)
        outer = made.weight_BT
        if drift.correction is not None and drift.correction.weight is not None:
            outer = drift.correction.weight if outer is None else outer * drift.correction.weight
        weight = (phi if outer is None else phi * outer).to(c.logp.dtype).expand_as(c.mask).masked_fill(~c.mask, 0.0)
        advantage = made.advantage_BT.expand_as(c.mask).masked_fill(~c.mask, 0.0)
        aggregate = token_weights(
            c.mask, aggregate=o["aggregate"], dtype=c.logp.dtype, num_tokens=num_tokens, num_sequences=num_sequences, max_length=o["max_length"]
        )
        scaled = aggregate * advantage
        coefficient = scaled * weight
    loss = -(coefficient * c.logp.masked_fill(~c.mask, 0.0)).sum()
    with torch.no_grad():
        detached = loss.detach()
        if f is None:
            objective = -detached
        else:
            value = f * drift.log_weight.share if outer is None else f * drift.log_weight.share * outer
            objective = (scaled * value).sum()
        seen = Seen(
            c.mask, c.own, drift.log_ratio_BT, drift.log_weight, phi, weight, advantage, detached, objective, drift.correction, drift.acting_BT,
            coefficient,
        )  # fmt: skip
        metrics |= measure(seen)
    return LossOutput(loss, weight, metrics, advantage, seen)
