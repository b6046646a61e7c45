"""The ledger, model-checked: nothing lost, nothing taken twice, nothing over the bound."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearpolicy.schedule.ledger import Ledger, age


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
    """Against a plain model: a set of tickets for each state."""

    def __init__(self):
        super().__init__()
        self.ledger, self.version, self.bound = Ledger(), 0, 3
        self.open, self.claimed, self.ready, self.gone = [], [], {}, {}

    @rule(prompt=st.integers(0, 5))
    def admit(self, prompt):
        self.open.append(self.ledger.admit(prompt))

    @rule(limit=st.integers(0, 3))
    def claim(self, limit):
        tickets = self.ledger.claim(limit)
        assert tickets == sorted(self.open)[:limit]
        self.open = [t for t in self.open if t not in tickets]
        self.claimed += tickets

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), back=st.integers(0, 4))
    def finish(self, data, back):
        ticket = data.draw(st.sampled_from(self.claimed))
        self.claimed.remove(ticket)
        self.ready[ticket] = max(0, self.version - back)
        self.ledger.finish(ticket, self.ready[ticket])

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def release(self, data):
        ticket = data.draw(st.sampled_from(self.claimed))
        self.claimed.remove(ticket)
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
        before = dict(self.ready)
        tickets = self.ledger.take(count, self.version, self.bound)
        assert len(tickets) in (0, count)
        for ticket in tickets:
            assert self.version - before[ticket] <= self.bound
            del self.ready[ticket]
            self._leave(ticket)

    @rule()
    def update(self):
        self.version += 1

    @rule()
    def resume(self):
        other = Ledger()
        other.load_state_dict(self.ledger.state_dict())
        self.ledger = other
        self.open += self.claimed
        self.claimed = []

    def _leave(self, ticket):
        assert ticket not in self.gone, "left twice"
        self.gone[ticket] = True

    @invariant()
    def nothing_is_lost(self):
        known = {*self.open, *self.claimed, *self.ready}
        assert known == set(self.ledger.entries)
        assert known | set(self.gone) == set(range(self.ledger.next_ticket))


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


def test_the_ledger_stays_small():
    """Entries leave with their tickets, so that memory does not grow with the steps."""
    ledger = Ledger()
    for _ in range(2_000):
        ready(ledger, (0,))
        ledger.take(1, 0)
    assert not ledger.entries
