"""The command line: every mistake is one line `error: ...` with its exit code; an interrupt says what is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearpolicy import build, cli, jobs
from nearpolicy.policy.tiny import make_tiny

REWARDS = Path(__file__).parent / "data" / "rewards.py"


def call(*words):
    result = CliRunner().invoke(cli.cli, list(words))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "--samples", "0", "tiny"], "'--samples'"),
        (["eval", "--samples", "99999999", "tiny"], "'--samples'"),
        (["sft", "--batch-size", "1000000000"], "'--batch-size'"),
        (["sft", "--steps", "1000000000000"], "'--steps'"),
        (["sft", "--lr", "x"], "'--lr'"),
        (["trian"], "Did you mean 'train'"),
        (["xyzzy"], "Known: check, eval"),
        (["train", "--ot", "x"], "--out"),
        (["--nope"], "--nope"),
        (["eval"], "CHECKPOINT"),
        (["report"], "RUNS"),
        (["train", "--out"], "--out"),
        (["check", "seed=99999999999999999999999"], "seed"),
        (["check", "rollout.prompts=1000000000"], "rollout.prompts"),
        (["check", "method.c_pos=[1e300,1e300]"], "c_pos"),
        (["eval", "tiny", "--k", "a"], "--k"),
        (["eval", "tiny", "--k", "1,,2"], "--k"),
        (["eval", "tiny", "--k", ""], "--k"),
        (["eval", "tiny", "--k", "2"], "samples = 1"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(words, says):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_help_and_version_are_no_errors():
    for words in (["--help"], ["train", "--help"], ["--version"]):
        code, out, err = call(*words)
        assert code == 0
        assert out
        assert not err
    assert call("recipes")[0] == 0


def stop(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupt_says_what_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "check", stop)
    assert call("check")[::2] == (130, "error: interrupted; nothing was written\n")
    out = tmp_path / "run"
    monkeypatch.setattr(build, "train", stop)
    assert call("train", "--out", str(out))[::2] == (130, "error: interrupted; nothing was written\n")

    def begin(config, path, **_):
        (path / "checkpoints").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "train", begin)
    code, _, err = call("train", "--out", str(out))
    assert (code, err.count("\n")) == (130, 1)
    assert "before the first checkpoint" in err
    (out / "checkpoints" / "step-000003").mkdir()
    (out / "checkpoints" / "step-000012").mkdir()
    monkeypatch.setattr(build, "train", stop)
    err = call("train", "--out", str(out))[2]
    assert f"{out / 'checkpoints' / 'step-000012'} stands" in err
    assert f"--resume --out {out}" in err


def test_an_interrupt_of_a_warm_start_names_the_folder_it_may_have_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "sft", stop)
    assert "nothing was written" in call("sft", "--out", str(tmp_path / "new"))[2]

    def begin(config, path, **_):
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "sft", begin)
    assert "may be incomplete" in call("sft", "--out", str(tmp_path / "new"))[2]


def test_an_interrupt_while_the_command_line_is_loaded_is_one_line():
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from nearpolicy.cli import main\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted; nothing was written\n")


def test_an_interrupt_of_the_process_is_one_line(tmp_path):
    """The signal comes when the command has begun, in the middle of its imports."""
    code = (
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['nearpolicy', 'check']\n"
        "from nearpolicy.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "error: interrupted; nothing was written\n")
    assert not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def test_an_evaluation_that_scores_nothing_ends_with_the_reason(tiny, tmp_path):
    (tmp_path / "none.py").write_text("def abstain(prompts, completions, **columns):\n    return [None] * len(completions)\n")
    task = [f'task.rewards=[{{function="{tmp_path}/none.py:abstain"}}]', "task.num_ops=1", "task.heldout=4", "rollout.max_tokens=4"]
    code, _, err = call("eval", str(tiny), *task, "eval.greedy=true", "threads=1", "device=cpu")
    assert code == 1
    assert err == (
        "error: eval: 4 prompts: got not one response that the reward functions could score; expected some scored. "
        "They abstained or failed on all: look at task.rewards and the answers.\n"
    )


def test_a_file_whose_name_has_an_equals_sign_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1.toml").write_text("[train]\nsteps = 77\n")
    assert build.config_for(["a=1.toml"]).train.steps == 77
    assert build.config_for(["model.path=a.toml"]).model.path == "a.toml"
    assert cli.default_out(["model.path=a.toml"]).name.startswith("tiny-")
    assert cli.default_out(["a=1.toml"]).name.startswith("a=1-")
