"""Tests that halos put every edge in its place: unique elements, poisoned destinations, strided views, late ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import halo as kernels
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Mesh
from seqpar.transports import peer
from seqpar.transports._contract import load
from tests.support.meshes import TRANSPORTS
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transports.test_moves import late

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.complex64)


def shape_of(pair: int, way: int, round_: int) -> tuple[int, ...]:
    """Return the shape of what travels between rank `pair` and the next; it has no rows in some rounds."""
    rows = (pair + 2 * way + round_) % 4
    return ((rows * 7,), (rows, 5), (2, rows, 3), (2, 3, rows, 5), (1, 4, 3, rows, 8))[(round_ + way) % 5]


def something(pair: int, way: int, round_: int) -> bool:
    """Return whether a block travels there: both ways, one way only, only between some ranks, nowhere."""
    return (True, way == 0, way == 1, pair % 2 == 0, round_ % 2 == 0)[round_ // 3 % 5]


def coded(pair: int, way: int, round_: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a block whose elements tell their place, pair, way and round, as far as the dtype can."""
    shape = shape_of(pair, way, round_)
    index = torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * (pair + 10 * way + 100 * round_)
    if dtype is torch.bool:
        return (index * 40503 >> 7 & 1).to(device, dtype)
    return (index if dtype.itemsize > 2 else index % 251).to(device, dtype)


def inside(shape: tuple[int, ...], kind: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a poisoned tensor, and a view of this shape in it: contiguous, edge rows, channels-last, every second."""
    dim, count = max(len(shape) - 2, 0), len(shape)
    if kind == 0:
        whole = view = like.new_empty(shape)
    elif kind == 1:
        whole = like.new_empty((*shape[:dim], shape[dim] + 2, *shape[dim + 1 :]))
        view = whole.narrow(dim, 1, shape[dim])
    elif kind == 2:
        order = [0, *range(2, count), 1] if count > 2 else [*range(count)]
        whole = like.new_empty([shape[axis] + 2 * (axis == dim) for axis in order])
        view = whole.permute([order.index(axis) for axis in range(count)]).narrow(dim, 2, shape[dim])
    else:
        whole = like.new_empty((*reversed(shape), 2))
        view = whole[..., 1].permute([*reversed(range(count))])
    whole.fill_(77)
    return whole, view


def swapped(rank: int, world: int, device: torch.device, name: str, dtype: torch.dtype, rounds: range) -> int:
    """Swap blocks of changing shapes and layouts; return the number of tensors that are not as expected."""
    axis, transport, wrong = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport(), 0
    like = torch.zeros((), dtype=dtype, device=device)
    halo = transport.halo(axis, 288, like)
    for round_ in rounds:
        given: list[Tensor | None] = [None] * 4
        kept: list[tuple[Tensor, Tensor]] = []
        for slot, (pair, way, mine) in enumerate(
            ((rank - 1, 0, True), (rank, 1, True), (rank - 1, 1, False), (rank, 0, False))
        ):  # way 0: backward, to the rank before; way 1: forward
            if not 0 <= pair < world - 1 or not something(pair, way, round_):
                continue
            truth = coded(pair, way, round_, dtype, device)
            whole, view = inside(tuple(truth.shape), (round_ + rank + slot) % 4, like)
            expected, place = inside(tuple(truth.shape), (round_ + rank + slot) % 4, like)
            place.copy_(truth)
            if mine:
                view.copy_(truth)
            given[slot] = view
            kept.append((whole, expected))
        if round_ < 8:
            late(rank, round_)
        halo.swap(*given)
        if round_ < 8:
            late(rank, round_ + 1)
        wrong += sum(not torch.equal(whole, expected) for whole, expected in kept)
    transport.check()
    transport.release()
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_edge_arrives_at_its_place(ranks: Pool, transport: str, world: int) -> None:
    for dtype, rounds in zip(DTYPES, (60, 20, 15, 15, 15, 15), strict=True):
        assert ranks.run(world, swapped, transport, dtype, range(rounds)) == [0] * world, dtype


def by_kernels(rank: int, world: int, device: torch.device, *args: Any) -> int:
    """Do what `swapped` does with the kernels themselves, on CPUs in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "send", kernels.launch_send)
        patch.setattr(kernels, "take", kernels.launch_take)
        return swapped(rank, world, device, "peer", *args)


@pytest.mark.parametrize("world", [3])
def test_every_edge_arrives_at_its_place_by_the_kernels_themselves(ranks: Pool, world: int) -> None:
    for dtype, step in ((torch.bfloat16, 2), (torch.uint8, 7), (torch.float64, 7), (torch.bool, 7)):
        assert ranks.run(world, by_kernels, dtype, range(0, 30, step)) == [0] * world, dtype


