"""Sweeps that train: equal to runs on their own, interrupted and gone on with, killed, and warm started."""

import json
import os
import signal
import threading
import time
import tomllib

import pytest

from experiments import METHODS, plan_of
from nearpolicy.build import train
from nearpolicy.policy.tiny import make_tiny
from nearpolicy.sweep.board import Board
from nearpolicy.sweep.driver import Driver, SweepStopped, is_finished, sweep_directory

SMALL = {
    "task": {"num_ops": 1, "heldout": 8}, "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 8}, "schedule": {"updates_per_rollout": 4},
    "train": {"steps": 8, "lr": 3e-3}, "eval": {"every": 4}, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def small(tiny, **more):
    return plan_of(base={**SMALL, "model": {"path": str(tiny)}}, keep_checkpoints=True, **more)


def drive(plan, out, *, resume=False, jobs=1, meanwhile=None):
    with sweep_directory(out, plan, resume=resume):
        own = Driver(plan=plan, out=out, jobs=jobs, board=Board(len(plan.runs), done=0, jobs=jobs))
        thread = threading.Thread(target=meanwhile, args=(own,), daemon=True) if meanwhile else None
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
    return [{k: v for k, v in r.items() if not k.startswith("time") and not k.endswith("/hist")} for r in found if r["kind"] in ("train", "eval")]


def when(ready, action, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            action()
            return
        time.sleep(0.005)


def test_a_run_of_a_sweep_is_the_run_on_its_own_and_survives_what_happens_to_others(tiny, tmp_path):
    """One worker trains one run after another; its process is killed during the second, which fails alone and is made whole by --resume."""
    plan, out = small(tiny, seeds=[0, 1], axis=[METHODS]), tmp_path / "s"
    second = out / "runs" / "VESPO_s0" / "metrics.jsonl"

    def kill(own):
        when(lambda: second.exists() and second.stat().st_size > 0, lambda: os.kill(own.workers[0].process.pid, signal.SIGKILL))

    own = drive(plan, out, meanwhile=kill)
    assert list(own.failures) == ["VESPO_s0"]
    assert "SIGKILL" in own.failures["VESPO_s0"]
    assert [is_finished(out / "runs" / r.name) for r in plan.runs] == [True, True, False, True]
    drive(plan, out, resume=True)
    for run in plan.runs:
        train(run.config, tmp_path / run.name, report=False, say=lambda _: None)
        assert weights(out / "runs" / run.name) == weights(tmp_path / run.name), run.name
        assert rows(out / "runs" / run.name) == rows(tmp_path / run.name), run.name
    assert not (out / "runs" / "GRPO_s0" / "report.html").exists()


def test_a_signal_writes_a_checkpoint_and_the_resumed_sweep_equals_an_uninterrupted_one(tiny, tmp_path):
    plan, out = small(tiny, seeds=[0]), tmp_path / "s"
    metrics = out / "runs" / "s0" / "metrics.jsonl"

    def press(_):
        when(lambda: metrics.exists() and metrics.read_text().count('"kind":"train"') >= 2, lambda: os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(SweepStopped):
        drive(plan, out, meanwhile=press)
    steps = [int(p.name[5:]) for p in (out / "runs" / "s0" / "checkpoints").iterdir()]
    assert len(steps) == 1
    assert 2 <= steps[0] < 8
    assert json.loads((out / "runs" / "s0" / "status.json").read_text())["status"] == "interrupted"
    drive(plan, out, resume=True)
    train(plan.runs[0].config, tmp_path / "whole", report=False, say=lambda _: None)
    assert weights(out / "runs" / "s0") == weights(tmp_path / "whole")
    assert rows(out / "runs" / "s0") == rows(tmp_path / "whole")


def test_a_warm_start_is_trained_and_started_from_and_checkpoints_are_not_kept(tmp_path):
    plan = plan_of(seeds=[{"seed": 0, "model.path": "mine"}], base=SMALL, warm_start=[{"name": "mine", "seed": 2, "steps": 3, "gate": [0, 1]}])
    out = tmp_path / "s"
    own = drive(plan, out)
    assert not own.failures, own.failures
    folder = out / "warm_starts" / "mine"
    assert json.loads((folder / "sft.json").read_text())["options"]["steps"] == 3
    run = out / "runs" / "mine_s0"
    assert is_finished(run)
    assert not (run / "checkpoints").exists()
    assert tomllib.loads((run / "run.toml").read_text())["model"]["path"] == str(folder)
