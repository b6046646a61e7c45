"""The composer's part for teachers: from `teacher.*`, `reference.*` and `distill.*` to what scores and what is mixed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearpolicy.check_teacher import build_mixture, reads_reference, scoring_models
from nearpolicy.config import Config, ScoringModel
from nearpolicy.errors import DataError
from nearpolicy.methods import Method
from nearpolicy.objective.full_kl import reverse_kl
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.teacher import LocalTeacher, RoutedTeacher, checked, compare_vocabularies, load_scorer
from nearpolicy.policy.teacher_server import ServerOptions, ServerTeacher
from nearpolicy.protocols import Teacher
from nearpolicy.rollout import Batch, Prompt
from nearpolicy.trainer.distill import FullSignal

Say = Callable[[str], None]
Folder = Callable[[str], Path]
"""A model's name or path -> its folder."""


def compare_all(config: Config, chosen: Method, student: Path, folder: Folder) -> None:
    """Compare every teacher's and the reference's vocabulary with the student's; reads no weights.

    Raises:
        CheckpointError: as `compare_vocabularies`, or a folder that is not there.
    """
    for key, scorer in scoring_models(config).items():
        assert scorer.path is not None, "refused before"
        compare_vocabularies(student, folder(scorer.path), what=f"{key}.path", extra_rows=scorer.extra_rows)
    if config.reference.path is not None and reads_reference(config, chosen, build_mixture(config)):
        compare_vocabularies(student, folder(config.reference.path), what="reference.path")


def route_of(config: Config, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Prompt id -> name of its teacher, for every training prompt.

    Raises:
        DataError: a row without the column, or with a value that no route has.
    """
    t = config.teacher
    assert t is not None
    out: dict[str, str] = {}
    for prompt in prompts:
        value = prompt.columns.get(t.column or "")
        if not isinstance(value, str) or value not in t.routes:
            raise DataError(f"prompt {prompt.id!r}: column {t.column}", got=repr(value), expected=" or ".join(map(repr, t.routes)),
                            do="Fill it, or add a route of that name under teacher.routes.")  # fmt: skip
        out[prompt.id] = value
    return out


def build_teacher(config: Config, policy: HFPolicy, prompts: Sequence[Prompt], *, folder: Folder, say: Say) -> Teacher | None:
    """The teacher of this run, loaded or asked for the first time.

    Args:
        prompts: every training prompt, for the routes.
    Raises:
        DataError: a prompt without a teacher.
        CheckpointError: weights that cannot be read.
        EngineError: a server that does not answer, or no memory for the model.
    """
    t = config.teacher
    if t is None:
        return None
    route = route_of(config, prompts) if t.column is not None else {}
    made = {key: _scorer(config, key, scorer, policy, folder, say) for key, scorer in scoring_models(config).items()}
    if t.column is None:
        return made["teacher"]
    return RoutedTeacher({name.removeprefix("teacher.routes."): teacher for name, teacher in made.items()}, route)


def _scorer(config: Config, key: str, scorer: ScoringModel, policy: HFPolicy, folder: Folder, say: Say) -> Teacher:
    assert scorer.path is not None and config.teacher is not None, "refused before"  # noqa: PT018
    budget = scorer.token_budget or config.train.token_budget
    if scorer.server is not None:
        options = ServerOptions(url=scorer.server, model=scorer.served_name, token_budget=budget, timeout=scorer.timeout, retries=scorer.retries)
        return ServerTeacher(options, say=say)
    loaded = load_scorer(folder(scorer.path), device=config.device, dtype=scorer.dtype, student=policy, token_budget=budget,
                         extra_rows=scorer.extra_rows, name=key)  # fmt: skip
    return LocalTeacher(loaded, temperature=config.teacher.temperature, name=key)


def full_signal(config: Config, teacher: Teacher | None) -> FullSignal | None:
    """The exact reverse KL where `teacher.signal` asks for it."""
    if config.teacher is None or config.teacher.signal == "token":
        return None
    assert isinstance(teacher, LocalTeacher), "refused before"

    def kl_BT(policy: HFPolicy, batch: Batch) -> Tensor:
        kl_N = reverse_kl(policy.head(batch), teacher.head(batch))
        out: Tensor = torch.zeros(batch.token_BT.shape, dtype=kl_N.dtype, device=kl_N.device)
        return out.masked_scatter(batch.response_mask_BT, kl_N)

    return kl_BT


def scores(teacher: Teacher | None) -> Any:
    """What the schedule asks for each rollout batch: checked log-probs, or None without a teacher."""
    return None if teacher is None else checked(teacher)
