"""The plain source: the current policy writes every token."""

from collections.abc import Mapping, Sequence
from typing import Any

from nearpolicy.metrics import Metrics
from nearpolicy.protocols import Order, Request, Sampler, SamplingParams, Tickets, Upcoming
from nearpolicy.rollout import Rollout


class FreshSource:
    """Implements `RolloutSource` by sampling whole responses."""

    def __init__(self, sampler: Sampler, params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.tokens_decoded = 0

    def begin(self, version: int, upcoming: Upcoming) -> None:
        """Nothing is written ahead."""

    def order(self, tickets: Tickets, n: int) -> Order:
        """Whole responses."""
        return Order([Request(ticket=ticket, prompt=prompt, attempt=attempt) for ticket, prompt, attempt in tickets], n, self.params)

    def deliver(self, tickets: Tickets, n: int, flat: Sequence[Rollout]) -> list[list[Rollout]]:
        """Grouped and counted."""
        self.tokens_decoded += sum(r.num_sampled for r in flat)
        return [list(flat[i * n : (i + 1) * n]) for i in range(len(tickets))]

    def write(self, tickets: Tickets, n: int) -> list[list[Rollout]]:
        """n rollouts for each ticket, grouped."""
        return self.deliver(tickets, n, self.sampler.sample(*self.order(tickets, n)))

    def metrics(self) -> Metrics:
        """The schedule measures all there is."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing is carried over."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
