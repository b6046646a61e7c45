"""Rollout workers are killed at random moments while an asynchronous schedule runs: no group may be lost, none trained on twice.

    python -m bench.kills --kills 50

Workers are processes on a local Ray that sample, slowly, from published tables of logits; ledger, schedule and scoring are the real ones. After each
batch every row is checked: whole groups, tickets never seen before, and each token's log-prob under the table of the version it carries.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nearpolicy.protocols import SamplingParams, ScoreItem
from nearpolicy.rollout import Batch, Outcome, Prompt, Score
from nearpolicy.schedule.asynchronous import AsyncOptions, AsyncSchedule
from nearpolicy.schedule.pooled import PooledSampler, SharedWorkers
from nearpolicy.schedule.ray import RayOptions, RayWorkers
from nearpolicy.sources.fresh import FreshSource

V, TOKENS, GROUP, PROMPTS = 8, 24, 4, 6
STEP_S = 0.004
"""Seconds a token takes: a submission of three groups takes about a second."""


def table(version: int) -> torch.Tensor:
    """The weights of a version."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(version), dtype=torch.float64)


class SlowFactory:
    """Makes samplers from tables that take their time."""

    def __call__(self) -> Any:
        """In the worker."""
        from nearpolicy.testing.fakes import FakeSampler

        class Slow(FakeSampler):
            def sample(self, requests: Any, n: int, params: Any, *, interrupt: Any = None, refresh: Any = None) -> Any:
                def stop() -> bool:
                    time.sleep(STEP_S)
                    return interrupt is not None and interrupt()

                return super().sample(requests, n, params, interrupt=stop, refresh=refresh)

        return Slow(table(0))


class Judge:
    """Implements `Verifier`."""

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """By length."""
        return [Score(reward=float(len(item.completion) % 3), outcome=Outcome.SCORE) for item in items]

    def close(self) -> None:
        """Nothing."""


class Killer(threading.Thread):
    """Kills random workers with -9 at random moments of their lives."""

    def __init__(self, workers: RayWorkers, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.workers, self.kills, self.done = workers, kills, 0
        self.random = random.Random(seed)
        self.stop = threading.Event()

    def run(self) -> None:
        """Until `kills` are done."""
        gone: set[int] = set()
        while self.done < self.kills and not self.stop.is_set():
            alive = [w.pid for w in self.workers._workers if w.pid is not None and w.pid not in gone]
            if not alive:
                time.sleep(0.01)
                continue
            time.sleep(self.random.uniform(0, 1.5))
            pid = self.random.choice(alive)
            gone.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.done += 1


def check(batch: Batch, seen: set[int]) -> None:
    """Raise AssertionError for rows that are doubled, torn or mislabelled."""
    groups = Counter(batch.group_B.tolist())
    assert len(groups) == PROMPTS, groups
    assert set(groups.values()) == {GROUP}, groups
    assert not seen & groups.keys(), f"trained on twice: {seen & groups.keys()}"
    seen.update(groups)
    for b in range(len(batch)):
        (at,) = np.nonzero(batch.response_mask_BT[b].numpy())
        ids, versions = batch.token_BT[b].numpy(), batch.version_BT[b].numpy()
        for t in at:
            want = torch.log_softmax(table(int(versions[t])), 1)[ids[t - 1], ids[t]]
            assert abs(float(want) - float(batch.logp_behavior_BT[b, t])) < 1e-5, (b, t)


def run(kills: int, *, workers: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What became of it; raises when a group was lost, doubled or torn."""
    options = RayOptions(workers=workers, cpus=0, gpus=0.0, groups=PROMPTS // workers, keep=True, wait_s=120.0, address=None, store_mb=128,
                         restarts=kills)  # fmt: skip
    ray_workers = RayWorkers(SlowFactory(), options=options)
    shared = SharedWorkers(ray_workers)
    version = [0]
    schedule = AsyncSchedule(
        AsyncOptions(prompts=PROMPTS, group_size=GROUP, baseline="mean", normalize_std=False, dynamic_sampling=False, max_redraws=3,
                     max_tokens=TOKENS, overlong_buffer=None, mask_truncated=False, sync_every=2, max_age=4, over_age="wait", wait_s=120.0),
        workers=shared, source=FreshSource(PooledSampler(shared, wait_s=120.0), SamplingParams(max_tokens=TOKENS, eos_ids=frozenset({0}), seed=seed)),
        verifier=Judge(), prompt_at=lambda k: Prompt(id=str(k), token_P=np.array([1 + k % (V - 1)]), text=""),
        weights=lambda: {"logits": table(version[0])}, annotate=lambda batch: batch,
    )  # fmt: skip
    killer, seen, began, after = Killer(ray_workers, kills, seed), set[int](), time.perf_counter(), 0
    try:
        while after < 3:
            batch = schedule.next(version[0])
            check(batch, seen)
            version[0] += 1
            if version[0] == 1:
                killer.start()
            after += killer.done >= kills
            if version[0] % 20 == 0:
                say(f"update {version[0]}: {killer.done} kills, {schedule.ledger.counts['released']} groups sampled again")
        lost = set(range(schedule.ledger.next_ticket)) - seen - schedule.ledger.entries.keys()
        assert not lost, f"lost: {lost}"
        assert schedule.ledger.counts["released"] > 0 or not kills
        return {"kills": killer.done, "updates": version[0], "groups": len(seen), "sampled_again": schedule.ledger.counts["released"],
                "lost": len(lost), "doubled": 0, "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip
    finally:
        killer.stop.set()
        schedule.close()


def main() -> int:
    """Kill, check, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from bench import kills  # by its name, so that workers find the class that makes their samplers

    found = kills.run(args.kills, workers=args.workers, seed=args.seed, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
