"""Which charts the report draws, from which metrics. A chart appears when some run has one of its metrics; the rest go to "More metrics"."""

from collections.abc import Iterable
from dataclasses import dataclass

QUANTILES = ("p01", "p10", "p50", "p90", "p99")
"""Suffixes of the quantile columns of a histogram metric."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a chart. `label` tells the lines of a chart apart; the colour is the run's."""

    metric: str
    label: str = ""
    low: str | None = None
    """Metric of the lower end of its interval, drawn as a band up to `high`."""
    high: str | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. Later lines are dashed."""

    id: str
    section: str
    title: str
    lines: tuple[Line, ...] = ()
    kind: str = "lines"
    """`lines`, `quantiles`, `histogram`, `heatmap` (both of a histogram metric) or `passk` (pass@k against k)."""
    text: str | None = None
    """What it shows; None takes the text of its first metric from the run's table."""
    log: bool = False
    """Logarithmic where the values are positive and span more than two decades."""
    smooth: bool = True
    """False for counts that jump by rule, such as ages."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every column the chart reads."""
        if self.kind == "quantiles":
            return tuple(f"{line.metric}/{q}" for line in self.lines for q in QUANTILES)
        return tuple(m for line in self.lines for m in (line.metric, line.low, line.high) if m)


LEARNING, POLICY, WEIGHTS, RESPONSES = "Learning", "Policy", "Weights and staleness", "Responses and speed"
SECTIONS = (LEARNING, POLICY, WEIGHTS, RESPONSES)
"""Headings, in the order of the page."""

CHARTS = (
    Chart("reward", LEARNING, "Reward", (Line("reward/mean"),)),
    Chart(
        "pass1", LEARNING, "Held-out pass@1",
        (Line("eval/pass@1", "sampled", "eval/pass@1/low", "eval/pass@1/high"), Line("eval/greedy", "greedy")),
    ),
    Chart("passk", LEARNING, "pass@k at the last evaluation", kind="passk", text="share of held-out prompts solved by at least one of k responses"),
    Chart("entropy", POLICY, "Entropy", (Line("policy/entropy"),)),
    Chart(
        "kl", POLICY, "KL divergence",
        (Line("policy/kl_behavior_k3", "to behaviour, k3"), Line("policy/kl_behavior_k1", "to behaviour, k1"),
         Line("policy/kl_reference", "to reference")),
        text="how far the current policy is from the one that sampled the data, and from the reference",
    ),
    Chart(
        "kl-teacher", POLICY, "KL to the teacher",
        (Line("distill/kl", "mean log ratio"), Line("distill/kl_k3", "k3"), Line("distill/abs_gap", "mean |log ratio|")),
        text="token KL of the student to its teacher, estimated on the student's own tokens",
    ),
    Chart("log-perplexity", POLICY, "Rollout log-perplexity", (Line("response/log_perplexity"),)),
    Chart("objective", POLICY, "Objective", (Line("policy/objective"),)),
    Chart("grad-norm", POLICY, "Gradient norm", (Line("train/grad_norm"),), log=True),
    Chart("ess", WEIGHTS, "Raw effective sample size", (Line("weight/ess_raw"),)),
    Chart("dead", WEIGHTS, "Dead weights", (Line("weight/dead_frac"),)),
    Chart(
        "clip", WEIGHTS, "Clip share", (Line("ratio/outside_frac", "|ratio − 1| > 0.2"), Line("ratio/clip_frac", "gradient set to zero")),
        text="trained tokens outside the reference band, and those whose gradient the method sets to zero",
    ),
    Chart("age", WEIGHTS, "Age of the data", (Line("stale/age_mean", "mean"), Line("stale/age_max", "largest")), smooth=False),
    Chart(
        "log-weight", WEIGHTS, "Sequence log weight", (Line("weight/log_sequence"),), kind="quantiles",
        text="log of the product ratio of each response: median, 10-90 % and 1-99 % bands",
    ),
    Chart(
        "log-ratio", WEIGHTS, "Token log ratio", (Line("ratio/log_token"),), kind="quantiles",
        text="log ratio of each trained token: median, 10-90 % and 1-99 % bands",
    ),
    Chart(
        "mismatch", WEIGHTS, "Mismatch of trainer and engine", (Line("mismatch/abs"),), kind="quantiles",
        text="|trainer's log-prob - engine's| of tokens that the weights of the update wrote themselves: median, 10-90 % and 1-99 % bands",
    ),
    Chart(
        "mismatch-kl", WEIGHTS, "KL between engine and trainer",
        (Line("mismatch/kl_k3", "k3"), Line("mismatch/kl_k1", "k1"), Line("mismatch/abs_mean", "mean |difference|")), log=True,
        text="at tokens that the weights of the update wrote themselves; 0 in exact arithmetic",
    ),
    Chart("log-weight-histogram", WEIGHTS, "Sequence log weight, first and last steps", (Line("weight/log_sequence"),), kind="histogram",
          text="share of responses; dashed: first tenth of the steps, filled: last tenth"),
    Chart("log-weight-heatmap", WEIGHTS, "Sequence log weight over steps", (Line("weight/log_sequence"),), kind="heatmap",
          text="stronger colour means a larger share of the responses of that step"),
    Chart("length", RESPONSES, "Response length", (Line("response/length", "training"), Line("eval/length", "held-out"))),
    Chart("truncated", RESPONSES, "Truncated responses", (Line("response/truncated_frac"),)),
    Chart("tokens", RESPONSES, "Throughput", (Line("time/tokens_per_s"),)),
    Chart("step-time", RESPONSES, "Time of an update", (Line("time/step_s"),), log=True),
)  # fmt: skip
"""The named charts."""

TIME_PARTS = (
    ("time/sample_s", "sampling"), ("time/score_s", "scoring"), ("time/logprob_s", "log-probs"),
    ("time/teacher_s", "teacher"), ("time/update_s", "update"),
    ("time/eval_s", "evaluation"),
)  # fmt: skip
"""Parts of the wall time and their names."""


def leftovers(names: Iterable[str]) -> list[Chart]:
    """One plain chart for each column that no named chart draws; quantile columns of one metric share a chart."""
    shown = {m for chart in CHARTS for m in chart.metrics}
    known = set(names)
    rest = sorted(n for n in known if n not in shown and not (n.startswith("eval/pass@") and _is_k(n)) and not _is_end(n, known))
    spread = {n.rpartition("/")[0] for n in rest if n.endswith("/p50") and n.removesuffix("p50") + "p01" in rest}
    charts = [Chart(f"more:{n}", "more", n, (Line(n),), kind="quantiles") for n in sorted(spread)]
    return charts + [Chart(f"more:{n}", "more", n, (Line(n),)) for n in rest if n.rpartition("/")[0] not in spread]


def _is_end(name: str, known: set[str]) -> bool:
    """An end of the band of another column, drawn with it."""
    base, _, end = name.rpartition("/")
    return end in ("low", "high") and base in known


def _is_k(name: str) -> bool:
    return name.removeprefix("eval/pass@").split("/")[0].isdigit()
