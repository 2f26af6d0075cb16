"""Moves a rank's edges into its neighbours' memory, and what they sent from this rank's memory to its place.

For peer memory on GPUs. One launch writes both edges of any strides into the neighbours' inboxes, raises the
flags and waits for the neighbours'; a second one writes what has arrived to its places. Plain torch needs a copy for
each block and one more launch for the flags. An inbox has two slots, and the kernels take the slot of a swap from the
counter of the flags on the device, so that it is right at every replay of a CUDA graph. The kernels move integers of
up to 16 bytes, whatever the dtype, so that few variants are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd, prod
from typing import Any

from torch import Tensor

from seqpar.kernels._triton import jit, tl
from seqpar.kernels.flags import Flags, last_meets, meeting

Pair = tuple[Tensor | None, Tensor | None]
"""Something for the rank before, and something for the rank after."""
WORDS = 512  # words that one program moves
Key = tuple[tuple[int, ...], tuple[int, ...], int, int]
TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def send(edges: Pair, there: Pair, flags: Flags) -> None:
    """Write both edges into the neighbours' inboxes, then tell and wait for the neighbours.

    there: for each neighbour its inbox for this rank, (2 slots, bytes) uint8.
    """
    (launch_send if flags.mine.is_cuda else reference_send)(edges, there, flags)


def take(places: Pair, here: Pair, flags: Flags) -> None:
    """Write what the last `send` of the neighbours has brought to its places. here: this rank's inboxes, as above."""
    (launch_take if flags.mine.is_cuda else reference_take)(places, here, flags)


def reference_send(edges: Pair, there: Pair, flags: Flags) -> None:
    _copy(edges, there, int(flags.counts[0]) % 2, lambda block, room: room.copy_(block))
    flags.meet()


def reference_take(places: Pair, here: Pair, flags: Flags) -> None:
    _copy(places, here, (int(flags.counts[0]) - 1) % 2, lambda block, room: block.copy_(room))


def _copy(blocks: Pair, inboxes: Pair, slot: int, copy: Callable[[Tensor, Tensor], object]) -> None:
    for block, inbox in zip(blocks, inboxes, strict=True):
        if block is not None and inbox is not None:
            copy(block, inbox[slot, : block.numel() * block.element_size()].view(block.dtype).view(block.shape))


def launch_send(edges: Pair, there: Pair, flags: Flags) -> None:
    """Run the kernel of `send`; without edges, that of the flags."""
    blocks, programs, how = _plan(edges, there)
    if programs:
        send_kernel[(programs, 2)](blocks, *meeting(flags), *how, num_warps=4)
    else:
        flags.meet()


def launch_take(places: Pair, here: Pair, flags: Flags) -> None:
    blocks, programs, how = _plan(places, here)
    if programs:
        take_kernel[(programs, 2)](blocks, flags.counts, *how, num_warps=4)


def _plan(blocks: Pair, inboxes: Pair) -> tuple[tuple[Any, Any], int, tuple[Any, ...]]:
    """Return both blocks as the kernels take them, the programs for each, and what is constant in them.

    A block is (address, that of the inbox, bytes of a slot), (words,), (size of each dim), (stride of each dim).
    """
    keys, places = [], []
    for block, inbox in zip(blocks, inboxes, strict=True):
        if block is None or inbox is None or not block.numel():
            keys.append(None)
            places.append((0, 0, 0))
        else:
            at = block.data_ptr()
            keys.append((block.shape, block.stride(), block.element_size(), at % 16))
            places.append((at, inbox.data_ptr(), inbox.stride(0)))
    (first, last), programs, how = _layout(*keys)
    return ((_odd(*places[0]), *first), (_odd(*places[1]), *last)), programs, how


def _odd(*numbers: int) -> tuple[int, ...]:
    """Encode numbers as odd ones over 1: Triton recompiles a kernel for a 1 and for a multiple of 16."""
    return tuple([2 * number + 3 for number in numbers])  # a list, because tuple(generator) takes longer


