"""Training by several ranks: what rank 0 asks of the others, and what each answers.

Rank 0 owns schedule, ledger, reward workers, randomness and run directory. It plans each update centrally (`policy.rank_plan`), sends every rank its
rows, and adds up metrics that merge exactly. Sampling is split by group and scoring by the same plan as training; every rank samples with a whole
copy of the model, since that needs no communication inside a token, and draws depend on keys alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nearpolicy.metrics import Metrics, Table
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.rank_plan import Steps, empty_row, plan_ranks
from nearpolicy.policy.sharded import ShardedPolicy
from nearpolicy.policy.teacher import LocalTeacher, as_batch
from nearpolicy.protocols import LogProbs, Request, Sampler, SamplingParams
from nearpolicy.rollout import Array, Batch, Rollout
from nearpolicy.trainer.checkpoint import gather_whole, optimizer_tensors
from nearpolicy.trainer.step import NotFinite, Share, Stepper, Work
from nearpolicy.trainer.team import Team

COLLECTIVE = frozenset({"update", "score", "record", "weights", "trained", "load"})
"""Calls in which the ranks meet: an error of one of them cannot be mended by the others."""
AGREED = (NotFinite,)


def rank_parts(policy: HFPolicy, batch: Batch, ranks: int) -> Steps:
    """The plan of these rows as `policy` computes them."""
    return plan_ranks(batch, policy.token_budget, ranks, padded=not policy.shares_prompts)


class RankedStepper(Stepper):
    """A `Stepper` whose shares are worked on by all ranks of `team`; on the other ranks its `work` is called alone."""

    team: Team

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """As many as the team has."""
        return self.team.size

    def _parts(self, batch: Batch) -> Steps:
        return rank_parts(self.policy, batch, self.ranks)

    def _run(self, shares: Sequence[Share]) -> Sequence[Work]:
        return one_layout(self.team.call("update", [_on_cpu(share) for share in shares]))

    def _is_split(self, micro: object) -> bool:
        return True  # a rank does not see the others' rows


def _on_cpu(share: Share) -> Share:
    statistics = None if share.statistics is None else {name: value.cpu() for name, value in share.statistics.items()}
    return replace(share, statistics=statistics, micro=[replace(micro, batch=micro.batch.to("cpu")) for micro in share.micro])


def one_layout(works: Sequence[Work]) -> Sequence[Work]:
    """Tables that came from another process get the layout object of the first rank's, which has rows in every step: tables merge by identity."""
    layouts = {name: value.layout for part in works[0].metrics for name, value in part.items() if isinstance(value, Table)}
    for part in (part for work in works[1:] for part in work.metrics):
        for name, value in part.items():
            if isinstance(value, Table) and value.layout == layouts.get(name):
                value.layout = layouts[name]
    return works


