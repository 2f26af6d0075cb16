"""The interface between a block of a diffusers transformer and the function that computes it with our kernels.

`seqpar.families` holds such functions; `seqpar.transformer.blocks` calls them in the blocks' place.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels.adaln import Branch
from seqpar.kernels.linear import gated_linear, linear_gelu, product
from seqpar.kernels.prepare8 import restored
from seqpar.kernels.rows8 import Rounding, Rows8
from seqpar.types.protocols import Prepare, Projected, Qkv8, Stream

T = TypeVar("T")
EIGHT = ("qkv", "out", "up", "down")  # usual names of the matrices of one stream that compute in 8 bits


class Attended8(NamedTuple):
    """The output (B, l, H, D) of attention in 8 bits, to which what reads it adds the values' centre.

    eight: how the values were rounded. dtype: of the model.
    """

    out_BlHD: Tensor
    eight: Qkv8
    dtype: torch.dtype


Input = Tensor | Rows8 | Attended8
"""What a matrix multiplies: rows in the dtype of the weights, rows that a kernel has rounded to 8 bits for it, or rows
that attention in 8 bits has left to it."""


def unrounded(x_BlE: Input) -> Tensor:
    """Return an input that no kernel has rounded, in the model's dtype; a matrix of 16 bits asks for no other."""
    if isinstance(x_BlE, Attended8):
        return restored(*x_BlE).flatten(2)
    assert isinstance(x_BlE, Tensor)
    return x_BlE


@dataclass(frozen=True)
class Matrix:
    """One GEMM of a block: weight (F, E) and bias (F,) or None of linear layers, one below the other.

    A family calls these methods and touches no weight: adapters may be merged into a copy, and `Matrix8` computes in 8
    bits. Without adapters the layers' own weights are views of the rows.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        """F, the number of output channels."""
        return len(self.weight)

    @property
    def rounding(self) -> Rounding | None:
        """How the kernel that makes the input rounds it to 8 bits; None: the input keeps its dtype."""
        return None

    def __call__(self, x_BlE: Input) -> Tensor:
        """Return the linear layer's output (B, l, F)."""
        return F.linear(unrounded(x_BlE), self.weight, self.bias)

    def gelu(self, x_BlE: Input, reader: Matrix | None = None) -> Input:
        """Return GELU (tanh formula) of the linear layer's output, (B, l, F), as the reader takes it."""
        return linear_gelu(unrounded(x_BlE), self.weight, self.bias)

    def swiglu(
        self, x_BlE: Input, reader: Matrix | None = None, *, tokens: int | None = None, gate_last: bool = False
    ) -> Input:
        """Return SwiGLU of the linear layer's output, (B, l, F / 2); its halves are the gate and the values.

        tokens, gate_last: as for `gated_linear`.
        """
        return gated_linear(unrounded(x_BlE), self.weight, self.bias, tokens=tokens, gate_last=gate_last)

    def wide(self, x_BE: Tensor) -> Tensor:
        """Return the product (B, F) in fp32 (fp64 for fp64), without the bias."""
        return product(x_BE, self.weight)

    def bias_or_zeros(self) -> Tensor:
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias

    def projected(self, x_BlE: Input, heads: int, prepare: Prepare, kv_heads: int | None = None) -> Projected:
        """Return the stream whose q, k and v attention makes of x. kv_heads: `heads` unless given."""
        kv_heads = heads if kv_heads is None else kv_heads
        return Projected(unrounded(x_BlE), self.weight, self.bias, heads, kv_heads, prepare)

    def added_to(self, y_BlF: Tensor, x_BlE: Input) -> Branch:
        """Return the sum of y, which is contiguous and may be overwritten, and the product without a bias."""
        width, inner = self.weight.shape
        y_BlF.view(-1, width).addmm_(unrounded(x_BlE).reshape(-1, inner), self.weight.t())
        return y_BlF

    def split_outputs(self, *sizes: int) -> tuple[Matrix, ...]:
        """Return the matrices of so many output channels each."""
        biases = (None,) * len(sizes) if self.bias is None else self.bias.split(sizes)
        return tuple(map(Matrix, self.weight.split(sizes), biases))

    def split_inputs(self, first: int) -> tuple[Matrix, Matrix]:
        """Return the matrix of the first input channels, without a bias, and that of the others."""
        return Matrix(self.weight[:, :first], None), Matrix(self.weight[:, first:], self.bias)


