"""The scripts beside the experiments, on numbers known in advance."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def script(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").replace("-", "_"), EXPERIMENTS / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def weights():
    return script("length/weights")


@pytest.mark.parametrize(("length", "drift"), [(45, 1e-2), (1024, 1e-3), (4096, 1e-3), (16384, 1e-4)])
def test_dead_responses_are_those_between_the_roots_of_the_kernel(weights, length, drift):
    """phi = W^c1 e^(c2 (1 - W)) < 1e-3 below one log W and above another; log W is normal."""
    dead = 0.0
    for c1, c2 in ((2, 3), (3, 2)):

        def margin(x, c1=c1, c2=c2):
            return c1 * x + c2 * (1 - math.exp(x)) - math.log(1e-3)

        low, high = brentq(margin, -20, math.log(c1 / c2)), brentq(margin, math.log(c1 / c2), 10)
        drawn = norm(-drift * length, math.sqrt(2 * drift * length))
        dead += 0.5 * (drawn.cdf(low) + drawn.sf(high))
    assert weights.health("VESPO", length, drift)[0] == pytest.approx(dead, abs=2e-3)


def test_no_drift_leaves_every_weight_at_one(weights):
    for name in weights.WEIGHTS:
        assert weights.health(name, 1000, 0.0) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("drift", [1e-3, 1e-2])
def test_half_are_dead_at_one_product_of_length_and_drift(weights, drift):
    assert drift * weights.half_dead_at("VESPO", drift) == pytest.approx(3.79, rel=0.02)


def test_the_matched_control_reads_the_curve_where_it_first_gets_there(tmp_path):
    matched = script("thinking-seeds/matched")
    base = {"pass@1": [0.2, 0.4, 0.3, 0.6], "pass@16": [0.9, 0.8, 0.7, 0.5]}
    assert matched.at_equal_score(base, 0.1) == 0.9
    assert matched.at_equal_score(base, 0.3) == pytest.approx(0.85)
    assert matched.at_equal_score(base, 0.5) == pytest.approx(0.7 - 0.2 * 2 / 3)
    assert matched.at_equal_score(base, 0.7) is None

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.csv").write_text("setting,seed,group,status,run\non-policy,0,,finished,a\nrelay,0,,finished,b\nrelay,1,,failed,c\n")
    for run, ends in (("a", (0.2, 0.6)), ("b", (0.2, 0.4))):
        (tmp_path / "runs" / run).mkdir(parents=True)
        rows = [{"eval/pass@1": p, "eval/pass@4": 0.5, "eval/pass@16": 1 - p} for p in ends] + [{"policy/entropy": 0.25}] * 8
        (tmp_path / "runs" / run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    matched.main(tmp_path, tmp_path / "out")
    assert matched.rows_of(tmp_path, tmp_path / "out" / "results.csv")[1] == {
        "setting": "relay", "lr": "", "seed": "0", "group": "", "run": "b", "pass@1": 0.4, "pass@4": 0.5, "pass@16": 0.6, "entropy": 0.25,
        "on-policy pass@16": pytest.approx(0.6),
    }  # fmt: skip
    assert "| relay | 0.400 [0.400, 0.400] |" in (tmp_path / "out" / "matched.md").read_text()
