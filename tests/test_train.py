"""Whole runs on a random tiny model: deterministic, resumable at any moment, and stopped with one clear line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearpolicy.build import config_for, train
from nearpolicy.cli import cli
from nearpolicy.errors import NearPolicyError
from nearpolicy.policy.tiny import make_tiny

REWARDS = Path(__file__).parent / "data" / "rewards.py"
SMALL = [
    "task.num_ops=1", "task.heldout=8", "rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "schedule.updates_per_rollout=4",
    "train.steps=8", "train.lr=3e-3", "eval.every=4", "checkpoint.every=3", "checkpoint.keep=none", "log.rollouts_every=4", "threads=1", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def parts(tiny, *more, reward="ones"):
    return ["tiny", *SMALL, f'model.path="{tiny}"', f'task.rewards=[{{function="{REWARDS}:{reward}"}}]', *more]


def run(tiny, out, *more, resume=False, reward="ones"):
    said = []
    train(config_for(parts(tiny, *more, reward=reward)), out, resume=resume, say=said.append)
    return said


def weights(out, step):
    return (out / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()


def rows(out, kind="train"):
    return [r for r in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


def timeless(rows):
    return [{k: v for k, v in r.items() if not k.startswith("time")} for r in rows]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A run of 8 updates in one piece."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(tiny, out)
    return out


def test_a_run_leaves_what_it_promises(whole):
    assert (whole / "report.html").stat().st_size > 10_000
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["step-000003", "step-000006", "step-000008"]
    assert json.loads((whole / "status.json").read_text())["status"] == "finished"
    assert [r["step"] for r in rows(whole)] == list(range(1, 9))
    assert [r["step"] for r in rows(whole, "eval")] == [0, 4, 8]
    first = rows(whole)[0]
    for name in ("reward/mean", "policy/entropy", "ratio/clip_frac", "ratio/outside_frac", "weight/ess_raw", "weight/mean", "train/grad_norm",
                 "weight/dead_frac", "policy/objective", "response/log_perplexity", "stale/age_max", "time/tokens_per_s"):  # fmt: skip
        assert name in first, name
    assert [r["stale/age_max"] for r in rows(whole)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_checkpoint_loads_as_a_plain_model(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole / "checkpoints" / "step-000008"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model(**tokenizer("1+2", return_tensors="pt")).logits.shape[-1] == model.config.vocab_size


def test_two_runs_with_one_seed_are_equal_bit_for_bit(tiny, whole, tmp_path):
    run(tiny, tmp_path / "b")
    assert weights(whole, 8) == weights(tmp_path / "b", 8)
    assert timeless(rows(whole)) == timeless(rows(tmp_path / "b"))
    run(tiny, tmp_path / "c", "seed=1")
    assert weights(whole, 8) != weights(tmp_path / "c", 8)


@pytest.mark.parametrize("cut", [4, 6, 7])
def test_resumed_equals_uninterrupted_bit_for_bit(tiny, whole, tmp_path, cut):
    """At the end of a rollout batch (4) and inside a stale one (6: 2 of 4 updates done; 7)."""
    run(tiny, tmp_path / "a", f"train.steps={cut}")
    run(tiny, tmp_path / "a", resume=True)
    assert weights(whole, 8) == weights(tmp_path / "a", 8)
    optimizer = "checkpoints/step-000008/trainer/optimizer.safetensors"
    assert (whole / optimizer).read_bytes() == (tmp_path / "a" / optimizer).read_bytes()
    got, want = timeless(rows(tmp_path / "a")), timeless(rows(whole))
    for a, b in zip(got, want, strict=True):
        assert {k: v for k, v in a.items() if not k.endswith("/hist")} == {k: v for k, v in b.items() if not k.endswith("/hist")}


@pytest.mark.parametrize(
    "more",
    [
        ["method.name=gspo", "ratio.denominator=proximal"],
        ["method.name=m2po"],
        ["method.name=grpo", "method.correction=token_truncate", "train.kl_coefficient=0.1", "train.entropy_coefficient=0.01"],
        ["rollout.dynamic_sampling=true", "method.name=dapo", "rollout.overlong_buffer=4"],
        ["model.lora.rank=2"],
        ["model.gradient_checkpointing=true", "train.warmup=2", "train.decay=cosine"],
    ],
)
def test_resume_is_exact_with_every_part_in_use(tiny, tmp_path, more):
    for out, stops in (("whole", [6]), ("cut", [3, 6])):
        for i, steps in enumerate(stops):
            # The shape of the decay belongs to the whole run, so the first half is stopped by a checkpoint and not by train.steps.
            if steps == 3:
                run(tiny, tmp_path / out, *more, "train.steps=6", "checkpoint.every=3")
                import shutil

                shutil.rmtree(tmp_path / out / "checkpoints" / "step-000006")
            else:
                run(tiny, tmp_path / out, *more, "train.steps=6", "checkpoint.every=3", resume=i > 0)
    assert weights(tmp_path / "whole", 6) == weights(tmp_path / "cut", 6)
    assert weights(tmp_path / "whole", 6) != weights(tmp_path / "whole", 3)


def test_the_split_into_micro_batches_changes_nothing_but_rounding(tiny, whole, tmp_path):
    from safetensors.torch import load_file

    run(tiny, tmp_path / "a", "train.token_budget=20", "train.steps=4")
    run(tiny, tmp_path / "b", "train.steps=4")
    a, b = (load_file(tmp_path / n / "checkpoints/step-000004/model.safetensors") for n in "ab")
    for name in a:
        assert (a[name] - b[name]).abs().max() < 2e-4, name


def test_every_rl_method_trains(tiny, tmp_path):
    for name in ("reinforce", "grpo", "dapo", "dr_grpo", "gspo", "sapo", "vespo", "cispo", "gmpo", "topr", "m2po", "luffy"):
        out = tmp_path / name
        run(tiny, out, f"method.name={name}", "train.steps=4", "task.heldout=0", "checkpoint.every=4")
        values = rows(out)
        assert max(r["train/grad_norm"] for r in values) > 0, name
        assert values[0]["weight/mean"] == pytest.approx(1.0, abs=1e-4), name


def command(tiny, out, *more, reward="ones"):
    return [sys.executable, "-m", "nearpolicy.cli", "train", *parts(tiny, *more, reward=reward), "--out", str(out)]


def wait_for(path, lines, process):
    for _ in range(1200):
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no progress")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_stopped_from_outside_and_gone_on_with(tiny, whole, tmp_path, number, code):
    out = tmp_path / "a"
    long = ["train.steps=4000", "checkpoint.every=2", "eval.every=0"]
    process = subprocess.Popen(command(tiny, out, *long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(out / "metrics.jsonl", 6, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    if number == signal.SIGINT:
        assert "Checkpoint of step" in err
        assert len([line for line in err.splitlines() if line]) == 1, err
        assert json.loads((out / "status.json").read_text())["status"] == "interrupted"
    done = max(int(p.name[5:]) for p in (out / "checkpoints").iterdir())
    goal = done + 3
    run(tiny, out, *long[1:], f"train.steps={goal}", resume=True)
    run(tiny, tmp_path / "b", *long[1:], f"train.steps={goal}")
    assert weights(out, goal) == weights(tmp_path / "b", goal)
    assert [r["step"] for r in rows(out)] == list(range(1, goal + 1))


def test_a_failing_run_keeps_what_it_has(tiny, tmp_path, monkeypatch):
    """The reward breaks in the second rollout batch: a checkpoint of the last good update is there, and the run can be gone on with."""
    from nearpolicy.tasks.pool import RewardPool

    real, count = RewardPool.score, [0]

    def breaks(self, items):
        count[0] += 1
        if count[0] == 4:
            raise NearPolicyError("reward", got="a broken machine", expected="scores", do="Mend it.")
        return real(self, items)

    with monkeypatch.context() as patch:
        patch.setattr(RewardPool, "score", breaks)
        with pytest.raises(NearPolicyError, match="broken machine"):
            run(tiny, tmp_path / "a", "checkpoint.every=100")
    assert json.loads((tmp_path / "a" / "status.json").read_text())["status"] == "failed"
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-000004"]
    run(tiny, tmp_path / "a", "checkpoint.every=100", resume=True)
    run(tiny, tmp_path / "b", "checkpoint.every=100")
    assert weights(tmp_path / "a", 8) == weights(tmp_path / "b", 8)


def test_a_failure_after_an_update_saves_the_weights_with_their_own_schedule(tiny, tmp_path, monkeypatch):
    """Whatever raises between an update and its checkpoint: the update is neither lost nor applied twice."""
    from nearpolicy.trainer import loop as module

    real = module.to_floats

    def breaks(metrics, **options):
        if metrics["stale/age_max"].value == 2:  # while update 3 is measured
            raise NearPolicyError("metrics", got="a broken disk", expected="room", do="Mend it.")
        return real(metrics, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "to_floats", breaks)
        with pytest.raises(NearPolicyError, match="broken disk"):
            run(tiny, tmp_path / "a", "checkpoint.every=100")
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-000003"]
    run(tiny, tmp_path / "a", "checkpoint.every=100", resume=True)
    run(tiny, tmp_path / "b", "checkpoint.every=100")
    assert weights(tmp_path / "a", 8) == weights(tmp_path / "b", 8)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tiny, whole, tmp_path, monkeypatch):
    from nearpolicy.trainer import loop as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "_checkpoint", lambda *_: (_ for _ in ()).throw(MemoryError("killed")))
        with pytest.raises(MemoryError):
            run(tiny, tmp_path / "a")
    assert not list((tmp_path / "a" / "checkpoints").iterdir())
    said = run(tiny, tmp_path / "a", resume=True)
    assert any("begins again" in line for line in said)
    assert weights(tmp_path / "a", 8) == weights(whole, 8)
    assert [r["step"] for r in rows(tmp_path / "a")] == list(range(1, 9))
    assert [r["step"] for r in rows(tmp_path / "a", "eval")] == [0, 4, 8]


def test_ctrl_c_in_the_last_update_is_the_end_of_the_run(tiny, tmp_path, monkeypatch):
    from nearpolicy.trainer import loop as module

    real = module._measure

    def interrupted(t, step, *rest):
        real(t, step, *rest)
        if step == 8:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "_measure", interrupted)
    run(tiny, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "status.json").read_text())["status"] == "finished"


def test_a_gradient_that_is_not_finite_leaves_the_weights(tiny, tmp_path, monkeypatch):
    from nearpolicy.trainer import step as module

    monkeypatch.setattr(module.torch.nn.utils, "get_total_norm", lambda _: float("nan"))
    with pytest.raises(NearPolicyError, match="gradient norm nan"):
        run(tiny, tmp_path / "a")
    assert not list((tmp_path / "a" / "checkpoints").iterdir())


def refused(*words):
    result = CliRunner().invoke(cli, list(words))
    lines = result.stderr.strip().splitlines()
    assert result.exit_code not in (0, 70), result.output
    errors = [line for line in lines if line.startswith("error:")]
    assert len(errors) == 1, result.output
    assert errors[0] == lines[-1]
    return errors[0]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["method.name=vespoo"], "'vespo'"),
        (["method.c_poss=[1, 2]"], "c_pos"),
        (["train.lrr=1"], "train.lr"),
        (["train.lr=nan"], "finite"),
        (["schedule.updates_per_rollout=3"], "divisor"),
        (["rollout.group_size=1"], "baseline"),
        (["rollout.top_p=0.9"], "Importance weights"),
        (["method.name=opd"], "teacher"),
        (["method.name=grpo", "method.clip_low=-1"], "clip_low"),
        (["train.warmup=8"], "train.warmup"),
        (["rollout.overlong_buffer=9"], "overlong_buffer"),
        (["method.correction=token_truncate", "ratio.denominator=behavior"], "twice"),
        (['task.rewards=[{function="no.such.module:f"}]'], "no.such.module"),
        (['task.rewards=[{function="exactt"}]'], "exact"),
        (['model.path="/nonexistent/model"'], "/nonexistent/model"),
        (['task={kind="rows", path="/nonexistent/rows.jsonl"}'], "/nonexistent/rows.jsonl"),
        (["task.num_ops=0"], "num_ops"),
        (["device=tpu"], "device"),
    ],
)
def test_refused_with_one_clear_line_and_nothing_left(tiny, tmp_path, more, says):
    out = tmp_path / "run"
    assert says in refused("train", *parts(tiny, *more), "--out", str(out))
    assert not out.exists()


def test_the_run_directory_is_refused_when_it_cannot_be_used(tiny, whole, tmp_path):
    assert "it exists" in refused("train", *parts(tiny), "--out", str(whole))
    assert "train.lr" in refused("train", *parts(tiny, "train.lr=1e-5"), "--out", str(whole), "--resume")
    assert "done" in refused("train", *parts(tiny), "--out", str(whole), "--resume")
    assert "no run.toml" in refused("train", *parts(tiny), "--out", str(tmp_path / "nothing"), "--resume")
    assert "--out" in refused("train", *parts(tiny), "--resume")


@pytest.mark.parametrize(
    ("reward", "says"), [("raises", "the verifier is broken"), ("is_nan", "no score for any"), ("wrong_length", "no score for any")]
)
def test_a_reward_that_never_scores_stops_the_run(tiny, tmp_path, reward, says):
    assert says in refused("train", *parts(tiny, "task.heldout=0", reward=reward), "--out", str(tmp_path / "a"))


def test_a_reward_that_hangs_sometimes_is_counted_and_left_out(tiny, tmp_path):
    out = tmp_path / "a"
    run(tiny, out, "task.heldout=0", "task.deadline=0.3", "task.workers=2", "train.steps=1", "rollout.prompts=2", "schedule.updates_per_rollout=1",
        "checkpoint.every=1", reward="hangs_sometimes")  # fmt: skip
    first = rows(out)[0]
    assert first["reward/timeout"] > 0
    assert first["reward/unscored_frac"] == first["reward/timeout"] / 8
    assert first["data/empty_rows"] == first["reward/timeout"]


def test_dynamic_sampling_that_finds_no_signal_ends_in_one_line(tiny, tmp_path):
    words = parts(tiny, "task.heldout=0", "rollout.dynamic_sampling=true", "rollout.max_redraws=2", reward="all_right")
    assert "equal rewards" in refused("train", *words, "--out", str(tmp_path / "a"))


def test_check_says_what_follows(tiny):
    result = CliRunner().invoke(cli, ["check", *parts(tiny)])
    assert result.exit_code == 0, result.output
    assert "mini-batch: 4 responses" in result.output
    assert "worst-case age: 3 updates" in result.output
    assert "memory (estimate)" in result.output
    result = CliRunner().invoke(cli, ["check", *parts(tiny, "schedule.updates_per_rollout=1")])
    assert "cannot act" in result.output


def test_eval_report_and_methods(whole, tmp_path):
    runner = CliRunner()
    checkpoint = whole / "checkpoints" / "step-000008"
    result = runner.invoke(cli, ["eval", str(checkpoint), "--samples", "4", "--k", "1,4", "--json", str(tmp_path / "n.json")])
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["eval/pass@1"] <= numbers["eval/pass@4"]
    assert "samples = 2" in refused("eval", str(checkpoint), "--samples", "2", "--k", "4")
    result = runner.invoke(cli, ["report", str(whole), str(whole), "--out", str(tmp_path / "two.html")])
    assert result.exit_code == 0, result.output
    for words, says in ((["methods"], "vespo"), (["methods", "vespo"], "c_pos"), (["recipes"], "tiny")):
        assert says in runner.invoke(cli, words).output
    assert "'vespo'" in refused("methods", "vesp")


def test_importing_the_package_pulls_in_torch_alone():
    code = (
        "import sys, nearpolicy; nearpolicy.policy_loss; nearpolicy.method\n"
        "heavy = {'transformers', 'pydantic', 'rich', 'click', 'peft', 'safetensors', 'tokenizers', 'pandas', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ""})
    light = "import sys, nearpolicy.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True)
