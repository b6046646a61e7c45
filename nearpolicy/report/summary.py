"""Numbers read at a glance: the verdict on each run, the table of key numbers, shares of the wall time, settings that differ."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nearpolicy.report.charts import TIME_PARTS
from nearpolicy.report.read import Column, Run


class Verdict(NamedTuple):
    """The one line that says how a run went."""

    name: str
    status: str
    facts: list[str]
    """Method, schedule, N, steps, wall time: those that are known."""
    outcome: str
    """Start and end of pass@1 (else of the reward), or empty."""
    outcome_label: str
    alarms: str


class Row(NamedTuple):
    """One row of the table of key numbers."""

    label: str
    unit: str
    text: str
    cells: list[str]
    """One a run; an en dash where the run lacks the metric."""


KEY_NUMBERS = (
    ("reward/mean", "Reward", "ends"), ("eval/pass@1", "Held-out pass@1", "evaluations"), ("eval/greedy", "Held-out greedy", "evaluations"),
    ("policy/entropy", "Entropy", "ends"), ("policy/kl_behavior_k3", "KL to behaviour (k3)", "ends"),
    ("weight/ess_raw", "Raw effective sample size", "lowest"), ("weight/dead_frac", "Dead weights", "highest"),
    ("ratio/outside_frac", "Ratio outside the reference band", "highest"), ("ratio/clip_frac", "Gradient set to zero", "highest"),
    ("train/grad_norm", "Gradient norm", "highest"), ("response/length", "Response length", "ends"),
    ("response/truncated_frac", "Truncated responses", "ends"), ("stale/age_max", "Largest age", "highest"),
    ("data/tokens_sampled", "Tokens sampled", "total"), ("time/tokens_per_s", "Throughput", "median"),
    ("time/memory_mb", "Memory", "highest"),
)  # fmt: skip
"""Metric, label and how a run's column becomes one cell."""


def verdict(run: Run) -> Verdict:
    """How the run went, in words and numbers."""
    updates = run.setting("schedule.updates_per_rollout")
    planned = run.setting("train.steps")
    steps = f"{run.steps:,} of {planned:,} updates" if isinstance(planned, int) and planned > run.steps else f"{run.steps:,} updates"
    facts = [str(v) for v in (run.setting("method.name"), run.setting("schedule.kind")) if v]
    facts += [f"N = {updates}"] if updates else []
    names = sorted({a.alarm for a in run.alarms})
    count = len(run.alarms)
    alarms = f"{count} alarm{'s' if count > 1 else ''}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if count else "no alarms"
    outcome, label = "", ""
    for metric, word, kind in (("eval/pass@1", "pass@1", "evaluations"), ("reward/mean", "reward", "ends")):
        if not outcome and metric in run.columns and run.columns[metric].finite:
            outcome, label = cell(run, metric, kind), word
    return Verdict(run.name, run.status, [*facts, steps, duration(run.seconds)], outcome, label, alarms)


def key_numbers(runs: Sequence[Run]) -> list[Row]:
    """The rows of which at least one run has the metric."""
    rows = []
    for metric, label, kind in KEY_NUMBERS:
        if any(metric in run.columns and run.columns[metric].finite for run in runs):
            spec = next((run.spec(metric) for run in runs if run.spec(metric).text), runs[0].spec(metric))
            suffix = {"lowest": ", lowest", "highest": ", highest", "median": ", median"}.get(kind, "")
            rows.append(Row(label + suffix, "" if spec.unit in ("fraction", "value", "norm", "reward") else spec.unit, spec.text,
                            [cell(run, metric, kind) for run in runs]))  # fmt: skip
    return rows


def cell(run: Run, metric: str, kind: str) -> str:
    """One cell. `ends`: means over the first and last tenth of the steps; `evaluations`: first and last value with their intervals."""
    column = run.columns.get(metric)
    if column is None or not column.finite:
        return "–"
    values, percent = column.finite, run.spec(metric).unit == "fraction"
    if kind == "ends":
        tenth = max(math.ceil(len(values) / 10), 1)
        ends = [sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth]
        return " → ".join(number(v, percent=percent) for v in (ends if len(values) > 1 else ends[:1]))
    if kind == "evaluations":
        ends_at = [i for i, v in enumerate(column.value) if v is not None]
        return " → ".join(_with_interval(run, metric, column.step[i], column.value[i] or 0.0) for i in dict.fromkeys((ends_at[0], ends_at[-1])))
    if kind in ("lowest", "highest"):
        value = (min if kind == "lowest" else max)(values)
        return f"{number(value, percent=percent)} at step {column.step[column.value.index(value)]:,}"
    return number(values[-1] if kind == "total" else sorted(values)[len(values) // 2], percent=percent)


def _with_interval(run: Run, metric: str, step: int, value: float) -> str:
    low, high = (_at(run.columns.get(f"{metric}/{end}"), step) for end in ("low", "high"))
    interval = f" [{100 * low:.3g}, {100 * high:.3g}]" if low is not None and high is not None else ""
    return f"{number(value, percent=True)}{interval}"


def _at(column: Column | None, step: int) -> float | None:
    return column.value[column.step.index(step)] if column is not None and step in column.step else None


def number(value: float, *, percent: bool = False) -> str:
    """Three significant digits; thousands as such; fractions in percent when asked."""
    if percent:
        return f"{100 * value:.3g} %"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 12 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def time_shares(run: Run) -> list[tuple[str, float]]:
    """(part, seconds) of the whole run, empty parts left out; `other` is what the updates took beyond their named parts."""
    total = {label: sum(run.columns[m].finite) for m, label in TIME_PARTS if m in run.columns}
    inside = sum(seconds for label, seconds in total.items() if label != "evaluation")
    if total and "time/step_s" in run.columns:
        total["other"] = max(sum(run.columns["time/step_s"].finite) - inside, 0.0)
    whole = sum(total.values())
    return [(label, seconds) for label, seconds in total.items() if whole and seconds / whole >= 0.001]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings that are not equal in all runs: (dotted key, value in each run; an en dash where it is not set)."""
    flat = [flatten(run.config) for run in runs]
    keys = sorted(set().union(*flat)) if flat else []
    return [(k, [str(f.get(k, "–")) for f in flat]) for k in keys if len({str(f.get(k, "–")) for f in flat}) > 1]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; lists stay values."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return out
