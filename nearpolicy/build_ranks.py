"""The composer's part for several ranks: joins them, builds each one's share of the run, and stands in front of it on rank 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from nearpolicy.build_policy import Learner, build_learner, load_policy, own_sampler
from nearpolicy.build_teacher import Folder
from nearpolicy.check import build_method
from nearpolicy.config import Config
from nearpolicy.errors import UsageError
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.sharded import ShardedPolicy
from nearpolicy.policy.teacher import LocalTeacher
from nearpolicy.protocols import Teacher
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.trainer.checkpoint import load_trained
from nearpolicy.trainer.ranks import (
    AGREED,
    COLLECTIVE,
    Member,
    RankedSampler,
    RankedStepper,
    RankedTeacher,
    ranked_record,
    ranked_scores,
)  # fmt: skip
from nearpolicy.trainer.team import Team, leading, leave, world


def refuse_ranks(config: Config, ranks: int) -> None:
    """Raise UsageError where an update has fewer responses than there are ranks, or where ranks cannot train what is asked for."""
    rows = config.rollout.prompts * config.rollout.group_size // getattr(config.schedule, "updates_per_rollout", 1)
    if rows < ranks:
        raise UsageError("ranks", got=f"{ranks} for {rows} responses in an update", expected="at least one response for each rank",
                         do="Start fewer, or raise rollout.prompts.")  # fmt: skip
    if ranks > 1 and config.sampler.kind == "vllm":
        raise UsageError("sampler.kind", got=f"vllm with {ranks} ranks", expected="torch, or one process", do="Ranks sample by themselves; for vLLM "
                         "beside several ranks take schedule.kind = async.")  # fmt: skip


@contextmanager
def joined(config: Config, *, folder: Folder) -> Iterator["Ranks"]:
    """The ranks that the environment speaks of: rank 0 calls, any other is to `serve`.

    Raises:
        UsageError: an environment that is incomplete, more ranks than responses in an update.
        Lost: a rank did not come.
    """
    refuse_ranks(config, world()[1])
    team = Team(device=config.device, deadline_s=config.train.rank_deadline, collective=COLLECTIVE, agreed=AGREED)
    with leading(team):
        yield Ranks(team, config, folder)


class Ranks(Member):
    """All ranks as rank 0 sees them; on the others, what serves it."""

    def __init__(self, team: Team, config: Config, folder: Folder) -> None:
        super().__init__(team)
        self.config, self.folder = config, folder
        self.own: TorchSampler
        self.given: dict[str, Any] = {}
        team.handlers |= {"assemble": self._assemble, "learn": self._learn}
        self.mesh = team.mesh()

    def serve(self) -> None:
        """Do as rank 0 says until it ends the team. After a run that failed, the process ends here."""
        if code := self.team.serve():
            leave(code)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.team.size

    def assemble(self, config: Config, folder: Path) -> tuple[HFPolicy, TorchSampler]:
        """The policy, spread, and the sampler over all ranks."""
        self.team.call("assemble", [(config, folder)] * self.size)
        self.policy.together = ranked_scores(self.team, "score", self.policy, empty_steps=True)
        self.policy.recorder = ranked_record(self.team, self.policy)
        self.policy.gather = lambda: cast(Any, self.team.call("weights", [None] * self.size)[0])
        return self.policy, cast(TorchSampler, RankedSampler(self.team, self.own))

    def learn(self, checkpoint: Path | None, **given: Any) -> Learner:
        """As `build_learner`, on every rank; with a checkpoint, restored from it.

        Args:
            given: arguments of `build_learner` for rank 0.
        """
        self.given = given
        self.team.call("learn", [checkpoint] * self.size)
        learner = cast(Learner, self.learner)
        if learner.reference is not None:
            learner.reference.together = ranked_scores(self.team, "reference", learner.reference, empty_steps=False)
        return learner

    def teacher(self, own: Teacher | None) -> Teacher | None:
        """The teacher that the schedule asks: over all ranks where each has it."""
        return RankedTeacher(self.team, own) if isinstance(own, LocalTeacher) else own

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole optimizer state and master tensors."""
        return cast(Any, self.team.call("trained", [None] * self.size)[0])

    def _assemble(self, share: tuple[Config, Path]) -> None:
        config, folder = share
        self.config = config
        policy = load_policy(config, folder, self.mesh)
        assert isinstance(policy, ShardedPolicy)
        self.policy = policy
        self.own = own_sampler(config, folder, policy, shared=False)
        self.sampler = self.own

    def _learn(self, checkpoint: Path | None) -> None:
        given = self.given
        if not self.leads:
            given = {"prompts": [], "folder": self.folder, "say": lambda _: None, "with_teacher": on_every_rank(self.config)}
        learner = build_learner(self.config, self.policy, build_method(self.config), kind=RankedStepper, **given)
        cast(RankedStepper, learner.stepper).team = self.team
        if checkpoint is not None:
            learner.restore(*load_trained(checkpoint))
        self.learner = learner


def on_every_rank(config: Config) -> bool:
    """True where the teacher is one model in this process: every rank has it. Servers and routed teachers are asked by rank 0."""
    t = config.teacher
    return t is not None and t.column is None and t.server is None
