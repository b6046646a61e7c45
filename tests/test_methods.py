"""policy_loss as its users see it: rows, options, micro-batches, precision, extremes, metrics, errors."""

import math
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

import nearpolicy
from nearpolicy.errors import DataError, UsageError
from nearpolicy.methods import METHODS, method, policy_loss
from nearpolicy.metrics import TABLE, merge, to_floats

F64 = torch.float64
LENGTHS = (1, 7, 3, 9)
OPTIONS = {"dr_grpo": {"max_length": 9}}
VARIANTS = [
    *((name, OPTIONS.get(name, {})) for name in METHODS),
    ("m2po", {"variant": "released_code"}),
    ("iw_opd", {"weight": "ideal", "alpha": 0.5}),
    ("opd", {"kernel": "m2po"}),
    ("vespo", {"correction": "sequence_truncate"}),
    ("gspo", {"correction": "token_band", "clip_low": None, "clip_high": None}),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in VARIANTS]


def batch(seed=0, lengths=LENGTHS, dtype=F64, drift=0.4):
    g = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths) + 1
    noise = lambda scale: scale * torch.randn(B, T, generator=g, dtype=F64)
    logp = -torch.rand(B, T, generator=g, dtype=F64) - 3.0
    mask = (torch.arange(T) >= 1) & (torch.arange(T) <= torch.tensor(lengths)[:, None])
    columns = {
        "logp": logp, "logp_behavior": logp + noise(drift), "logp_proximal": logp + noise(drift / 2), "logp_teacher": logp + noise(0.5),
        "logp_reference": logp + noise(0.5), "advantage": torch.randn(B, generator=g, dtype=F64),
    }  # fmt: skip
    columns = {name: column.to(dtype) for name, column in columns.items()}
    return {**columns, "mask": mask, "prefix_length": torch.tensor([n // 3 for n in lengths])}


def inputs(name, data):
    """The columns as they are; LUFFY's first row is a demonstration. Distillation rows get no reward."""
    data = dict(data)
    if name == "luffy":
        data["off_policy"] = torch.arange(len(data["mask"])) == 0
    if METHODS[name].signal is not None:
        del data["advantage"]
    return data


def run(name, options, data, **more):
    logp = data["logp"].detach().clone().requires_grad_()
    out = policy_loss(name, options=options, **{**inputs(name, data), "logp": logp}, **more)
    out.loss.backward()
    return out, logp.grad


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_the_split_into_micro_batches_changes_nothing(name, options):
    data = batch()
    whole, gradient = run(name, options, data)
    statistics = method(name, **options).prepare(inputs(name, data))
    assert bool(statistics) is method(name, **options).needs_statistics
    counts = {"num_tokens": sum(LENGTHS), "num_sequences": len(LENGTHS), "statistics": statistics}
    expected = to_floats(whole.metrics)
    for size in (1, 2, 4):
        outs, grads = [], []
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            columns = inputs(name, data)
            leaf = columns.pop("logp")[rows].clone().requires_grad_()
            out = policy_loss(name, logp=leaf, options=options, **{k: v[rows] for k, v in columns.items()}, **counts)
            out.loss.backward()
            outs.append(out)
            grads.append(leaf.grad)
        assert sum(o.loss.item() for o in outs) == pytest.approx(whole.loss.item(), abs=1e-12)
        torch.testing.assert_close(torch.cat(grads), gradient, rtol=0, atol=1e-12)
        merged = to_floats(merge(o.metrics for o in outs))
        assert merged.keys() == expected.keys()
        for key, value in merged.items():
            assert value == pytest.approx(expected[key], abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_gradient_is_minus_aggregate_times_weight_times_advantage(name, options):
    data = batch(3)
    out, gradient = run(name, {**options, "aggregate": "token_mean"}, data)
    torch.testing.assert_close(gradient, -(out.weight * out.advantage) / sum(LENGTHS), rtol=1e-12, atol=1e-15)
    assert not out.weight.requires_grad
    assert (out.weight[~data["mask"]] == 0).all()


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_padding_may_hold_anything(name, options):
    data = batch(1)
    _, gradient = run(name, options, data)
    for fill in (float("nan"), -torch.inf, 3.0):
        dirty = {k: v.masked_fill(~data["mask"], fill) if v.shape == data["mask"].shape and v.is_floating_point() else v for k, v in data.items()}
        out, again = run(name, options, dirty)
        assert torch.equal(again, gradient)
        assert not math.isnan(out.loss.item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_is_promoted(name, dtype):
    data = batch(2, dtype=dtype)
    out, gradient = run(name, OPTIONS.get(name), data)
    full = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    exact, full_gradient = run(name, OPTIONS.get(name), full)
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.weight, exact.weight)
    assert torch.equal(out.loss, exact.loss)
    assert torch.equal(gradient, full_gradient.to(dtype))


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
@pytest.mark.parametrize("size", [1e4, -1e4, 50.0, -50.0])
def test_extreme_log_ratios_stay_finite_in_float32(name, options, size):
    data = batch(4, dtype=torch.float32)
    data["logp_behavior"] = data["logp"] - size * torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None]
    out, gradient = run(name, options, data, check=False)  # as large as this, the log-probs of some are above 0
    assert torch.isfinite(out.weight).all()
    assert torch.isfinite(gradient).all()
    assert math.isfinite(out.loss.item())
    for key in ("policy/objective", "weight/mean", "weight/ess_raw", "policy/kl_behavior_k3", "ratio/clamped_frac"):
        assert math.isfinite(out.metrics[key].value), key


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_an_all_masked_batch_trains_on_nothing_and_says_so(name, options):
    data = batch(5)
    data["mask"] = torch.zeros_like(data["mask"])
    data["prefix_length"] = torch.zeros(4, dtype=torch.long)
    out, gradient = run(name, options, data)
    assert out.loss.item() == 0
    assert (gradient == 0).all()
    assert out.metrics["data/empty_rows"].value == 4


def test_a_fully_masked_row_changes_neither_loss_nor_gradient():
    data = batch(6)
    for name in METHODS:
        padded = {k: torch.cat([v, v[:1]]) for k, v in data.items()}
        padded["mask"][-1] = False
        out, gradient = run(name, OPTIONS.get(name), padded)
        plain, alone = run(name, OPTIONS.get(name), data)
        torch.testing.assert_close(gradient[:4], alone, rtol=1e-12, atol=1e-15)
        assert out.loss.item() == pytest.approx(plain.loss.item(), abs=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from(sorted(METHODS)), st.permutations(range(4)))
def test_the_order_of_rows_does_not_matter(seed, name, order):
    data = inputs(name, batch(seed))
    shuffled = {k: v[list(order)] for k, v in data.items()}
    a, b = (policy_loss(name, options=OPTIONS.get(name), **d) for d in (data, shuffled))
    assert a.loss.item() == pytest.approx(b.loss.item(), abs=1e-12)
    torch.testing.assert_close(a.weight[list(order)], b.weight, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.signal is None])
def test_on_policy_every_row_is_reinforce(name):
    data = batch(7)
    del data["prefix_length"]
    data["logp_behavior"] = data["logp_proximal"] = data["logp"]
    out = policy_loss(name, options={**OPTIONS.get(name, {}), "aggregate": "token_mean"}, **data)
    assert torch.equal(out.weight, data["mask"].double())
    assert out.loss == policy_loss("reinforce", **data).loss
    assert out.metrics["weight/ess_raw"].value == pytest.approx(1.0)
    assert out.metrics["ratio/clip_frac"].value == 0


# --- the value of the literal objective -------------------------------------------------------------------------------


def literal(name, logp, data):
    """Each paper's objective as it is written, differentiable, averaged over sequences (token means inside) where the paper does."""
    m, lr = data["mask"].double(), (logp - data["logp_behavior"]) * data["mask"]
    A, T = data["advantage"][:, None], m.sum(1)
    r, positive = lr.exp(), A >= 0
    W, s = lr.sum(1, keepdim=True).exp(), (lr.sum(1, keepdim=True) / T[:, None]).exp()

    def clipped(x, low, high):
        return torch.minimum(x * A, x.clamp(1 - low, 1 + high) * A)

    if name in ("grpo", "luffy"):
        return (clipped(r, 0.2, 0.2) * m).sum() / m.sum()
    if name == "dapo":
        return (clipped(r, 0.2, 0.28) * m).sum() / m.sum()
    if name == "gspo":
        return (clipped(s, 0.2, 0.2)[:, 0] / len(T)).sum()
    if name == "sapo":
        tau = 1.05 - 0.05 * positive.double()
        return (torch.sigmoid(tau * (r - 1)) * 4 / tau * A * m).sum() / m.sum()
    if name == "gmpo":
        one = torch.ones_like(lr)
        clip = torch.where(positive, torch.minimum(lr, 0.4 * one), torch.maximum(lr, -0.4 * one)) * m
        return ((clip.sum(1) / T).exp() * A[:, 0]).sum() / len(T)
    side = [math.exp(c2) * c2**-c1 * math.gamma(c1) * torch.special.gammainc(torch.full_like(W, c1), c2 * W) for c1, c2 in ((2.0, 3.0), (3.0, 2.0))]
    return (torch.where(positive, *side) * A).sum() / m.sum()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"aggregate": "token_mean"}), ("dapo", {}), ("luffy", {}), ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("sapo", {"aggregate": "token_mean"}), ("gmpo", {}), ("vespo", {}),
    ],
)  # fmt: skip
def test_gradient_and_objective_equal_those_of_the_literal_objective(name, options):
    for seed in range(4):
        data = batch(seed)
        del data["prefix_length"]
        logp = data["logp"].clone().requires_grad_()
        value = literal(name, logp, data)
        (expected,) = torch.autograd.grad(value, logp)
        leaf = data["logp"].clone().requires_grad_()
        out = policy_loss(name, options=options, **{**data, "logp": leaf})
        out.loss.backward()
        torch.testing.assert_close(-leaf.grad, expected, rtol=1e-9, atol=1e-12)
        assert out.metrics["policy/objective"].value == pytest.approx(value.item(), abs=1e-9)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_every_metric_is_in_the_table():
    for name, options in VARIANTS:
        out, _ = run(name, options, batch())
        assert set(out.metrics) <= set(TABLE), name


