"""The only composer: from a configuration to running parts. Also what Python users call.

from nearpolicy.build import config_for, train
report = train(config_for(["tiny", "train.steps=64"]), "runs/first")
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nearpolicy.build_policy import build_learner, load_policy
from nearpolicy.build_sampler import build_sampler, close, publish
from nearpolicy.build_schedule import Wiring, build_schedule, pooled, rollout_workers
from nearpolicy.build_source import build_source, check_source
from nearpolicy.build_teacher import compare_all, route_of, scores
from nearpolicy.check import build_method, describe_config, model_size, refuse
from nearpolicy.check_away import data_away, models_away, unchecked
from nearpolicy.check_routing import refuse_without_experts, routing_facts
from nearpolicy.check_teacher import scoring_models
from nearpolicy.config import Config
from nearpolicy.errors import NearPolicyError, UsageError
from nearpolicy.layers import is_override, layers, read_toml, resolve, to_tree
from nearpolicy.methods import METHODS, Method
from nearpolicy.metrics import HISTOGRAMS
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import cached_repository, load_tokenizer
from nearpolicy.protocols import RolloutSource, Sampler, SamplingParams, Verifier
from nearpolicy.rollout import Prompt
from nearpolicy.schedule.pooled import SharedWorkers
from nearpolicy.sources.demonstrations import DemonstrationSource
from nearpolicy.tasks.arithmetic import ArithmeticTask
from nearpolicy.tasks.code import check_rewards, code_task
from nearpolicy.tasks.functions import Reward, RewardSpec
from nearpolicy.tasks.optional import OptionalAnswers
from nearpolicy.tasks.order import PromptOrder
from nearpolicy.tasks.pool import RewardPool
from nearpolicy.tasks.reasoning_gym import GymTask
from nearpolicy.tasks.render import Renderer
from nearpolicy.tasks.rows import Columns, FileTask, Row, Task
from nearpolicy.trainer.checkpoint import TrainerState, load_checkpoint, newest, prune, step_folder, take_files
from nearpolicy.trainer.evaluate import evaluate
from nearpolicy.trainer.loop import LoopOptions, Trainer, train as run_loop
from nearpolicy.trainer.progress import Progress
from nearpolicy.trainer.rundir import RunDir
from nearpolicy.trainer.team import world
from nearpolicy.trainer.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

if TYPE_CHECKING:
    from nearpolicy.build_ranks import Ranks

Say = Callable[[str], None]
SEEDS = "seeds"
"""Folder of a run directory in which the seed bank of a relay lies."""
DATA = Path(__file__).parent / "tasks" / "data"
SHIPPED = {"tiny": DATA / "tiny", "tiny-teacher": DATA / "tiny_teacher", "tiny-moe": DATA / "tiny_moe"}
TINY = SHIPPED["tiny"]


def config_for(parts: Sequence[str], run: Path | str | None = None) -> Config:
    """Layer recipes, files and overrides; with overrides alone the recipe `tiny` lies below them.

    Args:
        run: a run directory to go on with: its run.toml lies below, and a recipe named besides replaces nothing in it silently.
    """
    saved = Path(run) / "run.toml" if run is not None else None
    named = any(not is_override(p) for p in parts)
    if saved is not None and saved.exists() and not named:
        base = [read_toml(saved)]
    else:
        base = [] if named else layers(["tiny"])
    return resolve([*base, *layers(parts)])


def model_folder(path: str) -> Path:
    """Where the weights lie: `tiny`, `tiny-teacher` and `tiny-moe` ship, `smollm2` is converted once, anything else is a folder or a repository in
    the cache."""
    if path in SHIPPED:
        return SHIPPED[path]
    if path == "smollm2":
        from nearpolicy.policy.smollm2 import convert_smollm2

        return convert_smollm2()
    return Path(path) if Path(path).exists() else cached_repository(path) or Path(path)


def build_task(config: Config) -> tuple[Task, RewardSpec]:
    """The task and the reward it is trained with. Data are read and checked here, before any model is loaded."""
    t = config.task
    spec = given_rewards(config)
    task: Task
    if t.kind == "arithmetic":
        task = ArithmeticTask(modulus=t.modulus, num_ops=t.num_ops, strategies=t.strategies, heldout=t.heldout, seed=config.seed)
    elif t.kind == "reasoning_gym":
        task = GymTask(t.name, t.options, seed=config.seed, heldout=max(t.heldout, 1), verifier=t.verifier)
    elif t.kind == "code":
        spec = spec or RewardSpec.single("code", **t.options)
        task = code_task(t.path, heldout_path=t.heldout_path, heldout=t.heldout, prompt_column=t.prompt_column, split=t.split, reward=spec)
    else:
        columns = Columns(prompt=t.prompt_column, answer=t.answer_column)
        task = FileTask(t.path, heldout_path=t.heldout_path, heldout=t.heldout, columns=columns, reward=spec, split=(t.split, t.split), seed=0,
                        answers=not answers_optional(config))  # fmt: skip
    check_rewards(spec or task.reward, t.deadline)
    return task, spec or task.reward


def given_rewards(config: Config) -> RewardSpec | None:
    """The reward that the configuration names; None takes the task's own."""
    rewards = tuple(Reward(function=r.function, name=r.name, weight=r.weight, options=r.options) for r in config.task.rewards)
    return RewardSpec(rewards) if rewards else None


