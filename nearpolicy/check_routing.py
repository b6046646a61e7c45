"""Routing replay in a configuration: refused where there are no experts or where it cannot act, and what its records take."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.config import Config
from nearpolicy.errors import UsageError
from nearpolicy.policy.routing import RECORD_BYTES

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True, slots=True)
class Experts:
    """Read from a model's config.json."""

    layers: int
    """Layers with experts (L)."""
    experts: int
    """Experts in each (E)."""
    top_k: int
    """Experts of a token (k)."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the record of one context token."""
        return self.layers * self.top_k * RECORD_BYTES


def experts_in(folder: Path) -> Experts | None:
    """What config.json says; None for a model without experts, or a folder that cannot be read (which others report)."""
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config = config.get("text_config") or config
    experts = next((int(config[key]) for key in _COUNTS if config.get(key)), 0)
    if not experts:
        return None
    layers, dense = int(config.get("num_hidden_layers", 0)), set(config.get("mlp_only_layers") or ())
    dense |= set(range(int(config.get("first_k_dense_replace") or 0)))
    step = int(config.get("decoder_sparse_step") or 1)
    sparse = [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]
    return Experts(len(sparse), experts, next((int(config[key]) for key in _TOP_K if config.get(key)), 1))


def refuse_routing(config: Config) -> list[str]:
    """Raise UsageError on replay that cannot act; return warnings. Reads nothing."""
    replay, noise = config.routing.replay, config.routing.sampler_noise
    if replay == "r2" and config.schedule.updates_per_rollout == 1:
        raise UsageError("routing.replay", got=f"r2 with one update for each rollout batch (schedule.kind = {config.schedule.kind})",
                         expected="several updates, or r3", do="r2 keeps the experts of the first update's weights in the later ones: raise "
                         "schedule.updates_per_rollout, take r3, or switch it off.")  # fmt: skip
    if replay == "r3" and config.rollout.demonstrations is not None:
        raise UsageError("routing.replay", got="r3 with rollout.demonstrations", expected="r2, or off",
                         do="No sampler ran the demonstrations, so nothing recorded their experts: take r2.")  # fmt: skip
    if replay == "r3" and getattr(config.schedule, "reuse_kv", False):
        raise UsageError("routing.replay", got="r3 with schedule.reuse_kv", expected="one of them",
                         do="Experts are recorded under the weights that wrote the suffix; an old cache holds those of older ones.")  # fmt: skip
    if noise and getattr(config.schedule, "reuse_kv", False):
        raise UsageError("routing.sampler_noise", got=f"{noise:g} with schedule.reuse_kv", expected="one of them",
                         do="The error belongs to one version, and a reused cache lives through several.")  # fmt: skip
    for key, wanted in (("replay", replay == "r3"), ("sampler_noise", bool(noise))):
        if wanted and config.sampler.kind != "torch":
            raise UsageError(f"routing.{key}", got=f"{getattr(config.routing, key)} with sampler.kind = {config.sampler.kind}",
                             expected="sampler.kind = torch", do="Only the embedded sampler's routers can be reached"
                             + ("; r2 records in the trainer and works with every sampler." if key == "replay" else "."))  # fmt: skip
    if noise:
        return [f"routing.sampler_noise = {noise:g}: the sampler's routers are made worse on purpose"]
    return []


def refuse_without_experts(config: Config, folder: Path) -> None:
    """Refuse routing options for a model without experts.

    Raises:
        UsageError: routing.replay or routing.sampler_noise is set and config.json names no experts.
    """
    r = config.routing
    if (r.replay != "off" or r.sampler_noise) and (folder / "config.json").is_file() and experts_in(folder) is None:
        key = f"routing.replay = {r.replay}" if r.replay != "off" else f"routing.sampler_noise = {r.sampler_noise:g}"
        raise UsageError(f"model.path {folder}", got=f"a model without experts with {key}", expected="a mixture of experts",
                         do="Set routing.replay=off (and routing.sampler_noise=0), or train another model.")  # fmt: skip


def routing_facts(config: Config, folder: Path) -> list[str]:
    """Lines for `nearpolicy check`: what the records of a rollout batch take."""
    found = experts_in(folder)
    if found is None or config.routing.replay == "off":
        return []
    r = config.rollout
    rows, tokens = r.prompts * r.group_size, r.max_tokens + config.task.max_prompt_tokens - 1
    total = rows * tokens * found.token_bytes / 2**20
    return [f"routing records: {found.layers} layers x {found.top_k} of {found.experts} experts x {RECORD_BYTES} bytes = {found.token_bytes} bytes a "
            f"context token; at most {total:.1f} MiB for a rollout batch of {rows} responses"]  # fmt: skip
