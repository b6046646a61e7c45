"""`check`: it refuses what a run would refuse, at once, and its numbers follow from the configuration."""

import json
import re

import pytest
from hypothesis import given, strategies as st

from nearpolicy.build import check, check_device, config_for
from nearpolicy.check import build_method, derived, model_size, nearest_divisor, refuse
from nearpolicy.errors import CheckpointError, NearPolicyError, UsageError
from nearpolicy.policy.tiny import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


@given(st.integers(1, 3000), st.integers(1, 5000))
def test_the_nearest_divisor_is_the_nearest(number, wanted):
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    assert nearest_divisor(number, wanted) == min(divisors, key=lambda n: (abs(n - wanted), n))


def test_the_hint_of_a_large_batch_comes_at_once():
    config = config_for(["rollout.prompts=1048573", "rollout.group_size=1", "schedule.updates_per_rollout=3"])  # a prime
    with pytest.raises(UsageError, match="Take 1, or"):
        refuse(config, build_method(config))


def test_a_batch_beyond_any_machine_is_refused():
    config = config_for(["rollout.prompts=1000000", "rollout.group_size=8", "schedule.updates_per_rollout=1"])
    with pytest.raises(UsageError, match=r"1000000 x 8 = 8000000 responses; expected at most 1048576"):
        refuse(config, build_method(config))


def memory(tiny, *parts):
    """The parts of the estimate by name, GiB."""
    line = derived(config_for(["schedule.updates_per_rollout=1", *parts]), model_size(tiny))["memory (estimate)"]
    return {name: float(value) for name, value in re.findall(r"([a-z ]+) (\d+\.\d+) GiB", line.partition("=")[2])} | {"": float(line.split()[0])}


def test_the_memory_estimate_grows_with_the_rollouts(tiny):
    small, large = memory(tiny, "rollout.prompts=1000"), memory(tiny, "rollout.prompts=100000")
    rollouts = next(k for k in small if "rollouts" in k)
    assert large[rollouts] == pytest.approx(100 * small[rollouts], abs=0.6)
    assert large[rollouts] > 5
    assert large[""] - small[""] == pytest.approx(large[rollouts] - small[rollouts], abs=0.03)


def test_activations_are_those_of_one_micro_batch(tiny):
    name = next(k for k in memory(tiny) if "activations" in k)
    assert memory(tiny, "rollout.prompts=10")[name] == memory(tiny, "rollout.prompts=10000")[name]
    long, budget = memory(tiny, "rollout.max_tokens=1000000")[name], memory(tiny)[name]
    assert long == pytest.approx(budget * (1_000_000 + 512) / 16384, rel=0.05)  # a row longer than the budget is a micro-batch of its own


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there(device):
    with pytest.raises(UsageError, match=r"device: got .*; expected auto, cpu or a GPU"):
        check_device(device)
    with pytest.raises(UsageError, match="device"):
        check(config_for([f'device="{device}"']))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("task.system_prompt=x", "System prompt"),
        ("task.chat_template=on", "Chat template"),
        ("task.max_prompt_tokens=2", "task.max_prompt_tokens"),
    ],
)
def test_prompts_that_a_run_would_refuse(tiny, part, says):
    with pytest.raises(NearPolicyError, match=says):
        check(config_for([f'model.path="{tiny}"', part]))


def test_a_folder_without_a_tokenizer(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(CheckpointError, match="tokenizer"):
        check(config_for([f'model.path="{tmp_path}"']))


def test_what_runs_passes(tiny):
    text = check(config_for([f'model.path="{tiny}"', "device=cpu"]))
    assert "# memory (estimate): " in text
    assert f"path = {json.dumps(str(tiny))}" in text
