"""A teacher behind a vLLM server: prompt log-probs over its OpenAI-compatible HTTP interface. Standard library only; the only file that does.

    POST <server>/v1/completions {"model", "prompt": [[ids], ...], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    -> choices[i].prompt_logprobs = [null, {"<id>": {"logprob": ...}, ...}, ...], one entry for each prompt token

The token itself is always among the entries of its position. vLLM gives prompt log-probs of the unscaled distribution (temperature 1).
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.rollout import Array, Rollout

KEY = "NEARPOLICY_TEACHER_KEY"
"""Environment variable with the server's API key, where it wants one."""
_LONGEST_PAUSE = 30.0
_MAX_SHOWN = 200


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
    """`protocols.Teacher` over HTTP. A request that fails (no connection, no answer in time, status 429 or 5xx) is sent again after 1, 2, 4, ...
    at most 30 seconds.

    Args:
        pause: waits that many seconds; tests replace it.
        say: hears of every request that is sent again.
    Raises:
        UsageError: a URL without http.
        EngineError: the server does not answer, or does not know the model.
    """

    def __init__(self, options: ServerOptions, *, pause: Callable[[float], None] = time.sleep, say: Callable[[str], None] = print) -> None:
        if not options.url.startswith(("http://", "https://")):
            raise UsageError("teacher.server", got=repr(options.url), expected="http://host:port", do="Write the server's URL.")
        self.options, self._pause, self._say = options, pause, say
        self.url = options.url.rstrip("/").removesuffix("/v1")
        listed = self._call("/v1/models", None)
        names = [str(m["id"]) for m in listed.get("data", []) if isinstance(m, dict) and "id" in m] if isinstance(listed, dict) else []
        if not names or (options.model is not None and options.model not in names):
            raise EngineError(f"teacher.server {self.url}", got=f"the models {', '.join(names) or '(none)'}",
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
            choices = self._choices(self._call("/v1/completions", body), len(where))
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
        return EngineError(f"teacher.server {self.url}", got=got, expected="prompt log-probs of every token",
                           do="Is it a vLLM server, with room for these lengths (--max-model-len)?")  # fmt: skip

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        """One request, sent again as often as allowed."""
        for attempt in range(self.options.retries + 1):
            try:
                return self._send(path, body)
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {' '.join(error.read().decode('utf-8', 'replace').split())[:_MAX_SHOWN]}"
                if error.code != 429 and error.code < 500:
                    raise EngineError(f"teacher.server {self.url}", got=why, expected="an answer", do="It refuses the request itself: look at "
                                      f"its log; a key is read from {KEY}.") from error  # fmt: skip
            except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, no answer in time, an answer cut short
                why = f"{type(error).__name__}: {error}"
            if attempt < self.options.retries:
                wait = min(2.0**attempt, _LONGEST_PAUSE)
                self._say(f"warning: teacher.server: {why}; sent again in {wait:.0f} s ({attempt + 1} of {self.options.retries})")
                self._pause(wait)
        raise EngineError(f"teacher.server {self.url}", got=f"{why} ({self.options.retries + 1} times)", expected="an answer",
                          do="Start it again, then go on with --resume (teacher.server may change).")  # fmt: skip

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=self.options.timeout) as answer:
            return json.loads(answer.read())
