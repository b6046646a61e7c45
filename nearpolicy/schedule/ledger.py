"""The one state machine behind every schedule: which group is wanted, being written, ready, trained on. Plain integers only.

The law of this module: a ticket is admitted once and leaves once, by being taken or rejected; nothing is taken twice, and nothing is
taken over the age bound. A version is the number of optimizer updates in the published weights.

With a bound, a group has a deadline: the last update that may take it, its oldest version plus the bound. While a group is written its
version is not known yet; the version that was published when it was claimed bounds it from below.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
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
    """Times the group was sampled before, in vain; part of its randomness key."""
    state: State = State.OPEN
    version: int | None = None
    """Oldest version among its sampled tokens; None while unfinished, or when nothing was sampled."""
    started: int | None = None
    """Published version when it was claimed: no token of it can be older. None where nobody says."""
    drops: int = 0
    """Times the group was rejected for its age and opened again."""
    difficulty: int | None = None
    """Bin of the group's mean reward, once ready."""
    duration: int | None = None
    """Bin of the time it took to write, once ready."""


class Ledger:
    """Tickets in order of admission.

    Verbs: `admit -> claim -> finish -> take`, or `reject(reason)` once ready; `release` opens a claimed ticket again, `expire` ready ones that
    are over the age bound.
    Every verb on a ticket in another state is a `ValueError`: that is a fault of ours, never of a user.
    """

    def __init__(self) -> None:
        self.next_ticket = 0
        self.entries: dict[int, Entry] = {}
        self.counts: Counter[str] = Counter()
        """Groups by what became of them: `released`, `taken` and `rejected/<reason>`, the last two also by `/difficulty/<bin>` and
        `/duration/<bin>`."""
        self._index: dict[State, list[int]] = {state: [] for state in State}

    def admit(self, prompt: int) -> int:
        """A new ticket for this prompt cursor."""
        ticket = self.next_ticket
        self.next_ticket += 1
        self.entries[ticket] = Entry(prompt)
        self._index[State.OPEN].append(ticket)
        return ticket

    def claim(self, limit: int | None = None, version: int | None = None) -> list[int]:
        """The oldest open tickets, now claimed by a writer that holds at least the weights of `version`."""
        tickets = self._index[State.OPEN][:limit]
        del self._index[State.OPEN][: len(tickets)]
        for ticket in tickets:
            entry = self.entries[ticket]
            entry.state, entry.started = State.CLAIMED, version
            insort(self._index[State.CLAIMED], ticket)
        return tickets

    def release(self, ticket: int) -> None:
        """Give a claimed ticket back: its writer died. It will be sampled with fresh noise."""
        entry = self._entry(ticket, State.CLAIMED)
        self._move(ticket, entry, State.OPEN)
        entry.attempt, entry.started = entry.attempt + 1, None
        self.counts["released"] += 1

    def finish(self, ticket: int, oldest_version: int | None, *, difficulty: int | None = None, duration: int | None = None) -> None:
        """The group is complete and scored. `difficulty` and `duration` are bins that it is counted under when it leaves."""
        entry = self._entry(ticket, State.CLAIMED)
        if oldest_version is not None and entry.started is not None and oldest_version < entry.started:
            raise ValueError(f"ledger: ticket {ticket} came with version {oldest_version}, claimed under {entry.started}")
        self._move(ticket, entry, State.READY)
        entry.version, entry.difficulty, entry.duration = oldest_version, difficulty, duration

    def reject(self, ticket: int, reason: str) -> None:
        """Drop a ready group and count why."""
        self._leave([ticket], f"rejected/{reason}")

    def expire(self, version: int, max_age: int) -> list[int]:
        """Reject the ready groups that no update from `version` on may take, for their age: their tickets are open again, to be sampled with
        fresh noise, and the entry carries the count. A ticket keeps its prompt, so that what is stored under tickets stays right."""
        entries = self.entries
        gone = [t for t in self._index[State.READY] if (oldest := entries[t].version) is not None and oldest + max_age < version]
        for ticket in gone:
            entry = entries[ticket]
            self._count("rejected/over_age", entry)
            self._move(ticket, entry, State.OPEN)
            entry.attempt, entry.drops = entry.attempt + 1, entry.drops + 1
            entry.version = entry.started = entry.difficulty = entry.duration = None
        return gone

    def age(self, ticket: int, version: int) -> int:
        """Updates between the oldest sampled token of a ready group and `version`; 0 when nothing was sampled."""
        oldest = self._entry(ticket, State.READY).version
        return 0 if oldest is None else age(oldest, version)

    def ready(self) -> list[int]:
        """Tickets that can be taken, oldest first."""
        return list(self._index[State.READY])

    def open(self) -> list[int]:
        """Tickets nobody writes yet, oldest first."""
        return list(self._index[State.OPEN])

    def claimed(self) -> list[int]:
        """Tickets that are being written, oldest first."""
        return list(self._index[State.CLAIMED])

    def count(self, state: State) -> int:
        """Tickets in this state."""
        return len(self._index[state])

    def room(self, count: int, version: int, *, published: int, max_age: int, late_count: bool = True) -> int:
        """Groups that may be admitted besides those outstanding, so that updates of `count` groups each can take all of them in time: those of the
        updates that the published weights may serve, (published + max_age + 1 - version) * count, less the outstanding ones.

        Args:
            late_count: False leaves out `late` ones.
        """
        outstanding = len(self.entries) - (0 if late_count else self.late(version, max_age))
        return (published + max_age + 1 - version) * count - outstanding

    def late(self, version: int, max_age: int) -> int:
        """Claimed tickets that no update from `version` on may take if they hold a token of the weights they were claimed under."""
        return sum(1 for t in self._index[State.CLAIMED] if (since := self.entries[t].started) is not None and since + max_age < version)

    def take(self, count: int, version: int, max_age: int | None = None) -> list[int]:
        """The oldest `count` ready tickets not over the bound, gone from the ledger; [] while there are fewer."""
        fit = [t for t in self._index[State.READY] if max_age is None or self.age(t, version) <= max_age][:count]
        if len(fit) < count:
            return []
        self._leave(fit, "taken")
        return fit

    def take_in_time(self, count: int, version: int, max_age: int) -> list[int]:
        """As `take`, in the order of deadlines, and so that no group, ready or being written, will ever be over the bound.

        [] while the `count` most urgent ready tickets leave more behind than later updates can take in time: with R(d) outstanding groups of
        deadline <= d, at most (d - version) * count of them may stay. That can be kept up for as long as at most (published + max_age + 1 -
        version) * count groups are outstanding whenever one is claimed.
        """
        entries = self.entries
        due = []
        for ticket in self._index[State.READY]:
            entry = entries[ticket]
            oldest = entry.version
            if oldest is None:  # nothing was sampled: it is never too old, and goes in its turn
                due.append((version if entry.started is None else entry.started + max_age, ticket))
            elif (deadline := oldest + max_age) >= version:
                due.append((deadline, ticket))
        if len(due) < count:
            return []
        due.sort()
        left = Counter(d for d, _ in due[count:])
        left.update(started + max_age for t in self._index[State.CLAIMED] if (started := entries[t].started) is not None)
        behind = 0
        for deadline in sorted(left):
            behind += left[deadline]
            if behind > max(deadline - version, 0) * count:
                return []
        fit = sorted(ticket for _, ticket in due[:count])
        self._leave(fit, "taken")
        return fit

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            [t, e.prompt, e.attempt, str(e.state), e.version, e.started, e.drops, e.difficulty, e.duration] for t, e in sorted(self.entries.items())
        ]
        return {"next_ticket": self.next_ticket, "entries": rows, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Claimed tickets come back open: their writers are gone."""
        self.next_ticket = int(state["next_ticket"])
        self.entries = {int(t): Entry(int(p), int(a), State(s), *rest) for t, p, a, s, *rest in state["entries"]}
        self.counts = Counter(state["counts"])
        self._index = {state: [t for t, e in self.entries.items() if e.state is state] for state in State}
        for ticket in self.claimed():
            self.release(ticket)

    def _leave(self, tickets: Iterable[int], how: str) -> None:
        for ticket in tickets:
            entry = self._entry(ticket, State.READY)
            self._drop(ticket, State.READY)
            del self.entries[ticket]
            self._count(how, entry)

    def _count(self, how: str, entry: Entry) -> None:
        self.counts[how] += 1
        if entry.difficulty is not None:
            self.counts[f"{how}/difficulty/{entry.difficulty}"] += 1
        if entry.duration is not None:
            self.counts[f"{how}/duration/{entry.duration}"] += 1

    def _move(self, ticket: int, entry: Entry, to: State) -> None:
        self._drop(ticket, entry.state)
        entry.state = to
        insort(self._index[to], ticket)

    def _drop(self, ticket: int, state: State) -> None:
        index = self._index[state]
        del index[bisect_left(index, ticket)]

    def _entry(self, ticket: int, state: State) -> Entry:
        entry = self.entries.get(ticket)
        if entry is None or entry.state is not state:
            raise ValueError(f"ledger: ticket {ticket} is {entry.state if entry else 'gone'}, not {state}")
        return entry
