"""Training from a teacher: whole runs on random tiny models; equal models, bad teachers, mixtures, resumes."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from nearpolicy import build_policy
from nearpolicy.build import config_for, train
from nearpolicy.check import build_method, refuse
from nearpolicy.cli import cli
from nearpolicy.errors import CheckpointError, DataError, EngineError, UsageError
from nearpolicy.policy.tiny import make_tiny
from tests.test_train import REWARDS, rows, timeless, weights

SMALL = [
    "task.num_ops=1", "task.heldout=0", "rollout.prompts=4", "rollout.group_size=2", "rollout.max_tokens=8", "schedule.updates_per_rollout=2",
    "train.steps=4", "train.lr=3e-3", "checkpoint.every=2", "checkpoint.keep=none", "log.rollouts_every=0", "threads=1", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny(folder / name, seed=seed) for name, seed in (("student", 3), ("teacher", 4), ("base", 5))}


def parts(models, *more, teacher="teacher", method="opd"):
    taught = [] if teacher is None else [f'teacher.path="{models[teacher]}"']
    return ["tiny", *SMALL, f'model.path="{models["student"]}"', f"method.name={method}", *taught, *more]


def run(models, out, *more, resume=False, **kwargs):
    said = []
    train(config_for(parts(models, *more, **kwargs)), out, resume=resume, report=False, say=said.append)
    return said


def same(a, b, step=4):
    return weights(a, step) == weights(b, step)


def moved(out, models, step=4):
    a, b = load_file(out / f"checkpoints/step-{step:06d}/model.safetensors"), load_file(models["student"] / "model.safetensors")
    return max(float((a[k] - b[k]).abs().max()) for k in b)


@pytest.fixture(scope="module")
def opd(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "opd"
    run(models, out)
    return out


@pytest.mark.parametrize(("signal", "share"), [("token", 0.8), ("full_vocabulary", 0.5)])
def test_training_pulls_the_student_to_the_teacher(models, tmp_path, signal, share):
    run(models, tmp_path / "r", "train.steps=32", "checkpoint.every=32", "train.lr=1e-2", "rollout.prompts=8", f"teacher.signal={signal}")
    kl = [r["distill/kl_k3"] for r in rows(tmp_path / "r")]
    assert np.mean(kl[-8:]) < share * np.mean(kl[:8])
    first = rows(tmp_path / "r")[0]
    assert first["distill/abs_gap"] == pytest.approx(first["advantage/abs_mean"], rel=1e-5)
    assert first["distill/kl"] == pytest.approx(-first["advantage/mean"], rel=1e-5)
    assert not [k for k in first if k.startswith("reward/")] or first["reward/mean"] is not None
    for name in ("kl_teacher", "prefix_logp_student", "prefix_logp_teacher", "prefix_log_ratio", "signal_weight"):
        assert f"position/{name}/rel" in first, name
    assert first["position/prefix_log_ratio/abs"][0] == 0.0


@pytest.mark.parametrize("method", ["opd", "iw_opd"])
@pytest.mark.parametrize("more", [[], ["train.token_budget=24"], ["rollout.mask_truncated=true"], ["rollout.temperature=0.7"]])
def test_equal_models_have_no_gradient_at_all(models, tmp_path, method, more):
    """The first update of a rollout batch: the weights are those of the teacher to the last bit."""
    run(models, tmp_path / "r", "train.steps=2", *more, teacher="student", method=method)
    first = rows(tmp_path / "r")
    assert [r["train/grad_norm"] for r in first] == [0.0, 0.0]
    assert [r["policy/loss"] for r in first] == [0.0, 0.0]
    assert moved(tmp_path / "r", models, step=2) == 0.0


@pytest.mark.parametrize("more", [["model.lora.rank=2"], ["rollout.source=relay", "rollout.refresh=2"], ["model.shared_prompts=off"]])
def test_equal_models_have_no_gradient_with_adapters_relays_or_plain_rows(models, tmp_path, more):
    run(models, tmp_path / "r", *more, teacher="student")
    assert [r["train/grad_norm"] for r in rows(tmp_path / "r")] == [0.0] * 4


def test_equal_models_have_no_gradient_over_the_full_vocabulary(models, tmp_path):
    run(models, tmp_path / "r", "teacher.signal=full_vocabulary", teacher="student")
    assert [r["train/grad_norm"] for r in rows(tmp_path / "r")] == [0.0] * 4
    assert moved(tmp_path / "r", models) == 0.0


@pytest.mark.parametrize("student", ["behavior", "current"])
def test_the_other_student_sides_are_near_zero_for_equal_models(models, tmp_path, student):
    run(models, tmp_path / "r", "train.steps=1", f"method.student={student}", teacher="student")
    assert rows(tmp_path / "r")[0]["advantage/abs_mean"] < 1e-5


def test_gamma_zero_is_opd_bit_for_bit(models, opd, tmp_path):
    run(models, tmp_path / "r", "method.gamma=0.0", method="iw_opd")
    assert same(opd, tmp_path / "r")
    run(models, tmp_path / "other", method="iw_opd")
    assert not same(opd, tmp_path / "other")


def test_exopd_at_lambda_one_is_opd_and_its_reference_can_be_named(models, opd, tmp_path):
    run(models, tmp_path / "one", "method.extrapolation=1.0", method="exopd")
    assert same(opd, tmp_path / "one")
    run(models, tmp_path / "initial", method="exopd")
    run(models, tmp_path / "named", f'reference.path="{models["student"]}"', method="exopd")
    run(models, tmp_path / "base", f'reference.path="{models["base"]}"', method="exopd")
    assert same(tmp_path / "initial", tmp_path / "named")
    assert not same(tmp_path / "initial", tmp_path / "base")


def test_a_resumed_distillation_equals_an_uninterrupted_one(models, tmp_path):
    more = ["schedule.updates_per_rollout=4", "method.profile=curriculum"]
    run(models, tmp_path / "whole", *more)
    run(models, tmp_path / "cut", *more)
    shutil.rmtree(tmp_path / "cut/checkpoints/step-000004")
    run(models, tmp_path / "cut", *more, resume=True)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert timeless(rows(tmp_path / "whole")) == timeless(rows(tmp_path / "cut"))


VARIANTS = {
    "prefix": ("opd", ["method.profile=prefix"]),
    "suffix": ("opd", ["method.profile=suffix"]),
    "amplified": ("opd", ["method.profile=amplify_prefix"]),
    "linear curriculum": ("opd", ["method.profile=curriculum"]),
    "cosine curriculum": ("opd", ["method.profile=curriculum", "method.curriculum=cosine"]),
    "iw": ("iw_opd", []),
    "all tokens": ("iw_opd", ["method.normalizer=all_tokens"]),
    "reversed": ("iw_opd", ["method.reverse=true"]),
    "signed": ("iw_opd", ["method.signed=true"]),
    "surrogate alone": ("iw_opd", ["method.blend=false"]),
    "ideal": ("iw_opd", ["method.weight=ideal"]),
    "ideal alone": ("iw_opd", ["method.weight=ideal", "method.blend=false"]),
    "ideal, alpha, no partition": ("iw_opd", ["method.weight=ideal", "method.alpha=0.5", "method.partition=one"]),
    "modulate": ("iw_exopd", []),
    "modulate_excess": ("iw_exopd", ["method.form=modulate_excess"]),
    "scale": ("iw_exopd", ["method.form=scale"]),
    "no ratio": ("iw_opd", ["method.kernel=none"]),
    "vespo kernel": ("opd", ["method.kernel=vespo"]),
    "full vocabulary": ("opd", ["teacher.signal=full_vocabulary"]),
    "full vocabulary, weighted": ("iw_opd", ["teacher.signal=full_vocabulary"]),
    "weighed reward": ("grpo", ["distill.name=iw_opd", "distill.use=weigh"]),
    "mixed": ("grpo", ["distill.coefficient=0.1"]),
    "mixed, full vocabulary": ("vespo", ["distill.coefficient=0.1", "teacher.signal=full_vocabulary"]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_a_few_steps_its_own_way(models, opd, tmp_path, name):
    """And does so whatever the micro-batches."""
    method, more = VARIANTS[name]
    more = [*more, "train.steps=2", *([f"task.rewards=[{{function='{REWARDS}:ones'}}]"] if "distill" in "".join(more) else [])]
    run(models, tmp_path / "whole", *more, method=method)
    run(models, tmp_path / "split", "train.token_budget=64", *more, method=method)
    whole, split = (rows(tmp_path / out) for out in ("whole", "split"))
    assert all(np.isfinite(r["train/grad_norm"]) for r in whole)
    assert max(r["train/grad_norm"] for r in whole) > 0
    assert not same(opd, tmp_path / "whole", step=2)
    for key in ("train/grad_norm", "weight/mean", "distill/kl", "distill/weight_mean"):
        assert (key in whole[0]) == (key in split[0])
        assert whole[0].get(key, 0.0) == pytest.approx(split[0].get(key, 0.0), rel=2e-3, abs=1e-5), key


def write_rows(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return [f'task={{kind="rows", path="{path}", heldout=0}}']


def without_task(words):
    return [w for w in words if not w.startswith("task.")]


def test_prompts_need_no_answer(models, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", *({"prompt": f"{i}+1"} for i in range(4)))
    words = [*without_task(parts(models)), *data]
    train(config_for(words), tmp_path / "r", report=True, say=lambda _: None)
    assert not [k for k in rows(tmp_path / "r")[0] if k.startswith("reward/")]
    assert rows(tmp_path / "r", "alarm") == []
    with pytest.raises(DataError, match="answer"):
        train(config_for([*without_task(parts(models, method="grpo")), *data]), tmp_path / "rl", say=lambda _: None)


def test_rows_with_an_answer_are_scored_all_the_same(models, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", {"prompt": "1+1", "answer": "2"}, {"prompt": "2+1"})
    train(config_for([*without_task(parts(models, "train.steps=1")), *data]), tmp_path / "r", report=False, say=lambda _: None)
    first = rows(tmp_path / "r")[0]
    assert first["reward/unscored_frac"] == 0.5
    assert first["data/tokens_trained"] > 0


def test_a_column_routes_each_row_to_its_teacher(models, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", *({"prompt": f"{i}+1", "who": "ab"[i % 2]} for i in range(4)))
    both = [f'teacher.routes.{name}.path="{models[m]}"' for name, m in (("a", "teacher"), ("b", "student"))]
    words = [*without_task(parts(models, "teacher.column=who", "train.steps=1", "schedule.updates_per_rollout=1", *both, teacher=None)), *data]
    train(config_for(words), tmp_path / "r", report=False, say=lambda _: None)
    alone = without_task(parts(models, "train.steps=1", "schedule.updates_per_rollout=1"))
    train(config_for([*alone, *data]), tmp_path / "one", report=False, say=lambda _: None)
    routed, one = rows(tmp_path / "r")[0], rows(tmp_path / "one")[0]
    assert 0 < routed["distill/abs_gap"] < one["distill/abs_gap"]  # the rows of b have the student itself as teacher
    odd = write_rows(tmp_path / "odd.jsonl", {"prompt": "1", "who": "a"}, {"prompt": "2", "who": "c"})
    with pytest.raises(DataError, match="'c'"):
        train(config_for([*words[:-1], *odd]), tmp_path / "odd", say=lambda _: None)


def test_a_teacher_can_be_measured_without_training_on_it(models, tmp_path):
    reward = f"task.rewards=[{{function='{REWARDS}:ones'}}]"
    said = run(models, tmp_path / "with", reward, method="grpo")
    run(models, tmp_path / "without", reward, method="grpo", teacher=None)
    assert any("only measured" in line for line in said)
    assert same(tmp_path / "with", tmp_path / "without")
    assert rows(tmp_path / "with")[0]["distill/abs_gap"] > 0


def test_the_curriculum_follows_the_steps(models, tmp_path):
    run(models, tmp_path / "r", "method.profile=curriculum", "method.fraction=0.0", "method.multiplier=2.0", "schedule.updates_per_rollout=1")
    assert rows(tmp_path / "r")[0]["distill/weight_mean"] == 1.0
    assert rows(tmp_path / "r")[-1]["distill/weight_mean"] == 2.0


class Broken:
    """Gives what a spoilt teacher would, from some call on."""

    def __init__(self, teacher, spoil, since):
        self.teacher, self.spoil, self.since, self.calls = teacher, spoil, since, 0

    def score(self, rollouts):
        self.calls += 1
        scored = self.teacher.score(rollouts)
        return self.spoil(scored) if self.calls > self.since else scored


def nan_at_the_second_token(scored):
    i = next(i for i, x in enumerate(scored) if len(x) > 1)
    scored[i] = scored[i].copy()
    scored[i][1] = np.nan
    return scored


def dies(scored):
    raise EngineError("teacher", got="gone", expected="an answer", do="Start it.")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda scored: [scored[0][:-1], *scored[1:]], r"\d+ log-probs for \d+ response tokens"),
        (nan_at_the_second_token, "nan at response token 1"),
        (lambda scored: scored[:-1], "7 of 8 responses"),
        (dies, "gone"),
    ],
)
def test_a_teacher_that_fails_in_mid_run_leaves_a_checkpoint_to_go_on_from(models, tmp_path, monkeypatch, spoil, message):
    whole, out = tmp_path / "whole", tmp_path / "r"
    run(models, whole, "train.steps=6", "checkpoint.every=6")
    made = build_policy.build_teacher
    monkeypatch.setattr(build_policy, "build_teacher", lambda *a, **k: Broken(made(*a, **k), spoil, since=2))
    with pytest.raises(EngineError, match=message):
        run(models, out, "train.steps=6", "checkpoint.every=6")
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000004"]
    monkeypatch.setattr(build_policy, "build_teacher", made)
    run(models, out, "train.steps=6", "checkpoint.every=6", resume=True)
    assert same(whole, out, step=6)


def test_no_memory_for_the_teacher_is_one_clear_line(models, tmp_path, monkeypatch):
    import torch

    from nearpolicy.policy import teacher

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(teacher, "load_model", full)
    with pytest.raises(EngineError, match="no memory left"):
        run(models, tmp_path / "r")


@pytest.mark.parametrize(
    ("more", "kwargs", "message"),
    [
        ([], {"teacher": None}, "teacher.path"),
        (["method.gamma=-0.5"], {"method": "iw_opd"}, "gamma"),
        (["rollout.top_p=0.9"], {}, "top_p"),
        (["distill.name=opd"], {}, "distill"),
        (["distill.name=opd"], {"method": "grpo", "teacher": None}, "teacher.path"),
        (["distill.name=opd", "distill.use=weigh"], {"method": "grpo"}, "weight"),
        (["distill.name=iw_opd", "distill.use=weigh", "distill.coefficient=0.5"], {"method": "grpo"}, "coefficient"),
        (["distill.name=iw_opd", "distill.gamme=1"], {"method": "grpo"}, "gamma"),
        (["teacher.signal=full_vocabulary"], {"method": "exopd"}, "full_vocabulary"),
        (['teacher.server="http://127.0.0.1:1"', "rollout.temperature=0.5"], {}, "temperature"),
        (['teacher.server="127.0.0.1:1"'], {}, "http"),
        (['teacher.server="http://127.0.0.1:1"', "teacher.extra_rows=drop"], {}, "extra_rows"),
        (["teacher.column=who"], {}, "teacher.routes"),
        (["rollout.dynamic_sampling=true"], {}, "dynamic_sampling"),
        (["rollout.overlong_buffer=2"], {}, "overlong_buffer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(models, tmp_path, more, kwargs, message):
    with pytest.raises(UsageError, match=message):
        run(models, tmp_path / "r", *more, **kwargs)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_missing_reference_is_refused_where_something_reads_it(models, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        run(models, tmp_path / "r", 'reference.path="nowhere"', method="exopd")
    said = run(models, tmp_path / "s", f'reference.path="{models["base"]}"', "train.steps=1")
    assert any("reference.path does nothing" in line for line in said)


def test_check_says_what_the_teacher_costs(models):
    done = CliRunner().invoke(cli, ["check", *parts(models)])
    assert done.exit_code == 0, done.output
    assert "# teacher: " in done.output


IDLE = {
    "method.alpha=2": "weight = ideal", "method.partition=one": "weight = ideal",
    "method.fraction=0.5": "profile", "method.curriculum=cosine": "profile = curriculum", "method.multiplier=2": "profile = amplify_prefix",
}  # fmt: skip


@pytest.mark.parametrize("word", IDLE)
def test_weights_that_cannot_act_are_warned_of(models, word):
    name = "iw_opd" if IDLE[word].startswith("weight") else "opd"
    acting = IDLE[word].replace(" ", "") if "=" in IDLE[word] else "profile=prefix"
    for more, expected in (([], True), ([f"method.{acting}"], False)):
        config = config_for(parts(models, f"method.name={name}", word, *more))
        said = refuse(config, build_method(config))
        assert (f"method.{word[7:].partition('=')[0]} does nothing without method.{IDLE[word]}" in said) == expected


def test_a_profile_of_nothing_is_refused_and_a_coefficient_of_nothing_said(models):
    config = config_for(parts(models, "method.name=opd", "method.profile=prefix", "method.fraction=0"))
    with pytest.raises(UsageError, match=r"method\.fraction: got 0 with method.profile = prefix"):
        refuse(config, build_method(config))


def test_eval_beside_a_teacher_scores_greedy_responses(models, opd, tmp_path):
    words = ["eval", str(opd / "checkpoints" / "step-000004"), "--teacher", str(models["teacher"]), "task.heldout=4", "--samples", "1"]
    done = CliRunner().invoke(cli, [*words, "--temperature", "0", "--json", str(tmp_path / "g.json")])
    assert done.exit_code == 0, done.output
    assert len(json.loads((tmp_path / "g.json").read_text())["kl_by_tenth"]) == 10


def test_eval_beside_a_teacher_measures_and_shows_in_the_report(models, opd, tmp_path):
    checkpoint = str(opd / "checkpoints" / "step-000004")
    words = ["eval", checkpoint, "--teacher", str(models["teacher"]), "task.heldout=4", "--samples", "2"]
    done = CliRunner().invoke(cli, [*words, "--continuation-gap", "--fractions", "0,0.5,1", "--json", str(tmp_path / "n.json")])
    assert done.exit_code == 0, done.output
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert [row["fraction"] for row in numbers["continuation_gap"]] == [0.0, 0.5, 1.0]
    assert numbers["continuation_gap"][-1]["gap"] == [0.0, 0.0, 0.0]
    assert len(numbers["kl_by_tenth"]) == len(numbers["prefix_log_ratio_by_tenth"]) == 10
    assert json.loads((opd / "continuation" / "step-000004.json").read_text()) == numbers
    report = CliRunner().invoke(cli, ["report", str(opd), "--out", str(tmp_path / "page.html")])
    assert report.exit_code == 0, report.output
    page = (tmp_path / "page.html").read_text()
    assert 'id="continuation"' in page
    assert "Token KL to the teacher" in page
    same_model = CliRunner().invoke(cli, ["eval", checkpoint, "--teacher", checkpoint, "task.heldout=4", "--json", str(tmp_path / "s.json")])
    assert same_model.exit_code == 0, same_model.output
    assert json.loads((tmp_path / "s.json").read_text())["kl"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--continuation-gap"], "no --teacher"), (["--teacher", "x", "--k", "1"], "--k"), (["--teacher", "nowhere"], "no such folder"),
     (["--teacher", "tiny", "--fractions", "2"], "--fractions")],
)  # fmt: skip
def test_eval_beside_a_teacher_refuses_in_one_line(models, words, message):
    done = CliRunner().invoke(cli, ["eval", str(models["student"]), *words])
    assert done.exit_code in (1, 2)
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
