"""Programs judged per second: `python -m bench.sandbox [--seconds 10] [--repeat 3] [--workers 2]`.

The shipped problems' own solutions and a wrong program for each, half and half, through a pool of reward workers: what a run pays for a code
reward, sandboxes and all. One number for each kind of test, and one for all in turn.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.common import Range, bound_verdict, table
from nearpolicy.protocols import ScoreItem
from nearpolicy.tasks.code import code_task
from nearpolicy.tasks.pool import RewardPool
from nearpolicy.tasks.programs import read_tests
from nearpolicy.tasks.sandbox import unavailable

TARGET = 20.0
"""Programs a second on two cores."""
WRONG = "```python\nimport sys\nprint(len(sys.stdin.read()))\n```"


def items_by_kind() -> dict[str, list[ScoreItem]]:
    """Kind of test -> responses, right and wrong in turn."""
    out: dict[str, list[ScoreItem]] = {"scripts": [], "functions": [], "assertions": []}
    rows = code_task().train
    for i in range(len(rows)):
        row = rows.row(i)
        tests = read_tests(row.columns, row.prompt)
        kind = "assertions" if tests.checks else "functions" if tests.function else "scripts"
        out[kind] += [ScoreItem(prompt=row.prompt, completion=c, columns=row.columns) for c in (row.columns["demonstration"], WRONG)]
    out["all"] = [item for group in zip(*out.values(), strict=True) for item in group]
    return out


def rate(pool: RewardPool, items: list[ScoreItem], seconds: float) -> float:
    """Items scored a second, over at least `seconds`. Raises RuntimeError when a right one does not get 1, or a wrong one 0."""
    begun, done = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for item, score in zip(items, pool.score(items), strict=True):
            if score.reward != float(item.completion != WRONG):
                raise RuntimeError(f"scored {score}")
        done += len(items)
    return done / (time.monotonic() - begun)


def measure(*, seconds: float, repeat: int, workers: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Rates by kind.

    Raises:
        RuntimeError: there is no sandbox here.
    """
    if unavailable():
        raise RuntimeError(f"no sandbox: {unavailable()}")
    items, rates = items_by_kind(), {}
    spec = code_task().reward
    with RewardPool(spec, workers=workers, deadline_s=20) as pool:
        pool.score(items["all"])
        for kind, own in items.items():
            rates[kind] = [rate(pool, own, seconds) for _ in range(repeat)]
            say(f"{kind}: {Range.of(rates[kind]).text()} programs/s")
    return {"rates": rates, "workers": workers, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}


def render(result: Mapping[str, Any]) -> str:
    """Markdown."""
    rows = [(kind, Range.of(rates).text(), len(rates)) for kind, rates in result["rates"].items()]
    return "\n".join([
        f"{result['workers']} workers, {result['cores']} cores; three to four tests a program, half of the programs wrong.", "",
        table(("tests", "programs/s, median (min-max)", "runs"), rows), "",
        f"- all: target at least {TARGET:g} programs/s: **{bound_verdict(result['rates']['all'], at_least=TARGET)}**",
    ])  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="least time of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    print(render(measure(seconds=args.seconds, repeat=args.repeat, workers=args.workers)))


if __name__ == "__main__":
    main()
