"""Which tokens stand where stored responses were cut: the last token kept and the first one written anew, by cut strategy.

Thinking Seeds (arXiv 2601.21476) cuts at a share of the length or at a high-entropy token; what stands there says what a strategy asks the
current policy to decide again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nearpolicy.rollout import Batch, Source

MOST = 50
"""Tokens listed for each side of the cut, by falling frequency."""
SIDES = ("last_kept", "first_new")
"""The token on either side of the cut."""


class TruncationTokens:
    """Counts over the run: cut strategy -> side -> token id -> responses.

    A cut of 0 has no last kept token, and a response that ended inside its kept prefix no new one; both are counted as responses.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, Counter[int]]] = {}
        self._responses: Counter[str] = Counter()
        self._uncut: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def add(self, batch: Batch, strategy: str) -> None:
        """Count the relayed responses of a batch (each response of a rollout batch lies in exactly one of its mini-batches)."""
        for b, source in enumerate(batch.source_B):
            if source is not Source.RELAY:
                continue
            kept, prompt = int(batch.prefix_length_B[b]), int(batch.prompt_length_B[b])
            length = int(batch.response_mask_BT[b].sum())
            counts = self._counts.setdefault(strategy, {side: Counter() for side in SIDES})
            self._responses[strategy] += 1
            if kept > 0:
                counts["last_kept"][int(batch.token_BT[b, prompt + kept - 1])] += 1
            else:
                self._uncut[strategy] += 1
            if kept < length:
                counts["first_new"][int(batch.token_BT[b, prompt + kept])] += 1
            else:
                self._finished[strategy] += 1

    def table(self, decode: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
        """Cut strategy -> `{"responses", "uncut", "finished", side: [[token, id, count], ...]}`; {} without a relayed response.

        Args:
            decode: ids -> one piece of text each. Ties go to the smaller id.
        """
        out: dict[str, Any] = {}
        for strategy, sides in self._counts.items():
            out[strategy] = {
                "responses": self._responses[strategy],
                "uncut": self._uncut[strategy],
                "finished": self._finished[strategy],
            }
            for side, counts in sides.items():
                top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST]
                texts = decode([token for token, _ in top])
                out[strategy][side] = [[text, token, count] for text, (token, count) in zip(texts, top, strict=True)]
        return out

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain values."""
        return {
            strategy: {
                "responses": self._responses[strategy], "uncut": self._uncut[strategy], "finished": self._finished[strategy],
                **{side: [[token, n] for token, n in counts.items()] for side, counts in sides.items()},
            }
            for strategy, sides in self._counts.items()
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._counts = {s: {side: Counter(dict(own[side])) for side in SIDES} for s, own in state.items()}
        self._responses, self._uncut, self._finished = (
            Counter({s: own[name] for s, own in state.items()}) for name in ("responses", "uncut", "finished")
        )
