"""The only composer: from a configuration to running parts. Also what Python users call.

from nearpolicy.build import config_for, train
report = train(config_for(["tiny", "train.steps=64"]), "runs/first")
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from nearpolicy.build_source import build_source, check_source
from nearpolicy.build_teacher import build_teacher, compare_all, full_signal, route_of, scores
from nearpolicy.check import build_method, describe_config, model_size, refuse
from nearpolicy.check_teacher import build_mixture, needed, reads_reference, scoring_models
from nearpolicy.config import Config, RelayRollout
from nearpolicy.errors import NearPolicyError, UsageError
from nearpolicy.layers import is_override, layers, read_toml, resolve, to_tree
from nearpolicy.methods import METHODS, Method
from nearpolicy.metrics import HISTOGRAMS
from nearpolicy.policy.hf import HFPolicy, LoraOptions, load_model, load_tokenizer
from nearpolicy.policy.teacher import load_scorer
from nearpolicy.protocols import RolloutSource, SamplingParams, Teacher, Verifier
from nearpolicy.rollout import Batch, Prompt
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.schedule.sync import SyncOptions, SyncSchedule
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
from nearpolicy.trainer.checkpoint import TrainerState, load_checkpoint, load_optimizer_tensors, newest, optimizer_tensors, prune, take_files
from nearpolicy.trainer.evaluate import evaluate
from nearpolicy.trainer.loop import LoopOptions, Trainer
from nearpolicy.trainer.loop import train as run_loop
from nearpolicy.trainer.progress import Progress
from nearpolicy.trainer.rundir import RunDir
from nearpolicy.trainer.step import StepOptions, Stepper, learning_rate, score_trained
from nearpolicy.trainer.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

Say = Callable[[str], None]
SEEDS = "seeds"
"""Folder of a run directory in which the seed bank of a relay lies."""
DATA = Path(__file__).parent / "tasks" / "data"
SHIPPED = {"tiny": DATA / "tiny", "tiny-teacher": DATA / "tiny_teacher"}
TINY = SHIPPED["tiny"]
SMALL_MODEL = 2_000_000
"""Models with fewer parameters gain from a second CPU thread (1.4x on the tiny default) and lose with more."""


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
    """Where the weights lie: `tiny` and `tiny-teacher` ship, `smollm2` is converted once, anything else is a folder."""
    if path in SHIPPED:
        return SHIPPED[path]
    if path == "smollm2":
        from nearpolicy.policy.smollm2 import convert_smollm2

        return convert_smollm2()
    return Path(path)


def build_task(config: Config) -> tuple[Task, RewardSpec]:
    """The task and the reward it is trained with. Data are read and checked here, before any model is loaded."""
    t = config.task
    rewards = tuple(Reward(function=r.function, name=r.name, weight=r.weight, options=r.options) for r in t.rewards)
    spec = RewardSpec(rewards) if rewards else None
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


def set_threads(config: Config, num_parameters: int) -> None:
    """`threads`, or at most two for a small model."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif num_parameters < SMALL_MODEL:
        torch.set_num_threads(min(2, torch.get_num_threads()))


@dataclasses.dataclass(slots=True)
class Parts:
    """What training, evaluation and warm start share."""

    config: Config
    task: Task
    model: Any
    tokenizer: Any
    policy: HFPolicy
    sampler: TorchSampler
    pool: Verifier
    prompts: Prompts
    params: SamplingParams
    say: Say

    def publish(self, version: int) -> None:
        """The sampler holds the policy's weights from now on."""
        if self.sampler.version != version:
            self.sampler.load(self.policy.published_weights(), version)

    def evaluate(self, version: int, name: str = "eval", *, run: RunDir | None = None) -> dict[str, float]:
        """Held-out prompts under the current weights: metric rows named `name/...`; with `run`, each prompt's values are stored there."""
        self.publish(version)
        e = self.config.eval
        params = dataclasses.replace(self.params, temperature=e.temperature, top_p=e.top_p)
        sampled = evaluate(self.sampler, self.pool, self.prompts.heldout, params, n=e.samples, ks=e.k)
        values = sampled.values(name)
        if run is not None:
            run.write_evaluation(version, self.prompts.digest(), {k: none_for_nan(v) for k, v in sampled.by_prompt().items()})
        if e.greedy:
            greedy = evaluate(self.sampler, self.pool, self.prompts.heldout, dataclasses.replace(self.params, temperature=0.0), n=1)
            if len(scores := greedy.average()):  # left out, like the other scores, when no response was scored
                values[f"{name}/greedy"] = float(scores.mean())
        return values


