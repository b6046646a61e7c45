"""The composer's part for schedules: from `schedule.*` and `ray.*` to when which data is trained on, and to the workers that write it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearpolicy.build_sampler import worker_factory
from nearpolicy.check_schedule import groups_at_once
from nearpolicy.check_teacher import build_mixture, needed
from nearpolicy.config import AsyncSchedule as AsyncConfig, Config, RelayRollout, ReplaySchedule as ReplayConfig, SyncSchedule as SyncConfig
from nearpolicy.methods import Method
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.protocols import RolloutSource, Sampler, Schedule, Verifier
from nearpolicy.rollout import Array, Batch, Prompt, Rollout
from nearpolicy.sampler.continuation import InterruptibleSampler
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.schedule.asynchronous import AsyncOptions, AsyncSchedule
from nearpolicy.schedule.local import LocalWorkers
from nearpolicy.schedule.pooled import PooledSampler, SharedWorkers
from nearpolicy.schedule.ray import RayOptions, RayWorkers
from nearpolicy.schedule.replay import Recorder, ReplaySchedule
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
from nearpolicy.trainer.step import score_recorded, score_trained

RECORDING = "recording"
"""Folder of a run directory in which the batches lie that were trained on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a schedule is connected with."""

    policy: HFPolicy
    verifier: Verifier
    prompt_at: Callable[[int], Prompt]
    publish: Callable[[int], None]
    """Version -> the trainer's own sampler holds the policy's weights."""
    reference: HFPolicy | None = None
    teach: Callable[[Sequence[Rollout]], list[Array]] | None = None
    workers: SharedWorkers | None = None
    """Of an asynchronous run."""
    run: Path = Path()
    """The run directory."""
    say: Callable[[str], None] = print


def build_schedule(config: Config, chosen: Method, source: RolloutSource, wiring: Wiring) -> Schedule:
    """The schedule of `schedule.kind` on this source."""
    if isinstance(config.schedule, ReplayConfig):
        return ReplaySchedule(recording(config.schedule.path))
    inner = _sampled(config, config.schedule, chosen, source, wiring)
    if not config.schedule.record:
        return inner
    return Recorder(inner, wiring.run / RECORDING, limit_bytes=config.schedule.record_limit * 2**20, say=wiring.say)


def recording(path: str) -> Path:
    """The folder of a recording: `path` itself, or the one in this run."""
    inside = Path(path) / RECORDING
    return inside if inside.is_dir() else Path(path)


def _sampled(config: Config, s: SyncConfig | AsyncConfig, chosen: Method, source: RolloutSource, w: Wiring) -> Schedule:
    """A schedule that has its data written."""
    r = config.rollout
    given: dict[str, Any] = {
        "prompts": r.prompts, "group_size": r.group_size, "baseline": config.advantage.baseline,
        "normalize_std": config.advantage.normalize_std if config.advantage.normalize_std is not None else chosen.normalize_std,
        "dynamic_sampling": r.dynamic_sampling, "max_redraws": r.max_redraws, "max_tokens": r.max_tokens, "overlong_buffer": r.overlong_buffer,
        "mask_truncated": r.mask_truncated, "mask_prefix": isinstance(r, RelayRollout) and r.prefix_tokens == "mask",
        "needs_reward": chosen.needs_advantage,
    }  # fmt: skip
    ends: dict[str, Any] = {"source": source, "verifier": w.verifier, "prompt_at": w.prompt_at, "annotate": _columns(config, chosen, w),
                            "teach": w.teach}  # fmt: skip
    if isinstance(s, AsyncConfig):
        assert w.workers is not None, "made for every asynchronous run"
        options = AsyncOptions(**given, sync_every=s.sync_every, max_age=s.oldest, over_age=s.over_age, wait_s=s.wait_s)
        return AsyncSchedule(options, workers=w.workers, weights=w.policy.published_weights, **ends)
    return SyncSchedule(SyncOptions(**given, updates_per_rollout=s.updates_per_rollout), publish=w.publish, **ends)


def _columns(config: Config, chosen: Method, wiring: Wiring) -> Callable[[Batch], Batch]:
    """What adds the columns that the method needs of the trainer."""
    proximal = "logp_proximal" in needed(chosen, build_mixture(config))

    def annotate(batch: Batch) -> Batch:
        columns: dict[str, Any] = {}
        if config.routing.replay == "r2":
            recorded, batch = score_recorded(wiring.policy, batch)
            if proximal:
                columns["logp_proximal_BT"] = recorded
        elif proximal:
            columns["logp_proximal_BT"] = score_trained(wiring.policy, batch).to(batch.token_BT.device)
        if wiring.reference is not None:
            columns["logp_reference_BT"] = score_trained(wiring.reference, batch).to(batch.token_BT.device)
        return dataclasses.replace(batch, **columns)

    return annotate


@contextmanager
def rollout_workers(config: Config, policy: HFPolicy, folder: Path) -> Iterator[SharedWorkers | None]:
    """The workers of an asynchronous run, ended again however it ends; None for other schedules.

    Args:
        folder: of the model's architecture and tokenizer; its weights are replaced by what is published.

    Raises:
        UsageError: Ray is not installed, no cluster at the address, fewer CPUs or GPUs than the workers need.
    """
    s = config.schedule
    if not isinstance(s, AsyncConfig):
        yield None
        return
    if s.in_process:
        capacity = -(-(s.oldest + 1) * config.rollout.prompts // s.workers)
        yield SharedWorkers(LocalWorkers([_interruptible(config, folder, policy) for _ in range(s.workers)], capacity=capacity))
        return
    options = RayOptions(
        workers=s.workers, cpus=s.worker_threads, gpus=s.worker_gpus, groups=groups_at_once(config), keep=s.in_flight == "keep",
        reuse_kv=s.reuse_kv, wait_s=s.wait_s,
        address=config.ray.address, store_mb=config.ray.object_store_mb, restarts=config.ray.restarts,
    )  # fmt: skip
    size = sum(p.numel() * p.element_size() for p in policy.model.parameters()) / 2**20
    workers = SharedWorkers(RayWorkers(worker_factory(config, folder, policy), options=options, weights_mb=size))
    try:
        yield workers
    finally:
        workers.close()


def _interruptible(config: Config, folder: Path, policy: HFPolicy) -> InterruptibleSampler:
    made = worker_factory(config, folder, policy)()
    assert isinstance(made, TorchSampler), "refused before"
    return made


def pooled(config: Config, workers: SharedWorkers) -> Sampler:
    """A sampler over the workers, for what a source writes ahead."""
    assert isinstance(config.schedule, AsyncConfig)
    return PooledSampler(workers, wait_s=config.schedule.wait_s)
