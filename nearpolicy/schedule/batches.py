"""What every schedule does with scored groups: advantages, masks, the teacher's column, ages, and what is measured of them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nearpolicy.diagnostics.rollouts import rollout_metrics
from nearpolicy.errors import DataError, EngineError
from nearpolicy.metrics import Layout, Max, Mean, Metrics, Sum, Table
from nearpolicy.objective.advantages import group_advantages, overlong_penalty
from nearpolicy.objective.position import relayed
from nearpolicy.rollout import Array, Batch, Rollout, Scored, collate
from nearpolicy.schedule.ledger import age

Teach = Callable[[Sequence[Rollout]], list[Array]]
"""The teacher's log-probs of each response token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How groups are drawn and turned into advantages."""

    prompts: int
    group_size: int
    baseline: str
    normalize_std: bool
    dynamic_sampling: bool
    max_redraws: int
    max_tokens: int
    overlong_buffer: int | None
    mask_truncated: bool
    needs_reward: bool = True
    """False: every response is trained on, scored or not, and advantages are 0 (the method makes its own)."""
    mask_prefix: bool = False
    """Leave the tokens of a relayed prefix out of the loss."""


def to_batch(options: BatchOptions, scored: Sequence[Scored], teach: Teach | None) -> tuple[Batch, Metrics]:
    """The batch of these whole groups, and what was measured on the way.

    Raises:
        EngineError: not one response has a reward, where the method needs them.
    """
    o = options
    advantage_B, metrics = _advantages(o, scored) if o.needs_reward else ([0.0] * len(scored), {})
    train = [not (o.needs_reward and math.isnan(s.score.reward)) and not (o.mask_truncated and s.rollout.truncated) for s in scored]
    batch = collate(scored, advantage_B=advantage_B, train_B=train)
    if o.mask_prefix:
        batch = replace(batch, mask_BT=batch.mask_BT & ~relayed(batch.response_mask_BT, batch.prefix_length_B))
    if teach is not None:
        start = time.perf_counter()
        batch = _taught(batch, scored, teach)
        metrics["time/teacher_s"] = Sum(time.perf_counter() - start)
    return batch, metrics


def drawn_metrics(options: BatchOptions, drawn: Sequence[Scored]) -> Metrics:
    """What all responses look like that were scored for a batch, those of rejected groups included; nothing without any."""
    if not drawn:
        return {}
    metrics = rollout_metrics(drawn)
    if not options.needs_reward and all(math.isnan(s.score.reward) for s in drawn):
        return {name: value for name, value in metrics.items() if not name.startswith("reward/")}
    return metrics


def oldest_version(group: Sequence[Rollout]) -> int | None:
    """Of all tokens sampled for the group; None when nothing was."""
    return min((v for r in group if (v := r.oldest_version) is not None), default=None)


def has_signal(scored: Sequence[Scored]) -> bool:
    """Whether a group's rewards differ."""
    rewards = [s.score.reward for s in scored if not math.isnan(s.score.reward)]
    return bool(rewards) and max(rewards) - min(rewards) > 0


def without_signal(kept: int, options: BatchOptions, rejected: int, redraws: str) -> DataError:
    """Dynamic sampling has given up."""
    return DataError(
        "rollout.dynamic_sampling", got=f"{kept} groups with a signal after {redraws} ({rejected} of {rejected + kept} groups had equal rewards)",
        expected=f"{options.prompts} groups",
        do="Take prompts that are neither always right nor always wrong, raise rollout.max_redraws, or switch dynamic sampling off.",
    )  # fmt: skip


def ages(batch: Batch, version: int) -> Metrics:
    """Age of each response (its oldest token sampled for its request; demonstrations have none), and of relayed prefixes by token."""
    prefix_BT, age_B = relayed(batch.response_mask_BT, batch.prefix_length_B), _age_B(batch, version)
    out: Metrics = {"stale/age_mean": Mean(age_B.sum(), len(age_B))}
    if len(age_B):
        out["stale/age_max"] = Max(age_B.max())
    if bool(prefix_BT.any()):
        out["relay/prefix_age"] = Mean(age(batch.version_BT[prefix_BT], version).sum(), prefix_BT.sum())
    return out


AGES = 33
"""Bins of the age table: 0, 1, ... 31 updates, and older."""
AGE_LAYOUT = Layout(rows=("responses",), axes={"age": slice(0, AGES)}, reads={})
"""How many responses have which age."""


def age_table(batch: Batch, version: int) -> Table:
    """Responses of the batch by age, demonstrations left out."""
    return Table(torch.bincount(_age_B(batch, version).clamp(0, AGES - 1), minlength=AGES).double()[None], AGE_LAYOUT)


def _age_B(batch: Batch, version: int) -> torch.Tensor:
    own_BT = batch.response_mask_BT & ~relayed(batch.response_mask_BT, batch.prefix_length_B)
    return age(batch.version_BT.masked_fill(~own_BT, version).amin(1), version)[~batch.off_policy_B]


def mixed(scored: Sequence[Scored]) -> Mean:
    """Share of the responses whose tokens were sampled by more than one version."""
    versions = [len(np.unique(s.rollout.version_T[s.rollout.prefix_length :])) for s in scored]
    return Mean(sum(v > 1 for v in versions), len(versions))


def _advantages(o: BatchOptions, scored: Sequence[Scored]) -> tuple[Sequence[float] | torch.Tensor, Metrics]:
    reward = torch.tensor([s.score.reward for s in scored], dtype=torch.float32)
    if bool(reward.isnan().all()):
        why = next((s.score.message for s in scored if s.score.message), "no message")
        raise EngineError("reward", got=f"no score for any of {len(scored)} responses ({why})", expected="numbers", do="Mend the reward function.")
    if o.overlong_buffer is not None:
        length = torch.tensor([len(s.rollout.response_T) for s in scored])
        reward = (reward + overlong_penalty(length, max_length=o.max_tokens, buffer=o.overlong_buffer)).float()
    group = torch.tensor([s.rollout.group for s in scored])
    baseline = None if o.baseline == "none" else o.baseline
    adv = group_advantages(reward, group, baseline=baseline, normalize_std=o.normalize_std)
    return adv.advantage_B, {
        "reward/no_signal_frac": Mean(float(adv.no_signal_groups), float(adv.num_groups)),
        "reward/floored_std": Sum(float(adv.floored_groups)),
    }


def _taught(batch: Batch, scored: Sequence[Scored], teach: Teach) -> Batch:
    """The teacher's column on rows with a trained token; zeros, which nothing reads, on the others."""
    live_B = batch.mask_BT.any(1)
    found = teach([s.rollout for s, live in zip(scored, live_B.tolist(), strict=True) if live])
    column_BT = torch.zeros_like(batch.logp_behavior_BT)
    if found:
        column_BT[batch.response_mask_BT & live_B[:, None]] = torch.from_numpy(np.concatenate(found)).float()
    return replace(batch, logp_teacher_BT=column_BT)
