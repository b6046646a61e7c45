"""Sample a batch, reuse it for N sequential updates, sample again. Staleness is chosen: update i of a batch is i - 1 updates old."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nearpolicy.diagnostics.rollouts import rollout_metrics
from nearpolicy.errors import DataError, EngineError
from nearpolicy.metrics import Max, Mean, Metrics, Sum
from nearpolicy.objective.advantages import group_advantages, overlong_penalty
from nearpolicy.objective.position import relayed
from nearpolicy.protocols import RolloutSource, ScoreItem, Verifier
from nearpolicy.records import unpack
from nearpolicy.rollout import Array, Batch, Prompt, Rollout, Scored, collate
from nearpolicy.schedule.ledger import Ledger, age


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """How a rollout batch is drawn, turned into advantages and split."""

    prompts: int
    group_size: int
    updates_per_rollout: int
    baseline: str
    normalize_std: bool
    dynamic_sampling: bool
    max_redraws: int
    max_tokens: int
    overlong_buffer: int | None
    mask_truncated: bool
    needs_reward: bool = True
    """False: every response is trained on, scored or not, and advantages are 0 (the method makes its own)."""
    mask_prefix: bool = False
    """Leave the tokens of a relayed prefix out of the loss."""


@dataclass(slots=True)
class _Draw:
    """What was measured while a rollout batch was drawn."""

    scored: list[Scored] = field(default_factory=list)
    rejected: int = 0
    redraws: int = 0
    sample_s: float = 0.0
    teacher_s: float = 0.0
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
        teach: Callable[[Sequence[Rollout]], list[Array]] | None = None,
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
        self._metrics |= _ages(batch, version)
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

    def _collect(self, version: int) -> None:
        self.publish(version)
        draw = _Draw()
        self._begin(version, draw)
        self._draw(version, draw)
        tickets = self.ledger.take(self.options.prompts, version)
        scored = [s for t in tickets for s in self._waiting.pop(t)]
        batch, metrics = self._to_batch(scored, draw)
        start = time.perf_counter()
        self._batch = self.annotate(batch)
        self._slices = split_rows(len(batch), self.options.updates_per_rollout)
        self.last_scored = scored
        self._metrics = {
            **rollout_metrics(draw.scored),
            **self.source.metrics(),
            **metrics,
            "data/groups_rejected": Sum(draw.rejected),
            "data/redraws": Sum(draw.redraws),
            "data/tokens_sampled": Sum(self.tokens_sampled),
            "time/sample_s": Sum(draw.sample_s),
            "time/score_s": Sum(draw.score_s),
            "time/logprob_s": Sum(time.perf_counter() - start),
        }
        if self.teach is not None:
            self._metrics["time/teacher_s"] = Sum(draw.teacher_s)
        if not self.options.needs_reward and all(math.isnan(s.score.reward) for s in draw.scored):
            self._metrics = {name: value for name, value in self._metrics.items() if not name.startswith("reward/")}

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
                raise DataError(
                    "rollout.dynamic_sampling", got=f"{o.prompts - missing} groups with a signal after {o.max_redraws} redraws "
                    f"({draw.rejected} of {draw.rejected + o.prompts - missing} groups had equal rewards)", expected=f"{o.prompts} groups",
                    do="Take prompts that are neither always right nor always wrong, raise rollout.max_redraws, or switch dynamic sampling off.",
                )  # fmt: skip
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
            versions = [v for r in group if (v := r.oldest_version) is not None]
            self.ledger.finish(ticket, min(versions, default=None))
            rewards = [s.score.reward for s in scored if not math.isnan(s.score.reward)]
            if self.options.dynamic_sampling and (not rewards or max(rewards) - min(rewards) <= 0):
                self.ledger.reject(ticket, "no_signal")
                draw.rejected += 1
            else:
                self._waiting[ticket] = scored

    def _to_batch(self, scored: list[Scored], draw: _Draw) -> tuple[Batch, Metrics]:
        o = self.options
        advantage_B, metrics = self._advantages(scored) if o.needs_reward else ([0.0] * len(scored), {})
        train = [not (o.needs_reward and math.isnan(s.score.reward)) and not (o.mask_truncated and s.rollout.truncated) for s in scored]
        batch = collate(scored, advantage_B=advantage_B, train_B=train)
        if o.mask_prefix:
            batch = replace(batch, mask_BT=batch.mask_BT & ~relayed(batch.response_mask_BT, batch.prefix_length_B))
        if self.teach is not None:
            start = time.perf_counter()
            batch = _taught(batch, scored, self.teach)
            draw.teacher_s += time.perf_counter() - start
        return batch, metrics

    def _advantages(self, scored: Sequence[Scored]) -> tuple[Sequence[float] | torch.Tensor, Metrics]:
        o = self.options
        reward = torch.tensor([s.score.reward for s in scored], dtype=torch.float32)
        if bool(reward.isnan().all()):
            why = next((s.score.message for s in scored if s.score.message), "no message")
            raise EngineError(
                "reward", got=f"no score for any of {len(scored)} responses ({why})", expected="numbers", do="Mend the reward function."
            )
        if o.overlong_buffer is not None:
            length = torch.tensor([len(s.rollout.response_T) for s in scored])
            reward = (reward + overlong_penalty(length, max_length=o.max_tokens, buffer=o.overlong_buffer)).float()
        group = torch.tensor([s.rollout.group for s in scored])
        baseline = None if o.baseline == "none" else o.baseline
        adv = group_advantages(reward, group, baseline=baseline, normalize_std=o.normalize_std)
        return adv.advantage_B, {
            "reward/no_signal_frac": Mean(float(adv.no_signal_groups), float(adv.num_groups)),
            "reward/floored_std": Sum(float(adv.floored_groups)),
        }


def _taught(batch: Batch, scored: Sequence[Scored], teach: Callable[[Sequence[Rollout]], list[Array]]) -> Batch:
    """The teacher's column on rows with a trained token; zeros, which nothing reads, on the others."""
    live_B = batch.mask_BT.any(1)
    found = teach([s.rollout for s, live in zip(scored, live_B.tolist(), strict=True) if live])
    column_BT = torch.zeros_like(batch.logp_behavior_BT)
    if found:
        column_BT[batch.response_mask_BT & live_B[:, None]] = torch.from_numpy(np.concatenate(found)).float()
    return replace(batch, logp_teacher_BT=column_BT)


def _ages(batch: Batch, version: int) -> Metrics:
    """Age of each response (its oldest token sampled for its request; demonstrations have none), and of relayed prefixes by token."""
    prefix_BT = relayed(batch.response_mask_BT, batch.prefix_length_B)
    own_BT = batch.response_mask_BT & ~prefix_BT
    ages = age(batch.version_BT.masked_fill(~own_BT, version).amin(1), version)[~batch.off_policy_B]
    out: Metrics = {"stale/age_mean": Mean(ages.sum(), len(ages))}
    if len(ages):
        out["stale/age_max"] = Max(ages.max())
    if bool(prefix_BT.any()):
        out["relay/prefix_age"] = Mean(age(batch.version_BT[prefix_BT], version).sum(), prefix_BT.sum())
    return out


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
