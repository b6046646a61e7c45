"""The training loop, readable in one sitting: prompt, sample, score, advantage (the schedule), weight, loss, update (the step), measure."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearpolicy.diagnostics import position
from nearpolicy.diagnostics.samples import sample_records
from nearpolicy.diagnostics.truncation import TruncationTokens
from nearpolicy.errors import NearPolicyError
from nearpolicy.metrics import Metrics, Table, to_floats
from nearpolicy.protocols import Schedule
from nearpolicy.rollout import Batch, Scored
from nearpolicy.trainer.alarms import Alarms
from nearpolicy.trainer.checkpoint import TrainerState, prune, save_checkpoint
from nearpolicy.trainer.progress import Progress
from nearpolicy.trainer.rundir import RunDir
from nearpolicy.trainer.step import Stepper, StepResult
from nearpolicy.trainer.trackers import Tracker


class Stopped(NearPolicyError):
    """Ctrl-C or SIGTERM: a checkpoint was written."""

    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """When things happen, in optimizer updates."""

    steps: int
    eval_every: int
    checkpoint_every: int
    keep: int | None
    log_every: int
    rollouts_every: int
    rollouts: int


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What a run consists of, as plain callables."""

    options: LoopOptions
    schedule: Schedule
    stepper: Stepper
    run: RunDir
    trackers: Sequence[Tracker]
    progress: Progress
    evaluate: Callable[[int], Mapping[str, float]] | None
    """Metric rows of the weights of this version on the held-out prompts."""
    save_model: Callable[[Path], None]
    trainer_state: Callable[[int, Mapping[str, Any], dict[str, Any]], TrainerState]
    decode: Callable[[Sequence[int]], list[str]]
    cut: str = ""
    """Name of the strategy that cuts stored responses, for the counts of truncation tokens."""
    alarms: Alarms = field(default_factory=Alarms)
    positions: position.PositionLog = field(default_factory=position.PositionLog)
    truncation: TruncationTokens = field(default_factory=TruncationTokens)
    start: int = 0
    """Updates done before this process (after a resume)."""
    clock: float = 0.0
    """Seconds of earlier processes of this run."""
    eval_s: float = 0.0
    """Seconds spent in evaluations, earlier processes included."""
    tokens_trained: int = 0
    spared: set[int] = field(default_factory=set)
    """Checkpoints kept from before an alarm."""
    _began: float = 0.0
    _saved: int = -1


def train(t: Trainer) -> None:
    """Run to the last update; a checkpoint is written at the end, on Ctrl-C and when anything fails between two updates.

    Raises:
        Stopped: Ctrl-C or SIGTERM, after the update in flight.
        NearPolicyError: what stopped the run; the run can be gone on with.
    """
    t._began, t._saved, t.stepper.done = time.perf_counter(), t.start, t.start
    step, boundary = t.start, t.schedule.state_dict()
    try:
        with _graceful(t.progress.say) as stop:
            if t.start == 0:
                _evaluate(t, 0)
            for step in range(t.start, t.options.steps):
                boundary = t.schedule.state_dict()
                began = time.perf_counter()
                batch = t.schedule.next(version=step)
                result = t.stepper.update(batch, step)
                _measure(t, step + 1, batch, result, time.perf_counter() - began)
                if _due(step + 1, t.options.eval_every, t.options.steps):
                    _evaluate(t, step + 1)
                if stop or _due(step + 1, t.options.checkpoint_every, t.options.steps):
                    _checkpoint(t, step + 1, t.schedule.state_dict())
                if stop and step + 1 < t.options.steps:
                    raise Stopped("run", got=stop[0], expected="to run on", do=f"Checkpoint of step {step + 1} written: go on with --resume.")
        _end(t, "finished", t.options.steps)
    except Stopped as error:
        _end(t, "interrupted", t.stepper.done, str(error))
        raise
    except KeyboardInterrupt:  # the second Ctrl-C: it may have cut an update in two, so nothing is saved
        _end(t, "interrupted", t._saved, "stopped at once")
        raise
    except Exception as error:
        _rescue(t, step, boundary)
        _end(t, "failed", t.stepper.done, str(error))
        raise
    finally:
        t.progress.close()
        for tracker in t.trackers:
            tracker.close()


def _rescue(t: Trainer, step: int, boundary: Mapping[str, Any]) -> None:
    """Save what the weights contain, with the schedule as it was at that moment: before this update, or after it when it was applied."""
    if t.stepper.done <= t._saved:
        return
    state = boundary if t.stepper.done == step else t.schedule.state_dict()
    try:
        _checkpoint(t, t.stepper.done, state)
    except (NearPolicyError, OSError) as second:
        t.progress.say(f"warning: no checkpoint could be written: {second}")


