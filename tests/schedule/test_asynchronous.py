"""The asynchronous schedule on workers in this process: equal to sync at lag 0, within its bound at any lag, nothing lost, nothing trained twice."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import DataError, EngineError, UsageError
from nearpolicy.methods import method
from nearpolicy.metrics import TABLE, to_floats
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.tiny import character_tokenizer, tiny_model
from nearpolicy.protocols import SamplingParams
from nearpolicy.rollout import Prompt, Source
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.sampler.weights import weights_digest
from nearpolicy.schedule.asynchronous import AsyncOptions, AsyncSchedule
from nearpolicy.schedule.discards import difficulty_bin, duration_bin
from nearpolicy.schedule.local import LocalWorkers
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
from nearpolicy.schedule.workers import Died, Finished
from nearpolicy.sources.cuts import length_ratio
from nearpolicy.sources.demonstrations import DemonstrationSource, Encoder
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.sources.relay import RelayOptions, RelaySource
from nearpolicy.testing.fakes import FakeTokenizer
from nearpolicy.trainer.step import StepOptions, Stepper
from tests.schedule.asyncs import BASE, LIMIT, PARAMS, G, Judge, Recording, V, build, build_sync, gone_on, prompt_at, same, step


def relay_in(folder):
    options = RelayOptions(refresh=3, relayed=2, shared=False, groups=8, chunk=64, entropy=False)
    return lambda sampler, params: RelaySource(sampler, params, length_ratio(0.5), options=options, folder=folder, run="me")


def shown(inner):
    encoder = Encoder(encode=FakeTokenizer().encode, eos_id=0, eos_ids=frozenset({0}), vocabulary=V, max_tokens=LIMIT)
    return lambda sampler, params: DemonstrationSource(
        inner(sampler, params), solutions=lambda p: ["bcd"], encoder=encoder, decode=lambda ids: "bcd", per_group=1, params=params
    )


def timeless(metrics):
    return {k: v for k, v in to_floats(metrics).items() if not k.startswith(("time/", "async/", "discard/", "stale/responses"))}


@pytest.mark.parametrize("kind", ["fresh", "relay", "shown beside relayed"])
def test_lag_0_is_sync_bit_for_bit(kind, tmp_path):
    """Same tickets, same requests in the same calls, same batches, same metrics."""

    def source(folder):
        return {"fresh": FreshSource, "relay": relay_in(folder), "shown beside relayed": shown(relay_in(folder))}[kind]

    changes = {"overlong_buffer": 3, "mask_truncated": True, "mask_prefix": True}
    one, other = build(source=source(tmp_path / "a"), **changes), build_sync(source=source(tmp_path / "b"), **changes)
    for version in range(7):
        same(step(one, version), other.next(version))
        assert timeless(one.metrics()) == pytest.approx(timeless(other.metrics()), nan_ok=True)
        assert one.tokens_sampled == other.tokens_sampled
        assert [s.rollout.text for s in one.last_scored] == [s.rollout.text for s in other.last_scored]
    assert one.inner._flights[0].sampler.asked == other.sampler.asked


def trained(make, updates):
    """Digest of a tiny model's weights after so many updates, and the batches."""
    model = tiny_model(seed=2)
    policy = HFPolicy(model, tokenizer=character_tokenizer())
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    options = StepOptions(grad_clip=1.0, kl_coefficient=0.0, kl_estimator="k2", entropy_coefficient=0.0)
    stepper = Stepper(policy, method("vespo"), optimizer, options, lambda step: 1e-2)
    schedule, batches = make(policy, TorchSampler(model, character_tokenizer())), []
    for version in range(updates):
        batches.append(schedule.next(version))
        stepper.update(batches[-1], version)
    return weights_digest(policy.published_weights()), batches


