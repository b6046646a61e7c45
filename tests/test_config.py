"""Layering, overrides and refusals of the configuration."""

import tomllib

import pytest

from nearpolicy.config import Config, known_keys
from nearpolicy.errors import UsageError
from nearpolicy.layers import changed_keys, find_recipe, load_config, parse_override, recipe_names, resolve, to_toml, to_tree


def test_layers_left_to_right(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("﻿[train]\nlr = 1e-5\nsteps = 7\n", encoding="utf-8")
    config = load_config("tiny", str(file), "train.steps=9", "method.name=grpo")
    assert (config.train.lr, config.train.steps, config.method.name) == (1e-5, 9, "grpo")
    assert config.rollout.prompts == load_config("tiny").rollout.prompts


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_comes_back(name):
    config = load_config(name)
    assert Config.model_validate(tomllib.loads(to_toml(to_tree(config)))) == config


@pytest.mark.parametrize(
    "parts",
    [
        ["train.grad_clip=none", "checkpoint.keep=none"],
        ["task.kind=reasoning_gym", "task.name=products", "task.options={min_digits=1}"],
        ["model.lora.rank=4", 'task.system_prompt="a \\"quoted\\" \\n line"'],
        ["method.name=vespo", "method.c_pos=[1, 2]", 'task.rewards=[{function="exact", weight=0.5}]'],
    ],
)
def test_the_resolved_tree_comes_back(parts):
    config = load_config("tiny", *parts)
    tree = to_tree(config)
    assert tomllib.loads(to_toml(tree)) == {k: v for k, v in tree.items() if v != {}}
    assert Config.model_validate(tree) == config


def test_none_switches_off_what_is_on_by_default():
    assert load_config("train.grad_clip=none").train.grad_clip is None
    assert load_config("train.lr=1e-4").train.grad_clip == 1.0


def test_changing_the_kind_drops_the_old_variants_keys():
    config = load_config("task.kind=arithmetic", "task.modulus=7", "task.heldout=5", "task.kind=reasoning_gym", "task.name=products")
    assert config.task.kind == "reasoning_gym"
    assert config.task.heldout == 5
    config = load_config("method.name=vespo", "method.c_pos=[1, 2]", "method.name=grpo")
    assert config.method.options == {}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a.b=1", ["a", "b"], 1), ("a=1e-5", ["a"], 1e-5), ("a=true", ["a"], True), ("a=word", ["a"], "word"), ('a="q=1"', ["a"], "q=1"),
        ("a=[1, 2]", ["a"], [1, 2]), ("a=some/path-1.json", ["a"], "some/path-1.json"),
    ],
)  # fmt: skip
def test_overrides_are_toml(text, path, value):
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (["train.lrr=1"], "train.lr'"),
        (["train.lr=nan"], "train.lr = nan"),
        (["train.lr=-1"], "train.lr = -1"),
        (["train.lr=inf"], "train.lr"),
        (["rollout.prompts=0", "train.steps=x"], "train.steps = 'x'"),
        (["task.kind=arithmetik"], "'arithmetic'"),
        (["task.kind=reasoning_gym"], "task.name is missing"),
        (["eval.samples=2", "eval.k=[4]"], "samples = 2"),
        (["tinny"], "'tiny'"),
        (["=3"], "key=value"),
        (["a={"], "TOML"),
        (["train.betas=[0.9, 1.0]"], "betas"),
        (["nothing.toml"], "nothing.toml"),
        (["seed=-1"], "seed"),
        (["method=3"], "method"),
        (["train=3"], "train"),
    ],
)
def test_refused_in_one_clear_line(parts, says):
    with pytest.raises(UsageError) as error:
        load_config(*parts)
    text = str(error.value)
    assert says in text
    assert "\n" not in text
    assert "expected" in text