@lru_cache(4096)
def _layout(*keys: Key | None) -> tuple[list[tuple[tuple[int, ...], ...]], int, tuple[Any, ...]]:
    """Return what `_plan` does except addresses; for each block the words, the sizes and the strides, as `_odd` tells.

    keys: shape, strides, bytes of an element, and the address modulo 16 of each block. Words have the most bytes, up
    to 16, that divide rows and all steps between them.
    """
    merged = [[(1, 0)] if key is None else _merged(key[0], key[1]) for key in keys]
    word, count = 16, max(len(dims) for dims in merged)
    for key, ((width, step), *outer) in zip(keys, merged, strict=True):
        if key is not None:
            itemsize, steps = key[2], [stride for _, stride in outer]
            word = gcd(word, key[3], itemsize * (gcd(width, *steps) if step == 1 else 1))
    blocks, most, size = [], 0, min(word, 8)
    for key, ((width, step), *outer) in zip(keys, merged, strict=True):
        itemsize, words = (word, 0) if key is None else (key[2], prod(key[0]) * key[2] // word)
        inner = (width * itemsize // word, word // size) if step == 1 else (width, step)
        dims = [inner, *((n, stride * itemsize // size) for n, stride in outer)]
        sizes, steps = zip(*dims, *[(1, 0)] * (count - len(dims)), strict=True)
        blocks.append((_odd(words), _odd(*sizes), _odd(*steps)))
        most = max(most, words)
    return blocks, -(-most // WORDS), (TYPES[size], max(1, word // 8), word, count, WORDS)


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (size, stride) of the fewest dims with the same elements in the same order, the innermost first."""
    dims = [(size, stride) for size, stride in zip(reversed(shape), reversed(strides), strict=True) if size != 1]
    merged = dims[:1] or [(1, 1)]
    for size, stride in dims[1:]:
        inner, step = merged[-1]
        if stride == inner * step:
            merged[-1] = inner * size, step
        else:
            merged.append((size, stride))
    return merged


@jit
def send_kernel(
    blocks,
    flags,
    LANES: tl.constexpr,
    TIMER: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write both blocks, one in each column of programs; the last program tells and waits for the neighbours.

    The slot is the parity of the swaps before this one: no program counts this one before all have read the counter.
    """
    slot = tl.load(flags[2]) % 2
    if tl.program_id(1) == 0:
        move(blocks[0], slot, True, TYPE, VECTOR, ALIGN, COUNT, BLOCK)
    else:
        move(blocks[1], slot, True, TYPE, VECTOR, ALIGN, COUNT, BLOCK)
    last_meets(flags, tl.num_programs(0) * tl.num_programs(1), LANES, TIMER)


@jit
def take_kernel(
    blocks,
    counts,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Read both blocks from this rank's inboxes, one in each column of programs; this swap is counted already."""
    slot = (tl.load(counts) + 1) % 2
    if tl.program_id(1) == 0:
        move(blocks[0], slot, False, TYPE, VECTOR, ALIGN, COUNT, BLOCK)
    else:
        move(blocks[1], slot, False, TYPE, VECTOR, ALIGN, COUNT, BLOCK)


@jit
def move(
    block,
    slot,
    OUT: tl.constexpr,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGN: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move BLOCK words between a strided block (as in `_plan`) and a slot of its inbox, or back.

    A word has VECTOR integers of TYPE and ALIGN bytes, and begins at a multiple of these on both sides.
    """
    places, words, sizes, strides = block
    at, box, room = places
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = word
    place = tl.zeros((BLOCK,), tl.int64)
    for dim in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        size = plain(sizes[dim])
        place += (left % size) * plain(strides[dim]).to(tl.int64)
        left = left // size
    part = tl.arange(0, VECTOR)[None, :]
    integers = tl.pointer_type(TYPE)  # pyright: ignore[reportArgumentType]
    outside = tl.multiple_of(plain(at).to(tl.int64).to(integers) + place[:, None] + part, [ALIGN, ALIGN])
    begin = (plain(box) + slot * plain(room)).to(integers)
    inside = tl.multiple_of(begin + word[:, None] * VECTOR + part, [ALIGN, ALIGN])
    there = (word < plain(words[0]))[:, None] & (part < VECTOR)
    if OUT:
        tl.store(inside, tl.load(outside, there, 0), there)
    else:
        tl.store(outside, tl.load(inside, there, 0), there)


@jit
def plain(number):
    return (number >> 1) - 1
