"""The control of relay training: diversity against an earlier on-policy checkpoint of the same pass@1.

$ nearpolicy sweep experiments/thinking-seeds/thinking-seeds.toml --out runs/seeds --results experiments/thinking-seeds/results
$ python experiments/thinking-seeds/matched.py runs/seeds experiments/thinking-seeds/results

and the same for rates.toml into results-rates.

Each run's last pass@1, pass@4, pass@16 and entropy, beside the pass@16 that the on-policy run of its seed and learning rate had when it first
reached that pass@1 (linear between evaluations). Where on-policy never got so far there is nothing to compare with. Adds matched.csv and .md;
brackets hold the lowest and the highest of the seeds.
"""

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KS = (1, 4, 16)
BASELINE = "on-policy"


def curve(run: Path) -> dict[str, list[float]]:
    """pass@k at every evaluation, and the entropy of every update."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        rows = list(map(json.loads, file))
    found = {f"pass@{k}": [r[f"eval/pass@{k}"] for r in rows if f"eval/pass@{k}" in r] for k in KS}
    return found | {"entropy": [r["policy/entropy"] for r in rows if "policy/entropy" in r]}


def at_equal_score(base: dict[str, list[float]], score: float) -> float | None:
    """pass@16 of a curve where its pass@1 first reaches `score`; None where it never does."""
    one, many = base["pass@1"], base["pass@16"]
    for e, value in enumerate(one):
        if value >= score:
            if e == 0:
                return many[0]
            share = (score - one[e - 1]) / (value - one[e - 1])
            return many[e - 1] + share * (many[e] - many[e - 1])
    return None


def rows_of(sweep: Path, results: Path) -> list[dict[str, Any]]:
    """One row for each finished run of results.csv."""
    with results.open(encoding="utf-8") as file:
        runs = [r for r in csv.DictReader(file) if r["status"] == "finished"]
    curves = {r["run"]: curve(sweep / "runs" / r["run"]) for r in runs}
    base = {(r.get("lr"), r["seed"], r["group"]): curves[r["run"]] for r in runs if r["setting"] == BASELINE}
    out = []
    for r in runs:
        own = curves[r["run"]]
        last = {name: values[-1] for name, values in own.items() if name != "entropy"}
        quarter = own["entropy"][-len(own["entropy"]) // 4 :]
        matched = at_equal_score(base[r.get("lr"), r["seed"], r["group"]], last["pass@1"]) if r["setting"] != BASELINE else None
        out.append({"setting": r["setting"], "lr": r.get("lr", ""), "seed": r["seed"], "group": r["group"], "run": r["run"], **last,
                    "entropy": sum(quarter) / len(quarter), "on-policy pass@16": matched})  # fmt: skip
    return out


def spread(values: Iterable[float | None], form: str = "{:.3f}") -> str:
    """Mean, lowest, highest, and how many there are if some are missing."""
    listed = list(values)
    own = [v for v in listed if v is not None]
    if not own:
        return "–"
    mean, low, high = (form.format(v) for v in (sum(own) / len(own), min(own), max(own)))
    return f"{mean} [{low}, {high}]" + (f" ({len(own)} of {len(listed)})" if len(own) < len(listed) else "")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one table for each learning rate, if there are several."""
    parts = []
    for lr in dict.fromkeys(r["lr"] for r in rows):
        heads = ["setting", *(f"pass@{k}" for k in KS), "entropy, last quarter", "pass@16 minus on-policy's at that pass@1"]
        lines = [*([f"**Learning rate {lr}**", ""] if lr else []), "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for setting in dict.fromkeys(r["setting"] for r in rows):
            own = [r for r in rows if (r["setting"], r["lr"]) == (setting, lr)]
            gain = [None if r["on-policy pass@16"] is None else r["pass@16"] - r["on-policy pass@16"] for r in own]
            cells = [spread(r[f"pass@{k}"] for r in own) for k in KS] + [spread(r["entropy"] for r in own), spread(gain, "{:+.3f}")]
            lines.append(f"| {setting} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(sweep: Path, out: Path) -> None:
    """Read every run and write the table."""
    rows = rows_of(sweep, out / "results.csv")
    with (out / "matched.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "matched.md").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
