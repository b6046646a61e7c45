"""The embedded sampler: any transformers causal language model, in this process."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nearpolicy.errors import DataError, UsageError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Array, Rollout, Source, StopReason
from nearpolicy.sampler.cache import CachedForward, Forward, RecomputeForward
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
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, max_rows: int = MAX_ROWS, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, version: int = 0,
    ) -> None:  # fmt: skip
        if max_rows < 1:
            raise UsageError("TorchSampler: max_rows", got=max_rows, expected="at least 1", do="Leave it out for the default.")
        target = torch.device(device) if device is not None else model.device
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if (dtype is not None and dtype != model.dtype) or target != model.device:
            model = copy.deepcopy(model).requires_grad_(False).to(device=target, dtype=dtype or model.dtype)
        self.model, self.tokenizer, self.max_rows, self.version = model, tokenizer, max_rows, version
        self._loaded_names: list[str] | None = None
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        with self._evaluating():
            reason = CachedForward.fits(model)
        self._forward: CachedForward | RecomputeForward = CachedForward(model) if reason is None else RecomputeForward(model, reason)

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

    def sample(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Rollout]:
        """n rollouts a request, flat, in request order.

        Raises:
            UsageError: parameters out of range, or stop strings without a tokenizer.
            DataError: an empty prompt, prompt and response longer than the model's positions, or prefixes that are not n.
            EngineError: non-finite logits, naming prompt and token.
        """
        self._check(requests, n, params)
        rows = self._rows(requests, n, params)
        waiting = [row for row in rows if row.stop is None]
        if waiting:
            with self._evaluating(), self._forward.attention():
                try:
                    Rows(
                        waiting, params, forward=self._sharing(waiting), max_rows=self.max_rows, device=self.model.device,
                        stops=self._stop_strings(params),
                    ).run()  # fmt: skip
                except BaseException:
                    self._forward.release()
                    raise
        return self._rollouts(rows, params)

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
        V = self.model.config.get_text_config().vocab_size
        wrong = {
            "n": (n, n >= 1, "at least 1"),
            "max_tokens": (params.max_tokens, params.max_tokens >= 1, "at least 1"),
            "temperature": (params.temperature, params.temperature >= 0 and math.isfinite(params.temperature), "0 (greedy) or positive"),
            "top_p": (params.top_p, 0 < params.top_p <= 1, "in (0, 1]"),
            "top_k": (params.top_k, params.top_k is None or params.top_k >= 1, "at least 1, or None"),
            "eos_ids": (sorted(params.eos_ids), all(0 <= i < V for i in params.eos_ids), f"ids in [0, {V})"),
            "stop_strings": (params.stop_strings, all(params.stop_strings), "non-empty strings"),
        }
        for name, (got, right, expected) in wrong.items():
            if not right:
                raise UsageError(f"sample: {name}", got=got, expected=expected, do="Change the rollout settings.")
        if params.stop_strings and self.tokenizer is None:
            raise UsageError("sample: stop_strings", got="no tokenizer", expected="one to decode with", do="Give TorchSampler a tokenizer.")
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for request in requests:
            P = len(request.prompt.token_P)
            if P == 0 or (most is not None and P + params.max_tokens > most):
                raise DataError(
                    f"sample: prompt {request.prompt.id!r}", got=f"{P} prompt tokens + at most {params.max_tokens} response tokens",
                    expected=f"a prompt token and at most {most} in all", do="Drop or shorten the prompt, or lower max_tokens.",
                )  # fmt: skip
            if request.prefixes is not None and len(request.prefixes) != n:
                raise DataError(
                    f"sample: prefixes of prompt {request.prompt.id!r}", got=len(request.prefixes), expected=f"one for each of the {n} samples",
                    do="Give None for samples without a prefix.",
                )  # fmt: skip

    def _rows(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Row]:
        shared: dict[bytes, Tensor] = {}
        rows = []
        for request in requests:
            ids = np.ascontiguousarray(request.prompt.token_P, dtype=np.int64)
            prompt = shared.setdefault(ids.tobytes(), torch.from_numpy(ids))
            for i in range(n):
                prefix = request.prefixes[i] if request.prefixes is not None else None
                row = Row(request=request, sample=request.first_sample + i, prompt=prompt, prefix=prefix)
                if prefix is not None and prefix.stop is not None:
                    row.stop = prefix.stop
                elif row.prefix_length >= params.max_tokens:
                    row.stop = StopReason.LENGTH
                rows.append(row)
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
            logp = joined(None if kept is None else kept.logp_behavior_T, row.logp_T)
            assert row.stop is not None
            rollout = Rollout(
                prompt_id=row.request.prompt.id, group=row.request.ticket, sample=row.sample, prompt_P=row.prompt.numpy(), response_T=response,
                logp_behavior_T=logp, version_T=joined(None if kept is None else kept.version_T, versions), prefix_length=p, entropy_T=entropy,
                temperature=params.temperature, stop=row.stop, source=Source.FRESH if kept is None else Source.RELAY, text=text,
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
        self.reserve, self.decode, self.move = forward.reserve, forward.decode, forward.move

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