def test_lag_0_trains_the_same_weights_as_sync_with_a_real_model():
    params = SamplingParams(max_tokens=10, eos_ids=frozenset({1}), seed=4)
    judge = Judge(lambda item: float(item.completion.count("1") - item.completion.count("2")))

    def prompt(cursor):
        return Prompt(id=str(cursor), token_P=np.array([3 + cursor % 7, 4, 5 + cursor % 3]), text="")

    def sync(policy, sampler):
        return SyncSchedule(
            SyncOptions(prompts=4, updates_per_rollout=1, **BASE), source=FreshSource(sampler, params), verifier=judge, prompt_at=prompt,
            publish=lambda v: sampler.load(policy.published_weights(), v), annotate=lambda b: b,
        )  # fmt: skip

    def asynchronous(policy, sampler):
        return AsyncSchedule(
            AsyncOptions(prompts=4, sync_every=1, max_age=0, over_age="wait", wait_s=20, **BASE),
            workers=LocalWorkers([sampler], capacity=4), source=FreshSource(sampler, params), verifier=judge, prompt_at=prompt,
            weights=policy.published_weights, annotate=lambda b: b,
        )  # fmt: skip

    (one, batches), (other, wanted) = trained(asynchronous, 4), trained(sync, 4)
    for a, b in zip(batches, wanted, strict=True):
        same(a, b)
    assert one == other
    assert one != weights_digest(HFPolicy(tiny_model(seed=2), tokenizer=character_tokenizer()).published_weights())


def follow(schedule, updates, between=lambda version: None):
    """Train, and check what must hold whatever the workers do; returns how often each age was trained on."""
    o, seen, ages = schedule.options, Counter(), Counter()
    for version in range(updates):
        between(version)
        batch = step(schedule, version)
        groups = batch.group_B.tolist()
        assert len(set(groups)) == o.prompts
        assert len(groups) == o.prompts * o.group_size
        seen.update(set(groups))
        for row in range(len(batch)):
            own = batch.version_BT[row][batch.response_mask_BT[row]][int(batch.prefix_length_B[row]) :]
            if len(own) and batch.source_B[row] is not Source.DEMONSTRATION:
                assert version - int(own.min()) <= o.max_age
                assert int(own.max()) <= schedule.published
                ages[version - int(own.min())] += 1
        for ticket, place in zip(groups, range(len(groups)), strict=True):
            assert int(batch.token_BT[place, 0]) == prompt_at(ticket).token_P[0], "a ticket keeps its prompt"
        room = (schedule.published + o.max_age + 1 - version) * o.prompts
        if o.over_age == "wait":
            assert len(schedule.ledger.entries) + o.prompts <= room
    assert max(seen.values()) == 1, "trained twice"
    ledger = schedule.ledger
    assert set(seen) | set(ledger.entries) == set(range(ledger.next_ticket)), "lost"
    return ages


@settings(max_examples=10, deadline=None)
@given(
    count=st.integers(1, 3), capacity=st.integers(1, 9), in_flight=st.sampled_from(["finish", "keep"]), slice_steps=st.sampled_from([None, 1, 2, 5]),
    sync_every=st.integers(1, 3), spare=st.integers(0, 3), over_age=st.sampled_from(["wait", "drop"]),
)  # fmt: skip
def test_within_the_bound_nothing_lost_nothing_trained_twice(count, capacity, in_flight, slice_steps, sync_every, spare, over_age):
    workers = {"count": count, "capacity": capacity, "in_flight": in_flight, "slice_steps": slice_steps}
    schedule = build(workers=workers, sync_every=sync_every, max_age=sync_every - 1 + spare, over_age=over_age)
    follow(schedule, 7)
    if over_age == "wait":
        assert schedule.ledger.counts["rejected/over_age"] == 0
    assert schedule.publications == 1 + 6 // sync_every


def test_work_goes_on_during_updates_and_grows_old():
    ages = follow(build(workers={"capacity": 12}, max_age=2), 8)
    assert set(ages) == {0, 1, 2}


def test_weights_are_published_every_k_updates():
    schedule = build(sync_every=3, max_age=2)
    versions = []
    for version in range(7):
        batch = step(schedule, version)
        versions.append(set(batch.version_BT[batch.response_mask_BT].tolist()))
    assert versions == [{0}, {0}, {0}, {3}, {3}, {3}, {6}]
    assert schedule.metrics()["async/publications"].value == 3


def test_kept_responses_carry_the_version_of_each_token_and_age_by_the_first():
    schedule = build(workers={"capacity": 8, "in_flight": "keep", "slice_steps": 2}, max_age=3)
    found = 0
    for version in range(10):
        batch = step(schedule, version)
        rows = [batch.version_BT[b][batch.response_mask_BT[b]] for b in range(len(batch))]
        kept = [len(set(r.tolist())) > 1 for r in rows]
        found += sum(kept)
        metrics = schedule.metrics()
        assert metrics["async/mixed_frac"].value == sum(kept) / len(rows)
        assert metrics["stale/age_max"].value == version - min(int(r.min()) for r in rows)
        assert all((r[1:] >= r[:-1]).all() for r in rows)
        for scored in schedule.last_scored:
            assert (scored.rollout.source, scored.rollout.prefix_length) == (Source.FRESH, 0)
    assert found


