"""What an engine is asked and what it answers, and the way from requests to rollouts. Plain Python and numpy: both transports use it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nearpolicy.errors import EngineError, UsageError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Array, Prefix, Rollout, Source, StopReason
from nearpolicy.sampler.requests import check_requests, stop_beforehand
from nearpolicy.sampler.stops import StopStrings

TESTED = "0.32"
"""The vLLM release whose interfaces are used here."""
MISSING = -9999.0
"""vLLM's HTTP server writes this for a log-prob that is NaN, minus infinity or not there."""
EXTENSION = "nearpolicy.sampler.vllm.WorkerExtension"
"""What vLLM's workers are given to pack an output layer anew (`--worker-extension-cls`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One response to write."""

    name: str
    """Unique while it runs."""
    shown: str
    """Names it in messages."""
    ids: tuple[int, ...]
    """Prompt and prefix."""
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    eos_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the engine wrote. Checked against each other by `checked`."""

    token_T: Array
    """int64 [T]."""
    logp_T: Array
    """float32 [T]; NaN where the engine gave none."""
    version_T: Array
    """int64 [T]."""
    finish: str
    """vLLM's finish reason: stop, length or abort."""


class Engine(Protocol):
    """A vLLM engine, in this process's care or behind a server. Calls may come from different threads.

    Every call has a deadline and raises EngineError in the engine's own words.
    """

    vocabulary: int | None
    """Entries of the model's vocabulary; None where the engine does not say."""
    longest: int
    """Most tokens of prompt and response together."""
    dtype: str
    """What the weights are held in: float32, bfloat16 or float16."""
    tokenizes: bool
    """True where it has a tokenizer, without which it cannot look for stop strings."""
    packs: bool
    """True where its workers have `EXTENSION`: `replace` packs tied output layers anew."""

    def generate(self, calls: Sequence[Call], interrupt: Callable[[], bool] | None) -> list[Answer]:
        """One answer a call. Once `interrupt` says True, what is not finished comes back as it is, with finish `abort`."""
        ...

    def score(self, ids: Sequence[int]) -> Array:
        """log pi(ids[t] | ids[:t]) at temperature 1 for t = 1, 2, ..., float32 [len(ids) - 1]."""
        ...

    def pause(self) -> None:
        """Stop decoding: requests in flight are frozen. Keys and values of old weights are forgotten."""
        ...

    def replace(self, folder: Path, version: int) -> None:
        """While paused: take the weights in this folder, forget every cached key and value, and `name` them by this version."""
        ...

    def name(self, version: int) -> None:
        """Call the weights that it holds by this version."""
        ...

    def version(self) -> str:
        """What the engine calls the weights it holds."""
        ...

    def digests(self) -> dict[str, str]:
        """sha256 of the bytes of every weight that it holds, by its own names; `dp0:pp0:pcp0:tp0:` in front names the rank."""
        ...

    def resume(self) -> None:
        """Go on decoding, requests in flight included."""
        ...

    def close(self) -> None:
        """Let go of it; idempotent. An engine in this process's care ends."""
        ...


def request_seed(params: SamplingParams, request: Request, sample: int, kept: int) -> int:
    """63 bits from the key of the randomness. The prefix's length belongs to it: the engine's noise begins with the request, so a response that is
    gone on with would replay the noise of its own beginning."""
    key = (params.seed, params.stream, request.ticket, sample, request.attempt, kept)
    return int.from_bytes(hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest(), "little") >> 1


