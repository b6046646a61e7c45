"""Weights in and out of a module: copied in place or shared, checked by name and shape, compared by digest."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nearpolicy.errors import EngineError, nearest


def weights_digest(weights: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> str:
    """A hash of names, shapes and values, hexadecimal. Equal on trainer and sampler exactly when they hold the same weights.

    Args:
        weights: Hugging Face names; order does not matter.
        dtype: convert floating weights first, to compare with a sampler of lower precision.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name].detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        value = value.cpu().contiguous()
        digest.update(f"{name}\x1f{tuple(value.shape)}\x1f{value.dtype}\x1f".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def copy_weights(module: torch.nn.Module, weights: Mapping[str, Tensor]) -> int:
    """Copy `weights` into the module's tensors in place; a weight that already is the module's tensor costs nothing.

    Tied tensors need one of their names. Returns the number of tensors copied.

    Raises:
        EngineError: an unknown name, a missing one, or another shape; nothing is copied then.
    """
    own = module.state_dict(keep_vars=True)
    check_weights(own, weights)
    copied = 0
    with torch.no_grad():
        for name, value in weights.items():
            target = own[name]
            if _same_memory(target, value):
                continue
            target.copy_(value)
            copied += 1
    return copied


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit a module's own tensors. Raises EngineError: an unknown name, a missing one, or another shape."""
    unknown = [name for name in weights if name not in own]
    if unknown:
        raise EngineError(
            "Sampler.load: weight names", got=f"{len(unknown)} unknown, first {unknown[0]!r}", expected="the names of the sampler's model",
            do=nearest(unknown[0], own) if len(own) < 1000 else "Publish the same architecture.",
        )  # fmt: skip
    held = {own[name].data_ptr() for name in weights}
    missing = [name for name in own if name not in weights and own[name].data_ptr() not in held]
    if missing:
        raise EngineError(
            "Sampler.load: weight names", got=f"{len(missing)} missing, first {missing[0]!r}", expected="every weight of the sampler's model",
            do="Publish whole weights: merge LoRA and gather shards first.",
        )  # fmt: skip
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise EngineError(
                f"Sampler.load: {name}", got=f"shape {tuple(value.shape)}", expected=f"{tuple(own[name].shape)}", do="Publish the same architecture."
            )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


def named(module: torch.nn.Module, names: Iterable[str] | None) -> dict[str, Tensor]:
    """The module's weights under these names, all when None."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return own if names is None else {name: own[name] for name in names}
