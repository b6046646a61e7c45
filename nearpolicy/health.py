"""Do trainer and engine agree? One rollout batch at learning rate 0: sampled by the configured engine, scored by the trainer with the same weights.

In exact arithmetic every difference is 0 and every weight is 1. What is found is measured (`diagnostics.mismatch`), and a fault that explains it is
named: another temperature, log-probs that are shifted by one token, an end-of-sequence token that is missing or passed over, tokens drawn from
another distribution than the reported one, other weights. Nothing is trained and nothing is written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nearpolicy.diagnostics.mismatch import REFUSE_KL, WARN_KL, age_zero, gap, mismatch_metrics
from nearpolicy.errors import EngineError
from nearpolicy.methods import Method, policy_loss
from nearpolicy.metrics import to_floats
from nearpolicy.objective import position
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.protocols import Request, Sampler, SamplingParams
from nearpolicy.rollout import Batch, Outcome, Prompt, Rollout, Score, Scored, StopReason, collate

FLOOR = 1e-3
"""Mean |difference| in nats below which no fault is looked for: rounding explains it."""
EXPLAINS = 0.2
"""A fault explains a difference when assuming it leaves less than this share."""
SURE = 6.0
"""Standard deviations beyond which the drawn tokens do not belong to the reported distribution."""
LEAST_BIAS = 0.01
"""... and the mean excess of their log-probs, nats, that is worth a word."""
SEARCHED = 32
"""Responses that faults are looked for on."""
FOLLOWS = 1e-6
"""Change of the first token's log-prob, nats, that other weights make at least."""
BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What was found."""

    responses: int
    tokens: int
    values: dict[str, float]
    """`mismatch/*` by name; see the metrics table."""
    by_position: list[float]
    """Mean |difference| in tenths of the response, nats; NaN where there is no token."""
    repeat: float
    """Largest |difference| between two passes of the trainer over the same responses, in other micro-batches, nats."""
    weight_at_one: tuple[float, float]
    """Smallest and largest kernel value of the method where the ratio is exactly 1: 1 for every method."""
    weight: tuple[float, float, float]
    """Smallest, mean and largest kernel value against the engine's log-probs."""
    ess: float
    """Effective sample size of the product ratios, as a share of the responses."""
    faults: list[str] = field(default_factory=list)
    """One line each, cause first; the engine must not be trained with."""
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report, one line a figure, the verdict last."""
        v = self.values
        tenths = " ".join("-" if math.isnan(x) else f"{x:.1e}" for x in self.by_position)
        low, mean, high = self.weight
        out = [
            f"{self.responses} responses, {self.tokens} tokens of age 0",
            f"mean |difference|: {v['mismatch/abs_mean']:.3g} nats; p50 {v['mismatch/abs/p50']:.3g}, p99 {v['mismatch/abs/p99']:.3g}; "
            f"largest ratio {v['mismatch/ratio_max']:.4g}",
            f"KL(engine || trainer): {v['mismatch/kl_k3']:.3g} nats per token (k3), {v['mismatch/kl_k1']:.3g} (k1)",
            f"mean |difference| by tenths of the response: {tenths}",
            f"trainer against itself in other micro-batches: at most {self.repeat:.3g} nats",
            f"weights: {self.weight_at_one[0]:.6g} to {self.weight_at_one[1]:.6g} at ratio 1; {low:.4g} to {high:.4g}, mean {mean:.4g}, against the "
            f"engine; effective sample size {self.ess:.3g}",
            *(f"warning: {w}" for w in self.warnings),
            *(f"fault: {f}" for f in self.faults),
        ]
        verdict = "refused" if self.faults else "usable with care" if self.warnings else "healthy"
        return [*out, f"verdict: {verdict} (KL above {WARN_KL:g} is warned about, above {REFUSE_KL:g} refused)"]


def health(config: Any, *, prompts: int | None, say: Callable[[str], None]) -> Health:
    """Sample with the configured engine and score with the trainer.

    Args:
        prompts: prompts sampled; None takes `rollout.prompts`, at most 32.
    Raises:
        EngineError: the mismatch is above the bound or a fault was found (after everything was said), or the engine failed.
        NearPolicyError: as `build.check` and `build.assemble`.
    """
    from nearpolicy import build
    from nearpolicy.build_schedule import pooled, rollout_workers
    from nearpolicy.check import build_method, refuse

    chosen = build_method(config)
    for warning in refuse(config, chosen):
        say(f"warning: {warning}")
    build.check_device(config.device)
    folder = build.model_folder(config.model.path)
    with build.assemble(config, folder, say) as parts, rollout_workers(config, parts.policy, folder) as workers:
        sampler = parts.sampler if workers is None else pooled(config, workers)
        sampler.load(parts.policy.published_weights(), 1)
        asked = [parts.prompts.at(i) for i in range(prompts or min(config.rollout.prompts, 32))]
        found = examine(parts.policy, sampler, chosen, asked, parts.params, n=config.rollout.group_size)
        if not follows(sampler, parts.policy.published_weights(), asked[0], parts.params):
            found.faults.append("update: the engine acknowledged other weights and gives the same log-probs as before: it still holds the old ones")
    for line in found.lines():
        say(line)
    if found.faults:
        raise EngineError("health", got=found.faults[0], expected="an engine that agrees with the trainer", do="Mend it before training.")
    return found


def examine(policy: HFPolicy, sampler: Sampler, method: Method, prompts: Sequence[Prompt], params: SamplingParams, *, n: int) -> Health:
    """Compare what `sampler` reports with what `policy` says of it; both hold the weights of `sampler.version`."""
    version = sampler.version
    rollouts = sampler.sample([Request(ticket=i, prompt=p) for i, p in enumerate(prompts)], n, params)
    batch = _batch(rollouts, params).to(policy.device)
    logp_BT, entropy_BT = _score(policy, batch)
    where_BT = age_zero(batch, version)
    d_BT = gap(logp_BT, batch.logp_behavior_BT, where_BT)
    values = {k: v for k, v in to_floats(mismatch_metrics(logp_BT, batch.logp_behavior_BT, where_BT), counts=False).items() if isinstance(v, float)}
    faults = _faults_of_records(rollouts, params, version)
    warnings: list[str] = []
    size, kl = values["mismatch/abs_mean"], values["mismatch/kl_k3"]
    cause = _cause(policy, batch, logp_BT, where_BT, params) if size > FLOOR else None
    if cause is not None:
        faults.append(cause)
    elif kl > REFUSE_KL:
        faults.append(f"KL {kl:.3g} nats per token that neither a temperature nor a shift explains: other weights, another model or revision, other "
                      "routing of experts")  # fmt: skip
    else:
        faults += _drawn_from_elsewhere(logp_BT, entropy_BT, where_BT)
        if kl > WARN_KL:
            warnings.append(f"KL {kl:.3g} nats per token: take a correction (method.correction), or compute alike on both sides")
    own, engine = (_kernel(method, logp_BT, mu_BT, batch) for mu_BT in (logp_BT, batch.logp_behavior_BT))
    own_phi, phi = (_phi(out, batch) for out in (own, engine))
    (low, high), (least, most) = _ends(own_phi), _ends(phi)
    if max(abs(low - 1), abs(high - 1)) > 1e-5:
        faults.append(f"{method.name}: weights from {low:.4g} to {high:.4g} where every ratio is 1: its options cut them")
    again_BT, _ = _score(policy, batch, parts=2)
    return Health(
        responses=len(rollouts), tokens=int(where_BT.sum()), values=values, by_position=_by_position(d_BT, where_BT, batch),
        repeat=float((again_BT - logp_BT).abs().max()), weight_at_one=(low, high), weight=(least, float(phi.mean()), most),
        ess=engine.metrics["weight/ess_raw"].value, faults=faults, warnings=warnings,
    )  # fmt: skip


def follows(sampler: Sampler, weights: Mapping[str, Tensor], prompt: Prompt, params: SamplingParams) -> bool:
    """Whether the engine's log-probs change with the weights that it is handed: all vectors (norms, biases) times 1.5, and then as they were.

    Args:
        weights: what it holds now; also restored where they are the trainer's own tensors.
    """
    version, request = sampler.version, [Request(ticket=0, prompt=prompt)]
    vectors = {name: w.detach().clone() for name, w in weights.items() if w.ndim == 1 and w.is_floating_point()}
    (before,) = sampler.sample(request, 1, params)
    sampler.load({**weights, **{name: 1.5 * w for name, w in vectors.items()}}, version + 1)
    (after,) = sampler.sample(request, 1, params)
    sampler.load({**weights, **vectors}, version)
    old, new = _first(before), _first(after)
    return old[0] != new[0] or abs(old[1] - new[1]) > FOLLOWS


def _first(rollout: Rollout) -> tuple[int, float]:
    """Id and log-prob of the first token; an empty response has none."""
    if rollout.logp_behavior_T is None or not len(rollout.response_T):
        return -1, 0.0
    return int(rollout.response_T[0]), float(rollout.logp_behavior_T[0])


def _batch(rollouts: Sequence[Rollout], params: SamplingParams) -> Batch:
    """Scored at the temperature of the run, whatever the engine says of itself."""
    unscored = Score(reward=math.nan, outcome=Outcome.ABSTAIN)
    batch = collate([Scored(rollout=r, score=unscored) for r in rollouts], advantage_B=[1.0 if i % 2 else -1.0 for i in range(len(rollouts))])
    return replace(batch, temperature_B=torch.full_like(batch.temperature_B, params.temperature))


@torch.no_grad()
def _score(policy: HFPolicy, batch: Batch, *, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies in row order, [B, T]; with `parts`, each micro-batch in that many pieces."""
    logp_BT, entropy_BT = torch.zeros_like(batch.logp_behavior_BT), torch.zeros_like(batch.logp_behavior_BT)
    for planned in policy.plan(batch):
        for piece in (planned[k::parts] for k in range(parts)):
            if piece:
                out = policy.score(batch.rows(piece))
                T = out.logp_BT.shape[1]
                logp_BT[piece, :T], entropy_BT[piece, :T] = out.logp_BT, out.entropy_BT
    return logp_BT, entropy_BT