def test_metrics_by_hand():
    logp = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]], dtype=F64)
    behavior = torch.tensor([[-1.5, -1.0], [-1.0, -9.0]], dtype=F64)
    mask = torch.tensor([[1, 1], [1, 0]])
    out = policy_loss("dapo", logp=logp, logp_behavior=behavior, mask=mask, advantage=torch.tensor([1.0, -1.0], dtype=F64)).metrics
    W = [math.exp(0.5), math.exp(-1.0)]
    assert out["ratio/clip_frac"].value == pytest.approx(2 / 3)  # r = 1.65 for A > 0, r = 0.37 for A < 0
    assert out["ratio/outside_frac"].value == pytest.approx(2 / 3)
    assert out["weight/mean"].value == pytest.approx(1 / 3)
    assert out["weight/max"].value == 1
    assert out["weight/dead_frac"].value == 0.5
    assert out["weight/ess_raw"].value == pytest.approx(sum(W) ** 2 / (2 * sum(w * w for w in W)))
    assert out["weight/q_mean_w"].value == pytest.approx(W[0])  # phi is 1/2 on the first response and 0 on the second
    assert out["policy/kl_behavior_k1"].value == pytest.approx((-0.5 + 1.0) / 3)
    assert out["policy/kl_behavior_k3"].value == pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(-1) + 1) / 3)
    assert out["advantage/mean"].value == pytest.approx(1 / 3)
    assert out["advantage/abs_mean"].value == 1