@contextmanager
def assemble(config: Config, folder: Path, say: Say) -> Iterator[Parts]:
    """Data first, then reward workers, then the model; everything is closed again."""
    task, reward = build_task(config)
    with RewardPool(reward, workers=config.task.workers, deadline_s=config.task.deadline) as pool:
        m = config.model
        set_threads(config, model_size(folder).parameters if folder.is_dir() and any(folder.glob("*.safetensors")) else SMALL_MODEL)
        torch.manual_seed(config.seed)  # adapters are drawn from it
        lora = LoraOptions(rank=m.lora.rank, alpha=m.lora.alpha, target_modules=m.lora.targets) if m.lora else None
        model, tokenizer = load_model(folder, device=config.device, lora=lora, gradient_checkpointing=m.gradient_checkpointing)
        policy = HFPolicy(model, tokenizer=tokenizer, dtype=m.dtype, token_budget=config.train.token_budget, shared_prompts=m.shared_prompts)
        prompts = Prompts(task, tokenizer, config, say)
        sampler = _sampler(config, folder, model, tokenizer, policy)
        r = config.rollout
        params = SamplingParams(
            max_tokens=r.max_tokens, temperature=r.temperature, eos_ids=eos_ids(model, tokenizer), stop_strings=r.stop_strings, seed=config.seed,
            entropy=config.log.behavior_entropy,
        )  # fmt: skip
        verifier = OptionalAnswers(pool) if answers_optional(config) else pool
        yield Parts(config, task, model, tokenizer, policy, sampler, verifier, prompts, params, say)


def _sampler(config: Config, folder: Path, model: Any, tokenizer: Any, policy: HFPolicy) -> TorchSampler:
    """On the trainer's own module where both compute in float32, else on a copy that publications fill."""
    if config.model.lora is not None:
        plain, _ = load_model(folder, dtype="bfloat16" if policy.bfloat16 else "float32", device=config.device)
        return TorchSampler(plain, tokenizer, max_rows=config.rollout.max_rows)
    dtype = torch.bfloat16 if policy.bfloat16 else None
    return TorchSampler(model, tokenizer, max_rows=config.rollout.max_rows, dtype=dtype)


def rollout_source(parts: Parts, run: Path) -> RolloutSource:
    """Who writes the responses of this run; demonstrations of finite data are all checked here."""
    source = build_source(
        parts.config, task=parts.task, sampler=parts.sampler, params=parts.params, tokenizer=parts.tokenizer,
        vocabulary=parts.model.config.get_text_config().vocab_size, folder=run / SEEDS,
    )  # fmt: skip
    if isinstance(source, DemonstrationSource):
        for prompt in parts.prompts.known():
            source.check(prompt)
    return source


def build_schedule(
    parts: Parts, chosen: Method, source: RolloutSource, *, reference: HFPolicy | None = None, teacher: Teacher | None = None
) -> SyncSchedule:  # fmt: skip
    """Sync schedule on this source."""
    c, r = parts.config, parts.config.rollout
    normalize = c.advantage.normalize_std if c.advantage.normalize_std is not None else chosen.normalize_std
    options = SyncOptions(
        prompts=r.prompts, group_size=r.group_size, updates_per_rollout=c.schedule.updates_per_rollout, baseline=c.advantage.baseline,
        normalize_std=normalize, dynamic_sampling=r.dynamic_sampling, max_redraws=r.max_redraws, max_tokens=r.max_tokens,
        overlong_buffer=r.overlong_buffer, mask_truncated=r.mask_truncated,
        mask_prefix=isinstance(r, RelayRollout) and r.prefix_tokens == "mask", needs_reward=chosen.needs_advantage,
    )  # fmt: skip
    proximal = "logp_proximal" in needed(chosen, build_mixture(c))

    def annotate(batch: Batch) -> Batch:
        columns: dict[str, Any] = {}
        if proximal:
            columns["logp_proximal_BT"] = score_trained(parts.policy, batch).to(batch.token_BT.device)
        if reference is not None:
            columns["logp_reference_BT"] = score_trained(reference, batch).to(batch.token_BT.device)
        return dataclasses.replace(batch, **columns)

    return SyncSchedule(
        options, source=source, verifier=parts.pool, prompt_at=parts.prompts.at, publish=parts.publish, annotate=annotate, teach=scores(teacher)
    )


