"""Schedules that cannot act with method and machine, and the numbers that follow from one. Starts nothing."""

import math

from nearpolicy.config import AsyncSchedule, Config, Ray, RelayRollout, ReplaySchedule, Rollout
from nearpolicy.errors import UsageError
from nearpolicy.methods import Method
from nearpolicy.schedule.workers import usable_cpus

IMPORTANCE_FREE = ("reinforce",)
"""Methods whose weight does not depend on who wrote a token."""


def schedule_warnings(config: Config, chosen: Method) -> list[str]:
    """Warnings about schedules that cannot work on this machine or with this method, and about settings that do nothing."""
    s = config.schedule
    if isinstance(s, AsyncSchedule):
        return _async_warnings(config, s, chosen)
    given = sorted(name for name in Ray.model_fields if getattr(config.ray, name) != Ray.model_fields[name].default)
    warnings = [f"ray.{name} does nothing with schedule.kind = {s.kind}" for name in given]
    if isinstance(s, ReplaySchedule):
        return [*warnings, "schedule.kind = replay: nothing is sampled for training; rollout.* and the seed of the noise do nothing"]
    if s.updates_per_rollout == 1 and _weighs_by_ratio(chosen) and not _trains_prefixes(config.rollout):
        warnings.append(f"updates_per_rollout = 1: every ratio is 1 up to rounding, so {chosen.name}'s weight cannot act")
    return warnings


def _trains_prefixes(rollout: Rollout) -> bool:
    """Prefixes that an older policy wrote have a ratio to it."""
    return isinstance(rollout, RelayRollout) and rollout.stored_responses > 0 and rollout.prefix_tokens == "train"


def _weighs_by_ratio(chosen: Method) -> bool:
    return chosen.needs_advantage and chosen.name not in IMPORTANCE_FREE and chosen.options["denominator"] == "behavior"


def _async_warnings(config: Config, s: AsyncSchedule, chosen: Method) -> list[str]:
    warnings: list[str] = []
    if s.in_process and config.sampler.kind != "torch":
        raise UsageError("schedule.in_process", got=f"true with sampler.kind = {config.sampler.kind}", expected="sampler.kind = torch",
                         do="Leave one of them out.")  # fmt: skip
    if s.oldest == 0:
        if _weighs_by_ratio(chosen):
            warnings.append(
                f"schedule.max_age = 0: every ratio is 1 up to rounding, so {chosen.name}'s weight cannot act; workers wait for the trainer"
            )
    elif chosen.name in IMPORTANCE_FREE:
        warnings.append(f"{chosen.name} has no ratio: nothing corrects groups of up to {s.oldest} updates")
    if chosen.options["correction"] is not None and s.oldest:
        warnings.append(f"method.correction = {chosen.options['correction']} acts on tokens of age 0 alone; older ones have their ratio to who wrote "
                        "them")  # fmt: skip
    most = (s.oldest + 1) * config.rollout.prompts
    if s.workers > most:
        warnings.append(f"schedule.workers = {s.workers}: at most {most} groups are in flight, so {s.workers - most} workers have nothing to write")
    if not s.in_process and config.ray.address is None and (wanted := s.workers * s.worker_threads) > (have := usable_cpus()):
        warnings.append(f"schedule.workers x schedule.worker_threads = {wanted} CPUs, and this machine has {have}: the run would be refused here")
    return warnings


def derived_schedule(config: Config) -> dict[str, str]:
    """Publications, ages and groups in flight of an asynchronous run, as text by name; nothing for other schedules."""
    s, r, steps = config.schedule, config.rollout, config.train.steps
    if not isinstance(s, AsyncSchedule):
        return {}
    most = (s.oldest + 1) * r.prompts
    at_once = groups_at_once(config)
    return {
        "publications": f"{math.ceil(steps / s.sync_every)}, after every {s.sync_every} updates",
        "worst-case age": f"{s.oldest} updates" + ("; what would be older is not begun" if s.over_age == "wait" else "; older groups are rejected"),
        "groups in flight or waiting": f"at most {most}, of {r.group_size} responses each",
        "workers": f"{s.workers} {_place(config, s)}, {at_once} groups at a time each, {s.worker_threads} threads"
        + (f", {s.worker_gpus:g} GPUs" if s.worker_gpus else ""),
    }  # fmt: skip


def _place(config: Config, s: AsyncSchedule) -> str:
    if s.in_process:
        return "in this process, between updates"
    return f"on the cluster at {config.ray.address}" if config.ray.address else "on this machine"


def groups_at_once(config: Config) -> int:
    """Groups that a worker decodes together: its share of an update's."""
    assert isinstance(config.schedule, AsyncSchedule)
    return math.ceil(config.rollout.prompts / config.schedule.workers)
