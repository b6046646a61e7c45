"""Cells of a sweep in the report: means over seeds, bands, summed histograms."""

import numpy as np
import pytest
from conftest import make_run

from nearpolicy.errors import UsageError
from nearpolicy.report import MAX_BYTES, Cell, read_run, write_cells_report
from nearpolicy.report.cells import together
from nearpolicy.report.charts import leftovers
from nearpolicy.report.payload import payload


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return [read_run(make_run(folder / f"s{k}", seed=k, steps=24, speed=2.0 + k)) for k in range(3)]


def test_a_column_is_the_mean_over_seeds_between_its_smallest_and_largest(seeds):
    run = together(Cell("vespo", seeds), histograms=True)
    for name in ("reward/mean", "policy/entropy", "train/grad_norm"):
        values = np.array([r.columns[name].value for r in seeds])
        assert run.columns[name].value == pytest.approx(values.mean(0).tolist())
        assert run.columns[f"{name}/low"].value == pytest.approx(values.min(0).tolist())
        assert run.columns[f"{name}/high"].value == pytest.approx(values.max(0).tolist())
        assert run.columns[name].step == seeds[0].columns[name].step
    assert (run.name, run.status, run.steps) == ("vespo", "finished", 24)
    assert [a.message.split(":")[0] for a in run.alarms] == ["seed 0", "seed 1", "seed 2"]


def test_given_bands_take_the_place_of_the_range(seeds):
    steps = seeds[0].columns["eval/pass@1"].step
    bands = [(0.5 + 0.1 * k, 0.4, 0.9) for k in range(len(steps))]
    run = together(Cell("vespo", seeds, {"eval/pass@1": bands}), histograms=True)
    assert run.columns["eval/pass@1"].value == [b[0] for b in bands]
    assert set(run.columns["eval/pass@1/low"].value) == {0.4}


def test_a_value_missing_in_one_seed_is_missing(seeds):
    run = together(Cell("vespo", seeds), histograms=True)
    at = run.columns["policy/loss"].step.index(7)
    assert run.columns["policy/loss"].value[at] is None  # every seed logged null there


def test_histogram_counts_add(seeds):
    run = together(Cell("vespo", seeds), histograms=True)
    for k, (step, counts) in enumerate(run.histograms["weight/log_sequence"]):
        assert step == seeds[0].histograms["weight/log_sequence"][k][0]
        assert counts.tolist() == sum(r.histograms["weight/log_sequence"][k][1] for r in seeds).tolist()
    assert together(Cell("vespo", seeds), histograms=False).histograms == {}


def test_one_seed_has_no_band(seeds):
    run = together(Cell("vespo", seeds[:1]), histograms=True)
    assert not [n for n in run.columns if n.endswith("/low")]


def test_charts_get_their_bands(seeds):
    data = payload([together(Cell("vespo", seeds), histograms=True)], 1.0)
    line = next(c for c in data["charts"] if c["id"] == "entropy")["lines"][0]
    assert (line["low"], line["high"]) == ("policy/entropy/low", "policy/entropy/high")
    assert "policy/entropy/low" in data["runs"][0]["columns"]
    plain = payload(seeds[:1], 1.0)
    assert next(c for c in plain["charts"] if c["id"] == "entropy")["lines"][0]["low"] is None


def test_ends_of_bands_have_no_chart_of_their_own():
    assert [c.title for c in leftovers(["a/b", "a/b/low", "a/b/high", "c/low"])] == ["a/b", "c/low"]


def test_fifty_cells_fit_on_a_page(seeds, tmp_path):
    page = write_cells_report([Cell(f"cell {k}", seeds) for k in range(50)], tmp_path / "report.html")
    assert page.stat().st_size < MAX_BYTES
    text = page.read_text(encoding="utf-8")
    assert text.count('aria-pressed="true"') == 8
    assert text.count('aria-pressed="false"') == 42


def test_no_cell_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="no cell with a finished run"):
        write_cells_report([], tmp_path / "report.html")
