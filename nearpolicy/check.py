"""Refusing what cannot act, and the numbers that follow from a configuration. Reads no weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearpolicy.check_routing import refuse_routing
from nearpolicy.check_sampler import refuse_sampler
from nearpolicy.check_schedule import derived_schedule, schedule_warnings
from nearpolicy.check_teacher import build_mixture, reads_reference, refuse_teacher
from nearpolicy.config import Config, LengthRatioCut, RelayRollout, Rollout
from nearpolicy.config_base import MOST_RESPONSES
from nearpolicy.errors import UsageError
from nearpolicy.layers import to_toml, to_tree
from nearpolicy.methods import Method, method
from nearpolicy.sources.bank import bound_bytes

TYPICAL_PROMPT = 512
"""Prompt tokens that the memory estimate counts with, where the limit is higher."""
ROLLOUT_TOKEN_BYTES = 64
"""Kept for each response token of a rollout batch: id, log-prob, version and entropy as arrays, and again in the collated columns."""
ROLLOUT_BYTES = 4096
"""Kept for each response besides its tokens: its record, its share of the prompt and its text."""


def build_method(config: Config) -> Method:
    """The method with its options; `ratio.*` and the response limit are options of every row.

    Raises:
        UsageError: an unknown method or option, or values out of range.
    """
    options = dict(config.method.options)
    for key, value in (("denominator", config.ratio.denominator), ("ratio_scope", config.ratio.scope)):
        if value is not None:
            if key in options:
                raise UsageError(f"method.{key}", got=options[key], expected="it in one place", do=f"Set ratio.{key.removeprefix('ratio_')} alone.")
            options[key] = value
    chosen = method(config.method.name, **options)
    if chosen.options["aggregate"] == "constant" and chosen.options["max_length"] is None:
        chosen = chosen.with_options(max_length=config.rollout.max_tokens)
    return chosen


def refuse(config: Config, chosen: Method) -> list[str]:
    """Raise UsageError on settings that contradict; return warnings about settings that do nothing."""
    rollout, schedule, train = config.rollout, config.schedule, config.train
    rows, parts = rollout.prompts * rollout.group_size, schedule.updates_per_rollout
    if rollout.top_p < 1:
        raise UsageError("rollout.top_p", got=rollout.top_p, expected="1 in training", do="Importance weights need log-probs of the distribution "
                         "that was sampled; use eval.top_p for evaluation.")  # fmt: skip
    if rows > MOST_RESPONSES:
        raise UsageError("rollout.prompts x rollout.group_size", got=f"{rollout.prompts} x {rollout.group_size} = {rows} responses",
                         expected=f"at most {MOST_RESPONSES} responses in a rollout batch", do="Lower one of them.")  # fmt: skip
    if rows % parts:
        best = nearest_divisor(rows, parts)
        raise UsageError("schedule.updates_per_rollout", got=f"{parts} for {rollout.prompts} x {rollout.group_size} responses",
                         expected="a divisor of the rollout batch", do=f"Take {best}, or change rollout.prompts or rollout.group_size.")  # fmt: skip
    _refuse_sources(rollout, chosen)
    baseline = config.advantage.baseline
    if rollout.group_size == 1 and baseline != "none" and chosen.needs_advantage:
        raise UsageError("rollout.group_size", got=f"1 with advantage.baseline = {baseline!r}", expected="at least 2",
                         do="A group of one is its own baseline: every advantage is 0. Raise it, or set advantage.baseline=none.")  # fmt: skip
    if rollout.overlong_buffer is not None and rollout.overlong_buffer > rollout.max_tokens:
        raise UsageError("rollout.overlong_buffer", got=rollout.overlong_buffer, expected=f"at most rollout.max_tokens = {rollout.max_tokens}",
                         do="Lower it.")  # fmt: skip
    if rollout.dynamic_sampling and not chosen.needs_advantage:
        raise UsageError("rollout.dynamic_sampling", got=f"true with {chosen.name}", expected="a method that trains on rewards", do="Switch it off.")
    teacher_warnings = refuse_teacher(config, chosen, build_mixture(config))
    if train.warmup >= train.steps:
        raise UsageError("train.warmup", got=train.warmup, expected=f"less than train.steps = {train.steps}", do="Lower it.")
    warnings = teacher_warnings + schedule_warnings(config, chosen)
    if chosen.parts.kernel.demonstration is not None and rollout.demonstrations is None:
        warnings.append(f"no rollout.demonstrations: {chosen.name} then is the clipped ratio alone")
    if isinstance(rollout, RelayRollout):
        warnings += _relay_warnings(rollout)
        if config.ratio.scope is not None and chosen.parts.kernel.level == "token":
            warnings.append(f"ratio.scope does nothing with {chosen.name}: its ratios are those of single tokens")
    warnings += refuse_routing(config)
    warnings += refuse_sampler(config, chosen)
    warnings += _correction_warnings(config, chosen)
    if config.eval.every == 0 or config.task.heldout == 0:
        warnings.append("no evaluation during the run")
    if train.decay == "constant" and train.min_lr:
        warnings.append("train.min_lr does nothing with train.decay = constant")
    return warnings


def _refuse_sources(rollout: Rollout, chosen: Method) -> None:
    """Refuse relays and demonstrations that the group, the method or the disk cannot hold."""
    shown = rollout.demonstrations.per_group if rollout.demonstrations is not None else 0
    if shown >= rollout.group_size:
        raise UsageError("rollout.demonstrations.per_group", got=f"{shown} with rollout.group_size = {rollout.group_size}",
                         expected="fewer than the group", do="Lower it: the policy writes the other members.")  # fmt: skip
    if shown and chosen.parts.kernel.demonstration is None:
        raise UsageError("rollout.demonstrations", got=f"demonstration rows with method.name = {chosen.name}", expected="method.name = luffy",
                         do="Only luffy has a weight for tokens without behaviour log-probs.")  # fmt: skip
    if not isinstance(rollout, RelayRollout):
        return
    whole = isinstance(rollout.cut, LengthRatioCut) and rollout.cut.ratio == 1 and rollout.refresh > 1 and rollout.relayed > 0
    if whole and rollout.prefix_tokens == "mask":
        raise UsageError("rollout.prefix_tokens", got="mask with rollout.cut.ratio = 1", expected="tokens to train on in a relayed response",
                         do="Lower rollout.cut.ratio, or take rollout.prefix_tokens=train.")  # fmt: skip
    if whole and rollout.prefix == "shared_in_group" and rollout.relayed == rollout.group_size:
        raise UsageError("rollout.prefix", got="shared_in_group with rollout.cut.ratio = 1", expected="responses that differ inside a group",
                         do="A group would be one response, with advantage 0: lower rollout.cut.ratio, or take per_sample.")  # fmt: skip
    if rollout.relayed + shown > rollout.group_size:
        raise UsageError("rollout.relayed_per_group", got=rollout.relayed, expected=f"at most {rollout.group_size - shown} = rollout.group_size"
                         + (" - rollout.demonstrations.per_group" if shown else ""), do="Lower it, or raise rollout.group_size.")  # fmt: skip
    most = bound_bytes(rollout.stored_responses, rollout.max_tokens) / 2**20
    if most > rollout.bank_limit:
        raise UsageError("rollout.bank_limit", got=f"{rollout.bank_limit} MiB for a seed bank of up to {most:.0f} MiB", expected="room for a cycle",
                         do="Raise it, or lower rollout.refresh, rollout.prompts or rollout.max_tokens.")  # fmt: skip


def _correction_warnings(config: Config, chosen: Method) -> list[str]:
    """Corrections that have nothing to act on."""
    correction = chosen.options["correction"]
    if correction is None:
        return []
    if config.model.dtype == "float32" and config.sampler.kind == "torch" and not config.routing.sampler_noise:
        return [f"method.correction = {correction} cannot act: the sampler computes in float32 with the trainer's own weights, so proximal and "
                "behaviour log-probs agree up to rounding"]  # fmt: skip
    return []


def _relay_warnings(rollout: RelayRollout) -> list[str]:
    """Relays that keep nothing or everything, and a reserve that nothing draws from."""
    out = []
    if rollout.reserve != RelayRollout.model_fields["reserve"].default and not rollout.dynamic_sampling:
        out.append("rollout.reserve does nothing without rollout.dynamic_sampling: no group is rejected")
    if rollout.refresh == 1 or rollout.relayed == 0:
        key = "rollout.refresh = 1" if rollout.refresh == 1 else "rollout.relayed_per_group = 0"
        return [*out, f"{key}: nothing is relayed"]
    ratio = rollout.cut.ratio if isinstance(rollout.cut, LengthRatioCut) else None
    if ratio == 0:
        out.append("rollout.cut.ratio = 0: seeds are written and nothing of them is kept")
    if ratio == 1:
        out.append("rollout.cut.ratio = 1: stored responses are replayed as they are, nothing is written anew")
    return out


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted` (both >= 1), the smaller of two; at most `number` steps outwards from it."""
    start = min(wanted, number)
    return next(n for d in range(number) for n in (start - d, start + d) if n >= 1 and number % n == 0)


