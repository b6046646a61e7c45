"""The vLLM sampler: requests to an engine, rollouts back, weights replaced in place and looked at afterwards."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nearpolicy.errors import EngineError, NearPolicyError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Array, Rollout
from nearpolicy.sampler.stops import StopStrings
from nearpolicy.sampler.vllm_calls import EXTENSION, Engine, call_of, check_sampling, checked, rollout_of, slots_of
from nearpolicy.sampler.vllm_weights import FolderWriter, HeldWeights, Probe, stale_output_layer

Reference = Callable[[list[int]], Array]
"""ids -> log pi(ids[t] | ids[:t]) for t >= 1 at temperature 1, by the trainer's own model with the weights that were just published."""


class VllmSampler:
    """`protocols.Sampler` on a vLLM engine.

    What it promises beside the contract, and what it does not: every response has a seed from its key, but draws are vLLM's, so they are other
    ones than the torch sampler's and may change with the batch. Log-probs are the engine's own, at the temperature, of the weights that the token
    was sampled with. With top-p or top-k below full (evaluation only) they are those of the filtered distribution. It gives no entropies.

    `load` may be called while another thread is in `sample`: requests in flight are frozen, the weights replaced, and each request is computed
    anew under them and goes on; its tokens carry the version that sampled each. After every `load` the engine's version and the digests of its
    tensors are compared with what was published, and `compare` looks at its log-probs of a fixed prompt; an engine that does not hold what it was
    given is used no more.

    Args:
        engine: of this process or behind a server; closed with the sampler.
        tokenizer: decodes responses and stop strings; None leaves `Rollout.text` empty.
        folder: the Hugging Face folder of the trained model's architecture.
        version: what the weights that the engine was started with count as. -1 leaves the first publication to say it.
        weights_folder: where published weights are written for the engine; None takes the system's place for temporary files.
    Raises:
        EngineError: an engine of another vocabulary.
    """

    def __init__(self, engine: Engine, tokenizer: Any, *, folder: Path, version: int = 0, weights_folder: Path | None = None) -> None:
        self.engine, self.tokenizer, self.version = engine, tokenizer, version
        self._writer = FolderWriter(folder, dtype=engine.dtype, where=weights_folder)
        self.vocabulary = self._writer.vocabulary
        if engine.vocabulary not in (None, self.vocabulary):
            raise EngineError("vLLM", got=f"another vocabulary ({engine.vocabulary} entries)", expected=f"the trained model's ({self.vocabulary})",
                              do="Serve the model that is trained.")  # fmt: skip
        self._held = HeldWeights()
        self._probe = Probe(vocabulary=self.vocabulary, dtype=engine.dtype)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._loading = threading.Lock()
        self._broken: BaseException | None = None
        self._run = f"{os.getpid()}-{time.monotonic_ns()}"
        self._calls = itertools.count()
        self.proven = (0, 0)
        """Tensors that the last `load` proved equal to the published ones, and tensors that the engine shows."""
        if version >= 0:
            engine.name(version)

    def sample(
        self, requests: Sequence[Request], n: int, params: SamplingParams, *, interrupt: Callable[[], bool] | None = None
    ) -> list[Rollout]:  # fmt: skip
        """n rollouts a request, flat, in request order.

        Args:
            interrupt: asked a few times a second, from another thread; once it says True, rows that have not ended come back as they are, with
                `StopReason.ABORTED` (`sampler.continuation` goes on with them).
        Raises:
            UsageError: parameters out of range, entropies, or stop strings without a tokenizer.
            DataError: an empty prompt, prompt and response longer than the engine's room, or prefixes that are not n.
            EngineError: the engine failed or fell silent, gave no log-prob or one that is not finite (naming prompt and token), or holds other
                weights than were published to it.
        """
        check_sampling(requests, n, params, vocabulary=self.vocabulary, longest=self.engine.longest, tokenizer=self.tokenizer)
        self._usable()
        slots = slots_of(requests, n, params)
        asked = params.stop_strings if self.engine.tokenizes else ()
        open_ = [slot for slot in slots if slot.stop is None]
        calls = [call_of(slot, params, stop_strings=asked, run=self._run, index=next(self._calls)) for slot in open_]
        if calls:
            answers = self.engine.generate(calls, interrupt)
            self._usable()
            for slot, call, answer in zip(open_, calls, answers, strict=True):
                slot.answer = checked(answer, call, vocabulary=self.vocabulary, kept=slot.kept)
        stops = self._stop_strings(params)
        return [rollout_of(slot, params, stops=stops, decode=self._decode) for slot in slots]

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have the engine sample from these weights from now on, requests in flight included.

        Raises:
            EngineError: names or shapes that differ from the model's (the old weights and version stay), an engine that fails, or one that holds
                other weights afterwards (nothing can be sampled then until a `load` succeeds).
            CheckpointError: the folder of weights cannot be written.
        """
        with self._loading:
            self._writer.check(weights)
            cast = self._writer.cast(weights)
            with self._writer.written(cast, version) as folder:
                self.engine.pause()
                try:
                    self.engine.replace(folder, version)
                    self._verify(cast, version)
                except BaseException as error:
                    self._broken = error
                    with suppress(NearPolicyError):  # requests in flight come back, and are refused
                        self.engine.resume()
                    raise
                self._broken, self.version = None, version
                self.engine.resume()

    def compare(self, reference: Reference) -> float:
        """Mean |difference| in nats between the trainer's and the engine's log-probs of a fixed prompt.

        Raises:
            EngineError: more than rounding explains, or an engine that stood still while the trainer moved (nothing can be sampled then until a
                `load` succeeds).
        """
        try:
            return self._probe.verify(self.engine.score(self._probe.ids), reference(self._probe.ids), self.version)
        except NearPolicyError as error:
            self._broken = error
            raise

    def close(self) -> None:
        """Let go of the engine; idempotent."""
        self.engine.close()

    def _verify(self, cast: Mapping[str, Tensor], version: int) -> None:
        called = self.engine.version()
        if called != str(version):
            raise EngineError("vLLM: weights", got=f"version {called!r} after publishing version {version}", expected=f"'{version}'",
                              do="Something else publishes to this engine, or it does not take new weights.")  # fmt: skip
        held = self.engine.digests()
        if not self.engine.packs and stale_output_layer(held):
            raise EngineError("vLLM: weights", got="a CPU build that packs its output layer, tied to the embedding, once and for all", expected="one "
                              "that packs it anew", do=f"Start the server with --worker-extension-cls {EXTENSION}.")  # fmt: skip
        self.proven = self._held.verify(held, cast, version)

    def _usable(self) -> None:
        if self._broken is not None:
            raise EngineError("vLLM: sample", got="an engine whose last update failed", expected="the published weights",
                              do=f"What was wrong: {self._broken}") from self._broken  # fmt: skip

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings:
            return None
        if params.stop_strings not in self._stops:
            self._stops[params.stop_strings] = StopStrings(self.tokenizer, params.stop_strings, self.vocabulary)
        return self._stops[params.stop_strings]

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
