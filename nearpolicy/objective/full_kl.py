"""Reverse KL between two models over the whole vocabulary, at every token, without keeping logits.

    KL_t = sum_j p_j (log p_j - log q_j),  p = softmax(student logits), q = softmax(teacher logits)        nats
    d KL_t / d z_j = p_j (log p_j - log q_j - KL_t),  z the student's scaled logits

The expectation over the token of what `distill.opd` estimates from the sampled one (its mean over tokens drawn from p is -d_t). Equal logits give
exactly 0 in value and gradient. Logits are computed in parts of some tokens and again in backward; everything runs in float32 (float64 for
float64 inputs).

Letters: N tokens, D and E hidden sizes of student and teacher, V vocabulary, c tokens of a part.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearpolicy.errors import UsageError

_LOGITS = 2**22
"""Logits of each model held at once (16 MB in float32)."""


class Head(NamedTuple):
    """What a model says of N tokens: states, and how they become logits."""

    hidden_ND: Tensor
    """The state that predicts each token."""
    weight_VD: Tensor
    bias_V: Tensor | None
    temperature_N: Tensor
    """Divides the logits; a constant logit scale s is folded in as temperature / s."""
    softcap: float | None
    """c > 0 replaces a logit x by c tanh(x / c) before the temperature."""


def reverse_kl(student: Head, teacher: Head) -> Tensor:
    """KL(student || teacher) at each token, [N], with gradient to the student's states, weight and bias; the teacher gets none.

    Raises:
        UsageError: other numbers of tokens or vocabulary rows on the two sides.
    """
    sizes = [(len(side.hidden_ND), len(side.weight_VD)) for side in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise UsageError("reverse_kl", got=f"(tokens, vocabulary) {sizes[0]} and {sizes[1]}", expected="the same on both sides",
                         do="Score one batch with models of one vocabulary.")  # fmt: skip
    out: Tensor = _ReverseKL.apply(student.hidden_ND, student.weight_VD, student.bias_V, student, teacher)
    return out


def _parts(N: int, V: int) -> Iterator[slice]:
    step = max(1, _LOGITS // max(V, 1))
    return (slice(i, min(i + step, N)) for i in range(0, N, step))


def _log_probs(side: Head, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """log softmax of the scaled logits, [c, V], and what the soft-cap multiplies a gradient by."""
    x_cV = side.hidden_ND[rows].detach().to(dtype) @ side.weight_VD.detach().to(dtype).t()
    if side.bias_V is not None:
        x_cV += side.bias_V.detach().to(dtype)
    slope = None
    if side.softcap is not None:
        capped = (x_cV / side.softcap).tanh()
        slope, x_cV = 1.0 - capped.square(), side.softcap * capped
    return (x_cV / side.temperature_N[rows, None].to(dtype)).log_softmax(-1), slope


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, student: Head, teacher: Head) -> Tensor:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(hidden, weight, bias)
        ctx.sides, ctx.dtype = (student, teacher), dtype
        kl_N = hidden.new_zeros(len(hidden), dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _parts(len(hidden), len(weight)):
                log_p, _ = _log_probs(student, rows, dtype)
                log_q, _ = _log_probs(teacher, rows, dtype)
                kl_N[rows] = (log_p.exp() * (log_p - log_q)).sum(-1)
        return kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        (student, teacher), dtype = ctx.sides, ctx.dtype
        student = student._replace(hidden_ND=hidden, weight_VD=weight, bias_V=bias)
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _parts(len(hidden), len(weight)):
                log_p, slope = _log_probs(student, rows, dtype)
                log_q, _ = _log_probs(teacher, rows, dtype)
                gap, p = log_p - log_q, log_p.exp()
                g_cV = p * (gap - (p * gap).sum(-1, keepdim=True)) * (grad_N[rows] / student.temperature_N[rows].to(dtype))[:, None]
                if slope is not None:
                    g_cV = g_cV * slope
                grad_hidden[rows] = g_cV @ weight.detach().to(dtype)
                grad_weight += g_cV.t() @ hidden[rows].to(dtype)
                if grad_bias is not None:
                    grad_bias += g_cV.sum(0)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None if grad_bias is None else grad_bias.to(bias.dtype), None, None
