"""The section by position, the tokens at the cuts and the boundary of relayed samples."""

import json
import re
from pathlib import Path

import pytest
from conftest import make_run
from test_browser import CHROME, opened

from nearpolicy.report import write_report
from nearpolicy.report.positions import NUMBERS, labels, position_payload, position_section, truncation_section, visible
from nearpolicy.report.read import read_run

EDGES = {"rel": [k / 10 for k in range(1, 10)], "abs": [2**k for k in range(16)]}
CUTS = {
    "length_ratio": {
        "responses": 1234, "uncut": 3, "finished": 2, "last_kept": [["7", 9, 60], ["\n", 2, 30], ["<b>", 3, 10]],
        "first_new": [["=", 9, 50], [" a", 4, 50]],
    }
}  # fmt: skip


def relayed_run(path: Path, *, seed: int = 0, steps: int = 24) -> Path:
    """A run with tables by position at every fourth step: value of bin k at step s = s + k / 10; bin 3 of step 8 is missing."""
    run = make_run(path, seed=seed, steps=steps)
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "train" and row["step"] % 4 == 0:
            values = [row["step"] + k / 10 for k in range(10)]
            row["position/entropy/rel"] = [None if row["step"] == 8 and k == 3 else v for k, v in enumerate(values)]
            row["position/entropy/abs"] = values[:5]
            row["position/surprisal_behavior/rel"] = values
            row["position/raw_weight/rel"] = [10.0**k for k in range(10)]
            row["position/own_quantity/rel"] = values
            row['position/"><b>/rel'] = values
        rows.append(json.dumps(row))
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (run / "position_edges.json").write_text(json.dumps(EDGES))
    (run / "truncation_tokens.json").write_text(json.dumps(CUTS))
    return run


def test_tables_are_read_by_step_and_bin(tmp_path):
    run = read_run(relayed_run(tmp_path / "a"))
    (own,) = position_payload([run], 1.0)
    assert own["steps"] == [4, 8, 12, 16, 20, 24]
    assert own["tables"]["entropy/rel"][1] == [8.0, 8.1, 8.2, None, 8.4, 8.5, 8.6, 8.7, 8.8, 8.9]
    assert own["tables"]["entropy/abs"][5] == [24.0, 24.1, 24.2, 24.3, 24.4]
    assert own["bins"]["rel"][0] == "0–10 %"
    assert own["bins"]["abs"] == ["0", "1", "2–3", "4–7", "8–15"]
    assert not any(name.startswith("position/") for name in run.columns)


def test_bins_have_names():
    assert labels("rel", EDGES["rel"])[-1] == "90–100 %"
    assert len(labels("rel", EDGES["rel"])) == 10
    assert labels("abs", [1, 2, 4]) == ["0", "1", "2–3", "4+"]
    assert labels("abs", []) == []


def test_budget_thins_the_steps_and_keeps_both_ends(tmp_path):
    run = read_run(relayed_run(tmp_path / "a", steps=400))
    (own,) = position_payload([run], 450 / NUMBERS)  # 45 numbers a row
    assert own["steps"][0] == 4
    assert own["steps"][-1] == 400
    assert len(own["steps"]) == 10
    assert all(len(table) == 10 for table in own["tables"].values())


def test_a_run_without_tables_or_with_unknown_bins_has_no_section(tmp_path):
    plain = read_run(make_run(tmp_path / "plain"))
    assert position_payload([plain], 1.0) == [{}]
    assert position_section([plain], [{}]) == ""
    assert truncation_section([plain], 1.0) == ""
    path = relayed_run(tmp_path / "a")
    (path / "position_edges.json").unlink()
    assert position_payload([read_run(path)], 1.0) == [{}]
    (path / "position_edges.json").write_text('{"rel": [0.5]}')
    assert position_payload([read_run(path)], 1.0) == [{}]


