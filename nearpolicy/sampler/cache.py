"""Running a transformers model one token at a time over rows of different lengths.

`CachedForward` keeps keys and values in slots, preallocated [slots, heads, columns, head_dim]: row r's token at position p lies in column
p of its slot, so rows of different lengths decode in one batch, prompts are computed once and copied to their samples, and a row that
ends is replaced by moving another one into its slot. Attention goes through transformers' attention registry: while the registered name
is set on the model no mask is built by transformers, grouped query heads are read as query positions (keys are never repeated) and
sliding windows come from the position of each key. Of the tokens of a prefill the last one alone needs logits, so the last layer gives
the others their keys and values and nothing more.

`RecomputeForward` knows nothing of the model but its logits: it runs every row from the start at every token. Slow, right for any causal
model: linear attention, chunked attention, attention sinks, models outside the registry.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from nearpolicy.policy.routing import NOT_RECORDED, Recorder, Routers
from nearpolicy.rollout import Array

_NAME = "nearpolicy_slots"
_PREFILL_TOKENS = 4096  # most tokens of one prefill forward: bounds its memory, more gains nothing
_COLUMNS = 64  # capacity grows in such steps, so that near-equal requests reuse the buffers
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_NO_BIAS = ("s_aux", "position_bias", "head_mask", "alibi")


class Forward(Protocol):
    """Next-token logits of rows held in slots 0, 1, ...; positions count from 0."""

    def reserve(self, slots: int, columns: int) -> None:
        """Make room for `slots` rows of at most `columns` tokens. What the slots held is lost."""
        ...

    def admit(self, prompts: Sequence[Tensor], prefixes: Sequence[Tensor | None], first_slot: int) -> Tensor:
        """Put rows into slots first_slot, first_slot + 1, ...; equal prompts (the same tensor) are computed once. Logits [rows, V]."""
        ...

    def decode(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Append one token to each of the slots 0..B-1. Logits [B, V]."""
        ...

    def move(self, target: Tensor, source: Tensor, columns: int) -> None:
        """Copy the first columns of slots `source` to slots `target`."""
        ...

    def routes(self, slot: int, columns: int) -> Array:
        """Experts of the first `columns` tokens of a slot, int16 [columns, L, k]; inside `recording` alone."""
        ...


class _Step:
    """What one forward tells its layers: where keys go, which ones each query sees."""

    short_layer: int | None = None
    """The layer that attends from the last token of each row alone; what it says of the others is read by nobody."""

    def __init__(self, position_BL: Tensor, *, slot_B: Tensor | None, width: int, fresh: bool, uniform: int | None, trash: int) -> None:
        self.position_BL, self.slot_B, self.width, self.fresh, self.uniform = position_BL, slot_B, width, fresh, uniform
        # Padding (position -1) is written to a column that no query reaches.
        self.column_BL = position_BL if uniform is not None else torch.where(position_BL < 0, trash, position_BL)
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def causal(self) -> bool:
        """True when rows of equal length attend to themselves alone: the kernel's own causal mask does."""
        return self.fresh and self.uniform is not None

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, L, S]: key column c at query position p counts when p - window < c <= p. None when all keys count."""
        if window is not None and window >= self.width:
            window = None
        if window not in self._masks:
            self._masks[window] = self._build(window, dtype)
        return self._masks[window]

    def _build(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        L = self.position_BL.shape[1]
        if window is None and self.uniform is not None and (L == 1 or self.fresh):
            return None
        query_BL1 = self.position_BL[:, :, None]
        if self.fresh:  # keys are the tokens of this forward, padding on the left
            key_B1S = self.position_BL[:, None, :]
            seen = (key_B1S <= query_BL1) & (key_B1S >= 0)
        else:
            key_B1S = torch.arange(self.width, device=self.position_BL.device)[None, None]
            seen = key_B1S <= query_BL1
        if window is not None:
            seen &= key_B1S > query_BL1 - window
        # A padded query sees something, or its softmax is NaN and spoils the row's keys.
        seen |= query_BL1 < 0
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


_STEP: ContextVar[_Step] = ContextVar("nearpolicy_slot_step")


class _Unsupported(Exception):
    """The model's attention asks for something the slot attention does not compute."""


