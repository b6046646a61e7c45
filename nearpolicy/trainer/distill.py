"""The teacher's part of an update: what it does to the advantage, its exact reverse KL as a loss, and what is measured of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearpolicy.diagnostics.position import Taught
from nearpolicy.methods import Method
from nearpolicy.metrics import Mean, Metrics
from nearpolicy.mixture import Mixture, signal_of
from nearpolicy.objective.aggregate import token_weights
from nearpolicy.objective.loss import Statistics
from nearpolicy.objective.stats import kl_estimate
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.rollout import Batch

FullSignal = Callable[[HFPolicy, Batch], Tensor]
"""Exact reverse KL to the teacher at each response token, with gradient to the policy, [B, T]; 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """How a method and a teacher meet. Without a mixture a distillation row makes its own advantage, and any other row takes the reward's."""

    method: Method
    mixture: Mixture | None = None
    full: FullSignal | None = None
    """In place of the sampled token's signal."""

    @property
    def row(self) -> Method | None:
        """The row whose signal is trained on; None where the teacher is only measured, or there is none."""
        if self.mixture is not None:
            return self.mixture.row
        return None if self.method.needs_advantage else self.method

    @property
    def needs_statistics(self) -> bool:
        """True when micro-batches need `prepare` of the whole optimizer batch."""
        return self.method.needs_statistics or (self.mixture is not None and self.mixture.row.needs_statistics)

    @property
    def silent(self) -> bool:
        """True when a row without an advantage has no gradient."""
        return self.method.needs_advantage and (self.mixture is None or self.mixture.use == "weigh")

    @property
    def replaces_loss(self) -> bool:
        """True when the reverse KL is the whole loss."""
        return self.full is not None and self.mixture is None

    def at(self, progress: float) -> "Distillation":
        """At this share of training (curricula)."""
        method, mixture = self.method.at(progress), self.mixture.at(progress) if self.mixture is not None else None
        return self if method is self.method and mixture is self.mixture else Distillation(method, mixture, self.full)

    def prepare(self, inputs: Mapping[str, Any]) -> Statistics:
        """Statistics of the whole optimizer batch, for the method and for the mixture's row.

        Args:
            inputs: tensors of `policy_loss` by name; `advantage` is the reward's.
        """
        own = self.mixture.row.prepare(inputs) if self.mixture is not None else {}
        return {**own, **self.method.prepare({**inputs, "advantage": self.advantage(inputs, own)})}

    def advantage(self, inputs: Mapping[str, Any], statistics: Statistics | None) -> Tensor | None:
        """What the method is given as advantage, [B, T]; None for a distillation row."""
        reward_BT: Tensor = inputs["advantage"]
        if self.mixture is None:
            return reward_BT if self.method.needs_advantage else None
        return reward_BT if self.full is not None else self.mixture.advantage(inputs, statistics)

    def loss(self, policy: HFPolicy, batch: Batch, inputs: Mapping[str, Any], statistics: Statistics | None, counts: Mapping[str, int]) -> Tensor:
        """sum_t aggregate_t * w_t * KL_t over trained tokens, times the mixture's coefficient; no ratio: the expectation over the token is exact."""
        assert self.full is not None and self.row is not None, "only with a full signal, which has a row"  # noqa: PT018
        o = self.method.options
        weight_BT = token_weights(
            batch.mask_BT, aggregate=o["aggregate"], dtype=torch.float32, max_length=o["max_length"], num_tokens=counts["num_tokens"],
            num_sequences=counts["num_sequences"],
        )  # fmt: skip
        own_BT = signal_of(self.row, inputs, statistics).weight_BT
        weight_BT = weight_BT if own_BT is None else weight_BT * own_BT
        value = (weight_BT * self.full(policy, batch)).masked_fill(~batch.mask_BT, 0.0).sum()
        return value if self.mixture is None else self.mixture.coefficient * value

    def measured(self, inputs: Mapping[str, Any], statistics: Statistics | None) -> Taught | None:
        """What the diagnostics read; None without a teacher."""
        teacher_BT = inputs["logp_teacher"]
        if teacher_BT is None:
            return None
        row = self.row
        student = inputs["logp_proximal"] if inputs["logp_proximal"] is not None else inputs["logp_behavior"]
        if row is not None and row.options["student"] != "proximal":
            student = inputs["logp"] if row.options["student"] == "current" else inputs["logp_behavior"]
        weight = None if row is None else signal_of(row, inputs, statistics).weight_BT
        return Taught(teacher_BT, student, weight)


def teacher_metrics(taught: Taught, mask_BT: Tensor) -> Metrics:
    """Token KL from the student to the teacher and the row's weight, over trained tokens."""
    tokens = mask_BT.sum()

    def mean(value_BT: Tensor) -> Mean:
        return Mean(value_BT.masked_fill(~mask_BT, 0.0).sum(), tokens)

    k1_BT = kl_estimate(taught.student_BT, taught.teacher_BT, estimator="k1")
    out: Metrics = {
        "distill/kl": mean(k1_BT),
        "distill/kl_k3": mean(kl_estimate(taught.student_BT, taught.teacher_BT, estimator="k3")),
        "distill/abs_gap": mean(k1_BT.abs()),
    }
    if taught.weight_BT is not None:
        out["distill/weight_mean"] = mean(taught.weight_BT)
    return out
