"""One stream of the state on this rank: split off the whole latent before the first step, gathered after the last."""

from __future__ import annotations

from math import prod

from torch import Tensor

from seqpar.loop.interface import SequenceModel
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.transports.collective.point_to_point import gather
from seqpar.types.protocols import state_dtype


class State:
    """This rank's images and tokens of one stream.

    tokens: the model's input, (n, l, C*p*p) fp32 (fp64 for an fp64 model). shape: that of the whole latent.
    """

    tokens: Tensor

    def __init__(self, model: SequenceModel, mesh: Mesh, whole: Tensor, channels: int | None) -> None:
        """Split the whole latent (or tokens), which every rank has. channels: number of guided ones, None for all."""
        self._model, self._mesh, self._size = model, mesh, tuple(whole.shape[2:]) if whole.dim() > 3 else None
        self.shape = tuple(whole.shape)
        patch = prod(model.patch)
        count = whole.shape[1] if self._size is None else prod(self._size) // patch
        width = whole.shape[2] if self._size is None else whole.shape[1] * patch
        self._dtype = state_dtype(next(model.parameters()).dtype)
        self.shard, self._mine = Shard(count, mesh.sequence.size), Shard(len(whole), mesh.data.size)
        self.guided_width = width if channels is None else channels * (1 if self._size is None else patch)
        self.tokens = self.slice(whole).clone()  # a copy, because steps write here

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's images and tokens of a tensor of the latent's shape that every rank has whole."""
        mine = whole[self._mine.slice(self._mesh.data.rank)].to(self._mesh.device, self._dtype)
        mine = mine if self._size is None else self._model.patchify(mine)
        return mine[:, self.shard.slice(self._mesh.sequence.rank)].contiguous()

    def gather(self, tokens: Tensor | None = None) -> Tensor:
        """Return the whole latent on every rank, gathered from the state or from tokens of its shape."""
        tokens = self.tokens if tokens is None else tokens
        if self._mesh.sequence.size > 1:
            tokens = gather(tokens, self._mesh.sequence, self.shard.sizes, dim=1)
        if self._mesh.data.size > 1:
            tokens = gather(tokens, self._mesh.data, self._mine.sizes)
        return tokens if self._size is None else self._model.unpatchify(tokens, *self._size)
