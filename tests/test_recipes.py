"""Recipes: every one loads and is checked; those of the papers hold the papers' numbers and are checked without model or data."""

import pytest
from click.testing import CliRunner

from nearpolicy import build
from nearpolicy.build import check, config_for
from nearpolicy.check import build_method, derived
from nearpolicy.check_away import data_away, models_away
from nearpolicy.cli import cli, default_out
from nearpolicy.errors import CheckpointError, DataError, UsageError
from nearpolicy.layers import RECIPES, recipe_names

PAPERS = [name for name in recipe_names() if name.startswith("papers/")]


@pytest.fixture
def nothing_cached(monkeypatch, tmp_path):
    """A machine without a cache, in a folder without data."""
    monkeypatch.setattr(build, "cached_repository", lambda name: None)
    monkeypatch.chdir(tmp_path)


def test_every_file_is_a_recipe_with_a_first_line_that_says_what_it_is():
    assert len(PAPERS) >= 13
    assert recipe_names()[-len(PAPERS) :] == PAPERS
    for name in recipe_names():
        first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# "), name
        assert ("Not run by us." in first) == (name in PAPERS)
        config_for([name])


def test_the_command_lists_them_in_columns():
    lines = CliRunner().invoke(cli, ["recipes"]).output.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert len({line.index(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_the_name_of_a_run_is_the_recipe_s():
    assert default_out(["papers/vespo-llama-3.2-3b"]).name.startswith("vespo-llama-3.2-3b-")
    assert default_out(["some/where/mine.toml"]).name.startswith("mine-")


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_s_recipe_is_checked_without_model_and_data(name, nothing_cached):
    text = check(config_for([name]))
    config = config_for([name])
    assert f"# not checked: model.path = {config.model.path} is not on this machine" in text
    assert "# not checked: task.path = data/train.jsonl is not on this machine" in text
    if config.teacher is not None:
        assert f"# not checked: teacher.path = {config.teacher.path} is not on this machine" in text
    assert "# mini-batch:" in text


@pytest.mark.parametrize("name", PAPERS)
def test_no_setting_of_a_paper_s_recipe_is_idle(name):
    config = config_for([name])
    warnings = build.refuse(config, build_method(config))
    meant = ("no evaluation", "sampler.kind = vllm computes otherwise")  # IW-OPD is evaluated by suite; VESPO took its engine's log-probs as they are
    idle = [w for w in warnings if not w.startswith(meant)]
    assert idle == []


@pytest.mark.parametrize("model", ["llama-3.2-3b", "qwen3-8b", "qwen3-30b-a3b"])
def test_vespo_s_numbers(model):
    config = config_for([f"papers/vespo-{model}"])
    assert config.method.name == "vespo"
    assert config.method.options == {}  # the paper's constants are the row's defaults
    assert build_method(config).options["c_pos"] == (2.0, 3.0)
    assert build_method(config).options["c_neg"] == (3.0, 2.0)
    assert (config.train.lr, config.train.steps, config.train.kl_coefficient, config.train.entropy_coefficient) == (1e-6, 1500, 0, 0)
    assert config.rollout.prompts == 256 * config.schedule.updates_per_rollout
    assert (config.rollout.group_size, config.rollout.max_tokens, config.task.max_prompt_tokens) == (8, 15360, 1024)
    assert (config.rollout.temperature, config.eval.temperature, config.eval.top_p) == (1.0, 1.0, 0.7)
    assert derived(config, None)["mini-batch"] == "2048 responses"


def test_vespo_s_numbers_of_the_asynchronous_run():
    config = config_for(["papers/vespo-qwen3-30b-a3b-async"])
    s = config.schedule
    assert (s.kind, s.sync_every, s.in_flight, s.oldest) == ("async", 4, "keep", 2 * 4 - 1)
    assert s.workers * s.worker_gpus == 48
    assert s.worker_gpus == config.sampler.ranks
    assert (config.rollout.prompts, config.rollout.group_size, config.rollout.max_tokens, config.task.max_prompt_tokens) == (256, 8, 15360, 1024)
    assert (config.train.lr, config.train.steps) == (1e-6, 1500)
    assert config.sampler.kind == "vllm"


@pytest.mark.parametrize("model", ["qwen2.5-math-7b", "r1-distill-qwen-1.5b"])
def test_thinking_seeds_numbers(model):
    config = config_for([f"papers/thinking-seeds-{model}"])
    assert (config.rollout.source, config.rollout.refresh, config.rollout.cut.kind, config.rollout.cut.ratio) == ("relay", 16, "length_ratio", 0.7)
    options = build_method(config).options
    assert (config.method.name, options["clip_low"], options["clip_high"]) == ("dapo", 0.2, 0.28)
    assert config.rollout.dynamic_sampling


STUDENTS = {
    "iw-opd-qwen3-4b-from-4b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"),
    "iw-opd-qwen3-1.7b-from-4b": ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B-Instruct-2507"),
    "iw-opd-qwen3-0.6b-from-4b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507"),
    "iw-opd-qwen3-4b-from-30b-a3b": ("Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "iw-opd-qwen3-1.7b-from-30b-a3b": ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "iw-opd-qwen3-0.6b-from-30b-a3b": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "iw-opd-qwen3-30b-a3b-from-235b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_iw_opd_s_numbers(name):
    config = config_for([f"papers/{name}"])
    assert (config.model.path, config.teacher.path) == STUDENTS[name]
    options = build_method(config).options
    assert (config.method.name, options["gamma"], options["normalizer"]) == ("iw_opd", 0.5, "before_last")
    assert (options["correction"], options["correction_cap"], options["denominator"]) == ("token_truncate", 5.0, "proximal")


def test_what_can_be_checked_still_is(nothing_cached):
    with pytest.raises(UsageError, match="divisor"):
        check(config_for(["papers/vespo-qwen3-8b", "schedule.updates_per_rollout=7"]))
    with pytest.raises(UsageError, match="nowhere"):
        check(config_for(["papers/vespo-qwen3-8b", 'task.rewards=[{function="nowhere:none"}]']))


def test_data_that_are_here_are_read_although_the_model_is_not(nothing_cached, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2"}\n')
    here = ["papers/vespo-qwen3-8b", f'task.path="{rows}"', f'task.heldout_path="{rows}"', 'task.rewards=[{function="number"}]']
    with pytest.raises(DataError, match="answer"):
        check(config_for(here))
    rows.write_text('{"question": "1+1", "answer": "2"}\n')
    text = check(config_for(here))
    assert "not checked: model.path" in text
    assert "not checked: task.path" not in text


def test_a_folder_that_is_not_there_is_a_mistake_and_no_repository(nothing_cached, tmp_path):
    for path in ("/nonexistent/model", "nowhere", "a/b/c", "./a/b"):
        with pytest.raises(CheckpointError, match="no such folder"):
            check(config_for(["tiny", f'model.path="{path}"']))
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match="no such folder"):
        check(config_for(["tiny", 'model.path="runs/teacher"']))


def test_a_repository_in_the_cache_is_no_longer_away(monkeypatch, tmp_path):
    config = config_for(["papers/vespo-qwen3-8b"])
    monkeypatch.setattr(build, "cached_repository", lambda name: tmp_path)
    assert models_away(config, build_method(config), build.model_folder) == {}
    assert build.model_folder("Qwen/Qwen3-8B-Base") == tmp_path
    assert build.model_folder("tiny") == build.SHIPPED["tiny"]


def test_data_away_knows_what_ships():
    assert data_away(config_for(["tiny"])) == {}
    assert data_away(config_for(['task.kind="code"'])) == {}
    assert data_away(config_for(['task.kind="code"', 'task.path="no.jsonl"'])) == {"task.path": "no.jsonl"}
