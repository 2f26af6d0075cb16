"""Helpers that all strategies share: they project streams and write each stream into its part of the outboxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from seqpar.kernels import prepare as wide_kernel
from seqpar.kernels import prepare8 as kernel8
from seqpar.kernels.flags import Flags
from seqpar.kernels.prepare import prepare
from seqpar.kernels.prepare8 import prepare8
from seqpar.kernels.rows8 import E4M3
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import JointShard, Tokens
from seqpar.transports import collective
from seqpar.transports._contract import Transport
from seqpar.transports._exchanges import HeadLayout, KeyValues
from seqpar.types.outboxes import Outboxes
from seqpar.types.protocols import Attend, Core, Given, Prepare, Stream

T = TypeVar("T")
Beside = Callable[[], None]
"""Work of the model that does not read attention's output; see `seqpar.types.protocols.Attend`."""


@runtime_checkable
class Sends(Protocol):
    """A Core that sends to other ranks itself, as a ring does."""

    def attend_beside(
        self, q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask_BL: Tensor | None, beside: Beside | None, /
    ) -> tuple[Tensor, Tensor]:
        """Return what the Core returns; run `beside` after the first sends have started, before waiting for others."""
        ...


def given(stream: Stream) -> Given:
    """Return a stream's q, k and v: those that the model made, or strided views of one fused QKV GEMM made here."""
    if isinstance(stream, Given):
        return stream
    heads = (stream.heads, stream.kv_heads, stream.kv_heads)
    q, k, v = stream.fused().unflatten(-1, (sum(heads), -1)).split(heads, dim=2)
    return Given(q, k, v, stream.prepare)


def query(stream: Stream) -> Tensor:
    """Return q of a stream; a separate GEMM computes it if the model has not."""
    return stream.q if isinstance(stream, Given) else stream.part(0)


def key(stream: Stream) -> Tensor:
    return stream.k if isinstance(stream, Given) else stream.part(1)


def value(stream: Stream, room_BlGD: Tensor | None = None) -> Tensor:
    return stream.v if isinstance(stream, Given) else stream.part(2, room_BlGD)


def layout_of(sizes: tuple[int, ...], streams: Sequence[Stream], k_BlGD: Tensor) -> HeadLayout:
    """Return the layout of an exchange of these streams. `sizes`: tokens of each rank; `k_BlGD`: keys of any stream.

    Raises `ValueError` if the streams have different numbers of heads.
    """
    counts = {
        (stream.q.shape[2], stream.k.shape[2]) if isinstance(stream, Given) else (stream.heads, stream.kv_heads)
        for stream in streams
    }
    if len(counts) != 1:
        raise ValueError(
            f"got streams with heads (query, key-value) {sorted(counts)}, expected the same in all streams"
        )
    ((heads, groups),) = counts
    batch, _, _, dim = k_BlGD.shape
    dtype = k_BlGD.dtype if streams[0].prepare.eight is None else E4M3
    return HeadLayout(batch, sizes, heads, groups, dim, dtype, k_BlGD.device)


def present(streams: Sequence[Stream]) -> list[Stream]:
    """Return the streams that have tokens on this rank; a text may have fewer tokens than there are ranks."""
    return [stream for stream in streams if stream.tokens]


def write(streams: Sequence[Given], boxes: Outboxes, flags: Flags | None = None, *, queries: bool = True) -> bool:
    """Prepare each stream and write it into its part of the outboxes; only the last stream raises the flags.

    Without `queries`, q is not written. Returns what the last call of `into` returns: whether its kernel has
    already raised the flags and waited for those of the other ranks.
    """
    parts = boxes.split([stream.tokens for stream in streams])
    met = False
    for index, (stream, part) in enumerate(zip(streams, parts, strict=True), start=1):
        q = stream.q if queries else None
        met = into(q, stream.k, stream.v, stream.prepare, part, flags if index == len(streams) else None)
    return met


def into(
    q_BlHD: Tensor | None,
    k_BlGD: Tensor | None,
    v_BlGD: Tensor | None,
    how: Prepare,
    boxes: Outboxes,
    flags: Flags | None = None,
) -> bool:
    """Write q and k after norm and rotary, and v, into every outbox, in 8 bits if `how` says so.

    Inputs that are None are skipped; their outbox regions are not written. Returns whether the kernel has also raised
    these flags and waited for those of the other ranks.
    """
    kernel = wide_kernel if how.eight is None else kernel8
    first = next(x for x in (q_BlHD, k_BlGD, v_BlGD) if x is not None)
    if not (wide_kernel.fused(first) if how.eight is None else kernel8.takes(first, how)) or not first.numel():
        kernel.reference_into(q_BlHD, k_BlGD, v_BlGD, how, boxes)
        return False
    kernel.launch_into(q_BlHD, k_BlGD, v_BlGD, how, boxes, flags)
    return flags is not None


