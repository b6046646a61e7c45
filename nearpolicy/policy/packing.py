"""Rows without padding, and each prompt once per group: how a batch is laid out for the model and split into micro-batches.

All tokens of a micro-batch are written one after another into a single row [1, N]: first the *stems* (a prompt that several responses share, or a
whole row that shares nothing), then the *leaves* (the responses of shared prompts). Embedding, norms, projections and MLPs see exactly these N
tokens, whatever the lengths. Only attention has to know who may see whom, and `packed_attention` gives it to each block of equal-sized
sequences: a stem attends to itself, a leaf to its stem and itself. Position ids continue from the stem, so rotary and learned positions are
those of the row alone. The last token of a row predicts nothing and is left out.

Cost for a group of G responses of R tokens on a prompt of L: L + G (R - 1) tokens in place of G (L + R); attention scores are those of the plain rows
without the repeated prompt. It never costs more than plain rows, needs neither a [N, N] mask nor a cache, and therefore works under gradient
checkpointing. It needs a model whose attention can be replaced and sees the whole context: no sliding windows, no recurrent state.

Letters: B rows, T columns, N packed tokens, F families (groups of rows with one prompt), n sequences of a block, m tokens of a block, S stem
tokens, R leaf tokens, H query heads, h key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import UsageError
from nearpolicy.objective.logprob import shift
from nearpolicy.rollout import Array, Batch

EAGER_SCORES = 2**22
"""Blocks with up to this many attention scores are computed by matrix products (faster for short rows); larger ones by sdpa, which keeps none."""

_MERGE_CELLS = 4096
"""Up to this many cells of padding, sequences of unequal length are attended to together: a launch costs more than the padding."""


@dataclass(slots=True, eq=False)
class Block:
    """Sequences of similar length whose attention is computed together, padded to the longest. Its m tokens are contiguous in the packed row."""

    num_tokens: int
    shape: tuple[int, int]
    """(n, length of the longest)."""
    cell_C: Tensor | None
    """Token (inside the block) of each of the n * length cells; padding holds 0. None when there is no padding."""
    valid_m: Tensor | None
    """Cell of each token. None when there is no padding."""
    context_S: Tensor | None = None
    """Packed index of each stem cell, [F * S]; padding holds 0. None for stems."""
    context_cell: Tensor | None = None
    """The cells of `context_S` that exist."""
    context_token: Tensor | None = None
    """Their packed indices."""
    family_n: Tensor | None = None
    """Family (row of the stem cells) of each leaf."""
    context_length_n: Tensor | None = None
    """Stem tokens of each leaf."""
    context_size: int = 0
    """S: length of the longest stem."""
    _bias: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Who sees whom, [n or 1, 1, length, S + length]: bool for sdpa, or 0 and -inf in a float dtype. Built once for all layers."""
        key = (dtype, device)
        if key not in self._bias:
            length = self.shape[1]
            see = torch.ones(length, length, dtype=torch.bool, device=device).tril_()[None]
            if self.context_length_n is not None:
                n = self.context_length_n
                stem = torch.arange(self.context_size, device=device) < n[:, None]
                stem = stem[:1] if bool(stem.all()) else stem
                see = torch.cat([stem[:, None].expand(-1, length, -1), see.expand(len(stem), -1, -1)], -1)
            mask = see[:, None]
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
            self._bias[key] = mask
        return self._bias[key]


@dataclass(slots=True, eq=False)
class Layout:
    """One micro-batch as a packed row."""

    token_1N: Tensor
    position_1N: Tensor
    source_n: Tensor
    """Packed index of the state that predicts each response token, in row-major order of the response mask."""
    blocks: list[Block]
    slot_BT: Tensor
    """Packed index of each context token of rows with a response, int64 on the host; -1 elsewhere."""
    routes_NLk: Tensor | None = None
    """Recorded experts of each packed token, on the host; None when the batch has none."""

    @property
    def num_tokens(self) -> int:
        """N, the tokens the model computes."""
        return int(self.token_1N.shape[1])


def families(batch: Batch) -> list[list[int]]:
    """Rows that share a prompt: equal group *and* equal prompt tokens. Families in the order of their first row, rows in order.

    Where experts were recorded, those of the prompt must be equal too: a prompt that was computed twice can have gone to different ones.
    """
    token, prompt, group = _host(batch.token_BT), _host(batch.prompt_length_B), _host(batch.group_B)
    routes = None if batch.routes is None else _host(batch.routes)
    found: dict[tuple[int, bytes, bytes], list[int]] = {}
    for b in range(len(batch)):
        shared = slice(0, prompt[b])
        key = int(group[b]), token[b, shared].tobytes(), b"" if routes is None else routes[b, shared].tobytes()
        found.setdefault(key, []).append(b)
    return list(found.values())


