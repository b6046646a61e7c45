"""The seed bank: responses stored for the rest of a relay cycle, in one safetensors file that is written once and only read after.

12 bytes a token (id int32, log-prob float32, entropy float32; 8 without entropies) and 5 a response (length int32, stop uint8); the version,
the tickets and the run they belong to stand once in the header. Groups lie in the order of their tickets, seeds in the order of their samples.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nearpolicy.errors import CheckpointError
from nearpolicy.rollout import Array, Prefix, Rollout, StopReason

SUFFIX = ".safetensors"
TOKEN_BYTES = 12
"""Largest number of bytes stored for a token."""
RESPONSE_BYTES = 5
_STOPS = tuple(StopReason)
_FORMAT = "seeds-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a bank says of itself."""

    run: str
    """Fingerprint of the run that wrote it."""
    version: int
    """Policy version that wrote every token."""
    first_ticket: int
    groups: int
    seeds: int
    """Stored responses of each group."""

    @property
    def name(self) -> str:
        """File name."""
        return f"seeds-{self.version:06d}{SUFFIX}"


class SeedBank:
    """Seeds by ticket. `SeedBank.write` makes one, `SeedBank(path, ...)` opens one."""

    def __init__(self, path: Path, *, run: str, digest: str | None = None) -> None:
        """Open a bank.

        Args:
            run: fingerprint of the run that reads it.
            digest: SHA-256 of the file as it was written; None does not ask.
        Raises:
            CheckpointError: no such file, a truncated or damaged one, or one of another run.
        """
        self.path = path
        try:
            self.digest = _sha256(path)
            if digest is not None and digest != self.digest:
                raise CheckpointError(f"seed bank {path}", got="contents other than those written (truncated or damaged)",
                                      expected=f"SHA-256 {digest[:12]}...", do="Restore the file, or go on from an earlier checkpoint.")  # fmt: skip
            self._file = safe_open(path, "np")
            header = json.loads((self._file.metadata() or {})["nearpolicy"])
            if header.pop("format") != _FORMAT:
                raise ValueError("another format")
            self.header = Header(**header)
            self.length_R = self._file.get_tensor("length_R").astype(np.int64)
            self._stop_R = self._file.get_tensor("stop_R")
            self.num_tokens = self._file.get_slice("token_N").get_shape()[0]
            self._has_entropy = "entropy_N" in self._file.keys()  # noqa: SIM118
            whole = len(self.length_R) == len(self._stop_R) == self.header.groups * self.header.seeds and self.length_R.sum() == self.num_tokens
            if not whole:
                raise ValueError("columns of unequal lengths")
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"seed bank {path}", got=" ".join(why.split()), expected="a whole file written by this run",
                                  do="Restore the file, or go on from an earlier checkpoint.") from error  # fmt: skip
        if self.header.run != run:
            raise CheckpointError(f"seed bank {path}", got=f"one of another run ({self.header.run})", expected=f"this run's ({run})",
                                  do="Put back the file that belongs to this run directory.")  # fmt: skip
        self._start_R = np.concatenate([[0], np.cumsum(self.length_R)])

    @classmethod
    def write(cls, folder: Path, header: Header, chunks: Iterable[Sequence[Rollout]], *, entropy: bool) -> "SeedBank":
        """Write a bank aside, flush, rename, and open it.

        Args:
            chunks: the responses in order: groups by ticket, samples within; taken one chunk at a time.
            entropy: store entropies too; every response must then have them.
        Raises:
            CheckpointError: the disk is full or the folder cannot be written; no bank is left behind.
        """
        names = ["token_N", "logp_N", "length_R", "stop_R", *(["entropy_N"] if entropy else [])]
        columns: dict[str, list[Array]] = {name: [] for name in names}
        for chunk in chunks:
            columns["length_R"].append(np.array([len(r.response_T) for r in chunk], dtype=np.int32))
            columns["stop_R"].append(np.array([_STOPS.index(r.stop) for r in chunk], dtype=np.uint8))
            for r in chunk:
                columns["token_N"].append(np.asarray(r.response_T, dtype=np.int32))
                columns["logp_N"].append(np.asarray(r.logp_behavior_T, dtype=np.float32))
                if entropy:
                    columns["entropy_N"].append(np.asarray(r.entropy_T, dtype=np.float32))
        arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
        described = json.dumps({"format": _FORMAT, **{name: getattr(header, name) for name in Header.__slots__}})
        path = folder / header.name
        _written(path, lambda aside: save_file(arrays, aside, metadata={"nearpolicy": described}))
        return cls(path, run=header.run)

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return self.path.stat().st_size

    def __contains__(self, ticket: int) -> bool:
        return 0 <= ticket - self.header.first_ticket < self.header.groups

    def group(self, ticket: int) -> list[Prefix]:
        """The whole stored responses of this ticket's group."""
        first = (ticket - self.header.first_ticket) * self.header.seeds
        start_R = self._start_R[first : first + self.header.seeds + 1]
        low, high = int(start_R[0]), int(start_R[-1])

        def read(name: str, dtype: Any) -> Array:
            # safetensors refuses an empty slice.
            column: Array = np.asarray(self._file.get_slice(name)[low:high]) if high > low else np.zeros(0)
            return column.astype(dtype)

        token, logp = read("token_N", np.int64), read("logp_N", np.float32)
        entropy = read("entropy_N", np.float32) if self._has_entropy else None
        out = []
        for i in range(self.header.seeds):
            here = slice(int(start_R[i]) - low, int(start_R[i + 1]) - low)
            version = np.full(here.stop - here.start, self.header.version, dtype=np.int64)
            stop = _STOPS[int(self._stop_R[first + i])]
            out.append(
                Prefix(
                    token_T=token[here],
                    logp_behavior_T=logp[here],
                    version_T=version,
                    entropy_T=None if entropy is None else entropy[here],
                    stop=stop,
                )
            )
        return out


def cut_short(seed: Prefix, kept: int) -> Prefix:
    """The first `kept` tokens of a stored response: finished only when it is kept whole, with the end it had."""
    return Prefix(
        token_T=seed.token_T[:kept], logp_behavior_T=seed.logp_behavior_T[:kept], version_T=seed.version_T[:kept],
        entropy_T=None if seed.entropy_T is None else seed.entropy_T[:kept], stop=seed.stop if kept == len(seed.token_T) else None,
    )  # fmt: skip


def beginning(rollout: Rollout, kept: int) -> Prefix:
    """The first `kept` tokens of a sampled response, as `cut_short`; its entropies are left out."""
    assert rollout.logp_behavior_T is not None, "sampled, not shown"
    whole = Prefix(token_T=rollout.response_T, logp_behavior_T=rollout.logp_behavior_T, version_T=rollout.version_T, stop=rollout.stop)
    return cut_short(whole, kept)


def bound_bytes(responses: int, max_tokens: int) -> int:
    """Most bytes that a bank of so many responses takes, its header left out."""
    return responses * (RESPONSE_BYTES + TOKEN_BYTES * max_tokens)


def _written(path: Path, save: Callable[[Path], None]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            aside.unlink()
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error) or "os error 122" in str(error)
        raise CheckpointError(f"seed bank {path}", got="no space left on the device" if full else " ".join(str(error).split()),
                              expected="room to write", do="Free space, then go on with --resume.") from error  # fmt: skip


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
