"""Alarms: which watched quantity left its band, and at which step. Early signs of collapse, before the reward shows it."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearpolicy.diagnostics.mismatch import REFUSE_KL


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a metric should stay. Relative bounds are multiples of the median of its first `settle` values."""

    metric: str
    low: float | None = None
    high: float | None = None
    relative_low: float | None = None
    relative_high: float | None = None
    settle: int = 5
    patience: int = 1
    """Values in a row outside the band before the alarm: one odd mini-batch is no collapse."""
    means: str = ""
    """What leaving the band usually means and what to try."""


BANDS = (
    Band(metric="policy/entropy", relative_low=0.05, relative_high=4.0, means="the policy is losing its diversity (or its shape): lower train.lr"),
    Band(metric="response/length", relative_low=0.5, relative_high=2.0, means="responses are shrinking or running on"),
    Band(metric="response/repetition", high=0.5, means="responses loop"),
    Band(metric="weight/ess_raw", low=0.05, patience=4, means="a few responses carry the update: lower N, or use a kernel that tempers weights"),
    Band(metric="weight/dead_frac", high=0.5, means="most sequence weights have died, the step trains on nothing: lower N or method.length_norm"),
    Band(metric="train/grad_norm", relative_high=20.0, settle=10, patience=2, means="a gradient spike: lower train.lr or train.grad_clip"),
    Band(metric="reward/unscored_frac", high=0.5, means="most responses got no reward: look at the reward function"),
    Band(metric="policy/kl_behavior_k3", high=1.0, means="the policy has moved far from what it trains on"),
    Band(metric="mismatch/kl_k3", high=REFUSE_KL, patience=2, means="trainer and engine disagree under equal weights: run nearpolicy health"),
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric left its band."""

    step: int
    metric: str
    value: float
    message: str


class Alarms:
    """Feed it every update's metrics; it answers with new alarms. Fires once when a band is left, again only after a return."""

    def __init__(self, bands: tuple[Band, ...] = BANDS) -> None:
        self.bands = bands
        self._first: dict[str, list[float]] = {}
        self._outside: dict[str, int] = {}

    def watch(self, step: int, values: Mapping[str, Any]) -> list[Alarm]:
        """New alarms at this step; a missing or NaN value is no news."""
        out = []
        for band in self.bands:
            value = values.get(band.metric)
            if not isinstance(value, float | int) or math.isnan(value):
                continue
            first = self._first.setdefault(band.metric, [])
            if len(first) < band.settle:
                first.append(float(value))
            text = self._outside_text(band, float(value), first)
            if text is None:
                self._outside.pop(band.metric, None)
                continue
            self._outside[band.metric] = self._outside.get(band.metric, 0) + 1
            if self._outside[band.metric] == band.patience:
                out.append(Alarm(step, band.metric, float(value), f"{band.metric} = {value:.4g} {text} at step {step}: {band.means}"))
        return out

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"first": self._first, "outside": dict(self._outside)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._first = {k: list(v) for k, v in state["first"].items()}
        self._outside = {k: int(n) for k, n in state["outside"].items()}

    @staticmethod
    def _outside_text(band: Band, value: float, first: list[float]) -> str | None:
        if band.low is not None and value < band.low:
            return f"fell below {band.low:g}"
        if band.high is not None and value > band.high:
            return f"rose above {band.high:g}"
        if len(first) < band.settle:
            return None
        start = statistics.median(first)
        if band.relative_low is not None and value < band.relative_low * start:
            return f"fell below {band.relative_low:g} of its start ({start:.4g})"
        if band.relative_high is not None and value > band.relative_high * start:
            return f"rose above {band.relative_high:g} times its start ({start:.4g})"
        return None
