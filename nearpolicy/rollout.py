"""Rollouts and batches: complete at birth, frozen, keyword-only.

The alignment law: column t describes token t, `logp[b, t] = log pi(token[b, t] | tokens[b, <t])`. Column 0, the prompt and the padding
are masked. Masks come from lengths, never from token values.

Letters: P prompt tokens, T response tokens (in `Rollout`) or prompt + response columns (in `Batch`), B rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]


class StopReason(StrEnum):
    """Why a response ended; set by the engine, never guessed from token values."""

    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    ABORTED = "aborted"


class Source(StrEnum):
    """Who wrote the response."""

    FRESH = "fresh"
    RELAY = "relay"
    DEMONSTRATION = "demonstration"


class Outcome(StrEnum):
    """What became of scoring a response. Only SCORE carries a reward."""

    SCORE = "score"
    ABSTAIN = "abstain"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a task: what the policy reads and what the verifier knows."""

    id: str
    """Unique within the task; names the prompt in records and error messages."""
    token_P: Array
    """Prompt token ids, int64 [P], P >= 1."""
    text: str
    """The rendered prompt, special tokens shown. A view: the ids are the truth."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Data columns handed to the reward (answer, ground_truth, ...). `prompt` holds the prompt as given (string or messages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The kept part of an earlier response, from which a request goes on (Thinking Seeds, or a response in flight)."""

    token_T: Array
    logp_behavior_T: Array
    version_T: Array
    entropy_T: Array | None = None
    stop: StopReason | None = None
    """Set when the stored response ended inside the kept prefix: it stays finished and nothing is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response with the provenance of every token."""

    prompt_id: str
    group: int
    """Ledger ticket: responses with one ticket form one advantage group."""
    sample: int
    """Index inside the group."""
    prompt_P: Array
    """Prompt token ids, int64 [P]."""
    response_T: Array
    """Response token ids, int64 [T], the EOS or stop token included; T = 0 is an empty completion."""
    logp_behavior_T: Array | None
    """log-prob of each response token under the policy that sampled it, at `temperature`, float32 [T], nats. None for demonstrations."""
    version_T: Array
    """Policy version that sampled each token (optimizer updates in the published weights), int64 [T]; -1 for demonstrations."""
    prefix_length: int = 0
    """Leading response tokens that were not sampled for this request (a relayed prefix)."""
    entropy_T: Array | None = None
    """Entropy of the sampling distribution at each token, float32 [T], nats; None when not asked for."""
    routes: Array | None = None
    """Experts of each context token (prompt, prefix and response without the last token, which no pass reads) under the weights that wrote what was
    sampled, int16 [P + T - 1, L, k] for L layers with k experts a token; None when not asked for."""
    temperature: float = 1.0
    stop: StopReason
    source: Source = Source.FRESH
    text: str = ""
    """The decoded response, special tokens skipped. A view."""
    reused_cache: bool = False
    """True: from its first change of version on, the response was decoded on keys and values that older weights had filled. No version assigns
    exactly those log-probs."""

    def __post_init__(self) -> None:
        T = len(self.response_T)
        for name in ("logp_behavior_T", "version_T", "entropy_T"):
            column = getattr(self, name)
            if column is not None and len(column) != T:
                raise DataError(
                    f"Rollout {self._name()}: {name}", got=f"{len(column)} values for {T} response tokens", expected="one for each token",
                    do="Return exactly the columns of the tokens that were sampled.",
                )  # fmt: skip
        if self.logp_behavior_T is None:
            if self.source is not Source.DEMONSTRATION:
                raise DataError(
                    f"Rollout {self._name()}: logp_behavior_T", got="None", expected="the sampler's log-probs",
                    do="Only demonstrations have no behaviour log-probs; ask the sampler for them.",
                )  # fmt: skip
        elif T and not np.isfinite(self.logp_behavior_T).all():
            t = int(np.flatnonzero(~np.isfinite(self.logp_behavior_T))[0])
            raise DataError(
                f"Rollout {self._name()}: logp_behavior_T", got=f"{self.logp_behavior_T[t]} at response token {t} (id {self.response_T[t]})",
                expected="finite log-probs", do=f"The {self.source} sampler returned it; train on nothing until it is mended.",
            )  # fmt: skip
        if self.routes is not None:
            self._check_routes(self.routes)
        if not 0 <= self.prefix_length <= T:
            raise DataError(
                f"Rollout {self._name()}: prefix_length", got=self.prefix_length, expected=f"0 to {T} (the response length)",
                do="Cut the prefix inside the response.",
            )  # fmt: skip

    def _check_routes(self, routes: Array) -> None:
        P, T = len(self.prompt_P), len(self.response_T)
        if routes.ndim != 3 or len(routes) != P + T - 1 or routes.dtype != np.int16:
            raise DataError(
                f"Rollout {self._name()}: routes", got=f"{routes.dtype} {routes.shape} for {P} prompt and {T} response tokens",
                expected=f"int16 ({P + T - 1}, layers, experts a token)", do="Record the experts of every context token of the request.",
            )  # fmt: skip
        if routes.size and routes.min() < 0:
            t = int((routes < 0).any((1, 2)).argmax())
            raise DataError(f"Rollout {self._name()}: routes", got=f"expert {routes[t].min()} at context token {t}", expected="experts from 0",
                            do="Record the experts of every context token of the request.")  # fmt: skip

    def _name(self) -> str:
        return f"(prompt {self.prompt_id!r}, group {self.group}, sample {self.sample})"

    @property
    def truncated(self) -> bool:
        """True when the length limit cut the response."""
        return self.stop is StopReason.LENGTH

    @property
    def num_sampled(self) -> int:
        """Tokens decoded for this request: the response without a relayed prefix."""
        return len(self.response_T) - self.prefix_length

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token sampled for this request; None when nothing was (or for a demonstration)."""
        if self.source is Source.DEMONSTRATION or self.num_sampled == 0:
            return None
        return int(self.version_T[self.prefix_length :].min())


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What scoring one response gave."""

    reward: float
    """NaN when `outcome` is not SCORE: unscored, left out of its group and counted, never 0."""
    outcome: Outcome
    parts: Mapping[str, float] = field(default_factory=dict)
    """Reward of each reward function by name (NaN where it abstained)."""
    message: str = ""
    """Why there is no reward (timeout, error, all functions abstained): one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout and its score, with the optional columns a method needs."""

    rollout: Rollout
    score: Score
    logp_teacher_T: Array | None = None
    logp_reference_T: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Scored responses as tensors: born after scoring; sliced, resumed and stored as one. Rows are [prompt, response, padding]."""

    token_BT: Tensor
    """Token ids, int64 [B, T]; padding holds 0 and is never read."""
    prompt_length_B: Tensor
    """Prompt tokens of each row, int64 [B]."""
    response_mask_BT: Tensor
    """True at response tokens that exist (context, drift, position, length), bool [B, T]."""
    mask_BT: Tensor
    """True at tokens trained on, a subset of `response_mask_BT`, bool [B, T]."""
    position_BT: Tensor
    """Index inside the response from 0; 0 outside it. int64 [B, T]."""
    version_BT: Tensor
    """Policy version that sampled each token; -1 outside the response and for demonstrations. int64 [B, T]."""
    logp_behavior_BT: Tensor
    """Behaviour log-probs; 0 outside the response and for demonstrations. float32 [B, T]."""
    advantage_BT: Tensor
    """Advantage of each token, computed once over whole groups; 0 outside the response. float32 [B, T]."""
    reward_B: Tensor
    """Reward, float32 [B]; NaN = unscored."""
    group_B: Tensor
    """Ledger ticket, int64 [B]."""
    prefix_length_B: Tensor
    """Relayed tokens at the start of the response, int64 [B]."""
    temperature_B: Tensor
    """Sampling temperature, float32 [B]."""
    stop_B: tuple[StopReason, ...]
    source_B: tuple[Source, ...]
    logp_proximal_BT: Tensor | None = None
    """The trainer's own recomputation at the start of the rollout batch, float32 [B, T]."""
    logp_reference_BT: Tensor | None = None
    logp_teacher_BT: Tensor | None = None
    entropy_behavior_BT: Tensor | None = None
    routes: Tensor | None = None
    """Experts that column t's token goes to when it is read, int16 [B, T, L, k]; -1 where none were recorded: padding, and each row's last token."""
    version_proximal_B: Tensor | None = None
    """Version of the policy that `logp_proximal_BT` is from, int64 [B]."""

    def __post_init__(self) -> None:
        B, T = self.token_BT.shape
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            want: tuple[int, ...] = (B, T) if f.name.endswith("_BT") or f.name == "routes" else (B,)
            got = (len(value),) if isinstance(value, tuple) else tuple(value.shape[: len(want)])
            if got != want:
                raise DataError(f"Batch.{f.name}", got=f"shape {got}", expected=f"{want}", do="Build it from the same rows as token_BT.")
        if bool((self.mask_BT & ~self.response_mask_BT).any()):
            raise DataError("Batch.mask_BT", got="trained tokens outside the response", expected="a subset of response_mask_BT",
                            do="Mask prompt and padding.")  # fmt: skip
        if T and bool(self.response_mask_BT[:, 0].any()):
            raise DataError("Batch.response_mask_BT", got="a response token in column 0", expected="at least one prompt token in every row",
                            do="A token without context has no log-prob.")  # fmt: skip

    def __len__(self) -> int:
        return int(self.token_BT.shape[0])

    def rows(self, index: Sequence[int] | Tensor) -> "Batch":
        """The batch of these rows, trimmed to its longest row."""
        rows = torch.as_tensor(index, dtype=torch.long, device=self.token_BT.device)
        picks = rows.tolist()
        lengths = self.prompt_length_B[rows] + self.response_mask_BT[rows].sum(1)
        T = int(lengths.max()) if len(picks) else 1
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                out[f.name] = None
            elif isinstance(value, tuple):
                out[f.name] = tuple(value[i] for i in picks)
            else:
                out[f.name] = value[rows][:, :T] if f.name.endswith("_BT") or f.name == "routes" else value[rows]
        return Batch(**out)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved: dict[str, Any] = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved)

    @property
    def off_policy_B(self) -> Tensor:
        """True at demonstration rows, bool [B]."""
        return torch.tensor([s is Source.DEMONSTRATION for s in self.source_B], device=self.token_BT.device)

    def recomputed_at(self, version: int) -> "Batch":
        """The same batch, saying which version `logp_proximal_BT` is from; unchanged where there is none."""
        if self.logp_proximal_BT is None:
            return self
        return replace(self, version_proximal_B=torch.full_like(self.prompt_length_B, version))

    @property
    def older_BT(self) -> Tensor | None:
        """True at response tokens that an older version than the proximal policy's wrote, bool [B, T]; None where that is not known."""
        if self.version_proximal_B is None:
            return None
        return self.response_mask_BT & (self.version_BT < self.version_proximal_B[:, None])

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask_BT.sum())

    @property
    def num_sequences(self) -> int:
        """Rows with at least one trained token."""
        return int(self.mask_BT.any(1).sum())


