"""Ways to make one exchange of an attention layer, each with its inputs and the tensors that must arrive.

A way is one of our transports, a bare collective, or a collective with the permutes around it (for a halo: sends and
receives of contiguous blocks, without and with the copies of strided edges). Payloads encode indices: each element
holds byte n of its flat index in the whole tensor. bf16 represents every byte exactly, so four moves with n = 0 .. 3
identify every element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from launch.baselines.plain_ulysses import gathered, to_heads, to_tokens
from seqpar.kernels.prepare import prepare_into
from seqpar.kernels.push import push
from seqpar.mesh import Axis
from seqpar.protocols import Prepare
from seqpar.transports._contract import Transport
from seqpar.transports._layout import HeadLayout

MOVES = ("ulysses in", "ulysses back", "kv gather", "halo")
CODED_BYTES = 4
ALL = slice(None)


@dataclass(frozen=True)
class Way:
    """One exchange: `run` moves `inputs` and returns what arrived.

    sent(n), expected(n): the inputs and the results if the payload is byte n.
    """

    inputs: Sequence[Tensor]
    run: Callable[[], Sequence[Tensor]]
    sent: Callable[[int], Sequence[Tensor]]
    expected: Callable[[int], Sequence[Tensor]]

    def fill(self, byte: int) -> None:
        """Write byte `byte` of the payload into the inputs; timing uses it too, because zeros would move faster."""
        for tensor, payload in zip(self.inputs, self.sent(byte), strict=True):
            tensor.copy_(payload)

    def arrived(self, byte: int) -> bool:
        """Run the move and return whether every element is in its place."""
        outs = self.run()
        return all(torch.equal(out, x) for out, x in zip(outs, self.expected(byte), strict=True))


def tokens_for(move: str, megabytes: float, ranks: int, batch: int, width: int, itemsize: int) -> int:
    """Return the tokens of a rank for which it writes about `megabytes` MiB, including its own part."""
    return max(1, round(megabytes * 2**20 / (_parts(move, ranks) * batch * width * itemsize)))


def bytes_of(move: str, layout: HeadLayout) -> int:
    """Return the bytes that a rank writes, including its own part; with n ranks, (n - 1) / n of them leave the rank.

    For a halo they are both edges. Two ranks have no neighbour on one side, so (n - 1) / n of them is the mean.
    """
    rows = layout.batch * layout.tokens[0] * layout.heads * layout.head_dim
    return _parts(move, len(layout.tokens)) * rows * layout.dtype.itemsize


def _parts(move: str, ranks: int) -> int:
    return {"ulysses in": 3, "ulysses back": 1, "kv gather": 2 * ranks, "halo": 2}[move]


def coded(layout: HeadLayout, name: int, tokens: slice, heads: slice, byte: int) -> Tensor:
    """Return byte `byte` of each element's index in tensor number `name` (B, L, H, D), as (B, tokens, heads, D)."""
    whole = (layout.batch, sum(layout.tokens), layout.heads, layout.head_dim)
    place = torch.tensor(name, device=layout.device)
    for size, taken in zip(whole, (ALL, tokens, heads, ALL), strict=True):
        place = place[..., None] * size + torch.arange(size, device=layout.device)[taken]
    return ((place >> 8 * byte) & 255).to(layout.dtype)


def ours(move: str, transport: Transport, axis: Axis, layout: HeadLayout) -> Way:
    """Return our move as a strategy makes it: the prepare (or push) kernel writes into the readers' buffers."""
    if move == "halo":
        edge = _edge(layout, axis.rank, 0, 0)
        return edges(axis, layout, transport.halo(axis, edge.numel(), edge).swap)
    mine, all_heads = _tokens(axis.rank, layout), layout.q_slice(axis.rank)
    if move == "ulysses back":
        _, back = transport._heads(axis, layout)  # no turn check: this direction is used alone
        (out,), sent = _inputs(layout, (0,), ALL, all_heads)

        def returned() -> Sequence[Tensor]:
            return (back.deliver(push(out, back.outboxes(), back.flags)),)

        return Way((out,), returned, sent, partial(_coded, layout, (0,), mine, ALL))
    into = transport._heads(axis, layout)[0] if move == "ulysses in" else transport.key_values(axis, layout)
    (q, k, v), sent = _inputs(layout, (0, 1, 2), mine, ALL)

    def moved() -> Sequence[Tensor]:
        return into.deliver(prepare_into(q, k, v, Prepare(), into.outboxes(), into.flags))

    if move == "ulysses in":
        return Way((q, k, v), moved, sent, partial(_coded, layout, (0, 1, 2), ALL, all_heads))

    def expected(byte: int) -> Sequence[Tensor]:
        return (*_coded(layout, (0,), mine, ALL, byte), *_coded(layout, (1, 2), ALL, ALL, byte))

    return Way((q, k, v), moved, sent, expected)


