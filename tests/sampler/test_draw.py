"""Draws by inverse CDF: exact against float64, by chi-square, and at the corners."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from nearpolicy.sampler.draw import draw


def exact_token(logits_V, uniform):
    """The definition in float64, for one row."""
    mass = np.exp(np.asarray(logits_V, np.float64) - np.max(logits_V))
    return int(np.searchsorted(np.cumsum(mass), uniform * mass.sum(), side="right"))


@pytest.mark.parametrize("V", [2, 32, 1024, 1025, 5000, 8192])
def test_token_equals_the_definition(V):
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(64, V, generator=generator) * 3
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    got = draw(logits, uniform, entropy=True)
    logp = logits.double().log_softmax(-1)
    want = [exact_token(row, u) for row, u in zip(logits.numpy(), uniform.numpy(), strict=True)]
    # A uniform that falls within float32 rounding of a token's edge may go to its neighbour: once in 1e5 draws.
    assert sum(a != b for a, b in zip(got.token_B.tolist(), want, strict=True)) == 0
    torch.testing.assert_close(got.logp_B, logp.gather(1, got.token_B[:, None])[:, 0].float(), atol=2e-6, rtol=0)
    torch.testing.assert_close(got.entropy_B, -(logp.exp() * logp).sum(-1).float(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("V", [12, 3000])
def test_chi_square(V):
    rng = np.random.default_rng(V)
    logits = torch.from_numpy(rng.normal(size=V) * 2).float()
    draws = 40 * 1000
    uniform = torch.from_numpy(rng.random(draws))
    tokens = torch.cat([draw(logits.expand(1000, V), u).token_B for u in uniform.split(1000)])
    want = logits.double().softmax(0).numpy() * draws
    counts = np.bincount(tokens, minlength=V).astype(float)
    rare = want < 5
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(want[~rare], want[rare].sum())
    keep = pooled[1] > 0
    assert stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > 1e-3


@pytest.mark.parametrize("V", [3, 2049])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_forbidden_tokens_are_never_drawn(V, uniform):
    """Masses at the very ends and -inf around them: the first and last uniforms stay on tokens with mass."""
    logits = torch.full((1, V), -math.inf)
    logits[0, 1] = 2.0
    out = draw(logits, torch.tensor([uniform], dtype=torch.float64), entropy=True)
    assert (int(out.token_B), float(out.logp_B), float(out.entropy_B)) == (1, 0.0, 0.0)


def test_tail_of_a_large_vocabulary_is_reachable():
    """The last token of 50,000 equal ones needs a running sum better than float32's."""
    V = 50_000
    u = torch.tensor([(V - 0.5) / V, (V - 1.5) / V, 0.5 / V], dtype=torch.float64)
    assert draw(torch.zeros(3, V), u).token_B.tolist() == [V - 1, V - 2, 0]


def test_temperature_zero_is_argmax_with_log_probs_at_one():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    out = draw(logits, torch.tensor([0.99], dtype=torch.float64), temperature=0.0)
    assert int(out.token_B) == 1
    assert float(out.logp_B) == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("V", [4, 1500])
def test_non_finite_logits_show(bad, V):
    logits = torch.zeros(2, V)
    logits[1, 2] = bad
    out = draw(logits, torch.tensor([0.1, 0.1], dtype=torch.float64))
    assert out.logp_B.isfinite().tolist() == [True, False]
    assert 0 <= int(out.token_B[1]) < V


def test_logits_are_left_alone():
    logits = torch.randn(2, 1300)
    before = logits.clone()
    for options in ({}, {"temperature": 0.5, "entropy": True}, {"top_p": 0.5}, {"temperature": 0.0}):
        draw(logits, torch.tensor([0.2, 0.9], dtype=torch.float64), **options)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("V", [6, 1300])
def test_top_p_keeps_the_token_that_crosses(V):
    logits = torch.full((1, V), -30.0)
    logits[0, :4] = torch.log(torch.tensor([0.1, 0.5, 0.25, 0.15]))
    grid = torch.linspace(0, 1 - 1e-9, 201, dtype=torch.float64)
    for options, kept in (
        ({"top_p": 0.5}, {1}), ({"top_p": 0.51}, {1, 2}), ({"top_p": 0.76}, {1, 2, 3}), ({"top_k": 2}, {1, 2}), ({"top_k": 3, "top_p": 0.6}, {1, 2}),
    ):  # fmt: skip
        out = draw(logits.expand(201, V), grid, **options)
        assert set(out.token_B.tolist()) == kept
        torch.testing.assert_close(out.logp_B, logits[0].log_softmax(0)[out.token_B], atol=1e-5, rtol=0)
    share = draw(logits.expand(201, V), grid, top_k=2).token_B.eq(1).double().mean()
    assert float(share) == pytest.approx(0.5 / 0.75, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 5),
    st.floats(0.01, 1),
    st.integers(1, 50),
)
def test_any_row_draws_a_token_with_mass(row, uniform, temperature, top_p, top_k):
    logits = torch.tensor([row], dtype=torch.float32)
    out = draw(logits, torch.tensor([uniform], dtype=torch.float64), temperature=temperature, top_p=top_p, top_k=top_k, entropy=True)
    logp = (logits.double() / temperature).log_softmax(-1)[0]
    assert float(out.logp_B) == pytest.approx(float(logp[out.token_B]), abs=1e-3)
    assert float(logp[out.token_B]) > -104
    assert -1e-5 <= float(out.entropy_B) <= math.log(len(row)) + 1e-5
