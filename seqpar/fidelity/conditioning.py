"""Gives the reference of a diffusers transformer the embeddings of timestep and pooled text that the 16-bit run has.

Pipelines round timesteps to the transformer's data type, which changes these embeddings more than all blocks round. All
ways of computing do so alike; a reference that did not would have an error in common with them that hides others.
When it wins: with it, an error of one percent in a block of FLUX.1 is found; without it, one of 30 percent may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.fidelity.blocks import blocks_of
from seqpar.fidelity.widened import wide

DIMS = 2  # embeddings that hold for all tokens have a row for each picture; tokens have one dim more


class Conditioning:
    """The embeddings of one call: `recorded` keeps them, `replayed` puts them in the place of other ones."""

    def __init__(self, module: nn.Module) -> None:
        blocks = {id(block) for _, block in blocks_of(module)}
        self._layers = [each for each in module.children() if id(each) not in blocks]
        self._kept: list[tuple[Any, ...]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the embeddings of the call that is made inside."""
        self._kept.clear()
        with self._hooked(lambda output: self._kept.append(tuple(pytree.tree_leaves(output)))):
            yield

    @contextmanager
    def replayed(self, dtype: torch.dtype) -> Iterator[None]:
        """Let the layers of the call that is made inside return the kept embeddings, in this data type or wider."""
        kept = iter(self._kept)

        def replace(output: Any) -> Any:
            leaves, spec = pytree.tree_flatten(output)
            pairs = zip(leaves, next(kept), strict=True)
            return pytree.tree_unflatten([wide(old, dtype) if _is_embedding(x) else x for x, old in pairs], spec)

        with self._hooked(replace):
            yield

    @contextmanager
    def _hooked(self, work: Callable[[Any], Any]) -> Iterator[None]:
        handles = [layer.register_forward_hook(lambda *given: work(given[-1])) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_embedding(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() <= DIMS and x.is_floating_point()
