"""How sequence-level weights fare as responses grow, by quadrature; no training.

$ python experiments/length/weights.py experiments/length/results

Model: the log ratios of a response's T tokens are independent N(-k, 2k), so that E[ratio] = 1 and KL(behaviour || current) = k nats a token. Then
log W = sum of them is N(-kT, 2kT) and log W / T is N(-k, 2k / T). Each weight phi is what `policy_loss` gives; half of the responses have A > 0.

dead    share of responses with phi < 1e-3 (the metric weight/dead_frac)
useful  (E phi)^2 / E phi^2: the share of responses that the gradient is in effect averaged over; not shown where all are dead

Real drift is neither Gaussian nor independent: this says at which order of magnitude to look, and the metrics of a run say what is there.
"""

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nearpolicy import policy_loss

LENGTHS = (45, 256, 1024, 4096, 16384)
DRIFTS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""k, nats a token."""
DEAD = 1e-3
POINTS = 8001
REACH = 8.0
"""Standard deviations of log W on each side."""

PRODUCT, SQRT, MEAN = (lambda T: 1.0), (lambda T: math.sqrt(T)), (lambda T: float(T))
WEIGHTS: dict[str, tuple[str, dict[str, Any], Callable[[int], float]]] = {
    "VESPO": ("vespo", {}, PRODUCT),
    "VESPO, log W / sqrt T": ("vespo", {}, SQRT),
    "VESPO, log W / T": ("vespo", {}, MEAN),
    "TOPR": ("topr", {}, PRODUCT),
    "GSPO, paper's clip": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, MEAN),
    "GSPO, clip 0.015 / 0.02": ("gspo", {"clip_low": 1.5e-2, "clip_high": 2e-2}, MEAN),
}
"""Name -> (method, options, what log W is divided by at length T)."""


def phi(method: str, options: dict[str, Any], log_weight_n: torch.Tensor, sign: float) -> torch.Tensor:
    """The weight at these log ratios: one-token responses, whose product, mean and token ratio are one number."""
    highest = float(log_weight_n.max().clamp(min=0))  # log-probs are 0 at most
    logp = (log_weight_n[:, None] - highest).requires_grad_()
    out = policy_loss(method, logp=logp, logp_behavior=torch.full_like(logp, -highest), advantage=torch.full_like(log_weight_n, sign),
                      mask=torch.ones_like(logp, dtype=torch.bool), options=options)  # fmt: skip
    return out.weight.detach()[:, 0]


def health(name: str, length: int, drift: float) -> tuple[float, float]:
    """(dead, useful)."""
    method, options, divisor = WEIGHTS[name]
    z_n = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    mass_n = (-0.5 * z_n**2).exp()
    mass_n = mass_n / mass_n.sum()
    log_weight_n = (-drift * length + math.sqrt(2 * drift * length) * z_n) / divisor(length)
    dead = first = second = 0.0
    for sign in (1.0, -1.0):
        phi_n = phi(method, options, log_weight_n, sign)
        dead += 0.5 * float(mass_n[phi_n < DEAD].sum())
        first += 0.5 * float((mass_n * phi_n).sum())
        second += 0.5 * float((mass_n * phi_n**2).sum())
    return dead, first**2 / second if second else 0.0


def half_dead_at(name: str, drift: float) -> float:
    """Length at which half of the responses are dead, by bisection on a logarithmic scale; infinite above 10^8 tokens."""
    low, high = 1.0, 1e8
    if health(name, round(high), drift)[0] < 0.5:
        return math.inf
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if health(name, max(1, round(middle)), drift)[0] < 0.5 else (low, middle)
    return high


def table(value: Callable[[str, int, float], str]) -> list[str]:
    """Markdown: weights and lengths down, drifts across."""
    lines = ["| weight | tokens | " + " | ".join(f"{k:g} nats a token" for k in DRIFTS) + " |", "|---" * (len(DRIFTS) + 2) + "|"]
    return lines + [f"| {n} | {T:,} | " + " | ".join(value(n, T, k) for k in DRIFTS) + " |" for n in WEIGHTS for T in LENGTHS]


def main(out: Path) -> None:
    """Compute everything and write weights.csv and weights.md."""
    out.mkdir(parents=True, exist_ok=True)
    found = {(n, T, k): health(n, T, k) for n in WEIGHTS for T in LENGTHS for k in DRIFTS}
    with (out / "weights.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["weight", "tokens", "nats_per_token", "dead", "useful"])
        writer.writerows([n, T, k, f"{dead:.6f}", f"{useful:.6f}"] for (n, T, k), (dead, useful) in found.items())
    halves = ["| weight | " + " | ".join(f"{k:g} nats a token" for k in DRIFTS) + " |", "|---" * (len(DRIFTS) + 1) + "|"]
    for name in WEIGHTS:
        lengths = [half_dead_at(name, k) for k in DRIFTS]
        halves.append(f"| {name} | " + " | ".join("never" if math.isinf(T) else f"{T:,.0f}" for T in lengths) + " |")
    page = ["## Length at which half of the responses are dead", "", *halves, "", "## Dead responses", "",
            *table(lambda n, T, k: f"{100 * found[n, T, k][0]:.0f} %"), "", "## Useful share", "",
            *table(lambda n, T, k: f"{found[n, T, k][1]:.2f}" if found[n, T, k][0] < 0.999 else "–")]  # fmt: skip
    (out / "weights.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
