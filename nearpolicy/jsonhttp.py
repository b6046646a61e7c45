"""One JSON request over HTTP, sent again where that can help. Standard library only."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nearpolicy.errors import EngineError, UsageError

_LONGEST_PAUSE = 30.0
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonServer:
    """A server that is asked in JSON. A request that fails (no connection, no answer in time, status 429 or 5xx) is sent again after 1, 2, 4, ...
    at most 30 seconds.

    Raises:
        UsageError: a URL without http.
    """

    name: str
    """The configuration key that names it, for messages."""
    url: str
    timeout: float
    """Seconds a request may take."""
    retries: int
    """Times a failed request is sent again."""
    key: str
    """Environment variable with the API key, where the server wants one."""
    pause: Callable[[float], None] = time.sleep
    """Waits that many seconds; tests replace it."""
    say: Callable[[str], None] = print
    """Hears of every request that is sent again."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(self.name, got=repr(self.url), expected="http://host:port", do="Write the server's URL.")

    @property
    def base(self) -> str:
        """The URL without a trailing slash or /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def call(self, path: str, body: dict[str, Any] | None = None, *, post: bool = False, retries: int | None = None) -> Any:
        """The answer to one request: POST with a body (or with `post`), else GET. None where the answer is empty.

        Args:
            retries: instead of the server's own number.
        Raises:
            EngineError: the last try failed, or the server refused the request.
        """
        tries = 1 + (self.retries if retries is None else retries)
        why = ""
        for attempt in range(tries):
            try:
                return self._send(path, body, post)
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {' '.join(error.read().decode('utf-8', 'replace').split())[:_MAX_SHOWN]}"
                if error.code != 429 and error.code < 500:
                    raise EngineError(f"{self.name} {self.base}", got=f"{why} (at {path})", expected="an answer", do="It refuses the request "
                                      f"itself: look at its log; a key is read from {self.key}.") from error  # fmt: skip
            except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, no answer in time, an answer cut short
                why = f"{type(error).__name__}: {error}"
            if attempt < tries - 1:
                wait = min(2.0**attempt, _LONGEST_PAUSE)
                self.say(f"warning: {self.name}: {why}; sent again in {wait:.0f} s ({attempt + 1} of {tries - 1})")
                self.pause(wait)
        raise EngineError(f"{self.name} {self.base}", got=f"{why} ({tries} times, at {path})", expected="an answer",
                          do=f"Start it again, then go on with --resume ({self.name} may change).")  # fmt: skip

    def _send(self, path: str, body: dict[str, Any] | None, post: bool) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(self.key):
            headers["Authorization"] = f"Bearer {os.environ[self.key]}"
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(self.base + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None
