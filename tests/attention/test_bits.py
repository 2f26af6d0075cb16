"""Tests that strategies which only move data give one rank's bits, and that a text's padding is weighed in fp64.

Ranks have q, k and v of the same bits, and a local attention whose rows do not depend on each other. So the order of
the keys alone decides the bits: with several streams they are held stream after stream, tokens apart from padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import exp

import pytest
import torch
from torch import Tensor

from seqpar.attention import _key_order
from seqpar.kernels.prepare import prepare
from seqpar.mesh.shard import JointShard, Shard
from seqpar.types.masks import joined_mask
from seqpar.types.protocols import Given, Stream
from tests.attention.test_strategies import (
    ONE_STREAM,
    TOLERANCE,
    TWO_STREAMS,
    VISIBLE,
    Case,
    as_given,
    copied,
    equal,
    error,
    joined,
    masks,
    truth,
    whole_stream,
)
from tests.support.meshes import EXACT, TRANSPORTS, build, mesh_for, refused
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import attend as row_by_row
from tests.support.row_by_row import by_rows

BOTH_GIVEN = tuple(replace(case, given=(True, True)) for case in TWO_STREAMS)
# besides: images of one token, and fewer tokens of both streams than ranks
PAIRS = (*BOTH_GIVEN, replace(BOTH_GIVEN[1], tokens=(5, 1)), replace(BOTH_GIVEN[2], tokens=(2, 1)))
FORMS = ("streams", "joined", "beside", "alone")


@dataclass(frozen=True)
class Row:
    """form: how attention is called. padding: tokens at the end of the text that are padding."""

    case: Case
    form: str = "streams"
    by_stream: bool = True
    padding: int = 0

    def tokens(self, world: int) -> JointShard:
        shards = tuple(Shard(count, world) for count in self.case.tokens)
        return JointShard(shards, self.by_stream, self.padding)

    def fits(self, strategy: str, world: int) -> bool:
        if refused(strategy, world, self.case.heads, self.case.kv_heads) is not None:
            return False
        return min(self.tokens(world).sizes) > 0 and (self.form != "alone" or min(self.case.tokens) >= world)


PADDED = [  # one token of padding, half of the text, all of it; the order of other keys makes no difference then
    Row(replace(case, masked=False), FORMS[index % 3], index % 2 == 0, padding)
    for index, (case, padding) in enumerate(
        (case, padding) for case in PAIRS for padding in sorted({1, case.tokens[0] // 2, case.tokens[0]} - {0})
    )
]
IN_TURNS = [Row(case, form) for n, case in enumerate(PAIRS) for form in (FORMS[n % 2 :: 2] if n else FORMS)]
ROWS = [*map(Row, ONE_STREAM), *IN_TURNS, *PADDED]


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
    row: Row, world: int, device: torch.device, strategy: str, transport: str, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return this rank's outputs of each stream; a second call in the same buffers has the same bits."""
    case, mesh, tokens = row.case, mesh_for(strategy, world, device), row.tokens(world)
    mine = [shard.slice(mesh.sequence.rank) for shard in tokens.streams]
    parts = [mine_of(as_given(whole_stream(case, index, dtype)), part) for index, part in enumerate(mine)]
    streams: list[Stream] = [as_one(parts)] if row.form == "joined" else [*parts]
    attend = build(strategy, mesh, tokens, row_by_row, transport)
    mask = joined_mask(masks(case), tokens, torch.empty(case.batch)) if case.masked else None
    ran = []

    def called() -> list[Tensor]:
        outs = attend(streams, mask, beside=(lambda: ran.append(None)) if row.form == "beside" else None)
        if row.form == "alone":  # calls for one stream, as in Stable Diffusion 3.5 Medium, come between
            return [attend(streams[index : index + 1], only=index)[0].clone() for index in range(2)]
        outs = outs[0].split([part.tokens for part in parts], dim=1) if row.form == "joined" else outs
        return copied(tuple(outs))

    with by_rows() if row.padding else nullcontext():  # results of tokens and padding are merged
        first, second = called(), called()
    assert equal(first, second)
    assert len(ran) == (2 if row.form == "beside" else 0)
    return second


def all_rows(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, in_order: bool = True
) -> dict[Row, list[Tensor]]:
    rows = [replace(row, by_stream=row.by_stream and in_order) for row in ROWS if in_order or not row.padding]
    return {row: outputs(row, world, device, strategy, transport) for row in rows if row.fits(strategy, world)}


