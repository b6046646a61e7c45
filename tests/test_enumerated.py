"""On toy policies whose every sequence is known: expectations are sums, so these equalities have no noise."""

import math

import pytest
import torch

from nearpolicy.methods import METHODS, method, policy_loss
from nearpolicy.objective import kernels, loss
from nearpolicy.objective.distill import ideal_log_weight
from nearpolicy.objective.kernels import Kernel
from nearpolicy.objective.stats import kl_penalty
from nearpolicy.testing.enumerate import enumerate_sequences, gradient, probability, random_logits, token_logp

SEQ = enumerate_sequences(3, 4)
N, L = SEQ.token_NL.shape
MASK = SEQ.mask_NL
PI, MU, REF = (random_logits(seed, max_length=4) for seed in (1, 2, 3))
REWARD = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
F64 = torch.float64


def expected_gradient(name, options, advantage):
    """Gradient by the logits of minus the loss, in expectation over mu: each sequence's advantage carries its probability."""
    weight = probability(MU, SEQ)
    spread = weight if advantage.ndim == 1 else weight[:, None]

    statistics = method(name, **options).prepare(
        {"logp": token_logp(PI, SEQ), "logp_behavior": token_logp(MU, SEQ), "mask": MASK, "advantage": advantage}
    )

    def value(logits):
        out = policy_loss(
            name, logp=token_logp(logits, SEQ), logp_behavior=token_logp(MU, SEQ), mask=MASK, advantage=advantage * spread, num_sequences=1,
            options={"aggregate": "sequence_sum", **options}, statistics=statistics,
        )  # fmt: skip
        return -out.loss

    return gradient(value, PI)


def test_the_enumeration_is_complete():
    assert N == sum(2**n for n in range(4)) + 2**4 == 31
    assert len({tuple(t[m].tolist()) for t, m in zip(SEQ.token_NL, MASK, strict=True)}) == N
    for logits in (PI, MU, REF):
        assert probability(logits, SEQ).sum().item() == pytest.approx(1.0, abs=1e-14)
        assert (token_logp(logits, SEQ)[~MASK] == 0).all()


def test_the_importance_weighted_gradient_is_unbiased():
    """E_mu[W R grad log pi] = grad E_pi[R], for a row composed of the product ratio alone."""
    exact = gradient(lambda logits: (probability(logits, SEQ) * REWARD).sum(), PI)
    base = method("topr")
    parts = loss.Parts(kernel=Kernel(phi=kernels.ratio, level="sequence"), signal=None, signal_options=(), options=base.options)

    def value(logits):
        columns = loss.columns(logp=token_logp(logits, SEQ), logp_behavior=token_logp(MU, SEQ), mask=MASK, advantage=REWARD * probability(MU, SEQ))
        return -loss.compute(parts, columns, num_sequences=1).loss

    torch.testing.assert_close(gradient(value, PI), exact, rtol=0, atol=1e-12)


def test_token_ratios_are_unbiased_for_one_token_and_biased_for_sequences():
    exact = gradient(lambda logits: (probability(logits, SEQ) * REWARD).sum(), PI)
    assert (expected_gradient("cispo", {"cap": 1e9}, REWARD) - exact).abs().max() > 1e-2
    one = enumerate_sequences(3, 1)
    pi, mu, reward = PI[:1], MU[:1], REWARD[:3]

    def value(logits):
        out = policy_loss(
            "cispo", logp=token_logp(logits, one), logp_behavior=token_logp(mu, one), mask=one.mask_NL, advantage=reward * probability(mu, one),
            num_sequences=1, options={"aggregate": "sequence_sum", "cap": 1e9},
        )  # fmt: skip
        return -out.loss

    torch.testing.assert_close(gradient(value, pi), gradient(lambda x: (probability(x, one) * reward).sum(), pi), rtol=0, atol=1e-13)


def m2po_weight(r, lr, A, budget=0.04):
    """The rule as it is written, token by token."""
    pool = sorted((float(lr[n, t]) ** 2, n, t) for n in range(N) for t in range(L) if MASK[n, t] and float(lr[n, t] * A[n]) > 0)
    weight = r.clone()
    while pool and sum(p[0] for p in pool) / len(pool) > budget:
        _, n, t = pool.pop()
        weight[n, t] = 0.0
    return weight


