"""Compares what each head of attention returned on this rank with the formula of attention, on the inputs that it had.

A block's output hides a fault of one head, because the head is a small part of it and the blocks before have rounded.
Here every attention starts from this rank's own streams, as it did in the run, so that only its own rounding remains:
a head that is wrong by two percent is found in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.attention._streams import given, present, split_out
from seqpar.fidelity.compare import FACTOR, FLOORS, WIDER
from seqpar.fidelity.one_rank import full_precision
from seqpar.kernels.prepare import reference as prepared
from seqpar.local.reference import attend as by_formula
from seqpar.ranks.mesh import Axis
from seqpar.transports.collective.point_to_point import gather
from seqpar.types.protocols import Attend, Projected, Stream


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention on this rank: its streams, its mask, and its output for all of them, (B, l, H, D)."""

    streams: tuple[Stream, ...]
    mask: Tensor | None
    out: Tensor

    def wrong(self, axis: Axis) -> str | None:
        """Return in words which head is wrong, or None. Every rank of the sequence axis must call this together."""
        dtype = self.out.dtype
        with full_precision():
            truth = self._by_formula(axis, WIDER.get(dtype, torch.float32))
        alone = _errors(self._by_formula(axis, dtype), truth)
        accepted = (FACTOR * alone).clamp(min=max(FLOORS.get(dtype, 0.0), torch.finfo(dtype).eps))
        error = _errors(self.out, truth)
        over = (~(error <= accepted)).nonzero()
        if not len(over):
            return None
        row, head = over[0].tolist()
        return f"head {head} of row {row} has error {error[row, head]:.2e}, expected at most {accepted[row, head]:.2e}"

    def _by_formula(self, axis: Axis, dtype: torch.dtype) -> Tensor:
        """Return the output in this data type, as one rank computes it from the tokens of all."""
        q, k, v = _joined(self.streams, dtype)
        if axis.size > 1:
            mine = torch.tensor([q.shape[1]], device=q.device)
            sizes = tuple(gather(mine, axis, (1,) * axis.size).tolist())
            k, v = gather(k, axis, sizes, dim=1), gather(v, axis, sizes, dim=1)
        return by_formula(q, k, v, self.mask)[0]


class Observed:
    """An attention that computes the same as another one, and passes on what it computed."""

    def __init__(self, attend: Attend, see: Callable[[Attended], None]) -> None:
        self._attend, self._see, self.tokens = attend, see, attend.tokens

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, /, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return what the other attention returns; options: its keyword arguments."""
        kept = tuple(map(_copied, streams))
        outs = self._attend(streams, mask_BL, **options)
        self._see(Attended(kept, mask_BL, torch.cat(outs, dim=1).clone()))
        return outs


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
        first = streams[0]
        dtype = first.x.dtype if isinstance(first, Projected) else first.q.dtype
        return split_out(by_formula(*_joined(streams, dtype), mask_BL)[0], streams)


def _copied(stream: Stream) -> Stream:
    """Return the stream with copies of what the model may overwrite."""
    if isinstance(stream, Projected):
        return replace(stream, x=stream.x.clone())
    return replace(stream, q=stream.q.clone(), k=stream.k.clone(), v=stream.v.clone())


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