def test_a_long_response_of_tiny_drift_is_counted_as_dead():
    T = 8000
    for sign in (1.0, -1.0):
        logp = torch.full((1, T), -1.0)
        out = policy_loss("vespo", logp=logp, logp_behavior=logp - 0.001 * sign, mask=torch.ones(1, T), advantage=torch.tensor([1.0]))
        assert out.weight.max() < 1e-3
        assert out.metrics["weight/dead_frac"].value == 1
        assert out.metrics["weight/log_sequence"].value == pytest.approx(8.0 * sign, rel=0.35)  # within a bin
        kept = policy_loss("vespo", logp=logp, logp_behavior=logp - 0.001 * sign, mask=torch.ones(1, T), advantage=torch.tensor([1.0]),
                           options={"length_norm": "mean"})  # fmt: skip
        assert kept.metrics["weight/dead_frac"].value == 0


def test_m2po_metrics():
    lr = torch.tensor([[0.1, 0.5, -0.3]], dtype=F64)
    out = policy_loss("m2po", logp=lr - 1, logp_behavior=torch.full((1, 3), -1.0, dtype=F64), mask=torch.ones(1, 3), advantage=torch.ones(1))
    assert out.metrics["m2po/second_moment"].value == pytest.approx((0.01 + 0.25) / 2)
    assert out.metrics["m2po/dropped_frac"].value == pytest.approx(1 / 3)
    assert out.weight[0].tolist() == pytest.approx([math.exp(0.1), 0.0, math.exp(-0.3)])


