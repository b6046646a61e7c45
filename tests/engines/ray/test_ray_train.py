"""Whole runs with workers on Ray: equal to sync at lag 0, killed, interrupted, on two nodes; nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nearpolicy import build

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["threads=1", "task.heldout=4", "eval.every=0", "rollout.prompts=4", "rollout.group_size=4", "train.steps=4", "device=cpu", "train.lr=1e-3"]
LAG_0 = ["async", "schedule.sync_every=1", "schedule.max_age=0", *SMALL]
DEADLINE_S = 180.0


def quiet(_):
    pass


def weights(run, step):
    return load_file(run / f"checkpoints/step-{step:06d}/model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(bool((a[k] == b[k]).all()) for k in a)


def rows(run, kind="train"):
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def children(marker):
    """Processes with this word in their command line or environment: pid -> command."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            where = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if (marker in command or marker in where) and int(folder.name) != os.getpid():
            found[int(folder.name)] = command[:120]
    return found


def gone(marker):
    end = time.monotonic() + DEADLINE_S
    while left := children(marker):
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return {}


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("sync") / "run"
    build.train(build.config_for(["tiny", "schedule.updates_per_rollout=1", *SMALL]), out, say=quiet, report=False)
    return out


def test_one_worker_without_lag_equals_sync_bit_for_bit_and_resumes(sync_run, tmp_path):
    out = tmp_path / "run"
    config = build.config_for([*LAG_0, "train.steps=2", "schedule.record=true"])
    build.train(config, out, say=quiet, report=False)
    build.train(build.config_for(["train.steps=4"], out), out, resume=True, say=quiet, report=False)
    assert equal(weights(out, 4), weights(sync_run, 4))
    for a, b in zip(rows(out), rows(sync_run), strict=True):
        same = {k for k in a.keys() & b.keys() if k.startswith(("reward/", "weight/", "ratio/", "response/", "stale/", "train/"))}
        same = {k for k in same if not k.startswith(("weight/log_", "ratio/log_"))}  # histograms of rounding around 0
        assert len(same) > 20
        for name in same:
            assert a[name] == pytest.approx(b[name], rel=1e-6), name  # a last bit may differ where arrays lie otherwise in memory
    again = tmp_path / "again"
    build.train(build.config_for(["async", f"schedule={{kind='replay', path='{out}'}}", *SMALL]), again, say=quiet, report=False)
    assert equal(weights(again, 4), weights(out, 4))


@pytest.mark.parametrize("source", ["relay", "demonstrations"])
def test_sources_work_with_workers(source, tmp_path):
    extra = {
        "relay": ["rollout.source=relay", "rollout.refresh=2"],
        "demonstrations": ["rollout.demonstrations.per_group=1", "method.name=luffy"],
    }[source]
    out = tmp_path / "run"
    build.train(build.config_for(["async", *SMALL, *extra]), out, say=quiet, report=False)
    last = rows(out)[-1]
    assert last["step"] == 4
    assert max(r["stale/age_max"] for r in rows(out)) <= 4
    assert last["relay/relayed_frac"] > 0 if source == "relay" else True


def start(*words, out):
    """`nearpolicy train` in a process group of its own, marked so that everything it starts can be found."""
    marker = f"NEARPOLICY_TEST={out}"
    environment = {**os.environ, "NEARPOLICY_TEST": str(out)}
    command = [sys.executable, "-m", "nearpolicy.cli", "train", *words, "--out", str(out)]
    return marker, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def until(run, updates):
    """Wait until a run has come so far."""
    end = time.monotonic() + DEADLINE_S
    while not (run / "metrics.jsonl").exists() or len(rows(run)) < updates:
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.1)


def test_a_run_leaves_no_process_no_session_and_nothing_on_the_terminal(tmp_path):
    before = set(Path("/tmp").glob("nearpolicy-ray-*"))
    marker, process = start("async", *SMALL, out=tmp_path / "run")
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    assert gone(marker) == {}
    assert set(Path("/tmp").glob("nearpolicy-ray-*")) <= before
    assert "ray" not in text.lower().replace("nearpolicy-ray", "")


def test_ctrl_c_writes_a_checkpoint_and_leaves_no_process(tmp_path):
    out = tmp_path / "run"
    marker, process = start("async", *SMALL, "train.steps=100000", out=out)
    until(out, 2)
    os.killpg(process.pid, signal.SIGINT)  # the whole group, as a terminal does
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, text
    assert "Checkpoint of step" in text
    assert gone(marker) == {}
    assert list((out / "checkpoints").glob("step-*"))


def test_a_killed_trainer_takes_everything_with_it(tmp_path):
    out = tmp_path / "run"
    marker, process = start("async", *SMALL, "train.steps=100000", out=out)
    until(out, 1)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert gone(marker) == {}


def test_random_kills_lose_and_double_nothing():
    sys.path.insert(0, str(ROOT))
    from bench import kills

    found = kills.run(4, workers=2, seed=1, say=quiet)
    assert found["kills"] == 4
    assert found["sampled_again"] > 0
    assert (found["lost"], found["doubled"]) == (0, 0)


CLUSTER = """
import sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """A cluster of two local nodes with one CPU each."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = ""
    while not address.replace(".", "").replace(":", "").strip().isdigit():
        address = process.stdout.readline()
        assert address, "the cluster did not start"
    yield address.strip()
    process.communicate("", timeout=60)


def test_the_same_recipe_joins_two_nodes(two_nodes, tmp_path):
    """Two workers of one CPU each: there is one on each node, or they would not run."""
    out = tmp_path / "run"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    words = ["async", *SMALL, "schedule.workers=2", f"ray.address={two_nodes}"]
    command = [sys.executable, "-m", "nearpolicy.cli", "train", *words, "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows(out)) == 4
    many = subprocess.run([*command[:-2], "schedule.workers=3", "--out", str(tmp_path / "many")], env=environment, capture_output=True, text=True,
                          timeout=DEADLINE_S)  # fmt: skip
    assert many.returncode == 2
    assert "3 x 1 = 3 CPUs; expected at most the 2 of the cluster" in many.stderr
