"""A matrix of a block in 8 bits: weights with a scale for each output channel, inputs with a scale for each token.

A fixed vector, the calibrated mean of each input channel, is taken out of inputs before they are rounded, and its
product with the weights as they were is part of the bias (`seqpar.kernels.rows8`). No scale, centre or choice depends
on a call's or a rank's other rows, so that one GPU's bits hold on any number of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from seqpar.families._block import Attended8, Input, Matrix
from seqpar.kernels.activations import bias_gelu, swiglu
from seqpar.kernels.adaln import Branch
from seqpar.kernels.rows8 import Activation, Rounding, Rows8, product8, round_rows
from seqpar.kernels.weight8 import Weight8, narrowed, original
from seqpar.types.protocols import Prepare, Projected, Qkv8, state_dtype


@dataclass(frozen=True)
class Matrix8(Matrix):
    """`Matrix` that computes in e4m3. weight, bias: as they were before, or a `Weight8` of the same values.

    values: e4m3 (F, E). scales: fp32 (F,). reads: how inputs are rounded; one object for all matrices that read the
    same input. folded: bias + centre W^T in the weight's dtype, (F,), or None. fast: as for `product8`.
    """

    values: Tensor
    scales: Tensor
    reads: Rounding
    folded: Tensor | None
    fast: bool

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def rounding(self) -> Rounding:
        return self.reads

    def __call__(self, x_BlE: Input) -> Tensor:
        return product8(self._rows(x_BlE), self.values, self.scales, self.folded, fast=self.fast)

    def gelu(self, x_BlE: Input, reader: Matrix | None = None) -> Input:
        return self._activated(x_BlE, "gelu", reader)

    def swiglu(
        self, x_BlE: Input, reader: Matrix | None = None, *, tokens: int | None = None, gate_last: bool = False
    ) -> Input:
        return self._activated(x_BlE, "swiglu, gate last" if gate_last else "swiglu", reader)

    def _activated(self, x_BlE: Input, activation: Activation, reader: Matrix | None) -> Input:
        y = self(x_BlE)
        if reader is not None and reader.rounding is not None:
            return round_rows(y, reader.rounding, activation)
        last = activation == "swiglu, gate last"
        return bias_gelu(y, None, reuse=True) if activation == "gelu" else swiglu(y, gate_last=last)

    def projected(self, x_BlE: Input, heads: int, prepare: Prepare, kv_heads: int | None = None) -> Projected:
        rows, kv_heads = self._rows(x_BlE), heads if kv_heads is None else kv_heads
        return Projected8(cast(Tensor, rows), self.weight, self.bias, heads, kv_heads, prepare, self)

    def added_to(self, y_BlF: Tensor, x_BlE: Input) -> Branch:
        return y_BlF, self(x_BlE)  # the gate's kernel reads both, which spares a pass

    def split_outputs(self, *sizes: int) -> tuple[Matrix, ...]:
        edges = [*accumulate(sizes, initial=0)]
        return tuple(self.part(slice(start, end)) for start, end in pairwise(edges))

    def part(self, rows: slice) -> Matrix8:
        """Return the matrix of these output channels."""
        bias, folded = (None if x is None else x[rows] for x in (self.bias, self.folded))
        return replace(
            self, weight=self.weight[rows], bias=bias, values=self.values[rows], scales=self.scales[rows], folded=folded
        )

    def split_inputs(self, first: int) -> tuple[Matrix, Matrix]:
        """Return as `Matrix` does; the centre's whole product is in the bias of the second, because both add up."""
        if first not in self._halves:  # the first call makes them, before any graph is captured
            centre = self.reads.centre_E
            centres = (None, None) if centre is None else (centre[:first], centre[first:])
            unread = self.weight.new_empty(0, 0)  # a `Weight8` has no columns in 8 bits
            before = replace(self, weight=unread, bias=None, values=self.values[:, :first], folded=None)
            after = replace(self, weight=unread, values=self.values[:, first:])
            before, after = (
                replace(half, reads=Rounding(centre)) for half, centre in zip((before, after), centres, strict=True)
            )
            self._halves[first] = before, after
        return self._halves[first]

    def _rows(self, x_BlE: Input) -> Rows8:
        if isinstance(x_BlE, Tensor):
            return round_rows(x_BlE, self.reads)
        if isinstance(x_BlE, Attended8):
            out_BlE, eight, dtype = x_BlE.out_BlHD.flatten(2), x_BlE.eight, x_BlE.dtype
            rows = round_rows(out_BlE, self._less(eight), times=1 / eight.v_scale)
            return rows._replace(rounding=self.reads, dtype=dtype)
        if x_BlE.rounding is not self.reads:
            raise ValueError("an input was rounded for another matrix, whose centre is not in this bias")
        return x_BlE

    def _less(self, eight: Qkv8) -> Rounding:
        # how the output of attention in 8 bits is rounded, which lacks the values' centre and has their scale
        if eight not in self._read:  # as in `split_inputs`
            groups, dim = eight.v_centre_GD.shape
            centre_GD = eight.v_centre_GD.to(state_dtype(eight.v_centre_GD.dtype))
            centre_E = -centre_GD.repeat_interleave(self.values.shape[1] // (groups * dim), 0).flatten()
            if self.reads.centre_E is not None:
                centre_E = centre_E + self.reads.centre_E
            self._read[eight] = Rounding(centre_E * eight.v_scale)
        return self._read[eight]

    @cached_property
    def _halves(self) -> dict[int, tuple[Matrix8, Matrix8]]:
        return {}

    @cached_property
    def _read(self) -> dict[Qkv8, Rounding]:
        return {}


@torch.inference_mode(False)  # weights outlive the caller's mode
@torch.no_grad()
def quantised(
    matrix: Matrix, reads: Rounding, fast: bool, room: Matrix8 | None = None, product_F: Tensor | None = None
) -> Matrix8:
    """Return a matrix in 8 bits, whose inputs are rounded like this, with their centre's product in its bias.

    A `Weight8` gives its own values. room: an older one, whose memory is used again. product: `centre_product` of the
    weights as they are, where that is known.
    """
    weight = matrix.weight
    if isinstance(weight, Weight8):
        values, scales = weight.e4m3, weight.scales
    else:
        values, scales = narrowed(weight)
        if room is not None and (room.values.shape, room.values.device) == (values.shape, values.device):
            values = room.values.copy_(values)
    folded = matrix.bias
    if reads.centre_E is not None:
        folded = centre_product(weight, reads.centre_E) if product_F is None else product_F.to(weight.device)
        folded = (folded if matrix.bias is None else folded + matrix.bias.to(folded.dtype)).to(weight.dtype)
    return Matrix8(weight, matrix.bias, values, scales, reads, folded, fast)


def centre_product(weight_FE: Tensor, centre_E: Tensor) -> Tensor:
    """Return the product of inputs' centre with a weight, (F,), in fp32 (fp64 for fp64).

    Of a `Weight8` it is that of the weight before it was rounded: else what rounding lost would be a fixed bias.
    """
    wide = state_dtype(weight_FE.dtype)
    with torch.autocast(weight_FE.device.type, enabled=False):  # of a call in which weights have changed
        return original(weight_FE).to(wide) @ centre_E.to(wide)


@dataclass(frozen=True)
class Projected8(Projected):
    """A stream whose x is rounded already (`Rows8`), so that three GEMMs round it once."""

    matrix: Matrix8

    def fused(self) -> Tensor:
        return self.matrix(cast(Rows8, self.x))

    def part(self, index: int, room_BlHD: Tensor | None = None) -> Tensor:
        dim, rows = self.rows(index)
        return self.matrix.part(rows)(cast(Rows8, self.x)).unflatten(-1, (-1, dim))

    def widened(self, dtype: torch.dtype) -> Projected:
        return self  # its products are what a check of attention takes as given
