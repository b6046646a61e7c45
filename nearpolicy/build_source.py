"""The composer's part for sources: from `rollout.*` to who writes which part of a response."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from nearpolicy.config import Config, Cut as CutConfig, FunctionCut, LengthRatioCut, RandomRatioCut, RelayRollout
from nearpolicy.layers import to_tree
from nearpolicy.protocols import RolloutSource, Sampler, SamplingParams
from nearpolicy.sources.cuts import Cut, length_ratio, random_ratio, top_entropy
from nearpolicy.sources.demonstrations import DemonstrationSource, Encoder
from nearpolicy.sources.fresh import FreshSource
from nearpolicy.sources.relay import RelayOptions, RelaySource
from nearpolicy.tasks.functions import load_function
from nearpolicy.tasks.rows import Task
from nearpolicy.tasks.solutions import Solutions, of_column, of_file, of_task
from nearpolicy.trainer.rundir import RESUMABLE_CHANGES


def build_cut(cut: CutConfig) -> Cut:
    """The cut of `rollout.cut`.

    Raises:
        UsageError: an import path that leads to no function.
    """
    if isinstance(cut, LengthRatioCut):
        return length_ratio(cut.ratio)
    if isinstance(cut, RandomRatioCut):
        return random_ratio(cut.low, cut.high)
    if isinstance(cut, FunctionCut):
        function: Any = load_function(cut.function, "rollout.cut.function")
        return functools.partial(function, **cut.options)
    return top_entropy(cut.k, at=cut.at)


def check_source(config: Config, task: Task) -> None:
    """Refuse what needs no model: cuts that lead to no function, demonstrations that are not there.

    Raises:
        UsageError, DataError: as `build_source`.
    """
    if isinstance(config.rollout, RelayRollout):
        build_cut(config.rollout.cut)
    if config.rollout.demonstrations is not None:
        _solutions(config, task)


def build_source(
    config: Config, *, task: Task, sampler: Sampler, params: SamplingParams, tokenizer: Any, vocabulary: int, folder: Path
) -> RolloutSource:
    """The source of `rollout.*`.

    Args:
        vocabulary: ids that the model knows.
        folder: where a seed bank may lie.
    Raises:
        UsageError: a cut that leads to no function, or a task without demonstrations.
        DataError: a file of solutions that cannot be read.
    """
    r = config.rollout
    source: RolloutSource = FreshSource(sampler, params)
    if isinstance(r, RelayRollout):
        shared = r.prefix == "shared_in_group"
        seeds = 1 if shared else max(1, r.relayed)
        options = RelayOptions(
            refresh=r.refresh, relayed=r.relayed, shared=shared, groups=r.stored_groups, chunk=max(1, r.max_rows // seeds),
            entropy=not isinstance(r.cut, LengthRatioCut | RandomRatioCut),
        )  # fmt: skip
        source = RelaySource(sampler, params, build_cut(r.cut), options=options, folder=folder, run=fingerprint(config))
    if r.demonstrations is None:
        return source
    encoder = Encoder(
        encode=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        eos_id=tokenizer.eos_token_id if tokenizer.eos_token_id in params.eos_ids else min(params.eos_ids),
        eos_ids=params.eos_ids, vocabulary=vocabulary, max_tokens=params.max_tokens,
        unknown_id=getattr(tokenizer, "unk_token_id", None),
    )  # fmt: skip
    return DemonstrationSource(
        source, solutions=_solutions(config, task), encoder=encoder, per_group=r.demonstrations.per_group, params=params,
        decode=lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False),
    )  # fmt: skip


def _solutions(config: Config, task: Task) -> Solutions:
    d = config.rollout.demonstrations
    assert d is not None
    if d.path is not None:
        return of_file(d.path, d.column)
    return of_task(task) if d.column is None else of_column(d.column)


def fingerprint(config: Config) -> str:
    """What names a run among others: every key that may not change when it is gone on with."""
    flat: dict[str, Any] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            elif not f"{prefix}{key}".startswith(RESUMABLE_CHANGES):
                flat[prefix + key] = value

    walk(to_tree(config), "")
    return hashlib.blake2b(json.dumps(flat, sort_keys=True).encode(), digest_size=8).hexdigest()
