"""Weights on their way from a trainer to samplers in other processes: packed without a copy, read without a copy, checked after each load.

A parcel holds views of the trainer's tensors, so that whoever ships it copies once. A sampler that computes in the dtype of the parcel uses its
memory as it lies, even where that may only be read; a tensor that lies at an odd address is copied.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nearpolicy.errors import EngineError
from nearpolicy.policy.loading import aligned
from nearpolicy.protocols import Sampler
from nearpolicy.rollout import Array
from nearpolicy.sampler.weights import check_weights, named

SPOTS = 4096
"""Values of each tensor that are compared: an engine that kept old weights differs in every tensor that was trained."""

SamplerFactory = Callable[[], Sampler]
"""Makes a sampler in the process that calls it. Picklable."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Weights of one version as plain arrays. Picklable, with its bytes out of band."""

    version: int
    digest: str
    """`spot_digest` of the weights where they were packed."""
    arrays: Mapping[str, Array]
    """Name -> bytes of the tensor, uint8 [size]; tied names share one array."""
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype (as torch names it) and shape."""

    @property
    def size(self) -> int:
        """Bytes, tied tensors once."""
        return sum({id(a): a.nbytes for a in self.arrays.values()}.values())

    def tensors(self) -> dict[str, Tensor]:
        """The weights as tensors on these arrays: not to be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that cannot be written to
            seen = {id(a): torch.from_numpy(a) for a in self.arrays.values()}
        return {name: seen[id(array)].view(getattr(torch, self.kinds[name][0])).view(self.kinds[name][1]) for name, array in self.arrays.items()}


def pack(weights: Mapping[str, Tensor], version: int) -> Parcel:
    """A parcel on the weights' own memory; copied only from another device or where not contiguous."""
    arrays: dict[str, Array] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    seen: dict[tuple[int, torch.dtype, torch.Size], Array] = {}
    for name, value in weights.items():
        key = (value.data_ptr(), value.dtype, value.shape)
        if key not in seen or not value.numel():
            seen[key] = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        arrays[name] = seen[key]
        kinds[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return Parcel(version, spot_digest(weights), arrays, kinds)


def _spots(value: Tensor) -> Tensor:
    """At most SPOTS values, spread evenly; the odd step meets all columns of a matrix."""
    return value.detach().reshape(-1)[:: math.ceil(max(value.numel(), 1) / SPOTS) | 1]


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def spot_digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and up to SPOTS values of each tensor, hexadecimal. Reads little, so that a publication costs about one copy."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name]
        digest.update(f"{name}\x1f{tuple(value.shape)}\x1f{value.dtype}\x1f".encode())
        digest.update(_bytes(_spots(value)))
    return digest.hexdigest()


def adopt_weights(module: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Make these tensors the module's own where dtype, device and alignment agree, and copy the others into fresh memory. Nothing of the module's
    earlier memory is written to. The module must not be trained, nor written to, from then on.

    Raises:
        EngineError: as `copy_weights`; nothing has changed then.
    """
    own = module.state_dict(keep_vars=True)
    check_weights(own, weights)
    for name, value in weights.items():
        target = own[name]
        target.data = aligned(value.detach().to(device=target.device, dtype=target.dtype))


def load_parcel(sampler: Sampler, parcel: Parcel) -> None:
    """Have the sampler hold these weights, and look whether it does. One with a method `adopt` (as `load`) takes the parcel's memory as it is.

    Raises:
        EngineError: weights damaged on their way, a sampler that has another version or other weights than it was given, or what its `load` raises.
    """
    weights = parcel.tensors()
    if spot_digest(weights) != parcel.digest:
        raise EngineError(f"weights of version {parcel.version}", got="other values than were published", expected="equal ones",
                          do="They were damaged on their way; start the run again.")  # fmt: skip
    take = getattr(sampler, "adopt", None) or sampler.load
    take(weights, parcel.version)
    if sampler.version != parcel.version:
        raise EngineError("sampler", got=f"version {sampler.version} after loading version {parcel.version}", expected="the version it was given",
                          do="The engine does not take new weights: nothing it writes can be trained on.")  # fmt: skip
    check_held(sampler, weights, parcel.version)


def check_held(sampler: Sampler, weights: Mapping[str, Tensor], version: int) -> None:
    """Compare what a sampler holds with what it was given, where its `model` can be read (other engines check in their own `load`).

    Raises:
        EngineError: a tensor that differs.
    """
    module = getattr(sampler, "model", None)
    if not isinstance(module, torch.nn.Module):
        return
    held = named(module, list(weights))
    for name, value in weights.items():
        given = _spots(value).to(held[name].dtype)
        if _bytes(given) != _bytes(_spots(held[name])):
            raise EngineError("sampler", got=f"other values in {name!r} than those of version {version}, which it says it holds",
                              expected="the weights it was given", do="The engine acknowledged an update and kept old weights: mend it.")  # fmt: skip