def test_demonstrations_are_left_out_of_ratio_metrics():
    data = batch(8)
    out, _ = run("luffy", {}, data)
    rest = {k: v[1:] for k, v in data.items()}
    alone = policy_loss("luffy", **rest)
    for key in ("weight/ess_raw", "policy/kl_behavior_k1", "ratio/outside_frac", "weight/q_mean_w"):
        assert out.metrics[key].value == pytest.approx(alone.metrics[key].value, abs=1e-12), key
    p = data["logp"][0, 1].exp().item()
    assert out.weight[0, 1].item() == pytest.approx(0.1 * p / (p + 0.1) ** 2)


# --- options, rows, errors ----------------------------------------------------------------------------------------------


def test_rows_are_complete():
    for name, row in METHODS.items():
        assert row.name == name
        assert row.formula
        assert row.source
        assert row.differences
        m = method(name)
        assert m.level in ("token", "sequence", "geometric", "sqrt")
        assert set(m.options) == set(row.all_options())
        for option in row.all_options().values():
            assert option.text
            assert option.expects
        assert method(name, **m.options).options == m.options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vespoo", {}, "Did you mean 'vespo'"),
        ("grpo", {"clip_hihg": 0.2}, "Did you mean 'clip_high'"),
        ("grpo", {"tau_pos": 1.0}, "'tau_pos'"),
        ("grpo", {"clip_low": -0.1}, "-0.1"),
        ("grpo", {"clip_low": float("nan")}, "nan"),
        ("grpo", {"clip_low": "0.2"}, "'0.2'"),
        ("grpo", {"clip_low": True}, "True"),
        ("grpo", {"dual_clip": 1.0}, "> 1"),
        ("sapo", {"tau_pos": 0}, "> 0"),
        ("vespo", {"c_pos": (2, 0)}, "two numbers > 0"),
        ("vespo", {"c_neg": (2,)}, "two numbers"),
        ("vespo", {"length_norm": "cube"}, "sqrt"),
        ("cispo", {"floor": 2.0, "cap": 1.0}, "at most cap"),
        ("m2po", {"budget": 0}, "> 0"),
        ("luffy", {"gamma": 0}, "> 0"),
        ("iw_opd", {"gamma": -0.5}, ">= 0"),
        ("opd", {"fraction": 1.5}, "<= 1"),
        ("opd", {"kernel": "luffy"}, "'luffy'"),
        ("exopd", {"extrapolation": float("inf")}, "inf"),
        ("dapo", {"aggregate": "mean"}, "token_mean"),
        ("dapo", {"max_length": 0}, "whole number"),
        ("dapo", {"correction": "tis"}, "token_truncate"),
        ("dapo", {"correction_cap": 2.0}, "Name the correction"),
        ("dapo", {"correction": "token_band", "correction_low": 6.0}, "at most correction_cap"),
        ("dapo", {"correction": "token_mask", "denominator": "behavior"}, "count twice"),
        ("dapo", {"denominator": "theta"}, "proximal"),
    ],
)
def test_wrong_names_and_values_are_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        method(name, **options)


