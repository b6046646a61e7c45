"""Fakes with exact answers: a policy that is a table, its sampler and a tokenizer of one character a token.

The next token's logits depend on the last token alone: `logits_VV[last]`. Every probability can be worked out by hand, a draw costs
microseconds, and the sampler runs the same contract suite as the real ones. Not a model of anything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearpolicy.errors import EngineError
from nearpolicy.objective.logprob import logits_logp_entropy, shift
from nearpolicy.protocols import LogProbs, Request, SamplingParams
from nearpolicy.randomness import token_uniforms
from nearpolicy.rollout import Array, Batch, Prefix, Rollout, Source, StopReason

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class FakeTokenizer:
    """Token i is the i-th letter; ids in `special` are shown as `<i>` and can be skipped. At most 26 tokens."""

    def __init__(self, *, special: Sequence[int] = ()) -> None:
        self.special = frozenset(special)

    def encode(self, text: str) -> list[int]:
        """Ids of letters."""
        return [_LETTERS.index(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of ids."""
        return "".join(f"<{i}>" if i in self.special else _LETTERS[i] for i in ids if not (skip_special_tokens and i in self.special))


class FakePolicy(torch.nn.Module):
    """`protocols.Policy` over a table of logits [V, V] (row: last token), which is its one trainable parameter `logits`."""

    def __init__(self, logits_VV: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits_VV.detach().clone().float())

    def score(self, batch: Batch) -> LogProbs:
        """Log-probs and entropies of the response tokens; 0 elsewhere."""
        logits_BTV = self.logits[shift(batch.token_BT)]
        temperature_BT = batch.temperature_B[:, None].expand_as(batch.token_BT)
        logp_BT, entropy_BT = logits_logp_entropy(logits_BTV, batch.token_BT, temperature=temperature_BT)
        inside = batch.response_mask_BT
        return LogProbs(torch.where(inside, logp_BT, 0.0), torch.where(inside, entropy_BT.detach(), 0.0))


class FakeSampler:
    """`protocols.Sampler` over the same table, in plain float64 and one token at a time. Weights: {"logits": [V, V]}."""

    def __init__(self, logits_VV: Tensor, *, tokenizer: Any = None, version: int = 0) -> None:
        self.logits_VV = logits_VV.detach().double().numpy()
        self.tokenizer, self.version = tokenizer or FakeTokenizer(), version

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Another table of the same size.

        Raises:
            EngineError: another name or shape.
        """
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        if shapes != {"logits": self.logits_VV.shape}:
            raise EngineError("FakeSampler.load", got=shapes, expected=f"logits {self.logits_VV.shape}", do="Publish FakePolicy's state_dict().")
        self.logits_VV, self.version = weights["logits"].detach().double().numpy().copy(), version

    def sample(
        self, requests: Sequence[Request], n: int, params: SamplingParams, *, interrupt: Callable[[], bool] | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """n rollouts a request, in order; before each token `interrupt` is asked and `refresh` called (there is no cache to be old).

        Raises:
            EngineError: a row of the table that is not finite.
        """
        said = False

        def stopped() -> bool:
            nonlocal said
            if refresh is not None:
                refresh()
            said = said or (interrupt is not None and interrupt())
            return said

        return [
            self._one(request, request.first_sample + i, request.prefixes[i] if request.prefixes is not None else None, params, stopped)
            for request in requests
            for i in range(n)
        ]

    def _one(self, request: Request, sample: int, prefix: Prefix | None, params: SamplingParams, stopped: Callable[[], bool]) -> Rollout:
        kept = 0 if prefix is None else len(prefix.token_T)
        token = [] if prefix is None else [int(x) for x in prefix.token_T]
        logp: list[float] = []
        entropy: list[float] = []
        versions: list[int] = []
        stop = None if prefix is None else prefix.stop
        if stop is None and kept >= params.max_tokens:
            stop = StopReason.LENGTH
        uniform_T = token_uniforms(params.seed, params.stream, request.ticket, sample, request.attempt, params.max_tokens)
        while stop is None:
            if stopped():
                stop = StopReason.ABORTED
                break
            context = token[-1] if token else int(request.prompt.token_P[-1])
            logp_V = self._logp(context, request, sample, len(token), params.temperature)
            mass_V = np.exp(logp_V)
            token.append(self._pick(mass_V, uniform_T[len(token)], params))
            logp.append(logp_V[token[-1]])
            versions.append(self.version)
            entropy.append(-(mass_V * np.where(mass_V > 0, logp_V, 0.0)).sum())
            stop = self._ended(token, params)

        def joined(old: Array | None, new: Sequence[float], dtype: Any) -> Array:
            head = np.full(kept, np.nan) if old is None else np.asarray(old)
            return np.concatenate([head, np.asarray(new)]).astype(dtype)

        return Rollout(
            prompt_id=request.prompt.id, group=request.ticket, sample=sample, prompt_P=np.asarray(request.prompt.token_P, np.int64),
            response_T=np.asarray(token, np.int64), prefix_length=kept,
            logp_behavior_T=joined(None if prefix is None else prefix.logp_behavior_T, logp, np.float32),
            version_T=joined(None if prefix is None else prefix.version_T, versions, np.int64),
            entropy_T=joined(None if prefix is None else prefix.entropy_T, entropy, np.float32) if params.entropy else None,
            temperature=params.temperature, stop=stop, source=Source.FRESH if prefix is None else Source.RELAY,
            text=self.tokenizer.decode(token, skip_special_tokens=True),
        )  # fmt: skip

    def _logp(self, context: int, request: Request, sample: int, t: int, temperature: float) -> Array:
        x_V = self.logits_VV[context] / (temperature or 1.0)
        if np.isnan(x_V).any() or not np.isfinite(x_V.max()):
            raise EngineError(f"FakeSampler: prompt {request.prompt.id!r} (group {request.ticket}, sample {sample}) at response token {t}",
                              got="non-finite logits", expected="finite ones, or -inf for forbidden tokens", do="Mend the table.")  # fmt: skip
        shifted_V: Array = x_V - x_V.max()
        result: Array = shifted_V - np.log(np.exp(shifted_V).sum())
        return result

    def _pick(self, mass_V: Array, uniform: float, params: SamplingParams) -> int:
        if params.temperature == 0:
            return int(mass_V.argmax())
        order = np.argsort(-mass_V, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(mass_V[order])[:-1]])
        kept = order[(before < params.top_p) & (np.arange(len(order)) < (params.top_k or len(order)))]
        allowed = np.where(np.isin(np.arange(len(mass_V)), kept), mass_V, 0.0)
        cumulative = np.cumsum(allowed)
        return int(np.searchsorted(cumulative, min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0)), side="right"))

    def _ended(self, token: list[int], params: SamplingParams) -> StopReason | None:
        if token[-1] in params.eos_ids:
            return StopReason.EOS
        before, after = (self.tokenizer.decode(token[:-1]), self.tokenizer.decode(token)) if params.stop_strings else ("", "")
        if any(after.count(stop) > before.count(stop) for stop in params.stop_strings):
            return StopReason.STOP_STRING
        return StopReason.LENGTH if len(token) >= params.max_tokens else None