def _end(t: Trainer, how: str, step: int, message: str = "") -> None:
    with suppress(NearPolicyError, OSError):  # on a full disk the first error is the one to show
        _log(t, step, "event", {"event": how, "message": message})
        t.run.set_status(how, step=step, message=message)


def _measure(t: Trainer, step: int, batch: Batch, result: StepResult, seconds: float) -> None:
    """Log the update, raise alarms, record sample responses."""
    metrics: Metrics = t.schedule.metrics() | result.metrics
    if isinstance(table := metrics.pop(position.NAME, None), Table):
        t.positions.add(table)
    t.truncation.add(batch, t.cut)
    # Histogram counts are most of a line: a run keeps about fifty of them, the quantiles at every step.
    counts = _due(step, max(1, t.options.steps // 50), t.options.steps) or step == 1
    values: dict[str, Any] = dict(to_floats(metrics, counts=counts))
    t.tokens_trained += int(values["data/tokens_trained"])
    elapsed = t.clock + time.perf_counter() - t._began - t.eval_s
    values |= {
        "time/step_s": seconds,
        "time/tokens_per_s": (t.schedule.tokens_sampled + t.tokens_trained) / max(elapsed, 1e-9),
        "time/memory_mb": memory_mb(),
    }
    alarms = t.alarms.watch(step, values)
    if counts:
        t.positions.due = True
        if truncated := t.truncation.table(t.decode):
            t.run.write_truncation(truncated)
    if step % t.options.log_every == 0 or alarms or step == t.options.steps:
        _log(t, step, "train", values | (t.positions.take() if t.positions.due else {}))
    for alarm in alarms:
        _log(t, step, "alarm", {"alarm": alarm.metric, "message": alarm.message, "value": alarm.value})
        t.progress.say(f"alarm: {alarm.message}")
        if t._saved > 0:
            t.spared.add(t._saved)
    t.progress.update(step, values)
    if t.options.rollouts_every and (_due(step, t.options.rollouts_every, t.options.steps) or step == 1):
        rows = list(range(0, len(batch), max(1, len(batch) // t.options.rollouts)))[: t.options.rollouts]
        scored = _by_place(t.schedule.last_scored)
        t.run.write_rollouts(step, sample_records(step, batch, result.weight_BT, rows, decode=t.decode, scored=scored))


def _evaluate(t: Trainer, step: int) -> None:
    if t.evaluate is None:
        return
    began = time.perf_counter()
    values = dict(t.evaluate(step))
    seconds = time.perf_counter() - began
    t.eval_s += seconds
    _log(t, step, "eval", values | {"time/eval_s": seconds})
    t.progress.evaluated(step, values)


def _checkpoint(t: Trainer, step: int, schedule_state: Mapping[str, Any]) -> None:
    extra = {
        "alarms": t.alarms.state_dict(),
        "clock": t.clock + time.perf_counter() - t._began,
        "eval_s": t.eval_s,
        "tokens_trained": t.tokens_trained,
        "spared": sorted(t.spared),
        "positions": t.positions.state_dict(),
        "truncation": t.truncation.state_dict(),
    }
    if t._saved != step:
        save_checkpoint(t.run.checkpoints, t.trainer_state(step, schedule_state, extra), t.save_model)
        t._saved = step
    prune(t.run.checkpoints, t.options.keep, t.spared)
    t.run.set_status("running", step=step)


def _log(t: Trainer, step: int, kind: str, values: Mapping[str, Any]) -> None:
    row = {"time": round(t.clock + time.perf_counter() - t._began, 3), **values}
    for tracker in t.trackers:
        tracker.log(step, kind, row)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _by_place(scored: Sequence[Scored]) -> dict[tuple[int, int], Scored]:
    out: dict[tuple[int, int], Scored] = {}
    for s in scored:
        place = 0
        while (s.rollout.group, place) in out:
            place += 1
        out[s.rollout.group, place] = s
    return out


def memory_mb() -> float:
    """Resident memory of this process now, in MB; its peak where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        scale = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


@contextmanager
def _graceful(say: Callable[[str], None]) -> Iterator[list[str]]:
    """The first Ctrl-C or SIGTERM lets the update in flight end; the second stops at once."""
    stop: list[str] = []

    def handle(number: int, _frame: object) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(signal.Signals(number).name)
        say("stopping after this update; once more stops at once")

    try:
        before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller owns the signals
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
