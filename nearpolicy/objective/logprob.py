"""Hidden states or logits -> log-probability and entropy of each token, without keeping the logits. The only shift by one.

With logits z (after soft-cap and temperature), p = softmax(z) and target y:

    logp    = z_y - log sum_j exp(z_j)                 d logp    / dz_j = [j = y] - p_j
    entropy = -sum_j p_j log p_j                       d entropy / dz_j = -p_j (log p_j + entropy)

A plain path holds several [N, V] tensors for backward. `token_logp_entropy` walks over tiles of the vocabulary, keeps the log-sum-exp and the
entropy of each token, and computes a tile's logits again in backward: one more matrix product in exchange for memory that does not grow
with N x V. Given the log-sum-exp, a tile's rows of the weight gradient are complete at once, so nothing large is read and written again.
Inside a tile the elementwise work runs over blocks of rows that fit a cache.

Letters: N tokens, D hidden size, V vocabulary. Everything is in nats; sums over the vocabulary run in float32 (float64 for float64 inputs).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearpolicy.errors import UsageError

CHUNK_TOKENS = 2048
"""Tokens whose logits are computed together when `chunk_tokens` is None."""

_TILE_LOGITS = 2**23
"""Logits held at once (32 MB in float32): a tile is the chunk's tokens times as many entries of the vocabulary as fit."""

_KEEP_LOGITS = 2**20
"""Up to this many logits in all, backward keeps the log-probs (4 MB) instead of computing them again."""

_BLOCK_LOGITS = 2**19
"""Rows are processed in blocks of about this many logits (2 MB), so that the passes over a block stay in cache."""


def shift(value_BT: Tensor) -> Tensor:
    """What stands one column to the left: column t of the result holds column t-1 of `value_BT`; column 0 repeats itself and is never read.

    The hidden state (or logits row) that predicts the token of column t sits in column t-1. Callers shift a table that says *where* the state
    of each column lies, or the states themselves ([B, T, ...]), and then read column t for token t.
    """
    return torch.cat([value_BT[:, :1], value_BT[:, :-1]], dim=1)


class _Head(NamedTuple):
    """What turns a hidden state into scaled logits, apart from tensors that need gradient."""

    inverse_temperature: float | Tensor
    softcap: float | None
    chunk: int
    entropy_grad: bool
    low: torch.dtype | None
    """Dtype of the matrix products when it is below the dtype of the sums."""


