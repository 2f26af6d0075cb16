"""Tests that every strategy sends q, k and v in e4m3, with the bits of one rank where it only moves data."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from seqpar.kernels.prepare import prepare
from seqpar.kernels.prepare8 import restored
from seqpar.local import fp8, reference
from seqpar.mesh.shard import JointShard, Shard
from seqpar.types.protocols import Qkv8, Stream
from tests.attention.test_strategies import CASES, Case, as_given, copied, equal, joined, mine_of, whole_stream
from tests.kernels.test_prepare8 import eight
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, build, mesh_for, refused
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows

DIM = 8
CPU = torch.device("cpu")
PLAIN = tuple(replace(case, masked=False) for case in CASES)


def rounding(case: Case) -> Qkv8:
    how = eight(case.kv_heads, DIM, torch.float64, "cpu")
    return replace(how, v_scale=8 * how.v_scale)


def outputs(
    case: Case, rank: int, world: int, device: torch.device, strategy: str, transport: str, beside: bool
) -> list[Tensor]:
    mesh, shards = mesh_for(strategy, world, device), tuple(Shard(count, world) for count in case.tokens)
    tokens, how = JointShard(shards, by_stream=strategy in EXACT), rounding(case)
    streams = list[Stream]()
    with by_rows():
        for index, given in enumerate(case.given[: len(shards)]):
            mine = mine_of(whole_stream(case, index), shards[index].slice(mesh.sequence.rank))
            stream = as_given(mine) if given else mine
            streams.append(replace(stream, prepare=replace(stream.prepare, eight=how)))
        attend = build(strategy, mesh, tokens, fp8.attend, transport)
        outs = [copied(attend(streams, beside=(lambda: None) if beside else None)) for _ in range(2)]
    assert equal(*outs)
    assert {out.dtype for out in outs[1]} == {torch.float32}
    return [restored(out, how, torch.float64) for out in outs[1]]


def sharded(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, beside: bool
) -> dict[Case, list[Tensor]]:
    fitting = [case for case in PLAIN if refused(strategy, world, case.heads, case.kv_heads) is None]
    return {
        case: outputs(case, rank, world, device, strategy, transport, beside)
        for case in fitting
        if min(JointShard(tuple(Shard(count, world) for count in case.tokens)).sizes) > 0
    }


@cache
def alone(case: Case) -> list[Tensor]:
    return outputs(case, 0, 1, CPU, "kv_gather", "collective", False)


@cache
def truth(case: Case) -> list[Tensor]:
    streams = [as_given(whole_stream(case, index)) for index in range(len(case.tokens))]
    ready = [(*prepare(stream.q, stream.k, stream.prepare), stream.v) for stream in streams]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*ready, strict=True))
    return list(reference.attend(q, k, v)[0].split([stream.tokens for stream in streams], dim=1))


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.norm() for x in tensors]).norm()


@pytest.mark.parametrize(("strategy", "transport", "world"), covering(LAYOUTS, TRANSPORTS, turns=(2, 3, 4)))
def test_any_number_of_ranks_has_one_ranks_bits_in_8_bits(
    cpu_ranks: Pool, world: int, strategy: str, transport: str
) -> None:
    """Strategies that merge have the error of rounding alone."""
    pieces = cpu_ranks.run(world, sharded, strategy, transport, world == 3)
    assert pieces[0]
    for case in pieces[0]:
        got = joined([outs[case] for outs in pieces])
        assert equal(got, alone(case)) or strategy not in EXACT, case
        wrong = [a - b for a, b in zip(got, truth(case), strict=True)]
        assert norm(wrong) < 0.15 * norm(truth(case)), case
