"""What happens where in the response: every quantity of the update by relative position and by token index, for every method.

Each trained token falls into one bin of each axis: `rel`, tenths of its own response (edge rule: floor(10 t / T)), and `abs`, its index between
powers of two. A table holds sums alone, so micro-batches, ranks and updates merge by adding. Sources of the reading: entropy and clip share by
position, Thinking Seeds (arXiv 2601.21476, Figures 2 and 4); drift along the response, arXiv 2606.22600.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearpolicy.diagnostics.mismatch import gap
from nearpolicy.metrics import Layout, Table, to_floats
from nearpolicy.objective import position, ratio
from nearpolicy.objective.measure import Seen
from nearpolicy.objective.stats import kl_estimate, logit_gradient_norm
from nearpolicy.rollout import Batch

NAME = "position"
"""Key of the table among an update's metrics, and head of the names of its columns."""
RELATIVE_BINS = 10
"""Bins of relative position: tenths."""
EDGES = {"rel": [k / RELATIVE_BINS for k in range(1, RELATIVE_BINS)], "abs": [float(e) for e in position.TOKEN_EDGES]}
"""Inner borders of the bins of each axis: where bin 1, 2, ... begin, in responses and in tokens."""

LAYOUT = Layout(
    rows=("tokens", "entropy", "clipped", "weight", "advantage", "gradient",
          "own", "surprisal", "log_ratio", "abs_log_ratio", "raw_weight", "age", "entropy_known", "entropy_behavior",
          "age_zero", "mismatch", "mismatch_kl"),
    axes={"rel": slice(0, RELATIVE_BINS), "abs": slice(RELATIVE_BINS, RELATIVE_BINS + len(position.TOKEN_EDGES) + 1)},
    reads={
        "entropy": ("entropy", "tokens"),
        "surprisal_behavior": ("surprisal", "own"),
        "entropy_behavior": ("entropy_behavior", "entropy_known"),
        "clip_frac": ("clipped", "tokens"),
        "log_ratio": ("log_ratio", "own"),
        "abs_log_ratio": ("abs_log_ratio", "own"),
        "raw_weight": ("raw_weight", "own"),
        "weight": ("weight", "tokens"),
        "age": ("age", "own"),
        "mismatch": ("mismatch", "age_zero"),
        "mismatch_kl": ("mismatch_kl", "age_zero"),
        "weight_mass": ("weight", None),
        "advantage_mass": ("advantage", None),
        "gradient_share": ("gradient", None),
    },
)  # fmt: skip
"""`tokens`, `own`, `entropy_known` and `age_zero` count trained tokens, those with a behaviour policy, those with a stored behaviour entropy and
those that the weights of this update wrote themselves; the rest are sums. From `own` on, rows are over `own` tokens alone."""

TEACHER_LAYOUT = Layout(
    rows=(*LAYOUT.rows, "taught", "kl", "abs_gap", "prefix_student", "prefix_teacher", "prefix_ratio", "signal_weight"),
    axes=LAYOUT.axes,
    reads={
        **LAYOUT.reads,
        "kl_teacher": ("kl", "taught"),
        "abs_gap_teacher": ("abs_gap", "taught"),
        "prefix_logp_student": ("prefix_student", "taught"),
        "prefix_logp_teacher": ("prefix_teacher", "taught"),
        "prefix_log_ratio": ("prefix_ratio", "taught"),
        "signal_weight": ("signal_weight", "taught"),
    },
)
"""With a teacher. The prefix of a token is the response before it: sums of log-probs from the first token to the one before."""
LAYOUTS = (LAYOUT, TEACHER_LAYOUT)


class Taught(NamedTuple):
    """The two sides of a distillation signal, [B, T], and the weight on it (None: 1)."""

    teacher_BT: Tensor
    student_BT: Tensor
    weight_BT: Tensor | None = None