def _faults_of_records(rollouts: Sequence[Rollout], params: SamplingParams, version: int) -> list[str]:
    """What the rollouts themselves say: version, temperature, ends."""
    out = []
    if wrong := sorted({int(v) for r in rollouts for v in r.version_T if v != version}):
        out.append(f"version: tokens of version {', '.join(map(str, wrong[:3]))} from an engine that holds version {version}")
    if wrong_t := sorted({r.temperature for r in rollouts if r.temperature != params.temperature}):
        out.append(f"temperature: responses sampled at {wrong_t[0]:g}, the run's is {params.temperature:g}")
    eos = params.eos_ids
    passed = sum(any(int(t) in eos for t in r.response_T[:-1]) for r in rollouts)
    bare = sum(r.stop is StopReason.EOS and not (len(r.response_T) and int(r.response_T[-1]) in eos) for r in rollouts)
    short = sum(r.stop is StopReason.LENGTH and len(r.response_T) < params.max_tokens for r in rollouts)
    full = sum(r.stop is StopReason.LENGTH and len(r.response_T) > 0 and int(r.response_T[-1]) in eos for r in rollouts)
    for count, what in (
        (passed, "went on after an end-of-sequence token"),
        (bare, "ended by one do not contain it: the policy would never learn to stop"),
        (full, "end in one and are called truncated"),
        (short, f"are called truncated with fewer than {params.max_tokens} tokens"),
    ):
        if count:
            out.append(f"eos: {count} of {len(rollouts)} responses {what}")
    return out


