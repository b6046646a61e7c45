"""A teacher behind a vLLM server: prompt log-probs over its OpenAI-compatible HTTP interface.

    POST <server>/v1/completions {"model", "prompt": [[ids], ...], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    -> choices[i].prompt_logprobs = [null, {"<id>": {"logprob": ...}, ...}, ...], one entry for each prompt token

The token itself is always among the entries of its position. vLLM gives prompt log-probs of the unscaled distribution (temperature 1).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.errors import EngineError
from nearpolicy.jsonhttp import JsonServer
from nearpolicy.rollout import Array, Rollout

KEY = "NEARPOLICY_TEACHER_KEY"
"""Environment variable with the server's API key, where it wants one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to ask."""

    url: str
    model: str | None
    """None takes the first that the server lists."""
    token_budget: int
    """Tokens of one request; a longer sequence goes alone."""
    timeout: float
    """Seconds a request may take."""
    retries: int
    """Times a failed request is sent again."""


class ServerTeacher:
    """`protocols.Teacher` over HTTP; a request that fails is sent again as `JsonServer` says.

    Args:
        pause: waits that many seconds; tests replace it.
        say: hears of every request that is sent again.
    Raises:
        UsageError: a URL without http.
        EngineError: the server does not answer, or does not know the model.
    """

    def __init__(self, options: ServerOptions, *, pause: Callable[[float], None] = time.sleep, say: Callable[[str], None] = print) -> None:
        self.options = options
        self._http = JsonServer(
            name="teacher.server", url=options.url, timeout=options.timeout, retries=options.retries, key=KEY, pause=pause, say=say
        )
        listed = self._http.call("/v1/models")
        names = [str(m["id"]) for m in listed.get("data", []) if isinstance(m, dict) and "id" in m] if isinstance(listed, dict) else []
        if not names or (options.model is not None and options.model not in names):
            raise EngineError(f"teacher.server {self._http.base}", got=f"the models {', '.join(names) or '(none)'}",
                              expected=options.model or "a model", do="Set teacher.served_name to one of them.")  # fmt: skip
        self.model = options.model or names[0]

    def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """Log-probs of the response tokens; prompts without a response are not sent.

        Raises:
            EngineError: the last retry failed, the server refused the request, or its answer lacks a position or a token.
        """
        out: list[Array] = [np.zeros(0, dtype=np.float32) for _ in rollouts]
        sequences = {i: [*map(int, r.prompt_P), *map(int, r.response_T)] for i, r in enumerate(rollouts) if len(r.response_T)}
        for where in self._requests(sequences):
            body = {"model": self.model, "prompt": [sequences[i] for i in where], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
            choices = self._choices(self._http.call("/v1/completions", body), len(where))
            for i, choice in zip(where, choices, strict=True):
                out[i] = self._response(choice, sequences[i], len(rollouts[i].prompt_P), rollouts[i])
        return out

    def _requests(self, sequences: dict[int, list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        load = 0
        for i, tokens in sequences.items():
            if batch and load + len(tokens) > self.options.token_budget:
                yield batch
                batch, load = [], 0
            batch, load = [*batch, i], load + len(tokens)
        if batch:
            yield batch

    def _choices(self, answer: Any, count: int) -> list[Any]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != count or not all(isinstance(c, dict) for c in choices):
            raise self._bad(f"{len(choices) if isinstance(choices, list) else 'no'} choices for {count} sequences")
        return sorted(choices, key=lambda c: int(c.get("index", 0)))

    def _response(self, choice: dict[str, Any], tokens: list[int], start: int, rollout: Rollout) -> Array:
        entries = choice.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            got = len(entries) if isinstance(entries, list) else "no"
            raise self._bad(f"{got} positions for a sequence of {len(tokens)} tokens (prompt {rollout.prompt_id!r})")
        values = []
        for t in range(start, len(tokens)):
            entry = entries[t].get(str(tokens[t])) if isinstance(entries[t], dict) else None
            value = entry.get("logprob") if isinstance(entry, dict) else None
            if not isinstance(value, int | float):
                raise self._bad(f"no log-prob of token {tokens[t]} at position {t} (prompt {rollout.prompt_id!r})")
            values.append(min(float(value), 0.0))
        return np.asarray(values, dtype=np.float32)

    def _bad(self, got: str) -> EngineError:
        return EngineError(f"teacher.server {self._http.base}", got=got, expected="prompt log-probs of every token",
                           do="Is it a vLLM server, with room for these lengths (--max-model-len)?")  # fmt: skip
