"""The driver with workers that train nothing: failures stay with their run, dead workers are replaced, signals and resumes, directories."""

import fcntl
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from experiments import METHODS, plan_of
from nearpolicy import cli
from nearpolicy.errors import EngineError, UsageError
from nearpolicy.sweep import run as module
from nearpolicy.sweep.board import Board, last_line
from nearpolicy.sweep.driver import Driver, SweepStopped, Timing, is_finished, sweep_directory

STUB = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))
SAPO = {"name": "method", "values": [{"label": "SAPO", "set": {"method.name": "sapo"}}]}


def driver(plan, out, jobs=2):
    said = io.StringIO()
    board = Board(len(plan.runs), done=0, jobs=jobs, console=Console(file=said, width=400))
    return Driver(plan=plan, out=out, jobs=jobs, board=board, command=STUB), said


def drive(plan, out, jobs=2, resume=False):
    with sweep_directory(out, plan, resume=resume):
        own, said = driver(plan, out, jobs)
        timing = own.run()
    return own, timing, said.getvalue()


def test_a_failing_and_a_dying_run_do_not_stop_the_rest(tmp_path):
    plan = plan_of(seeds=[0, 1, 2, 3], axis=[METHODS])
    own, timing, said = drive(plan, tmp_path / "s")
    finished = {r.name for r in plan.runs if is_finished(tmp_path / "s" / "runs" / r.name)}
    assert finished == {"GRPO_s0", "GRPO_s3", "VESPO_s0", "VESPO_s1", "VESPO_s2", "VESPO_s3"}
    assert own.failures["GRPO_s1"] == "loss is not finite"
    assert own.failures["GRPO_s2"].startswith("its process died (SIGSEGV); last words: running GRPO_s2")
    assert set(own.failures) == {"GRPO_s1", "GRPO_s2"}
    assert (timing.runs, timing.jobs) == (8, 2)
    assert timing.own < 2 * timing.wall
    assert "[6/8]" in said
    assert "GRPO_s1: failed: loss is not finite" in said


def test_runs_share_the_worker_and_go_seed_by_seed(tmp_path):
    plan = plan_of(seeds=[0, 3, 4], axis=[METHODS])
    _, _, said = drive(plan, tmp_path / "s", jobs=1)
    pids = {(tmp_path / "s" / "runs" / r.name / "pid").read_text() for r in plan.runs}
    assert len(pids) == 1
    order = [line.split()[1].rstrip(":") for line in said.splitlines()]
    assert order == ["GRPO_s0", "VESPO_s0", "GRPO_s3", "VESPO_s3", "GRPO_s4", "VESPO_s4"]


def test_finished_runs_are_not_run_again_and_failed_ones_are(tmp_path):
    plan = plan_of(seeds=[0, 1], axis=[METHODS])
    drive(plan, tmp_path / "s")
    before = (tmp_path / "s" / "runs" / "GRPO_s0" / "status.json").stat().st_mtime_ns
    own, timing, _ = drive(plan, tmp_path / "s", resume=True)
    assert timing.runs == 1
    assert list(own.failures) == ["GRPO_s1"]
    assert (tmp_path / "s" / "runs" / "GRPO_s0" / "status.json").stat().st_mtime_ns == before


def test_more_seeds_may_join(tmp_path):
    drive(plan_of(seeds=[0], axis=[METHODS]), tmp_path / "s")
    _, timing, _ = drive(plan_of(seeds=[0, 3], axis=[METHODS]), tmp_path / "s", resume=True)
    assert timing.runs == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_runs_write_their_checkpoints(tmp_path, number):
    plan = plan_of(seeds=[0, 1, 2], axis=[SAPO])
    out = tmp_path / "s"
    before = signal.getsignal(number)

    def press():
        deadline = time.monotonic() + 20
        while not all((out / "logs" / f"SAPO_s{k}.log").exists() for k in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(SweepStopped, match="1 wait: go on with --resume"):
        drive(plan, out)
    thread.join()
    states = [json.loads((out / "runs" / f"SAPO_s{k}" / "status.json").read_text())["status"] for k in (0, 1)]
    assert states == ["interrupted", "interrupted"]
    assert not (out / "runs" / "SAPO_s2").exists()
    assert signal.getsignal(number) is before


def test_workers_that_cannot_start_are_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB", "broken")
    with pytest.raises(EngineError, match="exit code 1 before it was ready: no such library"):
        drive(plan_of(seeds=[0]), tmp_path / "s", jobs=1)


WARM = {"warm_start": [{"name": "second"}], "seeds": [0, {"seed": 1, "model.path": "second"}]}


def test_a_warm_start_is_made_once_before_its_runs(tmp_path):
    plan = plan_of(**WARM)
    _, timing, said = drive(plan, tmp_path / "s", jobs=1)
    assert timing.runs == 3
    assert said.index("warm start second") < said.index("second_s1")
    made = (tmp_path / "s" / "warm_starts" / "second" / "sft.json").stat().st_mtime_ns
    (tmp_path / "s" / "runs" / "second_s1" / "status.json").unlink()
    _, timing, _ = drive(plan, tmp_path / "s", jobs=1, resume=True)
    assert timing.runs == 1
    assert (tmp_path / "s" / "warm_starts" / "second" / "sft.json").stat().st_mtime_ns == made


def test_a_warm_start_that_nothing_starts_from_is_not_made(tmp_path):
    _, timing, _ = drive(plan_of(seeds=[0], warm_start=[{"name": "second"}]), tmp_path / "s")
    assert timing.runs == 1


def test_a_warm_start_outside_its_gate_is_one_clear_line(tmp_path):
    plan = plan_of(**{**WARM, "warm_start": [{"name": "second", "gate": [0.3, 0.5]}]})
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"warm start 'second': got held-out pass@1 0.25; expected between 0.3 and 0.5"):
            drive(plan, tmp_path / "s", resume=resume)