def permuted(move: str, axis: Axis, layout: HeadLayout) -> Way:
    """Return the move of DeepSpeed-Ulysses (see `launch.baselines.plain_ulysses`).

    Raises `ValueError` if the heads do not divide by the ranks.
    """
    if move == "halo":
        return edges(axis, layout, partial(plain_swap, axis))
    if layout.heads % axis.size and move != "kv gather":
        raise ValueError(f"{layout.heads} heads do not divide by {axis.size} ranks")
    mine, heads = _tokens(axis.rank, layout), layout.q_slice(axis.rank)
    if move == "ulysses back":
        (out,), sent = _inputs(layout, (0,), ALL, heads)
        return Way((out,), lambda: (to_tokens(out, axis),), sent, partial(_coded, layout, (0,), mine, ALL))
    if move == "ulysses in":
        qkv, sent = _inputs(layout, (0, 1, 2), mine, ALL)
        expected = partial(_coded, layout, (0, 1, 2), ALL, heads)
        return Way(qkv, lambda: [to_heads(x, axis) for x in qkv], sent, expected)
    (k, v), sent = _inputs(layout, (1, 2), mine, ALL)
    return Way((k, v), lambda: gathered(k, v, axis), sent, partial(_coded, layout, (1, 2), ALL, ALL))


def bare(move: str, axis: Axis, layout: HeadLayout) -> Way:
    """Return one collective that moves as many bytes, in a layout that attention could not read."""
    if move == "halo":
        return edges(axis, layout, partial(plain_swap, axis), apart=False)
    block = bytes_of(move, layout) // layout.dtype.itemsize // axis.size  # elements from one rank to another
    gather = move == "kv gather"
    # describes the flat buffer as one token a rank, with one head for each reader
    flat = HeadLayout(1, (1,) * axis.size, 1 if gather else axis.size, 1, block, layout.dtype, layout.device)
    (x,), sent = _inputs(flat, (0,), slice(axis.rank, axis.rank + 1), ALL)
    received = x.new_empty(axis.size * block)
    heads = ALL if gather else slice(axis.rank, axis.rank + 1)

    def run() -> Sequence[Tensor]:
        if gather:
            dist.all_gather_into_tensor(received, x.flatten(), group=axis.group)
        else:
            dist.all_to_all_single(received, x.flatten(), group=axis.group)
        return (received.view(1, axis.size, 1, block),)

    return Way((x,), run, sent, partial(_coded, flat, (0,), ALL, heads))


def edges(axis: Axis, layout: HeadLayout, swap: Callable[..., object], apart: bool = True) -> Way:
    """Return a swap of edges with the neighbours, of one row of a rank's tokens for each channel.

    apart: the edges are rows of a padded picture of four rows, so that the rows of two channels are not adjacent;
    otherwise each edge is one contiguous block.
    """
    edge = _edge(layout, axis.rank, 0, 0)
    shape = (*edge.shape[:2], 4, edge.shape[2]) if apart else (4, *edge.shape)
    before, first, last, after = edge.new_empty(shape).unbind(2 if apart else 0)
    ends = axis.rank > 0, axis.rank < axis.size - 1
    blocks = [block if ends[place % 2] else None for place, block in enumerate((first, last, before, after))]

    def sent(byte: int) -> Sequence[Tensor]:
        return [_edge(layout, axis.rank, name, byte) for name in (0, 1)]

    def expected(byte: int) -> Sequence[Tensor]:
        theirs = (axis.rank - 1, 1), (axis.rank + 1, 0)
        return [_edge(layout, *their, byte) for their, end in zip(theirs, ends, strict=True) if end]

    def run() -> Sequence[Tensor]:
        swap(*blocks)
        return [block for block in blocks[2:] if block is not None]

    return Way((first, last), run, sent, expected)


def plain_swap(axis: Axis, *blocks: Tensor | None) -> None:
    """Swap edges as `Halo.swap` does, by sends and receives of contiguous blocks, with copies of others.

    blocks: the four of `Halo.swap`, in its order.
    """
    moves, rooms = [], []
    for place, block in enumerate(blocks):
        if block is not None:
            peer, receives = axis.rank + (-1, 1)[place % 2], place > 1
            apart = receives and not block.is_contiguous()
            room = torch.empty_like(block, memory_format=torch.contiguous_format) if apart else block.contiguous()
            moves.append(dist.P2POp(dist.irecv if receives else dist.isend, room, group=axis.group, group_peer=peer))
            rooms += [(block, room)] * apart
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    for block, room in rooms:
        block.copy_(room)


def _edge(layout: HeadLayout, rank: int, name: int, byte: int) -> Tensor:
    """Return byte `byte` of an edge of a rank, (B, channels, tokens)."""
    return coded(layout, name, _tokens(rank, layout), ALL, byte).flatten(2).transpose(1, 2)


def _tokens(rank: int, layout: HeadLayout) -> slice:
    start = sum(layout.tokens[:rank])
    return slice(start, start + layout.tokens[rank])


def _coded(layout: HeadLayout, names: Sequence[int], tokens: slice, heads: slice, byte: int) -> list[Tensor]:
    return [coded(layout, name, tokens, heads, byte) for name in names]


def _inputs(
    layout: HeadLayout, names: Sequence[int], tokens: slice, heads: slice
) -> tuple[list[Tensor], Callable[[int], Sequence[Tensor]]]:
    """Return input tensors and the function that makes their payloads; they are slices of one fused projection."""
    sent = partial(_coded, layout, names, tokens, heads)
    count, h = len(range(sum(layout.tokens))[tokens]), len(range(layout.heads)[heads])
    shape = (layout.batch, count, len(names) * h, layout.head_dim)
    fused = torch.empty(shape, dtype=layout.dtype, device=layout.device)
    return list(fused.split([h] * len(names), dim=2)), sent
