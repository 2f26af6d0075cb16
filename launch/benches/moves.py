"""Each way to make an exchange of an attention layer, with the inputs it moves and what must arrive: ours by every
transport, the bare collective, and the collective between permutes.

Payloads are index-coded: byte n of an element's place in the whole tensor, which bf16 holds exactly, so that four
moves with n = 0 .. 3 tell every element from every other.
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

MOVES = ("ulysses in", "ulysses back", "kv gather")
CODED_BYTES = 4
ALL = slice(None)


@dataclass(frozen=True)
class Way:
    """`run` moves `inputs` and returns what arrived; `sent(n)` and `expected(n)` are both, with byte n as payload."""

    inputs: Sequence[Tensor]
    run: Callable[[], Sequence[Tensor]]
    sent: Callable[[int], Sequence[Tensor]]
    expected: Callable[[int], Sequence[Tensor]]

    def fill(self, byte: int) -> None:
        """Write the payload; it is also what is timed (zeros would run faster than anything real)."""
        for tensor, payload in zip(self.inputs, self.sent(byte), strict=True):
            tensor.copy_(payload)

    def arrived(self, byte: int) -> bool:
        """Whether every element is in its place."""
        outs = self.run()
        return all(torch.equal(out, x) for out, x in zip(outs, self.expected(byte), strict=True))


def tokens_for(move: str, megabytes: float, ranks: int, batch: int, width: int, itemsize: int) -> int:
    """Tokens a rank so that it writes about so many MiB, its own part included."""
    return max(1, round(megabytes * 2**20 / (_parts(move, ranks) * batch * width * itemsize)))


def bytes_of(move: str, layout: HeadLayout) -> int:
    """What a rank writes, its own part included; of n ranks, (n - 1) / n of it leaves the rank."""
    rows = layout.batch * layout.tokens[0] * layout.heads * layout.head_dim
    return _parts(move, len(layout.tokens)) * rows * layout.dtype.itemsize


def _parts(move: str, ranks: int) -> int:
    return {"ulysses in": 3, "ulysses back": 1, "kv gather": 2 * ranks}[move]


def coded(layout: HeadLayout, name: int, tokens: slice, heads: slice, byte: int) -> Tensor:
    """(B, tokens, heads, D) of a whole (B, L, H, D) that is number `name`: byte `byte` of each element's place."""
    whole = (layout.batch, sum(layout.tokens), layout.heads, layout.head_dim)
    place = torch.tensor(name, device=layout.device)
    for size, taken in zip(whole, (ALL, tokens, heads, ALL), strict=True):
        place = place[..., None] * size + torch.arange(size, device=layout.device)[taken]
    return ((place >> 8 * byte) & 255).to(layout.dtype)


def ours(move: str, transport: Transport, axis: Axis, layout: HeadLayout) -> Way:
    """As a strategy makes it: the kernel that prepares q, k, v (or pushes the output) writes where it will be read."""
    mine, all_heads = _tokens(axis, layout), layout.q_slice(axis.rank)
    if move == "ulysses back":
        _, back = transport._heads(axis, layout)  # without its checks: one way alone, which nobody reads meanwhile
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
    """As DeepSpeed-Ulysses makes it (see `launch.baselines.plain_ulysses`); `ValueError` where heads do not divide."""
    if layout.heads % axis.size and move != "kv gather":
        raise ValueError(f"{layout.heads} heads do not divide by {axis.size} ranks")
    mine, heads = _tokens(axis, layout), layout.q_slice(axis.rank)
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
    """One collective that moves as many bytes, in no layout that attention could read."""
    block = bytes_of(move, layout) // layout.dtype.itemsize // axis.size  # from one rank to another
    gather = move == "kv gather"
    # a pretended tensor of one token a rank, a head for every reader
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


def _tokens(axis: Axis, layout: HeadLayout) -> slice:
    start = sum(layout.tokens[: axis.rank])
    return slice(start, start + layout.tokens[axis.rank])


def _coded(layout: HeadLayout, names: Sequence[int], tokens: slice, heads: slice, byte: int) -> list[Tensor]:
    return [coded(layout, name, tokens, heads, byte) for name in names]


def _inputs(
    layout: HeadLayout, names: Sequence[int], tokens: slice, heads: slice
) -> tuple[list[Tensor], Callable[[int], Sequence[Tensor]]]:
    """Tensors for these payloads, heads of one fused projection as a model has them, and what to fill them with."""
    sent = partial(_coded, layout, names, tokens, heads)
    count, h = len(range(sum(layout.tokens))[tokens]), len(range(layout.heads)[heads])
    shape = (layout.batch, count, len(names) * h, layout.head_dim)
    fused = torch.empty(shape, dtype=layout.dtype, device=layout.device)
    return list(fused.split([h] * len(names), dim=2)), sent
