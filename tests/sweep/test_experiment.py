"""The grid of an experiment file: what it expands to, and what is refused in one line."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments import LRS, METHODS, plan_of
from nearpolicy import cli
from nearpolicy.errors import UsageError
from nearpolicy.layers import load_config, to_tree
from nearpolicy.sweep.experiment import MOST_CELLS, Experiment, make_plan, read_experiment

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*/*.toml"))


def test_the_grid_is_the_product_of_axes_and_seeds():
    plan = plan_of(seeds=[0, 7], axis=[METHODS, LRS], base={"train.steps": 12})
    assert plan.axes == ("method", "lr")
    assert [c.labels for c in plan.cells] == [("GRPO", "0.0001"), ("GRPO", "0.0003"), ("VESPO", "0.0001"), ("VESPO", "0.0003")]
    assert [(r.cell.labels, r.seed) for r in plan.runs[:3]] == [(("GRPO", "0.0001"), 0), (("GRPO", "0.0001"), 7), (("GRPO", "0.0003"), 0)]
    run = plan.runs[-1]
    assert (run.name, run.config.method.name, run.config.train.lr, run.config.seed) == ("VESPO_0.0003_s7", "vespo", 3e-4, 7)
    assert run.config.train.steps == 12
    assert run.config.rollout.prompts == load_config("tiny").rollout.prompts


def test_a_run_of_a_sweep_has_one_thread_and_is_small_on_disk_unless_the_file_says_otherwise():
    config = plan_of().runs[0].config
    assert (config.threads, config.log.rollouts_every, config.checkpoint.keep) == (1, 0, 1)
    assert config.checkpoint.every > config.train.steps
    assert plan_of(base={"threads": 2, "checkpoint": {"every": 5}}).runs[0].config.checkpoint.every == 5


def test_another_method_drops_the_options_of_the_one_before():
    plan = plan_of(base={"method": {"name": "vespo", "c_pos": [2, 3]}}, axis=[METHODS])
    assert plan.runs[0].config.method.options == {}
    assert plan.runs[-1].config.method.options == {"c_pos": [2, 3]}


def test_settings_go_with_a_seed_and_name_a_warm_start():
    plan = plan_of(seeds=[0, {"seed": 1, "model": {"path": "second"}}, {"seed": 0, "model.path": "second"}],
                   warm_start=[{"name": "second", "seed": 5}], base={"task.num_ops": 3})  # fmt: skip
    assert [(r.name, r.group, plan.warm_start(r)) for r in plan.runs] == [
        ("s0", "", None), ("second_s1", "second", "second"), ("second_s0", "second", "second"),
    ]  # fmt: skip
    assert plan.warm_configs["second"].seed == 5
    assert plan.warm_configs["second"].task.num_ops == 3


def test_the_hash_is_of_what_the_run_does():
    """Equal for an option spelled out at its default, another for another value, the same whatever the experiment is called."""
    base = plan_of(seeds=[0]).runs[0]
    assert plan_of(name="other", seeds=[0], base={"method.c_pos": [2, 3]}).runs[0].config_hash == base.config_hash
    assert plan_of(seeds=[0], base={"train.lr": 2e-4}).runs[0].config_hash != base.config_hash
    assert plan_of(seeds=[1]).runs[0].config_hash != base.config_hash


def test_names_that_would_collide_are_told_apart():
    plan = plan_of(
        seeds=[0], axis=[{"name": "a", "values": [{"label": "x y", "set": {"train.lr": 1e-4}}, {"label": "x-y", "set": {"train.lr": 2e-4}}]}]
    )
    assert len({r.name for r in plan.runs}) == 2


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"axis": [{"key": "train.lrr", "values": [1]}]}, "'train.lrr', which is no configuration key.*Did you mean.*'train.lr'"),
        ({"axis": [{"name": "a", "values": [{"label": "x", "set": {"trian.lr": 1}}]}]}, "axis 'a'.*'trian.lr'.*'train.lr'"),
        ({"base": {"rollout": {"prompt": 4}}}, "base: got 'rollout.prompt'.*'rollout.prompts'"),
        ({"seeds": [{"seed": 1, "modell.path": "x"}]}, "seeds: got 'modell.path'.*'model.path'"),
        ({"axis": [{"key": "seed", "values": [1, 2]}]}, "Seeds are listed under `seeds`"),
        ({"axis": [{"key": "method.clip_lo", "values": [0.1]}], "base": {"method.name": "grpo"}}, "clip_lo=0.1.*clip_lo.*clip_low"),
        ({"axis": [{"key": "train.lr", "values": [-1.0]}]}, "cell lr=-1.*train.lr = -1.0"),
        ({"axis": [{"key": "schedule.updates_per_rollout", "values": [3]}]}, "cell updates_per_rollout=3.*a divisor"),
        ({"axis": [{"key": "train.lr", "values": []}]}, r"grid: got 0 cells \(lr has no values\)"),
        ({"seeds": []}, r"grid: got 0 cells \(seeds has no values\)"),
        ({"seeds": [-1]}, "seeds: got -1"),
        ({"seeds": [True]}, "seeds: got True"),
        ({"seeds": [0, 1, 0]}, "resolve to the same run: e seed 0 and e seed 0"),
        ({"axis": [LRS, {"name": "b", "values": [{"label": "x", "set": {"train.lr": 5e-4}}]}]}, "same run: lr=0.0001, b=x seed 0 and lr=0.0003, b=x"),
        ({"axis": [{"key": "method.c_pos", "values": [[2, 3], [2.0, 3.0]]}]}, "same run"),
        ({"axis": [LRS, LRS]}, "two named 'lr'"),
        ({"axis": [{"key": "train.lr", "values": [1e-4, 1e-4]}]}, "two values named '0.0001'"),
        ({"axis": [{"name": "a", "values": [1]}]}, "the plain value 1"),
        ({"axis": [{"values": [1]}]}, "neither name nor key"),
        ({"axis": [{"name": "a", "values": [{"label": "x"}]}]}, "a table with `label` and `set`"),
        ({"axis": [METHODS], "compare": {"baseline": {"metod": "GRPO"}}}, "compare.baseline: got 'metod'.*'method'"),
        ({"axis": [METHODS], "compare": {"baseline": {"method": "GRP0"}}}, "compare.baseline.method: got 'GRP0'.*'GRPO'"),
        ({"axis": [METHODS], "figures": {"lines": "methods"}}, "figures.lines: got 'methods'"),
        ({"compare": {"metric": "eval/pass@8"}}, "compare.metric: got eval/pass@8.*pass@1, avg@1"),
        ({"base": {"task.heldout": 0}}, "compare.metric"),
        ({"warm_start": [{"name": "tiny"}]}, "warm_start: got the name 'tiny'"),
        ({"recipe": "tinny"}, "recipe 'tinny'.*'tiny'"),
    ],
)  # fmt: skip
def test_refused_in_one_line(tree, says):
    with pytest.raises(UsageError, match=says) as caught:
        plan_of(**tree)
    assert "\n" not in str(caught.value)


def test_many_cells_need_a_word():
    values = [1e-6 * (k + 1) for k in range(MOST_CELLS + 1)]
    experiment = Experiment.model_validate({"seeds": [0], "axis": [{"key": "train.lr", "values": values}]})
    with pytest.raises(UsageError, match="10,001 cells"):
        make_plan(experiment)
    halves = {
        "seeds": [0],
        "axis": [{"key": "train.lr", "values": values[:101]}, {"key": "train.weight_decay", "values": [k / 100 for k in range(100)]}],
    }
    with pytest.raises(UsageError, match="10,100 cells"):
        make_plan(Experiment.model_validate(halves))


def test_with_that_word_they_are_allowed(monkeypatch):
    monkeypatch.setattr("nearpolicy.sweep.experiment.MOST_CELLS", 3)
    values = [1e-6 * (k + 1) for k in range(4)]
    assert len(make_plan(Experiment.model_validate({"seeds": [0], "axis": [{"key": "train.lr", "values": values}]}), many=True).cells) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seedz = [1]", "seedz.*Did you mean 'seeds'"),
        ('[[axis]]\nkey = "train.lr"\nvalue = [1]', "axis.0.value.*'axis.values'"),
        ("[compare]\nlevel = 2.0", "compare.level: got 2.0"),
        ('[[warm_start]]\nname = "a/b"', "warm_start.0.name: got 'a/b'"),
        ("seeds = [", "no TOML"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(tmp_path, text, says):
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_experiment(tmp_path / "e.toml")
    result = CliRunner().invoke(cli.cli, ["sweep", str(tmp_path / "e.toml"), "--plan"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_missing_file_is_one_line(tmp_path):
    result = CliRunner().invoke(cli.cli, ["sweep", str(tmp_path / "none.toml")])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_the_plan_can_be_read_before_it_runs(tmp_path):
    (tmp_path / "mine.toml").write_text('seeds = [4]\n[[axis]]\nkey = "train.lr"\nvalues = [1e-4, 2e-4]')
    result = CliRunner().invoke(cli.cli, ["sweep", str(tmp_path / "mine.toml"), "--plan"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "mine: 2 lr = 2 cells x 1 seeds = 2 runs"
    assert len(result.stdout.splitlines()) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.toml"]


def test_a_recipe_beside_the_experiment(tmp_path):
    (tmp_path / "base.toml").write_text("[train]\nlr = 0.5\n")
    assert make_plan(Experiment(name="e", recipe=("tiny", "base.toml")), where=tmp_path).runs[0].config.train.lr == 0.5


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.stem)
def test_the_experiments_of_the_project_expand(file):
    plan = make_plan(read_experiment(file), where=file.parent)
    # On-policy baselines, both ends of the cut's axis and a sampler made worse are what these compare with, or are about.
    meant = {
        "thinking-seeds": ("weight cannot act", "rollout.cut.ratio = "), "async": ("weight cannot act",), "mismatch": ("routing.sampler_noise = ",)
    }.get(file.parent.name, ())  # fmt: skip
    assert not [w for w in plan.warnings if not any(m in w for m in meant)]
    assert all(to_tree(r.config)["threads"] == 1 for r in plan.runs)


def test_the_staleness_experiment_has_the_cells_it_promises():
    path = next(p for p in EXPERIMENTS if p.name == "staleness.toml")
    plan = make_plan(read_experiment(path))
    assert (len(plan.cells), len(plan.runs)) == (50, 250)
    assert {plan.warm_start(r) for r in plan.runs} == {None, "second"}
    for run in plan.runs:
        rows = run.config.rollout.prompts * run.config.rollout.group_size
        assert rows // run.config.schedule.updates_per_rollout == 32
        assert run.config.train.steps % run.config.schedule.updates_per_rollout == 0
    assert tomllib.loads(path.read_text())["compare"]["baseline"] == {"method": "GRPO"}
