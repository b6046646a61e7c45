"""The contract of `protocols.Verifier`, for any verifier: total, ordered, four outcomes, closable.

A case names a verifier (a context manager), an item it scores as right, one it scores lower, and one without the columns it needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearpolicy.protocols import ScoreItem, Verifier
from nearpolicy.rollout import Outcome, Score


@dataclass(frozen=True, kw_only=True)
class Case:
    """A verifier and what it makes of three items."""

    make: Callable[[], Any]
    right: ScoreItem
    wrong: ScoreItem
    unanswerable: ScoreItem
    right_reward: float = 1.0


def well_formed(score: Score) -> bool:
    """A reward if and only if the outcome is SCORE; a reason, in one line, for everything else."""
    return (
        math.isfinite(score.reward) == (score.outcome is Outcome.SCORE)
        and (math.isnan(score.reward) or math.isfinite(score.reward))
        and bool(score.message) == (score.outcome is not Outcome.SCORE)
        and "\n" not in score.message
    )


def check_scores(verifier: Verifier, case: Case) -> None:
    """Right is above wrong; each by its own name in `parts`."""
    right, wrong = verifier.score([case.right, case.wrong])
    assert right.outcome is wrong.outcome is Outcome.SCORE, (right, wrong)
    assert right.reward == case.right_reward > wrong.reward
    assert right.parts
    assert right.parts.keys() == wrong.parts.keys()


def check_one_score_an_item_in_order(verifier: Verifier, case: Case) -> None:
    """Any number of items, none among them; the same whatever stands around an item."""
    assert verifier.score([]) == []
    pattern = [case.right, case.wrong, case.wrong, case.right, case.wrong] * 30
    alone = {id(i): verifier.score([i])[0] for i in (case.right, case.wrong)}
    scores = verifier.score(pattern)
    assert scores == [alone[id(i)] for i in pattern]
    assert all(map(well_formed, scores))


def check_failure_is_no_reward(verifier: Verifier, case: Case) -> None:
    """An item it cannot judge is an error and NaN, not 0, and leaves its neighbours alone."""
    before, bad, after = verifier.score([case.right, case.unanswerable, case.right])
    assert bad.outcome is Outcome.ERROR
    assert well_formed(bad)
    assert before.reward == after.reward == case.right_reward


def check_total_over_strange_completions(verifier: Verifier, case: Case) -> None:
    """Nothing a model may write raises."""
    strange = ["", " ", "\x00", "\ud800", "9" * 10_000, "(" * 5_000, "1/0", "\\frac{1}{0}", "nan", "inf", "\u0663", "x" * 100_000]
    items = [ScoreItem(prompt=case.right.prompt, completion=text, columns=case.right.columns) for text in strange]
    scores = verifier.score(items)
    assert len(scores) == len(items)
    assert all(map(well_formed, scores))
    assert not any(s.reward == case.right_reward for s in scores)


def check_close(case: Case) -> None:
    """Idempotent; what is scored afterwards is an error, not an exception."""
    with case.make() as verifier:
        verifier.close()
        verifier.close()
        (score,) = verifier.score([case.right])
        assert score.outcome is Outcome.ERROR
        assert well_formed(score)
