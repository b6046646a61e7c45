"""A worker process of a sweep: trains run after run in one interpreter, so that a run pays for no import.

It reads one job a line (JSON) from stdin and answers on what was its stdout; the output of each job goes to that job's log, C code's
included. It ends with its driver, after a checkpoint of the run at hand; and so it does on SIGTERM.

    {"kind": "run", "name", "out", "log", "config": {...}, "metric", "keep_checkpoints"}    -> {"status", "message", "seconds", "score"}
    {"kind": "sft", "name", "out", "log", "config": {...}, "options": {...}}                -> {"status", "message", "seconds"}
"""

import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nearpolicy.errors import NearPolicyError

DONE, FAILED, STOPPED = "finished", "failed", "interrupted"
"""How a job ends."""


def main() -> None:
    """Serve jobs until stdin closes, a signal comes or the driver is gone."""
    began = time.perf_counter()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        import nearpolicy.jobs  # noqa: F401  (the seconds of the import are the worker's, not the first run's)
        from nearpolicy.trainer.rundir import commit

        commit()  # of the code that was imported just now
        _say(channel, {"status": "ready", "seconds": time.perf_counter() - began})
        for line in sys.stdin:
            answer = _serve(json.loads(line))
            _say(channel, answer)
            if answer["status"] == STOPPED:
                break
    os._exit(0)  # no destructor of a library may hold up the driver


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _watch(driver: int) -> None:
    """A driver that was killed leaves no orphans at work."""
    while os.getppid() == driver:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _say(channel: Any, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job; whatever it raises is its answer."""
    began = time.perf_counter()
    status, message, score = DONE, "", None
    try:
        with _output_to(Path(job["log"])):
            try:
                if job["kind"] == "run":
                    score = _train(job)
                else:
                    _sft(job)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                raise
    except KeyboardInterrupt:
        status, message = STOPPED, "interrupted"
    except NearPolicyError as error:
        status, message = (STOPPED if error.exit_code == 130 else FAILED), str(error)
    except Exception as error:
        status, message = FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"
    gc.collect()
    return {"status": status, "message": message[:2000], "seconds": time.perf_counter() - began, "score": score}


def _train(job: dict[str, Any]) -> float | None:
    """Train the run or go on with it; returns its last score."""
    from nearpolicy.build import train
    from nearpolicy.layers import resolve

    out, config = Path(job["out"]), resolve([job["config"]])
    if not ended(out, config.train.steps):
        resume = (out / "run.toml").exists()
        if not resume:
            shutil.rmtree(out, ignore_errors=True)  # at most the beginning of a run that was killed
        train(config, out, resume=resume, report=False, say=lambda text: print(text, flush=True))
    if not job["keep_checkpoints"]:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return last_score(out / "metrics.jsonl", job["metric"])


def ended(out: Path, steps: int) -> bool:
    """Whether the run has its last update; one killed between its last checkpoint and its end is ended here."""
    from nearpolicy.trainer.checkpoint import saved_steps, verify
    from nearpolicy.trainer.rundir import RunDir

    run = RunDir(out)
    if run.status().get("status") == DONE:
        return True
    folder = saved_steps(run.checkpoints).get(steps)
    if folder is None:
        return False
    verify(folder)
    run.set_status(DONE, step=steps)
    return True


def last_score(metrics: Path, metric: str) -> float | None:
    """The value of the last evaluation row."""
    score = None
    with metrics.open(encoding="utf-8") as lines:
        for line in lines:
            if '"kind":"eval"' in line:
                score = json.loads(line).get(metric, score)
    return score


def _sft(job: dict[str, Any]) -> None:
    """Make a warm start; a half-made one never has the name of a whole one."""
    from nearpolicy.jobs import sft
    from nearpolicy.layers import resolve

    out = Path(job["out"])
    aside = out.with_name(f".writing-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    sft(resolve([job["config"]]), aside, say=lambda text: print(text, flush=True), **job["options"])
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Both streams into this file while a job runs, at the level of the system."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, number)
            os.close(saved)


if __name__ == "__main__":
    main()
