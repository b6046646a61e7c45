"""Evaluation of a student beside its teacher: token KL and prefix drift by position, and the continuation gap. Also what Python users call.

from nearpolicy.teacher_jobs import evaluate_with_teacher
evaluate_with_teacher("runs/mine/checkpoints/step-000128", "tiny-teacher", gap=True)
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearpolicy import build
from nearpolicy.build import Parts, Say, assemble, model_folder
from nearpolicy.diagnostics.position import RELATIVE_BINS
from nearpolicy.errors import UsageError
from nearpolicy.layers import resolve, to_tree
from nearpolicy.objective import position, ratio
from nearpolicy.objective.stats import bootstrap_interval
from nearpolicy.policy.loading import load_model
from nearpolicy.policy.teacher import LocalTeacher, as_batch, checked, compare_vocabularies, load_scorer
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.randomness import Stream
from nearpolicy.sampler.torch import TorchSampler
from nearpolicy.trainer.continuation import SIDES, Gap, continuation_gap
from nearpolicy.trainer.rundir import run_of, write_atomic

FRACTIONS = "0.1,...,0.9"
FOLDER = "continuation"
"""Folder of a run directory with what was measured of its checkpoints, for the report."""
MOST_FRACTIONS = 99


def parse_fractions(text: str) -> list[float]:
    """`0.1,0.5,0.9`, or with `...` for equal steps: `0.1,...,0.9` (steps of the first number) and `0.1,0.15,...,0.9`.

    Raises:
        UsageError: words that are no shares, or an ellipsis that leads nowhere.
    """
    words = [word.strip() for word in text.split(",")]
    refuse = UsageError("--fractions", got=repr(text), expected="shares of a response from 0 to 1, for example 0.1,0.5,0.9 or 0.1,...,0.9",
                        do="Write them with commas between.")  # fmt: skip
    out: list[float] = []
    try:
        for place, word in enumerate(words):
            if word != "...":
                out.append(float(word))
                continue
            step = out[-1] - out[-2] if len(out) > 1 else out[-1]
            last = float(words[place + 1])
            count = round((last - out[-1]) / step)
            if not 1 <= count <= MOST_FRACTIONS or abs(out[-1] + count * step - last) > 1e-6:
                raise refuse
            out += [round(out[-1] + k * step, 9) for k in range(1, count)]
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):
        raise refuse from None
    if not all(0 <= f <= 1 for f in out) or not 1 <= len(out) <= MOST_FRACTIONS:
        raise refuse
    return out


def evaluate_with_teacher(
    checkpoint: Path | str, teacher: str, parts: Sequence[str] = (), *, gap: bool = False, fractions: str = FRACTIONS, samples: int | None = None,
    temperature: float | None = None, json_out: Path | None = None, say: Say = print,
) -> dict[str, Any]:  # fmt: skip
    """Compare a student with a teacher on its held-out prompts and the student's own responses.

    Args:
        checkpoint: a model folder; inside a run directory it takes the run's configuration, and the numbers are kept there for the report.
        parts: words on top of that configuration.
        gap: also have both models finish the student's responses from each of the `fractions`.
    Returns:
        `kl` (mean token KL of the student to the teacher, [value, low, high]), `kl_by_tenth`, `prefix_log_ratio_by_tenth`, and with `gap`
        `continuation_gap`: one row for each fraction with student, teacher and gap as [value, low, high].
    Raises:
        CheckpointError: folders that cannot be read, or vocabularies that differ.
        UsageError: fractions that are none.
    """
    shares = parse_fractions(fractions)
    folder, other = model_folder(str(checkpoint)), model_folder(teacher)
    compare_vocabularies(folder, other, what="--teacher")
    run = run_of(folder)
    tree = to_tree(build.config_for(parts, run))
    given = {k: v for k, v in {"samples": samples, "temperature": temperature}.items() if v is not None}
    config = resolve([tree, {"model": {"path": str(folder), "lora": None}, "eval": {**given, **({"k": [1]} if samples else {})}}])
    with assemble(config, folder, say) as built:
        e = config.eval
        params = dataclasses.replace(built.params, temperature=e.temperature, top_p=e.top_p, stream=Stream.EVAL, entropy=False)
        out: dict[str, Any] = {"teacher": teacher, "prompts": len(built.prompts.heldout), "samples": e.samples, "temperature": e.temperature}
        out |= _drift(built, other, params, e.samples)
        say(f"{out['prompts']} prompts x {e.samples} responses of the student, temperature {e.temperature:g}")
        say(f"  token KL to the teacher {_shown(out['kl'])} nats; by tenth: " + " ".join(_number(v) for v in out["kl_by_tenth"]))
        say("  prefix log ratio teacher/student by tenth: " + " ".join(_number(v) for v in out["prefix_log_ratio_by_tenth"]))
        if gap:
            model, tokenizer = load_model(other, device=config.device)
            sampler = TorchSampler(model, tokenizer, max_rows=config.rollout.max_rows)
            found: Gap = continuation_gap(built.sampler, sampler, built.pool, built.prompts.heldout, params, fractions=shares, n=e.samples)
            out["continuation_gap"] = found.values()
            say("  share right when the student's response is cut and finished by")
            for row in out["continuation_gap"]:
                say(f"  {row['fraction']:5.2f}  " + "  ".join(f"{side} {_shown(row[side])}" for side in SIDES))
    text = json.dumps(out, indent=1)
    if run is not None:
        (run / FOLDER).mkdir(exist_ok=True)
        write_atomic(run / FOLDER / f"{folder.name}.json", text)
    if json_out is not None:
        write_atomic(json_out, text)
    return out


def _drift(built: Parts, other: Path, params: SamplingParams, n: int) -> dict[str, Any]:
    """Token KL with an interval over prompts, and KL and prefix drift by tenths of the response."""
    requests = [Request(ticket=i, prompt=p) for i, p in enumerate(built.prompts.heldout)]
    if not requests:
        raise UsageError("evaluation", got="0 held-out prompts", expected="at least one", do="Raise task.heldout or give a held-out file.")
    rollouts = built.sampler.sample(requests, n, params)
    policy = built.policy
    scorer = load_scorer(other, device=built.config.device, dtype=None, student=policy, token_budget=built.config.train.token_budget)
    # Both sides by the same code path; a greedy response is scored at temperature 1.
    sides = [np.concatenate(checked(LocalTeacher(p, temperature=params.temperature or 1.0))(rollouts)) for p in (scorer, policy)]
    batch = as_batch(rollouts)
    mask = batch.response_mask_BT
    teacher, student = (torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, torch.from_numpy(x).double()) for x in sides)
    gap_BT = ratio.log_ratio(teacher, student, mask_BT=mask)
    drift_BT = ratio.before(gap_BT)
    bin_BT = position.bins(mask, RELATIVE_BINS)
    tokens = mask.sum(1).reshape(-1, n).sum(1)
    # The mean over tokens is a ratio of sums over prompts; each prompt's part is its sum over the mean number of tokens.
    per_prompt = -gap_BT.sum(1).reshape(-1, n).sum(1) / tokens.double().mean()
    interval = bootstrap_interval(per_prompt)

    def by_tenth(value_BT: torch.Tensor) -> list[float | None]:
        return [float(value_BT[bin_BT == k].mean()) if bool((bin_BT == k).any()) else None for k in range(RELATIVE_BINS)]

    return {
        "kl": [interval.mean, interval.low, interval.high], "kl_by_tenth": by_tenth(-gap_BT), "prefix_log_ratio_by_tenth": by_tenth(drift_BT),
    }  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _shown(value: Sequence[float | None]) -> str:
    return f"{_number(value[0])} [{_number(value[1])}, {_number(value[2])}]"