class SlowPrompt(LocalWorkers):
    """The group of prompt "2" takes so many polls, whatever its attempt."""

    def __init__(self, polls, **options):
        super().__init__([Recording()], **options)
        self.polls, self.held = polls, []

    def poll(self, timeout_s):
        out = [(e, self.polls if isinstance(e, Finished) and e.rollouts[0].prompt_id == "2" else 0) for e in super().poll(timeout_s)]
        ripe = [e for e, left in self.held + out if left <= 0]
        self.held = [(e, left - 1) for e, left in self.held + out if left > 0]
        return ripe


def test_a_slow_group_is_waited_for_when_it_is_due():
    schedule = build(workers=SlowPrompt(12, capacity=12), max_age=2, prompts=2)
    follow(schedule, 6)
    assert 2 not in schedule.ledger.entries, "trained in time"


def test_a_group_over_the_bound_is_dropped_counted_and_sampled_again():
    schedule = build(workers=SlowPrompt(8, capacity=12), max_age=1, prompts=2, over_age="drop")
    dropped, drops = 0, 0
    for version in range(8):
        step(schedule, version)
        metrics = schedule.metrics()
        dropped += metrics["async/over_age"].value
        drops = max(drops, metrics["async/drops_max"].value)
    assert dropped == schedule.ledger.counts["rejected/over_age"] >= 1
    assert drops >= 1, "the slow prompt is counted"
    table = metrics["discard"]
    groups, over_age, _ = table.sums[:, table.layout.axes["duration"]].sum(1).tolist()
    assert (groups, over_age) == (16 + dropped, dropped)
    entry = schedule.ledger.entries.get(2)
    assert entry is None or entry.attempt >= entry.drops


def test_bins_of_difficulty_and_duration():
    from nearpolicy.rollout import Outcome, Rollout, Score, Scored, StopReason

    def group(*rewards):
        rollout = Rollout(prompt_id="", group=0, sample=0, prompt_P=np.array([1]), response_T=np.array([1]), logp_behavior_T=np.zeros(1, np.float32),
                          version_T=np.zeros(1, np.int64), stop=StopReason.EOS)  # fmt: skip
        return [Scored(rollout=rollout, score=Score(reward=r, outcome=Outcome.SCORE)) for r in rewards]

    nan = float("nan")
    assert [difficulty_bin(group(*r)) for r in ((0, 0), (0, 1), (1, 1), (0.2, nan), (nan, nan), (-3,), (7,))] == [0, 2, 4, 1, 5, 0, 4]
    assert [duration_bin(s) for s in (0, 0.99, 1, 1.99, 2, 511, 512, 1e9)] == [0, 0, 1, 1, 2, 9, 10, 10]


@settings(max_examples=6, deadline=None)
@given(data=st.data(), in_flight=st.sampled_from(["finish", "keep"]))
def test_workers_may_die_at_any_moment(data, in_flight):
    """Nothing is lost or doubled; what is sampled again has fresh noise."""
    workers = LocalWorkers([Recording(), Recording()], capacity=5, in_flight=in_flight, slice_steps=2)
    schedule = build(workers=workers, max_age=2)
    poll, plan = workers.poll, iter(data.draw(st.lists(st.integers(-1, 1), max_size=25)))

    def dying(timeout_s):
        if (victim := next(plan, -1)) >= 0:
            workers.kill(victim)
        return poll(timeout_s)

    workers.poll = dying
    follow(schedule, 6)
    attempts = Counter(zip(*[[x for f in workers._flights for call in f.sampler.asked for x in call[i]] for i in (0, 1)], strict=True))
    again = {t for (t, a) in attempts if a}
    assert (schedule.ledger.counts["released"] > 0) or not again


def test_a_dead_workers_group_is_sampled_with_fresh_noise():
    workers = LocalWorkers([Recording()], capacity=4)
    schedule, once = build(workers=workers), build()
    workers_poll, killed = workers.poll, []

    def poll(timeout_s):
        if not killed and workers._flights[0].tickets:
            killed.append(True)
            workers.kill(0)
        return workers_poll(timeout_s)

    workers.poll = poll
    batch, plain = step(schedule, 0), step(once, 0)
    assert batch.group_B.tolist() == plain.group_B.tolist()
    assert not torch.equal(batch.token_BT.sum(1), plain.token_BT.sum(1))
    assert schedule.metrics()["async/resampled"].value == 4


