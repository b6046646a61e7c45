"""Checkpoints: complete or refused, exact, and safe against a kill between any two writes."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import SafetensorError

import nearpolicy.trainer.checkpoint as module
from nearpolicy.errors import CheckpointError
from nearpolicy.trainer.checkpoint import (
    TrainerState,
    load_checkpoint,
    load_optimizer_tensors,
    newest,
    optimizer_tensors,
    prune,
    save_checkpoint,
    step_folder,
)
from nearpolicy.trainer.rundir import RunDirError


def state(step):
    return TrainerState(
        step=step,
        optimizer={"w/exp_avg": torch.full((3,), float(step)), "w/step": torch.tensor(float(step))},
        master={},
        schedule={"cursor": step, "batch": {"x": torch.arange(4)}, "slices": [[0, 1]], "none": None},
        extra={"clock": 1.5},
    )


def save_model(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 64)


@pytest.fixture
def checkpoints(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_saved_and_loaded_exactly(checkpoints):
    folder = save_checkpoint(checkpoints, state(200), save_model)
    assert folder.name == "step-000200"
    back = load_checkpoint(folder)
    assert back.step == 200
    assert torch.equal(back.optimizer["w/exp_avg"], torch.full((3,), 200.0))
    assert torch.equal(back.schedule["batch"]["x"], torch.arange(4))
    assert (back.schedule["slices"], back.schedule["none"], back.extra) == ([[0, 1]], None, {"clock": 1.5})
    assert sorted(p.name for p in checkpoints.parent.iterdir()) == ["checkpoints"]


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs, no cleanup either."""


def mortal(real, clock, die_at):
    """`real`, except that the call number `die_at` of all clocked calls kills."""

    def call(*args, **kwargs):
        if next(clock) == die_at:
            raise Killed
        return real(*args, **kwargs)

    return call


def test_killed_between_any_two_writes_leaves_a_resumable_run(checkpoints, monkeypatch):
    """Every call that touches the disk is a place to die."""
    save_checkpoint(checkpoints, state(1), save_model)
    deaths = 0
    for die_at in range(1, 200):
        clock = iter(range(1, 10_000))
        with monkeypatch.context() as patch:
            for name in ("_fsync", "_sha256", "save_file"):
                patch.setattr(module, name, mortal(getattr(module, name), clock, die_at))
            patch.setattr(os, "rename", mortal(os.rename, clock, die_at))
            patch.setattr(module.shutil, "rmtree", mortal(shutil.rmtree, clock, die_at))
            try:
                save_checkpoint(checkpoints, state(2), save_model)
                died = False
            except Killed:
                died, deaths = True, deaths + 1
        assert load_checkpoint(newest(checkpoints, print)).step in (1, 2)
        if not died:
            break
        shutil.rmtree(step_folder(checkpoints, 2), ignore_errors=True)
    assert deaths > 10
    assert not died
    prune(checkpoints, None, set())
    assert sorted(p.name for p in checkpoints.parent.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "manifest"])
def test_a_damaged_checkpoint_is_refused_and_said(checkpoints, damage):
    save_checkpoint(checkpoints, state(1), save_model)
    folder = save_checkpoint(checkpoints, state(2), save_model)
    victim = folder / "trainer" / ("manifest.json" if damage == "manifest" else "schedule.safetensors")
    content = victim.read_bytes()
    if damage in ("delete", "manifest"):
        victim.unlink()
    else:
        victim.write_bytes(content[:-3] if damage == "truncate" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointError, match="step-000002"):
        load_checkpoint(folder)
    said = []
    assert newest(checkpoints, said.append).name == "step-000001"
    assert len(said) == 1
    assert "step-000002" in said[0]


def test_a_run_without_a_checkpoint_begins_again_and_damaged_ones_are_said(checkpoints):
    assert newest(checkpoints, print) is None
    folder = save_checkpoint(checkpoints, state(1), save_model)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="1 damaged"):
        newest(checkpoints, print)


@pytest.mark.parametrize("content", ["[]", '{"a.txt": 5}', "3", "{}", '{"a": ["x", 1]}'])
def test_a_manifest_of_another_shape_is_damage(checkpoints, content):
    save_checkpoint(checkpoints, state(1), save_model)
    folder = save_checkpoint(checkpoints, state(2), save_model)
    (folder / "trainer" / "manifest.json").write_text(content)
    assert newest(checkpoints, print).name == "step-000001"


def test_steps_are_numbers_and_other_folders_are_left_alone(checkpoints):
    for step in (999_999, 1_000_000):
        save_checkpoint(checkpoints, state(step), save_model)
    (checkpoints / "step-000024.bak").mkdir()
    assert newest(checkpoints, print).name == "step-1000000"
    prune(checkpoints, 1, set())
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000024.bak", "step-1000000"]


def test_a_full_disk_is_said_and_earlier_checkpoints_stand(checkpoints, monkeypatch):
    save_checkpoint(checkpoints, state(1), save_model)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def wrapped(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def model_full(folder):
        try:
            full()
        except OSError as error:
            raise CheckpointError("Model folder", got="OSError", expected="room", do="Free space.") from error

    for save_file, model in ((full, save_model), (wrapped, save_model), (module.save_file, model_full)):
        monkeypatch.setattr(module, "save_file", save_file)
        with pytest.raises(RunDirError, match="no space left"):
            save_checkpoint(checkpoints, state(2), model)
    assert load_checkpoint(newest(checkpoints, print)).step == 1
    assert sorted(p.name for p in checkpoints.parent.iterdir()) == ["checkpoints"]


def test_pruning_spares_the_checkpoint_from_before_an_alarm(checkpoints):
    for step in (1, 2, 3, 4, 5):
        save_checkpoint(checkpoints, state(step), save_model)
    prune(checkpoints, 2, {2})
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_another_format_is_refused(checkpoints):
    folder = save_checkpoint(checkpoints, state(1), save_model)
    file = folder / "trainer" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    manifest = folder / "trainer" / "manifest.json"
    entries = json.loads(manifest.read_text())
    entries["trainer/state.json"] = [file.stat().st_size, module._sha256(file)]
    manifest.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(folder)


def test_optimizer_state_comes_back_bit_for_bit():
    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1), {id(p): n for n, p in model.named_parameters()}

    def update(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer, names = fresh()
    update(model, optimizer)
    saved, weights = optimizer_tensors(optimizer, names), {k: v.clone() for k, v in model.state_dict().items()}
    saved = {k: v.clone() for k, v in saved.items()}
    update(model, optimizer)
    other, again, names = fresh()
    other.load_state_dict(weights)
    load_optimizer_tensors(again, names, saved)
    update(other, again)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError, match="odd"):
        load_optimizer_tensors(again, names, {"odd/exp_avg": torch.zeros(1)})
