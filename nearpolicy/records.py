"""Rollouts, scores and batches as trees of plain values and arrays, for checkpoints. Exact: `unpack(cls, pack(x)) == x` bit for bit."""

import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch


def pack(value: Any) -> Any:
    """Dataclasses become dicts, enums their values, tuples lists; tensors and arrays stay."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: pack(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {k: pack(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [pack(v) for v in value]
    return value


def unpack(annotation: Any, tree: Any) -> Any:
    """The inverse of `pack` for a value of this type."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return None if tree is None else unpack(inner[0], tree)
    if isinstance(annotation, type) and is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        # A field that an older record does not have takes its default.
        return annotation(**{f.name: unpack(hints[f.name], tree[f.name]) for f in fields(annotation) if f.name in tree or _required(f)})
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(tree)
    if origin is tuple:
        return tuple(unpack(typing.get_args(annotation)[0], v) for v in tree)
    if annotation is float and tree is None:
        return float("nan")
    return tree


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def split_arrays(tree: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """(JSON tree, tensors): each array or tensor is replaced by {"$": its key}, so that one safetensors file holds them all."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        tensor = torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree.detach().cpu()
        kind = "numpy" if isinstance(tree, np.ndarray) else "torch"
        return {"$": prefix, "as": kind}, {prefix: tensor.contiguous().clone()}
    if isinstance(tree, dict):
        parts = {k: split_arrays(v, f"{prefix}/{k}") for k, v in tree.items()}
        return {k: p[0] for k, p in parts.items()}, {n: t for p in parts.values() for n, t in p[1].items()}
    if isinstance(tree, list):
        items = [split_arrays(v, f"{prefix}/{i}") for i, v in enumerate(tree)]
        return [p[0] for p in items], {n: t for p in items for n, t in p[1].items()}
    if isinstance(tree, float) and tree != tree:
        return None, {}
    return tree, {}


def join_arrays(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `split_arrays`."""
    if isinstance(tree, dict):
        if set(tree) == {"$", "as"}:
            tensor = tensors[tree["$"]]
            return tensor.numpy() if tree["as"] == "numpy" else tensor
        return {k: join_arrays(v, tensors) for k, v in tree.items()}
    if isinstance(tree, list):
        return [join_arrays(v, tensors) for v in tree]
    return tree
