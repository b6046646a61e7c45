"""Two ranks against one process (gloo, on this machine): updates, checkpoints, sampling, errors, and whole runs that lose a rank."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nearpolicy.build import config_for
from nearpolicy.build_ranks import refuse_ranks
from nearpolicy.errors import UsageError
from nearpolicy.trainer.team import world
from tests.trainer.rank_cases import CASES

ROOT = Path(__file__).parents[2]
DEADLINE = 240
SMALL = [
    "tiny", "task.num_ops=1", "task.heldout=4", "eval.every=0", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=24",
    "schedule.updates_per_rollout=2", "train.lr=3e-3", "checkpoint.every=2", "checkpoint.keep=none", "log.rollouts_every=0", "threads=1",
    "device=cpu", "train.rank_deadline=60",
]  # fmt: skip


def environment(rank=None, size=2, port=None, **more):
    """Of a rank, or of no rank at all."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")}
    own = {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return clean | own | ({} if port is None else {"MASTER_PORT": str(port)}) | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | more


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Both:
    """Two processes of one command; ended with the block, whatever happens."""

    def __init__(self, *words):
        port = free_port()
        self.ranks = [
            subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment(rank, port=port), text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for rank in (0, 1)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks:
            process.kill()
            process.wait(10)
            process.stdout.close()
            process.stderr.close()

    def end(self, within=DEADLINE):
        """[(exit code, stdout, stderr)] by rank."""
        until = time.monotonic() + within
        return [(p.returncode, out, err) for p in self.ranks for out, err in [p.communicate(timeout=max(1, until - time.monotonic()))]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    with Both("-m", "tests.trainer.rank_cases", str(out)) as both:
        for code, _, err in both.end():
            assert code == 0, err
    told = json.loads(out.read_text())
    assert told["ended"].startswith("ranks: got no team any more (it has ended)")
    assert told["threads left"] == []
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(found, name):
    """Three updates by gradient descent: weights to 1e-6, and everything that is measured."""
    got = found[name]
    assert got["weights"] <= 1e-6
    assert got["logp"] <= 2e-6
    assert got["token weights"] <= 2e-5
    assert got["metrics"] <= 1e-3
    assert (got["moved"] > 1e-4) == (name != "nothing trained"), "the comparison is of something"


@pytest.mark.slow
def test_the_comparison_had_empty_steps(found):
    assert found["vespo"]["empty steps"] >= 1
    assert found["gspo, padded rows"]["empty steps"] >= 1
    assert found["one row"]["empty steps"] == 3


@pytest.mark.slow
def test_checkpoints_cross_rank_counts_bit_for_bit(found):
    got = found["checkpoints"]
    assert got["two to one"]
    assert got["one to two"]
    assert got["published"]
    assert got["parameters"] > 10
    assert got["after one more update"] <= 2e-4  # of a learning rate of 1e-3: AdamW divides a gradient that is nearly zero by its own size


@pytest.mark.slow
def test_sampling_and_teachers_are_split_by_key(found):
    assert found["sampling"] == {"same": True, "responses": 15, "version": 4, "teacher": pytest.approx(0, abs=2e-6)}


@pytest.mark.slow
def test_errors_are_said_once_and_what_can_go_on_goes_on(found):
    said = found["errors"]
    assert said["answer"] == "DataError rank 1: rows: got none; expected some. Look."
    assert said["bug"].startswith("EngineError rank 1: its work: got ZeroDivisionError: a bug")
    assert said["not finite"].startswith("NotFinite update 1: got gradient norm inf") or "gradient norm nan" in said["not finite"]
    assert said["untouched"] == 0.0
    assert 0 < said["goes on"] < 1e6


def steps_of(run):
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for line in lines if line.endswith("}") and (row := json.loads(line))["kind"] == "train"]


def same_bits(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("model.safetensors", "trainer/optimizer.safetensors"))


def train(*words):
    return ["-m", "nearpolicy", "train", *SMALL, *words]


@pytest.mark.slow
def test_torchrun_trains_and_a_run_is_gone_on_with_exactly(tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    result = subprocess.run([*launch, *train("train.steps=4", "--out", str(whole))], cwd=ROOT, env=environment(), capture_output=True, text=True,
                            timeout=DEADLINE, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("first prompt:") == 1, "one rank speaks"
    assert json.loads((whole / "env.json").read_text())["ranks"] == 2
    assert [row["step"] for row in steps_of(whole)] == [1, 2, 3, 4]
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "step-000004")
    with Both("-m", "nearpolicy", "train", "--resume", "--out", str(half)) as both:
        (code, _, err), (other, out, _) = both.end()
    assert (code, other, out) == (0, 0, ""), err
    assert same_bits(whole / "checkpoints" / "step-000004", half / "checkpoints" / "step-000004")


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_line_and_one_process_goes_on(tmp_path):
    from nearpolicy.build import train as go_on

    out = tmp_path / "run"
    with Both(*train("train.steps=5000", "--out", str(out))) as both:
        until = time.monotonic() + DEADLINE
        while len(steps_of(out)) < 3:
            assert time.monotonic() < until
            assert both.ranks[0].poll() is None, both.ranks[0].stderr.read()
            time.sleep(0.05)
        both.ranks[1].send_signal(signal.SIGKILL)
        (code, _, err), _ = both.end(within=60)
    assert code == 1
    assert err.count("error:") == 1
    assert "error: rank 1: got no sign of life" in err
    assert "then go on with --resume." in err
    saved = max(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").glob("step-*"))
    assert json.loads((out / "status.json").read_text())["status"] == "failed"
    words = [w for w in SMALL if w != "tiny"]
    go_on(config_for([*words, f"train.steps={saved + 1}"], out), out, resume=True, report=False, say=lambda _: None)
    assert load_file(out / f"checkpoints/step-{saved + 1:06d}/model.safetensors")


@pytest.mark.slow
def test_a_rank_that_never_comes_is_one_line_within_the_deadline(tmp_path):
    words = train("train.rank_deadline=2", "--out", str(tmp_path / "run"))
    result = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(0, port=free_port()), capture_output=True, text=True, timeout=60,
                            check=False)  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1
    assert "error: rank 0 of 2: got" in result.stderr
    assert "expected all ranks within 2 s" in result.stderr
    assert not (tmp_path / "run").exists()


def test_an_environment_without_ranks_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert world() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE: got '2' without RANK, MASTER_ADDR, MASTER_PORT"):
        world()
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("RANK", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="RANK: got '2' with WORLD_SIZE = '2'"):
        world()
    monkeypatch.setenv("RANK", "1")
    assert world() == (1, 2)


def test_more_ranks_than_responses_in_an_update_are_refused():
    config = config_for(["tiny", "rollout.prompts=4", "rollout.group_size=2", "schedule.updates_per_rollout=4"])
    refuse_ranks(config, 2)
    with pytest.raises(UsageError, match="ranks: got 3 for 2 responses in an update"):
        refuse_ranks(config, 3)
