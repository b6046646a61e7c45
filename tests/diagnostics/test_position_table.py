"""Tables by position: hand-computed bins, exact merging over any split, and the bound on the gradient at the logits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nearpolicy.diagnostics.position import EDGES, LAYOUT, NAME, PositionLog, position_table
from nearpolicy.methods import METHODS, method, policy_loss
from nearpolicy.metrics import TABLE, Layout, Table, merge, to_floats
from nearpolicy.objective import position
from nearpolicy.objective.stats import logit_gradient_norm
from nearpolicy.rollout import Outcome, Rollout, Score, Scored, Source, StopReason, collate
from tests.builders import random_batch

ROW = {name: i for i, name in enumerate(LAYOUT.rows)}


def inputs(batch, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logp = (batch.logp_behavior_BT + 0.3 * torch.randn(batch.token_BT.shape, generator=draw)).clamp(max=-1e-3)
    return logp, torch.rand(batch.token_BT.shape, generator=draw) * 2


def table_of(batch, logp, entropy, *, name="grpo", step=7, **options):
    out = policy_loss(
        method(name, **options), logp=logp, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT, mask=batch.mask_BT,
        response_mask=batch.response_mask_BT, prefix_length=batch.prefix_length_B, num_tokens=40, num_sequences=8,
    )  # fmt: skip
    return position_table(batch, out.seen, logp_BT=logp, entropy_BT=entropy, step=step)


def one_response():
    """Five response tokens after a prompt of two, written by versions 1, 1, 3, 3, 3; the last is masked out of the loss."""
    rollout = Rollout(
        prompt_id="p", group=0, sample=0, prompt_P=np.array([3, 4]), response_T=np.array([5, 6, 7, 8, 9]),
        logp_behavior_T=np.array([-1.0, -2.0, -0.5, -1.0, -3.0], np.float32), version_T=np.array([1, 1, 3, 3, 3]), prefix_length=2,
        entropy_T=np.array([np.nan, np.nan, 0.25, 0.75, 1.0], np.float32), stop=StopReason.EOS, source=Source.RELAY,
    )  # fmt: skip
    batch = collate([Scored(rollout=rollout, score=Score(reward=1.0, outcome=Outcome.SCORE))], advantage_B=[2.0])
    mask = batch.mask_BT.clone()
    mask[0, 6] = False
    return replace(batch, mask_BT=mask)


def test_five_tokens_by_hand():
    batch = one_response()
    # Log ratios 0, 0.5, -0.25, 0; the second lies above 1 + 0.2 with A > 0, so it is clipped.
    logp = torch.tensor([[0.0, 0.0, -1.0, -1.5, -0.75, -1.0, -9.0]])
    entropy = torch.tensor([[9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 9.0]])
    out = policy_loss(method("grpo", aggregate="token_mean"), logp=logp, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT,
                      mask=batch.mask_BT, response_mask=batch.response_mask_BT)  # fmt: skip
    columns = position_table(batch, out.seen, logp_BT=logp, entropy_BT=entropy, step=5).columns()
    nan = math.nan
    # t = 0, 1, 2, 3 of T = 5 lie in the tenths 0, 2, 4, 6.
    assert columns["tokens/rel"] == [1, 0, 1, 0, 1, 0, 1]
    assert columns["entropy/rel"] == pytest.approx([1, nan, 2, nan, 3, nan, 4], nan_ok=True)
    assert columns["clip_frac/rel"] == pytest.approx([0, nan, 1, nan, 0, nan, 0], nan_ok=True)
    assert columns["age/rel"] == pytest.approx([4, nan, 4, nan, 2, nan, 2], nan_ok=True)
    # By token index: bins 0, 1, 2-3.
    assert columns["tokens/abs"] == [1, 1, 2]
    assert columns["entropy/abs"] == [1, 2, 3.5]
    assert columns["surprisal_behavior/abs"] == [1, 2, 0.75]
    assert columns["entropy_behavior/abs"] == pytest.approx([nan, nan, 0.5], nan_ok=True)
    assert columns["log_ratio/abs"] == pytest.approx([0, 0.5, -0.125])
    assert columns["abs_log_ratio/abs"] == pytest.approx([0, 0.5, 0.125])
    assert columns["raw_weight/abs"] == pytest.approx([1, math.exp(0.5), (math.exp(-0.25) + 1) / 2], rel=1e-5)
    weight = [1, 0, (math.exp(-0.25) + 1) / 2]
    assert columns["weight/abs"] == pytest.approx(weight, rel=1e-5)
    mass = 1 + math.exp(-0.25) + 1
    assert columns["weight_mass/abs"] == pytest.approx([1 / mass, 0, (math.exp(-0.25) + 1) / mass], rel=1e-5)
    assert columns["advantage_mass/abs"] == [0.25, 0.25, 0.5]
    norm = logit_gradient_norm(logp[0, 2:6], entropy[0, 2:6])
    pull = [float(norm[0]), 0.0, float(math.exp(-0.25) * norm[2] + norm[3])]
    assert columns["gradient_share/abs"] == pytest.approx([p / sum(pull) for p in pull], rel=1e-5)


@given(split=st.lists(st.integers(0, 3), min_size=8, max_size=8), seed=st.integers(0, 5), name=st.sampled_from(["grpo", "vespo", "gspo", "cispo"]))
@settings(max_examples=30, deadline=None)
def test_any_micro_batches_merge_to_the_whole(split, seed, name):
    batch = random_batch(rows=8, group_size=2, seed=seed)
    logp, entropy = inputs(batch, seed)
    whole = table_of(batch, logp, entropy, name=name)
    parts = []
    for part in range(4):
        rows = [b for b in range(8) if split[b] == part]
        if rows:
            micro = batch.rows(rows)
            T = micro.token_BT.shape[1]
            parts.append({NAME: table_of(micro, logp[rows, :T], entropy[rows, :T], name=name)})
    merged = merge(parts)[NAME]
    # Counts and whole numbers are equal exactly, sums up to the order of float64 additions.
    for exact in ("tokens", "own", "clipped", "age"):
        assert torch.equal(merged.sums[ROW[exact]], whole.sums[ROW[exact]])
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-12, atol=1e-12)
    assert merged.value == whole.value == batch.num_tokens


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_the_whole_table(name):
    batch = random_batch(rows=4, group_size=2, seed=1)
    logp, entropy = inputs(batch)
    chosen = method(name, **({"max_length": 16} if METHODS[name].aggregate == "constant" else {}))
    columns = dict.fromkeys(chosen.needs, batch.logp_behavior_BT - 0.1)
    out = policy_loss(chosen, logp=logp, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT, mask=batch.mask_BT, **columns)
    table = position_table(batch, out.seen, logp_BT=logp, entropy_BT=entropy, step=1)
    for axis in LAYOUT.axes:
        got = table.columns()
        assert sum(got[f"tokens/{axis}"]) == batch.num_tokens
        for share in ("weight_mass", "advantage_mass", "gradient_share"):
            assert np.nansum(got[f"{share}/{axis}"]) == pytest.approx(1, abs=1e-4)
        for counted in ("entropy", "weight", "clip_frac"):
            assert len(got[f"{counted}/{axis}"]) == len(got[f"tokens/{axis}"])


def test_sums_agree_with_the_metrics_of_the_update():
    batch = random_batch(rows=8, group_size=2, seed=3)
    logp, entropy = inputs(batch)
    out = policy_loss("grpo", logp=logp, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT, mask=batch.mask_BT)
    table = position_table(batch, out.seen, logp_BT=logp, entropy_BT=entropy, step=0)
    total = {name: float(table.sums[i, LAYOUT.axes["rel"]].sum()) for name, i in ROW.items()}
    assert torch.allclose(table.sums[:, LAYOUT.axes["rel"]].sum(1), table.sums[:, LAYOUT.axes["abs"]].sum(1))
    n = total["tokens"]
    assert total["clipped"] / n == out.metrics["ratio/clip_frac"].value
    assert total["weight"] / n == pytest.approx(out.metrics["weight/mean"].value)
    assert total["advantage"] / n == pytest.approx(out.metrics["advantage/abs_mean"].value, rel=1e-5)
    assert -total["log_ratio"] / n == pytest.approx(out.metrics["policy/kl_behavior_k1"].value, rel=1e-4)


def test_demonstrations_have_no_age_ratio_or_surprisal():
    batch = random_batch(rows=4, group_size=2, seed=2)
    batch = replace(batch, source_B=(Source.DEMONSTRATION, *batch.source_B[1:]))
    logp, entropy = inputs(batch)
    out = policy_loss("luffy", logp=logp, logp_behavior=batch.logp_behavior_BT, advantage=batch.advantage_BT, mask=batch.mask_BT,
                      off_policy=batch.off_policy_B)  # fmt: skip
    table = position_table(batch, out.seen, logp_BT=logp, entropy_BT=entropy, step=3)
    rel = LAYOUT.axes["rel"]
    assert table.sums[ROW["tokens"], rel].sum() == batch.num_tokens
    assert table.sums[ROW["own"], rel].sum() == batch.mask_BT[1:].sum()
    assert table.sums[ROW["age"], rel].sum() == 3 * batch.mask_BT[1:].sum()
    assert table.sums[ROW["surprisal"], rel].sum() == pytest.approx(-float(batch.logp_behavior_BT[1:][batch.mask_BT[1:]].sum()), rel=1e-6)


def test_an_all_masked_batch_is_an_empty_table():
    batch = random_batch(rows=2, group_size=2, seed=0)
    batch = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    table = table_of(batch, *inputs(batch))
    assert table.value == 0
    assert not table.sums.any()
    assert table.columns() == {"tokens/rel": [], "tokens/abs": []}


def test_token_bins_are_powers_of_two():
    mask = torch.ones(1, 40, dtype=torch.bool)
    assert position.token_bins(mask)[0, [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 39]].tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert position.token_bins(torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[-1] * 3]
    far = torch.ones(1, 40_000, dtype=torch.bool)
    assert position.token_bins(far)[0, [32_767, 32_768, 39_999]].tolist() == [15, 16, 16]


def test_every_column_is_in_the_table_of_metrics_and_every_axis_has_its_edges():
    for name in ("tokens", *LAYOUT.reads):
        assert f"{NAME}/{name}" in TABLE
    for axis, where in LAYOUT.axes.items():
        assert len(EDGES[axis]) + 1 == where.stop - where.start


def test_only_rows_with_counts_carry_tables():
    batch = random_batch(rows=4, group_size=2, seed=0)
    table = table_of(batch, *inputs(batch))
    assert to_floats({NAME: table}, counts=False) == {}
    assert set(to_floats({NAME: table})) == {f"{NAME}/{column}" for column in table.columns()}
    with pytest.raises(ValueError, match="layouts"):
        table.merge(Table(table.sums, Layout(rows=LAYOUT.rows, axes=LAYOUT.axes, reads={})))


def test_the_log_adds_updates_and_survives_a_checkpoint():
    batch = random_batch(rows=4, group_size=2, seed=0)
    first, second = (table_of(batch, *inputs(batch, seed)) for seed in (1, 2))
    log = PositionLog()
    assert log.take() == {}
    log.add(first)
    log.due = True
    resumed = PositionLog()
    resumed.load_state_dict(log.state_dict())
    for each in (log, resumed):
        assert each.due
        each.add(second)
    taken = log.take()
    assert taken == {f"{NAME}/{k}": v for k, v in first.merge(second).columns().items()}
    assert resumed.take() == taken
    assert not log.due
    assert log.take() == {}
    resumed.load_state_dict({"due": False, "sums": [[1.0]]})
    assert resumed.take() == {}


def gradient(logits, token):
    x = logits.clone().requires_grad_()
    (g,) = torch.autograd.grad(torch.log_softmax(x, 0)[token], x)
    return float(g.norm())


def bound(logits, token):
    logp = torch.log_softmax(logits, 0)
    return float(logit_gradient_norm(logp[token], -(logp.exp() * logp).sum()))


@given(seed=st.integers(0, 10_000), vocabulary=st.integers(2, 60), sharpness=st.floats(0, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_bound_lies_below_the_norm_by_at_most_the_square_root_of_two(seed, vocabulary, sharpness, data):
    logits = sharpness * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    token = data.draw(st.integers(0, vocabulary - 1))
    exact, got = gradient(logits, token), bound(logits, token)
    assert exact / math.sqrt(2) - 1e-9 <= got <= exact * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("vocabulary", [2, 3, 50])
@pytest.mark.parametrize("own", [-3.0, 0.0, 2.0, 6.0])
def test_the_bound_is_exact_for_equally_likely_alternatives(vocabulary, own):
    logits = torch.zeros(vocabulary, dtype=torch.float64)
    logits[0] = own
    assert bound(logits, 0) == pytest.approx(gradient(logits, 0), rel=1e-9)


def test_a_certain_token_has_no_gradient():
    assert logit_gradient_norm(torch.tensor([0.0, 1e-7]), torch.tensor([0.0, 0.0])).tolist() == [0.0, 0.0]
