"""Trackers: what is on disk after each row, after a torn line and after a resume."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nearpolicy.errors import UsageError
from nearpolicy.trainer.trackers import JsonlTracker, TensorBoardTracker, WandbTracker


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_row_is_on_disk_when_log_returns(tmp_path):
    path, clock = tmp_path / "metrics.jsonl", Clock()
    tracker = JsonlTracker(path, clock=clock)
    clock.now += 1.5
    tracker.log(
        1, "train", {"reward/mean": 0.5, "weight/hist": [1, 2.0, math.nan], "policy/loss": math.nan, "x": math.inf, "word": "a", "none": None}
    )
    (row,) = rows(path)
    assert row.pop("weight/hist") == [1, 2.0, None]
    assert row == {"step": 1, "kind": "train", "time": 1.5, "reward/mean": 0.5, "policy/loss": None, "x": None, "word": "a", "none": None}
    tracker.close()
    tracker.close()
    with pytest.raises(UsageError, match=r"after close"):
        tracker.log(2, "train", {})


def test_resume_removes_later_rows_and_goes_on_with_the_clock(tmp_path):
    path, clock = tmp_path / "metrics.jsonl", Clock()
    tracker = JsonlTracker(path, clock=clock)
    for step in range(1, 6):
        clock.now += 2.0
        tracker.log(step, "train", {"a": float(step)})
    tracker.close()
    clock.now += 500.0
    resumed = JsonlTracker(path, resume_at=3, clock=clock)
    clock.now += 1.0
    resumed.log(4, "train", {"a": -4.0})
    assert [(r["step"], r["a"], r["time"]) for r in rows(path)] == [(1, 1.0, 2.0), (2, 2.0, 4.0), (3, 3.0, 6.0), (4, -4.0, 7.0)]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("resume_at", [None, 2])
def test_a_torn_last_line_is_removed(tmp_path, resume_at):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step":1,"kind":"train","time":0.1}\n{"step":2,"kind":"train","time":0.2}\n'
    path.write_text(whole + '{"step":3,"kind":"tr')
    JsonlTracker(path, resume_at=resume_at).close()
    assert path.read_text() == whole


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"kind":"train"}')
    tracker = JsonlTracker(path)
    tracker.log(2, "train", {})
    assert [r["step"] for r in rows(path)] == [1, 2]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), resume_at=st.integers(0, 12))
def test_any_cut_leaves_exactly_the_whole_rows_up_to_the_step(tmp_path, cut, resume_at):
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps({"step": s, "kind": "train", "time": s / 10, "text": "é↦"}, ensure_ascii=False) + "\n" for s in range(1, 9))
    data = text.encode()[:cut]
    path.write_bytes(data)
    JsonlTracker(path, resume_at=resume_at).close()
    # A row is whole when its closing brace is there, newline or not.
    expected = [s for s, line in enumerate(data.split(b"\n"), 1) if line.endswith(b"}") and s <= resume_at]
    assert [r["step"] for r in rows(path)] == expected


def test_wrong_rows_are_refused(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match="'metric'"):
        tracker.log(1, "metric", {})
    with pytest.raises(UsageError, match="kind, step"):
        tracker.log(1, "train", {"step": 2.0, "kind": "x"})
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        JsonlTracker(tmp_path / "missing" / "metrics.jsonl")


@pytest.mark.parametrize(("library", "tracker", "extra"), [("tensorboardX", TensorBoardTracker, "tensorboard"), ("wandb", WandbTracker, "wandb")])
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, library, tracker, extra):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf'pip install "nearpolicy\[{extra}\]"'):
        tracker(tmp_path)


def test_tensorboard_files_hold_scalars_histograms_and_text(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    tracker = TensorBoardTracker(tmp_path, edges={"w": [-1.0, 0.0, 1.0]})
    tracker.log(3, "train", {"reward/mean": 0.25, "missing": None, "nan": math.nan, "w/hist": [0, 2, 6, 0], "unknown/hist": [1, 2]})
    tracker.log(4, "alarm", {"alarm": "entropy", "message": "left its band"})
    tracker.close()
    data = next(tmp_path.glob("events.*")).read_bytes()
    events, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        events.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 12 + size + 4
    values = {v.tag: (e.step, v) for e in events for v in e.summary.value}
    assert set(values) == {"reward/mean", "w", "alarm/text_summary"}
    assert values["reward/mean"][0] == 3
    assert values["reward/mean"][1].simple_value == 0.25
    histogram = values["w"][1].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (-0.5, 0.5, 8.0, 2.0)
    assert list(histogram.bucket)[:3] == [0.0, 2.0, 6.0]
    assert values["alarm/text_summary"][0] == 4


def test_wandb_is_offline_and_gets_every_scalar(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda row: calls.append(("log", row)), finish=lambda: calls.append(("finish",)), define_metric=lambda *a, **k: calls.append((a, k))
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: calls.append(("init", kwargs)) or run))
    tracker = WandbTracker(tmp_path, name="run", config={"seed": 1})
    tracker.log(2, "train", {"reward/mean": 0.5, "nan": math.nan, "w/hist": [1, 2]})
    tracker.close()
    tracker.close()
    assert calls[0] == ("init", {"project": "nearpolicy", "name": "run", "dir": str(tmp_path), "config": {"seed": 1}, "mode": "offline"})
    assert calls[-2:] == [("log", {"step": 2, "kind": "train", "reward/mean": 0.5}), ("finish",)]