def _collate_routes(rollouts: Sequence[Rollout], T: int) -> Tensor | None:
    found = [r.routes for r in rollouts if r.routes is not None]
    if not found:
        return None
    if len(found) < len(rollouts) or len({routes.shape[1:] for routes in found}) > 1:
        shapes = sorted({str(None if r.routes is None else r.routes.shape[1:]) for r in rollouts})
        raise DataError("collate: routes", got=f"layers and experts {', '.join(shapes)} in one batch", expected="the same in every row, or none",
                        do="Sample all rows of a batch from one model, with routes.")  # fmt: skip
    out = np.full((len(rollouts), T, *found[0].shape[1:]), -1, dtype=np.int16)
    for b, routes in enumerate(found):
        out[b, : len(routes)] = routes
    return torch.from_numpy(out)


def collate(scored: Sequence[Scored], *, advantage_B: Sequence[float] | Tensor, train_B: Sequence[bool] | None = None) -> Batch:
    """Right-pad scored rollouts into a Batch.

    Args:
        scored: the rows, in the order they are trained.
        advantage_B: one advantage a row, spread over its response tokens.
        train_B: False masks the whole row out of the loss (unscored, or truncated responses that are not trained on).
    Raises:
        DataError: no rows, or an optional column that only some rows carry.
    """
    if not scored:
        raise DataError("collate", got="0 rollouts", expected="at least one", do="Sample before training.")
    B = len(scored)
    P = np.array([len(s.rollout.prompt_P) for s in scored])
    R = np.array([len(s.rollout.response_T) for s in scored])
    T = int((P + R).max())
    column = np.arange(T)
    inside = (column >= P[:, None]) & (column < (P + R)[:, None])

    def spread(values: Sequence[Array], dtype: Any, fill: float) -> Tensor:
        out = np.full((B, T), fill, dtype=dtype)
        out[inside] = np.concatenate(values) if len(values) else fill
        return torch.from_numpy(out)

    def optional(name: str, values: Sequence[Array | None]) -> Tensor | None:
        missing = [v is None for v in values]
        if all(missing):
            return None
        if any(missing):
            raise DataError(f"collate: {name}", got=f"{sum(missing)} of {B} rows without it", expected="every row or none",
                            do="Score all rows of a batch alike.")  # fmt: skip
        return spread([v for v in values if v is not None], np.float32, 0.0)

    token = np.zeros((B, T), dtype=np.int64)
    token[column < P[:, None]] = np.concatenate([s.rollout.prompt_P for s in scored])
    token[inside] = np.concatenate([s.rollout.response_T for s in scored])
    response_mask = torch.from_numpy(inside)
    train = torch.ones(B, dtype=torch.bool) if train_B is None else torch.as_tensor(train_B, dtype=torch.bool)
    advantage = torch.as_tensor(advantage_B, dtype=torch.float32)
    zeros = [np.zeros(r, dtype=np.float32) for r in R]
    return Batch(
        token_BT=torch.from_numpy(token),
        prompt_length_B=torch.from_numpy(P.astype(np.int64)),
        response_mask_BT=response_mask,
        mask_BT=response_mask & train[:, None],
        position_BT=torch.from_numpy(np.where(inside, column - P[:, None], 0)),
        version_BT=spread([s.rollout.version_T for s in scored], np.int64, -1),
        logp_behavior_BT=spread(
            [z if s.rollout.logp_behavior_T is None else s.rollout.logp_behavior_T for s, z in zip(scored, zeros, strict=True)], np.float32, 0.0
        ),
        advantage_BT=torch.where(response_mask, advantage[:, None], torch.zeros(())),
        reward_B=torch.tensor([s.score.reward for s in scored], dtype=torch.float32),
        group_B=torch.tensor([s.rollout.group for s in scored], dtype=torch.int64),
        prefix_length_B=torch.tensor([s.rollout.prefix_length for s in scored], dtype=torch.int64),
        temperature_B=torch.tensor([s.rollout.temperature for s in scored], dtype=torch.float32),
        stop_B=tuple(s.rollout.stop for s in scored),
        source_B=tuple(s.rollout.source for s in scored),
        logp_teacher_BT=optional("logp_teacher_T", [s.logp_teacher_T for s in scored]),
        logp_reference_BT=optional("logp_reference_T", [s.logp_reference_T for s in scored]),
        entropy_behavior_BT=optional("entropy_T", [s.rollout.entropy_T for s in scored]),
        routes=_collate_routes([s.rollout for s in scored], T),
    )
