"""Whole tensors and this rank's share of them. Imports nothing of torch.distributed before a share is seen."""

from typing import Any

from torch import Tensor


def whole(value: Tensor) -> Tensor:
    """The whole of a share (`DTensor`), the same tensor where it is none. Collective for a share."""
    gather: Any = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def share_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, laid out as `like` and on its device; the whole where `like` is no share. Not collective."""
    mesh: Any = getattr(like, "device_mesh", None)
    if mesh is None:
        return value.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    placements: Any = like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)
