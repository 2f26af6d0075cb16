"""Signatures of calls: tensors and other values by their paths in the arguments, and the kind of a call.

Arguments may be nested: lists, tuples and dicts of tensors, numbers and texts (`img_shapes`, rotary tables, attention
keyword arguments). Two calls of the same kind can be one CUDA graph: their tensors have the same shapes and dtypes, and
all their other values are equal, because a graph has those values inside.

Cost: some microseconds per argument, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# values of these types are equal on two ranks, or in two calls, if they are equal by ==
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


@dataclass(frozen=True)
class Form:
    """The arguments of a call, or its results: tensors and other values by their paths, and how they are nested."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, object]
    paths: tuple[str, ...]
    spec: pytree.TreeSpec

    @property
    def whole(self) -> Any:
        """Return the nested values again, with the tensors of this form, in new containers."""
        values = {**self.values, **self.tensors}
        return pytree.tree_unflatten([values[path] for path in self.paths], self.spec)

    @cached_property
    def kind(self) -> Hashable:
        """Return a key that is equal for calls of the same kind, or None where a value cannot be compared."""
        if self.opaque:
            return None
        tensors = tuple((path, tuple(x.shape), x.dtype) for path, x in self.tensors.items())
        values = tuple((path, type(value), value) for path, value in self.values.items())
        return tensors, values, self.spec

    @property
    def opaque(self) -> dict[str, str]:
        """Return path -> type of each value that cannot be compared, such as a cache or a generator."""
        return {path: type(x).__name__ for path, x in self.values.items() if not isinstance(x, _PLAIN)}

    @property
    def shown(self) -> dict[str, object]:
        """Return path -> what must be equal on all ranks: plain values, and only the types of other values."""
        opaque = self.opaque
        return {path: opaque.get(path, value) for path, value in self.values.items()} | {"nesting": str(self.spec)}

    def holding(self, tensors: Mapping[str, Tensor]) -> Form:
        return replace(self, tensors=dict(tensors))

    def each(self, work: Callable[[Tensor], Tensor]) -> Form:
        return self.holding({path: work(x) for path, x in self.tensors.items()})


def form_of(whole: Any) -> Form:
    """Return the form of nested lists, tuples and dicts of tensors and other values."""
    leaves, spec = pytree.tree_flatten_with_path(whole)
    named = {_path(keys): value for keys, value in leaves}
    tensors = {path: value for path, value in named.items() if isinstance(value, Tensor)}
    values = {path: value for path, value in named.items() if not isinstance(value, Tensor)}
    return Form(tensors, values, tuple(named), spec)


def _path(keys: tuple[Any, ...]) -> str:
    """Return a readable path: the name of an argument, then the keys inside it ("ids", "attention_kwargs['scale']")."""
    first = getattr(keys[0], "key", None) if keys else ""
    return f"{first}{pytree.keystr(keys[1:])}" if isinstance(first, str) else pytree.keystr(keys)