class Scripted(LocalWorkers):
    """Local workers whose events a function changes."""

    def __init__(self, change, count=1):
        super().__init__([Recording() for _ in range(count)], capacity=8)
        self.change = change

    def poll(self, timeout_s):
        return self.change(super().poll(timeout_s))


def older(events):
    import dataclasses

    return [
        dataclasses.replace(e, rollouts=[dataclasses.replace(r, version_T=r.version_T - 1) for r in e.rollouts]) if isinstance(e, Finished) else e
        for e in events
    ]


@pytest.mark.parametrize(("change", "says"), [
    (lambda events: events * 2, "news of ticket 0, which nobody writes"),
    (lambda events: [*events, *(Died(worker=0, tickets=[e.ticket], reason="x") for e in events)], "news of ticket 0"),
    (lambda events: [Finished(worker=1, ticket=e.ticket, rollouts=e.rollouts, seconds=0) for e in events], "another worker writes"),
    (lambda events: [Finished(worker=0, ticket=e.ticket, rollouts=e.rollouts[::-1], seconds=0) for e in events], "out of order"),
    (older, "version -1 to -1, when versions 0 to 0"),
])  # fmt: skip
def test_what_a_worker_must_not_do(change, says):
    schedule = build(workers=Scripted(change))
    with pytest.raises(EngineError, match=says) as error:
        step(schedule, 0)
    assert "\n" not in str(error.value)


def test_an_engine_that_keeps_its_old_weights_is_refused():
    class Deaf(Recording):
        def load(self, weights, version):
            pass

    schedule = build(workers=LocalWorkers([Deaf()], capacity=8))
    step(schedule, 0)
    with pytest.raises(EngineError, match="version 0 after a publication"):
        step(schedule, 1)


def test_a_wait_has_a_deadline_and_says_what_for():
    schedule = build(workers=Scripted(lambda events: []), wait_s=0.05)
    says = r"async schedule at update 0: got no sign of life .* 4 groups are being written \(tickets 0, 1, 2, 3; workers 0\)"
    with pytest.raises(EngineError, match=says):
        step(schedule, 0)


def test_scoring_has_a_deadline_too():
    stop = threading.Event()
    schedule = build(judge=lambda item: stop.wait(10) and 0.0, wait_s=0.2)
    with pytest.raises(EngineError, match=r"4 groups are being scored \(tickets 0, 1, 2, 3\)"):
        step(schedule, 0)
    stop.set()


def test_errors_of_workers_and_verifier_come_through():
    def broken(events):
        raise EngineError("worker 0", got="an explosion", expected="none", do="Stand back.")

    with pytest.raises(EngineError, match="an explosion"):
        step(build(workers=Scripted(broken)), 0)

    def judge(item):
        raise ZeroDivisionError("reward")

    with pytest.raises(ZeroDivisionError):
        step(build(judge=judge), 0)


def test_scoring_runs_while_workers_write():
    """The verifier ends only when the workers were asked once more: with one thread that would never come."""
    asked = threading.Event()

    class Counting(LocalWorkers):
        def poll(self, timeout_s):
            if judging.is_set():
                asked.set()
            return super().poll(timeout_s)

    judging = threading.Event()

    def judge(item):
        judging.set()
        assert asked.wait(10)
        return 1.0

    step(build(workers=Counting([Recording()], capacity=8), judge=judge), 0)
    assert asked.is_set()


def flat_for_odd(item):
    return 1.0 if int(item.columns["answer"]) % 2 else float(len(item.completion) % 3)


@pytest.mark.parametrize("options", [{}, {"max_age": 2}, {"max_age": 3, "sync_every": 2, "over_age": "drop"}])
def test_dynamic_sampling_replaces_groups_without_a_signal(options):
    schedule = build(judge=flat_for_odd, dynamic_sampling=True, max_redraws=20, workers={"count": 2, "capacity": 4}, **options)
    rejected = 0
    for version in range(6):
        batch = step(schedule, version)
        for group in batch.group_B.unique():
            mine = batch.reward_B[batch.group_B == group]
            assert mine.max() > mine.min()
        rejected += schedule.metrics()["data/groups_rejected"].value
    assert rejected == schedule.ledger.counts["rejected/no_signal"] > 0