def test_columns_that_a_method_needs():
    data = {k: v for k, v in batch().items() if k in ("logp", "logp_behavior", "mask")}
    with pytest.raises(UsageError, match="advantage = None"):
        policy_loss("grpo", **data)
    data["advantage"] = torch.zeros(4, dtype=F64)
    with pytest.raises(UsageError, match="no logp_proximal"):
        policy_loss("grpo", **data, options={"denominator": "proximal"})
    with pytest.raises(UsageError, match="no logp_proximal"):
        policy_loss("grpo", **data, options={"correction": "token_mask"})
    with pytest.raises(UsageError, match="max_length"):
        policy_loss("dr_grpo", **data)
    with pytest.raises(UsageError, match="statistics=method"):
        policy_loss("m2po", **data, num_tokens=20)
    with pytest.raises(UsageError, match="Only 'luffy'"):
        policy_loss("grpo", **data, off_policy=torch.tensor([True, False, False, False]))
    assert method("grpo").needs == frozenset()
    assert method("grpo", correction="token_mask").needs == {"logp_proximal"}
    assert method("opd").needs_advantage is False


def test_a_bad_number_at_a_trained_token_is_named():
    data = batch()
    for column, value in (("logp_behavior", float("nan")), ("logp", float("-inf")), ("advantage", float("inf"))):
        broken = {k: v.clone() for k, v in data.items()}
        broken[column][(2,) if column == "advantage" else (2, 1)] = value
        with pytest.raises(DataError, match=f"{column}: got {value} at row 2, column 1"):
            policy_loss("grpo", **broken)
    with pytest.raises(DataError, match=r"logp_behavior: got shape \(4, 3\)"):
        policy_loss("grpo", **{**data, "logp_behavior": data["logp"][:, :3]})
    with pytest.raises(DataError, match="outside response_mask"):
        policy_loss("grpo", **data, response_mask=torch.zeros_like(data["mask"]))


def test_options_replace_those_of_a_method():
    m = method("opd", kernel="cispo", cap=2.0)
    assert m.with_options(profile="prefix").options["cap"] == 2.0
    assert "cap" not in m.with_options(kernel="ppo").options
    assert method("gspo", clip_low=0.1).with_options(clip_high=0.2).options["clip_low"] == 0.1
    with pytest.raises(TypeError):
        m.options["cap"] = 3.0


def test_masks_may_be_bool_int_or_float_and_advantages_one_a_row():
    data = batch(9)
    expected = policy_loss("vespo", **data)
    for mask in (data["mask"].int(), data["mask"].float()):
        assert torch.equal(policy_loss("vespo", **{**data, "mask": mask}).weight, expected.weight)
    spread = data["advantage"][:, None].expand(4, 10)
    assert policy_loss("vespo", **{**data, "advantage": spread}).loss.item() == pytest.approx(expected.loss.item(), abs=1e-14)


def test_denominator_proximal_keeps_behavior_on_a_relayed_prefix():
    data = batch(10)
    out = policy_loss("cispo", **data, options={"denominator": "proximal", "cap": 1e9})
    prefix = torch.arange(10) <= data["prefix_length"][:, None]
    denominator = torch.where(prefix, data["logp_behavior"], data["logp_proximal"])
    torch.testing.assert_close(out.weight, (data["logp"] - denominator).exp() * data["mask"])


def test_both_ratio_scopes():
    data = batch(11)
    lr = (data["logp"] - data["logp_behavior"]) * data["mask"]
    prefix = (torch.arange(10) <= data["prefix_length"][:, None]) & data["mask"]
    whole = lr.sum(1, keepdim=True).exp()
    parts = torch.where(prefix, (lr * prefix).sum(1, keepdim=True), (lr * ~prefix).sum(1, keepdim=True)).exp()
    for scope, W in (("response", whole), ("segment", parts)):
        phi = torch.where(data["advantage"][:, None] >= 0, W**2 * (3 * (1 - W)).exp(), W**3 * (2 * (1 - W)).exp())
        torch.testing.assert_close(policy_loss("vespo", **data, options={"ratio_scope": scope}).weight, phi * data["mask"])


