"""Responses in flight: sampling that can stop between two decode steps, take new weights and go on.

An unfinished response goes on as a request with a prefix, as a relayed one does: its tokens are re-prefilled under the weights of the moment, and
keep the log-probs and versions they were sampled with. Noise belongs to positions, so that an interruption without new weights changes no token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nearpolicy.protocols import Request, Sampler, SamplingParams
from nearpolicy.rollout import Prefix, Rollout, Source, StopReason

Interrupt = Callable[[], bool]
"""Asked between two decode steps: True ends the call."""

Refresh = Callable[[], object]
"""Called between two decode steps: may load other weights into the sampler."""


class InterruptibleSampler(Sampler, Protocol):
    """A sampler that can stop between two decode steps."""

    def sample(
        self, requests: Sequence[Request], n: int, params: SamplingParams, *, interrupt: Interrupt | None = None, refresh: Refresh | None = None
    ) -> list[Rollout]:  # fmt: skip
        """As `Sampler.sample`; once `interrupt` says True, responses that have not ended come back as they are, with `StopReason.ABORTED`;
        `refresh` may `load` other weights, under which they go on upon the old cache."""
        ...


@dataclass(slots=True)
class _Group:
    """One request and what has been written of it."""

    request: Request
    n: int
    params: SamplingParams
    parts: list[Rollout] | None = None

    def again(self) -> Request:
        """The request that goes on from what is there."""
        if self.parts is None:
            return self.request
        first = self.request.prefixes or [None] * self.n
        return replace(self.request, prefixes=[_kept(part, prefix) for part, prefix in zip(self.parts, first, strict=True)])

    def restored(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """What was written for this request: only its own prefixes count as such."""
        first = self.request.prefixes or [None] * self.n
        reused = [part.reused_cache for part in self.parts] if self.parts is not None else [False] * self.n
        return [_restored(rollout, prefix, before) for rollout, prefix, before in zip(rollouts, first, reused, strict=True)]


class Flight:
    """Groups being written on one sampler, in any number of `run`s."""

    def __init__(self, sampler: InterruptibleSampler) -> None:
        self.sampler = sampler
        self._groups: dict[int, _Group] = {}

    def add(self, requests: Sequence[Request], n: int, params: SamplingParams) -> None:
        """Have n responses to each request written by the next `run`s; a ticket is in flight once.

        Raises:
            ValueError: a ticket that is in flight.
        """
        for request in requests:
            if request.ticket in self._groups:
                raise ValueError(f"flight: ticket {request.ticket} is being written")
            self._groups[request.ticket] = _Group(request, n, params)

    @property
    def tickets(self) -> list[int]:
        """Groups that are not complete, in the order they came."""
        return list(self._groups)

    def drop(self) -> list[int]:
        """Forget everything in flight; returns its tickets."""
        tickets = self.tickets
        self._groups.clear()
        return tickets

    def run(self, interrupt: Interrupt | None = None, refresh: Refresh | None = None) -> list[tuple[int, list[Rollout]]]:
        """Write until everything is complete, or `interrupt` says True: (ticket, n rollouts) of the groups that became complete, in the order
        they came. Groups that ask for the same are decoded together. The sampler may `load` other weights before the next `run`, or in `refresh`:
        then responses in flight go on upon the old cache."""
        kinds: list[tuple[int, SamplingParams]] = []
        for group in self._groups.values():
            if (kind := (group.n, group.params)) not in kinds:
                kinds.append(kind)
        done: list[tuple[int, list[Rollout]]] = []
        for n, params in kinds:
            groups = [g for g in self._groups.values() if (g.n, g.params) == (n, params)]
            flat = self._sample([g.again() for g in groups], n, params, interrupt, refresh)
            for i, group in enumerate(groups):
                parts = group.restored(flat[i * n : (i + 1) * n])
                if any(part.stop is StopReason.ABORTED for part in parts):
                    group.parts = parts
                else:
                    del self._groups[group.request.ticket]
                    done.append((group.request.ticket, parts))
        return done

    def _sample(
        self, requests: Sequence[Request], n: int, params: SamplingParams, interrupt: Interrupt | None, refresh: Refresh | None
    ) -> list[Rollout]:  # fmt: skip
        """Asks for what is needed alone: samplers that cannot stop, or not change in passing, serve the rest."""
        if refresh is not None:
            return self.sampler.sample(requests, n, params, interrupt=interrupt, refresh=refresh)
        if interrupt is not None:
            return self.sampler.sample(requests, n, params, interrupt=interrupt)
        return self.sampler.sample(requests, n, params)


def _kept(part: Rollout, prefix: Prefix | None) -> Prefix | None:
    """What the next request goes on from; the request's own prefix where nothing was added to it."""
    aborted = part.stop is StopReason.ABORTED
    if aborted and part.num_sampled == 0:
        return prefix
    assert part.logp_behavior_T is not None, "sampled, not shown"
    return Prefix(
        token_T=part.response_T, logp_behavior_T=part.logp_behavior_T, version_T=part.version_T, entropy_T=part.entropy_T,
        stop=None if aborted else part.stop,
    )  # fmt: skip


def _restored(rollout: Rollout, prefix: Prefix | None, reused: bool) -> Rollout:
    length, source = (0, Source.FRESH) if prefix is None else (len(prefix.token_T), Source.RELAY)
    reused = reused or rollout.reused_cache
    if (rollout.prefix_length, rollout.source, rollout.reused_cache) == (length, source, reused):
        return rollout
    return replace(rollout, prefix_length=length, source=source, reused_cache=reused)