def test_figures_name_the_quantity_that_is_drawn(tmp_path):
    run = read_run(relayed_run(tmp_path / "a"))
    html = position_section([run], position_payload([run], 1.0))
    assert "<b>" not in html
    assert re.findall(r'data-position="(\w+)" data-quantities="([\w ]+)"', html) == [
        ("entropy", "entropy"), ("entropy_behavior", "surprisal_behavior"), ("raw_weight", "raw_weight"), ("own_quantity", "own_quantity")
    ]  # fmt: skip


def test_tokens_at_the_cuts_are_counted_escaped_and_capped(tmp_path):
    run = read_run(relayed_run(tmp_path / "a"))
    html = truncation_section([run], 1.0)
    assert "1,234 relayed responses, 3 with nothing kept, 2 ended inside what was kept" in html
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert html.count("cutbar") == 5
    assert 'title="token 9"><code>7</code></th><td><i class="cutbar" style="width:100.0%"></i></td><td class="sum">60 <small>60 %</small>' in html
    assert "<code>⏎</code>" in html
    assert "<code>␣a</code>" in html
    capped = truncation_section([run], 0.01)
    assert capped.count("cutbar") == 5
    many = {"cut": {**CUTS["length_ratio"], "first_new": [[str(i), i, 1] for i in range(20)]}}
    (run.path / "truncation_tokens.json").write_text(json.dumps(many))
    assert "17 more listed" in truncation_section([read_run(run.path)], 0.01)


@pytest.mark.parametrize("document", ["[]", '{"a": 1}', '{"a": {"responses": 1}}', "{bad", '{"a": {"responses": 1, "uncut": 0, "finished": 0}}'])
def test_a_damaged_file_of_tokens_is_left_out(tmp_path, document):
    path = relayed_run(tmp_path / "a")
    (path / "truncation_tokens.json").write_text(document)
    assert read_run(path).truncation == {}


def test_white_space_is_shown():
    assert visible(" \n\tx") == "␣⏎⇥x"
    assert visible("") == "(empty)"
    assert len(visible("y" * 100)) == 40


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROME is None, reason="no Chromium: install one or set CHROME")
def test_the_page_draws_curves_maps_and_the_boundary(tmp_path):
    runs = [relayed_run(tmp_path / n, seed=i) for i, n in enumerate(("a", "b"))]
    page = write_report(runs, tmp_path / "report.html")
    user = """<script>setTimeout(() => {
      const root = document.documentElement, set = (id, v) => { const e = document.getElementById(id); e.value = v; e.onchange(); };
      root.dataset.first = root.dataset.positions; root.dataset.maps = document.querySelectorAll(".map canvas").length;
      root.dataset.cut = document.querySelectorAll(".sample .cut").length;
      root.dataset.relay = document.querySelector(".sample .relay").textContent;
      const mark = document.querySelector(".response .cut");
      root.dataset.before = mark.previousSibling.className; root.dataset.behind = mark.nextSibling.className;
      set("position-axis", "abs"); root.dataset.second = root.dataset.positions;
      set("position-run", "all"); root.dataset.third = root.dataset.positions;
      set("position-axis", "rel"); root.dataset.fourth = root.dataset.positions;
    }, 50);</script>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (tmp_path / "used.html").write_text(text.replace("</body>", user + "</body>"))
    state, _ = opened(tmp_path / "used.html", tmp_path / "profile")
    assert state["errors"] == "[]"
    assert (state["first"], state["maps"]) == ("4", "4")
    assert (state["second"], state["third"], state["fourth"]) == ("1", "1", "4")
    assert int(state["cut"]) >= 1
    assert re.fullmatch(r"relayed here: 8 tokens kept \(version \d+\), \d+ written anew \(version \d+\)", state["relay"])
    assert (state["before"], state["behind"]) == ("tok prefix", "tok")
    state, _ = opened(page, tmp_path / "profile")  # as written, with its content policy
    assert (state["errors"], state["positions"]) == ("[]", "4")
