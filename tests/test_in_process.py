"""Asynchronous training with workers in this process: ages are a rule, a run is the same bit for bit, a bound of K - 1 is stale mini-batches."""

import pytest
import torch
from safetensors.torch import load_file

from nearpolicy.build import check, config_for
from nearpolicy.errors import UsageError
from tests.test_train import parts, rows, run, timeless, weights

ASYNC = ["schedule.kind=async", "schedule.in_process=true", "rollout.prompts=2", "train.steps=8", "eval.every=0", "checkpoint.every=8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from nearpolicy.policy.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def ages(out):
    return [r["stale/age_max"] for r in rows(out)]


@pytest.mark.parametrize(
    ("every", "bound", "expected"),
    [
        (1, 0, [0] * 8),
        (1, 2, [0, 1, 2, 2, 2, 2, 2, 2]),
        (2, 1, [0, 1, 0, 1, 0, 1, 0, 1]),
        (2, 3, [0, 1, 2, 3, 2, 3, 2, 3]),
        (4, 3, [0, 1, 2, 3, 0, 1, 2, 3]),
    ],
)
def test_ages_follow_from_k_and_the_bound(tiny, tmp_path, every, bound, expected):
    """After the first bound + 1 updates, groups are bound - K + 1 to bound updates old."""
    run(tiny, tmp_path / "r", *ASYNC, f"schedule.sync_every={every}", f"schedule.max_age={bound}", reward="digits")
    assert ages(tmp_path / "r") == expected
    assert [r["stale/age_mean"] for r in rows(tmp_path / "r")] == expected  # every group of a batch is of one age


def test_two_runs_are_equal_bit_for_bit(tiny, tmp_path):
    for name in "ab":
        run(tiny, tmp_path / name, *ASYNC, "schedule.sync_every=2", "schedule.max_age=3", "schedule.workers=2", reward="digits")
    assert weights(tmp_path / "a", 8) == weights(tmp_path / "b", 8)


def test_a_bound_of_k_minus_1_is_stale_mini_batches(tiny, tmp_path):
    """K = 4, max_age = 3 writes four batches ahead under one policy: N = 4 of the sync schedule, whose rollout batch is four times as large."""
    run(tiny, tmp_path / "async", *ASYNC, "schedule.sync_every=4", "schedule.max_age=3", reward="digits")
    run(tiny, tmp_path / "sync", "rollout.prompts=8", "train.steps=8", "eval.every=0", "checkpoint.every=8", reward="digits")
    left, right = (timeless(rows(tmp_path / name)) for name in ("async", "sync"))
    for a, b in zip(left, right, strict=True):
        for name in ("train/grad_norm", "policy/entropy", "stale/age_max", "data/tokens_trained"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
    async_weights, sync_weights = (load_file(tmp_path / name / "checkpoints" / "step-000008" / "model.safetensors") for name in ("async", "sync"))
    for name, value in async_weights.items():
        assert torch.allclose(value, sync_weights[name], atol=1e-4), name  # Adam's first steps make rounding visible


def test_the_first_update_after_a_publication_measures_the_mismatch(tiny, tmp_path):
    run(tiny, tmp_path / "r", *ASYNC, "schedule.sync_every=2", "schedule.max_age=1", reward="digits")
    assert ["mismatch/kl_k3" in r for r in rows(tmp_path / "r")] == [True, False] * 4
    assert all(r["mismatch/kl_k3"] < 1e-8 for r in rows(tmp_path / "r") if "mismatch/kl_k3" in r)


def test_what_it_cannot_do_is_refused(tiny):
    with pytest.raises(UsageError, match="reuse_kv"):
        config_for([*ASYNC, "schedule.reuse_kv=true"])
    with pytest.raises(UsageError, match=r"schedule\.in_process"):
        check(config_for([*ASYNC, "sampler.kind=vllm"]))


def test_check_says_where_workers_are(tiny):
    text = check(config_for(parts(tiny, *ASYNC)))
    assert "# workers: 1 in this process, between updates, 2 groups at a time each, 1 threads" in text
    assert "CPUs, and this machine has" not in text
