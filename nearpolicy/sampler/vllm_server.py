"""A vLLM engine behind its HTTP server: tokens in, tokens out, and the weights of a shared folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs --enable-scale-out

    POST /inference/v1/generate  {"token_ids", "sampling_params", ...} -> choices[0]: token_ids, logprobs.content, finish_reason, weight_versions
    POST /pause, /resume, /abort_requests, /collective_rpc reload_weights, /reset_prefix_cache, /update_weight_version; GET /weight_info
    POST /weight_checker {"action": "checksum"}

The first line is what `--enable-scale-out` opens; the others exist in development mode only, which lets whoever reaches the server replace its
weights.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from nearpolicy.errors import EngineError
from nearpolicy.jsonhttp import JsonServer
from nearpolicy.rollout import Array
from nearpolicy.sampler.vllm_calls import MISSING, TESTED, Answer, Call, spans_to_versions

KEY = "NEARPOLICY_SAMPLER_KEY"
"""Environment variable with the server's API key, where it wants one."""
_TICK = 0.05
_ABORTED = "abort"
_DEV = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment, which opens the calls that replace weights."


class ServerEngine:
    """`vllm_calls.Engine` over HTTP, one connection for each response in flight.

    Args:
        http: the server; its timeout holds for every request, so it must exceed the longest response's time.
        max_rows: most requests at once.
    Raises:
        EngineError: no answer, another release, calls that are not open, or log-probs that leave out the temperature.
    """

    def __init__(self, http: JsonServer, *, max_rows: int) -> None:
        self._http = http
        found = str(_get(self._call("/version"), "version"))
        if not found.startswith(f"{TESTED}."):
            raise self._bad(f"vLLM {found}", f"vLLM {TESTED}", "Serve with that release.")
        models = _get(self._call("/v1/models"), "data") or []
        if not models:
            raise self._bad("no model", "one", "Look at the server's log.")
        self.model = str(models[0]["id"])
        self.longest = int(models[0].get("max_model_len") or 0)
        info = self._info()
        self.dtype = str(info.get("dtype", "")).removeprefix("torch.")
        mode = str(info.get("logprobs_mode"))
        if mode != "processed_logprobs":
            raise self._bad(f"logprobs_mode {mode}", "processed_logprobs, which include the temperature",
                            "Start it with --logprobs-mode processed_logprobs.")  # fmt: skip
        self.tokenizes = not info.get("skip_tokenizer_init", False)
        self.vocabulary = self._ask_vocabulary()
        self.packs = True
        self._pool = ThreadPoolExecutor(max_rows, thread_name_prefix="vllm-server")

    def _info(self) -> dict[str, Any]:
        """The model's configuration as the server holds it."""
        try:
            info = self._call("/server_info?config_format=json")
        except EngineError as error:
            if "status 404" in str(error):
                raise self._bad("no answer at /server_info (status 404)", "a server in development mode", _DEV) from error
            raise
        found = _get(_get(info, "vllm_config"), "model_config")
        return found if isinstance(found, dict) else {}

    def _ask_vocabulary(self) -> int | None:
        """Entries of its model's vocabulary: no call gives them, but they are in what it says to an id that no vocabulary has."""
        params = {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [2**31 - 1], "detokenize": False}
        try:
            self._call("/inference/v1/generate", {"request_id": "vocabulary", "model": self.model, "token_ids": [0], "sampling_params": params})
        except EngineError as error:
            if "status 403" in str(error):
                raise self._bad("no answer at /inference/v1/generate (status 403)", "tokens in, tokens out", "Start it with --enable-scale-out."
                                ) from error  # fmt: skip
            found = re.search(r"Vocabulary size: (\d+)", str(error))
            if found:
                return int(found[1])
            if "status 400" not in str(error):
                raise
        return None

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Compare what server and trainer make of one text: token ids are the truth, but another tokenizer means another model.

        Raises:
            EngineError: other ids.
        """
        text = "The quick brown fox, 12 + 34 = 46.\n"
        try:
            own = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
        except (TypeError, ValueError):
            return  # a tokenizer of tests, which knows no such text
        theirs = _get(self._call("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}), "tokens")
        if theirs != own:
            raise self._bad(f"another vocabulary (a text of {len(own)} tokens has {len(theirs) if isinstance(theirs, list) else 'no'} there)",
                            "the trained model's", "Serve the model that is trained.")  # fmt: skip

    def generate(self, calls: Sequence[Call], interrupt: Callable[[], bool] | None) -> list[Answer]:
        """One answer a call.

        Raises:
            EngineError: a request that failed, after the retries, or an answer without tokens or log-probs.
        """
        futures = [self._pool.submit(self._one, call) for call in calls]
        waiting: set[Future[Answer]] = set(futures)
        said = False
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_TICK if interrupt is not None else None, return_when=FIRST_COMPLETED)
                for future in done:
                    if not future.cancelled():
                        future.result()
                if waiting and interrupt is not None and (said := said or interrupt()):
                    # Asked again until all are back: a request may have been on its way when it was aborted.
                    names = [f"generate-tokens-{c.name}" for c, f in zip(calls, futures, strict=True) if f in waiting and not f.cancel()]
                    if names:
                        self._call("/abort_requests", {"request_ids": names})
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
        nothing = Answer(token_T=np.zeros(0, np.int64), logp_T=np.zeros(0, np.float32), version_T=np.zeros(0, np.int64), finish=_ABORTED)
        return [nothing if future.cancelled() else future.result() for future in futures]

    def _one(self, call: Call) -> Answer:
        params = {
            "temperature": call.temperature, "top_p": call.top_p, "top_k": call.top_k or 0, "seed": call.seed, "max_tokens": call.max_tokens,
            "logprobs": 0, "stop_token_ids": list(call.eos_ids), "ignore_eos": True, "stop": list(call.stop_strings) or None,
            "skip_special_tokens": False, "detokenize": bool(call.stop_strings),
        }  # fmt: skip
        body = {"request_id": call.name, "model": self.model, "token_ids": list(call.ids), "sampling_params": params}
        choices = _get(self._call("/inference/v1/generate", body), "choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._bad(
                f"{len(choices) if isinstance(choices, list) else 'no'} choices for {call.shown}", "one response", f"Is it vLLM {TESTED}?"
            )
        choice = choices[0]
        tokens = choice.get("token_ids") or []
        content = _get(choice.get("logprobs"), "content") or []
        if len(content) != len(tokens):
            raise self._bad(f"{len(content)} log-probs for the {len(tokens)} tokens of {call.shown}", "one for every token", "Look at its log.")
        values = [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
        spans = [(s.get("version"), s.get("start", 0), s.get("end", 0)) for s in choice.get("weight_versions") or []]
        return Answer(
            token_T=np.array(tokens, dtype=np.int64), logp_T=np.array([MISSING if v is None else v for v in values], dtype=np.float32),
            version_T=spans_to_versions(spans, len(tokens), call.shown), finish=str(choice.get("finish_reason")),
        )  # fmt: skip

    def score(self, ids: Sequence[int]) -> Array:
        """log pi(ids[t] | ids[:t]) at temperature 1, float32 [len(ids) - 1]; NaN where the server gave none."""
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"request_id": f"score-{time.monotonic_ns()}", "model": self.model, "token_ids": list(ids), "sampling_params": params}
        rows = _get(self._call("/inference/v1/generate", body), "prompt_logprobs") or [None] * len(ids)
        found = [_get(_get(row, str(i)), "logprob") for row, i in zip(rows, ids, strict=False)][1:]
        return np.array([float("nan") if v is None or v <= MISSING else v for v in found], dtype=np.float32)

    def pause(self) -> None:
        """Freeze the requests in flight and forget cached keys and values."""
        self._call("/pause?mode=keep&clear_cache=true", post=True)

    def replace(self, folder: Path, version: int) -> None:
        """Have the server load a folder, which it must see under the same path.

        Raises:
            EngineError: it cannot read them, or cannot forget what it computed under the old ones.
        """
        self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, retries=0)
        try:
            self._call("/collective_rpc", {"method": "nearpolicy_pack"}, retries=0)
        except EngineError as error:
            if "nearpolicy_pack" not in str(error):
                raise
            self.packs = False  # whether that matters, the digests tell
        if _get(self._call("/reset_prefix_cache?reset_running_requests=true", post=True), "success") is False:
            raise self._bad("a prefix cache that is still held", "an empty one", "Start the run again.")
        self.name(version)

    def name(self, version: int) -> None:
        """Call the weights by this version."""
        self._call("/update_weight_version", {"new_version": str(version)})

    def version(self) -> str:
        """What the server calls its weights."""
        return str(_get(self._call("/weight_info"), "weight_version"))

    def digests(self) -> dict[str, str]:
        """sha256 of every weight on every rank."""
        found = _get(self._call("/weight_checker", {"action": "checksum"}), "checksums")
        return {str(name): str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}

    def resume(self) -> None:
        """Go on decoding."""
        self._call("/resume", post=True)

    def close(self) -> None:
        """Let go of the server, which goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _call(self, path: str, body: dict[str, Any] | None = None, *, post: bool = False, retries: int | None = None) -> Any:
        return self._http.call(path, body, post=post, retries=retries)

    def _bad(self, got: str, expected: str, do: str) -> EngineError:
        return EngineError(f"{self._http.name} {self._http.base}", got=got, expected=expected, do=do)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