def test_a_task_without_signal_ends_in_one_clear_line():
    schedule = build(judge=lambda item: 1.0, dynamic_sampling=True)
    with pytest.raises(DataError, match="16 of 16 groups had equal rewards") as error:
        step(schedule, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_lag_0_is_gone_on_with_bit_for_bit(cut, tmp_path):
    def made():
        return build(source=relay_in(tmp_path / "bank"))

    whole, first = build(source=relay_in(tmp_path / "whole")), made()
    want = [step(whole, v) for v in range(8)][cut:]
    for version in range(cut):
        step(first, version)
    second = gone_on(first, made())
    for version, batch in enumerate(want, start=cut):
        same(step(second, version), batch)
    assert second.tokens_sampled == whole.tokens_sampled


@pytest.mark.parametrize("over_age", ["wait", "drop"])
def test_gone_on_with_anywhere_nothing_is_trained_twice(over_age):
    options = {"workers": {"count": 2, "capacity": 6, "in_flight": "keep", "slice_steps": 3}, "max_age": 3, "sync_every": 2, "over_age": over_age}
    schedule, seen = build(**options), Counter()
    for version in range(12):
        if version in (3, 4, 9):
            schedule = gone_on(schedule, build(**options))
            assert schedule.ledger.count("claimed") == 0
        batch = step(schedule, version)
        assert schedule.metrics()["stale/age_max"].value <= 3
        seen.update(set(batch.group_B.tolist()))
    assert max(seen.values()) == 1
    assert set(seen) | set(schedule.ledger.entries) == set(range(schedule.ledger.next_ticket))
    assert schedule.publications == 1 + 5 + 2, "resumed at 3 and 9 between two publications"


def test_a_bank_is_written_by_the_workers_beside_what_is_in_flight(tmp_path):
    """A cycle begins while groups of the last one are being written; their events reach the schedule."""
    schedule = build(source=relay_in(tmp_path), workers={"count": 2, "capacity": 5, "in_flight": "keep", "slice_steps": 3}, max_age=2)
    follow(schedule, 8)
    banks = [call for f in schedule.inner._flights for call in f.sampler.asked if call[3].stream != PARAMS.stream]
    assert {call[2] for call in banks} == {2}
    assert all(any(f.sampler.asked and c in f.sampler.asked for c in banks) for f in schedule.inner._flights), "both workers"


def test_every_metric_is_in_the_table_and_the_ages_add_up():
    schedule = build(workers={"capacity": 12, "in_flight": "keep", "slice_steps": 4}, max_age=2)
    for version in range(4):
        batch = step(schedule, version)
    metrics = schedule.metrics()
    floats = to_floats(metrics)
    for name in floats:
        assert name in TABLE or name.rsplit("/", 1)[0] in TABLE, name
    assert sum(floats["stale/responses/age"]) == len(batch)
    assert floats["time/wait_s"] >= 0
    assert floats["async/ready"] + floats["async/in_flight"] + floats["async/unscored"] == len(schedule.ledger.entries)


@pytest.mark.parametrize(("options", "says"), [
    ({"sync_every": 3, "max_age": 1}, "schedule.max_age: got 1 with schedule.sync_every = 3; expected at least 2"),
    ({"sync_every": 0}, "schedule.sync_every: got 0"),
    ({"over_age": "ignore"}, "schedule.over_age: got 'ignore'"),
])  # fmt: skip
def test_options_that_cannot_work_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        build(**options)


def test_close_ends_the_workers_and_can_be_called_twice():
    class Closing(LocalWorkers):
        closed = 0

        def close(self):
            self.closed += 1

    workers = Closing([Recording()], capacity=8)
    schedule = build(workers=workers)
    step(schedule, 0)
    schedule.close()
    schedule.close()
    assert workers.closed == 2


def test_group_size_and_shares():
    from nearpolicy.schedule.pooled import shares

    assert shares(5, [9]) == [5]
    assert shares(5, [9, 9]) == [3, 2]
    assert shares(5, [1, 9, 0]) == [1, 4, 0]
    assert shares(9, [1, 2]) == [1, 2]
    assert shares(0, [3]) == [0]
    assert G == 3
