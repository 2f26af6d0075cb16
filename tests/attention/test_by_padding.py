"""Tests that attention weighs a text's padding as its formula in fp64 does, with one rank's bits on several."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import exp

import pytest
import torch
from torch import Tensor

from seqpar.attention import _by_padding
from seqpar.kernels.prepare import prepare
from seqpar.mesh.shard import JointShard, Shard
from tests.attention.test_by_kernels import launched
from tests.attention.test_by_stream import ALL, FORMS, outputs
from tests.attention.test_streams import Case, as_given, joined, whole_stream
from tests.conftest import DEVICE
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, build, mesh_for, refused
from tests.support.pool import Pool
from tests.support.row_by_row import attend as row_by_row
from tests.support.row_by_row import by_rows

TOLERANCE, VISIBLE = 1e-12, 1e-3
# a case of `test_by_stream.py` without a mask -> tokens of its text that are padding: one, half of them, all
PADDINGS = [
    (replace(case, masked=False), padding)
    for case in ALL
    for padding in sorted({1, case.tokens[0] // 2, case.tokens[0]} - {0})
]


@cache
def formula(case: Case, padding: int) -> list[Tensor]:
    """Return attention in fp64 with torch's own functions, where two tokens have a score that is 1 more."""
    streams = [as_given(whole_stream(case, index)) for index in range(2)]
    ready = [(*prepare(stream.q, stream.k, stream.prepare), stream.v) for stream in streams]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*ready, strict=True))
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=2) for x in (k, v))
    words = case.tokens[0] - padding
    own = torch.tensor([not words <= place < case.tokens[0] for place in range(sum(case.tokens))]).double()
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5 + own[:, None] * own
    return list(torch.einsum("bhlm,bmhd->blhd", scores.softmax(dim=-1), v).split(case.tokens, dim=1))


def every(
    rank: int, world: int, device: torch.device, strategy: str, transport: str
) -> dict[tuple[Case, int, str], list[Tensor]]:
    """Return the outputs of all cases that a strategy takes on so many ranks, in forms that take turns.

    Keys are held rank after rank or stream after stream, which makes no difference here.
    """
    results = {}
    for index, (case, padding) in enumerate(PADDINGS, start=world):
        form = FORMS[index % 3]
        takes = refused(strategy, world, case.heads, case.kv_heads) is None
        if takes and min(JointShard(tuple(Shard(count, world) for count in case.tokens)).sizes):
            how = (strategy, transport, case, form, index % 2 == 0)
            with by_rows():
                results[case, padding, form] = outputs(rank, world, device, *how, padding=padding)
    return results


def on_one_rank(case: Case, padding: int, form: str) -> list[Tensor]:
    with by_rows():
        return outputs(0, 1, torch.device("cpu"), "kv_gather", "collective", case, form, False, padding=padding)


right = cache(on_one_rank)  # without a fault


def farthest(got: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((one.cpu() - other).abs().max()) for one, other in zip(got, truth, strict=True))


@pytest.mark.parametrize(("world", "strategy", "transport"), itertools.product((2, 3), EXACT, TRANSPORTS))
def test_padding_is_weighed_with_one_ranks_bits(ranks: Pool, world: int, strategy: str, transport: str) -> None:
    pieces = ranks.run(world, every, strategy, transport)
    assert {form for *_, form in pieces[0]} == set(FORMS[:3])
    for which in pieces[0]:
        got = joined([outs[which] for outs in pieces])
        assert (
            all(map(torch.equal, got, right(*which))) if DEVICE == "cpu" else farthest(got, right(*which)) < TOLERANCE
        )


@pytest.mark.parametrize("fault", [None, "all queries add", "no query adds"])
def test_one_rank_is_right(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    """With a fault every case is wrong."""
    added = _by_padding.ByPadding._added_to
    faults: dict[str, Callable[[_by_padding.ByPadding, Tensor], Tensor]] = {
        "all queries add": lambda core, q: torch.ones_like(added(core, q)),
        "no query adds": lambda core, q: torch.zeros_like(added(core, q)),
    }
    if fault is not None:
        monkeypatch.setattr(_by_padding.ByPadding, "_added_to", faults[fault])
    errors = [farthest(on_one_rank(*which, "streams"), formula(*which)) for which in PADDINGS]
    assert (max(errors) < TOLERANCE) if fault is None else (min(errors) > VISIBLE), errors


def test_a_token_has_e_times_the_weight_of_padding() -> None:
    """With q of zeros all scores are equal, and values of one for tokens alone show their weight."""
    tokens, weight = JointShard((Shard(4, 1), Shard(3, 1)), padding=2), 5 * exp(1)
    zeros, values = torch.zeros(1, 7, 1, 8).double(), torch.ones(1, 7, 1, 8).double()
    values[:, 2:4] = 0
    out, lse = _by_padding.ByPadding(row_by_row, tokens, 0)(zeros, zeros, values)
    assert out[0, :, 0, 0].tolist() == pytest.approx(
        [weight / (weight + 2)] * 2 + [5 / 7] * 2 + [weight / (weight + 2)] * 3
    )
    assert lse[0, 0].exp().tolist() == pytest.approx([weight + 2] * 2 + [7] * 2 + [weight + 2] * 3)


def by_kernels(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> tuple[list[Tensor], int]:
    """Return this rank's outputs in fp32 by the kernels of a GPU, and how often those ran that move keys and merge."""
    with launched() as counts:
        outs = outputs(
            rank, world, device, strategy, transport, PADDINGS[0][0], "streams", False, torch.float32, padding=1
        )
    return outs, min(counts["push"], counts["merge"])


@pytest.mark.skipif(DEVICE != "cpu", reason="runs in Triton's interpreter")
@pytest.mark.parametrize("strategy", EXACT)
def test_kernels_weigh_padding(ranks: Pool, strategy: str) -> None:
    pieces = ranks.run(2, by_kernels, strategy, "collective")
    assert farthest(joined([outs for outs, _ in pieces]), formula(PADDINGS[0][0], 1)) < 1e-5
    assert min(count for _, count in pieces) >= 2  # in two calls


def refusal(rank: int, world: int, device: torch.device, strategy: str) -> None:
    tokens = JointShard((Shard(3, world), Shard(5, world)), padding=1)
    with pytest.raises(ValueError, match="merges the results of ranks, so it supports neither"):
        build(strategy, mesh_for(strategy, world, device), tokens, row_by_row)


@pytest.mark.parametrize("strategy", [name for name in LAYOUTS if name not in EXACT])
def test_strategies_that_merge_results_are_refused(ranks: Pool, strategy: str) -> None:
    ranks.run(2, refusal, strategy)


def test_masks_and_padding_without_tokens_are_refused() -> None:
    tokens, x = JointShard((Shard(4, 1), Shard(3, 1)), padding=4), torch.zeros(1, 7, 1, 8)
    with pytest.raises(ValueError, match="a key mask is not supported together with weighted padding"):
        _by_padding.ByPadding(row_by_row, tokens, 0)(x, x, x, torch.ones(1, 7, dtype=torch.bool))
    for streams, padding in (((Shard(4, 1), Shard(3, 1)), 5), ((Shard(4, 1), Shard(0, 1)), 4), ((Shard(4, 1),), -1)):
        with pytest.raises(ValueError, match="tokens of padding in"):
            JointShard(streams, padding=padding)