def build_trainer(parts: Parts, run: RunDir, chosen: Method, source: RolloutSource, *, resume: TrainerState | None, again: bool) -> Trainer:
    """Optimizer, schedule, trackers and progress; with `resume`, everything as it was after that update.

    Args:
        again: the run directory was there before: rows after the update gone on from (all of them when there is none) are written anew.
    """
    c, t = parts.config, parts.config.train
    parameters = parts.policy.trainable_parameters()
    fused = parts.policy.device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(parameters, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=fused)
    names = {id(p): n for n, p in parts.model.named_parameters()}
    mixture = build_mixture(c)
    teacher = build_teacher(c, parts.policy, parts.prompts.known() if c.task.kind == "rows" else [], folder=model_folder, say=parts.say)
    reference = _reference(parts) if reads_reference(c, chosen, mixture) else None
    schedule = build_schedule(parts, chosen, source, reference=reference, teacher=teacher)
    master = c.model.lora is not None
    start = resume.step if resume else 0
    if resume:
        if master:
            parts.policy.load_state_dict({**parts.policy.state_dict(), **resume.master})
        load_optimizer_tensors(optimizer, names, resume.optimizer)
        take_files(resume, run.path / SEEDS)
        schedule.load_state_dict(resume.schedule)

    def trainer_state(step: int, schedule_state: Mapping[str, Any], extra: dict[str, Any]) -> TrainerState:
        own = {n: p.detach() for n, p in parts.model.named_parameters() if p.requires_grad} if master else {}
        files = {name: run.path / SEEDS / name for name in schedule_state["source"].get("files", [])}
        return TrainerState(
            step=step, optimizer=optimizer_tensors(optimizer, names), master=own, schedule=dict(schedule_state), extra=extra, files=files
        )

    stepper = Stepper(
        parts.policy, chosen, optimizer,
        StepOptions(grad_clip=t.grad_clip, kl_coefficient=t.kl_coefficient, kl_estimator=t.kl_estimator, entropy_coefficient=t.entropy_coefficient,
                    steps=t.steps),
        lambda step: learning_rate(step, peak=t.lr, steps=t.steps, warmup=t.warmup, decay=t.decay, floor=t.min_lr),
        mixture=mixture, full=full_signal(c, teacher),
    )  # fmt: skip
    trainer = Trainer(
        options=LoopOptions(
            steps=t.steps, eval_every=c.eval.every, checkpoint_every=c.checkpoint.every, keep=c.checkpoint.keep, log_every=c.log.every,
            rollouts_every=c.log.rollouts_every, rollouts=c.log.rollouts,
        ),
        schedule=schedule, stepper=stepper, run=run, trackers=_trackers(c, run, (start if resume else -1) if again else None),
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


def _reference(parts: Parts) -> HFPolicy:
    """The model of reference.path, or a frozen copy of the initial one. On a resume the initial weights are read again from model.path."""
    c = parts.config
    folder = model_folder(c.reference.path or c.model.path)
    return load_scorer(folder, device=c.device, dtype=None, student=parts.policy, token_budget=c.train.token_budget, name="reference")


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

    Raises:
        NearPolicyError: what is wrong with the configuration, data, model or run directory, before anything is sampled; or what stopped
            the run, after a checkpoint was written.
    """
    chosen = build_method(config)
    for warning in refuse(config, chosen):
        say(f"warning: {warning}")
    check_device(config.device)
    path = Path(out)
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
        with assemble(config, folder, say) as parts:
            source = rollout_source(parts, path)
            if run is None:
                run = RunDir.create(path, config)
            _show_prompt(parts, say)
            _run(parts, run, chosen, source, state=state, resume=resume, report=report)
            return run.path / "report.html" if report else run.path
    finally:
        if run is not None:
            run.close()


def _run(parts: Parts, run: RunDir, chosen: Method, source: RolloutSource, *, state: TrainerState | None, resume: bool, report: bool) -> None:
    """The loop, and a report however it ends."""
    run.set_status("running", step=state.step if state else 0)
    try:
        run_loop(build_trainer(parts, run, chosen, source, resume=state, again=resume))
    except BaseException as error:
        with suppress(NearPolicyError, OSError):
            if run.status().get("status") == "running":
                run.set_status("failed", step=state.step if state else 0, message=str(error))
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
    """The resolved configuration and what follows from it.

    Raises:
        UsageError: settings that contradict or cannot act, a device that is not there, prompts that the model's tokenizer cannot render.
        DataError: data that cannot be read, a prompt above the limit.
        CheckpointError: no model folder, or no tokenizer in it.
    """
    chosen = build_method(config)
    refuse(config, chosen)
    check_device(config.device)
    task, reward = build_task(config)
    reward.functions()
    check_source(config, task)
    path = config.model.path
    if path == "smollm2":  # converting it is the business of a run
        return describe_config(config, chosen, None)
    folder = model_folder(path)
    compare_all(config, chosen, folder, model_folder)
    tokenizer, size = load_tokenizer(folder), model_size(folder)
    said: list[str] = []
    prompts = Prompts(task, tokenizer, config, said.append)
    prompts.at(0)
    for key, scorer in scoring_models(config).items():
        assert scorer.path is not None, "refused before"
        where = f"on {scorer.server}" if scorer.server else f"{4 * model_size(model_folder(scorer.path)).parameters / 2**30:.2f} GiB in float32"
        said.append(f"{key}: {scorer.path}, {where}")
    if config.teacher is not None and config.teacher.column is not None:
        route_of(config, prompts.known())
    return "\n".join([describe_config(config, chosen, size), *(f"# {text}" for text in said)])
