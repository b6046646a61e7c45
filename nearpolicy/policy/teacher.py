"""Teachers: a model in this process, several routed by the data, and the comparison of vocabularies that comes before any of them is loaded.

A teacher scores token ids, so its ids must mean what the student's mean: the whole maps id -> text are compared. A server is in
`policy.teacher_server`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from nearpolicy.errors import CheckpointError, DataError, EngineError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import load_model, load_tokenizer
from nearpolicy.policy.quiet import quiet_transformers
from nearpolicy.protocols import Teacher
from nearpolicy.rollout import Array, Batch, Outcome, Rollout, Score, Scored, collate

_UNSCORED = Score(reward=float("nan"), outcome=Outcome.ABSTAIN)


class LocalTeacher:
    """`protocols.Teacher` on a model in this process.

    Rows are laid out and split as the student's are (`HFPolicy.plan`): with its dtype and token budget a model scores as it does when it is the
    student, to the last bit, provided that it is given the same rollouts in the same order.

    Args:
        policy: never trained.
        temperature: None scores each rollout at its own.
        name: in error messages.
    """

    def __init__(self, policy: HFPolicy, *, temperature: float | None = None, name: str = "teacher") -> None:
        self.policy, self.temperature, self.name = policy, temperature, name

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """Log-probs of the response tokens, float32 [T] for each rollout.

        Raises:
            EngineError: the device has no memory left.
        """
        if not rollouts:
            return []
        batch = self._at_temperature(as_batch(rollouts)).to(self.policy.device)
        out: list[Array] = [np.zeros(0, dtype=np.float32) for _ in rollouts]
        with memory_errors(self.name):
            for rows in self.policy.plan(batch):
                part = batch.rows(rows)
                logp_BT = self.policy.score(part).logp_BT.float().cpu()
                for row, logp_T, inside_T in zip(rows, logp_BT, part.response_mask_BT.cpu(), strict=True):
                    out[row] = logp_T[inside_T].numpy()
        return out

    def head(self, batch: Batch) -> Any:
        """States and output layer for the full vocabulary (`objective.full_kl`), without gradient."""
        with torch.no_grad(), memory_errors(self.name):
            return self.policy.head(self._at_temperature(batch))

    def _at_temperature(self, batch: Batch) -> Batch:
        return batch if self.temperature is None else replace(batch, temperature_B=torch.full_like(batch.temperature_B, self.temperature))


class RoutedTeacher:
    """Several teachers, each for the prompts that the data gives it.

    Args:
        route: prompt id -> name of its teacher.
    """

    def __init__(self, teachers: Mapping[str, Teacher], route: Mapping[str, str]) -> None:
        self.teachers, self.route = teachers, route

    def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """Each teacher gets its rollouts in one call, in order.

        Raises:
            DataError: a prompt without a teacher.
        """
        places: dict[str, list[int]] = {}
        for i, rollout in enumerate(rollouts):
            name = self.route.get(rollout.prompt_id)
            if name is None:
                raise DataError(f"prompt {rollout.prompt_id!r}", got="no teacher", expected=f"one of {', '.join(self.teachers)}",
                                do="Name one in the column of teacher.column.")  # fmt: skip
            places.setdefault(name, []).append(i)
        out: dict[int, Array] = {}
        for name, where in places.items():
            out.update(zip(where, self.teachers[name].score([rollouts[i] for i in where]), strict=True))
        return [out[i] for i in range(len(rollouts))]


def checked(teacher: Teacher) -> Callable[[Sequence[Rollout]], list[Array]]:
    """The teacher's `score`, refused unless it gives one finite log-prob for each response token.

    Raises (when called):
        EngineError: another number of rollouts or positions, NaN or infinite values; the prompt and position are named.
    """

    def score(rollouts: Sequence[Rollout]) -> list[Array]:
        scored = teacher.score(rollouts)
        if len(scored) != len(rollouts):
            raise EngineError("teacher", got=f"log-probs of {len(scored)} of {len(rollouts)} responses", expected="all of them",
                              do="The batch was not trained on; mend the teacher, then go on with --resume.")  # fmt: skip
        for rollout, logp_T in zip(rollouts, scored, strict=True):
            where = f"teacher: response {rollout.sample} to prompt {rollout.prompt_id!r}"
            if len(logp_T) != len(rollout.response_T):
                raise EngineError(where, got=f"{len(logp_T)} log-probs for {len(rollout.response_T)} response tokens", expected="one for each",
                                  do="The batch was not trained on; mend the teacher, then go on with --resume.")  # fmt: skip
            bad = np.flatnonzero(~np.isfinite(logp_T))
            if len(bad):
                raise EngineError(where, got=f"{logp_T[bad[0]]} at response token {bad[0]} (id {rollout.response_T[bad[0]]})",
                                  expected="finite log-probs", do="Try another dtype for it, and look at its weights.")  # fmt: skip
        return scored

    return score


def as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Rollouts as the columns that a model reads."""
    return collate([Scored(rollout=r, score=_UNSCORED) for r in rollouts], advantage_B=[0.0] * len(rollouts))


