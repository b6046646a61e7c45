"""Relay inference curves and tables by position from the runs of inference.toml (the paper's Figures 2 to 4):

$ nearpolicy sweep experiments/thinking-seeds/inference.toml --out runs/inference --results experiments/thinking-seeds/results-inference
$ python experiments/thinking-seeds/curves.py runs/inference experiments/thinking-seeds/results-inference

Adds relay_inference.csv and .md, positions.csv and .md to what the sweep wrote. Intervals in the tables: lowest and highest of the seeds.
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nearpolicy.jobs import evaluate_checkpoint, relay_checkpoints

KS = (1, 4, 16, 64)
FRACTIONS = "0.1,0.25,0.5"
TEMPERATURES = (1.5, 2.0)
EARLY, MIDDLE, LAST = "warm start", "update 48", "update 192"
SHOWN = ("entropy", "clip_frac", "abs_log_ratio", "gradient_share")
"""Quantities by position."""


def inference(run: Path, warm: Path) -> list[dict[str, Any]]:
    """pass@k of every scheme for one on-policy run: single models, temperature, relayed, and the reversed relay."""
    models = {EARLY: warm, MIDDLE: run / "checkpoints" / "step-000048", LAST: run / "checkpoints" / "step-000192"}
    ks, rows = ",".join(map(str, KS)), []

    def add(scheme: str, values: dict[int, float]) -> None:
        rows.append({"run": run.name, "scheme": scheme, **{f"pass@{k}": round(v, 6) for k, v in values.items()}})

    for first, last in ((EARLY, LAST), (MIDDLE, LAST), (LAST, EARLY)):
        shares = FRACTIONS if first != LAST else "0.5"
        made = relay_checkpoints(models[last], models[first], task_of(run), fractions=shares, samples=max(KS), ks=ks,
                                 temperature=1.0, say=lambda _: None)["eval"]  # fmt: skip
        curves = {name: {k: by_k[str(k)]["mean"] for k in KS} for name, by_k in made["curves"].items()}
        if (first, last) == (EARLY, LAST):
            add(f"{EARLY} alone", curves["earlier"])
            add(f"{LAST} alone", curves["single"])
        elif first == MIDDLE:
            add(f"{MIDDLE} alone", curves["earlier"])
        for name, values in curves.items():
            if name.startswith("relay"):
                add(f"{first} -> {last}, {float(name.split()[1]):.0%}", values)
    for temperature in TEMPERATURES:
        found = evaluate_checkpoint(models[LAST], task_of(run), samples=max(KS), ks=ks, temperature=temperature, say=lambda _: None)
        add(f"{LAST} alone, temperature {temperature:g}", {k: found[f"eval/pass@{k}"] for k in KS})
    return rows


def task_of(run: Path) -> list[str]:
    """The run's configuration file, so that models which lie outside it see its task."""
    return [str(run / "run.toml")]


def positions(run: Path, setting: str) -> list[dict[str, Any]]:
    """Mean of each quantity in each tenth of the response, over the updates of each third of the run."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        found = [row for row in map(json.loads, file) if row["kind"] == "train" and any(n.startswith("position/") for n in row)]
    last = found[-1]["step"]
    rows = []
    for third in range(3):
        here = [r for r in found if third * last / 3 < r["step"] <= (third + 1) * last / 3]
        for quantity in SHOWN:
            lists = [r[f"position/{quantity}/rel"] for r in here if f"position/{quantity}/rel" in r]
            for place, values in enumerate(zip(*lists, strict=True)):
                known = [v for v in values if v is not None]
                if known:
                    mean = sum(known) / len(known)
                    rows.append({"setting": setting, "run": run.name, "third": third + 1, "quantity": quantity, "tenth": place + 1, "mean": mean})
    return rows


def spread(values: Iterable[float], form: str = "{:.3f}") -> str:
    """Mean, lowest and highest."""
    own = list(values)
    mean, low, high = (form.format(v) for v in (sum(own) / len(own), min(own), max(own)))
    return f"{mean} [{low}, {high}]"


def inference_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: schemes down, k across."""
    lines = ["| scheme | " + " | ".join(f"pass@{k}" for k in KS) + " |", "|---" * (len(KS) + 1) + "|"]
    for scheme in dict.fromkeys(r["scheme"] for r in rows):
        own = [r for r in rows if r["scheme"] == scheme]
        lines.append(f"| {scheme} | " + " | ".join(spread(r[f"pass@{k}"] for r in own) for k in KS) + " |")
    return "\n".join(lines)


def position_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table for each quantity, settings and thirds of the run down, tenths of the response across."""
    parts = []
    for quantity in SHOWN:
        lines = [f"**{quantity}**", "", "| setting | third of the run | " + " | ".join(str(t) for t in range(1, 11)) + " |", "|---" * 12 + "|"]
        for setting in dict.fromkeys(r["setting"] for r in rows):
            for third in (1, 2, 3):
                cells = []
                for tenth in range(1, 11):
                    own = [r["mean"] for r in rows if (r["setting"], r["third"], r["quantity"], r["tenth"]) == (setting, third, quantity, tenth)]
                    cells.append(f"{sum(own) / len(own):.3f}" if own else "")
                lines.append(f"| {setting} | {third} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]], table: str) -> None:
    """A CSV file with one row for each number and a page with the means."""
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / f"{name}.md").write_text(table + "\n", encoding="utf-8")


def main(sweep: Path, out: Path) -> None:
    """Evaluate every on-policy run, read every run's tables, write the results."""
    with (out / "results.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    placed, curves = [], []
    for row in runs:
        run = sweep / "runs" / Path(row["run"]).name
        placed += positions(run, row["setting"])
        if row["setting"] == "on-policy":
            curves += inference(run, sweep / "warm_starts" / ("first" if "_first_" in run.name else "second"))
            print(run.name, flush=True)
    write(out, "relay_inference", curves, inference_table(curves))
    write(out, "positions", placed, position_table(placed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