def test_the_package_root_offers_the_surface():
    assert nearpolicy.method("vespo").name == "vespo"
    assert nearpolicy.policy_loss is policy_loss
    assert nearpolicy.METHODS is METHODS


SMALL = {
    "logp": torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], dtype=F64), "logp_behavior": torch.tensor([[-1.1, -2.0], [-0.5, -1.4]], dtype=F64),
    "advantage": torch.tensor([1.0, -1.0], dtype=F64), "mask": torch.tensor([[True, True], [True, False]]),
}  # fmt: skip


WRONG_KINDS = """
import torch
from nearpolicy import policy_loss
from nearpolicy.errors import UsageError
logp = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]])
small = {"logp": logp, "logp_behavior": logp, "advantage": torch.ones(2), "mask": torch.ones(2, 2)}
ideal = {"statistics": {}, "logp_teacher": logp, "options": {"weight": "ideal"}}
for name, change, says in [
    ("grpo", {"logp": logp.numpy()}, "policy_loss: logp: got a ndarray"),
    ("grpo", {"logp_behavior": logp.tolist()}, "policy_loss: logp_behavior: got a list"),
    ("grpo", {"mask": None}, "policy_loss: mask: got a NoneType"),
    ("grpo", {"advantage": [1.0, -1.0]}, "policy_loss: advantage: got a list"),
    ("grpo", {"prefix_length": 1}, "policy_loss: prefix_length: got a int"),
    ("luffy", {"off_policy": [True, False]}, "policy_loss: off_policy: got a list"),
    ("grpo", {"logp_behavior": logp.to("meta")}, "policy_loss: logp_behavior: got device meta"),
    (None, {}, "policy_loss: method: got a NoneType"),
    (3, {}, "policy_loss: method: got a int"),
    ("grpo", {"num_tokens": "a"}, "num_tokens: got 'a'"),
    ("dr_grpo", {"num_sequences": [2], "options": {"max_length": 2}}, "num_sequences: got [2]"),
    ("grpo", {"num_tokens": True}, "num_tokens: got True"),
    ("dapo", {"num_tokens": torch.ones(2)}, "num_tokens: got a tensor (2,)"),
    ("dapo", {"num_tokens": float("inf")}, "num_tokens: got inf"),
    ("m2po", {"statistics": {}}, "policy_loss: statistics: got no m2po_threshold"),
    ("m2po", {"statistics": 3}, "policy_loss: statistics: got a int"),
    ("iw_opd", ideal, "policy_loss: statistics: got no log_partition_L"),
    ("grpo", {"options": 3}, "policy_loss: options: got a int"),
]:
    try:
        policy_loss(name, **{**small, **change})
    except UsageError as error:
        assert says in str(error), (says, str(error))
    else:
        raise AssertionError(f"taken: {says}")
"""


