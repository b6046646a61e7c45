"""Thinning, histograms, samples and key numbers: exact expectations."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import EDGES, make_run, rollout_row
from hypothesis import given, settings, strategies as st

from nearpolicy.report.payload import counted, grid, histogram, pass_at_k, rounded, shared_columns, thin, trimmed
from nearpolicy.report.read import Column, read_run
from nearpolicy.report.samples import read_samples, spread
from nearpolicy.report.summary import cell, differences, duration, number, time_shares, verdict

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@settings(deadline=None)
@given(VALUES, st.integers(4, 60))
def test_thinning_keeps_extremes_order_and_budget(values, points):
    column = Column(list(range(len(values))), values)
    out = thin(column, points)
    assert out.step == sorted(set(out.step))
    assert [values[s] for s in out.step] == out.value
    assert len(out.step) <= max(points, 2)
    known = [v for v in values if v is not None]
    if known:
        assert (min(out.finite), max(out.finite)) == (min(known), max(known))


def test_columns_with_the_common_steps_store_them_once():
    out = shared_columns({"a": Column([1, 2], [1.0, 2.0]), "b": Column([1, 2], [3.0, None]), "c": Column([2], [0.123456789])}, 100)
    assert out == {"x": [1, 2], "columns": {"a": {"y": [1, 2]}, "b": {"y": [3, None]}, "c": {"x": [2], "y": [0.12346]}}}


def test_rounding():
    assert rounded([1.0, None, 1234567.0, 0.1234567, -0.0]) == [1, None, 1234600, 0.12346, 0]


def with_counts(run, counts_by_step, edges):
    return replace(run, histograms={"w": [(s, np.array(c, float)) for s, c in counts_by_step]}, edges={"w": edges})


def test_histogram_of_known_counts(one_run):
    # Bins: <=0 | (0, 1] | (1, 2] | >2. Four steps, so "first" and "last" are one step each.
    run = with_counts(read_run(one_run), [(1, [0, 10, 0, 0]), (2, [0, 5, 5, 0]), (3, [0, 5, 5, 0]), (9, [0, 1, 3, 0])], [0.0, 1.0, 2.0])
    assert grid([run], "w")[[0, -1]].tolist() == [0.0, 2.0]
    h = histogram(run, "w", np.linspace(0, 2, 5))
    assert h["first"] == [0.5, 0.5, 0, 0]
    assert h["last"] == [0.125, 0.125, 0.375, 0.375]
    assert (h["first_steps"], h["last_steps"]) == ([1, 1], [9, 9])
    assert h["heat_steps"] == [[1, 1], [2, 2], [3, 3], [9, 9]]
    assert h["heat"][1] == [0.25] * 4


def test_open_bins_stand_at_their_edge_and_what_is_outside_counts_at_the_border(one_run):
    run = with_counts(read_run(one_run), [(1, [2, 4, 4, 10])], [0.0, 1.0, 2.0])
    assert histogram(run, "w", np.linspace(0, 2, 3))["first"] == [0.3, 0.7]
    assert histogram(run, "w", np.linspace(0.5, 1.5, 3))["first"] == [0.3, 0.7]


def test_equal_weights_give_one_spike(one_run):
    counts = [0.0] * (len(EDGES) + 1)
    counts[int(np.searchsorted(EDGES, 0.0, side="left"))] = 64
    run = with_counts(read_run(one_run), [(1, counts), (2, counts)], EDGES)
    borders = grid([run], "w")
    assert borders[-1] - borders[0] == pytest.approx(0.1)
    assert borders[0] < 0 < borders[-1]
    assert max(histogram(run, "w", borders)["first"]) > 0.95


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=200))
def test_shares_sum_to_one_and_the_grid_holds_the_values(values):
    counts = np.bincount(np.searchsorted(EDGES, values, side="left"), minlength=len(EDGES) + 1).tolist()
    run = with_counts(RUN, [(1, counts)], EDGES)
    borders = grid([run], "w")
    assert (np.diff(borders) > 0).all()
    h = histogram(run, "w", borders)
    assert sum(h["first"]) == pytest.approx(1, abs=5e-3)
    if len(values) < 200:  # no value is rarer than the share that may lie outside
        width = np.diff(EDGES)
        bins = np.searchsorted(EDGES, [min(values), max(values)], side="left")
        slack = max(width[min(max(b - 1, 0), len(width) - 1)] for b in bins) + 1e-9
        assert borders[0] <= min(values) + slack
        assert borders[-1] >= max(values) - slack


def test_counts_that_do_not_fit_the_edges_are_left_out(one_run):
    run = with_counts(read_run(one_run), [(1, [1, 2]), (2, [0, 0, 0, 0])], [0.0, 1.0, 2.0])
    assert counted(run, "w") is None
    assert grid([run], "w") is None


RUN = None


@pytest.fixture(autouse=True, scope="module")
def _module_run(tmp_path_factory):
    global RUN
    RUN = read_run(make_run(tmp_path_factory.mktemp("payload") / "run", steps=8))


def write_rows(folder, name, rows):
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / name, "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)


def base(step, sample, **changes):
    return rollout_row(np.random.default_rng(sample), step, sample, tokens=["a", "b"]) | changes


def test_the_responses_that_tell_most_are_picked(tmp_path):
    rows = [
        base(1, 0, reward=0.5, weight=[1.0, 1.0]), base(1, 1, reward=1.0, weight=[1.0, 1.0]), base(1, 2, reward=0.0, weight=[1.0, 1.0]),
        base(1, 0, reward=0.5, weight=[0.0, 0.1]), base(1, 1, reward=None, weight=None, tokens=["a"] * 9),
    ]  # fmt: skip
    write_rows(tmp_path / "rollouts", "step-1.jsonl.gz", rows)
    notes = []
    picked = read_samples(tmp_path / "rollouts", notes)
    assert [(s.why, s.reward, len(s.tokens)) for s in picked] == [
        ("highest reward", 1.0, 2), ("lowest reward", 0.0, 2), ("smallest mean weight", 0.5, 2), ("longest", None, 9),
    ]  # fmt: skip
    assert picked[3].weight is None
    assert picked[3].logp_behavior is None  # two values for nine tokens describe nothing
    assert not notes


def test_steps_are_spread_and_in_order_of_numbers(tmp_path):
    for step in (2, 10, 9, 100, 30, 50):
        write_rows(tmp_path / "rollouts", f"{step}.jsonl.gz", [base(step, 0)])
    assert [s.step for s in read_samples(tmp_path / "rollouts", [])] == [2, 10, 30, 100]
    assert spread(list(range(10)), 1) == [9]


def test_a_torn_stream_is_read_up_to_the_tear(tmp_path):
    rng = np.random.default_rng(0)
    write_rows(tmp_path / "rollouts", "1.jsonl.gz", [rollout_row(rng, 1, k % 4, tokens=["a"] * 50) for k in range(200)])
    file = tmp_path / "rollouts" / "1.jsonl.gz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    notes = []
    assert read_samples(tmp_path / "rollouts", notes)
    assert notes == ["rollouts/1.jsonl.gz is incomplete (EOFError); the rows before the break are used."]


def test_trimming_keeps_both_ends_and_says_how_much_is_missing(tmp_path):
    write_rows(tmp_path / "rollouts", "1.jsonl.gz", [base(1, 0, tokens=[str(i) for i in range(100)], version=[3] * 100, weight=list(range(100)))])
    (sample,) = read_samples(tmp_path / "rollouts", [])
    out = trimmed(sample, 30, characters=10)
    assert out["tokens"] == [str(i) for i in (*range(20), *range(90, 100))]
    assert (out["length"], out["head"], out["version"]) == (100, 20, 3)
    assert out["weight"] == [*range(20), *range(90, 100)]
    assert out["prompt"] == "17+25 [... 4 characters left out ...] 8+4)="
    assert trimmed(sample, 100)["tokens"] == sample.tokens


def test_numbers_and_durations():
    assert [number(v) for v in (0.0, 0.12345, 12.345, 1234.5, 1e-5, 3e9)] == ["0", "0.123", "12.3", "1,234", "1.00e-05", "3.00e+09"]
    assert number(0.12345, percent=True) == "12.3 %"
    assert [duration(s) for s in (4.2, 59.0, 192.0, 7500.0)] == ["4.2 s", "59 s", "3 min 12 s", "2 h 05 min"]


def test_cells(one_run):
    run = read_run(one_run)
    columns = {"a": Column(list(range(1, 21)), [float(k) for k in range(20)]), "b": Column([5], [2.0]), "n": Column([1], [None])}
    run = replace(run, columns=columns)
    assert cell(run, "a", "ends") == "0.5 → 18.5"
    assert cell(run, "a", "highest") == "19 at step 20"
    assert cell(run, "a", "lowest") == "0 at step 1"
    assert (cell(run, "a", "total"), cell(run, "a", "median")) == ("19", "10")
    assert cell(run, "b", "ends") == "2"
    assert cell(run, "b", "evaluations") == "200 %"
    assert (cell(run, "n", "ends"), cell(run, "missing", "ends")) == ("–", "–")


def test_pass_at_k_is_of_the_last_evaluation(one_run):
    run = read_run(one_run)
    last = 0.32 + 0.62 * (1 - np.exp(-4))
    assert [k for k, _ in pass_at_k(run)] == [1, 2, 4, 8]
    assert [v for _, v in pass_at_k(run)] == pytest.approx([1 - (1 - last) ** k for k in (1, 2, 4, 8)])


def test_time_shares_add_up_and_name_the_rest(one_run):
    columns = {f"time/{n}_s": Column([1, 2], [v, None]) for n, v in (("sample", 3.0), ("score", 0.0), ("update", 4.0), ("step", 10.0), ("eval", 5.0))}
    assert time_shares(replace(read_run(one_run), columns=columns)) == [("sampling", 3.0), ("update", 4.0), ("evaluation", 5.0), ("other", 3.0)]
    assert time_shares(replace(read_run(one_run), columns={})) == []


def test_differences_and_verdict_without_a_config(one_run):
    run = read_run(one_run)
    a, b = replace(run, config={"m": {"x": 1, "y": 2}}), replace(run, config={"m": {"x": 1}, "z": [1]})
    assert differences([a, b]) == [("m.y", ["2", "–"]), ("z", ["–", "[1]"])]
    bare = verdict(replace(run, config={}, alarms=[], columns={}))
    assert (bare.facts, bare.outcome, bare.alarms) == (["120 updates", "26.2 s"], "", "no alarms")
