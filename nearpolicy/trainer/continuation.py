"""Continuation gap: from the student's own prefixes, how often does the teacher reach a right answer, and how often the student?

Each response that the student wrote is cut at a fraction of its length, and both models go on from the same prefix with the same noise (draws are
keyed by prompt, sample and position). success_S(f) and success_T(f) are paired by prompt and sample; the gap is their difference. Where prefixes
have drifted from what the teacher would write, its help fades as f grows (arXiv 2606.22600, the motivation of IW-OPD).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import UsageError
from nearpolicy.objective.position import length_cut
from nearpolicy.objective.stats import bootstrap_interval
from nearpolicy.protocols import Request, Sampler, SamplingParams, ScoreItem, Verifier
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Array, Prompt
from nearpolicy.sources.bank import beginning

SIDES = ("student", "teacher", "gap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Successes of both models from the student's prefixes."""

    fractions: tuple[float, ...]
    student_FPN: Array
    """1 where the student's continuation is right, 0 where it is not, NaN unscored; float64 [fractions, prompts, n]."""
    teacher_FPN: Array

    def values(self) -> list[dict[str, Any]]:
        """For each fraction the mean of student, teacher and gap, each with a 95 % interval by bootstrap over prompts.

        A prompt counts by the mean over those of its samples that both sides scored; NaN when none was.
        """
        out = []
        for f, student_PN, teacher_PN in zip(self.fractions, self.student_FPN, self.teacher_FPN, strict=True):
            both = ~(np.isnan(student_PN) | np.isnan(teacher_PN))
            known = both.any(1)
            row: dict[str, Any] = {"fraction": f, "prompts": int(known.sum())}
            for side, value_PN in zip(SIDES, (student_PN, teacher_PN, teacher_PN - student_PN), strict=True):
                mean_P = np.where(both, value_PN, 0.0).sum(1)[known] / both.sum(1)[known]
                interval = bootstrap_interval(torch.from_numpy(mean_P)) if len(mean_P) else None
                row[side] = [None, None, None] if interval is None else [interval.mean, interval.low, interval.high]
            out.append(row)
        return out


def continuation_gap(
    student: Sampler, teacher: Sampler, verifier: Verifier, prompts: Sequence[Prompt], params: SamplingParams, *, fractions: Sequence[float], n: int,
    full_marks: float = 1.0,
) -> Gap:  # fmt: skip
    """Sample n responses to each prompt from the student, cut each at every fraction, and have both models finish them.

    Args:
        fractions: shares of the response that stay, rounded half to even tokens; 0 compares whole responses, 1 nothing.
        full_marks: a response is right when its reward reaches this.
    Raises:
        UsageError: no prompts, n below 1, or a fraction outside [0, 1].
    """
    if not prompts or n < 1:
        raise UsageError(
            "continuation gap", got=f"{len(prompts)} prompts x {n}", expected="at least one of each", do="Raise task.heldout or samples."
        )
    if bad := [f for f in fractions if not 0 <= f <= 1]:
        raise UsageError("--fractions", got=bad[0], expected="shares of a response, 0 to 1", do="Write for example 0.1,...,0.9.")
    params = replace(params, stream=Stream.EVAL, entropy=False)
    written = student.sample([Request(ticket=i, prompt=p) for i, p in enumerate(prompts)], n, params)
    right: dict[Any, list[Array]] = {student: [], teacher: []}
    for number, f in enumerate(fractions):
        prefixes = [beginning(r, length_cut(len(r.response_T), f)) for r in written]
        requests = [Request(ticket=i, prompt=p, attempt=1 + number, prefixes=prefixes[i * n : (i + 1) * n]) for i, p in enumerate(prompts)]
        for sampler, found in right.items():
            rollouts = sampler.sample(requests, n, params)
            scores = verifier.score([ScoreItem.of(p, r) for p, r in zip([p for p in prompts for _ in range(n)], rollouts, strict=True)])
            reward_PN = np.array([s.reward for s in scores], dtype=np.float64).reshape(len(prompts), n)
            found.append(np.where(np.isnan(reward_PN), np.nan, reward_PN >= full_marks))
    shape = (len(fractions), len(prompts), n)
    student_FPN, teacher_FPN = (np.asarray(found, dtype=np.float64).reshape(shape) for found in (right[student], right[teacher]))
    return Gap(fractions=tuple(fractions), student_FPN=student_FPN, teacher_FPN=teacher_FPN)
