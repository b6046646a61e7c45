"""Sweeps that train: equal to runs on their own, stopped and gone on with, warm started."""

import json
import os
import signal
import threading
import time
import tomllib

import pytest

from experiments import plan_of
from nearpolicy.build import train
from nearpolicy.layers import resolve, to_tree
from nearpolicy.policy.tiny import make_tiny
from nearpolicy.sweep import worker
from nearpolicy.sweep.board import Board
from nearpolicy.sweep.driver import Driver, SweepStopped, is_finished, sweep_directory

SMALL = {
    "task": {"num_ops": 1, "heldout": 8}, "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 8}, "schedule": {"updates_per_rollout": 4},
    "train": {"steps": 8, "lr": 3e-3}, "eval": {"every": 4}, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def drive(plan, out, *, resume=False, meanwhile=None):
    with sweep_directory(out, plan, resume=resume):
        own = Driver(plan=plan, out=out, jobs=1, board=Board(len(plan.runs), done=0, jobs=1))
        thread = threading.Thread(target=meanwhile, daemon=True) if meanwhile else None
        if thread:
            thread.start()
        try:
            own.run()
        finally:
            if thread:
                thread.join(20)
    return own


def weights(out):
    return (out / "checkpoints" / "step-000008" / "model.safetensors").read_bytes()


def rows(out):
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    kept = [r for r in found if r["kind"] in ("train", "eval")]
    return [{k: v for k, v in r.items() if not k.startswith("time") and not k.endswith("/hist")} for r in kept]


def updates_in(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"kind":"train"') if metrics.exists() else 0


def when(ready, action, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            action()
            return
        time.sleep(0.005)


@pytest.mark.slow
def test_stopped_and_gone_on_with_every_run_is_the_run_on_its_own(tiny, tmp_path):
    """A run is stopped by Ctrl-C in the middle and gone on with; another has a warm start and follows in the same process."""
    seeds = [0, {"seed": 1, "model.path": "mine"}]
    plan = plan_of(base={**SMALL, "model": {"path": str(tiny)}}, seeds=seeds, keep_checkpoints=True,
                   warm_start=[{"name": "mine", "seed": 2, "steps": 3, "gate": [0, 1]}])  # fmt: skip
    out = tmp_path / "s"
    first, second = (out / "runs" / run.name for run in plan.runs)

    with pytest.raises(SweepStopped):
        drive(plan, out, meanwhile=lambda: when(lambda: updates_in(first) >= 2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    (checkpoint,) = (first / "checkpoints").iterdir()
    assert 2 <= int(checkpoint.name[5:]) < 8
    assert json.loads((first / "status.json").read_text())["status"] == "interrupted"

    own = drive(plan, out, resume=True)
    assert (own.ended, own.failures) == (2, {})
    warm = out / "warm_starts" / "mine"
    assert json.loads((warm / "sft.json").read_text())["options"]["steps"] == 3
    assert tomllib.loads((second / "run.toml").read_text())["model"]["path"] == str(warm)
    for run, path in zip(plan.runs, (first, second), strict=True):
        model = {"model": {"path": str(warm)}} if plan.warm_start(run) else {}
        train(resolve([to_tree(run.config), model]), tmp_path / run.name, report=False, say=lambda _: None)
        assert weights(path) == weights(tmp_path / run.name), run.name
        assert rows(path) == rows(tmp_path / run.name), run.name


def job(run, out, *, keep=False):
    return {"out": str(out), "config": to_tree(run.config), "metric": "eval/pass@1", "keep_checkpoints": keep}


def test_a_finished_run_is_small_and_is_not_trained_again(tiny, tmp_path):
    run = plan_of(base={**SMALL, "model": {"path": str(tiny)}}, seeds=[0]).runs[0]
    score = worker._train(job(run, tmp_path / "a"))
    assert score == rows(tmp_path / "a")[-1]["eval/pass@1"]
    assert not (tmp_path / "a" / "checkpoints").exists()
    assert not (tmp_path / "a" / "report.html").exists()
    assert len(list((tmp_path / "a" / "evaluations").iterdir())) == 3
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert worker._train(job(run, tmp_path / "a")) == score
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_between_its_last_checkpoint_and_its_end_counts_as_finished(tiny, tmp_path):
    run = plan_of(base={**SMALL, "model": {"path": str(tiny)}}, seeds=[0]).runs[0]
    worker._train(job(run, tmp_path / "a", keep=True))
    (tmp_path / "a" / "status.json").write_text('{"status": "running", "step": 0}')
    worker._train(job(run, tmp_path / "a", keep=True))
    assert is_finished(tmp_path / "a")


def test_a_directory_that_a_killed_run_only_began_is_begun_again(tiny, tmp_path):
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    run = plan_of(base={**SMALL, "model": {"path": str(tiny)}}, seeds=[0]).runs[0]
    worker._train(job(run, tmp_path / "a"))
    assert is_finished(tmp_path / "a")


def test_output_goes_to_the_log_of_the_job_at_the_level_of_the_system(tmp_path, capfd):
    with worker._output_to(tmp_path / "log"):
        os.write(2, b"from C\n")
        os.system("echo from a child")
    os.write(1, b"after\n")
    assert (tmp_path / "log").read_text() == "from C\nfrom a child\n"
    assert capfd.readouterr().out == "after\n"
