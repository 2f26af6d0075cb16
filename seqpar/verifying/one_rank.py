"""The reference: one rank alone, in the ranks' data type or a wider one, on the same weights.

A weight is converted when a layer reads it and freed after its use, so the wider run needs the memory of one more
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.mesh.mesh import Mesh
from seqpar.verifying.compare import blocks_of, hooked

T = TypeVar("T")
LEAST = 2  # bytes of a floating-point weight that can be converted; smaller ones are quantised
ROW_DIMS = 2  # embeddings for all tokens have a row for each image; tokens have one dim more


def held(mesh: Mesh, work: Callable[[], T]) -> T:
    """Do this rank's work; raise the same ValueError on every rank if it fails on one, or lacks memory."""

    def tried() -> T:
        try:
            return work()
        except torch.OutOfMemoryError as failed:
            raise ValueError(
                "the run does not fit into the memory of one rank; verify a smaller size, which takes the same path"
            ) from failed

    return mesh.on_all_ranks(tried)


@contextmanager
def full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def wide(whole: Any, dtype: torch.dtype) -> Any:
    """Nested values with floating-point tensors in at least this data type, and the others unchanged."""

    def widest(x: Tensor) -> Tensor:
        return x.detach().to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x

    return pytree.tree_map_only(Tensor, widest, whole)


class _WideTable(dict[str, Any]):
    """A module's parameters or buffers by name; each is converted when it is read."""

    def __init__(self, own: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(own)
        self._dtype = dtype

    def __getitem__(self, name: str) -> Any:
        return wide(super().__getitem__(name), self._dtype)

    def items(self) -> Any:
        """Names and converted tensors, one at a time, because all at once would fill the memory."""
        return ((name, self[name]) for name in self)


@contextmanager
def widened(models: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let all layers of some models read their weights in this data type or a wider one, with TF32 off.

    The weights themselves stay as they are. Raises ValueError for quantised weights.
    """
    layers = list({id(layer): layer for model in models for layer in model.modules()}.values())
    for layer in layers:
        for name, x in layer._parameters.items():
            if x is not None and (type(x) is not nn.Parameter or not x.is_floating_point() or x.itemsize < LEAST):
                raise ValueError(
                    f"{type(layer).__name__}.{name} is a {type(x).__name__} of {x.dtype}; quantised weights cannot be "
                    f"compared with full precision"
                )
    before = [(vars(layer), layer._parameters, layer._buffers) for layer in layers]
    try:
        for named, parameters, buffers in before:
            named["_parameters"], named["_buffers"] = _WideTable(parameters, dtype), _WideTable(buffers, dtype)
        with full_precision():
            yield
    finally:
        for named, parameters, buffers in before:
            named["_parameters"], named["_buffers"] = parameters, buffers


class Conditioning:
    """The embeddings of timestep and pooled text of one call, for the reference to use, in a wider data type.

    Pipelines round timesteps to the transformer's data type, which changes these embeddings more than all blocks round.
    A reference with its own embeddings would hide errors: with the recorded ones, an error of one percent in a block of
    FLUX.1 is found; without them, 30 percent may pass.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        blocks = {id(block) for module in modules for _, block in blocks_of(module)}
        named = [child for module in modules for child in module.named_children()]
        self._layers = [(name, layer) for name, layer in named if id(layer) not in blocks]
        self._outputs: list[list[Any]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with hooked(self._layers, lambda name, output: self._outputs.append(pytree.tree_leaves(output))):
            yield

    @contextmanager
    def replayed(self, dtype: torch.dtype) -> Iterator[None]:
        """Let the layers of the call made inside return the recorded embeddings, in this data type or wider."""
        outputs = iter(self._outputs)

        def replaced(name: str, output: Any) -> Any:
            leaves, spec = pytree.tree_flatten(output)
            pairs = zip(leaves, wide(next(outputs), dtype), strict=True)
            return pytree.tree_unflatten([old if _is_embedding(x) else x for x, old in pairs], spec)

        with hooked(self._layers, replaced):
            yield


def _is_embedding(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() <= ROW_DIMS and x.is_floating_point()