class RankedSampler:
    """`protocols.Sampler` over the samplers of all ranks: request k goes to rank k modulo their number."""

    def __init__(self, team: Team, own: Sampler) -> None:
        self.team, self.version = team, own.version

    def sample(self, requests: Sequence[Request], n: int, params: SamplingParams) -> list[Rollout]:
        """As `Sampler.sample`, the requests split over the ranks."""
        size = self.team.size
        answers = self.team.call("sample", [(requests[rank::size], n, params) for rank in range(size)])
        out: list[Rollout] = []
        for k in range(len(requests)):
            written = answers[k % size]
            out += written[k // size * n : (k // size + 1) * n]
        return out

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Send these weights to every rank's sampler."""
        facts = [(name, tuple(value.shape), value.dtype) for name, value in weights.items()]
        self.team.call("load", [Weights(facts=facts, version=version, own=weights if rank == 0 else None) for rank in range(self.team.size)])
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a rank is told of weights that come one by one."""

    facts: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
    version: int
    own: Mapping[str, Tensor] | None
    """Rank 0 has them."""


def ranked_scores(team: Team, name: str, policy: HFPolicy, *, empty_steps: bool) -> Callable[[Batch], Tensor]:
    """Log-probs of a batch by all ranks, float32 [B, T], for `HFPolicy.together`.

    Args:
        name: the call that scores with this policy.
        empty_steps: ranks without rows take part (sharded weights).
    """

    def score(batch: Batch) -> Tensor:
        logp_BT = torch.zeros_like(batch.logp_behavior_BT)
        for rows, part in _scattered(team, name, policy, batch, empty_steps):
            logp_BT[rows, : part.shape[1]] = part.to(logp_BT.device)
        return logp_BT

    return score


def ranked_record(team: Team, policy: HFPolicy) -> Callable[[Batch], tuple[LogProbs, Tensor]]:
    """`HFPolicy.record` by all ranks."""

    def record(batch: Batch) -> tuple[LogProbs, Tensor]:
        logp_BT = torch.zeros_like(batch.logp_behavior_BT)
        entropy_BT, routes = torch.zeros_like(logp_BT), None
        for rows, (scores, own) in _scattered(team, "record", policy, replace(batch, routes=None), True):
            if routes is None:
                routes = own.new_full((*logp_BT.shape, *own.shape[2:]), -1)
            columns = slice(0, own.shape[1])
            logp_BT[rows, columns], entropy_BT[rows, columns] = (x.to(logp_BT.device) for x in scores)
            routes[rows, columns] = own
        assert routes is not None, "a batch has rows"
        return LogProbs(logp_BT, entropy_BT), routes.to(logp_BT.device)

    return record


def _scattered(team: Team, name: str, policy: HFPolicy, batch: Batch, empty_steps: bool) -> list[tuple[list[int], Any]]:
    """(rows, answer) of each part of the batch that a rank computed."""
    batch = batch.to("cpu")
    steps = rank_parts(policy, batch, team.size)
    rows = [[step[rank] for step in steps if step[rank] or empty_steps] for rank in range(team.size)]
    answers = team.call(name, [[batch.rows(part) if part else empty_row(batch) for part in mine] for mine in rows])
    return [pair for mine, answer in zip(rows, answers, strict=True) for pair in zip(mine, answer, strict=True) if pair[0]]


class RankedTeacher:
    """`protocols.Teacher` over the equal teachers of all ranks, in the very parts that `ranked_scores` makes of the same rows."""

    def __init__(self, team: Team, own: LocalTeacher) -> None:
        self.team, self.own = team, own

    def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """As `LocalTeacher.score`."""
        if not rollouts:
            return []
        steps = rank_parts(self.own.policy, as_batch(rollouts), self.team.size)
        parts = [[step[rank] for step in steps if step[rank]] for rank in range(self.team.size)]
        answers = self.team.call("teacher", [[[rollouts[b] for b in rows] for rows in mine] for mine in parts])
        out: dict[int, Array] = {}
        for mine, answer in zip(parts, answers, strict=True):
            for rows, scored in zip(mine, answer, strict=True):
                out |= dict(zip(rows, scored, strict=True))
        return [out[b] for b in range(len(rollouts))]


class Learner(Protocol):
    """What a rank trains and scores with."""

    stepper: Stepper
    optimizer: torch.optim.Optimizer
    names: dict[int, str]
    teacher: Any
    reference: HFPolicy | None

    def trained(self) -> dict[str, Tensor]:
        """Tensors that are kept at full precision besides the model folder; {} where it holds them."""
        ...


class Member:
    """The work of one rank by the name of the call. `model` and `learner` are built by the composer, on call as well."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.policy: ShardedPolicy
        self.sampler: Sampler
        self.learner: Learner
        team.handlers |= {
            "update": self.update, "score": self.score, "record": self.record, "reference": self.ask_reference, "teacher": self.ask_teacher,
            "weights": self.weights, "trained": self.trained, "load": self.load, "sample": self.sample,
        }  # fmt: skip

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self.team.rank == 0

    def update(self, share: Share) -> Work:
        """This rank's part of an update."""
        work = self.learner.stepper.work(share)
        metrics = work.metrics if self.leads else [_metrics_on_cpu(part) for part in work.metrics]
        return replace(work, metrics=metrics, weights=[(rows, weight.cpu()) for rows, weight in work.weights])

    def score(self, parts: Sequence[Batch]) -> list[Tensor]:
        """Log-probs of the policy that is trained."""
        return _scores(self.policy, parts)

    def record(self, parts: Sequence[Batch]) -> list[tuple[LogProbs, Tensor]]:
        """Log-probs under live routing, and the experts."""
        made = [HFPolicy.record(self.policy, part) for part in parts]
        return [(LogProbs(*(x.cpu() for x in scores)), routes.cpu()) for scores, routes in made]

    def ask_reference(self, parts: Sequence[Batch]) -> list[Tensor]:
        """Log-probs of the reference."""
        assert self.learner.reference is not None, "asked only where there is one"
        return _scores(self.learner.reference, parts)

    def ask_teacher(self, parts: Sequence[Sequence[Rollout]]) -> list[list[Array]]:
        """Log-probs of the teacher."""
        return [[np.asarray(x) for x in self.learner.teacher.score(rollouts)] for rollouts in parts]

    def weights(self, _: None) -> dict[str, Tensor]:
        """Whole weights under their published names, on rank 0; others take part."""
        return self.policy.collect(keep=self.leads)

    def trained(self, _: None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Whole optimizer state and master tensors, on rank 0; others take part."""
        state = optimizer_tensors(self.learner.optimizer, self.learner.names)
        return gather_whole(state, keep=self.leads), gather_whole(self.learner.trained(), keep=self.leads)

    def load(self, weights: Weights) -> None:
        """Have this rank's sampler hold the weights that rank 0 sends."""
        got: dict[str, Tensor] = {}
        for name, shape, dtype in weights.facts:
            value = torch.empty(shape, dtype=dtype) if weights.own is None else weights.own[name].detach().cpu().contiguous()
            dist.broadcast(value, 0)
            got[name] = value
        self.sampler.load(got, weights.version)

    def sample(self, asked: tuple[Sequence[Request], int, SamplingParams]) -> list[Rollout]:
        """Responses to this rank's requests."""
        requests, n, params = asked
        return self.sampler.sample(requests, n, params) if requests else []


@torch.no_grad()
def _scores(policy: HFPolicy, parts: Sequence[Batch]) -> list[Tensor]:
    return [policy.score(part).logp_BT.float().cpu() for part in parts]


def _metrics_on_cpu(metrics: Metrics) -> Metrics:
    """Values as they travel: their tensors on the CPU."""
    for value in metrics.values():
        for slot in type(value).__slots__:
            if isinstance(x := getattr(value, slot), Tensor):
                setattr(value, slot, x.cpu())
    return metrics