def _cause(policy: HFPolicy, batch: Batch, logp_BT: Tensor, where_BT: Tensor, params: SamplingParams) -> str | None:
    """A shift by one or another temperature that explains the difference, or None."""
    rows = list(range(min(len(batch), SEARCHED)))
    part = batch.rows(rows)
    T = part.token_BT.shape[1]
    own_BT, seen_BT, engine_BT = logp_BT[rows, :T], where_BT[rows, :T], part.logp_behavior_BT
    before = _mean_abs(own_BT, engine_BT, seen_BT)
    for shift, whose in ((1, "the token before it"), (-1, "the token after it")):
        both_BT = seen_BT & seen_BT.roll(shift, 1)
        if bool(both_BT.any()) and _mean_abs(own_BT.roll(shift, 1), engine_BT, both_BT) < EXPLAINS * before:
            return f"shifted by one: the engine's log-prob of a token is that of {whose}"

    def apart(temperature: float) -> float:
        scaled, _ = _score(policy, replace(part, temperature_B=torch.full_like(part.temperature_B, temperature)))
        return _mean_abs(scaled, engine_BT, seen_BT)

    best = _least(apart, params.temperature)
    if abs(best / params.temperature - 1) > 0.005 and apart(best) < EXPLAINS * before:
        raw = " (raw logits: have it return processed log-probs)" if abs(best - 1) < 0.01 else ""
        return f"temperature: the engine's log-probs are those at {best:.3g}{raw}, the run's temperature is {params.temperature:g}"
    return None