def split_out(out_BlHD: Tensor, streams: Sequence[Stream]) -> tuple[Tensor, ...]:
    sizes = [stream.tokens for stream in streams]
    return (out_BlHD,) if len(sizes) == 1 else tuple(out_BlHD.split(sizes, dim=1))


class KeptExchanges(dict[HeadLayout, T]):
    """The exchanges of a strategy by their layout, made by `make` when a layout comes first."""

    def __init__(self, make: Callable[[HeadLayout], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, layout: HeadLayout) -> T:
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            self[layout] = self._make(layout)
        return self[layout]


class OneRank:
    """Attention on an axis of one rank.

    Attention reads a single stream where its projection wrote it, without a copy. Several streams are joined: each is
    prepared directly into its part of one buffer.
    """

    def __init__(self, core: Core, axis: Axis, tokens: int) -> None:
        self._core, self._tokens = core, tokens
        self._transport = collective.Transport()
        self._joined = KeptExchanges[KeyValues](partial(self._transport.key_values, axis))

    def __call__(
        self, streams: Sequence[Stream], mask_BL: Tensor | None = None, beside: Beside | None = None
    ) -> tuple[Tensor, ...]:
        here = [given(stream) for stream in present(streams)]
        if len(here) == 1:
            (alone,) = here
            if alone.prepare.eight is not None:
                q, k, v = prepare8(alone.q, alone.k, alone.v, alone.prepare)
            else:
                (q, k), v = prepare(alone.q, alone.k, alone.prepare), alone.v
            return split_out(self._attend(q, k, v, mask_BL, beside), streams)
        layout = layout_of((self._tokens,), here, here[0].k)
        self._transport.abandon()  # ends an exchange that an error in the last call left unfinished
        buffers = self._joined[layout]
        q, k, v = buffers.deliver(write(here, buffers.outboxes(), buffers.flags))
        return split_out(self._attend(q, k, v, mask_BL, beside), streams)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, beside: Beside | None) -> Tensor:
        if isinstance(self._core, Sends):
            return self._core.attend_beside(q, k, v, mask, beside)[0]
        if beside is not None:
            beside()
        return self._core(q, k, v, mask)[0]


class Strategy(ABC, Generic[T]):
    """Base class of strategies: an `Attend` that owns its buffers. Subclasses implement `_attend`.

    core: attention on the axis. sizes: tokens of each rank of the axis. tokens: those of the whole sequence. make:
    makes an exchange for a layout. build: builds the strategy for other tokens; called for a stream when a model first
    asks for it alone, so that other models have no further exchanges.
    """

    def __init__(
        self,
        core: Core,
        axis: Axis,
        sizes: tuple[int, ...],
        tokens: Tokens,
        transport: Transport,
        make: Callable[[HeadLayout], T],
        build: Callable[[Tokens], Attend],
    ) -> None:
        self._core, self._axis, self._sizes, self._transport = core, axis, sizes, transport
        self.tokens, self._exchanges = tokens.total, KeptExchanges[T](make)
        self._one_rank = OneRank(core, axis, sizes[axis.rank])
        self._shards = tokens.streams if isinstance(tokens, JointShard) else (tokens,)
        self._build, self._alone = build, dict[int, Attend]()

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Beside | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        if only is not None:
            return self._attend_alone(only, streams, mask_BL, beside)
        self._transport.abandon()  # ends an exchange that an error in the last call left unfinished
        if self._axis.size == 1:
            return self._one_rank(streams, mask_BL, beside)
        return split_out(self._attend(present(streams), mask_BL, beside), streams)

    @abstractmethod
    def _attend(self, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None) -> Tensor:
        """Return the output (B, l, H, D) of the joined tokens. streams: only streams with tokens on this rank."""

    def _attend_alone(
        self, only: int, streams: Sequence[Stream], mask_BL: Tensor | None, beside: Beside | None
    ) -> tuple[Tensor, ...]:
        count = len(self._shards)
        if not 0 <= only < count or len(streams) != 1:
            raise ValueError(
                f"got {len(streams)} streams with only={only}, expected 1 stream and its place, 0 to {count - 1}"
            )
        if only not in self._alone:
            self._alone[only] = self._build(self._shards[only])
        return self._alone[only](streams, mask_BL, beside=beside)
