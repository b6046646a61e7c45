"""Stop strings: which token completes one, decoded only where a token can."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nearpolicy.rollout import Array

_REPLACEMENT = "�"  # what an incomplete UTF-8 sequence decodes to


class StopStrings:
    """Finds the response token with which one of `stops` is complete, special tokens shown.

    A token can complete a string only if its own text holds the string's last character, or a fragment of a character, so nearly all tokens
    are answered by a table over the vocabulary. For the rest the end of the response is decoded twice: with and without the token.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], vocab_size: int) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        last = {stop[-1] for stop in stops}
        texts = [self._decode([token]) for token in range(vocab_size)]
        # Some tokenizers drop a leading space of what they decode, so a space cannot be looked for in single tokens.
        everything = any(c.isspace() for c in last)
        self.may_complete_V: Array = np.array([everything or any(c in text for c in last) or _REPLACEMENT in text for text in texts], dtype=bool)
        # Four bytes a character at worst, one token a byte at worst, and one character cut in front.
        self._window = 4 * (max(len(stop) for stop in stops) + 1)

    def completed(self, response: Sequence[int]) -> bool:
        """True when the last token of `response` completes a stop string that was not there before it."""
        if not self.may_complete_V[response[-1]]:
            return False
        tail = list(response[-self._window :])
        before, after = self._decode(tail[:-1]), self._decode(tail)
        return any(after.count(stop) > before.count(stop) for stop in self._stops)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
