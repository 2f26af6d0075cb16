"""Compares what each head of attention returned on this rank with the formula of attention, on the inputs that it had.

A block's output hides a fault of one head, because the head is a small part of it and the blocks before have rounded.
Here every attention starts from this rank's own streams, as it did in the run, so that only its own rounding remains:
a head that is wrong by two percent is found in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

import torch
from torch import Tensor

from seqpar.attention._by_stream import in_key_order
from seqpar.attention._streams import given, present, split_out
from seqpar.kernels.prepare import reference as prepared
from seqpar.local.reference import attend as by_formula
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard, Tokens
from seqpar.transports.collective.point_to_point import gather
from seqpar.types.protocols import Attend, Core, Projected, Stream
from seqpar.verifying.compare import FACTOR, FLOORS, NOT_FINITE, WIDER
from seqpar.verifying.one_rank import full_precision

Find = Callable[[str, float, int | None], None]
"""Takes the reason why a head is wrong, its error in units of the accepted one, and the rank that computed it, if it is
not this one."""


class Observed:
    """An attention that computes the same as another one, and compares its heads with the formula.

    find: is told which head is wrong. tokens: the split for which the attention was built, whose order of keys masks
    have; None for the order of the ranks. heads: the axis over which the strategy splits heads; None where each rank
    computes all heads of its tokens. Every rank of the sequence axis must call it together.
    """

    def __init__(
        self, attend: Attend, axis: Axis, find: Find, tokens: Tokens | None = None, heads: Axis | None = None
    ) -> None:
        self._attend, self._axis, self._find, self.tokens = attend, axis, find, attend.tokens
        self._heads = heads
        self._formula: Core = by_formula if tokens is None else in_key_order(by_formula, tokens, axis.rank)

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return what the other attention returns; options: its keyword arguments."""
        dtype = _dtype(streams)
        formula = self._formula if options.get("only") is None else by_formula
        with full_precision():  # before the model may overwrite its streams
            truth = self._by(formula, streams, mask_BL, WIDER.get(dtype, torch.float32))
        alone = _errors(self._by(formula, streams, mask_BL, dtype), truth)
        outs = self._attend(streams, mask_BL, **options)
        accepted = (FACTOR * alone).clamp(min=max(FLOORS.get(dtype, 0.0), torch.finfo(dtype).eps))
        error = _errors(torch.cat(outs, dim=1), truth)
        for row, head in (~(error <= accepted)).nonzero()[:1].tolist():
            wrong, most = float(error[row, head]), float(accepted[row, head])
            reason = f"head {head} of row {row} has error {wrong:.2e}, expected at most {most:.2e}"
            owner = self._owner(head, error.shape[1], _groups(streams))
            self._find(NOT_FINITE if isnan(most) else reason, wrong / most, owner)
        return outs

    def _owner(self, head: int, heads: int, groups: int) -> int | None:
        """Return the rank that computes a head, or None for this one: groups of heads are split over their axis."""
        if self._heads is None or self._heads.size == 1:
            return None
        group, split = head * groups // heads, Shard(groups, self._heads.size)
        part = next(part for part in range(split.parts) if group < split.starts[part] + split.sizes[part])
        return self._heads.ranks[part]

    def _by(self, formula: Core, streams: Sequence[Stream], mask_BL: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the output in this data type, as one rank computes it from the tokens of all."""
        (q, k, v), axis = _joined(streams, dtype), self._axis
        if axis.size > 1:
            mine = torch.tensor([q.shape[1]], device=q.device)
            sizes = tuple(gather(mine, axis, (1,) * axis.size).tolist())
            k, v = gather(k, axis, sizes, dim=1), gather(v, axis, sizes, dim=1)
        return formula(q, k, v, mask_BL)[0]


class ByFormula:
    """Attention of one rank alone by its formula, in the data type of its streams."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Callable[[], None] | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (B, L, H, D) for each of the given streams, which is the one of `only` where it names one."""
        if beside is not None:
            beside()
        return split_out(by_formula(*_joined(streams, _dtype(streams)), mask_BL)[0], streams)


def _dtype(streams: Sequence[Stream]) -> torch.dtype:
    first = streams[0]
    return first.x.dtype if isinstance(first, Projected) else first.q.dtype


def _groups(streams: Sequence[Stream]) -> int:
    """Return the number of key-value heads."""
    first = streams[0]
    return first.kv_heads if isinstance(first, Projected) else first.k.shape[2]


def _joined(streams: Sequence[Stream], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the tokens of all streams on this rank, as `_qkv` computes them."""
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*(_qkv(each, dtype) for each in present(streams)), strict=True))
    return q, k, v


def _qkv(stream: Stream, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k after norm and rotary, and v, computed in this data type."""
    if isinstance(stream, Projected):
        bias = None if stream.bias is None else stream.bias.to(dtype)
        stream = replace(stream, x=stream.x.to(dtype), weight=stream.weight.to(dtype), bias=bias)
    own = given(stream)
    return *prepared(own.q.to(dtype), own.k.to(dtype), own.prepare), own.v.to(dtype)


def _errors(got: Tensor, truth: Tensor) -> Tensor:
    """Return the rms of the difference of each row and head, (B, H), in units of the rms of the truth."""
    wide = truth.double()
    rms, unit = ((x.square().mean((1, 3))).sqrt() for x in (got.double() - wide, wide))
    return rms / unit.where(unit > 0, 1.0)