def answers_optional(config: Config) -> bool:
    """True for methods that need no reward, with the data's own one: rows without an answer are then trained on unscored."""
    row = METHODS.get(config.method.name)
    return row is not None and row.signal is not None and config.task.kind == "rows" and not config.task.rewards


class Prompts:
    """Prompt cursor -> rendered prompt: the same for the same cursor; skipped rows are passed over."""

    def __init__(self, task: Task, tokenizer: Any, config: Config, say: Say) -> None:
        t = config.task
        self._task = task
        self._order = PromptOrder(task.train.size, config.seed)
        self._render = Renderer(
            tokenizer, system_prompt=t.system_prompt, chat_template={"auto": "auto", "on": True, "off": False}[t.chat_template],  # type: ignore[arg-type]
            chat_template_kwargs=t.chat_template_options, max_prompt_tokens=t.max_prompt_tokens, on_long=t.long_prompts,
            warn=lambda text: say(f"warning: {text}"),
        )  # fmt: skip
        finite = task.train.size is not None and config.task.kind == "rows"
        self._finite = self._render.all([task.train.row(i) for i in range(len(task.train))]) if finite else None
        if self._finite is not None:
            self._order = PromptOrder(len(self._finite), config.seed)
            if self._render.skipped:
                say(f"warning: {self._render.skipped} prompts longer than task.max_prompt_tokens are skipped")
        self.heldout = self._render.all([task.heldout.row(i) for i in range(task.heldout.size or 0)]) if config.task.heldout else []

    def render(self, row: Row) -> Prompt:
        """This row as a prompt, whatever its length."""
        prompt = self._render(row)
        if prompt is None:
            raise UsageError("task.max_prompt_tokens", got=f"row {row.id!r} above it", expected="prompts within it", do="Raise it.")
        return prompt

    def digest(self) -> str:
        """Digest of the held-out prompts' token ids, in order."""
        return hashlib.sha256(b"|".join(p.token_P.astype("<i8").tobytes() for p in self.heldout)).hexdigest()[:16]

    def known(self) -> list[Prompt]:
        """All training prompts of finite data; the first one of what is made on the fly."""
        return [self.at(0)] if self._finite is None else self._finite

    def at(self, cursor: int) -> Prompt:
        """The prompt at this cursor."""
        index = self._order.index(cursor)
        if self._finite is not None:
            return self._finite[index]
        size = self._task.train.size
        for shift in range(1000):
            place = index + shift * 7919
            prompt = self._render(self._task.train.row(place if size is None else place % size))
            if prompt is not None:
                return prompt
        raise UsageError("task.max_prompt_tokens", got="1000 prompts in a row that are longer", expected="some within it", do="Raise it.")


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's and those of the generation config. Raises UsageError when there is none."""
    own = getattr(model.generation_config, "eos_token_id", None)
    found = {*(own if isinstance(own, list | tuple) else [own]), tokenizer.eos_token_id} - {None}
    if not found:
        raise UsageError("model.path", got="a tokenizer without an end-of-sequence token", expected="one", do="Set eos_token in its configuration.")
    return frozenset(int(i) for i in found if i is not None)