def test_a_directory_is_one_experiments(tmp_path):
    plan = plan_of(seeds=[0])
    out = tmp_path / "s"
    with sweep_directory(out, plan, resume=False):
        pass
    with pytest.raises(UsageError, match=r"begun before.*--resume"), sweep_directory(out, plan, resume=False):
        pass
    for other in (plan_of(name="other", seeds=[0]), plan_of(seeds=[1]), plan_of(seeds=[0], base={"train.lr": 0.1})):
        for resume in (False, True):
            with pytest.raises(UsageError, match="expected the directory of"), sweep_directory(out, other, resume=resume):
                pass
    with sweep_directory(out, plan_of(seeds=[0, 1], compare={"target": 0.1}), resume=True):
        pass


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no sweep's directory"), sweep_directory(tmp_path, plan_of(), resume=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_one_sweep_at_a_time(tmp_path):
    plan = plan_of(seeds=[0])
    with sweep_directory(tmp_path / "s", plan, resume=False), (tmp_path / "s" / ".lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(UsageError, match="another sweep at work"), sweep_directory(tmp_path / "s", plan, resume=True):
            pass


def test_overhead_is_what_the_cores_did_besides_the_runs():
    assert Timing(jobs=2, wall=60, own=100, starting=8, runs=4).overhead == pytest.approx(0.2)


def test_the_whole_command(tmp_path, monkeypatch):
    """Tables, figures and report of what finished; exit code 1 and one line for what failed; a second call only writes them again."""
    monkeypatch.setattr(module, "Driver", lambda **given: Driver(**given, command=STUB))
    file, out = tmp_path / "mine.toml", tmp_path / "s"
    values = '[{label = "GRPO", set = {method.name = "grpo"}}, {label = "VESPO", set = {method.name = "vespo"}}]'
    file.write_text(f'seeds = [0, 1, 3]\n[[axis]]\nname = "method"\nvalues = {values}\n[compare]\nbaseline = {{method = "GRPO"}}\n')
    result = CliRunner().invoke(cli.cli, ["sweep", str(file), "--out", str(out), "--jobs", "2"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stdout + result.stderr
    assert result.stderr.startswith("error: 1 of 6 runs: got GRPO_s1: loss is not finite")
    assert {p.name for p in (out / "results").iterdir()} >= {"results.csv", "results.md", "cells.csv", "curves.svg"}
    page = (out / "report.html").read_text()
    assert "method=GRPO (fewer than three seeds)" in page
    assert "eval/pass@1/low" in page
    assert "overhead" in (out / "results" / "results.md").read_text()
    assert json.loads((out / "timing.json").read_text())[0]["runs"] == 6

    again = CliRunner().invoke(cli.cli, ["sweep", str(file), "--out", str(out), "--resume", "--results", str(tmp_path / "r")])
    assert again.exit_code == 1
    assert (tmp_path / "r" / "results.csv").read_bytes() == (out / "results" / "results.csv").read_bytes()
    assert len(json.loads((out / "timing.json").read_text())) == 2


def test_the_board_on_a_terminal_and_off_it(tmp_path):
    (tmp_path / "log").write_text("step 1\nstep 2\n\n")
    assert last_line(tmp_path / "log") == "step 2"
    assert last_line(tmp_path / "none") == ""
    screen = io.StringIO()
    board = Board(4, done=1, jobs=2, console=Console(file=screen, force_terminal=True, width=120))
    board.ended("a", "finished", 30.0, 0.5)
    board.refresh({"b": (time.monotonic(), tmp_path / "log")})
    board.close()
    assert board.left(0) == "0:00:30"
    for text in ("done 2", "running 1", "failed 0", "waiting 1", "left", "step 2"):
        assert text in screen.getvalue()
    assert Board(4, done=0, jobs=2, console=Console(file=io.StringIO())).left(2) == "?"