def formula(name, lr, A):
    """phi of each row, from the papers, on dense columns."""
    r, pos = lr.exp(), (A >= 0)[:, None]
    T = MASK.sum(1, keepdim=True)
    W, s = lr.sum(1, keepdim=True).exp(), (lr.sum(1, keepdim=True) / T).exp()

    def keep(x, low, high):
        return torch.where(pos, x <= 1 + high, x >= 1 - low)

    if name == "reinforce":
        return torch.ones_like(r)
    if name in ("grpo", "dr_grpo", "luffy"):
        return r * keep(r, 0.2, 0.2)
    if name == "dapo":
        return r * keep(r, 0.2, 0.28)
    if name == "gspo":
        return s * keep(s, 3e-4, 4e-4)
    if name == "sapo":
        tau = torch.where(pos, torch.tensor(1.0, dtype=F64), torch.tensor(1.05, dtype=F64))
        p = 1 / (1 + (-tau * (r - 1)).exp())
        return 4 * p * (1 - p) * r
    if name == "vespo":
        return torch.where(pos, W**2 * (3 * (1 - W)).exp(), W**3 * (2 * (1 - W)).exp())
    if name == "cispo":
        return torch.minimum(r, torch.tensor(5.0, dtype=F64))
    if name == "gmpo":
        inside = torch.where(pos, lr <= 0.4, lr >= -0.4)
        clipped = torch.where(pos, torch.minimum(lr, torch.tensor(0.4, dtype=F64)), torch.maximum(lr, torch.tensor(-0.4, dtype=F64)))
        return (clipped.sum(1, keepdim=True) / T).exp() * inside
    if name == "topr":
        return torch.where(pos, torch.ones_like(W), torch.minimum(W, torch.ones_like(W)))
    return m2po_weight(r, lr, A)


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.signal is None])
def test_each_row_s_expected_gradient_is_its_formula_s(name):
    lr = token_logp(PI, SEQ) - token_logp(MU, SEQ)
    phi = (formula(name, lr, REWARD) * MASK).detach()
    mu = probability(MU, SEQ)
    expected = gradient(lambda logits: (mu[:, None] * phi * REWARD[:, None] * token_logp(logits, SEQ)).sum(), PI)
    torch.testing.assert_close(expected_gradient(name, {}, REWARD), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.signal is not None])
