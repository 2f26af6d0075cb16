"""One stream of the state on this rank: cut from a latent before the first step, put together after the last."""

from __future__ import annotations

from math import prod

from torch import Tensor

from seqpar.mesh import Mesh
from seqpar.protocols import SequenceModel, state_dtype
from seqpar.shard import Shard
from seqpar.transports.collective.point_to_point import gather


class State:
    """`tokens` is what the model sees, (n, l, C*p*p): this rank's images and tokens, fp32 (fp64 for an fp64 model)."""

    tokens: Tensor

    def __init__(self, model: SequenceModel, mesh: Mesh, whole: Tensor, channels: int | None) -> None:
        """whole: the latent or tokens on every rank. channels: how many of them are guided, all where None."""
        self._model, self._mesh, self._size = model, mesh, tuple(whole.shape[2:]) if whole.dim() > 3 else None
        patch = prod(model.patch)
        count = whole.shape[1] if self._size is None else prod(self._size) // patch
        width = whole.shape[2] if self._size is None else whole.shape[1] * patch
        self._dtype = state_dtype(next(model.parameters()).dtype)
        self.shard, self._mine = Shard(count, mesh.sequence.size), Shard(len(whole), mesh.data.size)
        self.guided_width = width if channels is None else channels * (1 if self._size is None else patch)
        self.tokens = self.slice(whole).clone()  # a step writes here: never into what the caller holds

    def slice(self, whole: Tensor) -> Tensor:
        """My images' and tokens' part of something of the latent's shape that every rank has whole."""
        mine = whole[self._mine.slice(self._mesh.data.rank)].to(self._mesh.device, self._dtype)
        mine = mine if self._size is None else self._model.patchify(mine)
        return mine[:, self.shard.slice(self._mesh.sequence.rank)].contiguous()

    def gather(self, tokens: Tensor | None = None) -> Tensor:
        """The whole latent on every rank, from the state or from something of its shape."""
        tokens = self.tokens if tokens is None else tokens
        if self._mesh.sequence.size > 1:
            tokens = gather(tokens, self._mesh.sequence, self.shard.sizes, dim=1)
        if self._mesh.data.size > 1:
            tokens = gather(tokens, self._mesh.data, self._mine.sizes)
        return tokens if self._size is None else self._model.unpatchify(tokens, *self._size)