@cache
def on_one_rank(row: Row) -> list[Tensor]:
    return outputs(row, 1, torch.device("cpu"), "kv_gather", "collective")


def differing(ranks: Pool, pieces: list[dict[Row, list[Tensor]]]) -> list[Row]:
    """Return the rows whose outputs do not have the bits of one rank."""

    def differs(row: Row) -> bool:
        got = joined([outs[row] for outs in pieces])
        if row.padding and ranks.device == "cuda":  # whose exponentials are others than a CPU's
            return error(got, on_one_rank(row)) >= TOLERANCE
        return not equal(got, on_one_rank(row))

    return [row for row in pieces[0] if differs(row)]


@pytest.mark.parametrize(("strategy", "transport", "world"), covering(EXACT, TRANSPORTS, turns=(3, 4, 2)))
def test_strategy_that_only_moves_data_has_one_ranks_bits(
    ranks: Pool, world: int, strategy: str, transport: str
) -> None:
    pieces = ranks.run(world, all_rows, strategy, transport)
    assert {(row.form, bool(row.padding)) for row in pieces[0]} > {*itertools.product(FORMS[:3], (False, True))}
    assert differing(ranks, pieces) == []


def test_negative_control_in_the_order_of_the_ranks_the_bits_differ(ranks: Pool) -> None:
    """So they do in every form but the streams alone, whose keys have one order."""
    rows = differing(ranks, ranks.run(3, all_rows, "kv_gather", "collective", False))
    assert {row.form for row in rows} == {*FORMS} - {"alone"}
    assert all(len(row.case.tokens) == 2 for row in rows)


@cache
def formula(row: Row) -> list[Tensor]:
    """Return attention in fp64 with torch's own functions, where two tokens have a score that is 1 more."""
    case = row.case
    streams = [as_given(whole_stream(case, index)) for index in range(2)]
    ready = [(*prepare(stream.q, stream.k, stream.prepare), stream.v) for stream in streams]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*ready, strict=True))
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    words = case.tokens[0] - row.padding
    own = torch.tensor([not words <= place < case.tokens[0] for place in range(sum(case.tokens))]).double()
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5 + own[:, None] * own
    return list(torch.einsum("bhlm,bmhd->blhd", scores.softmax(dim=-1), v).split(case.tokens, dim=1))


@pytest.mark.parametrize("fault", [None, "all queries add", "no query adds"])
def test_one_rank_is_right(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    """With a fault every row with padding is wrong."""
    added = _key_order.ByPadding._added_to
    faults: dict[str, Callable[[_key_order.ByPadding, Tensor], Tensor]] = {
        "all queries add": lambda core, q: torch.ones_like(added(core, q)),
        "no query adds": lambda core, q: torch.zeros_like(added(core, q)),
    }
    if fault is not None:
        monkeypatch.setattr(_key_order.ByPadding, "_added_to", faults[fault])
    for row in {replace(row, form="streams") for row in ROWS}:  # joined, both streams would have one preparation
        want = formula(row) if row.padding else truth(row.case)
        wrong = error(outputs(row, 1, torch.device("cpu"), "kv_gather", "collective"), want)
        assert wrong > VISIBLE if fault is not None and row.padding else wrong < TOLERANCE, row


def test_a_token_has_e_times_the_weight_of_padding() -> None:
    """With q of zeros all scores are equal, and values of one for tokens alone show their weight."""
    tokens, weight = JointShard((Shard(4, 1), Shard(3, 1)), padding=2), 5 * exp(1)
    zeros, values = torch.zeros(1, 7, 1, 8).double(), torch.ones(1, 7, 1, 8).double()
    values[:, 2:4] = 0
    core = _key_order.ByPadding(row_by_row, tokens, 0)
    out, lse = core(zeros, zeros, values)
    of_tokens = weight / (weight + 2)
    assert out[0, :, 0, 0].tolist() == pytest.approx([of_tokens] * 2 + [5 / 7] * 2 + [of_tokens] * 3)
    assert lse[0, 0].exp().tolist() == pytest.approx([weight + 2] * 2 + [7] * 2 + [weight + 2] * 3)
    with pytest.raises(ValueError, match="a key mask is not supported together with weighted padding"):
        core(zeros, zeros, values, torch.ones(1, 7, dtype=torch.bool))
