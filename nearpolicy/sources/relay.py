"""Thinking Seeds: an earlier policy begins a response, the current one finishes it (arXiv 2601.21476).

A cycle is T rollout batches. At its start the current policy becomes the behaviour policy: it writes batch 1, which is used as it is, and whole
responses for the groups of batches 2 to T, which go into the seed bank. For those batches each stored response is cut, its prefix keeps its tokens,
log-probs and version, and the policy of the moment writes the rest, up to the response limit.

Seeds lie under the tickets that their groups will have, so prompts come in the same order as without a relay: with nothing kept, a run is the plain
one bit for bit. Randomness: batch 1 and all suffixes draw from the stream `rollout`, seeds from `bank`, cuts from keys of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nearpolicy.metrics import Mean, Metrics, Sum
from nearpolicy.protocols import Order, Request, Sampler, SamplingParams, Tickets, Upcoming
from nearpolicy.randomness import Stream, generator
from nearpolicy.rollout import Prefix, Prompt, Rollout, Source
from nearpolicy.sources.bank import SUFFIX, Header, SeedBank, cut_short
from nearpolicy.sources.cuts import Cut, tokens_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """The shape of a cycle."""

    refresh: int
    """Rollout batches in a cycle (T >= 1)."""
    relayed: int
    """Members of each group that go on from a prefix, the first ones."""
    shared: bool
    """All of them from the first stored response of the group, cut once."""
    groups: int
    """Groups stored for batches 2 to T, a reserve included."""
    chunk: int
    """Groups written at a time: bounds memory; the draws do not depend on it."""
    entropy: bool
    """Whether the cut reads entropies."""


@dataclass(slots=True)
class _Counts:
    """Over the responses written since the last look."""

    responses: int = 0
    relayed: int = 0
    uncut: int = 0
    finished: int = 0
    prefix_tokens: int = 0
    tokens: int = 0
    decoded: int = 0
    without_seed: int = 0
    stored: Metrics = field(default_factory=dict)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        relayed = [r for r in rollouts if r.source is Source.RELAY]
        self.responses += len(rollouts)
        self.relayed += len(relayed)
        self.uncut += sum(r.prefix_length == 0 for r in relayed)
        self.finished += sum(r.num_sampled == 0 for r in relayed)
        self.prefix_tokens += sum(r.prefix_length for r in rollouts)
        self.tokens += sum(len(r.response_T) for r in rollouts)
        self.decoded += sum(r.num_sampled for r in rollouts)

    def metrics(self) -> Metrics:
        return {
            "relay/relayed_frac": Mean(self.relayed, self.responses),
            "relay/prefix_frac": Mean(self.prefix_tokens, self.tokens),
            "relay/zero_cut_frac": Mean(self.uncut, self.relayed),
            "relay/finished_in_prefix_frac": Mean(self.finished, self.relayed),
            "relay/tokens_kept": Sum(self.prefix_tokens),
            "relay/tokens_decoded": Sum(self.decoded),
            "relay/groups_without_seed": Sum(self.without_seed),
            **self.stored,
        }


class RelaySource:
    """Implements `RolloutSource`.

    Args:
        params: of batch 1 and of suffixes; `max_tokens` limits the whole response.
        cut: where stored responses are cut.
        folder: where the seed bank lies; only one bank is there at a time.
        run: fingerprint of the run, written into its banks.
    """

    def __init__(self, sampler: Sampler, params: SamplingParams, cut: Cut, *, options: RelayOptions, folder: Path, run: str) -> None:
        self.sampler, self.params, self.cut = sampler, params, cut
        self.options, self.folder, self.run = options, folder, run
        self.tokens_decoded = 0
        self.bank: SeedBank | None = None
        self._place = 0  # of the rollout batch at hand in its cycle, 1 to T; 0 before the first
        self._counts = _Counts()

    def begin(self, version: int, upcoming: Upcoming) -> None:
        """The next rollout batch of the cycle; the first one of a cycle stores the seeds of the others.

        Raises:
            CheckpointError: the bank cannot be written.
        """
        self._place = self._place % self.options.refresh + 1
        if self._place == 1:
            self.bank = None
            for old in self.folder.glob(f"seeds-*{SUFFIX}"):
                old.unlink(missing_ok=True)
            if self.options.refresh > 1 and self.options.relayed:
                self._store(version, upcoming)

    def order(self, tickets: Tickets, n: int) -> Order:
        """Responses that go on from their prefixes; groups without a stored seed are written fresh and counted.

        Raises:
            EngineError: a cut that raised or lies outside its response.
        """
        requests = [
            Request(ticket=ticket, prompt=prompt, attempt=attempt, prefixes=self._prefixes(ticket, prompt, attempt, n))
            for ticket, prompt, attempt in tickets
        ]
        return Order(requests, n, self.params)

    def deliver(self, tickets: Tickets, n: int, flat: Sequence[Rollout]) -> list[list[Rollout]]:
        """Grouped and counted."""
        self._counts.add(flat)
        self.tokens_decoded += sum(r.num_sampled for r in flat)
        return [list(flat[i * n : (i + 1) * n]) for i in range(len(tickets))]

    def write(self, tickets: Tickets, n: int) -> list[list[Rollout]]:
        """n rollouts for each ticket, grouped.

        Raises:
            EngineError: as `order`.
        """
        return self.deliver(tickets, n, self.sampler.sample(*self.order(tickets, n)))

    def metrics(self) -> Metrics:
        """Shares of relayed, uncut and finished responses, tokens kept and decoded, and what a new bank took."""
        out, self._counts = self._counts.metrics(), _Counts()
        return out

    def state_dict(self) -> dict[str, Any]:
        """Place in the cycle, and the bank while batches of its cycle are still to come."""
        bank = self.bank if self._place < self.options.refresh else None
        if bank is None:
            return {"place": self._place}
        return {"place": self._place, "files": [bank.path.name], "digest": bank.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a cycle.

        Raises:
            CheckpointError: the bank is missing, truncated, damaged or of another run.
        """
        self._place = int(state["place"])
        names = state.get("files", [])
        self.bank = SeedBank(self.folder / names[0], run=self.run, digest=state["digest"]) if names else None

    def _store(self, version: int, upcoming: Upcoming) -> None:
        o, before = self.options, self.tokens_decoded
        entropy = o.entropy or self.params.entropy
        # Whoever goes on from a seed records its experts again, under the weights of the suffix.
        params = replace(self.params, stream=Stream.BANK, entropy=entropy, routes=False)
        seeds = 1 if o.shared else o.relayed

        def chunks() -> Iterator[list[Rollout]]:
            for first in range(0, o.groups, o.chunk):
                groups = [upcoming(k) for k in range(first, min(first + o.chunk, o.groups))]
                written = self.sampler.sample([Request(ticket=ticket, prompt=prompt) for ticket, prompt in groups], seeds, params)
                self.tokens_decoded += sum(r.num_sampled for r in written)
                yield written

        header = Header(run=self.run, version=version, first_ticket=upcoming(0)[0], groups=o.groups, seeds=seeds)
        self.bank = SeedBank.write(self.folder, header, chunks(), entropy=entropy)
        self._counts.stored = {
            "relay/bank_tokens": Sum(self.tokens_decoded - before),
            "relay/bank_bytes": Sum(self.bank.num_bytes),
        }

    def _prefixes(self, ticket: int, prompt: Prompt, attempt: int, n: int) -> list[Prefix | None] | None:
        """One prefix for each relayed member, None for the others."""
        o = self.options
        if self._place == 1 or not o.relayed:
            return None
        if self.bank is None or ticket not in self.bank:
            self._counts.without_seed += 1
            return None
        kept = [self._cut(seed, ticket, prompt, sample, attempt) for sample, seed in enumerate(self.bank.group(ticket))]
        if o.shared:
            kept = kept * o.relayed
        return [*kept, *[None] * (n - len(kept))]

    def _cut(self, seed: Prefix, ticket: int, prompt: Prompt, sample: int, attempt: int) -> Prefix:
        rng = generator(self.params.seed, "cut", ticket, sample, attempt)
        owner = f"prompt {prompt.id!r}, sample {sample}"
        return cut_short(seed, tokens_kept(self.cut, len(seed.token_T), seed.entropy_T, rng, owner=owner))
