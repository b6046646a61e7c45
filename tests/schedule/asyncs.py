"""What the tests of asynchronous training share: tables of logits in place of models, published as weights; one table for each version."""

import numpy as np
import torch

from nearpolicy.protocols import SamplingParams
from nearpolicy.records import join_arrays, pack, split_arrays
from nearpolicy.rollout import Outcome, Prompt, Score
from nearpolicy.schedule.asynchronous import AsyncOptions, AsyncSchedule
from nearpolicy.schedule.local import LocalWorkers
from nearpolicy.schedule.pooled import PooledSampler, SharedWorkers
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.testing.fakes import FakeSampler

V, LIMIT, G = 6, 8, 3
PARAMS = SamplingParams(max_tokens=LIMIT, eos_ids=frozenset({0}), seed=1)
BASE = {
    "group_size": G, "baseline": "mean", "normalize_std": False, "dynamic_sampling": False, "max_redraws": 3, "max_tokens": LIMIT,
    "overlong_buffer": None, "mask_truncated": False,
}  # fmt: skip


def table(version):
    return torch.randn(V, V, generator=torch.Generator().manual_seed(version))


class Recording(FakeSampler):
    """A fake that keeps what it was asked: (tickets, attempts, n, params, version) of each call."""

    def __init__(self):
        super().__init__(table(0))
        self.asked = []

    def sample(self, requests, n, params, *, interrupt=None):
        self.asked.append(([r.ticket for r in requests], [r.attempt for r in requests], n, params, self.version))
        return super().sample(requests, n, params, interrupt=interrupt)


class Judge:
    """Scores by a plain function of the item; implements Verifier."""

    def __init__(self, judge=None):
        self.judge = judge or (lambda item: float(len(item.completion) % 3))

    def score(self, items):
        return [Score(reward=self.judge(i), outcome=Outcome.SCORE) for i in items]

    def close(self):
        pass


def prompt_at(cursor):
    return Prompt(id=str(cursor), token_P=np.array([1 + cursor % (V - 1)]), text="", columns={"answer": str(cursor)})


def build(*, workers=None, source=FreshSource, judge=None, prompts=4, sync_every=1, max_age=0, over_age="wait", wait_s=20.0, annotate=lambda b: b,
          clock=None, **changes):  # fmt: skip
    """An asynchronous schedule; `workers` is a `Workers`, or the arguments of `LocalWorkers` with a number of samplers."""
    at = [0]
    if workers is None or isinstance(workers, dict):
        some = {"count": 1, "capacity": 64} | (workers or {})
        workers = LocalWorkers([Recording() for _ in range(some.pop("count"))], **some)
    shared = SharedWorkers(workers)
    made = AsyncSchedule(
        AsyncOptions(prompts=prompts, sync_every=sync_every, max_age=max_age, over_age=over_age, wait_s=wait_s, **(BASE | changes)),
        workers=shared, source=source(PooledSampler(shared, wait_s=wait_s), PARAMS), verifier=Judge(judge), prompt_at=prompt_at,
        weights=lambda: {"logits": table(at[0])}, annotate=annotate, **({} if clock is None else {"clock": clock}),
    )  # fmt: skip
    made.at, made.inner = at, workers
    return made


def build_sync(*, source=FreshSource, judge=None, prompts=4, **changes):
    sampler = Recording()
    made = SyncSchedule(
        SyncOptions(prompts=prompts, updates_per_rollout=1, **(BASE | changes)), source=source(sampler, PARAMS), verifier=Judge(judge),
        prompt_at=prompt_at, publish=lambda version: sampler.load({"logits": table(version)}, version), annotate=lambda b: b,
    )  # fmt: skip
    made.sampler = sampler
    return made


def step(schedule, version):
    """The batch of update `version` (from 0); the policy's weights are the table of that version."""
    schedule.at[0] = version
    return schedule.next(version)


def gone_on(first, second):
    """`second` in the state of `first`, by way of what a checkpoint stores."""
    tree, arrays = split_arrays(pack(first.state_dict()), "s")
    second.load_state_dict(join_arrays(tree, arrays))
    return second


def same(a, b):
    """Two batches, bit for bit."""
    for name in ("token_BT", "logp_behavior_BT", "advantage_BT", "version_BT", "mask_BT", "reward_B", "group_B", "prefix_length_B"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.stop_B, a.source_B) == (b.stop_B, b.source_B)
