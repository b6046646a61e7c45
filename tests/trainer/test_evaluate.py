"""Per-prompt values of an evaluation, and the file that keeps them."""

import json
import math

import numpy as np
import pytest

from nearpolicy.build import none_for_nan
from nearpolicy.layers import load_config
from nearpolicy.trainer.evaluate import Evaluation
from nearpolicy.trainer.rundir import RunDir


def evaluation(rewards, ks):
    reward_PN = np.array(rewards, dtype=np.float64)
    return Evaluation(reward_PN=reward_PN, length_PN=np.ones_like(reward_PN), ks=ks, full_marks=1.0, rollouts=())


def test_each_prompt_keeps_its_place():
    nan = math.nan
    values = evaluation([[1, 0, 0.5], [nan, 1, 1], [nan, nan, nan]], (1, 3)).by_prompt()
    assert none_for_nan(values["pass@1"]) == [0.333333, 1.0, None]
    assert none_for_nan(values["pass@3"]) == [1.0, None, None]
    assert none_for_nan(values["avg@3"]) == [0.5, 1.0, None]


def test_the_metric_is_the_mean_of_the_prompts():
    found = evaluation(np.random.default_rng(0).integers(0, 2, (40, 4)), (1, 2, 4))
    means = found.values()
    for name, value_P in found.by_prompt().items():
        assert means[f"eval/{name}"] == pytest.approx(np.mean(value_P), abs=1e-12)


def test_it_is_written_and_a_later_one_replaces_it(tmp_path):
    run = RunDir.create(tmp_path / "a", load_config("tiny"))
    run.write_evaluation(16, "abc", {"pass@1": [0.5, None]})
    run.write_evaluation(16, "abc", {"pass@1": [1.0, None]})
    files = list((run.path / "evaluations").iterdir())
    assert [f.name for f in files] == ["step-000016.json"]
    assert json.loads(files[0].read_text()) == {"step": 16, "prompts": "abc", "values": {"pass@1": [1.0, None]}}
