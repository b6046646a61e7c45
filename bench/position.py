"""What the tables by position cost: the sums of one update, in turns with whole updates of the same batch.

    python -m bench.position                    # SmolLM2-135M's shape and the tiny default
    python -m bench.position --only tiny

SmolLM2-135M has random weights (speed does not depend on them) and 64 responses of 16 tokens to prompts of 50, as in `bench/update.py`; the tiny
default has 64 responses of 38 tokens. One thread and its processor time, so that others on the machine count as little as they can. A share is the
time of the tables (one for every micro-batch, merged, and one in fifty times read as a row of the log) by that of the update that contains them;
targets: 1 % of the SmolLM2 update, 1 ms of the tiny one.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.common import Range, bound_verdict
from bench.update import _batch, _smollm2, _stepper
from nearpolicy.diagnostics.position import PositionLog, position_table
from nearpolicy.methods import policy_loss

SHAPES = {"smollm2": (64, 8, 50, 16, 49_152), "tiny": (64, 8, 26, 38, 32)}
"""Rows, group size, prompt and response tokens, vocabulary."""
EVERY = 50
"""Updates for each row of the log that carries tables (a run writes about fifty; this many updates are its shortest)."""


def _seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, *, repeat: int) -> dict[str, Any]:
    """Updates and tables of one shape in turns: processor seconds of both."""
    from nearpolicy.build import model_folder
    from nearpolicy.policy.loading import load_model

    batch, _ = _batch(*SHAPES[name])
    stepper = _stepper(_smollm2() if name == "smollm2" else load_model(model_folder("tiny"), dtype="float32", device="cpu")[0])
    with torch.no_grad():
        scores = stepper.policy.score(batch)
    columns = {"logp_behavior": batch.logp_behavior_BT, "advantage": batch.advantage_BT, "mask": batch.mask_BT, "off_policy": batch.off_policy_B}
    seen = policy_loss("vespo", logp=scores.logp_BT, **columns).seen
    parts = stepper.policy.plan(batch)
    log = PositionLog()

    def tables() -> None:
        for _ in parts:  # as many tables as the update has micro-batches; each is timed on the whole batch, which is no less work
            log.add(position_table(batch, seen, logp_BT=scores.logp_BT, entropy_BT=scores.entropy_BT, step=1))

    stepper.update(batch, 0)
    tables()
    log.take()
    update, own, read = [], [], []
    for i in range(repeat):
        update.append(_seconds(lambda i=i: stepper.update(batch, i)))  # type: ignore[misc]
        own += [_seconds(tables) for _ in range(20)]
        read.append(_seconds(log.take))
        log.add(position_table(batch, seen, logp_BT=scores.logp_BT, entropy_BT=scores.entropy_BT, step=1))
    median = sorted(own)[len(own) // 2]
    each = [(median + r / EVERY) for r in read]
    return {
        "micro_batches": len(parts), "update_ms": [1000 * s for s in update], "table_ms": [1000 * s for s in own], "row_ms": [1000 * s for s in read],
        "shares": [a / u for a, u in zip(each, update, strict=True)],
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; `--json` prints the samples as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SHAPES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in [args.only] if args.only else SHAPES:
        got = measure(name, repeat=args.repeat)
        share, table = Range.of(got["shares"]), Range.of(got["table_ms"])
        verdict = bound_verdict(got["table_ms"], at_most=1.0) if name == "tiny" else bound_verdict(got["shares"], at_most=0.01)
        print(
            f"{name}: tables {table.text('{:.2f}')} ms, a row of the log {Range.of(got['row_ms']).text('{:.2f}')} ms, update "
            f"{Range.of(got['update_ms']).text('{:.0f}')} ms ({got['micro_batches']} micro-batches): {share.text('{:.3%}')} of the update; target "
            f"{'1 ms' if name == 'tiny' else '1 %'}: {verdict}",
            flush=True,
        )
        if args.json:
            print(json.dumps(got))


if __name__ == "__main__":
    main()
