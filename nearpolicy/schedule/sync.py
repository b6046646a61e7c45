"""Sample a batch, reuse it for N sequential updates, sample again. Staleness is chosen: update i of a batch is i - 1 updates old."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearpolicy.errors import DataError
from nearpolicy.metrics import Metrics, Sum
from nearpolicy.protocols import RolloutSource, ScoreItem, Verifier
from nearpolicy.records import unpack
from nearpolicy.rollout import Batch, Prompt, Scored
from nearpolicy.schedule.batches import BatchOptions, Teach, ages, drawn_metrics, has_signal, oldest_version, to_batch, without_signal
from nearpolicy.schedule.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions(BatchOptions):
    """How a rollout batch is drawn, turned into advantages and split."""

    updates_per_rollout: int


@dataclass(slots=True)
class _Draw:
    """What was measured while a rollout batch was drawn."""

    scored: list[Scored] = field(default_factory=list)
    rejected: int = 0
    redraws: int = 0
    sample_s: float = 0.0
    score_s: float = 0.0


class SyncSchedule:
    """Implements `Schedule`.

    Args:
        source: writes the responses.
        verifier: scores them.
        prompt_at: prompt cursor -> Prompt, the same for the same cursor.
        publish: called with the version before responses are written: the sampler must hold those weights when it returns.
        annotate: adds the columns a method needs (proximal, reference log-probs), given the whole rollout batch and the policy that
            sampled it.
        teach: the teacher's log-probs of each response token; asked once for each rollout batch, for the responses that are trained on.
    """

    def __init__(
        self,
        options: SyncOptions,
        *,
        source: RolloutSource,
        verifier: Verifier,
        prompt_at: Callable[[int], Prompt],
        publish: Callable[[int], None],
        annotate: Callable[[Batch], Batch],
        teach: Teach | None = None,
    ) -> None:
        self.options, self.source, self.verifier = options, source, verifier
        self.prompt_at, self.publish, self.annotate, self.teach = prompt_at, publish, annotate, teach
        self.ledger = Ledger()
        self.cursor = 0
        self.tokens_sampled = 0
        self.last_scored: Sequence[Scored] = []
        self._waiting: dict[int, list[Scored]] = {}
        self._batch: Batch | None = None
        self._slices: list[list[int]] = []
        self._metrics: Metrics = {}

    def next(self, version: int) -> Batch:
        """The next mini-batch; draws a new rollout batch when the last one is used up."""
        if not self._slices:
            self._collect(version)
        assert self._batch is not None
        batch = self._batch.rows(self._slices.pop(0))
        self._metrics |= ages(batch, version)
        return batch

    def metrics(self) -> Metrics:
        """What was measured since the last call."""
        out, self._metrics = self._metrics, {}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Ledger, cursor, the half-used batch and surplus groups; cheap, since batches and scored rollouts never change."""
        return {
            "ledger": self.ledger.state_dict(),
            "cursor": self.cursor,
            "tokens_sampled": self.tokens_sampled,
            "waiting": [[t, g] for t, g in self._waiting.items()],
            "batch": self._batch if self._slices else None,
            "slices": list(self._slices),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a stale batch: from `state_dict`, or from what `records.pack` made of it."""
        self.ledger.load_state_dict(state["ledger"])
        self.cursor, self.tokens_sampled = int(state["cursor"]), int(state["tokens_sampled"])
        self._waiting = {int(t): [s if isinstance(s, Scored) else unpack(Scored, s) for s in g] for t, g in state["waiting"]}
        batch = state["batch"]
        self._batch = batch if batch is None or isinstance(batch, Batch) else unpack(Batch, batch)
        self._slices = [list(s) for s in state["slices"]]
        self.source.load_state_dict(state["source"])

    def close(self) -> None:
        """Nothing to end."""

    def _collect(self, version: int) -> None:
        self.publish(version)
        draw = _Draw()
        self._begin(version, draw)
        self._draw(version, draw)
        tickets = self.ledger.take(self.options.prompts, version)
        scored = [s for t in tickets for s in self._waiting.pop(t)]
        batch, metrics = to_batch(self.options, scored, self.teach)
        start = time.perf_counter()
        self._batch = self.annotate(batch).recomputed_at(version)
        self._slices = split_rows(len(batch), self.options.updates_per_rollout)
        self.last_scored = scored
        self._metrics = {
            **drawn_metrics(self.options, draw.scored),
            **self.source.metrics(),
            **metrics,
            "data/groups_rejected": Sum(draw.rejected),
            "data/redraws": Sum(draw.redraws),
            "data/tokens_sampled": Sum(self.tokens_sampled),
            "time/sample_s": Sum(draw.sample_s),
            "time/score_s": Sum(draw.score_s),
            "time/logprob_s": Sum(time.perf_counter() - start),
        }

    def _begin(self, version: int, draw: _Draw) -> None:
        """Tell the source of the new rollout batch; what it writes ahead is for the groups after those that are missing now."""
        start, decoded = time.perf_counter(), self.source.tokens_decoded
        needed = max(self.options.prompts - len(self.ledger.ready()) - len(self.ledger.open()), 0)
        ticket, cursor = self.ledger.next_ticket + needed, self.cursor + needed
        self.source.begin(version, lambda k: (ticket + k, self.prompt_at(cursor + k)))
        self.tokens_sampled += self.source.tokens_decoded - decoded
        draw.sample_s += time.perf_counter() - start

    def _draw(self, version: int, draw: _Draw) -> None:
        """Fill the ledger with P ready groups."""
        o = self.options
        while (missing := o.prompts - len(self.ledger.ready())) > 0:
            if draw.redraws > o.max_redraws:
                raise without_signal(o.prompts - missing, o, draw.rejected, f"{o.max_redraws} redraws")
            kept = len(draw.scored) // o.group_size - draw.rejected
            drawn = kept + draw.rejected
            wanted = missing if not drawn else math.ceil(missing * drawn / max(kept, 1))
            self._write(min(max(wanted, missing), o.prompts) - len(self.ledger.open()), draw)
            draw.redraws += 1
        draw.redraws = max(draw.redraws - 1, 0)

    def _write(self, count: int, draw: _Draw) -> None:
        """Admit prompts, write and score their groups, finish or reject them."""
        for _ in range(count):
            self.ledger.admit(self.cursor)
            self.cursor += 1
        tickets = self.ledger.claim()
        entries = [self.ledger.entries[t] for t in tickets]
        prompts = [self.prompt_at(e.prompt) for e in entries]
        start, decoded = time.perf_counter(), self.source.tokens_decoded
        groups = self.source.write([(t, p, e.attempt) for t, p, e in zip(tickets, prompts, entries, strict=True)], self.options.group_size)
        middle = time.perf_counter()
        items = [ScoreItem.of(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
        scores = iter(self.verifier.score(items))
        draw.sample_s += middle - start
        draw.score_s += time.perf_counter() - middle
        self.tokens_sampled += self.source.tokens_decoded - decoded
        for ticket, group in zip(tickets, groups, strict=True):
            scored = [Scored(rollout=r, score=next(scores)) for r in group]
            draw.scored += scored
            self.ledger.finish(ticket, oldest_version(group))
            if self.options.dynamic_sampling and not has_signal(scored):
                self.ledger.reject(ticket, "no_signal")
                draw.rejected += 1
            else:
                self._waiting[ticket] = scored


def split_rows(num_rows: int, parts: int) -> list[list[int]]:
    """Equal consecutive slices of rows in group order: groups stay whole wherever the slice is a multiple of the group.

    Raises:
        DataError: `parts` does not divide `num_rows`.
    """
    if num_rows % parts:
        raise DataError("schedule.updates_per_rollout", got=f"{parts} for {num_rows} responses", expected="a divisor of the rollout batch",
                        do="Change rollout.prompts, rollout.group_size or updates_per_rollout.")  # fmt: skip
    size = num_rows // parts
    return [list(range(i * size, (i + 1) * size)) for i in range(parts)]
