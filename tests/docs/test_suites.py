"""Suites: those that ship state the papers' protocols, and one over small files is evaluated through the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nearpolicy.build import TINY
from nearpolicy.cli import cli
from nearpolicy.suites import SUITES, find_suite, read_suite
from nearpolicy.tasks.arithmetic import ArithmeticTask

NAMES = sorted(p.stem for p in SUITES.glob("*.toml"))


def protocol(name):
    return {b.name: (b.samples, b.temperature, b.top_p) for b in read_suite(find_suite(Path(name)))}


def test_the_protocols_are_the_papers():
    assert NAMES == ["iw-opd", "thinking-seeds", "vespo"]
    assert protocol("vespo") == {"aime24": (32, 1.0, 0.7), "aime25": (32, 1.0, 0.7), "amc23": (16, 1.0, 0.7), "math500": (4, 1.0, 0.7)}
    assert protocol("iw-opd") == {"aime24": (32, 1.0, 1.0), "aime25": (32, 1.0, 1.0), "hmmt25": (32, 1.0, 1.0),
                                  "humanevalplus": (1, 1.0, 1.0), "mbppplus": (1, 1.0, 1.0)}  # fmt: skip
    assert set(protocol("thinking-seeds")) == {"aime24", "aime25"}


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_suite_can_be_evaluated_by_who_has_the_data(name):
    for b in read_suite(find_suite(Path(name))):
        assert all(1 <= k <= b.samples for k in b.k)
        assert Path(b.path).is_absolute()
        assert Path(b.path).parent == Path("~/data").expanduser()
        assert b.reward == ("code" if b.name in ("humanevalplus", "mbppplus") else "math_verify")


@pytest.fixture
def suite(tmp_path):
    """Two benchmarks over held-out chains of the embedded task, under other column names."""
    rows = ArithmeticTask(heldout=8).heldout
    for name, (prompt, answer) in {"chains": ("question", "ground_truth"), "digits": ("problem", "solution")}.items():
        lines = [json.dumps({prompt: rows.row(i).prompt, answer: rows.row(i).columns["answer"]}) for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / "suite.toml"
    path.write_text(
        '[[benchmark]]\nname = "chains"\npath = "chains.jsonl"\nreward = "number"\nsamples = 3\nk = [1, 3]\nmax_tokens = 56\n'
        '[[benchmark]]\nname = "digits"\npath = "digits.jsonl"\nreward = "exact"\nsamples = 1\nmax_tokens = 56\n',
        encoding="utf-8",
    )
    return path


def evaluate(suite, *words):
    out = suite.parent / "numbers.json"
    result = CliRunner().invoke(cli, ["eval", str(TINY), "device=cpu", "--suite", str(suite), "--json", str(out), *words])
    return result, json.loads(out.read_text()) if out.exists() else {}


def test_a_suite_is_evaluated_through_the_command_line(suite):
    result, numbers = evaluate(suite)
    assert result.exit_code == 0, result.output
    assert "chains: 8 prompts x 3 samples" in result.output
    # The warm start is right 40 % of the time in its last number; it never answers with the bare digit.
    assert numbers["chains/pass@1"] <= numbers["chains/pass@3"]
    assert numbers["chains/avg@3"] == pytest.approx(numbers["chains/pass@1"])
    assert 0 < numbers["chains/avg@3"] < 1
    assert numbers["chains/avg@3/low"] <= numbers["chains/avg@3"] <= numbers["chains/avg@3/high"]
    assert numbers["digits/avg@1"] == 0


def test_options_of_the_command_go_on_top_of_the_suite(suite):
    _, numbers = evaluate(suite, "--samples", "1", "--k", "1", "--temperature", "0")
    assert "chains/pass@3" not in numbers
    assert numbers["chains/avg@1"] > 0.8  # greedy answers of the warm start are nearly always right


def test_a_benchmark_without_its_data_is_one_clear_line(suite):
    (suite.parent / "digits.jsonl").unlink()
    result, numbers = evaluate(suite)
    assert result.exit_code == 2
    assert not numbers
    assert "digits" in result.stderr
    assert result.stderr.count("\n") == 1