@torch.no_grad()
def position_table(
    batch: Batch, seen: Seen, *, logp_BT: Tensor, entropy_BT: Tensor, step: int, taught: Taught | None = None
) -> Table:  # fmt: skip
    """The sums of one micro-batch.

    Args:
        seen: of the loss of this micro-batch (`policy_loss(...).seen`).
        logp_BT, entropy_BT: of the current policy; detached here.
        step: updates that the current policy contains: a token's age is `step` minus its version.
        taught: with it the table has `TEACHER_LAYOUT`.
    The gradient is that of the method's loss at the logits of the token, |coefficient| * |d logp / d logits| by
    `objective.stats.logit_gradient_norm`; penalties added to the loss (KL, entropy bonus) are left out.
    """
    own_BT, mask_BT = seen.own_BT, seen.mask_BT
    trained_N = mask_BT.reshape(-1).nonzero()[:, 0]

    def take(column: Tensor) -> Tensor:
        return column.expand_as(mask_BT).reshape(-1).index_select(0, trained_N)

    log_ratio_N, entropy_N, logp_N, behavior_N = take(seen.log_ratio_BT), take(entropy_BT), take(logp_BT.detach()), take(batch.logp_behavior_BT)
    age_N = step - take(batch.version_BT)
    gap_N = take(gap(logp_BT, batch.logp_behavior_BT, batch.version_BT == step))
    columns: dict[str, Tensor | float] = {
        "tokens": 1.0,
        "entropy": entropy_N,
        "clipped": take(seen.phi == 0),
        "weight": take(seen.weight_BT),
        "advantage": take(seen.advantage_BT).abs(),
        "gradient": take(seen.coefficient_BT).abs() * logit_gradient_norm(logp_N, entropy_N),
        "own": take(own_BT),
        "surprisal": -behavior_N,
        "log_ratio": log_ratio_N,
        "abs_log_ratio": log_ratio_N.abs(),
        "raw_weight": take(seen.log_weight.value).exp(),
        "age": age_N,
        "entropy_known": 0.0,
        "entropy_behavior": 0.0,
        "age_zero": age_N == 0,
        "mismatch": gap_N.abs(),
        "mismatch_kl": kl_estimate(torch.zeros_like(gap_N), gap_N, estimator="k3"),
    }
    if batch.entropy_behavior_BT is not None:
        stored_N = take(batch.entropy_behavior_BT)
        columns["entropy_known"] = stored_N.isfinite()
        columns["entropy_behavior"] = stored_N.nan_to_num(nan=0.0)  # a prefix that came without its entropies
    layout = LAYOUT
    if taught is not None:
        layout = TEACHER_LAYOUT
        columns |= {name: take(column) for name, column in _teacher_columns(taught, batch.response_mask_BT).items()} | {"taught": 1.0}
    values_RN = torch.empty(len(layout.rows), len(trained_N), dtype=torch.float64, device=mask_BT.device)
    for row_N, name in zip(values_RN, layout.rows, strict=True):
        row_N.copy_(column) if isinstance(column := columns[name], Tensor) else row_N.fill_(column)
    if own_BT is not mask_BT:  # demonstrations have no behaviour policy, ratio or age
        values_RN[LAYOUT.rows.index("own") :].masked_fill_(~take(own_BT), 0.0)
    index_N = take(batch.position_BT)
    relative_N = position.bin_of(index_N, take(batch.response_mask_BT.sum(1, keepdim=True)), RELATIVE_BINS)
    return Table(_sums(values_RN, relative_N, position.token_bin_of(index_N)), layout)


def _teacher_columns(taught: Taught, response_mask_BT: Tensor) -> dict[str, Tensor]:
    """Discrepancy of each token and drift of what stands before it, over the whole response, trained or not."""
    gap_BT = ratio.log_ratio(taught.teacher_BT, taught.student_BT, mask_BT=response_mask_BT).double()
    student_BT, teacher_BT = (x.double().masked_fill(~response_mask_BT, 0.0) for x in (taught.student_BT, taught.teacher_BT))
    return {
        "kl": -gap_BT,
        "abs_gap": gap_BT.abs(),
        "prefix_student": ratio.before(student_BT),
        "prefix_teacher": ratio.before(teacher_BT),
        "prefix_ratio": ratio.before(gap_BT),
        "signal_weight": torch.ones_like(gap_BT) if taught.weight_BT is None else taught.weight_BT,
    }


def _sums(values_RN: Tensor, relative_N: Tensor, token_N: Tensor) -> Tensor:
    """Sums over the bins of both axes, [rows, bins]: one pass over their product, folded afterwards."""
    R, A = len(values_RN), len(position.TOKEN_EDGES) + 1
    cell_N = relative_N * A + token_N
    sums = values_RN.new_zeros(R, RELATIVE_BINS * A).scatter_add_(1, cell_N.expand(R, -1), values_RN).view(R, RELATIVE_BINS, A)
    return torch.cat([sums.sum(2), sums.sum(1)], 1)


class PositionLog:
    """Adds the tables of the updates between two rows of the log, so that a row shows all mini-batches of a stale batch and not one of them."""

    def __init__(self) -> None:
        self._sum: Table | None = None
        self.due = False
        """The next row of the log is to carry them."""

    def add(self, table: Table) -> None:
        """Count this update in."""
        self._sum = table if self._sum is None else self._sum.merge(table)

    def take(self) -> dict[str, float | list[float]]:
        """The columns of everything added since the last call; {} when nothing was."""
        out = {} if self._sum is None else to_floats({NAME: self._sum})
        self._sum, self.due = None, False
        return out

    def state_dict(self) -> dict[str, Any]:
        """What was added and not taken, exactly."""
        return {"due": self.due, "sums": None if self._sum is None else self._sum.sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; a state of another layout counts as empty."""
        self.due = bool(state["due"])
        sums = torch.tensor(state["sums"], dtype=torch.float64) if state["sums"] is not None else None
        bins = max(where.stop for where in LAYOUT.axes.values())
        fits = [layout for layout in LAYOUTS if sums is not None and sums.shape == (len(layout.rows), bins)]
        self._sum = Table(sums, fits[0]) if sums is not None and fits else None
