"""Chunked log-prob and entropy: equal to the plain path in value and gradient, whatever the tiling."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import UsageError
from nearpolicy.objective import logprob
from nearpolicy.objective.logprob import logits_logp_entropy, shift, token_logp_entropy


def plain(h, w, y, *, bias=None, temperature=1.0, softcap=None):
    z = h @ w.t()
    z = z if bias is None else z + bias
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return plain_logits(z, y, temperature)


def plain_logits(z, y, temperature=1.0):
    z = z / (temperature[..., None].to(z.dtype) if isinstance(temperature, torch.Tensor) else temperature)
    logp = z.log_softmax(-1)
    return logp.gather(-1, y[..., None])[..., 0], torch.special.entr(logp.exp()).sum(-1)


def inputs(N=11, D=6, V=37, dtype=torch.float64):
    h, w, b = (torch.randn(*s, dtype=dtype).requires_grad_() for s in ((N, D), (V, D), (V,)))
    return h, w, b, torch.randint(V, (N,)), torch.randn(N, dtype=dtype), torch.randn(N, dtype=dtype)


@pytest.fixture(params=["kept", "tiled", "one_tile"])
def tiling(request, monkeypatch):
    """The ways through the function: few logits (kept), many small tiles, one tile."""
    if request.param != "kept":
        monkeypatch.setattr(logprob, "_KEEP_LOGITS", 0)
    if request.param == "tiled":
        monkeypatch.setattr(logprob, "_TILE_LOGITS", 40)
        monkeypatch.setattr(logprob, "_BLOCK_LOGITS", 8)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "rows"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradient_equal_the_plain_path(tiling, chunk, softcap, temperature, with_bias):
    h, w, b, y, g, ge = inputs()
    b = b if with_bias else None
    t = torch.rand(len(y), dtype=torch.float64) + 0.5 if temperature == "rows" else temperature
    leaves = [h, w, b] if with_bias else [h, w]
    for entropy_grad in (False, True):
        logp, entropy = token_logp_entropy(h, w, y, bias=b, temperature=t, softcap=softcap, chunk_tokens=chunk, entropy_grad=entropy_grad)
        want_logp, want_entropy = plain(h, w, y, bias=b, temperature=t, softcap=softcap)
        torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-13)
        torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-13)
        assert entropy.requires_grad == entropy_grad
        loss, want = (logp * g).sum(), (want_logp * g).sum()
        if entropy_grad:
            loss, want = loss + (entropy * ge).sum(), want + (want_entropy * ge).sum()
        for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@given(N=st.integers(0, 9), V=st.integers(1, 20), tile=st.integers(1, 60), chunk=st.integers(1, 12), scale=st.sampled_from([0.0, 1.0, 300.0]))
@settings(max_examples=60, deadline=None)
def test_no_tiling_changes_the_result(N, V, tile, chunk, scale):
    torch.manual_seed(N * 31 + V)
    h, w, y = scale * torch.randn(N, 3, dtype=torch.float64), torch.randn(V, 3, dtype=torch.float64), torch.randint(V, (N,))
    old = logprob._TILE_LOGITS
    try:
        logprob._TILE_LOGITS = tile
        logp, entropy = token_logp_entropy(h, w, y, chunk_tokens=chunk)
    finally:
        logprob._TILE_LOGITS = old
    want_logp, want_entropy = plain(h, w, y)
    torch.testing.assert_close(logp, want_logp, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-12, atol=1e-12)
    assert (logp <= 0).all()
    assert (entropy >= -1e-12).all()
    assert (entropy <= math.log(V) + 1e-12).all()


def test_exact_values():
    w = torch.log(torch.tensor([[0.5], [0.25], [0.25]], dtype=torch.float64))
    logp, entropy = token_logp_entropy(torch.ones(3, 1, dtype=torch.float64), w, torch.arange(3))
    torch.testing.assert_close(logp.exp(), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(entropy, torch.full((3,), 1.5 * math.log(2), dtype=torch.float64), rtol=0, atol=1e-15)
    # T = 0.5 squares the odds: 4 : 1 : 1
    logp, _ = token_logp_entropy(torch.ones(1, 1, dtype=torch.float64), w, torch.tensor([0]), temperature=0.5)
    assert logp.exp().item() == pytest.approx(4 / 6, abs=1e-15)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_from_logits(entropy_grad, monkeypatch):
    monkeypatch.setattr(logprob, "_BLOCK_LOGITS", 30)
    z = torch.randn(3, 4, 17, dtype=torch.float64).requires_grad_()
    y, g, t = torch.randint(17, (3, 4)), torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64) + 0.5
    logp, entropy = logits_logp_entropy(z, y, temperature=t, entropy_grad=entropy_grad)
    want_logp, want_entropy = plain_logits(z, y, t)
    torch.testing.assert_close(logp, want_logp, rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-13)
    (ours,) = torch.autograd.grad((logp * g).sum() + ((entropy * g).sum() if entropy_grad else 0), z)
    (theirs,) = torch.autograd.grad((want_logp * g).sum() + ((want_entropy * g).sum() if entropy_grad else 0), z)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_a_logit_of_minus_infinity_is_a_token_of_probability_zero():
    z = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    logp, entropy = logits_logp_entropy(z, torch.tensor([0]), entropy_grad=True)
    assert logp.item() == pytest.approx(-math.log(2), abs=1e-15)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-15)
    (grad,) = torch.autograd.grad((logp + entropy).sum(), z)
    torch.testing.assert_close(grad, torch.tensor([[0.5, -0.5, 0.0]], dtype=torch.float64), rtol=0, atol=1e-15)


def test_large_logits_cancel_nothing_in_float32():
    z = torch.tensor([[1e4, 1e4 - 1.0, 1e4 - 2.0]])
    logp, entropy = logits_logp_entropy(z, torch.tensor([1]))
    want_logp, want_entropy = plain_logits(z.double(), torch.tensor([1]))
    assert logp.item() == pytest.approx(want_logp.item(), abs=1e-6)
    assert entropy.item() == pytest.approx(want_entropy.item(), abs=1e-6)


def test_half_precision_inputs_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(logprob, "_KEEP_LOGITS", 0)
    monkeypatch.setattr(logprob, "_TILE_LOGITS", 64)
    h, w, _, y, _, _ = inputs(N=300, D=4, V=5, dtype=torch.bfloat16)
    # 300 tokens of gradient near 1 in chunks of 1: a bfloat16 sum would stop growing at 256.
    logp, entropy = token_logp_entropy(torch.ones_like(h), w, torch.zeros_like(y), chunk_tokens=1)
    assert logp.dtype == entropy.dtype == torch.float32
    (ours,) = torch.autograd.grad(logp.sum(), w)
    assert ours.dtype == torch.bfloat16
    exact = w.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(plain(torch.ones(300, 4, dtype=torch.float64), exact, torch.zeros_like(y))[0].sum(), exact)
    torch.testing.assert_close(ours.double(), want, rtol=0.02, atol=0.5)


def test_autocast_multiplies_low_and_keeps_the_weight_gradient_in_float32():
    h, w, _, y, g, _ = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = token_logp_entropy(h, w, y)
    low, _ = token_logp_entropy(h.bfloat16(), w.bfloat16(), y)
    assert torch.equal(logp, low)
    full, _ = token_logp_entropy(h, w, y)
    assert not torch.equal(logp, full)
    (grad,) = torch.autograd.grad((logp * g).sum(), w)
    assert grad.dtype == torch.float32


def test_memory_above_inputs_and_gradients_does_not_grow_with_tokens_times_vocabulary():
    """1,500 tokens, V = 20,000: the plain path holds several tensors of 120 MB; ours allocates less than half of one at once."""
    from torch.profiler import ProfilerActivity, profile

    h, w = torch.randn(1500, 8).requires_grad_(), torch.randn(20_000, 8).requires_grad_()
    y = torch.randint(20_000, (1500,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        logp, _ = token_logp_entropy(h, w, y)
        logp.sum().backward()
    peak = now = 0
    for event in sorted((e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    gradients = h.nbytes + w.nbytes
    assert gradients < peak < gradients + 60e6
    want_logp, _ = plain(h[:7], w, y[:7])
    torch.testing.assert_close(logp[:7], want_logp, rtol=0, atol=2e-5)


def test_only_the_gradients_asked_for():
    h, w, b, y, g, _ = inputs()
    logp, _ = token_logp_entropy(h, w.detach(), y, bias=b)
    (logp * g).sum().backward()
    assert h.grad is not None
    assert b.grad is not None
    assert w.grad is None


def test_no_tokens_give_zero_gradient():
    h, w, _, _, _, _ = inputs()
    logp, entropy = token_logp_entropy(h[:0], w, torch.empty(0, dtype=torch.long))
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_shift_reads_one_column_to_the_left():
    assert shift(torch.tensor([[5, 6, 7], [8, 9, 10]])).tolist() == [[5, 5, 6], [8, 8, 9]]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"softcap": 0.0}, "softcap"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
        ({"target_N": torch.zeros(3, dtype=torch.long)}, "hidden"),
    ],
)
def test_bad_arguments_are_said(change, named):
    good = {"hidden_ND": torch.zeros(2, 4), "weight_VD": torch.zeros(5, 4), "target_N": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(UsageError, match=named):
        token_logp_entropy(**{**good, **change})
    with pytest.raises(UsageError, match="logits"):
        logits_logp_entropy(torch.zeros(2, 5), torch.zeros(3, dtype=torch.long))
