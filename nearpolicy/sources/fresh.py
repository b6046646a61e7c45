"""The plain source: the current policy writes every token."""

from collections.abc import Mapping, Sequence
from typing import Any

from nearpolicy.metrics import Metrics
from nearpolicy.protocols import Request, Sampler, SamplingParams, Upcoming
from nearpolicy.rollout import Prompt, Rollout


class FreshSource:
    """Implements `RolloutSource` by sampling whole responses."""

    def __init__(self, sampler: Sampler, params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.tokens_decoded = 0

    def begin(self, version: int, upcoming: Upcoming) -> None:
        """Nothing is written ahead."""

    def write(self, tickets: Sequence[tuple[int, Prompt, int]], n: int) -> list[list[Rollout]]:
        """n rollouts for each (ticket, prompt, attempt), grouped."""
        requests = [Request(ticket=ticket, prompt=prompt, attempt=attempt) for ticket, prompt, attempt in tickets]
        flat = self.sampler.sample(requests, n, self.params)
        self.tokens_decoded += sum(r.num_sampled for r in flat)
        return [flat[i * n : (i + 1) * n] for i in range(len(requests))]

    def metrics(self) -> Metrics:
        """The schedule measures all there is."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing is carried over."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
