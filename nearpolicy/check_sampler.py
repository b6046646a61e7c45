"""Refusing what the engine of `sampler.kind` cannot do, before anything is loaded."""

from nearpolicy.config import AsyncSchedule, Config, RelayRollout, TopEntropyCut, VllmEngine
from nearpolicy.errors import UsageError
from nearpolicy.methods import Method


def refuse_sampler(config: Config, chosen: Method) -> list[str]:
    """Raise UsageError on settings that the engine cannot serve; return warnings."""
    engine, schedule = config.sampler, config.schedule
    if not isinstance(engine, VllmEngine):
        return []
    by_entropy = isinstance(config.rollout, RelayRollout) and isinstance(config.rollout.cut, TopEntropyCut)
    wants = {
        "log.behavior_entropy": (config.log.behavior_entropy, "true", "vLLM gives no entropies"),
        "rollout.cut.kind": (by_entropy, "top_entropy", "vLLM gives no entropies"),
        "schedule.reuse_kv": (isinstance(schedule, AsyncSchedule) and schedule.reuse_kv, "true", "vLLM computes kept responses anew"),
    }
    for key, (found, got, why) in wants.items():
        if found:
            raise UsageError(key, got=f"{got} with sampler.kind = vllm", expected="another value, or sampler.kind = torch", do=f"Change it: {why}.")
    if isinstance(schedule, AsyncSchedule) and engine.server is not None and schedule.workers > 1:
        raise UsageError("schedule.workers", got=f"{schedule.workers} with one sampler.server", expected="1, or no sampler.server",
                         do="Workers would publish to the same engine: let each start its own.")  # fmt: skip
    if chosen.options["denominator"] == "behavior" and chosen.options["correction"] is None:
        return [f"sampler.kind = vllm computes otherwise than the trainer, and {chosen.name} takes its log-probs as they are: set "
                "ratio.denominator = proximal, or a method.correction, or look at mismatch/* first"]  # fmt: skip
    return []