@contextmanager
def memory_errors(name: str) -> Iterator[None]:
    """No memory left on the device becomes one clear line (EngineError)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(name, got=f"no memory left ({str(error).splitlines()[0]})", expected="room for it beside the student",
                          do="Lower its token_budget, take dtype=bfloat16, or put it on a server of its own.") from error  # fmt: skip


def load_scorer(
    folder: Path, *, device: str, dtype: Literal["float32", "bfloat16"] | None, student: HFPolicy, token_budget: int, extra_rows: str = "refuse",
    name: str = "teacher",
) -> HFPolicy:  # fmt: skip
    """A fixed model that computes as the student does.

    Args:
        dtype: of the weights; None keeps float32 weights and the student's arithmetic.
        extra_rows: `drop` cuts the output layer to the student's rows.
    Raises:
        CheckpointError: as `load_model`.
        EngineError: it does not fit on the device.
    """
    compute = dtype or ("bfloat16" if student.bfloat16 else "float32")
    with memory_errors(name):
        model, tokenizer = load_model(folder, dtype=dtype or "float32", device=device)
        if extra_rows == "drop":
            _drop_rows(model, len(student.model.get_output_embeddings().weight))
        # Small vocabularies are summed another way where the output layer can have a gradient; nothing is tracked either way (no_grad).
        model.requires_grad_(student.model.get_output_embeddings().weight.requires_grad)
        return HFPolicy(
            model, tokenizer=tokenizer, dtype=compute, token_budget=token_budget, shared_prompts="auto" if student.shares_prompts else "off"
        )


def _drop_rows(model: Any, rows: int) -> None:
    """Leave the output rows beyond the student's out of the distribution; nothing is copied."""
    old = model.get_output_embeddings()
    if len(old.weight) <= rows:
        return
    new = nn.Linear(1, 1, bias=old.bias is not None)
    new.weight = nn.Parameter(old.weight[:rows].detach(), requires_grad=False)
    if old.bias is not None:
        new.bias = nn.Parameter(old.bias[:rows].detach(), requires_grad=False)
    new.in_features, new.out_features = old.in_features, rows
    model.set_output_embeddings(new)


def output_rows(folder: Path) -> int:
    """Rows of the model's output layer, from config.json."""
    from transformers import AutoConfig

    with quiet_transformers():
        return int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size)


def compare_vocabularies(student: Path, other: Path, *, what: str, extra_rows: str = "refuse") -> None:
    """Compare the maps id -> text of two model folders in full; reads tokenizers and config.json, no weights.

    Ids without a text (padding of the output layer) may exist where both models have them.

    Args:
        what: names the other model in messages (`teacher.path`).
        extra_rows: `drop` accepts a longer output layer, which `load_scorer` then cuts.
    Raises:
        CheckpointError: a folder that cannot be read; another map, with the first id that differs; an output layer that is shorter than the
            student's, or longer with `extra_rows = refuse`.
    """
    own, its = ({int(i): text for text, i in load_tokenizer(folder).get_vocab().items()} for folder in (student, other))
    differ = sorted(i for i in own.keys() | its.keys() if own.get(i) != its.get(i))
    if differ:
        first = differ[0]
        shown = [f"{side} {names[first]!r}" if first in names else f"{side} nothing" for side, names in (("student", own), (what, its))]
        raise CheckpointError(
            f"{what} {other}: vocabulary", got=f"{len(differ)} of {len(own.keys() | its.keys())} ids that differ; the first is id {first}: "
            + ", ".join(shown), expected="the student's vocabulary, id for id",
            do="Log-probs of token ids cannot be compared between them: take a model of the same tokenizer.",
        )  # fmt: skip
    rows, wanted = output_rows(other), output_rows(student)
    if rows < wanted:
        raise CheckpointError(f"{what} {other}: output layer", got=f"{rows} rows for a student of {wanted}", expected="a row for every id",
                              do="The student can write ids that it has no probability for: take another model.")  # fmt: skip
    if rows > wanted and extra_rows == "refuse":
        raise CheckpointError(
            f"{what} {other}: output layer", got=f"{rows} rows for {len(its)} tokens and a student of {wanted} rows",
            expected="as many rows as the student", do="Set extra_rows=drop for it: its distribution is then taken over the student's rows.",
        )  # fmt: skip
