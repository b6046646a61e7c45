"""What is said of schedules before anything runs, and Ray where it is not."""

import builtins
import socket
import sys

import pytest

from nearpolicy.build_schedule import recording
from nearpolicy.check import build_method, describe_config, refuse
from nearpolicy.errors import UsageError
from nearpolicy.layers import load_config
from nearpolicy.schedule.ray import RayOptions, RayWorkers, check_address, ray_module
from nearpolicy.schedule.workers import usable_cpus


def warnings(*parts):
    config = load_config(*parts)
    return refuse(config, build_method(config))


def text(*parts):
    config = load_config(*parts)
    return describe_config(config, build_method(config), None)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (["schedule.sync_every=0"], "schedule.sync_every = 0"),
        (["schedule.sync_every=4", "schedule.max_age=2"], "must be at least sync_every - 1 = 3"),
        (["schedule.workers=0"], "schedule.workers = 0"),
        (["schedule.worker_threads=0"], "schedule.worker_threads = 0"),
        (["schedule.wait_s=0"], "schedule.wait_s = 0"),
        (["schedule.over_age=skip"], "'wait' or 'drop'"),
        (["schedule.in_flight=stop"], "'keep' or 'finish'"),
        (["schedule.updates_per_rollout=2"], "schedule.updates_per_rollout belongs to schedule.kind = sync"),
        (["ray.object_store_mb=10"], "ray.object_store_mb = 10"),
        (["schedule.max_age=-1"], "schedule.max_age = -1"),
    ],
)
def test_values_out_of_range_are_one_line(parts, says):
    with pytest.raises(UsageError) as caught:
        load_config("async", *parts)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_bound_is_one_more_than_k():
    assert load_config("schedule.kind=async", "schedule.sync_every=4").schedule.oldest == 5
    assert load_config("schedule.kind=async", "schedule.max_age=0").schedule.oldest == 0


def test_derived_numbers():
    shown = text(
        "async", "train.steps=9", "schedule.sync_every=2", "schedule.max_age=3", "rollout.prompts=6", "schedule.workers=1", "rollout.group_size=4"
    )
    assert "# publications: 5, after every 2 updates" in shown
    assert "# worst-case age: 3 updates; what would be older is not begun" in shown
    assert "# groups in flight or waiting: at most 24, of 4 responses each" in shown
    assert "# workers: 1 on this machine, 6 groups at a time each, 1 threads" in shown
    shown = text("async", "schedule.over_age=drop", "ray.address=10.0.0.1:6379", "schedule.workers=3", "rollout.prompts=8")
    assert "older groups are rejected" in shown
    assert "# workers: 3 on the cluster at 10.0.0.1:6379, 3 groups at a time each" in shown
    assert "publications" not in text("tiny")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (["async", "schedule.max_age=0", "schedule.sync_every=1"], "schedule.max_age = 0: every ratio is 1"),
        (["async", "method.name=reinforce"], "reinforce has no ratio: nothing corrects groups of up to 4 updates"),
        (["async", "method.correction=token_truncate"], "acts on tokens of age 0 alone"),
        (["async", "schedule.workers=900", "ray.address=h:1"], "at most 80 groups are in flight, so 820 workers have nothing to write"),
        (["async", f"schedule.workers={usable_cpus() + 1}"], "this machine has"),
        (["tiny", "ray.address=h:1"], "ray.address does nothing with schedule.kind = sync"),
        (["tiny", "schedule={kind='replay', path='x'}"], "nothing is sampled for training"),
    ],
)
def test_what_cannot_act_is_said(parts, says):
    assert any(says in line for line in warnings(*parts)), warnings(*parts)


def test_the_recipe_itself_has_no_warning():
    assert warnings("async") == []


def test_a_recording_is_the_folder_or_the_one_in_a_run(tmp_path):
    assert recording(str(tmp_path)) == tmp_path
    (tmp_path / "recording").mkdir()
    assert recording(str(tmp_path)) == tmp_path / "recording"


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    real = builtins.__import__

    def refuse_ray(name, *args, **kwargs):
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse_ray)
    with pytest.raises(UsageError, match=r"schedule.kind = async: got no Ray .*extra `ray`") as caught:
        ray_module()
    assert caught.value.exit_code == 2
    options = RayOptions(workers=1, cpus=1, gpus=0.0, groups=1, keep=True, wait_s=1.0, address=None, store_mb=None, restarts=0)
    with pytest.raises(UsageError, match="extra `ray`"):
        RayWorkers(lambda: None, options=options)


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", ":6379", "host:", "host:0", "host:70000", "host:x"])
def test_addresses_that_are_none(address):
    with pytest.raises(UsageError, match=r"ray.address: got .*host:port of the head node, or auto"):
        check_address(address)


def test_an_address_where_nobody_answers_is_refused_at_once():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UsageError, match=rf"nobody at 127.0.0.1:{port} .*ray start --head"):
        check_address(f"127.0.0.1:{port}")
    check_address("auto")