Matrices = Mapping[str, Matrix]
"""The matrices of a block, by the names in its family's `Block.layers`."""


class BlockCall(Protocol):
    """What the function of a block may use, besides the block and diffusers' arguments, in one forward."""

    matrices: Matrices
    """The block's own."""

    all_matrices: Sequence[Matrices]
    """The matrices of all blocks of this class that the function computes, in the transformer's order."""

    blocks: Sequence[Any]
    """These blocks."""

    index: int
    """The place of this block in `all_matrices` and in `blocks`."""

    def attend(
        self,
        streams: Sequence[Stream],
        beside: Callable[[], None] | None = None,
        mask: Tensor | None = None,
        only: str | None = None,
    ) -> tuple[Input, ...]:
        """Return attention (B, l, E) over the tokens of all ranks, for matrices; see `seqpar.types.protocols.Attend`.

        streams: in the order of the cuts. mask: of the keys of all ranks, as the block was given it; where the cuts
        name masks of the transformer, these count. only: the name of the one stream that is passed and attends to
        its own tokens alone. The next call may overwrite the results.
        """
        ...

    def local(self, q_BlHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None = None) -> Tensor:
        """Return attention (B, l, H, D) to keys that are whole on every rank.

        mask: as `seqpar.types.protocols.Core` takes it; make it once per forward.
        """
        ...

    def attend_whole(self, q_BLHD: Tensor, k_BlGD: Tensor, v_BlGD: Tensor) -> Tensor:
        """Return attention (B, L, H, D) of queries that every rank holds whole to the keys of all ranks.

        k, v: of this rank's tokens of the stream that the block's attention joins. All ranks get the same bits.
        """
        ...

    def once(self, name: str, of: Any, make: Callable[[], T], *, shared: bool = False) -> T:
        """Return what `make` returned first in this forward for this class of blocks, this name and this object `of`.

        shared: for all classes of blocks that use the name. Tensors of the same memory are the same object here: cuts
        make a new view of a tensor for each block.
        """
        ...

    def spread(self, name: str, widths: Sequence[int], make: Callable[[int], Tensor]) -> Sequence[Tensor]:
        """Return results (R, width) of these widths, of which each rank computes some by `make(index)`.

        name: differs between uses.
        """
        ...

    def hand_over(self, x_BlE: Tensor, made: Any) -> None:
        """Leave an input made of the block's result x to the next block, which takes it if it is given this very x."""
        ...

    def handed(self, x_BlE: Tensor) -> Any:
        """Return what the block before this one has left for this very x, or None.

        None: x was changed, or comes from elsewhere, or the block for which it was left is skipped.
        """
        ...


def rounding_for(matrices: Matrices, *names: str) -> Rounding | None:
    """Return how an input is rounded to 8 bits that the matrices of these names read, as far as the block has them.

    None: it keeps its dtype, because one of them computes in 16 bits or takes out another centre.
    """
    first, *others = [matrices[name].rounding for name in names if name in matrices]
    return first if all(rounding is first for rounding in others) else None


def reads_next(call: BlockCall, *names: str) -> Rounding | None:
    """Return `rounding_for` matrices of the next block of this class, or None after the last one."""
    following = call.all_matrices[call.index + 1 : call.index + 2]
    return rounding_for(following[0], *names) if following else None


class DeclinedError(Exception):
    """The reason why a function does not take the arguments of a call: the block's own forward computes it."""


@dataclass(frozen=True)
class Block:
    """How one class of diffusers' blocks is computed.

    compute: (`BlockCall`, block, *args, **kwargs of the block's own forward) -> what that returns. For arguments that
    it does not take it raises `DeclinedError`, identically on every rank, before anything is exchanged. streams: those
    that its attention joins, in the order in which the function passes them; a single one may have any name. layers:
    name of a matrix -> paths of the linear layers that it is made of. why_not: returns why the function cannot compute
    a block that is as diffusers builds it, or None. eight: the matrices that compute in 8 bits with precision="fp8";
    the others keep their dtype.
    """

    compute: Callable[..., Any]
    streams: tuple[str, ...]
    layers: Mapping[str, Sequence[str]]
    why_not: Callable[[Any], str | None] = lambda block: None
    eight: Sequence[str] = ()
