"""Checkpoints: a plain Hugging Face folder with `trainer/` inside for exact resume.

Written aside inside the run directory, flushed, then renamed into `checkpoints/`: what lies there is complete, or was damaged later,
and `trainer/manifest.json` (size and SHA-256 of every file) tells. Nothing is unpickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nearpolicy.errors import CheckpointError
from nearpolicy.policy.shares import share_of, whole
from nearpolicy.records import join_arrays, pack, split_arrays
from nearpolicy.trainer.rundir import disk_error

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything besides the model folder that the next update depends on."""

    step: int
    optimizer: dict[str, Tensor]
    master: dict[str, Tensor]
    """Trained tensors at full precision, where the Hugging Face folder cannot hold them (adapters are merged there)."""
    schedule: dict[str, Any]
    """`Schedule.state_dict()`."""
    extra: dict[str, Any]
    """Alarms and clocks."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files that never change once written and belong to the state (a seed bank), by name: taken along in `trainer/`, by a link where the disk
    allows one."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """checkpoints/step-000200."""
    return checkpoints / f"step-{step:06d}"


def save_checkpoint(checkpoints: Path, state: TrainerState, save_model: Callable[[Path], None]) -> Path:
    """Write a checkpoint.

    Raises:
        RunDirError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    target = step_folder(checkpoints, state.step)
    aside = checkpoints.parent / f".writing-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        trainer = aside / "trainer"
        trainer.mkdir(parents=True)
        save_model(aside)
        tree, arrays = split_arrays(pack(state.schedule), "schedule")
        save_file(_contiguous(state.optimizer), trainer / "optimizer.safetensors")
        save_file(_contiguous(state.master), trainer / "master.safetensors")
        save_file(_contiguous(arrays), trainer / "schedule.safetensors")
        for name, path in state.files.items():
            _link(path, trainer / name)
        document = {"format": FORMAT, "step": state.step, "schedule": tree, "extra": state.extra, "files": sorted(state.files)}
        (trainer / "state.json").write_text(json.dumps(document), encoding="utf-8")
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(aside)): [p.stat().st_size, _sha256(p)] for p in files}
        (trainer / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in [*files, trainer / "manifest.json"]:
            _fsync(path)
        shutil.rmtree(target, ignore_errors=True)  # only a damaged one can lie there; an earlier checkpoint covers this moment
        os.rename(aside, target)
        _fsync(checkpoints)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise disk_error(target, _os_error(error)) from error
    return target


def _os_error(error: BaseException) -> OSError:
    """The system's error behind this one: safetensors and transformers wrap it, or only name its number."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        if number := re.search(r"os error (\d+)", str(cause)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        cause = cause.__cause__ or cause.__context__
    return OSError(str(error))


def load_checkpoint(folder: Path) -> TrainerState:
    """The trainer's half of a checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
    verify(folder)
    trainer = folder / "trainer"
    document = json.loads((trainer / "state.json").read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise CheckpointError(str(folder), got=f"format {document.get('format')}", expected=str(FORMAT), do="Go on with the version that wrote it.")
    return TrainerState(
        step=int(document["step"]),
        optimizer=load_file(trainer / "optimizer.safetensors"),
        master=load_file(trainer / "master.safetensors"),
        schedule=join_arrays(document["schedule"], load_file(trainer / "schedule.safetensors")),
        extra=document["extra"],
        files={name: trainer / name for name in document.get("files", [])},
    )


def load_trained(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Optimizer state and master tensors of a checkpoint that was verified: what a rank besides the first one needs."""
    return load_file(folder / "trainer" / "optimizer.safetensors"), load_file(folder / "trainer" / "master.safetensors")


def take_files(state: TrainerState, folder: Path) -> None:
    """Put the files of a checkpoint's state back where the run keeps them.

    Raises:
        RunDirError: the folder cannot be written.
    """
    for name, path in state.files.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            _link(path, folder / name)
        except OSError as error:
            raise disk_error(folder / name, error) from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its size and hash."""
    manifest = folder / "trainer" / "manifest.json"
    try:
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in json.loads(manifest.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise CheckpointError(str(folder), got="no readable trainer/manifest.json", expected="a complete checkpoint",
                              do="Go on from an earlier checkpoint.") from None  # fmt: skip
    if "trainer/state.json" not in files:
        raise CheckpointError(str(folder), got="a manifest without trainer/state.json", expected="a complete checkpoint",
                              do="Go on from an earlier checkpoint.")  # fmt: skip
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or _sha256(path) != digest:
            raise CheckpointError(str(folder), got=f"{name} missing or damaged", expected="the file as it was written",
                                  do="Go on from an earlier checkpoint" + (" of another cycle: those of one share their seed bank."
                                                                           if "seeds-" in name else "."))  # fmt: skip


def saved_steps(checkpoints: Path) -> dict[int, Path]:
    """Checkpoint folders by step, oldest first; anything else that lies there is left alone."""
    found = {int(m[1]): p for p in checkpoints.glob("step-*") if p.is_dir() and (m := re.fullmatch(r"step-(\d{6,})", p.name))}
    return dict(sorted(found.items()))


def newest(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint, each damaged one passed over being said; None when the run never wrote one.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    folders = list(saved_steps(checkpoints).values())
    for folder in reversed(folders):
        try:
            verify(folder)
        except CheckpointError as error:
            say(f"passed over: {error}")
            continue
        return folder
    if folders:
        raise CheckpointError(str(checkpoints), got=f"{len(folders)} damaged checkpoints and no complete one", expected="a complete one",
                              do="Restore one from a copy, or start the run again with another --out.")  # fmt: skip
    return None


def prune(checkpoints: Path, keep: int | None, spared: set[int]) -> None:
    """Delete all but the newest `keep` checkpoints and the spared steps, and leftovers of a killed writer."""
    for leftover in checkpoints.parent.glob(".writing-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    steps = saved_steps(checkpoints)
    for step in list(steps)[:-keep]:
        if step not in spared:
            shutil.rmtree(steps[step], ignore_errors=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors `name/exp_avg`, `name/step`; `names` maps id(parameter) to its name."""
    out: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            out[f"{names[id(parameter)]}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return out


def gather_whole(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Shares of ranks made whole, on the CPU, one after the other; other tensors as they are. Collective where there are shares.

    Args:
        keep: False takes part and returns {}.
    """
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        full = whole(value.detach())
        if keep:
            out[name] = full.cpu() if full is not value else full
    return out


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, Tensor]) -> None:
    """The inverse; raises CheckpointError on names that do not fit the model."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        by_name.setdefault(name, {})[slot] = value
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    if set(by_name) - set(parameters):
        odd = sorted(set(by_name) - set(parameters))[0]
        raise CheckpointError(
            "optimizer state", got=f"state of {odd!r}", expected="the model's parameters", do="Resume with the same model and adapters."
        )
    for name, state in by_name.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            slot: value.to(parameter.device) if slot == "step" else share_of(value.to(parameter.dtype).reshape(parameter.shape), parameter)
            for slot, value in state.items()
        }


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