def test_a_broken_file_names_its_line(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("[train]\nlr = = 3\n")
    with pytest.raises(UsageError, match="line 2"):
        load_config(str(file))
    with pytest.raises(UsageError, match=r"no_such\.toml"):
        find_recipe("no_such.toml").exists() or load_config("no_such.toml")


def test_changed_keys_name_what_differs():
    a, b = to_tree(load_config("tiny")), to_tree(load_config("tiny", "train.lr=1e-5", "method.c_pos=[1, 2]"))
    assert changed_keys(a, b) == ["method.c_pos", "train.lr"]
    assert changed_keys({"a": 0, "r": {}}, {"a": False, "x": {"y": 2}}) == ["x.y"]
    assert changed_keys({"a": False, "t": {"b": 1}}, {}) == ["a", "t.b"]


def test_keys_the_issue_names_exist():
    keys = known_keys()
    for key in ("method.name", "schedule.kind", "schedule.updates_per_rollout", "rollout.prompts", "rollout.group_size", "train.steps", "train.lr",
                "model.path", "model.dtype", "device", "task.kind", "seed", "ratio.denominator"):  # fmt: skip
        assert key in keys, key
    assert len(keys) <= 150  # over all kinds of task, source, sampler and schedule: a run shows about half of them


def test_a_kind_inside_a_kind_keeps_what_it_knows():
    """Fresh rollouts lose the relay's keys; another cut loses the old one's."""
    relay = ["tiny", "rollout.source=relay", "rollout.refresh=4"]
    config = load_config(*relay, "rollout.cut.ratio=0.5", "rollout.cut.kind=top_entropy", "rollout.cut.k=3")
    assert to_tree(config)["rollout"]["cut"] == {"kind": "top_entropy", "k": 3, "at": "before"}
    fresh = load_config(*relay, "rollout.prompts=5", "rollout.source=fresh")
    assert fresh.rollout.prompts == 5
    assert fresh == load_config("tiny", "rollout.prompts=5")


def test_layers_leave_what_they_are_given_as_it_was():
    tree = {"rollout": {"source": "relay", "cut": {"ratio": 0.5}}}
    resolve([tree])
    assert tree == {"rollout": {"source": "relay", "cut": {"ratio": 0.5}}}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("rollout.refresh=3", "rollout.refresh belongs to rollout.source = relay"),
        ("rollout.cut.ratio=0.5", "rollout.cut belongs to rollout.source = relay"),
        ("rollout={source='relay', refresh=0}", "rollout.refresh = 0; expected at least 1"),
        ("train.lr=0", "train.lr = 0; expected more than 0"),
        ("rollout={source='relay', cut={ratio=1.2}}", "rollout.cut.ratio = 1.2; expected at most 1"),
        ("rollout={source='relay', cut={ratio=-0.1}}", "rollout.cut.ratio = -0.1"),
        ("rollout={source='relay', cut={k=3}}", "rollout.cut.k belongs to rollout.cut.kind = top_entropy"),
        ("rollout={source='relay', cut={kind='top_entropy', k=0}}", "rollout.cut.k = 0"),
        ("rollout={source='relay', cut={kind='random_ratio', low=0.6, high=0.5}}", "low must not exceed high"),
        ("rollout={source='relay', cut={kind='function'}}", "rollout.cut.function is missing"),
        ("rollout={source='relay', cut={kind='top_entropi'}}", "'top_entropy'"),
        ("rollout={source='relay', relayed_per_group=-1}", "rollout.relayed_per_group = -1"),
        ("rollout={source='rely'}", "'relay'"),
        ("rollout.demonstrations.per_group=0", "rollout.demonstrations.per_group = 0"),
        ("train.lr=true", "train.lr = True; expected a number"),
        ('train.lr="1e-3"', "train.lr = '1e-3'; expected a number"),
        ("train.steps=1.0", "train.steps = 1.0; expected a valid integer"),
        ("train.steps=true", "train.steps = True"),
        ('train.steps="7"', "train.steps = '7'"),
        ("rollout.dynamic_sampling=1", "rollout.dynamic_sampling = 1; expected a valid boolean"),
        ('eval.k=["1"]', "eval.k.0 = '1'"),
        ("train.betas=[true, 0.9]", "train.betas.0 = True"),
        ("train.grad_clip=true", "train.grad_clip = True"),
        ('rollout.stop_strings=[""]', "rollout.stop_strings.0 = ''"),
        ("seed=9223372036854775808", "seed = 9223372036854775808"),
        ("seed=" + "9" * 5000, "seed = '999"),
        ("train.lr=1" + "0" * 400, "train.lr = a number of more than 80 digits; expected a finite number"),
        ("rollout.prompts=1000000000", "rollout.prompts"),
        ("rollout.max_tokens=1000001", "rollout.max_tokens"),
        ("task.heldout=100001", "task.heldout"),
        ("train.steps=100000001", "train.steps"),
        ("task.options.foo=1", "task.options belongs to task.kind = reasoning_gym"),
        ("task.path=x", "task.path belongs to task.kind = rows"),
    ],
)
def test_no_value_is_bent_into_its_type(part, says):
    with pytest.raises(UsageError) as error:
        load_config("tiny", part)
    assert says in str(error.value)
    assert len(str(error.value)) < 400


def test_overrides_reach_into_free_tables():
    config = load_config("task.kind=reasoning_gym", "task.name=products", "task.options.min_digits=1", "task.options.task.kind=2",
                         "task.options.task.name=3", "task.chat_template_options.enable_thinking=false")  # fmt: skip
    assert config.task.options == {"min_digits": 1, "task": {"kind": 2, "name": 3}}
    assert config.task.chat_template_options == {"enable_thinking": False}
    assert load_config("train.lr=1").train.lr == 1.0
