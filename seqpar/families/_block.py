"""The interface between a block of a diffusers transformer and the function that computes it with our kernels.

`seqpar.families` holds such functions, one file a family of models; `seqpar.transformer.blocks` puts
them into their places.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.nn.functional as F
from torch import Tensor

from seqpar.types.protocols import Stream

T = TypeVar("T")

Spread = Callable[[Sequence[int], Callable[[int], Tensor]], Sequence[Tensor]]
"""Given the widths of some results (R, width) and a function that computes the one of an index, returns all of them.

Every rank has the same inputs, so ranks may compute some results each and gather them."""


class Matrix(NamedTuple):
    """The weight (F, E) and bias (F,) or None of linear layers; several ones lie one below the other.

    The layers' own weights are views of its rows, unless adapters are merged into a copy.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_BlE: Tensor) -> Tensor:
        """Return the product (B, l, F)."""
        return F.linear(x_BlE, self.weight, self.bias)


Matrices = Mapping[str, Matrix]
"""The matrices of a block, by the names that its family gives them (`PRODUCTS`)."""


class BlockCall(Protocol):
    """What the function of a block may use, besides the block and diffusers' arguments, in one forward."""

    matrices: Matrices
    """The block's own."""

    every: Sequence[Matrices]
    """Those of all blocks of this class that are computed by the function, in the transformer's order."""

    blocks: Sequence[Any]
    """These blocks."""

    index: int
    """The place of this block in `every` and in `blocks`."""

    def attend(
        self,
        streams: Sequence[Stream],
        beside: Callable[[], None] | None = None,
        mask: Tensor | None = None,
        only: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Return attention over the tokens of all ranks; see `seqpar.types.protocols.Attend`.

        streams: in the order of the plan's cuts. mask: of the keys of all ranks, as the block was given it; where the
        cuts name masks of the transformer, these count. only: the name of the one stream that is passed and attends to
        its own tokens alone. The next call may overwrite the results.
        """
        ...

    def local(self, q_BlHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Return attention (B, l, H, D) to keys that are whole on every rank.

        mask: as `seqpar.types.protocols.Core` takes it; make it once a forward.
        """
        ...

    def attend_whole(self, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor) -> Tensor:
        """Return attention (B, L, H, D) of queries that every rank holds whole to the keys of all ranks.

        k, v: of this rank's tokens of the stream that the block's attention joins. All ranks get the same bits.
        """
        ...

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned first in this forward under this name for this very object `of`.

        Tensors of the same memory are the same: cuts make a new view of a tensor for each block.
        """
        ...

    def spread(self, name: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        """Return all results, of which each rank computes some; see `Spread`. name: differs between uses."""
        ...

    def hand_over(self, x_BlE: Tensor, made: Any) -> None:
        """Leave what was made of the block's result x to the next block, which takes it if it is given this very x."""
        ...

    def handed(self, x_BlE: Tensor) -> Any:
        """Return what the block before this one has left for this very x, or None.

        None: x was changed, or comes from elsewhere, or the block for which it was left is skipped.
        """
        ...


Fused = Callable[..., Any]
"""Computes a block: (call, block, *args, **kwargs of the block's own forward) -> what that returns.

It raises `DeclinedError`, before anything is exchanged, for arguments that it does not take; all ranks do so alike."""


class DeclinedError(Exception):
    """The reason why a function does not take the arguments of a call: the block's own forward computes it."""
