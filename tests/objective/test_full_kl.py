"""Reverse KL over the whole vocabulary against autograd through softmax."""

import pytest
import torch

from nearpolicy.errors import UsageError
from nearpolicy.objective import full_kl
from nearpolicy.objective.full_kl import Head, reverse_kl


def head(seed, N=7, D=5, V=11, *, bias=False, softcap=None, grad=False):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(grad)
    return Head(draw(N, D), draw(V, D), draw(V) if bias else None, 0.5 + torch.rand(N, generator=g, dtype=torch.float64), softcap)


def plain(student, teacher):
    def log_p(side):
        x = side.hidden_ND @ side.weight_VD.t() + (0 if side.bias_V is None else side.bias_V)
        x = x if side.softcap is None else side.softcap * (x / side.softcap).tanh()
        return (x / side.temperature_N[:, None]).log_softmax(-1)

    p, q = log_p(student), log_p(teacher)
    return (p.exp() * (p - q.detach())).sum(-1)


@pytest.mark.parametrize("budget", [2**22, 22])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"softcap": 2.0, "bias": True}])
def test_value_and_gradient(options, budget, monkeypatch):
    monkeypatch.setattr(full_kl, "_LOGITS", budget)
    student, teacher = head(0, grad=True, **options), head(1, D=3, bias=True)
    up = torch.linspace(-1, 2, 7, dtype=torch.float64)
    inputs = [x for x in (student.hidden_ND, student.weight_VD, student.bias_V) if x is not None]
    got, want = reverse_kl(student, teacher), plain(student, teacher)
    assert torch.allclose(got, want, atol=1e-12)
    assert (got >= 0).all()
    for a, b in zip(torch.autograd.grad(got @ up, inputs), torch.autograd.grad(want @ up, inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_equal_models_are_exactly_zero_in_value_and_gradient():
    student = head(0, grad=True, bias=True)
    kl = reverse_kl(student, Head(*(x.detach() if isinstance(x, torch.Tensor) else x for x in student)))
    kl.sum().backward()
    assert (kl == 0).all()
    for x in (student.hidden_ND, student.weight_VD, student.bias_V):
        assert (x.grad == 0).all()


def test_no_tokens_and_wrong_sizes():
    assert reverse_kl(head(0, N=0), head(1, N=0)).shape == (0,)
    with pytest.raises(UsageError, match="vocabulary"):
        reverse_kl(head(0), head(1, V=12))
