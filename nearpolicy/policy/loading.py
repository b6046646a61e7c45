"""A transformers causal language model from a Hugging Face folder: weights, tokenizer, LoRA, recomputed activations. Bad folders are one line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nearpolicy.errors import CheckpointError, UsageError
from nearpolicy.policy.quiet import quiet_transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_MAX_SHOWN = 300
_WEIGHT_FILES = ("*.safetensors",)
DType = Literal["auto", "float32", "bfloat16"]
ALIGNMENT = 64
"""Bytes: where torch's own allocations on the CPU begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters on the linear layers, W + (alpha / rank) B A (Hu et al. 2021, arXiv 2106.09685, section 4.1). No dropout: log-probs
    of one policy must not depend on a draw."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | str = "all-linear"
    """Module name endings, or "all-linear" for every linear layer except the output matrix."""


def load_model(
    path: str | Path,
    *,
    dtype: DType = "auto",
    device: str = "auto",
    lora: LoraOptions | None = None,
    gradient_checkpointing: bool = False,
    attention: str | None = None,
) -> tuple[Any, Any]:
    """A model and its tokenizer from a Hugging Face folder (or a repository id that lies in the local cache); nothing is downloaded.

    Args:
        path: folder with config.json, safetensors weights and tokenizer files.
        dtype: of the stored weights. "auto" and "float32" give float32 master weights; "bfloat16" halves memory for models that are not trained.
        device: "auto" takes CUDA where there is one.
        lora: train adapters and freeze everything else.
        gradient_checkpointing: compute activations again in backward (per layer, non-reentrant).
        attention: a transformers attention implementation; None leaves the choice to `HFPolicy`. Any choice but "sdpa" turns packing off.

    Returns:
        (model, tokenizer), the model in evaluation mode.

    Raises:
        CheckpointError: no such folder, no config, no tokenizer, no weights, weights that are corrupt, truncated, incomplete, not finite or of the
            wrong shape, an architecture that transformers does not know as a causal language model.
        UsageError: an unknown dtype, or LoRA options that fit no layer.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError("model.dtype", got=repr(dtype), expected="auto, float32 or bfloat16", do="Use auto for master weights in float32.")
    folder = _folder(path)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    with quiet_transformers():
        tokenizer, model, info = _read(folder, torch.bfloat16 if dtype == "bfloat16" else torch.float32, attention)
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            names = sorted(k if isinstance(k, str) else str(k[0]) for k in info[kind])  # mismatched: (name, shape, shape)
            raise CheckpointError(
                f"Model folder {folder}: weights", got=f"{len(names)} {kind.replace('_', ' ')}, e.g. {names[0]}",
                expected="every weight of the architecture in config.json", do="Copy the folder again; it is incomplete or of another config.",
            )  # fmt: skip
    model = model.to(where)
    align_memory(model)
    refuse_not_finite(model, f"Model folder {folder}: weights")
    if gradient_checkpointing:
        checkpoint_activations(model)
    if lora is not None:
        add_lora(model, lora)
    return model.eval(), tokenizer


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a Hugging Face folder, without its weights.

    Raises:
        CheckpointError: no such folder, no config or no tokenizer that can be read.
    """
    folder = _folder(path)
    with quiet_transformers():
        return _read_tokenizer(folder)


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # transformers raises many kinds here; the tokenizer would read it too, and be blamed
        raise _unreadable(folder, "config.json", e) from e
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:
        raise _unreadable(folder, "tokenizer", e) from e


def _read(folder: Path, dtype: torch.dtype, attention: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """Tokenizer, model, and what transformers says of the loading."""
    from transformers import AutoModelForCausalLM

    tokenizer = _read_tokenizer(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in `info`, with their names, and refused by the caller
            **({} if attention is None else {"attn_implementation": attention}),
        )
    except Exception as e:
        raise _unreadable(folder, "model", e) from e
    return tokenizer, model, info


def align_memory(model: nn.Module) -> None:
    """Weights in memory of their own that begins where allocated tensors do. Those of a mapped file lie wherever its header ends, and products with
    one row round otherwise where a matrix does not begin at a multiple of 16 bytes: the same weights would give other bits in another process."""
    with torch.no_grad():
        for value in model.parameters():
            value.data = aligned(value.data)


def aligned(value: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where it lies in memory of the CPU that does not begin at a multiple of ALIGNMENT bytes."""
    return value.clone() if value.device.type == "cpu" and value.data_ptr() % ALIGNMENT else value


def checkpoint_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # its name before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def refuse_not_finite(model: nn.Module, what: str) -> None:
    """A sum is not finite if a term is not: one read of each weight, without a copy.

    Raises:
        CheckpointError: naming the first such weight.
    """
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not torch.isfinite(value.sum(dtype=torch.float32)) and (bad := int((~torch.isfinite(value)).sum())):
                raise CheckpointError(what, got=f"{bad} of {value.numel()} values of {name} NaN or infinite", expected="finite weights",
                                      do="Copy the folder again, or take an earlier checkpoint.")  # fmt: skip


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        cached = cached_repository(str(path))
        if cached is None:
            raise CheckpointError(
                f"Model folder {path}", got="no such folder", expected="a Hugging Face model folder",
                do="Check the path; a model on the hub must be downloaded first (hf download NAME).",
            )  # fmt: skip
        folder = cached
    for what, patterns in (("config.json", ("config.json",)), ("tokenizer", _TOKENIZER_FILES), ("safetensors weights", _WEIGHT_FILES)):
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise CheckpointError(
                f"Model folder {folder}", got=f"no {what}", expected="config.json, *.safetensors and tokenizer files",
                do=f"Copy the missing files ({', '.join(patterns[:3])}) into it.",
            )  # fmt: skip
    return folder


def cached_repository(name: str) -> Path | None:
    """Folder of a hub repository `owner/name` in the local cache, or None; nothing is downloaded."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the cache, or not a repository id: the caller says so
        return None


def _unreadable(folder: Path, what: str, error: Exception) -> CheckpointError:
    message = " ".join(f"{type(error).__name__}: {str(error) or 'no message'}".split())[:_MAX_SHOWN]
    return CheckpointError(
        f"Model folder {folder}: {what}", got=message, expected=f"a readable {what}",
        do="Copy the folder again, and check that this transformers version knows the architecture.",
    )  # fmt: skip


def add_lora(model: nn.Module, options: LoraOptions) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise UsageError("model.lora", got="peft is not installed", expected="the extra", do="pip install 'nearpolicy[lora]'.") from e
    targets = options.target_modules
    try:
        inject_adapter_in_model(
            LoraConfig(r=options.rank, lora_alpha=options.alpha, lora_dropout=0.0, bias="none",
                       target_modules=targets if isinstance(targets, str) else list(targets)), model,
        )  # fmt: skip
    except ValueError as e:
        raise UsageError("model.lora", got=str(options), expected="a rank above 0 and names of linear layers", do=str(e).splitlines()[0]) from e


def fast_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 beat float32 on this device: CUDA with native bf16, or a CPU with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False
