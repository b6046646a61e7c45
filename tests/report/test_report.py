"""The page as a file: what it says, what it leaves out, how large it is, and that nothing a run wrote can act in it."""

import ast
import gzip
import hashlib
import json
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from conftest import FULL_CHARTS, make_run, rollout_row

import nearpolicy.report
from nearpolicy.errors import DataError, UsageError
from nearpolicy.report import MAX_BYTES, read_run, write_report

ASSETS = files("nearpolicy.report") / "assets"


class Page(HTMLParser):
    """Figures, text, scripts and attributes of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.figures, self.scripts, self.tags, self.attributes, self.text = [], [], [], [], []
        self._script: dict | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(next(s["body"] for s in self.scripts if s.get("id") == "data"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "figure":
            self.figures.append(dict(attrs)["data-chart"])
        if tag == "script":
            self._script = {"body": "", **dict(attrs)}
            self.scripts.append(self._script)

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._script is not None:
            self._script["body"] += data
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def named(self) -> set[str]:
        return {f for f in self.figures if not f.startswith("more:")}


def report(*runs: Path, out: Path | None = None) -> Page:
    return Page(write_report(list(runs), out or runs[0].parent / "report.html"))


def edit(run: Path, change) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows if change(r) is not False))


def test_vendored_files_are_the_published_ones():
    sums = dict(reversed(line.split()) for line in (ASSETS / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE.txt"}
    for name, digest in sums.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (ASSETS / "uPlot.LICENSE.txt").read_text()


def test_the_report_needs_no_torch():
    for source in Path(nearpolicy.report.__file__).parent.glob("*.py"):
        imports = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
        assert not {n for n in names if n.startswith(("torch", "nearpolicy")) and not n.startswith(("nearpolicy.errors", "nearpolicy.report"))}


def test_one_run_has_every_chart_and_the_verdict(one_run):
    page = report(one_run)
    assert page.named == FULL_CHARTS
    assert "arithmetic-vespo finished" in page.words
    assert "vespo · sync · N = 8 · 120 updates · 26.2 s · 1 alarm: entropy" in page.words
    # pass@1 is 0.32 + 0.62 (1 - exp(-4 step / 120)) at steps 0 and 120, +- 0.04.
    assert "32 % [28, 36] → 92.9 % [88.9, 96.9]" in page.words
    assert "updates_per_rollout = 8" in page.words
    assert "hardware.cpu = example" in page.words
    assert "entropy left its band: 0.09 nats" in page.words
    assert page.data["runs"][0]["alarms"] == [[60, "entropy"]]


def test_columns_arrive_as_they_were_logged(one_run):
    run = report(one_run).data["runs"][0]
    rows = [json.loads(line) for line in (one_run / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "policy/entropy", "eval/pass@1", "policy/loss", "weight/log_sequence/p99"):
        logged = [(r["step"], r[name]) for r in rows if name in r]
        column = run["columns"][name]
        steps = column.get("x", run["x"])
        assert steps == [s for s, _ in logged]
        assert column["y"] == [None if v is None else pytest.approx(v, rel=1e-4) for _, v in logged]
    assert run["columns"]["policy/loss"]["y"][6] is None


def test_several_runs_share_one_page(tmp_path):
    runs = [make_run(tmp_path / n, seed=i, steps=40 + 8 * i, method=n) for i, n in enumerate(("vespo", "grpo", "cispo"))]
    page = report(*runs)
    assert [r["name"] for r in page.data["runs"]] == ["vespo", "grpo", "cispo"]
    assert page.named == FULL_CHARTS
    legend = [a for a in page.attributes if a[0] == "data-run"]
    assert legend == [("data-run", "0"), ("data-run", "1"), ("data-run", "2")]
    assert "Settings that differ" in page.words
    assert "train.steps 40 48 56" in page.words
    assert (
        page.data["runs"][0]["histograms"]["weight/log_sequence"]["borders"] == page.data["runs"][2]["histograms"]["weight/log_sequence"]["borders"]
    )


def test_runs_of_one_name_are_told_apart_and_twice_the_same_is_once(tmp_path):
    runs = [make_run(tmp_path / d / "run", steps=8) for d in ("a", "b")]
    page = report(*runs, runs[0], out=tmp_path / "r.html")
    assert [r["name"] for r in page.data["runs"]] == ["a/run", "b/run"]


def test_missing_metrics_leave_out_their_charts(one_run):
    def change(row):
        for name in [n for n in row if n.startswith(("weight/", "policy/kl", "eval/pass@2", "eval/pass@4", "eval/pass@8"))]:
            del row[name]

    edit(one_run, change)
    gone = {"ess", "dead", "log-weight", "log-weight-histogram", "log-weight-heatmap", "kl", "passk"}
    assert report(one_run).named == FULL_CHARTS - gone


def test_a_chart_needs_a_number(one_run):
    edit(one_run, lambda row: row.update({"train/grad_norm": None}) if row["kind"] == "train" else None)
    assert report(one_run).named == FULL_CHARTS - {"grad-norm"}


def test_unknown_metrics_are_under_more(one_run):
    edit(one_run, lambda row: row.update({"position/ess_frac/k03": 0.5}) if row["kind"] == "train" else None)
    page = report(one_run)
    more = {f for f in page.figures if f.startswith("more:")}
    assert "more:position/ess_frac/k03" in more
    assert {c["id"] for c in page.data["more"]} == more
    assert not more & {f"more:{n}" for n in ("reward/mean", "weight/log_sequence/p50", "eval/pass@8", "eval/pass@1/low")}


@pytest.mark.parametrize("present", ["metrics.jsonl", "nothing else"])
def test_only_the_metrics_are_needed(one_run, present):
    for name in ("run.toml", "env.json", "metrics_table.json", "histogram_edges.json"):
        (one_run / name).unlink()
    for file in (one_run / "rollouts").iterdir():
        file.unlink()
    page = report(one_run)
    assert page.named == FULL_CHARTS - {"log-weight-histogram", "log-weight-heatmap"}
    assert "run.toml is missing." in page.words
    assert "Sample responses" not in page.words


@pytest.mark.parametrize("tail", ['{"step": 121, "kind": "train", "time": 2', '{"step": 121, "kind": "train", "caf\xc3'])
def test_a_torn_last_line_is_skipped_and_said(tmp_path, tail):
    run = make_run(tmp_path / "run", tail=tail, status=None)
    page = report(run)
    assert "metrics.jsonl: the last line is incomplete and was skipped" in page.words
    assert "run no end recorded" in page.words
    assert page.data["runs"][0]["columns"]["policy/entropy"]["y"][-1] is not None
    assert read_run(run).steps == 120


def test_bad_lines_in_the_middle_are_counted(one_run):
    lines = (one_run / "metrics.jsonl").read_text().splitlines()
    (one_run / "metrics.jsonl").write_text("\n".join([lines[0], "[]", '{"step": "x", "kind": "train"}', *lines[1:]]) + "\n")
    assert read_run(one_run).notes == ["metrics.jsonl: 2 lines are not whole rows and were skipped (line 2, 3)."]


@pytest.mark.parametrize(("events", "status"), [
    (["finished"], "finished"), (["interrupted"], "interrupted"), (["failed"], "failed"), ([], "no end recorded"),
    (["interrupted", "train"], "no end recorded"), (["interrupted", "train", "finished"], "finished"),
])  # fmt: skip
def test_status_is_that_of_the_last_end(tmp_path, events, status):
    run = make_run(tmp_path / "run", steps=8, status=None)
    with (run / "metrics.jsonl").open("a") as f:
        for k, event in enumerate(events):
            extra = {"kind": "train", "policy/entropy": 1.0} if event == "train" else {"kind": "event", "event": event}
            f.write(json.dumps({"step": 9 + k, "time": 5.0 + k, **extra}) + "\n")
    assert read_run(run).status == status


def test_a_clock_that_restarts_adds_up_and_a_repeated_step_keeps_its_later_value(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [(1, 10.0, 0.1), (2, 20.0, 0.2), (3, 30.0, 0.3), (3, 5.0, 0.33), (4, 9.0, None)]
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "kind": "train", "time": t, "a": v}) + "\n" for s, t, v in rows))
    got = read_run(run)
    assert got.seconds == 39.0
    assert got.columns["a"].step == [1, 2, 3, 4]
    assert got.columns["a"].value == [0.1, 0.2, 0.33, None]


@pytest.mark.parametrize("make", [
    lambda p: None,
    lambda p: p.mkdir(),
    lambda p: p.write_text("x"),
    lambda p: (p.mkdir(), (p / "metrics.jsonl").write_text("")),
    lambda p: (p.mkdir(), (p / "metrics.jsonl").write_text('{"step": 1, "kind": "event", "event": "started"}\n{"st')),
])  # fmt: skip
def test_what_is_not_a_run_is_refused(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(DataError, match="run"):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_path_that_cannot_be_written_is_one_clear_line(one_run):
    with pytest.raises(UsageError, match="No such file or directory"):
        write_report([one_run], one_run / "missing" / "report.html")
    with pytest.raises(UsageError, match="at least one"):
        write_report([], one_run / "report.html")


def test_it_is_written_aside(one_run, monkeypatch):
    out = write_report([one_run], one_run)
    assert out == one_run / "report.html"
    before = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UsageError, match="No space left"):
        write_report([one_run], one_run)
    assert out.read_bytes() == before
    assert not list(one_run.glob(".*.part"))


ATTACK = (
    '</script><script>document.documentElement.dataset.owned=1</script><img src=x onerror="document.documentElement.dataset.owned=1">&lt;b&gt;<!--'
)


def attacked(path: Path) -> Path:
    run = make_run(
        path, steps=24, tokens=["</scr", "ipt>", ATTACK, "\u2028", "\ud800", "<!--<script>", "x"], prompt=ATTACK, alarm=ATTACK, status="failed"
    )
    (run / "run.toml").write_text((run / "run.toml").read_text().replace('"vespo"', "'''" + ATTACK + "'''"))
    (run / "env.json").write_text(json.dumps({ATTACK: ATTACK}))
    table = json.loads((run / "metrics_table.json").read_text())
    (run / "metrics_table.json").write_text(json.dumps([{**row, "text": ATTACK, "unit": ATTACK, "direction": ATTACK} for row in table]))
    edit(run, lambda row: row.update({ATTACK: 1.0, "message": ATTACK}))
    return run


def test_nothing_a_run_wrote_becomes_markup(tmp_path):
    page = report(attacked(tmp_path / ("<img src=x onerror=alert(1)>" + "&amp;'\"")))
    plain = report(make_run(tmp_path / "plain", steps=24))
    assert len(page.scripts) == len(plain.scripts) == 4
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "?" in page.data["runs"][0]["samples"][0]["tokens"]  # the lone surrogate
    assert page.data["runs"][0]["samples"][0]["prompt"] == ATTACK
    assert ATTACK in page.data["runs"][0]["samples"][0]["tokens"]
    assert ATTACK in "".join(page.text)


def test_nothing_is_loaded_from_anywhere(one_run):
    page = report(one_run)
    assert not [(n, v) for n, v in page.attributes if n in ("src", "href", "srcset", "action")]
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    policy = next(v for n, v in page.attributes if v and "default-src" in v)
    assert policy.startswith("default-src 'none'")


def test_long_runs_and_many_runs_stay_below_the_limit(tmp_path):
    long = tmp_path / "long"
    long.mkdir()
    with (long / "metrics.jsonl").open("w") as f:
        for step in range(1, 1501):
            f.write(
                json.dumps({"step": step, "kind": "train", **{f"m/{k}": 1.0 if (step, k) == (1111, 5) else 1e-3 * (step % 97) for k in range(60)}})
                + "\n"
            )
    (long / "rollouts").mkdir()
    with gzip.open(long / "rollouts" / "step-1.jsonl.gz", "wt") as f:
        for k in range(4):
            f.write(json.dumps(rollout_row(np.random.default_rng(k), 1, k, tokens=["token "] * 20_000) | {"prompt": "p" * 200_000}) + "\n")
    (long / "run.toml").write_text("".join(f'k{k} = "{"v" * 90}"\n' for k in range(3_000)))
    others = [make_run(tmp_path / f"r{k}", seed=k, steps=16) for k in range(4)]
    out = write_report([long, *others], tmp_path / "report.html")
    assert out.stat().st_size < MAX_BYTES
    run = Page(out).data["runs"][0]
    assert max(run["columns"]["m/5"]["y"]) == 1.0  # a spike of one step survives thinning
    sample = run["samples"][0]
    assert sample["length"] == 20_000
    assert 24 <= len(sample["tokens"]) < 20_000
