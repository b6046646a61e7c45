"""Expectations of an experiment: held against known numbers, and the command's exit code."""

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from experiments import LRS, METHODS, plan_of, write_run
from nearpolicy import cli
from nearpolicy.errors import UsageError
from nearpolicy.sweep.compare import compare
from nearpolicy.sweep.expect import check_expectations
from nearpolicy.sweep.experiment import make_plan, read_experiment
from nearpolicy.sweep.tables import write_tables

FILE = """
name = "e"
seeds = [0, 1]

[[axis]]
name = "method"
values = [{label = "GRPO", set = {method.name = "grpo"}}, {label = "VESPO", set = {method.name = "vespo"}}]
"""


def curves(plan, out, *, left_out=()):
    """GRPO ends at 0.5 + seed / 10, VESPO 0.2 above; the highest point is 0.1 above the last."""
    for run in plan.runs:
        if run.name not in left_out:
            end = 0.5 + run.seed / 10 + 0.2 * (run.cell.labels[0] == "VESPO")
            write_run(out, run, [[0.1, 0.1], [end + 0.1] * 2, [end] * 2], prompts=f"{run.seed}")


def expecting(*expect, **tree):
    return plan_of(**{"seeds": [0, 1], "axis": [METHODS], "expect": list(expect), **tree})


def test_ranges_of_cells_and_differences(tmp_path):
    plan = expecting(
        {"cell": {"method": "GRPO"}, "within": [0.55, 0.6]},
        {"cell": {"method": "VESPO"}, "within": [0.8, 0.9]},
        {"cell": {"method": "VESPO"}, "statistic": "best", "within": [0.8, 0.9]},
        {"cell": {"method": "VESPO"}, "minus": {"method": "GRPO"}, "within": [0.15, 0.25]},
        {"cell": {"method": "GRPO"}, "minus": {"method": "VESPO"}, "within": [0.0, 1.0]},
    )
    curves(plan, tmp_path)
    checked = check_expectations(compare(plan, tmp_path))
    assert [c.found for c in checked] == pytest.approx([0.55, 0.75, 0.85, 0.2, -0.2])
    assert [c.holds for c in checked] == [True, False, True, True, False]
    assert checked[1].line == "VESPO: final 0.750, expected 0.8 to 0.9"
    assert checked[3].what == "VESPO minus GRPO: final"
    page = write_tables(compare(plan, tmp_path), tmp_path / "t", checked=checked).read_text()
    assert "| VESPO: final | 0.75 | 0.8 to 0.9 | **no** |" in page
    assert page.count("| yes |") == 3


def test_a_cell_without_a_finished_run_does_not_hold(tmp_path):
    plan = expecting(
        {"cell": {"method": "GRPO"}, "within": [-10, 10]}, {"cell": {"method": "VESPO"}, "minus": {"method": "GRPO"}, "within": [-10, 10]}
    )
    curves(plan, tmp_path, left_out=("GRPO_s0", "GRPO_s1"))
    for checked in check_expectations(compare(plan, tmp_path)):
        assert math.isnan(checked.found)
        assert not checked.holds
        assert "no finished run" in checked.line


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        ({"cell": {"metod": "GRPO"}, "within": [0, 1]}, "expect.cell: got 'metod'.*'method'"),
        ({"cell": {"method": "GRP0"}, "within": [0, 1]}, "expect.cell.method: got 'GRP0'.*'GRPO'"),
        ({"cell": {"method": "GRPO"}, "minus": {"method": "GRPO"}, "within": [0, 1]}, "expect.minus: got the cell itself"),
        ({"cell": {"method": "GRPO"}, "minus": {"method": "vespo"}, "within": [0, 1]}, "expect.minus.method: got 'vespo'"),
        ({"cell": {}, "within": [0, 1]}, "expect.cell: got no label of 'method'"),
        ({"cell": {"method": "GRPO"}, "within": [1, 0]}, r"expect.within: got \[1.0, 0.0\]"),
    ],
)
def test_an_expectation_that_names_what_is_not_there_is_one_line(expect, says):
    with pytest.raises(UsageError, match=says) as caught:
        expecting(expect)
    assert "\n" not in str(caught.value)


def test_every_axis_is_named():
    with pytest.raises(UsageError, match="no label of 'lr'"):
        expecting({"cell": {"method": "GRPO"}, "within": [0, 1]}, axis=[METHODS, LRS])


@pytest.mark.parametrize(("low", "high", "code"), [(0.5, 0.6, 0), (0.7, 0.8, 1)])
def test_the_command_says_and_exits(tmp_path, low, high, code):
    file, out = tmp_path / "e.toml", tmp_path / "s"
    file.write_text(FILE)
    plan = make_plan(read_experiment(file))
    assert CliRunner().invoke(cli.cli, ["sweep", str(file), "--plan"]).exit_code == 0
    curves(plan, out)
    (out / "plan.json").write_text(f'{{"name": "e", "runs": {{"GRPO_s0": "{plan.runs[0].config_hash}"}}}}')
    file.write_text(f'{FILE}\n[[expect]]\ncell = {{method = "GRPO"}}\nwithin = [{low}, {high}]\n')
    result = CliRunner().invoke(cli.cli, ["sweep", str(file), "--out", str(out), "--resume"])
    assert result.exit_code == code, result.output
    assert ("NOT as expected: GRPO: final 0.550" in result.stdout) == (code == 1)
    assert (out / "results" / "results.md").exists()
    if code:
        assert "1 of 1 expectations: got GRPO: final 0.550, expected 0.7 to 0.8" in result.stderr


QUICK = sorted((Path(__file__).parent.parent.parent / "experiments").glob("*/quick.toml"))


@pytest.mark.parametrize("file", QUICK, ids=lambda f: f.parent.name)
def test_the_small_version_of_every_experiment_says_what_it_expects(file):
    plan = make_plan(read_experiment(file), where=file.parent)
    assert plan.experiment.expect
    assert len(plan.runs) <= 12


def test_there_is_one_for_every_sweep():
    assert {f.parent for f in QUICK} == {f.parent for f in QUICK[0].parent.parent.glob("*/*.toml")}
