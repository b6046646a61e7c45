"""A distillation signal beside a reward: any method that trains on rewards, with a teacher in its advantage.

    add      A_t = A_reward + coefficient * w_t * A_signal,t        w_t the row's own weight (1 for opd and exopd)
    weigh    A_t = w_t * A_reward                                   IW-OPD's weight, or a profile of opd, on the reward's advantage

The method's kernel, correction and aggregation then act as on any advantage per token; phi takes the sign of the mixed advantage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nearpolicy.errors import UsageError
from nearpolicy.methods import Method
from nearpolicy.objective import loss
from nearpolicy.objective.distill import Signal
from nearpolicy.objective.loss import Statistics

Inputs = Mapping[str, Any]
"""The tensors of `policy_loss` by name: logp, logp_behavior, mask, ..."""


@torch.no_grad()
def signal_of(row: Method, inputs: Inputs, statistics: Statistics | None = None) -> Signal:
    """The distillation signal of a row on a micro-batch: advantage and weight of each response token, [B, T]; 0 outside the response.

    Args:
        statistics: `row.prepare` of the whole optimizer batch, for rows that need it.
    """
    return loss.signal(row.parts, loss.columns(**{**inputs, "advantage": None}), statistics or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a teacher adds to a reward's advantage.

    Raises:
        UsageError: a row without a signal, or `weigh` with a row that weighs nothing.
    """

    row: Method
    """A distillation row."""
    coefficient: float = 1.0
    use: str = "add"

    def __post_init__(self) -> None:
        if self.row.parts.signal is None:
            raise UsageError("distill.name", got=self.row.name, expected="a distillation row", do="Take opd, iw_opd, exopd or iw_exopd.")
        if self.use == "weigh" and not has_weight(self.row):
            raise UsageError("distill.use", got=f"'weigh' with {self.row.name}", expected="a row with a weight for each token",
                             do="Take distill.name=iw_opd, or opd with a profile.")  # fmt: skip

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns that the trainer must provide."""
        return self.row.needs

    def at(self, progress: float) -> "Mixture":
        """The mixture at this share of training (curricula)."""
        row = self.row.at(progress)
        return self if row is self.row else replace(self, row=row)

    def advantage(self, inputs: Inputs, statistics: Statistics | None = None) -> Tensor:
        """The mixed advantage, [B, T], detached; outside the response the reward's own."""
        reward_BT: Tensor = inputs["advantage"]
        made = signal_of(self.row, inputs, statistics)
        if self.use == "weigh":
            assert made.weight_BT is not None, "checked at construction"
            return torch.where(inputs["response_mask"], reward_BT * made.weight_BT, reward_BT)
        term = made.advantage_BT if made.weight_BT is None else made.advantage_BT * made.weight_BT
        return reward_BT + self.coefficient * term


def has_weight(row: Method) -> bool:
    """True where the row weighs tokens apart from their advantage."""
    o = row.options
    return o.get("profile") is not None or row.name == "iw_opd" or o.get("form") == "scale"