def check_device(name: str) -> None:
    """Raise UsageError unless `name` is auto or a device that torch has here."""
    try:
        # Read back: `meta` makes tensors, but they hold nothing.
        _ = 0.0 if name == "auto" else float(torch.zeros(1, device=name))
    except (RuntimeError, AssertionError) as error:
        why = next(iter(f"{error}".splitlines()), "") or "Take one of these."
        raise UsageError("device", got=repr(name), expected="auto, cpu or a GPU (cuda, cuda:0)", do=why) from None


@dataclasses.dataclass(slots=True)
class Parts:
    """What training, evaluation and warm start share."""

    config: Config
    task: Task
    model: Any
    tokenizer: Any
    policy: HFPolicy
    sampler: Sampler
    pool: Verifier
    prompts: Prompts
    params: SamplingParams
    say: Say

    def publish(self, version: int) -> None:
        """The sampler holds the policy's weights from now on."""
        publish(self.config, self.sampler, self.policy, version)

    def evaluate(self, version: int, name: str = "eval", *, run: RunDir | None = None) -> dict[str, float]:
        """Held-out prompts under the current weights: metric rows named `name/...`; with `run`, each prompt's values are stored there."""
        self.publish(version)
        e = self.config.eval
        params = dataclasses.replace(self.params, temperature=e.temperature, top_p=e.top_p, routes=False)
        sampled = evaluate(self.sampler, self.pool, self.prompts.heldout, params, n=e.samples, ks=e.k)
        values = sampled.values(name)
        if run is not None:
            run.write_evaluation(version, self.prompts.digest(), {k: none_for_nan(v) for k, v in sampled.by_prompt().items()})
        if e.greedy:
            greedy = evaluate(self.sampler, self.pool, self.prompts.heldout, dataclasses.replace(params, temperature=0.0, top_p=1.0), n=1)
            if len(scores := greedy.average()):  # left out, like the other scores, when no response was scored
                values[f"{name}/greedy"] = float(scores.mean())
        return values


@contextmanager
def assemble(config: Config, folder: Path, say: Say, *, ranks: "Ranks | None" = None) -> Iterator[Parts]:
    """Data first, then reward workers, then the model (spread over `ranks`); everything is closed again."""
    task, reward = build_task(config)
    refuse_without_experts(config, folder)
    with RewardPool(reward, workers=config.task.workers, deadline_s=config.task.deadline) as pool, ExitStack() as ends:
        policy, sampler = _alone(config, folder, say) if ranks is None else ranks.assemble(config, folder)
        ends.callback(close, sampler)
        model, tokenizer = policy.model, policy.tokenizer
        prompts = Prompts(task, tokenizer, config, say)
        r = config.rollout
        params = SamplingParams(
            max_tokens=r.max_tokens, temperature=r.temperature, eos_ids=eos_ids(model, tokenizer), stop_strings=r.stop_strings, seed=config.seed,
            entropy=config.log.behavior_entropy, routes=config.routing.replay == "r3",
        )  # fmt: skip
        verifier = OptionalAnswers(pool) if answers_optional(config) else pool
        yield Parts(config, task, model, tokenizer, policy, sampler, verifier, prompts, params, say)


def _alone(config: Config, folder: Path, say: Say) -> tuple[HFPolicy, Sampler]:
    policy = load_policy(config, folder)
    return policy, build_sampler(config, folder, policy, say=say)


def rollout_source(parts: Parts, run: Path, workers: SharedWorkers | None = None) -> RolloutSource:
    """Who writes the responses of this run; demonstrations of finite data are all checked here. What a source writes ahead, `workers` write."""
    sampler = parts.sampler if workers is None else pooled(parts.config, workers)
    source = build_source(
        parts.config, task=parts.task, sampler=sampler, params=parts.params, tokenizer=parts.tokenizer,
        vocabulary=parts.model.config.get_text_config().vocab_size, folder=run / SEEDS,
    )  # fmt: skip
    if isinstance(source, DemonstrationSource):
        for prompt in parts.prompts.known():
            source.check(prompt)
    return source


