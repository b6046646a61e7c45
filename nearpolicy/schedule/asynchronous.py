"""Rollout workers and trainer apart: groups are written while the trainer updates, weights are published every K updates, ages are bounded.

One thread owns everything here: the workers answer `poll`, and a second thread does nothing but score. With one worker, K = 1 and a bound of 0
the schedule asks for the same requests in the same calls as the sync one with one update a rollout batch, and gives the same batches bit for bit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.metrics import Max, Mean, Metrics, Sum
from nearpolicy.protocols import RolloutSource, ScoreItem, Verifier
from nearpolicy.records import unpack
from nearpolicy.rollout import Batch, Prompt, Rollout, Score, Scored, StopReason
from nearpolicy.schedule.batches import (
    BatchOptions,
    Teach,
    age_table,
    ages,
    drawn_metrics,
    has_signal,
    mixed,
    oldest_version,
    to_batch,
    without_signal,
)
from nearpolicy.schedule.discards import NAME as DISCARD, difficulty_bin, discard_table, duration_bin
from nearpolicy.schedule.ledger import Ledger, State, age
from nearpolicy.schedule.pooled import shares
from nearpolicy.schedule.workers import Died, Finished, Job, Workers

_LOOK_S = 0.02  # between two looks at the workers while scores are awaited


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOptions(BatchOptions):
    """How old a group may be, and what becomes of older ones."""

    sync_every: int
    """Updates between two publications (K)."""
    max_age: int
    """Most updates between the weights that wrote a group's oldest token and the update that trains on it."""
    over_age: str
    """`wait`: no group is written that would get too old, and the trainer waits for those that are due; `drop`: too old ones are rejected."""
    wait_s: float
    """Longest time without a sign of life from workers or scoring."""


@dataclass(slots=True)
class _Flying:
    """A group that a worker writes."""

    worker: int
    prompt: Prompt
    attempt: int


@dataclass(slots=True)
class _Arrived:
    """A complete group that is not scored yet."""

    prompt: Prompt
    group: list[Rollout]
    seconds: float


