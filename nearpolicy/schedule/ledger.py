"""The one state machine behind every schedule: which group is wanted, being written, ready, trained on. Plain integers only.

The law of this module: a ticket is admitted once and leaves once, by being taken or rejected; nothing is taken twice, and nothing is
taken over the age bound. A version is the number of optimizer updates in the published weights.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


Versions = TypeVar("Versions", int, "Tensor")


def age(oldest: Versions, version: int) -> Versions:
    """Optimizer updates between the version that wrote the oldest sampled token and `version`. The only subtraction of versions."""
    return version - oldest


class State(StrEnum):
    """Where a ticket stands."""

    OPEN = "open"
    CLAIMED = "claimed"
    READY = "ready"


@dataclass(slots=True)
class Entry:
    """One group in the ledger."""

    prompt: int
    """Prompt cursor."""
    attempt: int = 0
    """Times the group was given back and sampled again; part of its randomness key."""
    state: State = State.OPEN
    version: int | None = None
    """Oldest version among its sampled tokens; None while unfinished, or when nothing was sampled."""


class Ledger:
    """Tickets in order of admission.

    Verbs: `admit -> claim -> finish -> take`, or `reject(reason)` once ready; `release` gives a claimed ticket back.
    Every verb on a ticket in another state is a `ValueError`: that is a fault of ours, never of a user.
    """

    def __init__(self) -> None:
        self.next_ticket = 0
        self.entries: dict[int, Entry] = {}
        self.counts: Counter[str] = Counter()
        """Tickets by what became of them: `taken`, `released`, and `rejected/<reason>`."""

    def admit(self, prompt: int) -> int:
        """A new ticket for this prompt cursor."""
        ticket = self.next_ticket
        self.next_ticket += 1
        self.entries[ticket] = Entry(prompt)
        return ticket

    def claim(self, limit: int | None = None) -> list[int]:
        """The oldest open tickets, now claimed."""
        tickets = self._in(State.OPEN)[:limit]
        for ticket in tickets:
            self.entries[ticket].state = State.CLAIMED
        return tickets

    def release(self, ticket: int) -> None:
        """Give a claimed ticket back: its writer died. It will be sampled with fresh noise."""
        entry = self._entry(ticket, State.CLAIMED)
        entry.state, entry.attempt = State.OPEN, entry.attempt + 1
        self.counts["released"] += 1

    def finish(self, ticket: int, oldest_version: int | None) -> None:
        """The group is complete and scored."""
        entry = self._entry(ticket, State.CLAIMED)
        entry.state, entry.version = State.READY, oldest_version

    def reject(self, ticket: int, reason: str) -> None:
        """Drop a ready group and count why."""
        self._entry(ticket, State.READY)
        del self.entries[ticket]
        self.counts[f"rejected/{reason}"] += 1

    def age(self, ticket: int, version: int) -> int:
        """Updates between the oldest sampled token of a ready group and `version`; 0 when nothing was sampled."""
        oldest = self._entry(ticket, State.READY).version
        return 0 if oldest is None else age(oldest, version)

    def ready(self) -> list[int]:
        """Tickets that can be taken, oldest first."""
        return self._in(State.READY)

    def open(self) -> list[int]:
        """Tickets nobody writes yet, oldest first."""
        return self._in(State.OPEN)

    def take(self, count: int, version: int, max_age: int | None = None) -> list[int]:
        """The oldest `count` ready tickets not over the bound, gone from the ledger; [] while there are fewer."""
        fit = [t for t in self.ready() if max_age is None or self.age(t, version) <= max_age][:count]
        if len(fit) < count:
            return []
        for ticket in fit:
            del self.entries[ticket]
        self.counts["taken"] += count
        return fit

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [[t, e.prompt, e.attempt, str(e.state), e.version] for t, e in self.entries.items()]
        return {"next_ticket": self.next_ticket, "entries": rows, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Claimed tickets come back open: their writers are gone."""
        self.next_ticket = int(state["next_ticket"])
        self.entries = {int(t): Entry(int(p), int(a), State(s), v) for t, p, a, s, v in state["entries"]}
        self.counts = Counter(state["counts"])
        for ticket in self._in(State.CLAIMED):
            self.release(ticket)

    def _in(self, state: State) -> list[int]:
        return [t for t, e in self.entries.items() if e.state is state]

    def _entry(self, ticket: int, state: State) -> Entry:
        entry = self.entries.get(ticket)
        if entry is None or entry.state is not state:
            raise ValueError(f"ledger: ticket {ticket} is {entry.state if entry else 'gone'}, not {state}")
        return entry
