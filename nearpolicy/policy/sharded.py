"""A policy whose weights, gradients and optimizer moments are spread over ranks: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each decoder layer is one unit, everything else (embedding, last norm, output matrix) another. A unit's weights are whole on every rank while it
computes and a share of them otherwise. Every call that computes or gathers is collective: all ranks make it, the same number of times.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from nearpolicy.objective.full_kl import Head
from nearpolicy.policy.hf import HFPolicy
from nearpolicy.policy.loading import DType, fast_bfloat16
from nearpolicy.policy.shares import share_of
from nearpolicy.protocols import LogProbs
from nearpolicy.rollout import Batch

_INSIDE = "nearpolicy_inside"


class ShardedPolicy(HFPolicy):
    """An `HFPolicy` of which this rank holds a share.

    Args:
        model: whole, with equal weights on every rank; on the CPU or on the device of the mesh. It is taken apart in place.
        mesh: one dimension, a rank for each share.
    Others, and what is raised: as `HFPolicy`, which checks the whole model first.
    """

    def __init__(
        self, model: Any, *, mesh: DeviceMesh, tokenizer: Any = None, dtype: DType = "auto", token_budget: int = 16_384,
        shared_prompts: Literal["auto", "off"] = "auto", routing_replay: bool = False,
    ) -> None:  # fmt: skip
        self._sharded = False
        super().__init__(model, tokenizer=tokenizer, dtype=dtype, token_budget=token_budget, shared_prompts=shared_prompts,
                         routing_replay=routing_replay)  # fmt: skip
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
        self.bfloat16 = dtype == "bfloat16" or (dtype == "auto" and fast_bfloat16(self.device))
        self.gather: Callable[[], dict[str, Tensor]] = lambda: self.collect(keep=True)
        """What `published_weights` and `save` call. Where one rank alone decides when to publish, it is replaced by a call that the others join."""
        self.recorder: Callable[[Batch], tuple[LogProbs, Tensor]] = super().record
        """What `record` calls; replaced likewise."""
        self._units = _shard(model, mesh)
        setattr(model, _INSIDE, MethodType(lambda _, compute: compute(), model))
        register_fsdp_forward_method(model, _INSIDE)
        self._sharded = True

    def head(self, batch: Batch) -> Head:
        """As `HFPolicy.head`. With autograd on, backward must follow before the next call; with it off, the weights are to be read before
        `settle`."""
        return Head(*self._inside(lambda: tuple(super(ShardedPolicy, self).head(batch))))

    def record(self, batch: Batch) -> tuple[LogProbs, Tensor]:
        """As `HFPolicy.record`."""
        return self.recorder(batch)

    def settle(self) -> None:
        """Give back what a forward pass without gradient left whole: the next one must read the weights anew."""
        if self._sharded:
            self.model.reshard()

    def _score(self, batch: Batch, entropy_grad: bool) -> LogProbs:
        out = LogProbs(*self._inside(lambda: tuple(super(ShardedPolicy, self)._score(batch, entropy_grad))))
        if not torch.is_grad_enabled():
            self.settle()
        return out

    def _inside(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run inside the root's forward: the base model is called from outside of it, and the output matrix is read as a tensor."""
        if not self._sharded:
            return compute()
        return getattr(self.model, _INSIDE)(compute)

    def published_weights(self) -> dict[str, Tensor]:
        """As `HFPolicy.published_weights`, gathered: whole tensors that are nobody else's, on the CPU."""
        return self.gather()

    def collect(self, *, keep: bool) -> dict[str, Tensor]:
        """Gather the weights, adapters merged, unit by unit. Collective.

        Args:
            keep: False takes part and returns {}.
        """
        out: dict[str, Tensor] = {}
        with torch.no_grad():
            for names, unit in self._units:
                unit.unshard()
                try:
                    for name, value in self._merge(unit, names):
                        if keep:
                            # Storage of a unit's whole weights is freed below; a name that shares it must still share it afterwards.
                            out[name] = value.to("cpu", copy=True)
                finally:
                    unit.reshard()
        return out

    def _merge(self, unit: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of one unit under their published names."""
        own = {names[k]: v for k, v in [*unit.named_parameters(remove_duplicate=False), *_persistent(unit)] if k in names}
        return self._published(own)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's shares (`DTensor`) under the module's own names, tied weights once."""
        out, seen = {}, set[int]()
        for name, value in self.model.named_parameters(remove_duplicate=False):
            if id(value) not in seen:
                seen.add(id(value))
                out[name] = value.detach()
        return out

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """As `HFPolicy.load_trained`, from whole tensors that every rank has. Not collective."""
        own = dict(self.model.named_parameters())
        self._refuse_names({name: own[name] for name in own.keys() & state.keys()}, state)
        with torch.no_grad():
            for name, value in state.items():
                target = own[name]
                target.copy_(share_of(value.to(target.dtype), target))


def _shard(model: Any, mesh: DeviceMesh) -> list[tuple[dict[str, str], FSDPModule]]:
    """Take the model apart. Returns for each unit its own tensors (name inside the unit -> name in the model), the root's last."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    units = [(name, module) for name, module in model.named_modules() if type(module).__name__ in kinds]
    layers = {id(module) for _, module in units}
    for _, module in units:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    out: list[tuple[dict[str, str], FSDPModule]] = []
    taken = set[str]()
    for prefix, unit in [*((f"{name}.", module) for name, module in units), ("", model)]:
        _sum_gradients(unit)
        named = [*unit.named_parameters(remove_duplicate=False), *_persistent(unit)]
        own = {name: prefix + name for name, _ in named if prefix + name not in taken}
        taken |= set(own.values())
        out.append((own, unit))
    assert len(layers) + 1 == len(out)
    return out


def _sum_gradients(unit: FSDPModule) -> None:
    """The loss of a rank is already divided by the counts of all: gradients are added, not averaged."""
    unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other divisor
    unit.set_gradient_divide_factor(1.0)


def _persistent(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the state."""
    out: list[tuple[str, Tensor]] = []
    for prefix, owner in module.named_modules():
        kept = [name for name in owner._buffers if name not in owner._non_persistent_buffers_set]
        out += [(f"{prefix}.{name}" if prefix else name, value) for name in kept if (value := owner._buffers[name]) is not None]
    return out
