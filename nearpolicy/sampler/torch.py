"""The embedded sampler: any transformers causal language model, in this process."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nearpolicy.errors import UsageError
from nearpolicy.policy.routing import Routers
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Array, Rollout, Source
from nearpolicy.sampler.cache import CachedForward, Forward, RecomputeForward
from nearpolicy.sampler.requests import check_requests, stop_beforehand
from nearpolicy.sampler.rows import Row, Rows
from nearpolicy.sampler.stops import StopStrings
from nearpolicy.sampler.weights import copy_weights, named, weights_digest

MAX_ROWS = 256


class TorchSampler:
    """`protocols.Sampler` on a transformers model.

    A prompt is computed once for its group, keys and values lie in a preallocated cache, rows that end make room at once and waiting rows
    enter in lumps. Log-probs are float32 whatever the model's dtype. A model that the cache cannot serve (linear or chunked attention, sinks,
    attention outside the transformers registry) is found out at construction by comparing a few tokens, warned of, and run by recomputation.

    Args:
        model: shared, not copied, unless `dtype` or `device` ask for another one: give the trainer's own module and `load` costs nothing.
            Put into eval mode during `sample` and back after it.
        tokenizer: decodes responses and stop strings; None leaves `Rollout.text` empty.
        max_rows: most responses in flight; bounds the cache.
        dtype: of the sampler's weights and arithmetic; None keeps the model's.
        device: None keeps the model's.
        version: version of the weights that the model holds.
        router_noise: for experiments with mismatched routing: sampling runs with router weights that carry an error of this size (a share of their
            root mean square), drawn for each seed and version; the model holds it only while it samples.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, max_rows: int = MAX_ROWS, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, version: int = 0, router_noise: float = 0.0,
    ) -> None:  # fmt: skip
        if max_rows < 1:
            raise UsageError("TorchSampler: max_rows", got=max_rows, expected="at least 1", do="Leave it out for the default.")
        target = torch.device(device) if device is not None else model.device
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if (dtype is not None and dtype != model.dtype) or target != model.device:
            model = copy.deepcopy(model).to(device=target, dtype=dtype or model.dtype)  # requiring gradients as before: see TorchFactory
        self.model, self.tokenizer, self.max_rows, self.version, self.router_noise = model, tokenizer, max_rows, version, router_noise
        self._routers: Routers | None = None
        self._loaded_names: list[str] | None = None
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        with self._evaluating():
            made = CachedForward.of(model)
        self._forward: CachedForward | RecomputeForward = RecomputeForward(model, made) if isinstance(made, str) else made

    @property
    def cached(self) -> bool:
        """False when the model is run by recomputation."""
        return isinstance(self._forward, CachedForward)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights from now on.

        Tensors of the sampler's own model are recognised and not copied. Others are copied in place and converted to its dtype. Of tied
        weights one name is enough.

        Raises:
            EngineError: names or shapes that differ from the model's; the old weights and version stay.
        """
        copy_weights(self.model, weights)
        self._loaded_names, self.version = list(weights), version

    def digest(self) -> str:
        """Hash of the weights in use, under the names last loaded: equals `weights_digest(published, dtype=sampler.model.dtype)`."""
        return weights_digest(named(self.model, self._loaded_names))

    def sample(
        self, requests: Sequence[Request], n: int, params: SamplingParams, *, interrupt: Callable[[], bool] | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """n rollouts a request, flat, in request order.

        Args:
            interrupt: asked between two decode steps; once it says True, rows that have not ended come back as they are, with
                `StopReason.ABORTED` (`sampler.continuation` goes on with them).
            refresh: called between two decode steps; it may `load` other weights. Rows in flight go on under them, on the keys and values that
                the old weights filled, and say so (`Rollout.reused_cache`).
        Raises:
            UsageError: parameters out of range, or stop strings without a tokenizer.
            DataError: an empty prompt, prompt and response longer than the model's positions, or prefixes that are not n.
            EngineError: non-finite logits, naming prompt and token.
        """
        self._check(requests, n, params)
        if refresh is not None and (params.routes or self.router_noise):
            raise UsageError("sample: refresh", got="routes (or router_noise) with it", expected="one of them",
                             do="Experts are recorded under the weights that write the suffix; a cache of older weights holds others.")  # fmt: skip
        rows = self._rows(requests, n, params)
        waiting = [row for row in rows if row.stop is None]
        whole = [row for row in rows if row.stop is not None] if params.routes else []
        if waiting or whole:
            with self._evaluating(), self._routing(params), self._forward.attention():
                try:
                    self._record_whole(whole)
                    if waiting:
                        Rows(
                            waiting, params, forward=self._sharing(waiting), max_rows=self.max_rows, device=self.model.device,
                            stops=self._stop_strings(params),
                        ).run(interrupt, None if refresh is None else lambda: self._refreshed(refresh))  # fmt: skip
                except BaseException:
                    self._forward.release()
                    raise
        return self._rollouts(rows, params)

    @contextmanager
    def _routing(self, params: SamplingParams) -> Iterator[None]:
        """Recording of experts, and noise on the routers, where they are asked for."""
        if not (params.routes or self.router_noise):
            yield
            return
        self._routers = self._routers or Routers(self.model)
        recording = self._forward.recording(self._routers) if params.routes else nullcontext()
        with self._routers.noisy(self.router_noise, params.seed, self.version), recording:
            yield

    def _record_whole(self, rows: Sequence[Row]) -> None:
        """Experts of rows that nothing is sampled for: they are run as they are."""
        for first in range(0, len(rows), self.max_rows):
            some = rows[first : first + self.max_rows]
            prefixes = [torch.from_numpy(np.asarray(row.prefix.token_T, dtype=np.int64)) for row in some if row.prefix is not None]
            length = [len(row.prompt) + row.prefix_length for row in some]
            self._forward.reserve(len(some), max(length))
            self._forward.admit([row.prompt for row in some], prefixes, 0)
            for slot, row in enumerate(some):
                row.routes = self._forward.routes(slot, length[slot] - 1)

    def _refreshed(self, refresh: Callable[[], object]) -> int:
        refresh()
        return self.version

    def _sharing(self, rows: Sequence[Row]) -> Forward:
        """The forward, with prefixes computed once where several rows of a prompt go on from one Prefix object."""
        pairs = [(id(row.prompt), id(row.prefix)) for row in rows if row.prefix is not None]
        return self._forward if len(set(pairs)) == len(pairs) else _SharedPrefixes(self._forward)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        # no_grad, not inference_mode: some rotary embeddings replace their buffers in forward, and an inference tensor left in the trainer's
        # module would break its next backward.
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def _check(self, requests: Sequence[Request], n: int, params: SamplingParams) -> None:
        config = self.model.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        check_requests(requests, n, params, vocabulary=config.vocab_size, longest=most, tokenizer=self.tokenizer)

    def _rows(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Row]:
        shared: dict[bytes, Tensor] = {}
        rows = []
        for request in requests:
            ids = np.ascontiguousarray(request.prompt.token_P, dtype=np.int64)
            prompt = shared.setdefault(ids.tobytes(), torch.from_numpy(ids))
            for i in range(n):
                prefix = request.prefixes[i] if request.prefixes is not None else None
                stop = stop_beforehand(prefix, params.max_tokens)
                rows.append(Row(request=request, sample=request.first_sample + i, prompt=prompt, prefix=prefix, stop=stop))
        return rows

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings:
            return None
        if params.stop_strings not in self._stops:
            V = self.model.config.get_text_config().vocab_size
            self._stops[params.stop_strings] = StopStrings(self.tokenizer, params.stop_strings, V)
        return self._stops[params.stop_strings]

    def _rollouts(self, rows: Sequence[Row], params: SamplingParams) -> list[Rollout]:
        out = []
        kept_T = [row.token_T if row.prefix is None else np.concatenate([row.prefix.token_T, row.token_T]) for row in rows]
        for row, text in zip(rows, self._texts(kept_T), strict=True):
            kept, p = row.prefix, row.prefix_length

            def joined(old: Array | None, new: Array, kept: object = kept) -> Array:
                return new if kept is None or old is None else np.concatenate([np.asarray(old, dtype=new.dtype), new])

            response = joined(None if kept is None else kept.token_T, row.token_T)
            entropy = joined(None if kept is None else kept.entropy_T, row.entropy_T) if params.entropy else None
            if entropy is not None and len(entropy) != len(response):
                entropy = np.concatenate([np.full(p, np.nan, np.float32), entropy])  # missing, not zero: the prefix came without
            versions = np.full(len(row.token_T), self.version, dtype=np.int64)
            for start, version in row.versions:
                versions[start - p :] = version
            logp = joined(None if kept is None else kept.logp_behavior_T, row.logp_T)
            assert row.stop is not None
            rollout = Rollout(
                prompt_id=row.request.prompt.id, group=row.request.ticket, sample=row.sample, prompt_P=row.prompt.numpy(), response_T=response,
                logp_behavior_T=logp, version_T=joined(None if kept is None else kept.version_T, versions), prefix_length=p, entropy_T=entropy,
                temperature=params.temperature, stop=row.stop, source=Source.FRESH if kept is None else Source.RELAY, text=text,
                routes=row.routes, reused_cache=self.cached and bool((versions[1:] != versions[:-1]).any()),
            )  # fmt: skip
            out.append(rollout)
        return out

    def _texts(self, responses: Sequence[Array]) -> list[str]:
        """Decoded responses, special tokens skipped."""
        if self.tokenizer is None:
            return [""] * len(responses)
        ids = [r.tolist() for r in responses]
        if getattr(type(self.tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
            # What decode() does for a fast tokenizer without clean-up, without its checks of every id: 0.3 ms a response less.
            texts: list[str] = self.tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=True)
            return texts
        return [self.tokenizer.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False) for i in ids]


class _SharedPrefixes:
    """A forward to which a prompt and a prefix that several rows have in common are one prompt, computed once and copied."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.reserve, self.decode, self.move, self.routes = forward.reserve, forward.decode, forward.move, forward.routes

    def admit(self, prompts: Sequence[Tensor], prefixes: Sequence[Tensor | None], first_slot: int) -> Tensor:
        """As `Forward.admit`; equal prefixes are views of one array."""
        keys = [None if prefix is None else (id(prompt), prefix.data_ptr(), len(prefix)) for prompt, prefix in zip(prompts, prefixes, strict=True)]
        count = Counter(keys)
        whole: dict[Any, Tensor] = {}
        out_prompts, out_prefixes = list(prompts), list(prefixes)
        for row, (key, prompt, prefix) in enumerate(zip(keys, prompts, prefixes, strict=True)):
            if prefix is not None and len(prefix) and count[key] > 1:
                out_prompts[row], out_prefixes[row] = whole.setdefault(key, torch.cat([prompt, prefix])), None
        return self._forward.admit(out_prompts, out_prefixes, first_slot)