def build_trainer(
    parts: Parts, run: RunDir, chosen: Method, source: RolloutSource, *, resume: TrainerState | None, again: bool,
    workers: SharedWorkers | None = None, ranks: "Ranks | None" = None,
) -> Trainer:  # fmt: skip
    """Optimizer, schedule, trackers and progress; with `resume`, everything as it was after that update.

    Args:
        again: the run directory was there before: rows after the update gone on from (all of them when there is none) are written anew.
    """
    c, t = parts.config, parts.config.train
    given: dict[str, Any] = {"prompts": parts.prompts.known() if c.task.kind == "rows" else [], "folder": model_folder, "say": parts.say}
    if ranks is None:
        learner = build_learner(c, parts.policy, chosen, **given)
        teacher = learner.teacher
    else:
        learner = ranks.learn(step_folder(run.checkpoints, resume.step) if resume else None, **given)
        teacher = ranks.teacher(learner.teacher)
    wiring = Wiring(policy=parts.policy, verifier=parts.pool, prompt_at=parts.prompts.at, publish=parts.publish, reference=learner.reference,
                    teach=scores(teacher), workers=workers, run=run.path, say=parts.say)  # fmt: skip
    schedule = build_schedule(c, chosen, source, wiring)
    start = resume.step if resume else 0
    if resume:
        if ranks is None:
            learner.restore(resume.optimizer, resume.master)
        take_files(resume, run.path / SEEDS)
        schedule.load_state_dict(resume.schedule)

    def trainer_state(step: int, schedule_state: Mapping[str, Any], extra: dict[str, Any]) -> TrainerState:
        state, own = learner.state() if ranks is None else ranks.state()
        files = {name: run.path / SEEDS / name for name in schedule_state.get("source", {}).get("files", [])}
        return TrainerState(step=step, optimizer=state, master=own, schedule=dict(schedule_state), extra=extra, files=files)

    trainer = Trainer(
        options=LoopOptions(
            steps=t.steps, eval_every=c.eval.every, checkpoint_every=c.checkpoint.every, keep=c.checkpoint.keep, log_every=c.log.every,
            rollouts_every=c.log.rollouts_every, rollouts=c.log.rollouts,
        ),
        schedule=schedule, stepper=learner.stepper, run=run, trackers=_trackers(c, run, (start if resume else -1) if again else None),
        progress=Progress(t.steps, start=start), evaluate=(lambda at: parts.evaluate(at, run=run)) if parts.prompts.heldout else None,
        save_model=parts.policy.save,
        trainer_state=trainer_state, decode=lambda ids: [parts.tokenizer.decode([i]) for i in ids], start=start,
        cut=c.rollout.cut_name,
    )  # fmt: skip
    if resume:
        trainer.alarms.load_state_dict(resume.extra["alarms"])
        trainer.positions.load_state_dict(resume.extra["positions"])
        trainer.truncation.load_state_dict(resume.extra["truncation"])
        trainer.clock, trainer.eval_s, trainer.tokens_trained = (resume.extra[k] for k in ("clock", "eval_s", "tokens_trained"))
        trainer.spared = set(resume.extra["spared"])
    return trainer


def _trackers(config: Config, run: RunDir, resume_at: int | None) -> list[Tracker]:
    out: list[Tracker] = [JsonlTracker(run.metrics_file, resume_at=resume_at)]
    if "tensorboard" in config.log.trackers:
        out.append(TensorBoardTracker(run.path / "tensorboard", edges=HISTOGRAMS, resume_at=resume_at))
    if "wandb" in config.log.trackers:
        out.append(WandbTracker(run.path, name=run.path.name, config=to_tree(config)))
    return out


def none_for_nan(value_N: Any) -> list[float | None]:
    """Plain numbers for JSON, six digits after the point."""
    return [None if math.isnan(v) else round(float(v), 6) for v in value_N]


def train(config: Config, out: Path | str, *, resume: bool = False, report: bool = True, say: Say = print) -> Path:
    """Train and write the report; returns its path (that of the run directory with `report` off, for runs of which there are many).

    In a process that torchrun (or whatever sets its environment) made one of several ranks, all of them train together: rank 0 as above, the others
    as it says, until the run ends. What they return is the run directory; where the run fails their processes end.

    Raises:
        NearPolicyError: what is wrong with the configuration, data, model or run directory, before anything is sampled; or what stopped
            the run, after a checkpoint was written.
    """
    if world()[1] == 1:
        return _train(config, Path(out), resume=resume, report=report, say=say, ranks=None)
    from nearpolicy.build_ranks import joined

    with joined(config, folder=model_folder) as ranks:
        if not ranks.leads:
            ranks.serve()
            return Path(out)
        return _train(config, Path(out), resume=resume, report=report, say=say, ranks=ranks)


