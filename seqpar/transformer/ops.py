"""Opaque operators of torch for cuts, gathers and attention inside of compiled blocks.

`torch.compile` cannot trace exchanges between ranks. A compiled block calls these operators in place of Python; they
find their object by its number, because an operator takes tensors and numbers only. Results are copies: the buffers of
an exchange are reused by the next block, which a compiler that reorders operators must not see.
When it wins: compiled blocks only; eager code calls the objects themselves and copies nothing.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Numbers:
    """Gives objects numbers, by which the operators find them while they live."""

    def __init__(self) -> None:
        self._next = count()
        self._live: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, item: object) -> int:
        """Return a new number for a `SplitAttention` or a `Cutter`."""
        number = next(self._next)
        self._live[number] = item
        return number

    def __getitem__(self, number: int) -> Any:
        return self._live[number]


NUMBERS = Numbers()


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, number: int, reads: bool
) -> Tensor:
    return NUMBERS[number](q, k, v, mask, scale, reads).clone(memory_format=torch.contiguous_format)


def _attention_shape(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, number: int, reads: bool
) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _cut(x: Tensor, number: int, which: int) -> Tensor:
    return NUMBERS[number].cut_by_number(x, which).clone(memory_format=torch.contiguous_format)


def _cut_shape(x: Tensor, number: int, which: int) -> Tensor:
    return x.new_empty(NUMBERS[number].size_by_number(x, which))


def _gather(x: Tensor, number: int, which: int, dim: int, total: int) -> Tensor:
    return NUMBERS[number].gather_by_number(x, which).clone(memory_format=torch.contiguous_format)


def _gather_shape(x: Tensor, number: int, which: int, dim: int, total: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = total
    return x.new_empty(shape)


def _refuse(x: Tensor, message: str) -> Tensor:
    raise ValueError(message)


attention = torch.library.custom_op(
    "seqpar::split_attention",
    _attention,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, int number, bool reads) -> Tensor",
)
attention.register_fake(_attention_shape)
cut = torch.library.custom_op(
    "seqpar::cut", _cut, mutates_args=(), schema="(Tensor x, int number, int which) -> Tensor"
)
cut.register_fake(_cut_shape)
gather = torch.library.custom_op(
    "seqpar::gather", _gather, mutates_args=(), schema="(Tensor x, int number, int which, int dim, int total) -> Tensor"
)
gather.register_fake(_gather_shape)
refuse = torch.library.custom_op("seqpar::refuse", _refuse, mutates_args=(), schema="(Tensor x, str message) -> Tensor")
refuse.register_fake(lambda x, message: torch.empty_like(x))