def check_sampling(requests: Sequence[Request], n: int, params: SamplingParams, *, vocabulary: int, longest: int, tokenizer: Any) -> None:
    """Refuse what the engine cannot do.

    Raises:
        UsageError: entropies, and as `check_requests`.
        DataError: as `check_requests`.
    """
    check_requests(requests, n, params, vocabulary=vocabulary, longest=longest, tokenizer=tokenizer)
    if params.entropy:
        raise UsageError("sample: entropy", got="true with a vLLM sampler", expected="false", do="vLLM gives no entropies: take sampler.kind = "
                         "torch, or leave out log.behavior_entropy and cuts by entropy.")  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One sample of one request."""

    request: Request
    sample: int
    prefix: Prefix | None
    stop: StopReason | None = None
    """Set beforehand where nothing is to be sampled."""
    answer: Answer | None = None

    @property
    def kept(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else len(self.prefix.token_T)

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return f"prompt {self.request.prompt.id!r} (group {self.request.ticket}, sample {self.sample})"


def slots_of(requests: Sequence[Request], n: int, params: SamplingParams) -> list[Slot]:
    """n slots a request, in order; those with a finished or full prefix have their `stop`."""
    out = []
    for request in requests:
        for i in range(n):
            prefix = request.prefixes[i] if request.prefixes is not None else None
            out.append(Slot(request=request, sample=request.first_sample + i, prefix=prefix, stop=stop_beforehand(prefix, params.max_tokens)))
    return out


def call_of(slot: Slot, params: SamplingParams, *, stop_strings: Sequence[str], run: str, index: int) -> Call:
    """What the engine is asked for this slot."""
    prefix = () if slot.prefix is None else (int(i) for i in slot.prefix.token_T)
    return Call(
        name=f"{run}-{index}", shown=slot.shown, ids=(*(int(i) for i in slot.request.prompt.token_P), *prefix),
        max_tokens=params.max_tokens - slot.kept, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
        seed=request_seed(params, slot.request, slot.sample, slot.kept), eos_ids=tuple(sorted(params.eos_ids)), stop_strings=tuple(stop_strings),
    )  # fmt: skip


def checked(answer: Answer, call: Call, *, vocabulary: int, kept: int) -> Answer:
    """The answer, refused unless every token has a finite log-prob and a version.

    Raises:
        EngineError: missing or non-finite log-probs, ids outside the vocabulary, too many tokens, or an engine that gave up.
    """
    T = len(answer.token_T)
    if answer.finish not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM: {call.shown}", got=f"finish reason {answer.finish!r}", expected="stop, length or abort", do="Look at its log.")
    if len(answer.logp_T) != T or len(answer.version_T) != T:
        raise EngineError(f"vLLM: {call.shown}", got=f"{len(answer.logp_T)} log-probs and {len(answer.version_T)} versions for {T} tokens",
                          expected="one of each for every token", do=f"Is it vLLM {TESTED}?")  # fmt: skip
    if call.max_tokens < T or (T == 0 and answer.finish != "abort"):
        raise EngineError(f"vLLM: {call.shown}", got=f"{T} tokens", expected=f"1 to {call.max_tokens}", do=f"Is it vLLM {TESTED}?")
    bad = np.flatnonzero(~np.isfinite(answer.logp_T) | (answer.logp_T <= MISSING))
    if len(bad):
        t = int(bad[0])
        shown = "none, or none that is finite" if answer.logp_T[t] == MISSING else f"{answer.logp_T[t]}"
        raise EngineError(
            f"vLLM: log-prob of {call.shown} at response token {kept + t}", got=shown, expected="a finite log-prob", do="The weights it holds are "
            "broken, or it gives no log-probs: go back to a checkpoint from before, or look at its log.",
        )  # fmt: skip
    outside = np.flatnonzero((answer.token_T < 0) | (answer.token_T >= vocabulary))
    if len(outside):
        raise EngineError(f"vLLM: {call.shown}", got=f"token id {answer.token_T[outside[0]]}", expected=f"ids below {vocabulary}, the trained "
                          "model's vocabulary", do="Serve the model that is trained.")  # fmt: skip
    return answer


def ended(slot: Slot, answer: Answer, params: SamplingParams, stops: StopStrings | None) -> tuple[int, StopReason]:
    """How many of the answer's tokens are kept, and why the response ends there.

    The engine looks for stop strings in what it sampled itself. Here they are looked for in the whole response, prefix included, special tokens
    shown, as every sampler must; what was written after one is dropped.
    """
    T = len(answer.token_T)
    prefix = [] if slot.prefix is None else [int(i) for i in slot.prefix.token_T]
    if stops is not None:
        response = [*prefix, *(int(i) for i in answer.token_T)]
        for t in np.flatnonzero(stops.may_complete_V[answer.token_T]):
            if int(answer.token_T[t]) not in params.eos_ids and stops.completed(response[: len(prefix) + int(t) + 1]):
                return int(t) + 1, StopReason.STOP_STRING
    if T and int(answer.token_T[-1]) in params.eos_ids:
        return T, StopReason.EOS
    if answer.finish == "abort":
        return T, StopReason.ABORTED
    return T, StopReason.STOP_STRING if answer.finish == "stop" else StopReason.LENGTH


def rollout_of(slot: Slot, params: SamplingParams, *, stops: StopStrings | None, decode: Callable[[list[int]], str]) -> Rollout:
    """The rollout of a finished slot."""
    prefix, answer = slot.prefix, slot.answer
    length, stop = (0, slot.stop) if answer is None else ended(slot, answer, params, stops)
    assert stop is not None
    columns: Mapping[str, Array] = {
        "token": np.zeros(0, np.int64) if answer is None else answer.token_T[:length],
        "logp": np.zeros(0, np.float32) if answer is None else answer.logp_T[:length],
        "version": np.zeros(0, np.int64) if answer is None else answer.version_T[:length],
    }
    if prefix is not None:
        old = {"token": prefix.token_T, "logp": prefix.logp_behavior_T, "version": prefix.version_T}
        columns = {name: np.concatenate([np.asarray(old[name], dtype=new.dtype), new]) for name, new in columns.items()}
    return Rollout(
        prompt_id=slot.request.prompt.id, group=slot.request.ticket, sample=slot.sample,
        prompt_P=np.ascontiguousarray(slot.request.prompt.token_P, dtype=np.int64), response_T=columns["token"], logp_behavior_T=columns["logp"],
        version_T=columns["version"], prefix_length=slot.kept, temperature=params.temperature, stop=stop,
        source=Source.FRESH if prefix is None else Source.RELAY, text=decode(columns["token"].tolist()),
    )  # fmt: skip


def spans_to_versions(spans: Any, count: int, shown: str) -> Array:
    """Version of each token from vLLM's spans (version, start, end).

    Raises:
        EngineError: spans that leave a token out, or a version that is no number.
    """
    out = np.full(count, -1, dtype=np.int64)
    known = np.zeros(count, dtype=bool)
    for version, start, end in spans or []:
        try:
            out[int(start) : int(end)] = int(version)
        except (TypeError, ValueError):
            raise EngineError(f"vLLM: {shown}", got=f"weights called {version!r}", expected="a version that was published to it",
                              do="Something else publishes to this engine.") from None  # fmt: skip
        known[int(start) : int(end)] = True
    if not known.all():
        raise EngineError(f"vLLM: {shown}", got=f"{count} tokens, {int((~known).sum())} without the version of the weights", expected="all with one",
                          do=f"Is it vLLM {TESTED}?")  # fmt: skip
    return out
