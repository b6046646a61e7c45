"""LUFFY: worked solutions as rows of each group, beside what a policy writes (arXiv 2504.14945, section 3).

A demonstration has version -1 and no behaviour log-probs; it is scored by the verifier like the rest and shares its group's advantage baseline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.errors import DataError
from nearpolicy.metrics import Metrics
from nearpolicy.protocols import Order, RolloutSource, SamplingParams, Tickets, Upcoming
from nearpolicy.rollout import Array, Prompt, Rollout, Source, StopReason

Solution = str | Sequence[int]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Solutions as response ids, the end-of-sequence token last, checked against vocabulary and response limit."""

    encode: Callable[[str], Sequence[int]]
    """Text -> ids, no special tokens."""
    eos_id: int
    """Appended where the ids do not end in one of `eos_ids`."""
    eos_ids: frozenset[int]
    vocabulary: int
    """Ids the model knows: 0 to vocabulary - 1."""
    max_tokens: int
    unknown_id: int | None = None
    """What the tokenizer gives for text that it has no token for."""

    def ids(self, solution: Solution, owner: str) -> Array:
        """int64 [T], T >= 1.

        Raises:
            DataError: neither text nor ids, an empty one, one longer than the limit, text that the tokenizer has no token for, or an id outside
                the vocabulary.
        """
        if isinstance(solution, str):
            ids = [int(i) for i in self.encode(solution)]
            if self.unknown_id in ids and self.unknown_id not in self.eos_ids:
                raise DataError(f"{owner}: demonstration", got=f"{solution[:60]!r}, with text that the tokenizer knows no token for",
                                expected="text of the model's vocabulary", do="Mend or drop the row.")  # fmt: skip
        elif isinstance(solution, Iterable) and all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in solution):
            ids = [int(i) for i in solution]
        else:
            raise DataError(f"{owner}: demonstration", got=repr(solution)[:60], expected="a text or a list of token ids", do="Mend the row.")
        if not ids:
            raise DataError(f"{owner}: demonstration", got="an empty one", expected="at least one token", do="Fill or drop the row.")
        if bad := [i for i in ids if not 0 <= i < self.vocabulary]:
            raise DataError(f"{owner}: demonstration", got=f"token id {bad[0]}", expected=f"0 to {self.vocabulary - 1}, the model's vocabulary",
                            do="Encode it with this model's tokenizer, or give it as text.")  # fmt: skip
        if ids[-1] not in self.eos_ids:
            ids.append(self.eos_id)
        if len(ids) > self.max_tokens:
            raise DataError(f"{owner}: demonstration", got=f"{len(ids)} tokens with the end-of-sequence token",
                            expected=f"at most rollout.max_tokens = {self.max_tokens}", do="Raise the limit, or drop the row.")  # fmt: skip
        return np.asarray(ids, dtype=np.int64)


class DemonstrationSource:
    """Implements `RolloutSource`: another source writes the first n - per_group members of each group, the last ones are demonstrations.

    Args:
        inner: writes the policy's members.
        solutions: prompt -> its worked solutions, at least `per_group`; the first ones are taken.
        encoder: makes ids of them.
        decode: ids -> text, special tokens skipped.
        params: the temperature that the rows are scored at, and whether rows carry entropies.
    """

    def __init__(
        self, inner: RolloutSource, *, solutions: Callable[[Prompt], Sequence[Solution]], encoder: Encoder, decode: Callable[[Array], str],
        per_group: int, params: SamplingParams,
    ) -> None:  # fmt: skip
        self.inner, self.solutions, self.encoder, self.decode = inner, solutions, encoder, decode
        self.per_group, self.params = per_group, params

    @property
    def tokens_decoded(self) -> int:
        """Those of the inner source."""
        return self.inner.tokens_decoded

    def begin(self, version: int, upcoming: Upcoming) -> None:
        """As the inner source."""
        self.inner.begin(version, upcoming)

    def order(self, tickets: Tickets, n: int) -> Order:
        """What the inner source orders for the policy's members.

        Raises:
            DataError: a prompt without enough demonstrations, or one that cannot be trained on.
        """
        for _, prompt, _ in tickets:
            self.check(prompt)
        return self.inner.order(tickets, n - self.per_group)

    def deliver(self, tickets: Tickets, n: int, flat: Sequence[Rollout]) -> list[list[Rollout]]:
        """What the inner source delivers, demonstrations last."""
        return self._beside(tickets, n, self.inner.deliver(tickets, n - self.per_group, flat))

    def write(self, tickets: Tickets, n: int) -> list[list[Rollout]]:
        """n rollouts for each ticket, grouped, demonstrations last.

        Raises:
            DataError: as `order`.
        """
        for _, prompt, _ in tickets:
            self.check(prompt)
        return self._beside(tickets, n, self.inner.write(tickets, n - self.per_group))

    def _beside(self, tickets: Tickets, n: int, groups: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        return [[*group, *self._demonstrations(ticket, prompt, n)] for group, (ticket, prompt, _) in zip(groups, tickets, strict=True)]

    def check(self, prompt: Prompt) -> list[Array]:
        """The ids of this prompt's demonstrations.

        Raises:
            DataError: too few of them, or one that cannot be trained on.
        """
        owner = f"prompt {prompt.id!r}"
        found = self.solutions(prompt)
        if len(found) < self.per_group:
            raise DataError(owner, got=f"{len(found)} demonstrations", expected=f"at least rollout.demonstrations.per_group = {self.per_group}",
                            do="Add solutions, lower per_group, or drop the row.")  # fmt: skip
        return [self.encoder.ids(solution, owner) for solution in found[: self.per_group]]

    def metrics(self) -> Metrics:
        """Those of the inner source."""
        return self.inner.metrics()

    def state_dict(self) -> dict[str, Any]:
        """That of the inner source: demonstrations are a function of the prompt."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.inner.load_state_dict(state)

    def _demonstrations(self, ticket: int, prompt: Prompt, n: int) -> list[Rollout]:
        return [
            Rollout(
                prompt_id=prompt.id,
                group=ticket,
                sample=n - self.per_group + i,
                prompt_P=np.asarray(prompt.token_P, dtype=np.int64),
                response_T=token_T,
                logp_behavior_T=None,
                version_T=np.full(len(token_T), -1, dtype=np.int64),
                # Missing, not zero: nothing was sampled. A batch has the column for all rows or none.
                entropy_T=np.full(len(token_T), np.nan, dtype=np.float32) if self.params.entropy else None,
                temperature=self.params.temperature,
                stop=StopReason.EOS,
                source=Source.DEMONSTRATION,
                text=self.decode(token_T),
            )
            for i, token_T in enumerate(self.check(prompt))
        ]
