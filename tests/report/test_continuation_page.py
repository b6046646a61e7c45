"""The report's section on continuation gaps."""

import json

import pytest

from nearpolicy.report import write_report

ROW = {"fraction": 0.5, "prompts": 3, "student": [0.25, 0.1, 0.4], "teacher": [0.75, 0.6, 0.9], "gap": [0.5, 0.3, 0.7]}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    (path / "continuation").mkdir(parents=True)
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "train", "time": 1.0, "reward/mean": 0.5}) + "\n")
    return path


def page(run):
    return write_report([run], run / "report.html").read_text()


def test_measured_checkpoints_are_shown_with_intervals(run):
    document = {"teacher": "a<b>", "prompts": 3, "samples": 2, "temperature": 1.0, "kl": [0.1, 0.05, 0.2], "continuation_gap": [ROW]}
    (run / "continuation" / "step-000064.json").write_text(json.dumps(document))
    text = page(run)
    assert "step-000064" in text
    assert "0.500 <small>[0.300, 0.700]</small>" in text
    assert "a&lt;b&gt;" in text
    assert "a<b>" not in text


def test_no_file_no_section_and_a_broken_one_is_a_note(run):
    assert 'id="continuation"' not in page(run)
    (run / "continuation" / "bad.json").write_text("{")
    (run / "continuation" / "odd.json").write_text(json.dumps({"continuation_gap": [{"fraction": "x"}, 3], "kl": "no"}))
    text = page(run)
    assert 'id="continuation"' not in text


def test_missing_values_are_dashes(run):
    row = {**ROW, "student": [None, None, None], "gap": ["<script>", 0, 0]}
    (run / "continuation" / "a.json").write_text(json.dumps({"continuation_gap": [row]}))
    assert "–" in page(run)