def test_arguments_of_the_wrong_kind_are_named():
    """In an interpreter of its own, where no type checker of the tests stands in front."""
    done = subprocess.run([sys.executable, "-c", WRONG_KINDS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("grpo", {"mask": torch.tensor([[1.0, 0.5], [1.0, 0.0]])}, "policy_loss: mask: got the value 0.5"),
        ("grpo", {"mask": torch.tensor([[1, 2], [1, 0]])}, "policy_loss: mask: got the value 2"),
        ("grpo", {"mask": torch.tensor([[1.0, float("nan")], [1.0, 0.0]])}, "policy_loss: mask: got the value nan"),
        ("grpo", {"response_mask": torch.tensor([[1, 1], [3, 0]])}, "policy_loss: response_mask: got the value 3"),
        ("luffy", {"off_policy": torch.tensor([0.3, 0.0])}, "policy_loss: off_policy: got the value 0.3"),
        ("grpo", {"prefix_length": torch.tensor([-1, 0])}, "policy_loss: prefix_length: got -1 at row 0"),
        ("grpo", {"prefix_length": torch.tensor([0, 2])}, "policy_loss: prefix_length: got 2 at row 1, whose response has 1 tokens"),
        ("grpo", {"prefix_length": torch.tensor([0.5, 0.0])}, "policy_loss: prefix_length: got 0.5 at row 0"),
        ("grpo", {"num_tokens": 0}, "policy_loss: num_tokens: got 0"),
        ("grpo", {"num_sequences": torch.tensor(0)}, "policy_loss: num_sequences: got 0"),
        ("grpo", {"logp": -SMALL["logp"]}, "policy_loss: logp: got 1.0 at row 0, column 0"),
        ("grpo", {"logp_behavior": SMALL["logp"].exp()}, "policy_loss: logp_behavior: got 0.36"),
        ("opd", {"logp_teacher": -SMALL["logp"]}, "policy_loss: logp_teacher: got 1.0"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_where_values_are_read(name, change, says):
    with pytest.raises(DataError, match=re.escape(says)):
        policy_loss(name, **{**SMALL, **change})
    policy_loss(name, **{**SMALL, **change}, check=False)


def test_what_is_on_the_edge_is_taken():
    """Rounding just above 0, values at masked tokens, whole prefixes, integer masks, and counts averaged over devices."""
    change = {
        "logp": torch.tensor([[5e-4, -2.0], [-0.5, 7.0]], dtype=F64), "prefix_length": torch.tensor([2.0, 1.0]),
        "mask": torch.tensor([[1, 1], [1, 0]]),
        "num_tokens": torch.tensor([1.5]), "num_sequences": 1,
    }  # fmt: skip
    assert math.isfinite(policy_loss("grpo", **{**SMALL, **change}).loss.item())
    nothing = {"mask": torch.zeros(2, 2), "num_tokens": 0, "num_sequences": 0}
    assert policy_loss("grpo", **{**SMALL, **nothing}).loss.item() == 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("vespo", {"c_pos": (1e300, 1e300)}, "two numbers > 0 and <= 1e+06"),
        ("vespo", {"c_neg": (2, float("nan"))}, "two numbers"),
        ("grpo", {"clip_high": 10**400}, "a number >= 0 and <= 1e+06"),
        ("cispo", {"cap": 1e10}, "<= 1e+09"),
        ("dr_grpo", {"max_length": 10**30}, "<= 1000000"),
    ],
)
def test_options_that_leave_the_floats_are_refused(name, options, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        method(name, **options)


def test_a_variant_is_a_set_of_defaults_under_one_name():
    """LUFFY's released script: unclipped, divided by the response limit; what is set by hand stays."""
    paper, released = method("luffy"), method("luffy", variant="released_script")
    assert (paper.options["clip_low"], paper.options["clip_high"], paper.options["aggregate"]) == (0.2, 0.2, "token_mean")
    assert (released.options["clip_low"], released.options["clip_high"], released.options["aggregate"]) == (None, None, "constant")
    assert method("luffy", variant="released_script", clip_high=0.3).options["clip_high"] == 0.3
    longer = released.with_options(max_length=8)
    assert longer.options == {**released.options, "max_length": 8}
    g = torch.Generator().manual_seed(0)
    data = {"logp": -torch.rand(2, 8, generator=g), "logp_behavior": -torch.rand(2, 8, generator=g), "advantage": torch.tensor([1.0, -1.0]),
            "mask": torch.ones(2, 8, dtype=torch.bool), "off_policy": torch.tensor([True, False])}  # fmt: skip
    by_hand = policy_loss("luffy", **data, options={"clip_low": None, "clip_high": None, "aggregate": "constant", "max_length": 8})
    assert torch.equal(policy_loss(longer, **data).loss, by_hand.loss)
    assert not torch.equal(policy_loss("luffy", **data).loss, by_hand.loss)
    with pytest.raises(UsageError, match="released_scrip"):
        method("luffy", variant="released_scrip")
