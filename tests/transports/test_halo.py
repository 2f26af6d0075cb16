"""Tests that halos put every edge in its place: unique elements, poisoned destinations, strided views, late ranks."""

from __future__ import annotations

import random as rng
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels import halo as kernels
from seqpar.transports import _folder
from tests.support.meshes import TRANSPORTS
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.complex64)


def late(rank: int, round_: int) -> None:
    if round_ < 8:
        time.sleep(rng.Random(rank * 100 + round_).random() * 0.01)


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
    axis, transport, wrong = make_mesh(device, ring=world, cfg=1).ring, _folder.load(name).Transport(), 0
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
        late(rank, round_)
        halo.swap(*given)
        late(rank, round_ + 1)
        wrong += sum(not torch.equal(whole, expected) for whole, expected in kept)
    transport.check()
    transport.release()
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64, torch.bool], ids=str)
def test_every_edge_arrives_at_its_place_by_the_kernels_themselves(ranks: Pool, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    assert ranks.run(3, by_kernels, dtype, range(0, 30, 2 if dtype is torch.bfloat16 else 5)) == [0] * 3
