"""Micro-batch plans and packed attention."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.errors import UsageError
from nearpolicy.policy import packing
from nearpolicy.policy.packing import families, pack, packed_attention, plan_microbatches

from .models import batch_of

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=14)


def test_families_need_equal_group_and_equal_prompt():
    batch = batch_of([(0, 3, 2), (1, 3, 2), (0, 3, 4), (0, 4, 1), (1, 3, 1)])
    assert families(batch) == [[0, 2], [1, 4], [3]]


@given(rows=ROWS, budget=st.integers(1, 60), padded=st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_row_once_and_within_the_budget(rows, budget, padded):
    batch = batch_of(rows)
    plan = plan_microbatches(batch, budget, padded=padded)
    assert sorted(r for part in plan for r in part) == list(range(len(rows)))
    assert plan == plan_microbatches(batch, budget, padded=padded)
    for part in plan:
        assert part == sorted(part)
        lengths = [rows[r][1] + rows[r][2] for r in part]
        if padded:
            cost = len(part) * max(lengths)
        else:
            cost = sum(rows[part[f[0]]][1] for f in families(batch.rows(part))) + sum(rows[r][2] for r in part)
        assert cost <= budget or len(part) == 1


def test_a_family_that_fits_stays_whole():
    batch = batch_of([(g, 10, 5) for g in range(4) for _ in range(4)])
    assert plan_microbatches(batch, 60) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert plan_microbatches(batch, 30) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_budget_below_one_is_refused():
    with pytest.raises(UsageError, match="token_budget"):
        plan_microbatches(batch_of([(0, 1, 1)]), 0)


def test_layout_counts_each_prompt_once_and_no_last_token():
    batch = batch_of([(0, 5, 4), (0, 5, 1), (0, 5, 0), (1, 3, 6)])
    layout = pack(batch, "cpu")
    # prompt 5 once, 3 + 0 response tokens; the single row 3 + 5
    assert layout.num_tokens == 5 + 3 + 3 + 5
    assert sum(b.num_tokens for b in layout.blocks) == layout.num_tokens
    source = layout.token_1N[0, layout.source_n]
    position = layout.position_1N[0, layout.source_n]
    b, t = batch.response_mask_BT.nonzero(as_tuple=True)
    assert torch.equal(source, batch.token_BT[b, t - 1])
    assert torch.equal(position, t - 1)


def reference(q, k, v, batch, layout, scale):
    """Dense attention over [N, N] with the mask written out from the rows."""
    owner = {}
    for n, (token_row, column) in enumerate(_owners(batch, layout)):
        owner[n] = (token_row, column)
    N = layout.num_tokens
    see = torch.zeros(N, N, dtype=torch.bool)
    for i, (rows_i, t_i) in owner.items():
        for j, (rows_j, t_j) in owner.items():
            see[i, j] = t_j <= t_i and rows_i <= rows_j
    H, h = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(H // h, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~see, -torch.inf).softmax(-1), v)


def _owners(batch, layout):
    """Rows and column of each packed token, read from a batch whose token ids name their row and column."""
    T = batch.token_BT.shape[1]
    shared = {f[0]: (set(f), int(batch.prompt_length_B[f[0]])) for f in families(batch)}
    for code in layout.token_1N[0].tolist():
        row, column = divmod(code, T)
        rows, prompt = shared.get(row, ({row}, 0))
        yield (rows if column < prompt else {row}), column


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("merge", [0, 4096])
def test_attention_equals_dense_attention(eager, merge, monkeypatch):
    monkeypatch.setattr(packing, "EAGER_SCORES", 2**22 if eager else 0)
    monkeypatch.setattr(packing, "_MERGE_CELLS", merge)
    batch = batch_of([(0, 5, 4), (0, 5, 9), (0, 5, 1), (1, 3, 6), (2, 7, 2), (2, 7, 3)])
    layout = pack(batch, "cpu")
    B, T = batch.token_BT.shape
    code = torch.arange(B * T).view(B, T)
    for f in families(batch):  # rows of a family must look alike in the prompt
        code[f, : int(batch.prompt_length_B[f[0]])] = code[f[0], : int(batch.prompt_length_B[f[0]])]
    named = type(batch)(**{**{s: getattr(batch, s) for s in batch.__slots__}, "token_BT": code})
    layout_named = pack(named, "cpu")
    assert torch.equal(layout_named.position_1N, layout.position_1N)
    N = layout.num_tokens
    q, k, v = (torch.randn(N, heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    got = packed_attention(q, k, v, layout_named, scale=0.3)
    want = reference(q, k, v, named, layout_named, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    g = torch.randn_like(got)
    for ours, theirs in zip(torch.autograd.grad((got * g).sum(), [q, k, v]), torch.autograd.grad((want * g).sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