class AsyncSchedule:
    """Implements `Schedule`.

    Args:
        workers: write the responses. What the source's own sampler does must not take their events (`pooled.SharedWorkers`).
        source: decides who writes which part of a response.
        verifier: scores them, in a thread of its own.
        prompt_at: prompt cursor -> Prompt, the same for the same cursor.
        weights: the policy's weights at this moment, for a publication.
        annotate: adds the columns a method needs, given the batch and the policy that is about to train on it.
        teach: the teacher's log-probs of each response token.
        clock: seconds, monotonic.
    Raises:
        UsageError: K below 1, or a bound that K makes impossible.
    """

    def __init__(
        self,
        options: AsyncOptions,
        *,
        workers: Workers,
        source: RolloutSource,
        verifier: Verifier,
        prompt_at: Callable[[int], Prompt],
        weights: Callable[[], Mapping[str, Tensor]],
        annotate: Callable[[Batch], Batch],
        teach: Teach | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_staleness(options.sync_every, options.max_age, options.over_age)
        self.options, self.workers, self.source, self.verifier = options, workers, source, verifier
        self.prompt_at, self.weights, self.annotate, self.teach, self._clock = prompt_at, weights, annotate, teach, clock
        self.ledger = Ledger()
        self.cursor = 0
        self.tokens_sampled = 0
        self.last_scored: Sequence[Scored] = []
        self.published: int | None = None
        """Version that the workers hold; None before the first publication of this process."""
        self.publications = 0
        """Since the start of the run."""
        self._waiting: dict[int, list[Scored]] = {}
        self._place = 0  # groups admitted for the source's rollout batch at hand
        self._owed = 0  # groups to admit in place of rejected ones
        self._flying: dict[int, _Flying] = {}
        self._arrived: dict[int, _Arrived] = {}
        self._being_scored: dict[int, _Arrived] = {}
        self._seconds: dict[int, float] = {}
        self._scoring: tuple[list[int], Future[tuple[list[Score], float]]] | None = None
        self._scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._earlier_tokens = 0
        self._sign_of_life = clock()
        self._metrics: Metrics = {}
        self._reset_counts()

    def next(self, version: int) -> Batch:
        """The next batch of `prompts` groups, all within the age bound.

        Raises:
            EngineError: no sign of life within `wait_s`, a worker's own error, or a worker that broke its contract.
            DataError: dynamic sampling found no signal.
        """
        o, began = self.options, self._clock()
        self._sign_of_life = began
        self._publish(version)
        tickets = self._gather(version)
        waited = self._clock() - began
        scored = [s for t in tickets for s in self._waiting.pop(t)]
        batch, metrics = to_batch(o, scored, self.teach)
        start = self._clock()
        batch = self.annotate(batch).recomputed_at(version)
        self.last_scored = scored
        self._metrics = {
            **drawn_metrics(o, self._drawn),
            **self.source.metrics(),
            **metrics,
            **ages(batch, version),
            "stale": age_table(batch, version),
            "data/groups_rejected": Sum(self._rejected),
            "data/redraws": Sum(math.ceil(self._rejected / o.prompts)),
            "data/tokens_sampled": Sum(self.tokens_sampled),
            "time/sample_s": Sum(max((self._seconds.pop(t, 0.0) for t in tickets), default=0.0)),
            "time/score_s": Sum(self._score_s),
            "time/logprob_s": Sum(self._clock() - start),
            "time/wait_s": Sum(waited),
            "async/mixed_frac": mixed(scored),
            "async/reused_cache_frac": Mean(sum(s.rollout.reused_cache for s in scored), len(scored)),
            "async/over_age": Sum(self._over_age),
            "async/drops_max": Max(max((e.drops for e in self.ledger.entries.values()), default=0)),
            "async/ready": Mean(self.ledger.count(State.READY), 1),
            "async/in_flight": Mean(len(self._flying), 1),
            "async/unscored": Mean(len(self._arrived) + (len(self._scoring[0]) if self._scoring else 0), 1),
            "async/publications": Sum(self.publications),
            "async/resampled": Sum(self.ledger.counts["released"]),
            DISCARD: discard_table(self.ledger.counts),
        }
        self._reset_counts()
        return batch

    def metrics(self) -> Metrics:
        """What was measured since the last call."""
        out, self._metrics = self._metrics, {}
        return out

    def close(self) -> None:
        """End the workers and the scoring thread; idempotent."""
        self._scorer.shutdown(wait=False, cancel_futures=True)
        self.workers.close()

    def state_dict(self) -> dict[str, Any]:
        """Ledger, cursor and the groups that are ready; what is being written or scored comes back open, to be sampled again."""
        return {
            "ledger": self.ledger.state_dict(),
            "cursor": self.cursor,
            "tokens_sampled": self.tokens_sampled,
            "publications": self.publications,
            "place": self._place,
            "owed": self._owed,
            "waiting": [[t, g] for t, g in self._waiting.items()],
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, or from what `records.pack` made of it, with workers that hold nothing yet."""
        self.ledger.load_state_dict(state["ledger"])
        self.cursor, self.tokens_sampled, self.publications = int(state["cursor"]), int(state["tokens_sampled"]), int(state["publications"])
        self._place, self._owed = int(state["place"]), int(state["owed"])
        self._waiting = {int(t): [s if isinstance(s, Scored) else unpack(Scored, s) for s in g] for t, g in state["waiting"]}
        self.source.load_state_dict(state["source"])
        self._earlier_tokens = self.tokens_sampled - self.source.tokens_decoded
        self.published = None

    def _publish(self, version: int) -> None:
        if self.published is None or version % self.options.sync_every == 0 or age(self.published, version) >= self.options.sync_every:
            self.workers.publish(self.weights(), version)
            self.published = version
            self.publications += 1

    def _gather(self, version: int) -> list[int]:
        """Keep workers and scoring busy until a batch can be taken."""
        o = self.options
        while True:
            self._listen(0.0)
            self._absorb()
            self._expire(version)
            self._fill(version)
            if o.over_age == "wait":
                taken = self.ledger.take_in_time(o.prompts, version, o.max_age)
            else:
                taken = self.ledger.take(o.prompts, version, o.max_age)
            if taken:
                self._score()
                return taken
            if self._rejected >= (o.max_redraws + 1) * o.prompts:
                raise without_signal(self.ledger.count(State.READY), o, self._rejected, f"{o.max_redraws} rounds of redraws")
            self._wait(version)

    def _wait(self, version: int) -> None:
        """For the next event, at most until the deadline."""
        silent = self._clock() - self._sign_of_life
        if silent > self.options.wait_s:
            raise self._overdue(version, silent)
        if self._scoring is not None:
            wait([self._scoring[1]], timeout=_LOOK_S)
        elif not self._arrived:
            self._listen(min(1.0, self.options.wait_s - silent + 1e-3))
        self._score()

    def _overdue(self, version: int, silent: float) -> EngineError:
        if self._scoring is not None:
            what = f"{len(self._scoring[0])} groups are being scored (tickets {_some(self._scoring[0])})"
        elif self._flying:
            workers = {f.worker for f in self._flying.values()}
            what = f"{len(self._flying)} groups are being written (tickets {_some(self._flying)}; workers {_some(workers)})"
        else:
            what = "no worker takes a group"
        return EngineError(
            f"async schedule at update {version}", got=f"no sign of life for {silent:.0f} s: {what}",
            expected=f"a group within schedule.wait_s = {self.options.wait_s:g} s", do="Look at the workers, or raise schedule.wait_s.",
        )  # fmt: skip

    def _fill(self, version: int) -> None:
        """Admit groups as far as the bound allows (with `drop`, those that are too old before they are complete do not count) and workers have room,
        and hand out all that are open."""
        assert self.published is not None
        o, ledger = self.options, self.ledger
        room = ledger.room(o.prompts, version, published=self.published, max_age=o.max_age, late_count=o.over_age == "wait")
        for _ in range(min(room, sum(self._free()) - ledger.count(State.OPEN))):
            self._admit()
        sizes = shares(ledger.count(State.OPEN), self._free())
        if tickets := ledger.claim(sum(sizes), self.published):
            entries = [ledger.entries[t] for t in tickets]
            wanted = [(t, self.prompt_at(e.prompt), e.attempt) for t, e in zip(tickets, entries, strict=True)]
            order = self.source.order(wanted, o.group_size)
            jobs = [Job(request=request, n=order.n, params=order.params) for request in order.requests]
            first = 0
            for worker, size in enumerate(sizes):
                if size:
                    some = slice(first, first + size)
                    self._flying |= {t: _Flying(worker, prompt, attempt) for t, prompt, attempt in wanted[some]}
                    self.workers.submit(worker, jobs[some])
                    first += size

    def _free(self) -> list[int]:
        return [self.workers.free(w) for w in range(self.workers.count)]

    def _admit(self) -> None:
        """One more group: in place of a rejected one, or the next of the source's rollout batch, which its first group begins."""
        if self._owed:
            self._owed -= 1
        else:
            if self._place == 0:
                assert self.published is not None
                ticket, cursor = self.ledger.next_ticket + self.options.prompts, self.cursor + self.options.prompts
                self.source.begin(self.published, lambda k: (ticket + k, self.prompt_at(cursor + k)))
                self.tokens_sampled = self._earlier_tokens + self.source.tokens_decoded
                self._sign_of_life = self._clock()
            self._place = (self._place + 1) % self.options.prompts
        self.ledger.admit(self.cursor)
        self.cursor += 1

    def _listen(self, timeout_s: float) -> None:
        """Take what happened to the workers."""
        for event in self.workers.poll(timeout_s):
            self._sign_of_life = self._clock()
            if isinstance(event, Died):
                for ticket in event.tickets:
                    self._flight(event.worker, ticket)
                    self.ledger.release(ticket)
            else:
                self._deliver(event)
        self._score()

    def _deliver(self, event: Finished) -> None:
        flying = self._flight(event.worker, event.ticket)
        self._check(event)
        group = self.source.deliver([(event.ticket, flying.prompt, flying.attempt)], self.options.group_size, event.rollouts)[0]
        self.tokens_sampled = self._earlier_tokens + self.source.tokens_decoded
        self._arrived[event.ticket] = _Arrived(flying.prompt, group, event.seconds)

    def _flight(self, worker: int, ticket: int) -> _Flying:
        """What this worker writes under this ticket, no longer in flight."""
        flying = self._flying.get(ticket)
        if flying is None or flying.worker != worker:
            raise EngineError(f"worker {worker}", got=f"news of ticket {ticket}, which {'another worker' if flying else 'nobody'} writes",
                              expected="one delivery for each job", do="The workers' bookkeeping is broken; this was not trained on.")  # fmt: skip
        return self._flying.pop(ticket)

    def _check(self, event: Finished) -> None:
        """Refuse a group that is not what was asked for, or that older or newer weights wrote than the worker can hold."""
        entry, rollouts = self.ledger.entries[event.ticket], event.rollouts
        assert self.published is not None
        assert entry.started is not None
        wrong = None
        if any(r.group != event.ticket or r.stop is StopReason.ABORTED for r in rollouts) or [r.sample for r in rollouts] != list(
            range(len(rollouts))
        ):
            wrong = "responses of another group, out of order or unfinished"
        for r in rollouts:
            own = r.version_T[r.prefix_length :]
            if len(own) and not (entry.started <= own.min() and own.max() <= self.published):
                wrong = f"tokens of version {own.min()} to {own.max()}, when versions {entry.started} to {self.published} were published meanwhile"
        if wrong is not None:
            raise EngineError(f"worker {event.worker}", got=f"{wrong} (ticket {event.ticket})", expected="the group under the weights it was given",
                              do="The engine did not take the weights, or mixed up its jobs: nothing of it was trained on.")  # fmt: skip

    def _score(self) -> None:
        """Have everything that arrived scored, when the scorer is idle."""
        if self._scoring is None and self._arrived:
            tickets = list(self._arrived)
            items = [ScoreItem.of(self._arrived[t].prompt, r) for t in tickets for r in self._arrived[t].group]
            self._scoring = tickets, self._scorer.submit(_timed, self.verifier, items)
            self._being_scored = {t: self._arrived.pop(t) for t in tickets}

    def _absorb(self) -> None:
        """Finish or reject the groups whose scores are there."""
        if self._scoring is None or not self._scoring[1].done():
            return
        (tickets, future), self._scoring = self._scoring, None
        scores, seconds = future.result()
        found = iter(scores)
        self._score_s += seconds
        self._sign_of_life = self._clock()
        for ticket in tickets:
            arrived = self._being_scored.pop(ticket)
            scored = [Scored(rollout=r, score=next(found)) for r in arrived.group]
            self._drawn += scored
            self.ledger.finish(
                ticket, oldest_version(arrived.group), difficulty=difficulty_bin(scored), duration=duration_bin(arrived.seconds)
            )  # fmt: skip
            if self.options.dynamic_sampling and not has_signal(scored):
                self.ledger.reject(ticket, "no_signal")
                self._rejected += 1
                self._owed += 1
            else:
                self._waiting[ticket], self._seconds[ticket] = scored, arrived.seconds
        self._score()

    def _expire(self, version: int) -> None:
        for ticket in self.ledger.expire(version, self.options.max_age):
            del self._waiting[ticket]
            self._seconds.pop(ticket, None)
            self._over_age += 1

    def _reset_counts(self) -> None:
        """Of what is measured between two batches."""
        self._drawn: list[Scored] = []
        self._rejected, self._over_age, self._score_s = 0, 0, 0.0


def check_staleness(sync_every: int, max_age: int, over_age: str) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: K below 1, a bound below K - 1 (the last update before a publication could take nothing), or another `over_age`.
    """
    if sync_every < 1:
        raise UsageError("schedule.sync_every", got=sync_every, expected="at least 1", do="1 publishes after every update.")
    if max_age < sync_every - 1:
        raise UsageError("schedule.max_age", got=f"{max_age} with schedule.sync_every = {sync_every}", expected=f"at least {sync_every - 1}",
                         do="The last update before a publication trains on groups that are sync_every - 1 updates old: raise max_age, or publish "
                         "more often.")  # fmt: skip
    if over_age not in ("wait", "drop"):
        raise UsageError("schedule.over_age", got=repr(over_age), expected="wait or drop", do="Choose one of them.")


def _timed(verifier: Verifier, items: Sequence[ScoreItem]) -> tuple[list[Score], float]:
    start = time.perf_counter()
    return verifier.score(items), time.perf_counter() - start


def _some(values: Any) -> str:
    shown = sorted(values)
    return ", ".join(map(str, shown[:6])) + (" ..." if len(shown) > 6 else "")
