"""The page in headless Chromium, from a file, without a network: charts are drawn, samples are shown, no script fails."""

import os
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path

import pytest
from conftest import FULL_CHARTS, make_run
from test_report import ATTACK, attacked

from nearpolicy.report import write_report

CHROME = os.environ.get("CHROME") or next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9", "--virtual-time-budget=3000", "--dump-dom",
)  # fmt: skip
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.skipif(CHROME is None, reason="no Chromium: install one or set CHROME")]


def opened(page: Path, profile: Path, *flags: str) -> tuple[dict[str, str], str]:
    """Data attributes of the root element after rendering, and the whole document."""
    done = subprocess.run([CHROME, *FLAGS, *flags, f"--user-data-dir={profile}", page.as_uri()], capture_output=True, timeout=120, check=True)
    dom = done.stdout.decode()
    return {k: unescape(v) for k, v in re.findall(r'data-([a-z]+)="([^"]*)"', re.search(r"<html[^>]*>", dom)[0])}, dom


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_chart_is_drawn(tmp_path, theme, record_property):
    runs = [make_run(tmp_path / n, seed=i, steps=64, method=n) for i, n in enumerate(("vespo", "grpo"))][: 1 if theme == "light" else 2]
    page = write_report(runs, tmp_path / "report.html")
    start = time.monotonic()
    state, dom = opened(page, tmp_path / "profile", f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}")
    record_property("open_s", time.monotonic() - start)
    record_property("render_ms", state.get("milliseconds"))
    assert state["errors"] == "[]"
    assert state["ready"] == "yes"
    assert int(state["charts"]) == len(FULL_CHARTS)
    # Every line chart is a uPlot canvas; the heat map has one canvas for each run.
    assert dom.count('class="uplot') == len(FULL_CHARTS) - 1
    assert dom.count("<canvas") == len(FULL_CHARTS) - 1 + len(runs)
    assert dom.count('class="sample"') == int(state["samples"]) > 3
    assert dom.count('class="tok prefix"') > 0


def test_a_run_of_one_update_and_gaps_draws_what_it_has(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step":1,"kind":"train","time":1,"reward/mean":0.5,"policy/entropy":null,"train/grad_norm":0}\n')
    state, dom = opened(write_report([run], tmp_path / "report.html"), tmp_path / "profile")
    assert (state["errors"], state["charts"]) == ("[]", "2")
    assert dom.count('class="uplot') == 2


def test_what_a_run_wrote_is_inert(tmp_path):
    run = attacked(tmp_path / "run")
    state, dom = opened(write_report([run], tmp_path / "report.html"), tmp_path / "profile")
    assert "owned" not in state
    assert state["errors"] == "[]"
    assert "<img" not in dom
    assert ATTACK in unescape(re.sub(r"</?(span|pre)[^>]*>", "", dom))


USER = """<script>
const figure = (id) => document.querySelector(`figure[data-chart="${id}"]`), text = (id) => figure(id).querySelector(".readout").textContent;
const root = document.documentElement;
const set = (id, value, event) => { const e = document.getElementById(id); e.value = value; e.dispatchEvent(new Event(event)); };
setTimeout(() => {
  figure("entropy").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  figure("entropy").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  root.dataset.own = text("entropy"); root.dataset.synced = text("ess");
  const token = document.querySelector("#sample-list .tok");
  token.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  root.dataset.tip = document.getElementById("tip").textContent;
  set("sample-colour", "logp", "change"); set("sample-colour", "version", "change"); set("sample-run", "1", "change"); set("smoothing", "0", "input");
  document.querySelector("button.run").click();
  root.dataset.after = root.dataset.charts;
  document.getElementById("more").open = true;
}, 50);
</script>"""


def test_keyboard_hover_legend_and_controls(tmp_path):
    runs = [make_run(tmp_path / n, seed=i, steps=24, method=n) for i, n in enumerate(("vespo", "grpo"))]
    page = write_report(runs, tmp_path / "report.html")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    page.write_text(text.replace("</body>", USER + "</body>"))
    state, dom = opened(page, tmp_path / "profile")
    assert state["errors"] == "[]"
    assert state["own"].startswith("step 1")
    assert state["synced"].startswith("step 1")
    assert state["own"] != state["synced"]
    assert re.fullmatch(r'"1"\ntoken 0 of \d+( \(prefix\))?\nlog-prob -?[\d.]+\nweight [\d.]+\nversion 0', state["tip"])
    assert int(state["after"]) == len(FULL_CHARTS)
    assert 'aria-pressed="false"' in dom
    assert int(state["charts"]) == len(FULL_CHARTS) + len(re.findall(r'data-chart="more:', dom)) > len(FULL_CHARTS)
