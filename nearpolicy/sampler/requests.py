"""What every sampler refuses of its requests, and which samples need nothing written."""

import math
from collections.abc import Sequence
from typing import Any

from nearpolicy.errors import DataError, UsageError
from nearpolicy.protocols import Request, SamplingParams
from nearpolicy.rollout import Prefix, StopReason


def check_requests(requests: Sequence[Request], n: int, params: SamplingParams, *, vocabulary: int, longest: int | None, tokenizer: Any) -> None:
    """Refuse what no sampler can do.

    Args:
        vocabulary: ids that the model knows.
        longest: most tokens of prompt and response together; None is no limit.
    Raises:
        UsageError: parameters out of range, or stop strings without a tokenizer.
        DataError: an empty prompt, prompt and response longer than there is room for, or prefixes that are not n.
    """
    wrong = {
        "n": (n, n >= 1, "at least 1"),
        "max_tokens": (params.max_tokens, params.max_tokens >= 1, "at least 1"),
        "temperature": (params.temperature, params.temperature >= 0 and math.isfinite(params.temperature), "0 (greedy) or positive"),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "in (0, 1]"),
        "top_k": (params.top_k, params.top_k is None or params.top_k >= 1, "at least 1, or None"),
        "eos_ids": (sorted(params.eos_ids), all(0 <= i < vocabulary for i in params.eos_ids), f"ids in [0, {vocabulary})"),
        "stop_strings": (params.stop_strings, all(params.stop_strings), "non-empty strings"),
    }
    for name, (got, right, expected) in wrong.items():
        if not right:
            raise UsageError(f"sample: {name}", got=got, expected=expected, do="Change the rollout settings.")
    if params.stop_strings and tokenizer is None:
        raise UsageError("sample: stop_strings", got="no tokenizer", expected="one to decode with", do="Give the sampler a tokenizer.")
    for request in requests:
        P = len(request.prompt.token_P)
        if P == 0 or (longest is not None and P + params.max_tokens > longest):
            raise DataError(
                f"sample: prompt {request.prompt.id!r}", got=f"{P} prompt tokens + at most {params.max_tokens} response tokens",
                expected=f"a prompt token and at most {longest} in all", do="Drop or shorten the prompt, lower max_tokens, or (with an engine that "
                "was started with less room than the model has) start it with more.",
            )  # fmt: skip
        if request.prefixes is not None and len(request.prefixes) != n:
            raise DataError(
                f"sample: prefixes of prompt {request.prompt.id!r}", got=len(request.prefixes), expected=f"one for each of the {n} samples",
                do="Give None for samples without a prefix.",
            )  # fmt: skip


def stop_beforehand(prefix: Prefix | None, max_tokens: int) -> StopReason | None:
    """Why nothing is to be sampled after this prefix: it had ended, or fills the response; None where there is something to sample."""
    if prefix is None:
        return None
    if prefix.stop is not None:
        return prefix.stop
    return StopReason.LENGTH if len(prefix.token_T) >= max_tokens else None
