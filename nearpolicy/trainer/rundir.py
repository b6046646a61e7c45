"""The run directory: written aside and renamed, so that a kill at any moment leaves either the old file or the new one.

run.toml (resolved), env.json, status.json, metrics.jsonl, metrics_table.json, histogram_edges.json, position_edges.json,
truncation_tokens.json (relayed runs), evaluations/, rollouts/, checkpoints/, report.html.
"""

import dataclasses
import errno
import fcntl
import functools
import gzip
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from nearpolicy.config import Config
from nearpolicy.diagnostics import position
from nearpolicy.errors import NearPolicyError, UsageError
from nearpolicy.layers import changed_keys, read_toml, to_toml, to_tree
from nearpolicy.metrics import HISTOGRAMS, TABLE

RESUMABLE_CHANGES = (
    "train.steps", "eval.", "log.", "checkpoint.", "threads", "teacher.server", "teacher.timeout", "teacher.retries", "ray.", "schedule.worker",
    "schedule.wait_s", "train.rank_deadline",
)  # fmt: skip
"""Keys that may differ when a run is gone on with; any other change would not be the same run."""


class RunDirError(NearPolicyError, OSError):
    """A run directory that cannot be written."""


def write_atomic(path: Path, text: str) -> None:
    """Write aside, flush to the disk, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> RunDirError:
    """One clear line for a full disk, a missing right and the rest."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunDirError(str(path), got="no space left on the device", expected="room to write", do="Free space, then go on with --resume.")
    return RunDirError(str(path), got=error.strerror or repr(error), expected="a writable place", do="Choose another --out or mend its rights.")


class RunDir:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunDir":
        """A new run. Raises UsageError when the directory exists with anything in it, RunDirError when it cannot be written."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"--out {path}", got="it exists", expected="a new directory", do="Choose another --out, or go on with --resume.")
        run = cls(path)
        run._claim()
        write_atomic(path / "run.toml", to_toml(to_tree(config)))
        write_atomic(path / "env.json", json.dumps(environment(), indent=1))
        write_atomic(path / "metrics_table.json", json.dumps([dataclasses.asdict(spec) for spec in TABLE.values()], indent=1))
        write_atomic(path / "histogram_edges.json", json.dumps(HISTOGRAMS))
        write_atomic(path / "position_edges.json", json.dumps(position.EDGES))
        run.set_status("running", step=0)
        return run

    @classmethod
    def open(cls, path: Path, config: Config) -> "RunDir":
        """An existing run to go on with. Raises UsageError when there is none or its configuration differs (it says which keys)."""
        saved = path / "run.toml"
        if not saved.exists():
            raise UsageError(f"--resume {path}", got="no run.toml in it", expected="a run directory", do="Give the --out of the run to go on with.")
        changed = changed_keys(read_toml(saved), to_tree(config))
        refused = [k for k in changed if not k.startswith(RESUMABLE_CHANGES)]
        if refused:
            raise UsageError(
                f"--resume {path}", got=f"changed keys {', '.join(refused)}", expected="the configuration in run.toml",
                do="Take the changes back, or start another run from its checkpoint with model.path.",
            )  # fmt: skip
        run = cls(path)
        run._claim()
        if changed:
            write_atomic(saved, to_toml(to_tree(config)))
        return run

    def _claim(self) -> None:
        """Make the folders and hold the lock of this run until `close` or the end of the process, however it ends."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.rollouts.mkdir(exist_ok=True)
            self._lock = open(self.path / ".lock", "a+", encoding="ascii")  # noqa: SIM115
        except OSError as error:
            raise disk_error(self.path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise UsageError(f"--out {self.path}", got=f"another process running in it (pid {owner})", expected="one process in a run",
                             do="Wait for it or stop it.") from None  # fmt: skip
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def close(self) -> None:
        """Let another process go on with the run; idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def metrics_file(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    def set_status(self, status: str, *, step: int, message: str = "") -> None:
        """running, finished, interrupted or failed."""
        write_atomic(self.path / "status.json", json.dumps({"status": status, "step": step, "message": message, "time": time.time()}))

    def status(self) -> dict[str, Any]:
        """What `set_status` wrote last; {} when nothing did."""
        file = self.path / "status.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}

    def write_evaluation(self, step: int, prompts: str, values: Mapping[str, Sequence[float | None]]) -> None:
        """Per-prompt values of one evaluation: what intervals over prompts and paired comparisons of runs are made from.

        Args:
            prompts: digest of the held-out prompts in order; evaluations with equal digests are paired prompt by prompt.
            values: pass@k, avg@n -> one value for each prompt; None = missing.
        """
        folder = self.path / "evaluations"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(folder, error) from error
        document = {"step": step, "prompts": prompts, "values": values}
        write_atomic(folder / f"step-{step:06d}.json", json.dumps(document, separators=(",", ":")))

    def write_truncation(self, table: Mapping[str, Any]) -> None:
        """Counts of the tokens at the cuts of the run so far (`TruncationTokens.table`)."""
        write_atomic(self.path / "truncation_tokens.json", json.dumps(table))

    def write_rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Sample responses of one update, as compressed JSON lines."""
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        path = self.rollouts / f"step-{step:06d}.jsonl.gz"
        aside = path.with_name(f".{path.name}")
        try:
            aside.write_bytes(gzip.compress(text.encode(), mtime=0))
            os.replace(aside, path)
        except OSError as error:
            raise disk_error(path, error) from error


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what a number of this run is traced to."""
    versions = {}
    for name in ("nearpolicy", "torch", "transformers", "numpy", "safetensors", "peft", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    import torch

    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "commit": commit(),
    }


def run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in; None outside one."""
    return next((p for p in checkpoint.resolve().parents if (p / "run.toml").exists()), None)


@functools.cache
def commit() -> str | None:
    """Git commit of the source tree this package is imported from, with `+changes` for uncommitted ones; None outside a checkout.

    As it was at the first call: a process that trains for hours runs the code it imported, whatever is checked out meanwhile.
    """
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        run = ["git", "-C", str(here)]
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        dirty = subprocess.run([*run, "status", "--porcelain", "--", "nearpolicy"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if dirty.strip() else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
