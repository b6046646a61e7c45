"""Rewards for training that needs none: rows without an answer are left unscored instead of failing."""

from collections.abc import Sequence

from nearpolicy.protocols import ScoreItem, Verifier
from nearpolicy.rollout import Outcome, Score

NO_ANSWER = Score(reward=float("nan"), outcome=Outcome.ABSTAIN, message="the row has no answer")


class OptionalAnswers:
    """`protocols.Verifier` that asks another one about the responses whose row has an answer; the others get no reward (abstain)."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score an item, in order."""
        known = [item for item in items if "answer" in item.columns]
        found = iter(self._verifier.score(known) if known else [])
        return [next(found) if "answer" in item.columns else NO_ANSWER for item in items]

    def close(self) -> None:
        """End the workers; idempotent."""
        self._verifier.close()
