"""Statistics of a sweep: exact numbers on curves done by hand, and what intervals and pairs must satisfy."""

import csv
import math
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments import LRS, METHODS, plan_of, write_run
from nearpolicy.errors import DataError
from nearpolicy.sweep.compare import area, bootstrap, compare, largest_drop, reading, updates_to
from nearpolicy.sweep.figures import round_values, write_figures
from nearpolicy.sweep.tables import write_tables

CURVE = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(np.array)


def test_area_is_the_mean_height():
    assert area(np.array([0.2, 0.4, 0.8]), np.array([0.0, 10.0, 30.0])) == pytest.approx((3 + 12) / 30)
    assert area(np.array([0.3]), np.array([5.0])) == 0.3


@given(CURVE)
def test_the_largest_drop_is_that_of_all_pairs(curve):
    want = max(curve[i] - curve[j] for i in range(len(curve)) for j in range(i, len(curve)))
    assert largest_drop(curve) == want


def test_reading_a_curve():
    steps = np.array([0.0, 10.0, 10.0, 30.0])
    assert reading(steps, 10).tolist() == [0, 0, 1, 0]  # of equal places the last
    assert reading(steps, 15).tolist() == [0, 0, 0.75, 0.25]
    assert reading(steps, 5).tolist() == [0.5, 0, 0.5, 0]
    assert reading(steps, 99).tolist() == [0, 0, 0, 1]
    assert reading(steps, -1).tolist() == [1, 0, 0, 0]
    assert reading(np.array([3.0]), 7).tolist() == [1]


@given(CURVE, st.floats(-5, 100))
def test_reading_stays_between_its_neighbours(curve, x):
    weight_E = reading(np.arange(len(curve), dtype=float) * 10, x)
    assert weight_E.sum() == pytest.approx(1)
    assert (weight_E >= 0).all()
    assert np.count_nonzero(weight_E) <= 2


def test_updates_to_a_score():
    steps, curve = np.array([0.0, 10.0, 20.0]), np.array([0.2, 0.6, 0.5])
    assert updates_to(steps, curve, 0.4) == pytest.approx(5.0)
    assert updates_to(steps, curve, 0.2) == 0.0
    assert updates_to(steps, curve, 0.6) == 10.0
    assert updates_to(steps, curve, 0.7) == math.inf


def test_numbers_of_cells_done_by_hand(tmp_path):
    plan = plan_of(seeds=[0, 1], axis=[METHODS], compare={"target": 0.5, "baseline": {"method": "GRPO"}})
    curves = {"GRPO_s0": [0.2, 0.8, 0.4], "GRPO_s1": [0.4, 0.4, 0.6], "VESPO_s0": [0.2, 0.6, 0.8], "VESPO_s1": [0.4, 0.6, 1.0]}
    for run in plan.runs:
        # Half of ten prompts at 0 and half at twice the score; the second method samples half as many tokens.
        value_EP = [[2 * x * (p % 2) for p in range(10)] for x in curves[run.name]]
        tokens = [0, 50, 100] if run.cell.labels[0] == "VESPO" else [0, 100, 200]
        write_run(tmp_path, run, value_EP, tokens=tokens, prompts=f"{run.seed}")
    c = compare(plan, tmp_path)
    assert (c.updates, c.tokens) == (20, 100)
    grpo, vespo = c.cells
    means = {name: interval.mean for name, interval in grpo.statistics.items()}
    assert means == pytest.approx({"final": 0.5, "best": 0.7, "auc": (0.55 + 0.45) / 2, "drop": 0.2, "equal_updates": 0.5, "equal_tokens": 0.6})
    assert vespo.statistics["equal_tokens"].mean == pytest.approx(0.9)
    assert (grpo.collapsed, vespo.collapsed) == (1, 0)  # 0.4 < 0.7 * 0.8
    assert grpo.reached == pytest.approx((5.0, 15.0))
    assert [i.mean for i in grpo.curve_E] == pytest.approx([0.3, 0.6, 0.5])
    assert grpo.few
    (d,) = c.differences
    assert (d.cell, d.baseline, d.seeds, d.paired) == (vespo.cell, grpo.cell, 2, True)
    assert d.statistics["final"].mean == pytest.approx(0.4)