def test_each_distillation_row_s_expected_gradient_is_its_formula_s(name):
    teacher, student, reference = token_logp(REF, SEQ), token_logp(MU, SEQ), token_logp(random_logits(9, max_length=4), SEQ)
    d, extra = teacher - student, teacher - reference
    before = torch.stack([d.abs()[:, :t].sum(1) for t in range(L)], 1)
    last = (MASK.sum(1) - 1)[:, None]
    total = before.gather(1, last)
    F = torch.where(total > 0, before / total.clamp(min=1e-300), 0.0)
    w = 1 + 0.5 * (1 - F)
    signal = {"opd": d, "iw_opd": w * d, "exopd": d + 0.25 * extra, "iw_exopd": d + (1.25 * w - 1) * extra}[name]
    r = (token_logp(PI, SEQ) - student).exp()
    keep = torch.where(signal >= 0, r <= 1.2, r >= 0.8)
    mu = probability(MU, SEQ)
    expected = gradient(lambda x: (mu[:, None] * (r * keep * signal * MASK).detach() * token_logp(x, SEQ)).sum(), PI)

    def value(logits):
        # Each token's signal cannot carry the probability here: one call a sequence, weighted outside.
        total = torch.zeros((), dtype=F64)
        for n in range(N):
            row = slice(n, n + 1)
            out = policy_loss(name, logp=token_logp(logits, SEQ)[row], logp_behavior=student[row], mask=MASK[row], logp_teacher=teacher[row],
                              logp_reference=reference[row], options={"aggregate": "sequence_sum"})  # fmt: skip
            total = total - mu[n] * out.loss
        return total

    torch.testing.assert_close(gradient(value, PI), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_kl_penalty_has_the_gradient_of_the_reverse_kl(estimator):
    reference = token_logp(REF, SEQ).sum(1)

    def exact(logits):
        logp = token_logp(logits, SEQ).sum(1)
        return (logp.exp() * (logp - reference)).sum()

    def penalty(logits):
        return (probability(PI, SEQ) * kl_penalty(token_logp(logits, SEQ).sum(1), reference, estimator=estimator)).sum()

    torch.testing.assert_close(gradient(penalty, PI), gradient(exact, PI), rtol=0, atol=1e-12)
    value = penalty(PI).item()
    if estimator == "k2":
        assert abs(value - exact(PI).item()) > 1e-3  # biased, as documented
    else:
        assert value == pytest.approx(exact(PI).item(), abs=1e-12)

    def off_policy(logits):
        logp = token_logp(logits, SEQ).sum(1)
        mu = token_logp(MU, SEQ).sum(1)
        return (mu.exp() * kl_penalty(logp, reference, estimator=estimator, logp_behavior=mu)).sum()

    torch.testing.assert_close(gradient(off_policy, PI), gradient(exact, PI), rtol=0, atol=1e-12)
    assert off_policy(PI).item() == pytest.approx(value, abs=1e-12)


def kl(p, q):
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize(("alpha", "lam"), [(0.3, 0.5), (0.7, 2.0)])
def test_vespo_s_proposal_minimises_its_lagrangian(alpha, lam):
    """Q* ~ mu W^alpha exp(-lambda W) minimises (1 - alpha) KL(Q || mu) + alpha KL(Q || pi) + lambda E_Q[W]; its weights are our kernel."""
    mu, pi = probability(0.4 * MU, SEQ), probability(0.4 * PI, SEQ)
    W = pi / mu

    def lagrangian(scores):
        Q = scores.softmax(0)
        return (1 - alpha) * kl(Q, mu) + alpha * kl(Q, pi) + lam * (Q * W).sum()

    phi = kernels.vespo(W.log(), torch.ones(N, dtype=torch.bool), c_pos=(alpha, lam), c_neg=(1.0, 1.0))
    best = (mu * phi).log()
    torch.testing.assert_close(best.softmax(0), (mu * W**alpha * (-lam * W).exp()) / (mu * W**alpha * (-lam * W).exp()).sum())
    assert gradient(lagrangian, best).abs().max() < 1e-12
    generator = torch.Generator().manual_seed(0)
    for size in (1e-2, 0.1, 1.0):
        for _ in range(10):
            assert lagrangian(best + size * torch.randn(N, dtype=F64, generator=generator)) > lagrangian(best)


def test_vespo_metrics_are_the_expectations_under_q():
    """Z = E_mu[phi] and E_Q[W] = E_mu[phi W] / Z, with each sequence once and mu uniform."""
    uniform = torch.zeros_like(token_logp(MU, SEQ))
    uniform[:, 0] = -math.log(N)
    pi = token_logp(PI, SEQ)
    out = policy_loss("vespo", logp=pi, logp_behavior=uniform, mask=MASK, advantage=torch.ones(N, dtype=F64))
    W = pi.sum(1).exp() * N
    phi = W**2 * (3 * (1 - W)).exp()
    assert out.metrics["weight/q_mean_w"].value == pytest.approx(((phi * W).sum() / phi.sum()).item(), rel=1e-12)
    assert out.metrics["weight/dead_frac"].value == pytest.approx((phi < 1e-3).double().mean().item())


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.9])
def test_iw_opd_s_ideal_weight_solves_the_kl_ball(alpha):
    """q* = pi (pi_T / pi)^alpha / Z is the distribution nearest to the teacher, KL(q || pi_T), in the ball KL(q || pi) <= KL(q* || pi)."""
    pi, teacher = probability(PI, SEQ), probability(REF, SEQ)
    d = token_logp(REF, SEQ) - token_logp(PI, SEQ)
    whole = torch.nn.functional.pad(d, (0, 1))  # one step past the end: the prefix is then the whole response
    weight = ideal_log_weight(whole, alpha=alpha)[:, -1].exp()
    q = pi * weight / (pi * weight).sum()
    radius, distance = kl(q, pi), kl(q, teacher)
    generator = torch.Generator().manual_seed(0)
    for size in (0.01, 0.1, 1.0, 3.0):
        for _ in range(20):
            other = (q.log() + size * torch.randn(N, dtype=F64, generator=generator)).softmax(0)
            low, high = 0.0, 1.0  # shrink towards pi until inside the ball
            if kl(other, pi) > radius:
                for _ in range(60):
                    middle = (low + high) / 2
                    low, high = (middle, high) if kl(pi + middle * (other - pi), pi) <= radius else (low, middle)
                other = pi + low * (other - pi)
            assert kl(other, pi) <= radius + 1e-12
            assert kl(other, teacher) > distance - 1e-12


def test_the_prefix_ratio_has_mean_one_over_the_prefixes_of_the_student():
    d = token_logp(REF, SEQ) - token_logp(PI, SEQ)
    r = ideal_log_weight(d, alpha=1.0).exp()
    pi, teacher = probability(PI, SEQ), probability(REF, SEQ)
    for t in range(L):
        reached = MASK[:, t]
        assert (pi * r[:, t] * reached).sum().item() == pytest.approx(teacher[reached].sum().item(), abs=1e-12)


def test_gspo_conflates_lengths():
    """A geometric mean gives a drift of W = e^0.1 and one of W = e^0.4 the same weight, and equal W different weights."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    lr = torch.tensor([[0.1, 0, 0, 0], [0.1] * 4, [0.025] * 4], dtype=F64)
    data = {"logp": lr - 1, "logp_behavior": torch.full((3, 4), -1.0, dtype=F64), "mask": mask, "advantage": -torch.ones(3, dtype=F64)}
    gspo = policy_loss("gspo", **data).weight
    vespo = policy_loss("vespo", **data).weight
    torch.testing.assert_close(gspo[0, 0], gspo[1, 0])
    assert abs(gspo[0, 0] - gspo[2, 0]) > 0.05
    torch.testing.assert_close(vespo[0, 0], vespo[2, 0])
    assert abs(vespo[0, 0] - vespo[1, 0]) > 0.05