def _slot_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over slots: query [B, H, L, d], key and value [B, K, S, d] with K dividing H; returns [B, L, H, d]."""
    for name in _NO_BIAS:
        if options.get(name) is not None:
            raise _Unsupported(f"attention with {name}")
    step = _STEP.get()
    mask = step.mask(options.get("sliding_window"), query.dtype)
    L = query.shape[2]
    if L > 1 and step.short_layer is not None and step.short_layer == getattr(module, "layer_idx", None):
        out = _attend(query[:, :, -1:], key, value, None if mask is None else mask[:, :, -1:], step, options)
        return out.expand(-1, L, -1, -1), None
    return _attend(query, key, value, mask, step, options), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, step: _Step, options: dict[str, Any]) -> Tensor:
    softcap, scale = options.get("softcap"), options.get("scaling")
    B, H, L, d = query.shape
    K = key.shape[1]
    causal = mask is None and step.causal and L > 1
    if L == 1 and softcap is None and query.device.type == "cpu" and query.dtype == torch.float32:
        # A few query rows against many keys: two batched products are 1.3-1.7x as fast as the fused CPU kernel at small heads.
        score = torch.bmm(query.reshape(B * K, H // K, d) * (d**-0.5 if scale is None else scale), key.flatten(0, 1).transpose(1, 2))
        if mask is not None:
            score.view(B, K * (H // K), -1).add_(mask[:, 0])
        return torch.bmm(score.softmax(-1), value.flatten(0, 1)).view(B, 1, H, value.shape[-1])
    if H != K and not causal:
        query = query.reshape(B, K, H // K * L, d)
        if mask is not None and L > 1:
            mask = mask.repeat(1, 1, H // K, 1)
    elif H != K:
        key, value = key.repeat_interleave(H // K, 1), value.repeat_interleave(H // K, 1)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, is_causal=causal)
    else:
        score = softcap * torch.tanh(query @ key.transpose(2, 3) * (d**-0.5 if scale is None else scale) / softcap)
        if causal:
            score = score.masked_fill(torch.ones(L, L, dtype=torch.bool, device=score.device).triu(1), float("-inf"))
        out = (score if mask is None else score + mask).float().softmax(-1).to(value.dtype) @ value
    return out.reshape(B, H, L, value.shape[-1]).transpose(1, 2).contiguous()


AttentionInterface.register(_NAME, _slot_attention)


@contextmanager
def _attention_by_slots(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one layer, [slots, heads, columns, head_dim]; made when the layer first sees its shapes."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "_SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros, not empty: a masked column still meets its weight of 0, and 0 * NaN is NaN."""
        slots, columns = self.cache.slots, self.cache.columns
        self.keys = key_states.new_zeros(slots, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], columns, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the tokens of this forward to their columns; return what its queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step, B = _STEP.get(), len(key_states)
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        if step.slot_B is None and step.uniform is not None:
            p, L = step.uniform, key_states.shape[2]
            keys[:B, :, p : p + L] = key_states
            values[:B, :, p : p + L] = value_states
        else:
            slot_B = torch.arange(B, device=keys.device) if step.slot_B is None else step.slot_B
            keys[slot_B[:, None], :, step.column_BL] = key_states.transpose(1, 2)
            values[slot_B[:, None], :, step.column_BL] = value_states.transpose(1, 2)
        if step.fresh:
            return key_states, value_states
        if step.slot_B is None:
            return keys[:B, :, : step.width], values[:B, :, : step.width]
        return keys[:, :, : step.width].index_select(0, step.slot_B), values[:, :, : step.width].index_select(0, step.slot_B)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Asked for by mask builders only; none runs here."""
        return self.cache.columns, 0

    def get_seq_length(self) -> int:
        """Undefined for rows of different lengths: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Columns of a slot."""
        return self.cache.columns


class _SlotCache(Cache):  # type: ignore[misc]
    layers: list[_SlotLayer]

    def __init__(self, num_layers: int) -> None:
        self.slots = self.columns = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layers[layer_idx].update(key_states, value_states)

    def resize(self, slots: int, columns: int) -> None:
        self.slots, self.columns = slots, columns
        self.layers = [_SlotLayer(self) for _ in self.layers]


class _Routes:
    """Experts of every token in the slots, [slots, columns, L, k], beside the keys and values; nothing unless `recording`."""

    _recorder: Recorder | None = None
    _routes_SC: Tensor | None = None

    @contextmanager
    def recording(self, routers: Routers) -> Iterator[None]:
        """Forwards inside this context keep the experts of their tokens, from the next `reserve` on."""
        with routers.recording() as self._recorder:
            try:
                yield
            finally:
                self._recorder = self._routes_SC = None

    def routes(self, slot: int, columns: int) -> Array:
        """Experts of the first `columns` tokens of a slot, int16 [columns, L, k]."""
        assert self._routes_SC is not None, "inside `recording`, after a forward"
        out: Array = self._routes_SC[slot, :columns].cpu().numpy().copy()
        return out

    def _keep_routes(self, slots: int, columns: int, slot_B: Tensor, column_BL: Tensor) -> None:
        assert self._recorder is not None
        routes_NLk = self._recorder.take()
        if self._routes_SC is None:
            self._routes_SC = routes_NLk.new_full((slots, columns, *routes_NLk.shape[1:]), NOT_RECORDED)
        self._routes_SC[slot_B[:, None], column_BL] = routes_NLk.view(*column_BL.shape, *routes_NLk.shape[1:])

    def _move_routes(self, target: Tensor, source: Tensor, columns: int) -> None:
        if self._routes_SC is not None:
            self._routes_SC[target, :columns] = self._routes_SC[source, :columns]


def _last_mlp(model: PreTrainedModel, layers: int) -> torch.nn.Module | None:
    """The feed-forward block of the last decoder layer; None where the model has none by that name, or one of experts (which may be recorded for
    every token, and recording changes no bit of what is sampled)."""
    stacks = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == layers)
    stack = next(stacks, None)
    block = None if stack is None else getattr(stack[-1], "mlp", None)
    return None if hasattr(block, "experts") else block


def _last_token(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a block the last token of each row alone: its answer [B, 1, H] is broadcast over the residual stream, and only the last token is read."""
    return (args[0][:, -1:], *args[1:])