@dataclass(frozen=True, slots=True)
class Size:
    """Counts read from a model folder."""

    parameters: int
    layers: int
    kv_bytes_per_token: int
    vocabulary: int
    hidden: int


def model_size(folder: Path) -> Size:
    """From the safetensors headers and config.json alone. Raises UsageError when they cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parameters = 0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                parameters += sum(math.prod(tensors.get_slice(k).get_shape()) for k in tensors.keys())  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"model.path {folder}", got=str(error), expected="a Hugging Face folder", do="Check the path.") from None
    heads = int(config.get("num_attention_heads", config.get("n_head", 1)))
    hidden = int(config.get("hidden_size", config.get("n_embd", 0)))
    head_dim = int(config.get("head_dim") or hidden // heads)
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return Size(parameters, layers, 2 * layers * kv_heads * head_dim * 4, int(config.get("vocab_size", 0)), hidden)


def derived(config: Config, size: Size | None) -> dict[str, str]:
    """Mini-batch, tokens, age and memory, as text by name."""
    r, n = config.rollout, config.schedule.updates_per_rollout
    rows = r.prompts * r.group_size
    out = {
        "rollout batch": f"{r.prompts} prompts x {r.group_size} responses = {rows}",
        "mini-batch": f"{rows // n} responses" + ("" if (rows // n) % r.group_size == 0 else " (splits groups)"),
        "tokens per update": f"at most {rows // n * r.max_tokens} response tokens",
        "worst-case age": f"{n - 1} updates" + (", more for groups left over by dynamic sampling" if r.dynamic_sampling else ""),
        "rollout batches": f"{math.ceil(config.train.steps / n)} ({config.train.steps} updates)",
        "responses": f"{math.ceil(config.train.steps / n) * rows}",
    }
    out |= derived_schedule(config)
    if isinstance(r, RelayRollout) and r.stored_responses:
        out["relay cycle"] = f"{r.refresh} rollout batches = {r.refresh * n} updates; {r.relayed} of {r.group_size} in each group relayed"
        out["seed bank"] = f"{r.stored_responses} responses, at most {bound_bytes(r.stored_responses, r.max_tokens) / 2**20:.1f} MiB on disk"
        out["worst-case age of a prefix"] = f"{r.refresh * n - 1} updates"
    if size:
        out |= _memory(config, size)
    return out


def _memory(config: Config, size: Size) -> dict[str, str]:
    r = config.rollout
    lora = config.model.lora
    trained = size.parameters if lora is None else min(size.parameters, 7 * 2 * size.layers * lora.rank * max(size.hidden, 1))
    weights = 4 * size.parameters
    state = 12 * trained  # gradient and two Adam moments
    reference = weights if reads_reference(config, build_method(config), build_mixture(config)) else 0
    rows, row_tokens = r.prompts * r.group_size, r.max_tokens + min(config.task.max_prompt_tokens, TYPICAL_PROMPT)
    cache = size.kv_bytes_per_token * min(r.max_rows, rows) * row_tokens
    rollouts = rows * (ROLLOUT_BYTES + ROLLOUT_TOKEN_BYTES * r.max_tokens)
    # A micro-batch holds the token budget, or one row that is longer than it; never more than the mini-batch.
    tokens = min(max(config.train.token_budget, row_tokens), rows // config.schedule.updates_per_rollout * row_tokens)
    # Per token and layer about 34 hidden-sized activations are kept without checkpointing (attention and MLP inputs), 2 with it.
    activations = tokens * size.layers * size.hidden * 4 * (2 if config.model.gradient_checkpointing else 34)

    def gb(n: float) -> str:
        return f"{n / 2**30:.2f} GiB"

    return {
        "parameters": f"{size.parameters:,}" + ("" if lora is None else f", about {trained:,} trained"),
        "memory (estimate)": f"{gb(weights + state + reference + cache + rollouts + activations)} = weights {gb(weights)}"
        + f" + gradient and optimizer {gb(state)}"
        + (f" + reference {gb(reference)}" if reference else "")
        + f" + cache {gb(cache)} + rollouts {gb(rollouts)} + activations {gb(activations)}",
    }


def describe_config(config: Config, chosen: Method, size: Size | None) -> str:
    """The resolved tree, the method's options and the derived numbers as text."""
    tree: dict[str, Any] = to_tree(config)
    tree["method"] = {"name": chosen.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in chosen.options.items() if v is not None}
    lines = [to_toml(tree), *(f"# {name}: {text}" for name, text in derived(config, size).items())]
    return "\n".join([*lines, *(f"# warning: {w}" for w in refuse(config, chosen))])
