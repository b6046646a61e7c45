"""Relay inference: an earlier checkpoint writes the first part of each response, another goes on from there; pass@k on the same prompts.

The pilot experiment of Thinking Seeds (arXiv 2601.21476): where training has narrowed a policy, beginnings by an earlier one bring back
responses that it no longer reaches, which shows at large k.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.objective.position import length_cut
from nearpolicy.objective.stats import Interval, bootstrap_interval
from nearpolicy.protocols import Sampler, SamplingParams, Verifier
from nearpolicy.randomness import Stream
from nearpolicy.rollout import Prefix, Prompt, Rollout
from nearpolicy.sources.bank import beginning
from nearpolicy.trainer.evaluate import Evaluation, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """n responses to each prompt by the earlier model, by the single model, and relayed at each fraction."""

    earlier: Evaluation
    single: Evaluation
    relayed: Mapping[float, Evaluation]
    """Fraction -> the responses that the single model went on with after that share of the earlier model's."""

    def curves(self) -> dict[str, Evaluation]:
        """All evaluations by name: `single`, `earlier`, `relay 0.5` ..."""
        return {"single": self.single, "earlier": self.earlier, **{f"relay {f:g}": e for f, e in self.relayed.items()}}

    def document(self) -> dict[str, Any]:
        """The numbers as JSON values: pass@k with 95 % intervals of every curve, the differences, and the counts they are made from.

        `curves[name][k]` and `differences[fraction]["single" | "earlier"][k]` are `{"mean", "low", "high", "prompts"}`; a difference is
        relayed minus the other, paired by prompt, with its bootstrap interval over prompts. `counts[name]` has the right and the scored
        responses of each prompt in order; `kept[fraction]` and `length[name]` are means in tokens.
        """
        values = {name: e.by_prompt() for name, e in self.curves().items()}
        names = {k: f"pass@{k}" for k in self.single.ks}
        return {
            "samples": self.single.reward_PN.shape[1],
            "prompts": self.single.reward_PN.shape[0],
            "k": list(self.single.ks),
            "fractions": list(self.relayed),
            "curves": {name: {str(k): _interval(own[key]) for k, key in names.items()} for name, own in values.items()},
            "differences": {
                f"{f:g}": {
                    other: {str(k): _interval(values[f"relay {f:g}"][key] - values[other][key]) for k, key in names.items()}
                    for other in ("single", "earlier")
                }
                for f in self.relayed
            },
            "length": {name: float(e.length_PN.mean()) for name, e in self.curves().items()},
            "kept": {f"{f:g}": float(np.mean([r.prefix_length for r in e.rollouts])) for f, e in self.relayed.items()},
            "counts": {name: {"right": e.right.tolist(), "scored": e.scored.tolist()} for name, e in self.curves().items()},
        }


def _interval(value_P: "np.ndarray[Any, np.dtype[Any]]") -> dict[str, float | int | None]:
    made: Interval = bootstrap_interval(torch.from_numpy(value_P))
    ends = {"mean": made.mean, "low": made.low, "high": made.high}
    return {**{name: None if math.isnan(v) else v for name, v in ends.items()}, "prompts": made.num}


def relay_inference(
    sampler: Sampler, earlier: Sampler, verifier: Verifier, prompts: Sequence[Prompt], params: SamplingParams, *, n: int, ks: Sequence[int],
    fractions: Sequence[float],
) -> Relay:  # fmt: skip
    """Sample and score all curves on the same prompts.

    The prefix of sample i is the first round(fraction * length) tokens (halves to the even number) of the earlier model's response i. The
    earlier model draws from the bank's noise and the single one from the evaluation's, with relayed and single responses sharing theirs, so
    that fraction 0 gives the single model's very responses and fraction 1 the earlier model's.
    Raises:
        UsageError: a fraction outside [0, 1], a k above n, no prompts.
    """
    if bad := [f for f in fractions if not 0 <= f <= 1]:
        raise UsageError("relay inference: fraction", got=bad[0], expected="0 to 1, the share that the earlier model writes", do="Correct it.")
    before = evaluate(earlier, verifier, prompts, params, n=n, ks=ks, stream=Stream.BANK)
    single = evaluate(sampler, verifier, prompts, params, n=n, ks=ks)
    relayed = {}
    for fraction in sorted(set(fractions)):
        kept = [_prefix(r, fraction) for r in before.rollouts]
        groups = [kept[i : i + n] for i in range(0, len(kept), n)]
        relayed[fraction] = evaluate(sampler, verifier, prompts, params, n=n, ks=ks, prefixes=groups)
    return Relay(earlier=before, single=single, relayed=relayed)


def _prefix(rollout: Rollout, fraction: float) -> Prefix | None:
    """What is kept of a response; None where nothing is."""
    kept = length_cut(len(rollout.response_T), fraction)
    return beginning(rollout, kept) if kept else None


_DO = "Take an earlier checkpoint of the same run."


def check_earlier(model: Any, tokenizer: Any, earlier_model: Any, earlier_tokenizer: Any, *, name: str) -> None:
    """Refuse an earlier checkpoint whose tokens or weights are of another kind than the model's.

    Raises:
        CheckpointError: another vocabulary (a token with another id is named) or another architecture (class, or a weight's shape).
    """
    own, other = tokenizer.get_vocab(), earlier_tokenizer.get_vocab()
    differing = sorted(t for t in own.keys() | other.keys() if own.get(t) != other.get(t))
    if differing:
        token = differing[0]
        got = f"another vocabulary ({len(differing)} tokens differ; {token!r} has id {other.get(token)})"
        raise CheckpointError(f"--relay-from {name}", got=got, expected=f"the checkpoint's ({token!r} has id {own.get(token)})", do=_DO)
    if type(model) is not type(earlier_model):
        got = f"another architecture ({type(earlier_model).__name__})"
        raise CheckpointError(f"--relay-from {name}", got=got, expected=f"the checkpoint's ({type(model).__name__})", do=_DO)
    shapes, others = ({n: tuple(p.shape) for n, p in m.named_parameters()} for m in (model, earlier_model))
    if weight := next((n for n in [*shapes, *others] if shapes.get(n) != others.get(n)), None):
        got = f"another architecture ({weight} has shape {others.get(weight)})"
        raise CheckpointError(f"--relay-from {name}", got=got, expected=f"the checkpoint's ({shapes.get(weight)})", do=_DO)