def token_logp_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | int | Tensor = 1.0,
    softcap: float | int | None = None,
    chunk_tokens: int | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(softcap(hidden W^T + bias) / temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden_ND: the state that predicts each target (see `shift`), not the state of the target itself.
        weight_VD: the output matrix of the model, any dtype; its gradient is summed in float32 whatever the dtype.
        target_N: token ids in [0, V).
        bias: [V], for models whose head has one.
        temperature: > 0, one number or [N]. A model's constant logit scale s is folded in by passing temperature / s.
        softcap: c > 0 replaces a logit x by c tanh(x / c) (Gemma 2, section 2), before the temperature.
        chunk_tokens: tokens whose logits are computed together; None means `CHUNK_TOKENS`. The result does not depend on it beyond rounding.
        entropy_grad: True lets the gradient of the entropy through (for an entropy bonus), exactly; False detaches it.

    Returns:
        logp_N, entropy_N in float32 (float64 for float64 inputs). Both are empty for N = 0.

    Under autocast, and for half-precision inputs, matrix products run in the lower dtype and everything after them in float32. The gradient is
    not differentiable again.

    Raises:
        UsageError: shapes that do not fit, or a temperature, soft-cap or chunk that is not positive.
    """
    N, D = hidden_ND.shape
    if weight_VD.shape[1] != D or target_N.shape != (N,):
        raise UsageError(
            "token_logp_entropy", got=f"hidden {tuple(hidden_ND.shape)}, weight {tuple(weight_VD.shape)}, target {tuple(target_N.shape)}",
            expected="[N, D], [V, D] and [N]", do="Pass one hidden state for each target.",
        )  # fmt: skip
    for name, value in (("softcap", softcap), ("chunk_tokens", chunk_tokens)):
        if value is not None and not value > 0:
            raise UsageError(f"token_logp_entropy: {name}", got=value, expected="a positive number or None", do="Leave it out for the default.")
    head = _Head(
        inverse_temperature=_inverse(temperature, N, hidden_ND),
        softcap=None if softcap is None else float(softcap),
        chunk=min(max(N, 1), chunk_tokens or CHUNK_TOKENS),
        entropy_grad=entropy_grad,
        low=_low_dtype(hidden_ND, weight_VD),
    )
    logp_N, entropy_N = _HiddenToLogp.apply(hidden_ND, weight_VD, bias, target_N, head)
    return logp_N, entropy_N


def logits_logp_entropy(
    logits_XV: Tensor, target_X: Tensor, *, temperature: float | int | Tensor = 1.0, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from logits [..., V] that exist already, for targets [...].

    Saves the logits for backward and no second tensor of their size; the gradient is the only other one. A logit of -inf is a token of
    probability 0 and adds nothing to the entropy. Same results, dtypes and errors as `token_logp_entropy`; `temperature` is one number or has the
    shape of the targets.
    """
    if logits_XV.shape[:-1] != target_X.shape:
        raise UsageError(
            "logits_logp_entropy", got=f"logits {tuple(logits_XV.shape)}, target {tuple(target_X.shape)}",
            expected="[..., V] and [...]", do="Pass one row of logits for each target.",
        )  # fmt: skip
    V = logits_XV.shape[-1]
    flat = target_X.reshape(-1)
    scale = _inverse(temperature.reshape(-1) if isinstance(temperature, Tensor) and temperature.ndim else temperature, len(flat), logits_XV)
    logp_N, entropy_N = _LogitsToLogp.apply(logits_XV.reshape(-1, V), flat, scale, entropy_grad)
    return logp_N.view(target_X.shape), entropy_N.view(target_X.shape)


def _inverse(temperature: float | int | Tensor, N: int, like: Tensor) -> float | Tensor:
    """1 / temperature as a float, or as a column [N, 1] in the dtype of the sums; checked."""
    if isinstance(temperature, Tensor) and temperature.ndim:
        fits = temperature.shape == (N,) and bool((temperature > 0).all())
        shown = f"shape {tuple(temperature.shape)}, smallest {temperature.min().item() if temperature.numel() else None}"
        if fits:
            first = temperature[:1].tolist()
            # One value for all rows is the usual case, and a temperature of 1 then costs nothing.
            if not first or bool((temperature == temperature[0]).all()):
                return 1.0 / first[0] if first else 1.0
            return temperature.detach().to(like.device, _sum_dtype(like)).reciprocal()[:, None]
    else:
        shown = str(float(temperature))
        if float(temperature) > 0:
            return 1.0 / float(temperature)
    raise UsageError("temperature", got=shown, expected=f"positive, one number or [{N}]", do="Score greedy responses at temperature 1.")


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _low_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of the matrix products if it is a half precision: autocast's, or the one both inputs share."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype if hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16) else None


def _blocks(rows: int, V: int) -> list[slice]:
    step = max(1, _BLOCK_LOGITS // V)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`: half-precision products are summed and, where the device can, also returned in float32."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a @ b).to(dtype)


def _rows_of(scale: float | Tensor, rows: slice) -> float | Tensor:
    return scale[rows] if isinstance(scale, Tensor) else scale


def _logits(h_cD: Tensor, w_vD: Tensor, b_v: Tensor | None, head: _Head, scale: float | Tensor, buffer: Tensor) -> Tensor:
    """Scaled logits of one tile [c, v] in the dtype of the sums, in the buffer where the product can be written there; free to be overwritten."""
    if h_cD.dtype == buffer.dtype:
        # A buffer that stays is not returned to the system and faulted in again for every tile.
        z = torch.mm(h_cD, w_vD.t(), out=buffer[: len(h_cD) * len(w_vD)].view(len(h_cD), len(w_vD)))
    else:
        z = _matmul(h_cD, w_vD.t(), buffer.dtype)
    if b_v is not None:
        z.add_(b_v)
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)
    return _scaled_(z, scale)


_Moments = tuple[Tensor, Tensor, Tensor]
"""Of some logits of each token: maximum m, s = sum exp(z - m), and sum (z - m) exp(z - m)."""


def _moments(z: Tensor, *, floor: bool = False) -> _Moments:
    """Moments of each row; overwrites z."""
    top = z.amax(-1, keepdim=True)
    d = z.sub_(top)
    if floor:
        d.clamp_(min=torch.finfo(d.dtype).min)  # exp(-inf) * -inf is NaN; 0 times a finite number is the limit
    e = d.exp()
    return top[:, 0], e.sum(-1), torch.linalg.vecdot(e, d)


def _together(a: _Moments, b: _Moments) -> _Moments:
    """Moments of two parts of the vocabulary, moved to the larger maximum: sum (z - m') exp(z - m') = exp(m - m') (dot + (m - m') s)."""
    top = torch.maximum(a[0], b[0])
    total, dot = torch.zeros_like(top), torch.zeros_like(top)
    for part_top, part_total, part_dot in (a, b):
        move = part_top - top
        factor = move.exp()
        total += factor * part_total
        dot += factor * (part_dot + move * part_total)
    return top, total, dot


def _finish(chosen: Tensor, moments: _Moments) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and log-sum-exp. With everything relative to the maximum, large logits cancel nothing: entropy = log s - dot / s."""
    top, total, dot = moments
    log_total = total.log()
    return (chosen - top) - log_total, log_total - dot / total, top + log_total


def _join(parts: Sequence[tuple[Tensor, Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The parts one after another; three empty tensors when there are none."""
    if len(parts) == 1:
        return parts[0]
    empty = like.new_empty(0, dtype=_sum_dtype(like))
    first, second, third = (torch.cat([empty, *(part[k] for part in parts)]) for k in range(3))
    return first, second, third


def _local(target: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Column of each target inside a tile [c, 1] (some column when it lies outside), and whether it lies inside [c]."""
    column = target - tile.start
    return column.clamp(0, tile.stop - tile.start - 1)[:, None], (column >= 0) & (target < tile.stop)


class _Upstream(NamedTuple):
    """What the gradient of some tokens' logits is made of."""

    column: Tensor
    """Column of the target, [c, 1]."""
    grad_target: Tensor
    """Gradient of logp where the target lies in this tile, else 0."""
    grad_logp: Tensor
    grad_entropy: Tensor | None
    entropy: Tensor

    def of(self, rows: slice) -> "_Upstream":
        return _Upstream(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


def _add_target_(g_cv: Tensor, up: _Upstream) -> Tensor:
    return g_cv.scatter_add_(1, up.column, up.grad_target[:, None])


def _logit_grad_(log_p_cv: Tensor, up: _Upstream) -> Tensor:
    """Overwrite log p with d loss / d z = grad_logp ([j = y] - p) - grad_entropy p (log p + entropy)."""
    if up.grad_entropy is None:
        return _add_target_(log_p_cv.exp_().mul_(-up.grad_logp[:, None]), up)
    p = log_p_cv.exp()
    # The floor is for logits of -inf, as in _moments.
    g = log_p_cv.clamp_(min=torch.finfo(p.dtype).min).add_(up.entropy[:, None]).mul_(-up.grad_entropy[:, None])
    return _add_target_(g.sub_(up.grad_logp[:, None]).mul_(p), up)


def _scaled_(x: Tensor, scale: float | Tensor) -> Tensor:
    return x if isinstance(scale, float) and scale == 1.0 else x.mul_(scale)


class _HiddenToLogp(torch.autograd.Function):
    """Tiled over tokens and vocabulary, logits computed again in backward (kept as probabilities when there are few)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        N, V = hidden.shape[0], weight.shape[0]
        kept = None
        with torch.autocast(hidden.device.type, enabled=False):
            if 0 < N * V <= _KEEP_LOGITS and head.softcap is None and any(ctx.needs_input_grad[:3]):
                h, w, b = _operands(hidden, weight, bias, head)
                log_p = torch.log_softmax(_logits(h, w, b, head, head.inverse_temperature, _buffer(hidden, N * V)), -1)
                p = log_p.exp()
                logp, lse = log_p.gather(1, target[:, None])[:, 0], None
                entropy = torch.linalg.vecdot(p, log_p).neg_()
                kept = log_p if head.entropy_grad else p
            else:
                logp, entropy, lse = _tiled_statistics(hidden, weight, bias, target, head)
        ctx.save_for_backward(hidden, weight, bias, target, lse, entropy, kept)
        ctx.head = head
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, target, lse, entropy, kept = ctx.saved_tensors
        head: _Head = ctx.head
        up_entropy = grad_entropy if head.entropy_grad else None
        sums = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            if kept is not None:
                everything, up = slice(0, weight.shape[0]), _Upstream(target[:, None], grad_logp, grad_logp, up_entropy, entropy)
                g = _logit_grad_(kept.clone(), up) if head.entropy_grad else _add_target_(kept * -grad_logp[:, None], up)
                h, w, _ = _operands(hidden, weight, bias, head)
                sums.add(_scaled_(g, head.inverse_temperature), h, w, slice(0, hidden.shape[0]), everything)
            else:
                buffer = _buffer(hidden, _tile_size(hidden, weight, head))
                for rows, tile in _tiles(hidden, weight, head):
                    h, w, b = _operands(hidden[rows], weight[tile], None if bias is None else bias[tile], head)
                    column, inside = _local(target[rows], tile)
                    g_logp = grad_logp[rows]
                    up = _Upstream(column, g_logp * inside, g_logp, None if up_entropy is None else up_entropy[rows], entropy[rows])
                    scale = _rows_of(head.inverse_temperature, rows)
                    z = _logits(h, w, b, head, scale, buffer)
                    sums.add(_tile_grad_(z, lse[rows], up, scale, head.softcap), h, w, rows, tile)
        return *sums.result(), None, None


def _tile_size(hidden: Tensor, weight: Tensor, head: _Head) -> int:
    return head.chunk * min(weight.shape[0], max(1, _TILE_LOGITS // head.chunk))


def _tiles(hidden: Tensor, weight: Tensor, head: _Head) -> Iterator[tuple[slice, slice]]:
    """Slices of the tokens and of the vocabulary, the vocabulary innermost."""
    N, V = hidden.shape[0], weight.shape[0]
    width = _tile_size(hidden, weight, head) // head.chunk
    for start in range(0, N, head.chunk):
        for first in range(0, V, width):
            yield slice(start, min(start + head.chunk, N)), slice(first, min(first + width, V))


def _buffer(like: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=_sum_dtype(like), device=like.device)


_NOTHING = torch.empty(0)


def _tiled_statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and log-sum-exp of each token."""
    buffer = _buffer(hidden, _tile_size(hidden, weight, head))
    done: list[tuple[Tensor, Tensor, Tensor]] = []
    chosen, moments = _NOTHING, (_NOTHING, _NOTHING, _NOTHING)
    for rows, tile in _tiles(hidden, weight, head):
        h, w, b = _operands(hidden[rows], weight[tile], None if bias is None else bias[tile], head)
        z = _logits(h, w, b, head, _rows_of(head.inverse_temperature, rows), buffer)
        column, inside = _local(target[rows], tile)
        picked = z.gather(1, column)[:, 0]
        part = _join([_moments(z[block]) for block in _blocks(*z.shape)], z)
        if tile.start == 0:
            chosen, moments = picked, part
        else:
            chosen, moments = torch.where(inside, picked, chosen), _together(moments, part)
        if tile.stop == weight.shape[0]:
            done.append(_finish(chosen, moments))
    return _join(done, hidden)


class _Gradients:
    """The gradients that are asked for, summed tile by tile: hidden states and weight in the dtype of the sums whatever their own."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        inputs = (hidden, weight, bias)
        self.sums = [
            torch.zeros(x.shape, dtype=_sum_dtype(hidden), device=x.device) if x is not None and need else None
            for x, need in zip(inputs, needed, strict=False)
        ]

    def add(self, g_cv: Tensor, h_cD: Tensor, w_vD: Tensor, rows: slice, tile: slice) -> None:
        """Add what the gradient of one tile's logits gives."""
        hidden, weight, bias = self.sums
        low = g_cv.to(h_cD.dtype)
        for total, a, b in ((None if hidden is None else hidden[rows], low, w_vD), (None if weight is None else weight[tile], low.t(), h_cD)):
            if total is None:
                continue
            if low.dtype == total.dtype:
                total.addmm_(a, b)
            else:
                total += _matmul(a, b, total.dtype)
        if bias is not None:
            bias[tile] += g_cv.sum(0)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of the inputs."""
        hidden, weight, bias = (None if x is None else x.to(dtype) for x, dtype in zip(self.sums, self.dtypes, strict=True))
        return hidden, weight, bias


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the dtype they are multiplied and added in."""
    dtype = head.low or _sum_dtype(hidden)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(_sum_dtype(hidden))


def _tile_grad_(z: Tensor, lse: Tensor, upstream: _Upstream, scale: float | Tensor, softcap: float | None) -> Tensor:
    """Overwrite a tile's scaled logits with the gradient of its unscaled, uncapped logits."""
    for rows in _blocks(*z.shape):
        x, row_scale = z[rows], _rows_of(scale, rows)
        slope = None if softcap is None else _cap_slope(x, row_scale, softcap)
        _scaled_(_logit_grad_(x.sub_(lse[rows, None]), upstream.of(rows)), row_scale)
        if slope is not None:
            x.mul_(slope)
    return z


def _cap_slope(z: Tensor, scale: float | Tensor, softcap: float) -> Tensor:
    """d (c tanh(x / c)) / dx = 1 - (capped / c)^2, from z = capped * scale."""
    return 1 - (z / scale / softcap).square_()


class _LogitsToLogp(torch.autograd.Function):
    """From logits: nothing of their size is kept besides the logits themselves."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, scale: float | Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        dtype = _sum_dtype(logits)
        parts = []
        for rows in _blocks(*logits.shape):
            z = logits[rows].to(dtype) * _rows_of(scale, rows)
            chosen = z.gather(1, target[rows, None])[:, 0]
            parts.append(_finish(chosen, _moments(z, floor=True)))
        logp, entropy, lse = _join(parts, logits)
        ctx.save_for_backward(logits, target, lse, entropy)
        ctx.scale, ctx.entropy_grad = scale, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, lse, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _blocks(*logits.shape):
            scale = _rows_of(ctx.scale, rows)
            log_p = logits[rows].to(lse.dtype) * scale - lse[rows, None]
            up_entropy = grad_entropy[rows] if ctx.entropy_grad else None
            upstream = _Upstream(target[rows, None], grad_logp[rows], grad_logp[rows], up_entropy, entropy[rows])
            out[rows] = _scaled_(_logit_grad_(log_p, upstream), scale)
        return out, None, None, None