def test_edges_of_two_gigabytes_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected less than 2\\^31 bytes"):
        peer.Transport().halo(Mesh.single().ring, 1 << 30, torch.zeros(1, dtype=torch.bfloat16))


def slow(rank: int, world: int, device: torch.device, slots: int, rounds: int) -> int:
    """Return how often a slow reader did not read what was sent to it, with this number of slots in use."""
    axis, wrong, real = make_mesh(device, ring=world, cfg=1).ring, 0, kernels._copy
    halo = peer.Transport().halo(axis, 64, torch.zeros((), device=device))
    edge = torch.zeros(4, 8, device=device)

    def read_late(*args: Any) -> None:
        if rank == 0:
            time.sleep(0.002)
        kernels.reference_take(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "take", read_late)
        patch.setattr(kernels, "_copy", lambda blocks, boxes, slot, copy: real(blocks, boxes, slot % slots, copy))
        for round_ in range(rounds):
            blocks = [None if (end == 0) == (rank == 0) else edge.clone() for end in (0, 1)]
            halo.swap(*(edge + round_ if block is not None else None for block in blocks), *blocks)
            wrong += sum(not torch.equal(block, edge + round_) for block in blocks if block is not None)
    collect_on_axis(axis, None, None)
    return wrong


def test_two_slots_are_enough_and_one_is_not(ranks: Pool) -> None:
    """The second half is a negative control: with one slot a fast rank writes over what a slow one still reads."""
    if ranks.device == "cuda":
        pytest.skip("a GPU's reader is not slowed down by its host")
    assert ranks.run(2, slow, 2, 40) == [0, 0]
    assert ranks.run(2, slow, 1, 40)[0] > 0


def left_alone(rank: int, world: int, device: torch.device) -> str:
    """Swap with a neighbour that does not come; return the error, within one deadline."""
    mesh, transport = make_mesh(device, ring=world, cfg=1), peer.Transport(2.0)
    compiling = peer.Transport().halo(mesh.ring, 1, torch.zeros(1, device=device))
    compiling.swap(None, None, None, None)
    halo = transport.halo(mesh.ring, 1, torch.zeros(1, device=device))
    mesh.collect(rank, int)
    if rank != 1:
        halo.swap(None, None, None, None)
    try:
        transport.check()
    except TimeoutError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("world", [4])
def test_a_neighbour_that_does_not_come_is_named(ranks: Pool, world: int) -> None:
    """Neighbours meet even if they have nothing to swap; ranks that are not neighbours do not wait for each other."""
    for rank, told in enumerate(ranks.run(world, left_alone)):
        late = {0: 1, 2: 1}.get(rank)
        assert (
            told.startswith(f"rank {rank}: timed out after 2 s waiting for rank {late} ") if late else told == "nothing"
        )


def captured(rank: int, world: int, device: torch.device, name: str, swaps: int) -> int:
    """Replay a graph of a number of swaps, with calls outside of it in between; return how many results were wrong."""
    axis, transport, wrong = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport(), 0
    halo = transport.halo(axis, 4096, torch.zeros((), device=device))
    padded = torch.zeros(swaps, 2, 8, 6, 16, device=device)  # rows 0 and 5 are the neighbours'

    def swap(x: Tensor) -> None:
        ends = rank > 0, rank < world - 1
        rows = (x[..., 1, :], x[..., 4, :], x[..., 0, :], x[..., 5, :])
        halo.swap(*(row if ends[place % 2] else None for place, row in enumerate(rows)))

    def all_swaps() -> None:
        for x in padded:
            swap(x)

    def right(x: Tensor, value: float) -> bool:
        ends = [value + step if 0 <= rank + step < world else -1.0 for step in (-1, 1)]
        return bool((x[..., 0, :] == ends[0]).all()) and bool((x[..., 5, :] == ends[1]).all())

    all_swaps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        all_swaps()
    for round_ in range(20):
        padded.fill_(-1.0)
        for number, x in enumerate(padded):
            x[..., 1:5, :] = 100.0 * round_ + 10 * number + rank
        late(rank, round_ % 8)
        graph.replay() if round_ % 3 else all_swaps()
        wrong += sum(not right(x, 100.0 * round_ + 10 * number + rank) for number, x in enumerate(padded))
    transport.check()
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("swaps", [1, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_gpu_replays_use_the_right_slots(ranks: Pool, world: int, transport: str, swaps: int) -> None:
    """A graph with an odd number of swaps ends on the slot with which its next replay would begin."""
    assert ranks.run(world, captured, transport, swaps) == [0] * world
