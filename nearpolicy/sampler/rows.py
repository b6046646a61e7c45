"""Rows in flight: who waits, who decodes in which slot, what each has written. Tensors over slots; no Python per row and token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import EngineError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.randomness import token_uniforms
from nearpolicy.rollout import Array, Prefix, StopReason
from nearpolicy.sampler.cache import Forward
from nearpolicy.sampler.draw import Draw, draw
from nearpolicy.sampler.stops import StopStrings


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One sample of one request, from waiting to done."""

    request: Request
    sample: int
    prompt: Tensor
    """The prompt's ids; one tensor object for all rows with that prompt, which marks them as shared."""
    prefix: Prefix | None
    token_T: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Sampled tokens, the prefix left out."""
    logp_T: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    entropy_T: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    routes: Array | None = None
    """Experts of every context token, int16 [P + T - 1, L, k], the prefix included; None when not asked for."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(response index, version of the weights from there on); empty where weights cannot change."""
    stop: StopReason | None = None

    @property
    def prefix_length(self) -> int:
        """Tokens that are kept, not sampled."""
        return 0 if self.prefix is None else len(self.prefix.token_T)


class Rows:
    """Decodes rows to their end with at most `max_rows` in flight; slots 0..active-1 are always the ones in use."""

    def __init__(
        self, rows: Sequence[Row], params: SamplingParams, *, forward: Forward, max_rows: int, device: torch.device, stops: StopStrings | None
    ) -> None:
        self._waiting = list(rows)[::-1]
        self._params, self._forward, self._stops, self._device = params, forward, stops, device
        R, T = min(max_rows, len(rows)), params.max_tokens
        self._capacity = R
        forward.reserve(R, max(len(row.prompt) for row in rows) + T)
        self._row: list[Row] = []
        self._version: int | None = None  # None while nobody asks
        self._uniform_RT = torch.zeros(R, T, dtype=torch.float64, device=device)
        self._token_RT = torch.zeros(R, T, dtype=torch.long, device=device)
        self._logp_RT = torch.zeros(R, T, device=device)
        self._entropy_RT = torch.zeros(R, T, device=device) if params.entropy else None
        self._index_R = torch.zeros(R, dtype=torch.long, device=device)  # response tokens so far
        self._prompt_R = torch.zeros(R, dtype=torch.long, device=device)
        self._eos = torch.tensor(sorted(params.eos_ids), dtype=torch.long, device=device)
        # A prefill costs several decode steps however few rows it serves, so freed slots are filled in lumps.
        self._lump = max(1, R // 8)

    def run(self, interrupt: Callable[[], bool] | None = None, refresh: Callable[[], int] | None = None) -> None:
        """Until every row has its `stop`.

        Args:
            interrupt: asked before each decode step: True ends all rows at once, as ABORTED.
            refresh: called before each decode step: may put other weights under the rows in flight, and says which version they are.
        """
        while self._waiting or self._row:
            if refresh is not None:
                self._continue_under(refresh())
            if interrupt is not None and interrupt():
                self._abort()
                return
            free = self._capacity - len(self._row)
            if self._waiting and (free >= min(self._lump, len(self._waiting)) or not self._row):
                self._admit(min(free, len(self._waiting)))
            if self._row:
                A = len(self._row)
                index_A = self._index_R[:A]
                last_A = self._token_RT[:A].gather(1, index_A[:, None] - 1).squeeze(1)
                self._take(0, self._forward.decode(last_A, self._prompt_R[:A] + index_A - 1))

    def _continue_under(self, version: int) -> None:
        if version != self._version:
            self._version = version
            for row, index in zip(self._row, self._index_R.tolist(), strict=False):
                row.versions.append((index, version))

    def _abort(self) -> None:
        """Every row that has not ended hands over what it has."""
        for row in (*self._row, *self._waiting):
            row.stop = StopReason.ABORTED
        self._waiting.clear()
        self._retire()

    def _admit(self, count: int) -> None:
        # Whole groups share their prefill, so stop at a group's end when one is in reach.
        if count < len(self._waiting):
            after = self._waiting[-count - 1].prompt
            whole = next((k for k in range(count, 0, -1) if self._waiting[-k].prompt is not after), 0)
            count = whole or count
        fresh = [self._waiting.pop() for _ in range(count)]
        first, p = len(self._row), self._params
        here = slice(first, first + count)
        keys = [(p.seed, p.stream, row.request.ticket, row.sample, row.request.attempt) for row in fresh]
        self._uniform_RT[here] = torch.from_numpy(np.stack([token_uniforms(*key, p.max_tokens) for key in keys]))
        self._index_R[here] = torch.tensor([row.prefix_length for row in fresh])
        self._prompt_R[here] = torch.tensor([len(row.prompt) for row in fresh])
        prefixes = [None if row.prefix is None else torch.from_numpy(np.asarray(row.prefix.token_T, dtype=np.int64)) for row in fresh]
        for slot, prefix in enumerate(prefixes, first):
            if prefix is not None:
                self._token_RT[slot, : len(prefix)] = prefix
        if self._version is not None:
            for row in fresh:
                row.versions.append((row.prefix_length, self._version))
        self._row.extend(fresh)
        self._take(first, self._forward.admit([row.prompt for row in fresh], prefixes, first))

    def _take(self, first: int, logits_AV: Tensor) -> None:
        """Draw the next token of slots first, first + 1, ...; retire the rows that end with it."""
        here = slice(first, len(self._row))
        index_A1 = self._index_R[here, None]
        uniform_A = self._uniform_RT[here].gather(1, index_A1).squeeze(1)
        p = self._params
        drawn = draw(logits_AV, uniform_A, temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, entropy=p.entropy)
        self._token_RT[here].scatter_(1, index_A1, drawn.token_B[:, None])
        self._logp_RT[here].scatter_(1, index_A1, drawn.logp_B[:, None])
        if self._entropy_RT is not None and drawn.entropy_B is not None:
            self._entropy_RT[here].scatter_(1, index_A1, drawn.entropy_B[:, None])
        self._index_R[here] += 1
        finite_A, eos_A = drawn.logp_B.isfinite(), torch.isin(drawn.token_B, self._eos)
        ended_A = eos_A | (self._index_R[here] >= p.max_tokens)
        if not bool(finite_A.all()):
            self._refuse(first, drawn, finite_A)
        stopped = self._stopped(first, drawn.token_B) if self._stops is not None else []
        if stopped or bool(ended_A.any()):
            for a in ended_A.nonzero().squeeze(1).tolist():
                self._row[first + a].stop = StopReason.LENGTH
            for slot in stopped:
                self._row[slot].stop = StopReason.STOP_STRING
            for a in eos_A.nonzero().squeeze(1).tolist():
                self._row[first + a].stop = StopReason.EOS
            self._retire()

    def _stopped(self, first: int, token_A: Tensor) -> list[int]:
        assert self._stops is not None
        candidates = np.flatnonzero(self._stops.may_complete_V[token_A.cpu().numpy()]) + first
        return [int(s) for s in candidates if self._stops.completed(self._token_RT[s, : int(self._index_R[s])].tolist())]

    def _retire(self) -> None:
        """Hand over the rows that ended and move rows from the back into their slots: one row copied for each that ended."""
        done = [slot for slot, row in enumerate(self._row) if row.stop is not None]
        gone = set(done)
        for slot in done:
            row, T = self._row[slot], int(self._index_R[slot])
            row.token_T = self._token_RT[slot, row.prefix_length : T].cpu().numpy().copy()
            row.logp_T = self._logp_RT[slot, row.prefix_length : T].cpu().numpy().copy()
            if self._entropy_RT is not None:
                row.entropy_T = self._entropy_RT[slot, row.prefix_length : T].cpu().numpy().copy()
            if self._params.routes:
                row.routes = self._forward.routes(slot, len(row.prompt) + T - 1)
        left = len(self._row) - len(done)
        source = [slot for slot in range(left, len(self._row)) if slot not in gone]
        target = [slot for slot in done if slot < left]
        if source:
            to, of = torch.tensor(target, device=self._device), torch.tensor(source, device=self._device)
            columns = int((self._prompt_R[of] + self._index_R[of]).max()) - 1
            self._forward.move(to, of, columns)
            held = (self._uniform_RT, self._token_RT, self._logp_RT, self._entropy_RT, self._index_R, self._prompt_R)
            for column in held:
                if column is not None:
                    column[to] = column[of]
            for t, s in zip(target, source, strict=True):
                self._row[t] = self._row[s]
        del self._row[left:]

    def _refuse(self, first: int, drawn: Draw, finite_A: Tensor) -> None:
        a = int((~finite_A).nonzero()[0])
        row, t = self._row[first + a], int(self._index_R[first + a]) - 1
        raise EngineError(
            f"Sampler: logits of prompt {row.request.prompt.id!r} (group {row.request.ticket}, sample {row.sample}) at response token {t}",
            got=f"log-prob {float(drawn.logp_B[a])}", expected="finite logits (or -inf for forbidden tokens)",
            do="The loaded weights are broken: go back to a checkpoint from before, or lower train.lr.",
        )  # fmt: skip