class CachedForward(_Routes):
    """Forward over slots of keys and values; see the module's page."""

    def __init__(self, model: PreTrainedModel, *, short: bool = True) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        layers = model.config.get_text_config().num_hidden_layers
        self._cache = _SlotCache(layers)
        self._last_mlp = _last_mlp(model, layers) if short and self._last_only else None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "CachedForward | str":
        """The forward, or the reason why the slots do not reproduce the model's own logits. Runs a few tokens through the model."""
        if (reason := cls._misfit(forward := cls(model), model)) is None:
            return forward
        if forward._last_mlp is not None and cls._misfit(forward := cls(model, short=False), model) is None:
            return forward
        return reason

    @staticmethod
    def _misfit(forward: "CachedForward", model: PreTrainedModel) -> str | None:
        config = model.config.get_text_config()
        layers = getattr(config, "layer_types", None) or []
        odd = sorted(set(layers) - _KNOWN_LAYERS)
        if odd:
            return f"layers of type {', '.join(odd)}"
        if not model._can_set_attn_implementation() or "position_ids" not in inspect.signature(model.forward).parameters:
            return "attention outside the transformers registry"
        device, V = model.device, config.vocab_size
        ids = (torch.arange(1, 6, device=device) * 7) % V
        try:
            plain = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
            with forward.attention():
                forward.reserve(3, 6)
                first = forward.admit([ids[:3], ids[:1], ids[:2]], [None, ids[1:4], None], 0)
                second = forward.decode(torch.stack([ids[3], ids[4], ids[2]]), torch.tensor([3, 4, 2], device=device))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            forward.release()
        got, want = torch.cat([first, second]).float().log_softmax(-1), plain[[2, 3, 1, 3, 4, 2]]
        if model.dtype == torch.float32:
            gap, tolerance = float((got - want).abs().max()), 1e-3
        else:
            # Half precision moves the log-probs of hopeless tokens by 0.3 and more in a large vocabulary: weigh by the probability.
            gap, tolerance = float((want.exp() * (got - want).abs()).sum(-1).max()), 0.15
        return None if gap <= tolerance else f"log-probs {gap:.2g} from the model's own"

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The model attends by slots inside this context."""
        with _attention_by_slots(self.model):
            yield

    def reserve(self, slots: int, columns: int) -> None:
        """Make room; buffers that are large enough stay."""
        self._routes_SC = None
        if slots > self._cache.slots or columns + 1 > self._cache.columns:
            self._cache.resize(max(slots, self._cache.slots), max(-(-(columns + 1) // _COLUMNS) * _COLUMNS, self._cache.columns))

    def release(self) -> None:
        """Drop the buffers (after non-finite values, which would outlive their row)."""
        self._cache.resize(0, 0)

    def admit(self, prompts: Sequence[Tensor], prefixes: Sequence[Tensor | None], first_slot: int) -> Tensor:
        """Each prompt once, into its first row's slot; copied to the other rows; then all prefixes, from there on."""
        first_of: dict[int, int] = {}
        owner = [first_of.setdefault(id(prompt), row) for row, prompt in enumerate(prompts)]
        logits = self._prefill([(prompts[row], 0, first_slot + row, row) for row in sorted(set(owner))])
        copies = [row for row, own in enumerate(owner) if row != own]
        device = self.model.device
        if copies:
            target = torch.tensor([first_slot + row for row in copies], device=device)
            source = torch.tensor([first_slot + owner[row] for row in copies], device=device)
            self.move(target, source, max(len(prompts[row]) for row in copies))
        out = [logits[own] for own in owner]
        extended = [(prefix, len(prompts[row]), first_slot + row, row) for row, prefix in enumerate(prefixes) if prefix is not None and len(prefix)]
        for row, value in self._prefill(extended).items():
            out[row] = value
        return torch.stack(out)

    def _prefill(self, jobs: Sequence[tuple[Tensor, int, int, int]]) -> dict[int, Tensor]:
        """Logits after each (tokens, first position, slot, row), in chunks of like length."""
        out: dict[int, Tensor] = {}
        jobs = sorted(jobs, key=lambda job: len(job[0]))
        while jobs:
            longest = len(jobs[-1][0])
            count = max(1, min(len(jobs), _PREFILL_TOKENS // longest))
            chunk, jobs = jobs[-count:], jobs[:-count]
            length_B1 = torch.tensor([[len(tokens)] for tokens, _, _, _ in chunk])
            index_BL = torch.arange(longest) - (longest - length_B1)  # of each token in its row, below 0 for padding
            held_BL = index_BL >= 0
            token_BL = torch.zeros(count, longest, dtype=torch.long)
            token_BL[held_BL] = torch.cat([tokens for tokens, _, _, _ in chunk])
            position_BL = torch.where(held_BL, index_BL + torch.tensor([[start] for _, start, _, _ in chunk]), -1)
            fresh = all(start == 0 for _, start, _, _ in chunk)
            uniform = 0 if fresh and len(chunk[0][0]) == longest else None
            device = self.model.device
            step = _Step(
                position_BL.to(device), slot_B=torch.tensor([slot for _, _, slot, _ in chunk], device=device), fresh=fresh, uniform=uniform,
                width=longest if fresh else int(position_BL.max()) + 1, trash=self._cache.columns - 1,
            )  # fmt: skip
            for (_, _, _, row), value in zip(chunk, self._forward(token_BL.to(device), step), strict=True):
                out[row] = value
        return out

    def decode(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """One token for each of the slots 0..B-1."""
        low, high = (int(x) for x in torch.aminmax(position_B))
        step = _Step(
            position_B[:, None], slot_B=None, width=high + 1, fresh=False, uniform=high if low == high else None, trash=self._cache.columns - 1
        )
        return self._forward(token_B[:, None], step)

    def _forward(self, token_BL: Tensor, step: _Step) -> Tensor:
        held, hook = _STEP.set(step), None
        if self._last_mlp is not None and token_BL.shape[1] > 1:
            step.short_layer = len(self._cache.layers) - 1
            hook = self._last_mlp.register_forward_pre_hook(_last_token)
        try:
            out = self.model(
                input_ids=token_BL, position_ids=step.position_BL.clamp(min=0), use_cache=True, **{self._cache_name: self._cache}, **self._last_only
            )
        finally:
            _STEP.reset(held)
            if hook is not None:
                hook.remove()
        if self._recorder is not None:
            slot_B = torch.arange(len(token_BL), device=token_BL.device) if step.slot_B is None else step.slot_B
            self._keep_routes(self._cache.slots, self._cache.columns, slot_B, step.column_BL)
        logits: Tensor = out.logits[:, -1]
        return logits

    def move(self, target: Tensor, source: Tensor, columns: int) -> None:
        """Copy rows between slots, all layers."""
        self._move_routes(target, source, columns)
        for layer in self._cache.layers:
            if layer.is_initialized:
                for held in (layer.keys, layer.values):
                    held[target, :, :columns] = held[source, :, :columns]


class RecomputeForward(_Routes):
    """The whole of every row at every token; see the module's page."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        self.model = model
        warnings.warn(f"{type(model).__name__} has {reason}: sampling runs every row from the start at every token, which is slow.", stacklevel=3)
        self._token = torch.zeros(0, 0, dtype=torch.long)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """The model attends as it is."""
        yield

    def reserve(self, slots: int, columns: int) -> None:
        """Room for the ids alone."""
        self._routes_SC = None
        self._token = torch.zeros(slots, columns, dtype=torch.long, device=self.model.device)

    def release(self) -> None:
        """Nothing outlives a row here."""

    def admit(self, prompts: Sequence[Tensor], prefixes: Sequence[Tensor | None], first_slot: int) -> Tensor:
        """Every row alone: no sharing."""
        rows = [prompt if prefix is None else torch.cat([prompt, prefix]) for prompt, prefix in zip(prompts, prefixes, strict=True)]
        for row, ids in enumerate(rows):
            self._token[first_slot + row, : len(ids)] = ids.to(self._token.device)
        length = torch.tensor([len(ids) for ids in rows], device=self._token.device)
        return self._run(first_slot, length)

    def decode(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Append and run again."""
        self._token[: len(token_B)].scatter_(1, position_B[:, None], token_B[:, None])
        return self._run(0, position_B + 1)

    def _run(self, first_slot: int, length_B: Tensor) -> Tensor:
        token_BC = self._token[first_slot : first_slot + len(length_B)]
        width = int(length_B.max())
        seen = torch.arange(width, device=token_BC.device) < length_B[:, None]
        out = self.model(input_ids=token_BC[:, :width], attention_mask=seen.long(), use_cache=False)
        if self._recorder is not None:
            slot_B = first_slot + torch.arange(len(length_B), device=token_BC.device)
            slots, columns = self._token.shape
            self._keep_routes(slots, columns, slot_B, torch.arange(width, device=token_BC.device).expand(len(length_B), -1))
        logits: Tensor = out.logits[torch.arange(len(length_B), device=token_BC.device), length_B - 1]
        return logits

    def move(self, target: Tensor, source: Tensor, columns: int) -> None:
        """Copy ids between slots."""
        self._move_routes(target, source, columns)
        self._token[target, :columns] = self._token[source, :columns]
