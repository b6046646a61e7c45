"""The ledger, model-checked: nothing lost, nothing taken twice, nothing over the bound."""

import json
from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearpolicy.schedule.ledger import Ledger, State, age


def ready(ledger, versions):
    for version in versions:
        ticket = ledger.admit(0)
        ledger.claim()
        ledger.finish(ticket, version)


def test_a_queue_of_mixed_ages_with_a_bound():
    ledger = Ledger()
    ready(ledger, (0, 0, 3, 3))
    assert [ledger.age(t, 4) for t in ledger.ready()] == [4, 4, 1, 1]
    assert ledger.take(2, 4, max_age=2) == [2, 3]
    assert ledger.take(1, 4, max_age=2) == []
    assert ledger.ready() == [0, 1]


def test_nothing_sampled_has_age_zero_and_age_is_in_updates():
    ledger = Ledger()
    ready(ledger, (None,))
    assert ledger.age(0, 100) == 0
    assert age(4, 6) == 2


def test_release_changes_the_attempt_so_that_the_noise_is_fresh():
    ledger = Ledger()
    ticket = ledger.admit(5)
    ledger.claim()
    ledger.release(ticket)
    assert ledger.entries[ticket].attempt == 1
    assert ledger.claim() == [ticket]


def test_claimed_tickets_come_back_open_after_a_resume():
    ledger = Ledger()
    ledger.admit(1)
    ledger.admit(2)
    ledger.claim(1)
    other = Ledger()
    other.load_state_dict(ledger.state_dict())
    assert other.open() == [0, 1]
    assert other.entries[0].attempt == 1


@pytest.mark.parametrize("verb", ["finish", "release", "reject", "age"])
def test_verbs_in_the_wrong_state_are_faults(verb):
    ledger = Ledger()
    ticket = ledger.admit(0)
    arguments = {"finish": (ticket, 0), "release": (ticket,), "reject": (ticket, "x"), "age": (ticket, 0)}[verb]
    with pytest.raises(ValueError, match="ticket 0 is open"):
        getattr(ledger, verb)(*arguments)


class LedgerMachine(RuleBasedStateMachine):
    """Against a plain model: a set of tickets for each state, and how often each left or came back."""

    def __init__(self):
        super().__init__()
        self.ledger, self.version, self.bound = Ledger(), 0, 3
        self.open, self.claimed, self.ready, self.gone, self.drops = [], {}, {}, {}, Counter()

    @rule(prompt=st.integers(0, 5))
    def admit(self, prompt):
        self.open.append(self.ledger.admit(prompt))

    @rule(limit=st.integers(0, 3))
    def claim(self, limit):
        tickets = self.ledger.claim(limit, self.version)
        assert tickets == sorted(self.open)[:limit]
        self.open = [t for t in self.open if t not in tickets]
        self.claimed |= dict.fromkeys(tickets, self.version)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), newer=st.integers(0, 4))
    def finish(self, data, newer):
        """A group's tokens are of the version it was claimed under, or of later ones."""
        ticket = data.draw(st.sampled_from(sorted(self.claimed)))
        self.ready[ticket] = min(self.claimed.pop(ticket) + newer, self.version)
        self.ledger.finish(ticket, self.ready[ticket], difficulty=ticket % 5, duration=newer)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def release(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.claimed)))
        del self.claimed[ticket]
        self.open.append(ticket)
        self.ledger.release(ticket)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def reject(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.ready)))
        del self.ready[ticket]
        self._leave(ticket)
        self.ledger.reject(ticket, "test")

    @rule(count=st.integers(1, 3))
    def take(self, count):
        fit = [t for t in sorted(self.ready) if self.version - self.ready[t] <= self.bound]
        tickets = self.ledger.take(count, self.version, self.bound)
        assert tickets == (fit[:count] if len(fit) >= count else [])
        self._taken(tickets)

    @rule(count=st.integers(1, 3))
    def take_in_time(self, count):
        before = {**self.claimed, **self.ready}
        tickets = self.ledger.take_in_time(count, self.version, self.bound)
        assert len(tickets) in (0, count)
        self._taken(tickets)
        left = {t: v for t, v in before.items() if t not in tickets and (t in self.claimed or self.version - v <= self.bound)}
        for d in range(self.version, self.version + self.bound + 1):
            if tickets:
                assert sum(v + self.bound <= d for v in left.values()) <= (d - self.version) * count

    @rule()
    def expire(self):
        over = sorted(t for t, v in self.ready.items() if self.version - v > self.bound)
        assert self.ledger.expire(self.version, self.bound) == over
        for ticket in over:
            del self.ready[ticket]
            self.drops[ticket] += 1
            self.open.append(ticket)

    @rule()
    def update(self):
        self.version += 1

    @rule()
    def resume(self):
        other = Ledger()
        other.load_state_dict(json.loads(json.dumps(self.ledger.state_dict())))
        self.ledger = other
        self.open += self.claimed
        self.claimed = {}

    def _taken(self, tickets):
        for ticket in tickets:
            assert self.version - self.ready.pop(ticket) <= self.bound
            self._leave(ticket)

    def _leave(self, ticket):
        assert ticket not in self.gone, "left twice"
        self.gone[ticket] = True

    @invariant()
    def nothing_is_lost(self):
        known = {*self.open, *self.claimed, *self.ready}
        assert known == set(self.ledger.entries)
        assert known | set(self.gone) == set(range(self.ledger.next_ticket))
        assert self.ledger.open() == sorted(self.open)
        assert self.ledger.claimed() == sorted(self.claimed)
        assert self.ledger.ready() == sorted(self.ready)

    @invariant()
    def nobody_is_starved_without_being_counted(self):
        assert {t: e.drops for t, e in self.ledger.entries.items() if e.drops} == {t: n for t, n in self.drops.items() if t not in self.gone}
        assert self.ledger.counts["rejected/over_age"] == self.drops.total()
        for how in ("taken", "rejected/test", "rejected/over_age"):
            for axis in ("difficulty", "duration"):
                bins = sum(n for name, n in self.ledger.counts.items() if name.startswith(f"{how}/{axis}/"))
                assert bins == self.ledger.counts[how]


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def test_the_ledger_stays_small():
    """Entries leave with their tickets, so that memory does not grow with the steps."""
    ledger = Ledger()
    for _ in range(2_000):
        ready(ledger, (0,))
        ledger.take(1, 0)
    assert not ledger.entries


