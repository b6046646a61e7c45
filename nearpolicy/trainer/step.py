"""One optimizer update. The only file that calls backward and reads values off the device."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearpolicy.diagnostics import mismatch, position
from nearpolicy.errors import EngineError
from nearpolicy.methods import Method, policy_loss
from nearpolicy.metrics import Mean, Metrics, Sum, merge
from nearpolicy.mixture import Mixture
from nearpolicy.objective.stats import kl_estimate, kl_penalty
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.rank_plan import Steps, empty_row
from nearpolicy.policy.routing import NOT_RECORDED
from nearpolicy.policy.shares import whole
from nearpolicy.rollout import Batch
from nearpolicy.trainer.distill import Distillation, FullSignal, teacher_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What the update is made of besides the method."""

    grad_clip: float | None
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    steps: int = 1
    """Updates of the run: a curriculum is over at the last."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an update gave."""

    metrics: Metrics
    weight_BT: Tensor
    """Detached weights in the batch's row order, float32 [B, T]."""


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, decay: str, floor: float) -> float:
    """Learning rate of update `step` (from 0): linear warm-up over `warmup` updates, then constant, linear or cosine down to `floor`.

    The first update of a warm-up of w has peak / (w + 1), so that no update is wasted at 0; the last decayed update has `floor`.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if decay == "constant":
        return peak
    done = (step - warmup) / max(steps - warmup - 1, 1)
    share = 1 - done if decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return floor + (peak - floor) * share


class NotFinite(EngineError):
    """The gradient is not finite. Every rank finds it out together, with the weights untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """Rows that go through the model together."""

    rows: list[int]
    """Of the optimizer batch; none in an empty step, which `batch` then stands in for."""
    batch: Batch
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank does in an update: picklable. A process alone does all of it."""

    step: int
    counts: dict[str, int]
    """Trained tokens and sequences of the whole optimizer batch."""
    micro: Sequence[Micro]
    statistics: Mapping[str, Tensor] | None
    """Of methods that look at the whole optimizer batch; None where a micro-batch is all of it, or nothing is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a share gave."""

    metrics: Sequence[Metrics]
    """One a micro-batch, empty steps left out."""
    weights: Sequence[tuple[list[int], Tensor]]
    """Rows of the optimizer batch, and their detached weights."""
    norm: float
    lr: float


class Stepper:
    """Weight, loss, backward, clip, step: loss and gradient do not depend on how rows are split into micro-batches.

    Args:
        mixture: a teacher's part of the advantage, for methods that train on rewards.
        full: the teacher's exact reverse KL in place of the sampled token's signal.
    """

    def __init__(
        self, policy: HFPolicy, method: Method, optimizer: torch.optim.Optimizer, options: StepOptions, lr_at: Callable[[int], float], *,
        mixture: Mixture | None = None, full: FullSignal | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.optimizer, self.options, self.lr_at = policy, optimizer, options, lr_at
        self.distillation = Distillation(method, mixture, full)
        self.done = 0
        """Updates that the weights contain; moves together with them."""

    @property
    def method(self) -> Method:
        """The method, at the share of training of the last update."""
        return self.distillation.method

    def update(self, batch: Batch, step: int) -> StepResult:
        """Update number `step` (from 0) on this batch.

        Raises:
            EngineError: the gradient is not finite; the weights are then untouched.
        """
        start = time.perf_counter()
        self._begin(step)
        batch = batch.to(self.policy.device)
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
        live, still = self._with_gradient(batch)
        micro = [(steps, gradient) for rows, gradient in ((live, True), (still, False)) for steps in self._plan(batch, rows)]
        statistics = self._statistics(batch) if self.distillation.needs_statistics and self._is_split(micro) else None
        shares = [
            Share(step=step, counts=counts, statistics=statistics, micro=[self._micro(batch, steps[rank], gradient) for steps, gradient in micro])
            for rank in range(self.ranks)
        ]
        works = self._run(shares)
        weight_BT = torch.zeros_like(batch.logp_behavior_BT)
        for rows, weight in (pair for work in works for pair in work.weights):
            weight_BT[rows, : weight.shape[1]] = weight.to(weight_BT.device)
        metrics = merge(part for work in works for part in work.metrics)
        metrics |= {
            "train/grad_norm": Mean(works[0].norm, 1),
            "train/lr": Mean(works[0].lr, 1),
            "data/tokens_trained": Sum(counts["num_tokens"]),
            "data/empty_rows": Sum(len(batch) - counts["num_sequences"]),
            "time/update_s": Sum(time.perf_counter() - start),
        }
        return StepResult(metrics, weight_BT)

    def work(self, share: Share) -> Work:
        """Forward and backward of each micro-batch, then the optimizer's step. Ranks that share the weights call it together.

        Raises:
            NotFinite: as `update`, on every rank.
        """
        self._begin(share.step)
        self.optimizer.zero_grad(set_to_none=True)
        statistics = None if share.statistics is None else {name: value.to(self.policy.device) for name, value in share.statistics.items()}
        parts: list[Metrics] = []
        weights: list[tuple[list[int], Tensor]] = []
        for micro in share.micro:
            with torch.set_grad_enabled(micro.gradient):
                loss, metrics, weight = self._micro_batch(micro.batch.to(self.policy.device), share.step, share.counts, statistics)
            if micro.gradient:
                loss.backward()
            else:
                self.policy.settle()
            if micro.rows:
                parts.append(metrics)
                weights.append((micro.rows, weight))
        return Work(metrics=parts, weights=weights, norm=self._step(share.step), lr=self.optimizer.param_groups[0]["lr"])

    ranks = 1
    """Processes that the rows of an update are spread over."""

    def _run(self, shares: Sequence[Share]) -> Sequence[Work]:
        """Every rank's work, this process's first."""
        return [self.work(share) for share in shares]

    def _begin(self, step: int) -> None:
        self.distillation = self.distillation.at(min(step / max(self.options.steps - 1, 1), 1.0))

    def _is_split(self, micro: Sequence[tuple[Sequence[list[int]], bool]]) -> bool:
        return sum(bool(rows) for steps, _ in micro for rows in steps) > 1

    def _micro(self, batch: Batch, rows: list[int], gradient: bool) -> Micro:
        return Micro(rows=rows, batch=batch.rows(rows) if rows else empty_row(batch), gradient=gradient)

    def _with_gradient(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Rows whose gradient may differ from zero, and the others.

        An advantage of exactly zero on every trained token (equal rewards in the group) has exactly no gradient where nothing but the
        advantage is trained on: such rows are measured in a forward pass alone, a third of the work.
        """
        o = self.options
        rows = list(range(len(batch)))
        if o.kl_coefficient or o.entropy_coefficient or not self.distillation.silent or self.distillation.needs_statistics:
            return rows, []
        moving = ((batch.advantage_BT != 0) & batch.mask_BT).any(1).tolist()
        return [b for b in rows if moving[b]], [b for b in rows if not moving[b]]

    def _plan(self, batch: Batch, rows: list[int]) -> Steps:
        """Micro-batches of these rows for each rank, as rows of the batch."""
        return [[[rows[i] for i in part] for part in parts] for parts in self._parts(batch.rows(rows))] if rows else []

    def _parts(self, batch: Batch) -> Steps:
        return [[part] for part in self.policy.plan(batch)]

    def _micro_batch(
        self, micro: Batch, step: int, counts: dict[str, int], statistics: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Metrics, Tensor]:
        o, d = self.options, self.distillation
        replaced = d.replaces_loss and not (o.kl_coefficient or o.entropy_coefficient)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not replaced):  # where nothing of it is trained on, it need not go back
            scores = self.policy.score(micro, entropy_grad=bool(o.entropy_coefficient))
        columns = self._columns(micro)
        inputs = {"logp": scores.logp_BT.detach(), **columns}
        if statistics is None and d.needs_statistics:  # the micro-batch is the whole batch
            statistics = d.prepare(inputs)
        out = policy_loss(
            d.method,
            logp=scores.logp_BT,
            **{**columns, "advantage": d.advantage(inputs, statistics)},
            num_tokens=counts["num_tokens"],
            num_sequences=counts["num_sequences"],
            statistics=statistics,
        )
        loss = out.loss
        mask = micro.mask_BT.float()
        tokens = max(counts["num_tokens"], 1)
        metrics = dict(out.metrics)
        if d.full is not None:
            kl = d.loss(self.policy, micro, inputs, statistics, counts)
            metrics["distill/full_kl_loss"] = Sum(kl.detach())
            loss = kl if d.replaces_loss else loss + kl
        if (taught := d.measured(inputs, statistics)) is not None:
            metrics |= teacher_metrics(taught, micro.mask_BT)
        if o.kl_coefficient:
            assert micro.logp_reference_BT is not None
            penalty = kl_penalty(scores.logp_BT, micro.logp_reference_BT, estimator=o.kl_estimator, logp_behavior=micro.logp_behavior_BT)
            loss = loss + o.kl_coefficient * (penalty * mask).sum() / tokens
            value = kl_estimate(scores.logp_BT.detach(), micro.logp_reference_BT, estimator="k3")
            metrics["policy/kl_reference"] = Mean((value * mask).sum(), mask.sum())
        if o.entropy_coefficient:
            loss = loss - o.entropy_coefficient * (scores.entropy_BT * mask).sum() / tokens
        if bool((fresh_BT := mismatch.age_zero(micro, step, within_BT=micro.mask_BT)).any()):
            metrics |= mismatch.mismatch_metrics(scores.logp_BT, micro.logp_behavior_BT, fresh_BT)
        metrics["policy/entropy"] = Mean((scores.entropy_BT.detach() * mask).sum(), mask.sum())
        metrics[position.NAME] = position.position_table(micro, out.seen, logp_BT=scores.logp_BT, entropy_BT=scores.entropy_BT, step=step,
                                                         taught=taught)  # fmt: skip
        return loss, metrics, out.weight

    def _columns(self, batch: Batch) -> dict[str, Any]:
        return {
            "logp_behavior": batch.logp_behavior_BT,
            "advantage": batch.advantage_BT,
            "mask": batch.mask_BT,
            "response_mask": batch.response_mask_BT,
            "logp_proximal": batch.logp_proximal_BT,
            "logp_teacher": batch.logp_teacher_BT,
            "logp_reference": batch.logp_reference_BT,
            "prefix_length": batch.prefix_length_B,
            "off_policy": batch.off_policy_B,
            "older": batch.older_BT,
        }

    def _statistics(self, batch: Batch) -> Mapping[str, Tensor]:
        """What rows that look at the whole optimizer batch need; a forward pass without gradient."""
        return self.distillation.prepare({"logp": score_all(self.policy, batch), **self._columns(batch)})

    def _step(self, step: int) -> float:
        parameters = self.policy.trainable_parameters()
        limit = self.options.grad_clip
        for p in parameters:
            if p.grad is None:  # no row had a gradient: zero, which moves Adam's moments, and not missing, which would not
                p.grad = torch.zeros_like(p)
        norm = float(whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(
                f"update {step + 1}", got=f"gradient norm {norm}", expected="a finite number",
                do="The weights are as before this update. Lower train.lr, or look at the samples recorded last.",
            )  # fmt: skip
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.tensor(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(step)
        self.optimizer.step()
        self.done = step + 1
        return norm


@torch.no_grad()
def score_all(policy: HFPolicy, batch: Batch) -> Tensor:
    """Log-probs of a whole batch in its row order, micro-batch by micro-batch, float32 [B, T]."""
    batch = batch.to(policy.device)
    if policy.together is not None:
        return policy.together(batch)
    logp_BT = torch.zeros_like(batch.logp_behavior_BT)
    for rows in policy.plan(batch):
        part = policy.score(batch.rows(rows)).logp_BT
        logp_BT[rows, : part.shape[1]] = part
    return logp_BT


def score_recorded(policy: HFPolicy, batch: Batch) -> tuple[Tensor, Batch]:
    """(`score_trained` under live routing, the batch with the experts that this pass chose): R2. Rows without a trained token are recorded too, in
    a pass of their own."""
    live_B = batch.mask_BT.any(1)
    logp_BT, routes = torch.zeros_like(batch.logp_behavior_BT), None
    for rows in (live_B.nonzero()[:, 0], (~live_B).nonzero()[:, 0]):
        if not len(rows):
            continue
        part = batch.rows(rows)
        scores, own = policy.record(part.to(policy.device))
        own = own.to(batch.token_BT.device)
        if routes is None:
            routes = own.new_full((*batch.token_BT.shape, *own.shape[2:]), NOT_RECORDED)
        routes[rows, : own.shape[1]] = own
        if bool(live_B[rows[0]]):
            logp_BT[rows, : own.shape[1]] = scores.logp_BT.to(logp_BT.device)
    return logp_BT, replace(batch, routes=routes)


def score_trained(policy: HFPolicy, batch: Batch) -> Tensor:
    """`score_all` of the rows with a trained token, 0 in the others: the very rows, in the very parts, that a teacher is asked for."""
    live = batch.mask_BT.any(1).nonzero()[:, 0]
    if len(live) == len(batch):
        return score_all(policy, batch)
    logp_BT = torch.zeros_like(batch.logp_behavior_BT)
    if len(live):
        part = score_all(policy, batch.rows(live)).to(logp_BT.device)
        logp_BT[live, : part.shape[1]] = part
    return logp_BT
