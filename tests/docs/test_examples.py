"""The examples run, stay small and use what they say they use."""

import ast
import importlib.util
import json

import pytest
from pages import ROOT

SMALL = ["train.steps=2", "schedule.updates_per_rollout=2", "rollout.prompts=2", "rollout.group_size=4", "task.heldout=4", "device=cpu"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minimal_rl_climbs_on_a_small_setting(capsys):
    history = load("minimal_rl").main(["--length", "1", "--prompts", "32", "--steps", "64", "--updates-per-rollout", "8", "--lr", "3e-3"])
    assert len(history) == 8
    assert history[0] < 0.2
    assert history[-1] > history[0] + 0.3
    assert "raw ESS" in capsys.readouterr().out


def test_minimal_rl_takes_other_methods_and_refuses_a_split_that_does_not_fit():
    example = load("minimal_rl")
    assert len(example.main(["--method", "grpo", "--steps", "2", "--prompts", "4", "--updates-per-rollout", "1"])) == 2
    with pytest.raises(SystemExit):
        example.parse(["--updates-per-rollout", "7"])


def test_minimal_rl_is_one_short_file_on_objective_alone():
    source = (ROOT / "examples" / "minimal_rl.py").read_text(encoding="utf-8")
    assert source.count("\n") < 250
    modules = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    ours = {m for m in modules if m.startswith("nearpolicy")}
    assert ours == {"nearpolicy", "nearpolicy.metrics", "nearpolicy.objective.advantages", "nearpolicy.objective.logprob"}
    assert modules - ours == {"typing", "torch"}


def test_minimal_rl_masks_what_follows_the_end():
    import torch

    example = load("minimal_rl")
    token = torch.tensor([[3, 0, 10, 0, 3, 11], [3, 0, 10, 0, 11, 0]])  # prompt 3 0 =, wanted 0 3 EOS
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]).bool()
    assert example.rewards(token, mask, 2).tolist() == pytest.approx([1.0, 1 / 3])
    zeros = torch.tensor([[0, 0, 10, 11, 0, 0]])  # stopped at once: padding that looks like the answer counts for nothing
    assert example.rewards(zeros, torch.tensor([[0, 0, 0, 1, 0, 0]]).bool(), 2).tolist() == [0.0]


def test_own_reward_trains_on_both_functions(tmp_path):
    example = load("own_reward")
    assert example.shows_steps(["p"] * 3, ["a+43=2#2", "a+42#2", "a+4"]) == [0.05, 0.0, None]
    report = example.main(["--out", str(tmp_path / "run"), *SMALL])
    assert report.exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Steps pay 0.05 each on top of the verifier's 0 or 1, so no mean over 8 responses without them would come out like this.
    assert any(round(row["reward/mean"] * 8 % 1, 4) for row in rows if "reward/mean" in row)


def test_python_api_compares_two_methods(tmp_path):
    result = load("python_api").main(["--out", str(tmp_path), *SMALL])
    assert set(result) == {"vespo", "reinforce"}
    assert all(0 <= value <= 1 for value in result.values())