def _host(x: Tensor) -> Array:
    return x.detach().cpu().numpy()


def plan_microbatches(batch: Batch, token_budget: int, *, padded: bool = False) -> list[list[int]]:
    """Split the rows of a batch into micro-batches that cost at most `token_budget` tokens each.

    Families stay together where they fit (a shared prompt then counts once); one that does not is cut into runs of rows. Micro-batches are
    balanced (longest piece first, into the least loaded one), in the order of their first row, with rows in order. A row above the budget gets a
    micro-batch of its own. Deterministic: equal batches give equal plans.

    Args:
        batch: any rows; rows without a response are kept, every row appears exactly once.
        token_budget: tokens the model computes at once, >= 1.
        padded: rows are computed as padded rectangles without sharing; a micro-batch then costs rows x longest row.

    Raises:
        UsageError: a budget below 1.
    """
    if token_budget < 1:
        raise UsageError("token_budget", got=token_budget, expected="at least 1", do="Use the number of tokens that fit in memory at once.")
    if padded:
        return sorted(sorted(rows) for rows in fill_rectangles(row_lengths(batch), token_budget))
    pieces = cut_families(batch, token_budget)
    count = max(1, -(-sum(cost for cost, _ in pieces) // token_budget))
    while (bins := fill_bins(pieces, count, token_budget)) is None:
        count += 1
    return sorted(rows for _, rows in bins if rows)


Costed = tuple[int, list[int]]
"""Tokens that rows cost together, and the rows."""


def cut_families(batch: Batch, most: int) -> list[Costed]:
    """Families, those above `most` tokens cut into runs of rows, dearest first. A row above it stays whole."""
    prompt, response = _host(batch.prompt_length_B), _host(batch.response_mask_BT.sum(1))
    pieces: list[Costed] = []
    for rows in families(batch):
        cost, piece = 0, list[int]()
        for row in rows:
            if piece and cost + response[row] > most:
                pieces.append((cost, piece))
                piece = []
            cost = (cost if piece else int(prompt[row])) + int(response[row])
            piece.append(row)
        pieces.append((cost, piece))
    return sorted(pieces, key=lambda p: (-p[0], p[1][0]))


def fill_bins(pieces: Sequence[Costed], count: int, most: int) -> list[Costed] | None:
    """Longest piece first, each into the least loaded of `count` bins; rows of a bin in order. None: a bin would hold several pieces and more than
    `most` tokens, and more bins would help."""
    load, bins, over = [0] * count, [list[int]() for _ in range(count)], False
    for cost, piece in pieces:
        k = load.index(min(load))
        over |= bool(bins[k]) and load[k] + cost > most
        load[k] += cost
        bins[k] += piece
    return None if over and count < len(pieces) else [(cost, sorted(rows)) for cost, rows in zip(load, bins, strict=True)]


def row_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, prompt included."""
    out: list[int] = (_host(batch.prompt_length_B) + _host(batch.response_mask_BT.sum(1))).tolist()
    return out


def fill_rectangles(length_B: Sequence[int], most: int) -> list[list[int]]:
    """Rows of similar length together, longest first, so that little padding is computed; rows x longest row is at most `most`, or one row."""
    plan: list[list[int]] = []
    for row in sorted(range(len(length_B)), key=lambda b: (-length_B[b], b)):
        if plan and (len(plan[-1]) + 1) * length_B[plan[-1][0]] <= most:
            plan[-1].append(row)
        else:
            plan.append([row])
    return plan


def pack(batch: Batch, device: torch.device | str) -> Layout:
    """Lay a micro-batch out as one packed row on `device`. A batch without any response token still packs one token."""
    token, prompt = _host(batch.token_BT), _host(batch.prompt_length_B)
    mask = _host(batch.response_mask_BT)
    kept: Array = np.maximum(mask.sum(1) - 1, 0)  # the last token of a row predicts nothing
    needed: Array = np.asarray(mask.any(1))
    stems: list[_Span] = []
    leaves: list[_Span] = []
    for rows in families(batch):
        live = [b for b in rows if needed[b]]
        if len(live) == 1:
            b = live[0]
            stems.append(_Span([b], 0, int(prompt[b] + kept[b])))
        elif live:
            stems.append(_Span(live, 0, int(prompt[live[0]])))
            leaves += [_Span([b], int(prompt[b]), int(kept[b]), stems[-1]) for b in live if kept[b]]
    if not stems:
        stems.append(_Span([0], 0, 1))
    slot = np.full(token.shape, -1, dtype=np.int64)
    columns: list[Array] = []
    buckets = _buckets(stems) + _buckets(leaves)
    start = 0
    for bucket in buckets:
        for span in bucket:
            span.start = start
            column = np.arange(span.first, span.first + span.length)
            slot[span.rows, span.first : span.first + span.length] = start + np.arange(span.length)
            columns.append(span.rows[0] * token.shape[1] + column)
            start += span.length
    flat = np.concatenate(columns)
    to = torch.device(device)
    slot[~needed] = -1  # the one token of a batch without responses
    source = shift(torch.from_numpy(slot))[batch.response_mask_BT.cpu()]
    return Layout(
        token_1N=torch.from_numpy(token.reshape(-1)[flat])[None].to(to),
        position_1N=torch.from_numpy(flat % token.shape[1])[None].to(to),
        source_n=source.to(to),
        blocks=[_block(bucket, to) for bucket in buckets],
        slot_BT=torch.from_numpy(slot),
        routes_NLk=None if batch.routes is None else batch.routes.cpu().flatten(0, 1)[torch.from_numpy(flat)],
    )


@dataclass(slots=True, eq=False)
class _Span:
    """Columns first ... first + length of one row (a stem stands for the same columns of all its rows)."""

    rows: list[int]
    first: int
    length: int
    stem: "_Span | None" = None
    start: int = -1


def _buckets(spans: list[_Span]) -> list[list[_Span]]:
    """Sequences of lengths within a factor of two, longest first; one bucket when padding all to the longest wastes few cells."""
    out: list[list[_Span]] = []
    rest = sorted(spans, key=lambda s: -s.length)
    while rest:
        top = rest[0].length
        take = len(rest)
        if take * top - sum(s.length for s in rest) > _MERGE_CELLS:
            take = sum(2 * s.length > top for s in rest)
        # Rows in batch order inside a bucket keep families next to each other.
        out.append(sorted(rest[:take], key=lambda s: s.rows[0]))
        rest = rest[take:]
    return out


def _cells(lengths: Array) -> tuple[Array, Array]:
    """For n sequences written one after another: token of each padded cell (0 in padding), and cell of each token."""
    inside = np.arange(lengths.max()) < lengths[:, None]
    valid = np.flatnonzero(inside)
    cell = np.zeros(inside.size, dtype=np.int64)
    cell[valid] = np.arange(len(valid))
    return cell, valid


def _block(spans: list[_Span], device: torch.device) -> Block:
    lengths = np.array([s.length for s in spans])
    cell, valid = _cells(lengths)
    ragged = len(cell) != len(valid)

    def to(x: Array) -> Tensor:
        return torch.from_numpy(x).to(device)

    block = Block(int(lengths.sum()), (len(spans), int(lengths.max())), to(cell) if ragged else None, to(valid) if ragged else None)
    stems = list(dict.fromkeys(s.stem for s in spans if s.stem is not None))
    if stems:
        stem_lengths = np.array([s.length for s in stems])
        stem_cell, stem_valid = _cells(stem_lengths)
        packed = np.concatenate([np.arange(s.start, s.start + s.length) for s in stems])
        context = packed[stem_cell]
        number = {id(s): i for i, s in enumerate(stems)}
        block.context_S, block.context_cell, block.context_token = to(context), to(stem_valid), to(packed)
        block.family_n = to(np.array([number[id(s.stem)] for s in spans]))
        block.context_length_n = to(np.array([s.stem.length for s in spans if s.stem is not None]))
        block.context_size = int(stem_lengths.max())
    return block


class _Take(torch.autograd.Function):
    """x[take] along the first axis, where the entries of `take` that matter are distinct: backward copies, it adds nothing up.

    backward reads the gradient at `cell` (None: all of it) and writes it to `token` of a zero tensor (None: it is the result). Gradients at other
    cells (padding) are dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, cell: Tensor | None, token: Tensor | None) -> Tensor:
        ctx.save_for_backward(cell, token)
        ctx.shape = x.shape
        return x.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cell, token = ctx.saved_tensors
        if cell is not None:
            grad = grad.index_select(0, cell)
        if token is not None:
            grad = grad.new_zeros(ctx.shape).index_copy_(0, token, grad)
        return grad, None, None, None


def packed_attention(query_NHD: Tensor, key_NhD: Tensor, value_NhD: Tensor, layout: Layout, *, scale: float) -> Tensor:
    """softmax(scale q k^T) v of every packed token over its stem and its own sequence up to itself; [N, H, D].

    H is a multiple of h (grouped-query attention). Softmax in float32.
    """
    sizes = [b.num_tokens for b in layout.blocks]
    parts = []
    for block, q, k, v in zip(layout.blocks, query_NHD.split(sizes), key_NhD.split(sizes), value_NhD.split(sizes), strict=True):
        n, length = block.shape
        out = _attend(_padded(q, block), _with_context(k, key_NhD, block), _with_context(v, value_NhD, block), block, scale)
        out = out.reshape(n * length, *out.shape[2:])
        parts.append(out if block.valid_m is None else _Take.apply(out, block.valid_m, None, block.valid_m))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(x: Tensor, block: Block) -> Tensor:
    cells = x if block.cell_C is None else _Take.apply(x, block.cell_C, block.valid_m, None)
    return cells.reshape(*block.shape, *x.shape[1:])


def _with_context(x: Tensor, everything: Tensor, block: Block) -> Tensor:
    """Own keys (or values) of each sequence after those of its stem, [n, S + length, h, D]."""
    own = _padded(x, block)
    if block.context_S is None:
        return own
    stem = _Take.apply(everything, block.context_S, block.context_cell, block.context_token)
    stem = stem.view(-1, block.context_size, *x.shape[1:]).index_select(0, block.family_n)
    return torch.cat([stem, own], 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """[n, length, H, D] from queries of that shape and keys and values [n, K, h, D]."""
    n, length, H, D = q.shape
    K, h = k.shape[1:3]
    if n * H * length * K > EAGER_SCORES:
        k, v = (x.transpose(1, 2) for x in (k, v))
        if h != H:
            k, v = (x.repeat_interleave(H // h, 1) for x in (k, v))
        mask = None if block.context_S is None else block.bias(torch.bool, q.device)
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        ).transpose(1, 2)
    folded = q.view(n, length, h, H // h, D).permute(0, 2, 3, 1, 4).reshape(n * h, H // h * length, D)
    keys, values = (x.transpose(1, 2).reshape(n * h, K, x.shape[-1]) for x in (k, v))
    bias = block.bias(folded.dtype, q.device)
    if q.dtype == k.dtype == v.dtype and q.dtype in _EXACT and not torch.is_autocast_enabled(q.device.type):
        out = _SmallAttention.apply(folded, keys, values, bias, (n, H, length, K), scale)
    else:
        scores = torch.bmm(folded * scale, keys.transpose(1, 2)).view(n, H, length, K) + bias
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        out = torch.bmm(weights.view(n * h, H // h * length, K), values)
    return out.view(n, h, H // h, length, -1).permute(0, 3, 1, 2, 4).reshape(n, length, H, -1)


_EXACT = (torch.float32, torch.float64)


class _SmallAttention(torch.autograd.Function):
    """softmax(scale q k^T + bias) v for batches of small products, with the weights kept for backward.

    The same sums as through autograd, which would copy the scores three times on the way back: a third of the time of a short response's
    attention.
    """

    @staticmethod
    def forward(ctx: Any, q_bmD: Tensor, k_bKD: Tensor, v_bKD: Tensor, bias: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
        q_bmD = q_bmD * scale
        scores = torch.bmm(q_bmD, k_bKD.transpose(1, 2))
        weight_bmK = torch.softmax(scores.view(shape).add_(bias), -1).view_as(scores)
        ctx.save_for_backward(q_bmD, k_bKD, v_bKD, weight_bmK)
        ctx.scale = scale
        return torch.bmm(weight_bmK, v_bKD)

    @staticmethod
    def backward(ctx: Any, grad_bmD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q_bmD, k_bKD, v_bKD, weight_bmK = ctx.saved_tensors
        dv = torch.bmm(weight_bmK.transpose(1, 2), grad_bmD)
        dweight = torch.bmm(grad_bmD, v_bKD.transpose(1, 2)).mul_(weight_bmK)
        dscore = dweight.addcmul_(weight_bmK, dweight.sum(-1, keepdim=True), value=-1)
        return torch.bmm(dscore, k_bKD).mul_(ctx.scale), torch.bmm(dscore.transpose(1, 2), q_bmD), dv, None, None, None
