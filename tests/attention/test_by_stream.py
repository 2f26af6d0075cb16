"""Tests that strategies which only move data give one rank's bits where keys are held stream after stream.

The ranks have q, k and v of the same bits, and a local attention whose rows do not depend on each other, so that the
order of the keys alone decides the bits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from seqpar.mesh.shard import JointShard, Shard
from seqpar.types.masks import joined_mask
from seqpar.types.protocols import Given, Stream
from tests.attention.test_by_kernels import launched
from tests.attention.test_streams import CASES, Case, as_given, joined, masks, truth, whole_stream
from tests.conftest import DEVICE
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, build, mesh_for, refused
from tests.support.pool import Pool
from tests.support.row_by_row import attend as row_by_row

BOTH_GIVEN = tuple(replace(case, given=(True, True)) for case in CASES)
# besides: pictures of one token, and fewer tokens of both streams than ranks
ALL = (*BOTH_GIVEN, replace(BOTH_GIVEN[1], tokens=(5, 1)), replace(BOTH_GIVEN[2], tokens=(2, 1)))
FORMS = ("streams", "joined", "beside", "alone")


def mine_of(stream: Given, mine: slice) -> Given:
    """Return a rank's tokens of a stream, cut from what was computed for all tokens."""
    how = stream.prepare
    assert how.cos_lD2 is not None
    assert how.sin_lD2 is not None
    here = replace(how, cos_lD2=how.cos_lD2[mine], sin_lD2=how.sin_lD2[mine])
    return Given(stream.q[:, mine], stream.k[:, mine], stream.v[:, mine], here)


def as_one(streams: list[Given]) -> Given:
    """Return streams of one preparation that the model has joined already, as in FLUX's single blocks."""
    q, k, v = (torch.cat([getattr(stream, name) for stream in streams], dim=1) for name in "qkv")
    rows = [(stream.prepare.cos_lD2, stream.prepare.sin_lD2) for stream in streams]
    cos, sin = (torch.cat(parts) for parts in zip(*rows, strict=True))  # pyright: ignore[reportArgumentType]
    return Given(q, k, v, replace(streams[0].prepare, cos_lD2=cos, sin_lD2=sin))


def outputs(
    rank: int,
    world: int,
    device: torch.device,
    strategy: str,
    transport: str,
    case: Case,
    form: str,
    by_stream: bool,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
) -> list[Tensor]:
    """Return this rank's outputs of both streams, of its second call."""
    mesh = mesh_for(strategy, world, device)
    tokens = JointShard(tuple(Shard(count, world) for count in case.tokens), by_stream, padding)
    mine = [shard.slice(mesh.sequence.rank) for shard in tokens.streams]
    parts = [mine_of(as_given(whole_stream(case, index, dtype)), part) for index, part in enumerate(mine)]
    streams: list[Stream] = [as_one(parts)] if form == "joined" else [*parts]
    attend = build(strategy, mesh, tokens, row_by_row, transport)
    mask = joined_mask(masks(case), tokens, torch.empty(case.batch)) if case.masked else None
    ran = []

    def called() -> list[Tensor]:
        outs = attend(streams, mask, beside=(lambda: ran.append(None)) if form == "beside" else None)
        if form == "alone":  # calls for one stream, as in Stable Diffusion 3.5 Medium, come between
            return [attend(streams[index : index + 1], only=index)[0].clone() for index in range(2)]
        outs = outs[0].split([part.tokens for part in parts], dim=1) if form == "joined" else outs
        return [out.clone() for out in outs]

    first, second = called(), called()
    assert all(map(torch.equal, first, second))  # buffers are reused
    assert len(ran) == (2 if form == "beside" else 0)
    return second


def every(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, by_stream: bool = True
) -> dict[tuple[Case, str], list[Tensor]]:
    """Return the outputs of all cases and forms that a strategy takes on so many ranks."""
    return {
        (case, form): outputs(rank, world, device, strategy, transport, case, form, by_stream)
        for case, form in itertools.product(ALL, FORMS)
        if refused(strategy, world, case.heads, case.kv_heads) is None
        and min(JointShard(tuple(Shard(count, world) for count in case.tokens)).sizes)
        and (form != "alone" or min(case.tokens) >= world)
    }


@cache
def on_one_rank(case: Case, form: str) -> list[Tensor]:
    return outputs(0, 1, torch.device("cpu"), "kv_gather", "collective", case, form, True)


def differing(pieces: list[dict[tuple[Case, str], list[Tensor]]]) -> list[tuple[Case, str]]:
    """Return the cases whose outputs do not have the bits of one rank. pieces: what `every` returned on the ranks."""
    return [
        which
        for which in pieces[0]
        for got in [joined([outs[which] for outs in pieces])]
        if not all(torch.equal(one, other) for one, other in zip(got, on_one_rank(*which), strict=True))
    ]


@pytest.mark.parametrize(("world", "strategy", "transport"), itertools.product((2, 3), EXACT, TRANSPORTS))
def test_keys_in_the_order_of_the_streams_give_one_ranks_bits(
    ranks: Pool, world: int, strategy: str, transport: str
) -> None:
    pieces = ranks.run(world, every, strategy, transport)
    assert {form for _, form in pieces[0]} == set(FORMS)
    assert differing(pieces) == []


def by_kernels(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> tuple[list[Tensor], int]:
    """Return this rank's outputs in fp32 by the kernels of a GPU, and how often the one ran that moves the keys."""
    with launched() as counts:
        outs = outputs(rank, world, device, strategy, transport, ALL[1], "streams", True, torch.float32)
    return outs, counts["push"]


@cache
def alone_by_kernels() -> list[Tensor]:
    return by_kernels(0, 1, torch.device("cpu"), "kv_gather", "collective")[0]


@pytest.mark.skipif(DEVICE != "cpu", reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [(2 + index % 2, strategy, TRANSPORTS[index // 2 % 2]) for index, strategy in enumerate(EXACT)],
)
def test_kernels_hold_keys_in_the_order_of_the_streams(ranks: Pool, world: int, strategy: str, transport: str) -> None:
    pieces = ranks.run(world, by_kernels, strategy, transport)
    assert all(map(torch.equal, joined([outs for outs, _ in pieces]), alone_by_kernels()))
    assert min(count for _, count in pieces) >= 4  # k and v of two calls


def test_one_rank_is_right() -> None:
    for case in ALL:
        errors = [(got - want).abs().max() for got, want in zip(on_one_rank(case, "streams"), truth(case), strict=True)]
        assert float(max(errors)) < 1e-12, case


def test_negative_control_in_the_order_of_the_ranks_the_bits_differ(ranks: Pool) -> None:
    """So they do in every form but the streams alone, whose keys have one order."""
    forms = {form for _, form in differing(ranks.run(3, every, "kv_gather", "collective", False))}
    assert forms == {*FORMS} - {"alone"}


def refusal(rank: int, world: int, device: torch.device, strategy: str) -> None:
    tokens = JointShard((Shard(3, world), Shard(5, world)), by_stream=True)
    with pytest.raises(ValueError, match="merges the results of ranks, so it supports neither keys"):
        build(strategy, mesh_for(strategy, world, device), tokens, row_by_row)


@pytest.mark.parametrize("strategy", [name for name in LAYOUTS if name not in EXACT])
def test_strategies_that_merge_results_are_refused(ranks: Pool, strategy: str) -> None:
    ranks.run(2, refusal, strategy)
