"""Operations of the ledger: `python -m bench.ledger` prints one line; `python -m bench.run --only ledger` writes it into RESULTS.md.

An operation is one verb on one ticket. The life of a group is admit, claim, finish, take; one in sixteen is released and claimed again, one in
sixteen rejected for want of a signal, and every update asks which groups are over the bound. 64 groups an update, bound 8: about 600 tickets in
the ledger, complete in random order.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.common import bound_verdict
from nearpolicy.schedule.ledger import Ledger

PROMPTS, BOUND, TARGET = 64, 8, 100_000


def life(updates: int, seed: int) -> tuple[int, float]:
    """(operations, seconds) of so many updates."""
    draw, ledger, operations = random.Random(seed), Ledger(), 0
    shuffled = [draw.random() for _ in range(4096)]
    start = time.perf_counter()
    for version in range(updates):
        room = (BOUND + 1) * PROMPTS - len(ledger.entries)
        for k in range(room):
            ledger.admit(k)
        operations += room + len(ledger.claim(None, version))
        claimed = sorted(ledger.claimed(), key=lambda t: shuffled[t % 4096])
        for place, ticket in enumerate(claimed):
            if place % 16 == 0:
                ledger.release(ticket)
            elif place % 4 or len(claimed) < PROMPTS:
                ledger.finish(ticket, version, difficulty=ticket % 5, duration=3)
            else:
                continue
            operations += 1
            if place % 16 == 1:
                ledger.reject(ticket, "no_signal")
                operations += 1
        operations += len(ledger.claim(None, version))
        operations += len(ledger.expire(version, BOUND))
        taken = ledger.take_in_time(PROMPTS, version, BOUND)
        while not taken:
            for ticket in ledger.claimed():
                ledger.finish(ticket, version, difficulty=ticket % 5, duration=3)
                operations += 1
            taken = ledger.take_in_time(PROMPTS, version, BOUND)
        operations += len(taken)
    return operations, time.perf_counter() - start


def measure(*, quick: bool, pairs: int | None, model: str | None, device: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Operations a second of some runs; model and device do not matter."""
    rates = []
    for repeat in range(pairs or (2 if quick else 7)):
        operations, seconds = life(200 if quick else 1000, repeat)
        rates.append(operations / seconds)
        say(f"run {repeat + 1}: {rates[-1]:.0f} operations/s ({operations} operations)")
    return {"rates": rates}


def render(result: Mapping[str, Any]) -> str:
    """One line."""
    rates = result["rates"]
    return (f"- {statistics.median(rates):,.0f} ledger operations a second [{min(rates):,.0f}-{max(rates):,.0f}], {len(rates)} runs; "
            f"target at least {TARGET:,}: **{bound_verdict(rates, at_least=TARGET)}**")  # fmt: skip


if __name__ == "__main__":
    print(render(measure(quick=False, pairs=None, model=None, device="cpu", say=lambda text: None)))