def _mean_abs(a_BT: Tensor, b_BT: Tensor, where_BT: Tensor) -> float:
    return float(gap(a_BT, b_BT, where_BT).abs().sum() / where_BT.sum().clamp(min=1))


def _least(f: Callable[[float], float], start: float) -> float:
    """Where f is least within a factor of 4 of `start`: a coarse look on a log scale, then golden sections."""
    grid = sorted({1.0, *(start * 2 ** (k / 2) for k in range(-4, 5))})
    values = [f(x) for x in grid]
    at = values.index(min(values))
    low, high = math.log(grid[max(at - 1, 0)]), math.log(grid[min(at + 1, len(grid) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    fa, fb = f(math.exp(a)), f(math.exp(b))
    for _ in range(12):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - golden * (high - low)
            fa = f(math.exp(a))
        else:
            low, a, fa = a, b, fb
            b = low + golden * (high - low)
            fb = f(math.exp(b))
    return math.exp((low + high) / 2)


def _drawn_from_elsewhere(logp_BT: Tensor, entropy_BT: Tensor, where_BT: Tensor) -> list[str]:
    """Log-prob plus entropy of a token drawn from the reported distribution has mean 0 given what stands before it: a sum of martingale
    differences, whose size in standard deviations is nearly normal."""
    x = (logp_BT.double() + entropy_BT.double())[where_BT]
    if len(x) < 100:
        return []
    mean, z = float(x.mean()), float(x.sum() / x.square().sum().sqrt().clamp(min=1e-30))
    if abs(z) < SURE or abs(mean) < LEAST_BIAS:
        return []
    how = "likelier" if mean > 0 else "less likely"
    cure = "a lower temperature, top-p or top-k" if mean > 0 else "a higher temperature"
    return [f"sampling: the tokens drawn are {how} than the reported distribution has them ({mean:+.3f} nats, {z:+.1f} standard deviations): {cure} "
            "in the engine"]  # fmt: skip


def _kernel(method: Method, logp_BT: Tensor, behavior_BT: Tensor, batch: Batch) -> Any:
    """The method's loss with alternating advantages; a teacher and a reference that are the policy itself stand in where it reads them."""
    plain = method.with_options(correction=None, correction_low=None, correction_cap=None, denominator="behavior")
    return policy_loss(
        plain, logp=logp_BT, logp_behavior=behavior_BT, mask=batch.mask_BT, advantage=batch.advantage_BT, logp_teacher=logp_BT,
        logp_reference=logp_BT,
    )  # fmt: skip


def _phi(out: Any, batch: Batch) -> Tensor:
    return out.seen.phi.expand_as(batch.mask_BT)[batch.mask_BT].double()


def _ends(x: Tensor) -> tuple[float, float]:
    return (float(x.min()), float(x.max())) if len(x) else (math.nan, math.nan)


def _by_position(d_BT: Tensor, where_BT: Tensor, batch: Batch) -> list[float]:
    bins = position.bins(batch.response_mask_BT, BINS)[where_BT]
    sums = torch.zeros(BINS, dtype=torch.float64, device=d_BT.device).index_add_(0, bins, d_BT[where_BT].abs())
    return (sums / torch.bincount(bins, minlength=BINS)).tolist()