def test_what_two_cells_share_cancels_in_a_pair(random_sweep):
    plan, out = random_sweep
    c = compare(plan, out)
    (d,) = c.differences
    assert d.paired
    assert d.seeds == 4
    for name in ("final", "best", "auc", "equal_updates", "equal_tokens"):
        assert tuple(d.statistics[name]) == pytest.approx((0.1, 0.1, 0.1), abs=1e-12), name
    assert tuple(d.statistics["drop"]) == pytest.approx((0, 0, 0), abs=1e-12)
    assert c.cells[0].statistics["final"].high - c.cells[0].statistics["final"].low > 0.02


def test_other_prompts_are_no_pairs(random_sweep):
    plan, out = random_sweep
    for run in plan.runs:
        if run.cell.labels[0] == "VESPO":
            for file in (out / "runs" / run.name / "evaluations").iterdir():
                file.write_text(file.read_text().replace(f'"seed {run.seed}"', '"others"'))
    (d,) = compare(plan, out).differences
    assert not d.paired
    assert d.statistics["final"].mean == pytest.approx(0.1)
    assert d.statistics["final"].high - d.statistics["final"].low > 0.02


def test_the_spread_of_the_bootstrap_is_that_of_two_stages(tmp_path):
    """Variance of the resampled mean = (between seeds + mean within seed / P) / S, with population variances."""
    plan = plan_of(seeds=[0, 1, 2, 3, 4], compare={"resamples": 20_000})
    rng = np.random.default_rng(1)
    for run in plan.runs:
        write_run(tmp_path, run, rng.uniform(0, 1, (1, 40)) * 0.5 + 0.1 * run.seed, steps=[10], prompts=f"{run.seed}")
    runs = compare(plan, tmp_path).cells[0].runs
    values = np.array([r.value_EP[0] for r in runs])
    want = (values.mean(1).var() + (values.var(1) / 40).mean()) / 5
    drawn = bootstrap(runs, resamples=20_000, updates=10, tokens=1000)["final"]
    assert drawn.mean() == pytest.approx(values.mean(), abs=2e-3)
    assert drawn.var() == pytest.approx(want, rel=0.05)


def test_prompts_that_all_seeds_share_are_drawn_once_for_all(tmp_path):
    """With equal values in every seed the prompts alone vary: the variance is that of one seed, not a fifth of it."""
    plan = plan_of(seeds=[0, 1, 2, 3, 4])
    value_EP = np.random.default_rng(0).uniform(0, 1, (1, 50))
    for run in plan.runs:
        write_run(tmp_path, run, value_EP, steps=[10], prompts="all")
    runs = compare(plan, tmp_path).cells[0].runs
    drawn = bootstrap(runs, resamples=8000, updates=10, tokens=1000)["final"]
    assert drawn.var() == pytest.approx(value_EP.var() / 50, rel=0.1)


def test_missing_prompts_are_left_out(tmp_path):
    plan = plan_of(seeds=[0])
    write_run(tmp_path, plan.runs[0], [[1.0, math.nan, 0.0, 1.0]] * 2)
    cell = compare(plan, tmp_path).cells[0]
    assert cell.statistics["final"].mean == pytest.approx(2 / 3)
    assert 0 <= cell.statistics["final"].low <= cell.statistics["final"].high <= 1


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_an_interval_holds_its_mean_and_equal_input_gives_equal_output(tmp_path_factory, seed, seeds, evaluations):
    out = tmp_path_factory.mktemp("sweep")
    plan = plan_of(seeds=list(range(seeds)), compare={"resamples": 100})
    rng = np.random.default_rng(seed)
    for run in plan.runs:
        write_run(out, run, rng.integers(0, 2, (evaluations, 6)), prompts=f"{run.seed}")
    a, b = (compare(plan, out).cells[0] for _ in range(2))
    assert a.statistics == b.statistics
    assert all(i.low <= i.mean <= i.high for i in [*a.statistics.values(), *a.curve_E])
    assert a.few == (seeds < 3)


