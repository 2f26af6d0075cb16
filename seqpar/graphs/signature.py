"""Signatures of calls: tensors and other values by their paths in the arguments, and the kind of a call.

Arguments may be nested: lists, tuples and dicts of tensors, numbers and texts (`img_shapes`, rotary tables, attention
keyword arguments). Two calls of the same kind can be one CUDA graph: their tensors have the same shapes and dtypes, and
all their other values are equal, because a graph has those values inside.

Cost: about a microsecond per argument, on the host. torch's pytrees take several; they serve unusual containers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# values of these types are equal on two ranks, or in two calls, if they are equal by ==
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)
_LEAVES = (Tensor, *_PLAIN)


@dataclass(frozen=True)
class Form:
    """The arguments of a call, or its results: tensors and other values by their paths, and how they are nested.

    nesting: what `_taken` returned. mark: tells calls apart whose arguments are of one kind.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, object]
    paths: tuple[str, ...]
    nesting: Any
    mark: Hashable = None

    @property
    def whole(self) -> Any:
        """Return the nested values again, with the tensors of this form, in new containers."""
        values = {**self.values, **self.tensors}
        return _nested(self.nesting, iter([values[path] for path in self.paths]))

    @cached_property
    def kind(self) -> Hashable:
        """Return a key that is equal for calls of the same kind, or None where a value cannot be compared."""
        if self.opaque:
            return None
        tensors = tuple([(path, x.shape, x.dtype) for path, x in self.tensors.items()])
        values = tuple([(path, type(value), value) for path, value in self.values.items()])
        return tensors, values, self.nesting, self.mark

    @property
    def opaque(self) -> dict[str, str]:
        """Return path -> type of each value that cannot be compared, such as a cache or a generator."""
        return {path: type(x).__name__ for path, x in self.values.items() if not isinstance(x, _PLAIN)}

    @property
    def shown(self) -> dict[str, object]:
        """Return path -> what must be equal on all ranks: plain values, and only the types of other values."""
        opaque = self.opaque
        return {path: opaque.get(path, value) for path, value in self.values.items()} | {"nesting": str(self.nesting)}

    def holding(self, tensors: Mapping[str, Tensor]) -> Form:
        return replace(self, tensors=dict(tensors))

    def each(self, work: Callable[[Tensor], Tensor]) -> Form:
        return self.holding({path: work(x) for path, x in self.tensors.items()})


def form_of(whole: Any) -> Form:
    """Return the form of nested lists, tuples and dicts of tensors and other values."""
    named = dict[str, Any]()
    nesting = _taken(whole, "", named)
    tensors = {path: value for path, value in named.items() if isinstance(value, Tensor)}
    values = {path: value for path, value in named.items() if not isinstance(value, Tensor)}
    return Form(tensors, values, tuple(named), nesting)


def _taken(value: Any, path: str, named: dict[str, Any]) -> Any:
    # Puts the leaves of nested values into `named` by readable paths: the name of an argument, then the keys inside it
    # ("ids", "attention_kwargs['scale']"). Returns how they are nested, None for a leaf.
    kind = type(value)
    if kind is dict:
        inside = [(f"{path}[{key!r}]" if path or type(key) is not str else key, x) for key, x in value.items()]
        keys: Any = tuple(value)
    elif kind is list or kind is tuple:
        inside, keys = [(f"{path}[{index}]", x) for index, x in enumerate(value)], len(value)
    elif isinstance(value, _LEAVES) or pytree.tree_is_leaf(value):
        named[path] = value
        return None
    else:
        parts, kind = pytree.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
        inside, keys = [(f"{path}{pytree.keystr(at)}", x) for at, x in parts], len(parts)
    return kind, keys, tuple([_taken(x, at, named) for at, x in inside])


def _nested(nesting: Any, leaves: Iterator[Any]) -> Any:
    # the nested values again, of leaves in their order
    if nesting is None:
        return next(leaves)
    kind, keys, inside = nesting
    values = [_nested(x, leaves) for x in inside]
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return kind(values) if kind is list or kind is tuple else pytree.tree_unflatten(values, kind)
