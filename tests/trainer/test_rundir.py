"""The run directory: refused when it exists, resumed only by the same run, every file written aside and renamed."""

import errno
import gzip
import json
import os

import pytest

import nearpolicy.trainer.rundir as module
from nearpolicy.errors import UsageError
from nearpolicy.layers import load_config
from nearpolicy.trainer.rundir import RunDir, RunDirError, environment, write_atomic


def test_one_process_in_a_run(tmp_path):
    config = load_config("tiny")
    run = RunDir.create(tmp_path / "a", config)
    with pytest.raises(UsageError, match=f"pid {os.getpid()}"):
        RunDir.open(tmp_path / "a", config)
    run.close()
    run.close()
    RunDir.open(tmp_path / "a", config).close()


def test_a_damaged_run_toml_is_one_clear_line(tmp_path):
    RunDir.create(tmp_path / "a", load_config("tiny")).close()
    (tmp_path / "a" / "run.toml").write_text("{bad")
    with pytest.raises(UsageError, match="no TOML"):
        RunDir.open(tmp_path / "a", load_config("tiny"))


def test_created_with_what_a_number_is_traced_to(tmp_path):
    run = RunDir.create(tmp_path / "a", load_config("tiny"))
    env = json.loads((run.path / "env.json").read_text())
    assert env["versions"]["torch"]
    assert "commit" in env
    assert run.status()["status"] == "running"
    names = {row["name"] for row in json.loads((run.path / "metrics_table.json").read_text())}
    assert "reward/mean" in names
    assert set(json.loads((run.path / "histogram_edges.json").read_text())) <= names


def test_an_existing_directory_is_refused(tmp_path):
    (tmp_path / "x").write_text("something of the user's")
    with pytest.raises(UsageError, match="it exists"):
        RunDir.create(tmp_path, load_config("tiny"))
    with pytest.raises(UsageError, match="it exists"):
        RunDir.create(tmp_path / "x", load_config("tiny"))
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path / "empty", load_config("tiny"))


def test_a_resume_says_which_keys_changed(tmp_path):
    RunDir.create(tmp_path / "a", load_config("tiny")).close()
    with pytest.raises(UsageError, match=r"changed keys method\.name, train\.lr") as error:
        RunDir.open(tmp_path / "a", load_config("tiny", "train.lr=1e-5", "method.name=grpo"))
    assert "\n" not in str(error.value)
    RunDir.open(tmp_path / "a", load_config("tiny", "train.steps=1000", "eval.every=7")).close()
    assert "steps = 1000" in (tmp_path / "a" / "run.toml").read_text()
    with pytest.raises(UsageError, match=r"no run\.toml"):
        RunDir.open(tmp_path / "nothing", load_config("tiny"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RunDirError):
        RunDir.create(blocked / "run", load_config("tiny"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "status.json"
    write_atomic(target, "old")
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(RunDirError, match="no space left"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "status.json"]


def test_rollouts_are_compressed_lines(tmp_path):
    run = RunDir.create(tmp_path / "a", load_config("tiny"))
    run.write_rollouts(7, [{"text": "é\n"}, {"text": "b"}])
    lines = gzip.decompress((run.rollouts / "step-000007.jsonl.gz").read_bytes()).decode().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["é\n", "b"]


def test_the_environment_names_commit_and_hardware():
    env = environment()
    assert env["cpus"]
    assert env["commit"] is None or len(env["commit"].split("+")[0]) == 40