def test_a_cell_counts_what_finished_and_names_what_did_not(random_sweep, tmp_path):
    plan, out = random_sweep
    broken = out / "runs" / "GRPO_s1" / "status.json"
    broken.write_text('{"status": "failed", "step": 3, "message": "loss | is\\nnan"}')
    (out / "runs" / "GRPO_s2" / "status.json").unlink()
    c = compare(plan, out)
    assert [r.status for r in c.cells[0].runs] == ["finished", "failed", "not run", "finished"]
    assert c.cells[0].few
    assert c.differences[0].seeds == 2
    page = write_tables(c, tmp_path / "t").read_text()
    assert "| GRPO | 2† (1 failed) |" in page
    assert page.count("†") >= 8  # its number in every column, and the differences
    assert "| GRPO_s1 | failed | loss \\| is nan |" in page
    assert "| GRPO_s2 | not run |" in page


def test_every_number_is_traced_to_a_run(random_sweep, tmp_path):
    plan, out = random_sweep
    write_tables(compare(plan, out), tmp_path / "t")
    rows = list(csv.DictReader((tmp_path / "t" / "results.csv").open()))
    assert [(r["run"], r["config"], r["commit"], r["seed"]) for r in rows] == [(p.name, p.config_hash, "abc123", str(p.seed)) for p in plan.runs]
    cells = list(csv.DictReader((tmp_path / "t" / "cells.csv").open()))
    finals = [float(r["final"]) for r in rows if r["method"] == "GRPO"]
    assert float(cells[0]["final"]) == pytest.approx(np.mean(finals), abs=1e-6)
    assert [c["few_seeds"] for c in cells] == ["0", "0"]
    assert len(list(csv.DictReader((tmp_path / "t" / "curves.csv").open()))) == 6
    assert float(next(csv.DictReader((tmp_path / "t" / "differences.csv").open()))["final"]) == pytest.approx(0.1)


def test_tables_and_figures_are_the_same_bytes_again(random_sweep, tmp_path):
    plan, out = random_sweep
    made = []
    for name in "ab":
        c = compare(plan, out)
        figures = write_figures(c, tmp_path / name)
        write_tables(c, tmp_path / name, figures=figures)
        made.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert made[0] == made[1]
    assert {"results.csv", "cells.csv", "curves.csv", "differences.csv", "results.md", "curves.svg", "curves_tokens.svg"} == set(made[0])


def test_figures_have_a_panel_a_cell_column_and_load_nothing(tmp_path):
    plan = plan_of(seeds=[0, 1], axis=[METHODS, LRS], figures={"lines": "method", "columns": "lr"})
    for run in plan.runs:
        write_run(tmp_path, run, np.random.default_rng(run.seed).uniform(0, 1, (3, 8)), prompts=f"{run.seed}")
    names = write_figures(compare(plan, tmp_path), tmp_path / "f")
    assert names == ["curves.svg", "curves_tokens.svg", "final.svg"]
    for name in names:
        text = (tmp_path / "f" / name).read_text()
        ElementTree.fromstring(text)
        assert "nan" not in text
        assert text.count("http") == 1  # the name space
    text = (tmp_path / "f" / "curves.svg").read_text()
    assert [t in text for t in ("lr = 0.0001", "lr = 0.0003", "GRPO†", "VESPO†", "fewer than 3 seeds")] == [True] * 5
    assert text.count('fill-opacity="0.15"') == 4


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_round_and_span_the_values(low, size, about):
    ticks = round_values(low, low + size, about)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * size + 1e-9
    assert ticks[-1] >= low + size - 1e-6 * size - 1e-9
    assert step >= size / about * 0.9
    assert len(ticks) <= about + 3


def test_nothing_finished_is_a_table_of_nothing(tmp_path):
    plan = plan_of(seeds=[0], axis=[METHODS])
    c = compare(plan, tmp_path)
    assert write_figures(c, tmp_path / "t") == []
    page = write_tables(c, tmp_path / "t").read_text()
    assert "0 of 2 runs finished" in page
    assert "| GRPO | 0† | – |" in page


def test_a_run_without_results_of_its_prompts_is_one_clear_line(random_sweep):
    plan, out = random_sweep
    for file in (out / "runs" / "GRPO_s0" / "evaluations").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="GRPO_s0: got no pass@1 of each prompt"):
        compare(plan, out)


def test_seeds_evaluated_at_different_updates_are_refused(tmp_path):
    plan = plan_of(seeds=[0, 1])
    for run in plan.runs:
        write_run(tmp_path, run, np.ones((2, 3)), steps=[0, 10 + run.seed])
    with pytest.raises(DataError, match="different updates"):
        compare(plan, tmp_path)
