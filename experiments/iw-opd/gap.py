"""Continuation gap of the students of gap.toml, and of the model they start from:

$ nearpolicy sweep experiments/iw-opd/gap.toml --out runs/gap
$ python experiments/iw-opd/gap.py runs/gap experiments/iw-opd/results

Writes gap.csv and gap.md: the student's responses are cut at a share of their length and finished by the student and by the teacher; the gap is the
teacher's share of right answers minus the student's. Brackets hold the lowest and the highest of the seeds (of one model: its interval over prompts).
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearpolicy.teacher_jobs import evaluate_with_teacher

FRACTIONS, SAMPLES, TEACHER, START = "0.1,0.3,0.5,0.7,0.9", 8, "tiny-teacher", "start"


def rows_of(student: str, run: Path, checkpoint: Path | str) -> list[dict[str, Any]]:
    """One row for each fraction."""
    found = evaluate_with_teacher(checkpoint, TEACHER, [str(run / "run.toml")], gap=True, fractions=FRACTIONS, samples=SAMPLES, say=lambda _: None)
    return [
        {"variant": student, "run": run.name, "token_kl": round(found["kl"][0], 6), "fraction": row["fraction"],
         **{f"{side}{end}": round(row[side][i], 6) for side in ("student", "teacher", "gap") for i, end in enumerate(("", "_low", "_high"))}}
        for row in found["continuation_gap"]
    ]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: students down, fractions across."""
    fractions = sorted({r["fraction"] for r in rows})
    lines = ["| gap, teacher minus student | token KL | " + " | ".join(f"{f:.0%}" for f in fractions) + " |", "|---" * (len(fractions) + 2) + "|"]
    for variant in dict.fromkeys(r["variant"] for r in rows):
        cells = []
        for fraction in fractions:
            own = [r for r in rows if (r["variant"], r["fraction"]) == (variant, fraction)]
            gaps = [r["gap"] for r in own] if len(own) > 1 else [own[0]["gap"], own[0]["gap_low"], own[0]["gap_high"]]
            mean = sum(gaps) / len(gaps) if len(own) > 1 else own[0]["gap"]
            cells.append(f"{mean:+.3f} [{min(gaps):+.3f}, {max(gaps):+.3f}]")
        kls = [r["token_kl"] for r in rows if r["variant"] == variant]
        lines.append(f"| {variant} | {sum(kls) / len(kls):.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(sweep: Path, out: Path) -> None:
    """Measure every student and write the results."""
    out.mkdir(parents=True, exist_ok=True)
    with (sweep / "results" / "results.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    rows = rows_of(START, sweep / "runs" / runs[0]["run"], "tiny")
    for row in runs:
        run = sweep / "runs" / row["run"]
        rows += rows_of(row["variant"], run, max((run / "checkpoints").iterdir()))
    with (out / "gap.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (out / "gap.md").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