class WaitMachine(RuleBasedStateMachine):
    """The rule of `over_age = wait`: with admissions throttled by the bound, and groups complete in any order, every update finds a batch once
    enough is complete, and nothing is ever over the bound."""

    def __init__(self):
        super().__init__()
        self.ledger, self.version, self.published = Ledger(), 0, 0

    @initialize(prompts=st.integers(1, 4), every=st.integers(1, 3), spare=st.integers(0, 3))
    def options(self, prompts, every, spare):
        self.prompts, self.every, self.bound = prompts, every, every - 1 + spare

    def _room(self):
        return (self.published + self.bound + 1 - self.version) * self.prompts - len(self.ledger.entries)

    @rule(count=st.integers(1, 6))
    def write(self, count):
        for _ in range(min(count, self._room())):
            self.ledger.admit(0)
        self.ledger.claim(None, self.published)

    @rule(data=st.data(), count=st.integers(1, 4))
    def complete(self, data, count):
        for _ in range(min(count, self.ledger.count(State.CLAIMED))):
            ticket = data.draw(st.sampled_from(self.ledger.claimed()))
            self.ledger.finish(ticket, self.ledger.entries[ticket].started)

    @precondition(lambda self: self.ledger.count(State.CLAIMED))
    @rule(data=st.data())
    def die(self, data):
        self.ledger.release(data.draw(st.sampled_from(self.ledger.claimed())))

    @precondition(lambda self: self.ledger.count(State.READY))
    @rule(data=st.data())
    def no_signal(self, data):
        self.ledger.reject(data.draw(st.sampled_from(self.ledger.ready())), "no_signal")

    @rule(impatient=st.booleans())
    def update(self, impatient):
        """Take what may be taken; else all that is due completes, and then a batch must be there."""
        taken = self.ledger.take_in_time(self.prompts, self.version, self.bound)
        if not taken and impatient:
            return
        if not taken:
            for _ in range(self._room()):
                self.ledger.admit(0)
            self.ledger.claim(None, self.published)
            for ticket in self.ledger.claimed():
                self.ledger.finish(ticket, self.ledger.entries[ticket].started)
            taken = self.ledger.take_in_time(self.prompts, self.version, self.bound)
        assert len(taken) == self.prompts
        self.version += 1
        if self.version % self.every == 0:
            self.published = self.version

    @invariant()
    def nothing_is_over_the_bound(self):
        assert self.ledger.expire(self.version, self.bound) == []


WaitMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestWaitMachine = WaitMachine.TestCase


def test_a_slow_group_is_waited_for_only_when_it_is_due():
    """Three groups of version 0, bound 2, one a batch: the fast ones go first, and the slow one holds the last update that may take it."""
    ledger = Ledger()
    slow, *fast = [ledger.admit(0) for _ in range(3)]
    ledger.claim(None, 0)
    for ticket in fast:
        ledger.finish(ticket, 0)
    assert ledger.take_in_time(1, 0, 2) == [1]
    ledger.admit(0)
    ledger.claim(None, 1)
    ledger.finish(3, 1)
    assert ledger.take_in_time(1, 1, 2) == [2], "two groups are due at update 2 at the latest: the newer one must not go before them"
    assert ledger.take_in_time(1, 2, 2) == [], "the slow one is due"
    ledger.finish(slow, 0)
    assert ledger.take_in_time(1, 2, 2) == [slow]


def test_a_group_older_than_its_claim_is_a_fault():
    ledger = Ledger()
    ledger.admit(0)
    ledger.claim(None, 4)
    with pytest.raises(ValueError, match="version 3, claimed under 4"):
        ledger.finish(0, 3)


def test_groups_in_flight_that_are_late_already():
    ledger = Ledger()
    for version in (0, 2):
        ledger.admit(0)
        ledger.claim(None, version)
    assert [ledger.late(v, 1) for v in (1, 2, 3, 4)] == [0, 1, 1, 2]
    # (published 2 + bound 1 + 1 - version) updates of 3 groups, less two outstanding, or less those of them that are not late
    assert [ledger.room(3, v, published=2, max_age=1) for v in (1, 2, 3, 4)] == [7, 4, 1, -2]
    assert [ledger.room(3, v, published=2, max_age=1, late_count=False) for v in (1, 2, 3, 4)] == [7, 5, 2, 0]
