"""A recording of the batches a run trained on, and the schedule that drives a trainer from one: the same updates again, whatever made the batches.

One file an update, `batch-000123.npz`: the columns of the batch as it was trained on, compressed, nothing pickled. A run that goes on from a
checkpoint writes the files of later updates again.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearpolicy.errors import CheckpointError, DataError
from nearpolicy.metrics import Metrics
from nearpolicy.protocols import Schedule
from nearpolicy.records import join_arrays, pack, split_arrays, unpack
from nearpolicy.rollout import Batch, Scored
from nearpolicy.schedule.batches import ages

FORMAT = "batch-1"
_LEVEL = 1  # deflate: level 6 takes three times as long for a tenth less


def batch_file(folder: Path, update: int) -> Path:
    """Where the batch of update `update` (from 0) lies."""
    return folder / f"batch-{update:06d}.npz"


def save_batch(path: Path, batch: Batch, *, tokens_sampled: int) -> int:
    """Write a batch aside, then rename; returns the size in bytes.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    tree, tensors = split_arrays(pack(batch), "batch")
    document = json.dumps({"format": FORMAT, "batch": tree, "tokens_sampled": tokens_sampled}).encode()
    arrays = {"document": np.frombuffer(document, dtype=np.uint8), **{name: tensor.numpy() for name, tensor in tensors.items()}}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
        os.replace(aside, path)
        return path.stat().st_size
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise CheckpointError(f"recording {path}", got=error.strerror or str(error), expected="room to write",
                              do="Free space, or switch schedule.record off.") from error  # fmt: skip


def load_batch(path: Path) -> tuple[Batch, int]:
    """(batch, tokens sampled until then) of a file that `save_batch` wrote.

    Raises:
        DataError: no such file, or a damaged one.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            document = json.loads(file["document"].tobytes())
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}")
            tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != "document"}
        return unpack(Batch, join_arrays(document["batch"], tensors)), int(document["tokens_sampled"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
        why = "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise DataError(f"recording {path}", got=why, expected="a batch that schedule.record wrote", do="Record the run again.") from error


class Recorder:
    """Implements `Schedule`: another one, whose batches are written down.

    Args:
        folder: where the recording lies.
        limit_bytes: what it may take; a batch that would go beyond it is not written, nor any after it.
        say: told once when the limit is reached.
    """

    def __init__(self, inner: Schedule, folder: Path, *, limit_bytes: int, say: Callable[[str], None]) -> None:
        self.inner, self.folder, self.limit_bytes, self.say = inner, folder, limit_bytes, say
        self.full = False
        self._used: int | None = None  # bytes in the folder; None before the first batch of this process

    @property
    def tokens_sampled(self) -> int:
        """That of the recorded schedule."""
        return self.inner.tokens_sampled

    @tokens_sampled.setter
    def tokens_sampled(self, value: int) -> None:
        self.inner.tokens_sampled = value

    @property
    def last_scored(self) -> Sequence[Scored]:
        """That of the recorded schedule."""
        return self.inner.last_scored

    @last_scored.setter
    def last_scored(self, value: Sequence[Scored]) -> None:
        self.inner.last_scored = value

    def next(self, version: int) -> Batch:
        """The recorded schedule's batch, after it was written down.

        Raises:
            CheckpointError: the disk is full.
        """
        batch = self.inner.next(version)
        if not self.full:
            self._write(batch, version)
        return batch

    def metrics(self) -> Metrics:
        """Those of the recorded schedule."""
        return self.inner.metrics()

    def state_dict(self) -> dict[str, Any]:
        """That of the recorded schedule."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.inner.load_state_dict(state)

    def close(self) -> None:
        """Close the recorded schedule."""
        self.inner.close()

    def _write(self, batch: Batch, version: int) -> None:
        path = batch_file(self.folder, version)
        if self._used is None:
            for later in _recorded(self.folder):  # of an earlier process that came further than its last checkpoint
                if later >= version:
                    batch_file(self.folder, later).unlink()
            self._used = sum(batch_file(self.folder, v).stat().st_size for v in _recorded(self.folder))
        size = save_batch(path, batch, tokens_sampled=self.tokens_sampled)
        if self._used + size > self.limit_bytes:
            path.unlink()
            self.full = True
            self.say(f"recording {self.folder}: {self.limit_bytes / 2**20:.0f} MiB are used up (the batch of update {version} takes "
                     f"{size / 2**20:.1f}); nothing more is recorded")  # fmt: skip
        else:
            self._used += size


class ReplaySchedule:
    """Implements `Schedule` from a recording: the batch of update k is the recorded one of update k.

    Raises:
        DataError: no recording there, or one that does not begin with the first update.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens_sampled = 0
        self.last_scored: Sequence[Scored] = []
        self._metrics: Metrics = {}
        found = _recorded(folder)
        self.updates = next((k for k in range(len(found) + 1) if k not in found), 0)
        """Updates recorded, from the first without a gap."""
        if not self.updates:
            raise DataError(f"schedule.path {folder}", got="no recorded batches", expected="a folder that schedule.record wrote (RUN/recording)",
                            do="Record a run first (schedule.record=true).")  # fmt: skip

    def next(self, version: int) -> Batch:
        """The batch of update `version` (from 0).

        Raises:
            DataError: more updates than were recorded, or a damaged file.
        """
        if version >= self.updates:
            raise DataError(f"schedule.path {self.folder}", got=f"update {version + 1} of a recording of {self.updates}",
                            expected=f"train.steps of at most {self.updates}", do="Lower train.steps, or record a longer run.")  # fmt: skip
        batch, self.tokens_sampled = load_batch(batch_file(self.folder, version))
        self._metrics = ages(batch, version)
        return batch

    def metrics(self) -> Metrics:
        """Ages; the rest was measured when the run was recorded."""
        out, self._metrics = self._metrics, {}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next batch depends on the update alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to end."""


def _recorded(folder: Path) -> set[int]:
    """Updates whose batch lies in the folder."""
    matches = [re.fullmatch(r"batch-(\d{6,})\.npz", p.name) for p in folder.glob("batch-*.npz")]
    return {int(m[1]) for m in matches if m}