def _train(config: Config, path: Path, *, resume: bool, report: bool, say: Say, ranks: "Ranks | None") -> Path:
    chosen = build_method(config)
    for warning in refuse(config, chosen):
        say(f"warning: {warning}")
    check_device(config.device)
    folder = model_folder(config.model.path)
    compare_all(config, chosen, folder, model_folder)
    run, state = RunDir.open(path, config) if resume else None, None
    try:
        if run is not None:
            checkpoint = newest(run.checkpoints, say)
            prune(run.checkpoints, None, set())
            if checkpoint is None:
                say("no checkpoint yet: the run begins again")
            else:
                state = load_checkpoint(checkpoint)
                folder = checkpoint if config.model.lora is None else folder
            if state is not None and state.step >= config.train.steps:
                raise UsageError(f"--resume {path}", got=f"a run that is done ({state.step} updates)",
                                 expected=f"fewer than train.steps = {config.train.steps}", do="Raise train.steps to train on.")  # fmt: skip
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            RunDir.create(path, config)  # raises before anything is loaded
        with assemble(config, folder, say, ranks=ranks) as parts, rollout_workers(config, parts.policy, model_folder(config.model.path)) as workers:
            source = rollout_source(parts, path, workers)
            if run is None:
                run = RunDir.create(path, config)
            _show_prompt(parts, say)
            make = functools.partial(build_trainer, parts, run, chosen, source, resume=state, again=resume, workers=workers, ranks=ranks)
            _run(run, make, start=state.step if state else 0, report=report)
            return run.path / "report.html" if report else run.path
    finally:
        if run is not None:
            run.close()


def _run(run: RunDir, make: Callable[[], Trainer], *, start: int, report: bool) -> None:
    """The loop, and a report however it ends."""
    run.set_status("running", step=start)
    try:
        trainer = make()
        with closing(trainer.schedule):
            run_loop(trainer)
    except BaseException as error:
        with suppress(NearPolicyError, OSError):
            if run.status().get("status") == "running":
                run.set_status("failed", step=start, message=str(error))
            if report:
                _report(run)
        raise
    if report:
        _report(run)


def _report(run: RunDir) -> None:
    from nearpolicy.report import write_report

    write_report([run.path], run.path / "report.html")


def _show_prompt(parts: Parts, say: Say) -> None:
    from nearpolicy.tasks.render import first_prompt_shown

    say(f"first prompt: {first_prompt_shown(parts.prompts.at(0), parts.tokenizer)}")


def check(config: Config) -> str:
    """The resolved configuration and what follows from it. Models of the hub that are not in the cache, and then data that are not here either,
    are named as not checked; everything else is.

    Raises:
        UsageError: settings that contradict or cannot act, a device that is not there, prompts that the model's tokenizer cannot render.
        DataError: data that cannot be read, a prompt above the limit.
        CheckpointError: no model folder, or no tokenizer in it.
    """
    chosen = build_method(config)
    refuse(config, chosen)
    check_device(config.device)
    models = models_away(config, chosen, model_folder)
    data = data_away(config) if models else {}
    said = unchecked(models, data)
    spec = given_rewards(config)
    if not data:
        task, spec = build_task(config)
        check_source(config, task)
    if spec is not None:
        spec.functions()
    path = config.model.path
    if path == "smollm2" or models or data:  # converting smollm2 is the business of a run
        return "\n".join([describe_config(config, chosen, None), *(f"# {text}" for text in said)])
    folder = model_folder(path)
    refuse_without_experts(config, folder)
    compare_all(config, chosen, folder, model_folder)
    tokenizer, size = load_tokenizer(folder), model_size(folder)
    prompts = Prompts(task, tokenizer, config, said.append)
    prompts.at(0)
    for key, scorer in scoring_models(config).items():
        assert scorer.path is not None, "refused before"
        where = f"on {scorer.server}" if scorer.server else f"{4 * model_size(model_folder(scorer.path)).parameters / 2**30:.2f} GiB in float32"
        said.append(f"{key}: {scorer.path}, {where}")
    if config.teacher is not None and config.teacher.column is not None:
        route_of(config, prompts.known())
    said += routing_facts(config, folder)
    return "\n".join([describe_config(config, chosen, size), *(f"# {text}" for text in said)])
