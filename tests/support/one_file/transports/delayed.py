"""A transport for tests: that of collectives, but messages are late by a random time, and memory is poisoned.

It shows that a new transport is one file, and it detects strategies that read or write at the wrong time: they write
into memory of its own, which is copied into that of the collectives and poisoned as soon as it is sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from seqpar.kernels.flags import Flags
from seqpar.kernels.push import Destinations
from seqpar.mesh.mesh import Axis
from seqpar.transports import _contract, collective
from seqpar.transports._exchanges import Gather, Halo, HeadLayout, KeyValues, Rotation, ToHeads, ToTokens
from seqpar.types.outboxes import Outbox, Outboxes

FACTS = _contract.Facts(rates={"cuda": "nccl", "cpu": "gloo"})  # `auto` never picks it
LONGEST_S = 0.003
why_not, why_not_tried = collective.why_not, collective.why_not_tried


def poison(*tensors: Tensor) -> None:
    """Fill the tensors with values that make a later read visible."""
    for tensor in tensors:
        whole = tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex())
        tensor.fill_(float("nan") if not whole else 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def sent(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy what was written to where it is sent from, and poison it; later it is sent."""
    for mine, outgoing in pairs:
        outgoing.copy_(mine)
        poison(mine)
    time.sleep(random.random() * LONGEST_S)


class Delayed:
    """q, k and v to the ranks of their heads, or k and v to all ranks. at_start: what `start` sends; q stays here."""

    flags: Flags | None = None

    def __init__(self, exchange: ToHeads | KeyValues, at_start: str) -> None:
        self._exchange, self._at_start, self._unsent = exchange, at_start, ""
        self._read: tuple[Tensor, ...] = ()
        outgoing, boxes = exchange.outboxes(), []
        self._pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"q": [], "k": [], "v": []}
        for box in outgoing:
            views = {name: getattr(box, name) for name in "qkv"}
            mine = {name: None if x is None else torch.empty_like(x) for name, x in views.items()}
            boxes.append(Outbox(**mine, heads=box.heads, kv_heads=box.kv_heads))
            for name, x in mine.items():
                if x is not None:
                    self._pairs[name].append((x, views[name]))
        self._boxes = Outboxes(boxes)

    def outboxes(self) -> Outboxes:
        self._unsent = "qkv"
        poison(*(mine for pairs in self._pairs.values() for mine, _ in pairs), *self._read)
        return self._boxes

    def _send(self, parts: str) -> None:
        sent(pair for part in parts if part in self._unsent for pair in self._pairs[part])
        self._unsent = "".join(part for part in self._unsent if part not in parts)

    def start(self) -> None:
        self._send(self._at_start)
        self._exchange.start()

    def start_keys(self) -> None:
        self._send("k")

    def start_values(self) -> None:
        self.start()

    def deliver(self, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        self._send("qkv")
        self._read = found = self._exchange.deliver()
        return found


class DelayedToTokens:
    """Sends attention's output to the ranks of its tokens."""

    flags: Flags | None = None

    def __init__(self, exchange: ToTokens) -> None:
        self._exchange, self._outgoing = exchange, exchange.outboxes()
        self._boxes = Destinations([torch.empty_like(x) for x in self._outgoing], self._outgoing.first)
        self._read: tuple[Tensor, ...] = ()

    def outboxes(self) -> Destinations:
        poison(*self._boxes, *self._read)
        return self._boxes

    def deliver(self, met: bool = False) -> Tensor:
        sent(zip(self._boxes, self._outgoing, strict=True))
        out = self._exchange.deliver()
        self._read = (out,)
        return out


class DelayedRotation:
    """Passes blocks around an axis; a block that was passed on is poisoned."""

    def __init__(self, exchange: Rotation) -> None:
        self._exchange, self._mine = exchange, torch.empty_like(exchange.outbox())

    def outbox(self) -> Tensor:
        poison(self._mine)
        return self._mine

    def rotate(self) -> Iterator[tuple[int, Tensor]]:
        sent([(self._mine, self._exchange.outbox())])
        for owner, block in self._exchange.rotate():
            shown = block.clone()
            yield owner, shown
            poison(shown)
            sent(())


class DelayedGather:
    """Gathers every rank's block on every rank."""

    def __init__(self, exchange: Gather) -> None:
        self._exchange, self._mine = exchange, torch.empty_like(exchange.outbox())
        self._read: tuple[Tensor, ...] = ()

    def outbox(self) -> Tensor:
        poison(self._mine, *self._read)
        return self._mine

    def deliver(self) -> Tensor:
        sent([(self._mine, self._exchange.outbox())])
        whole = self._exchange.deliver()
        self._read = (whole,)
        return whole


class DelayedHalo:
    """Swaps edges with the neighbours; the places of what arrives are poisoned until then."""

    def __init__(self, exchange: Halo) -> None:
        self._exchange = exchange

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        poison(*(place for place in (before, after) if place is not None))
        sent(())
        self._exchange.swap(first, last, before, after)


class Transport(collective.Transport):
    """The transport that the module's docstring describes."""

    def _heads(self, axis: Axis, layout: HeadLayout) -> tuple[ToHeads, ToTokens]:
        to_heads, to_tokens = super()._heads(axis, layout)
        return Delayed(to_heads, "qkv"), DelayedToTokens(to_tokens)

    def _key_values(self, axis: Axis, layout: HeadLayout, overlap: bool) -> KeyValues:
        return Delayed(super()._key_values(axis, layout, overlap), "kv")

    def _ring(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Rotation:
        return DelayedRotation(super()._ring(axis, sizes, shape, like))

    def _gather(self, axis: Axis, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        return DelayedGather(super()._gather(axis, sizes, shape, like))

    def _halo(self, axis: Axis, capacity: int, like: Tensor) -> Halo:
        return DelayedHalo(super()._halo(axis, capacity, like))
