"""Randomness by key: a draw depends on its key alone, never on batch composition, scheduling or worker.

key = (run seed, stream, ledger ticket, sample, attempt); the token position indexes the draws of one key.
"""

import hashlib
from enum import StrEnum

import numpy as np


class Stream(StrEnum):
    """Separate noise for separate uses, so that a relayed suffix never replays the noise of its seed."""

    ROLLOUT = "rollout"
    BANK = "bank"
    EVAL = "eval"


def generator(run_seed: int, *key: object) -> np.random.Generator:
    """A Philox generator for this key. Equal keys give equal streams on every machine."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in (run_seed, *key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def token_uniforms(
    run_seed: int, stream: Stream, ticket: int, sample: int, attempt: int, num_tokens: int
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The uniforms in [0, 1) with which response token 0, 1, ... of one sample is drawn, float64 [num_tokens] with 53 bits each.

    A longer request has the same beginning: `token_uniforms(..., 8)[:4] == token_uniforms(..., 4)`.
    """
    return generator(run_seed, stream, ticket, sample, attempt).random(num_tokens)
