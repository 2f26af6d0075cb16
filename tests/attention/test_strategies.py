"""Tests that every strategy equals unsharded attention, with uneven tokens and heads, grouped heads, any world."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.kernels.prepare import prepare
from seqpar.local import reference
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.types.protocols import Given, Prepare
from tests.support.meshes import (
    EXACT,
    LAYOUTS,
    TRANSPORTS,
    build,
    counted_calls,
    local_for,
    mesh_for,
    random,
    refused,
    talking,
)
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool

# batch, tokens, heads, kv heads: even, uneven tokens, uneven heads, fewer heads than ranks, grouped-query
CASES = [(1, 16, 4, 4), (2, 13, 4, 4), (3, 12, 5, 5), (2, 9, 2, 2), (1, 15, 6, 3), (2, 10, 8, 1)]
DIM = 8
TOLERANCE = 1e-12  # a few fp64 roundings of sums over at most 19 tokens


def skip_refused(strategy: str, world: int, case: tuple[int, ...]) -> None:
    """Skip a case that a strategy has a rule against."""
    if (reason := refused(strategy, world, *case[2:])) is not None:
        pytest.skip(reason)


CALLS = 2  # with other data each, in the same buffers: a call that returns an earlier one's data is wrong


def inputs(case: tuple[int, ...], device: torch.device, call: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of all tokens. call: the number of a call, each of which has other data."""
    batch, tokens, heads, kv = case
    q, k, v = (random((batch, tokens, n, DIM), 3 * call + seed, device) for seed, n in enumerate((heads, kv, kv)))
    return q, k, v


def rotary(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * 0.3 ** torch.arange(DIM // 2)
    return angles.cos().to(device), angles.sin().to(device)


def preparation(heads: int, kv: int, rows: tuple[Tensor, Tensor], device: torch.device) -> Prepare:
    """Return a LayerNorm of the full width if q and k are equally wide, else an RMSNorm of each head, with rotary."""
    per_head = heads != kv
    width = DIM if per_head else heads * DIM
    a, b, c, d = (random((width,), 10 + i, device) for i in range(4))
    if per_head:
        return Prepare("rms", per_head, 1e-5, a, None, c, None, *rows, interleaved=False)
    return Prepare("layer", per_head, 1e-5, a, b, c, d, *rows)


def sharded(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, case: tuple[int, ...], shift: int = 0
) -> Tensor:
    """Return this rank's outputs of several calls with other data, (calls, B, l, H, D)."""
    mesh, shard = mesh_for(strategy, world, device), Shard(case[1], world)
    attend = build(strategy, mesh, shard, local_for(device), transport)
    mine = shard.slice(mesh.sequence.rank)
    cos, sin = rotary(case[1] + 1, device)
    rows = cos[mine.start + shift : mine.stop + shift], sin[mine.start + shift : mine.stop + shift]
    how = preparation(case[2], case[3], rows, device)
    outs = []
    for call in (*range(CALLS), 0):  # buffers are reused: every call must be right, also one with data of before
        q, k, v = (x[:, mine] for x in inputs(case, device, call))
        out = attend((Given(q, k, v, how),))[0]
        # the output projection must get contiguous (B, l, H D) rows: strided rows would use a GEMM with other bits
        assert out.flatten(2).is_contiguous()
        outs.append(out.clone())
    assert torch.equal(outs[0], outs[-1])
    return torch.stack(outs[:CALLS])


@cache
def whole(case: tuple[int, ...], device: str) -> Tensor:
    """Return the truth: attention of all tokens in one process, of each call."""
    where, outs = torch.device(device), list[Tensor]()
    for call in range(CALLS):
        q, k, v = inputs(case, where, call)
        q, k = prepare(q, k, preparation(case[2], case[3], rotary(case[1], where), where))
        outs.append(reference.attend(q, k, v)[0].cpu())
    return torch.stack(outs)


# every strategy with every world and every case, by one transport after the other
RUNS = covering((2, 3, 4), LAYOUTS, CASES, turns=TRANSPORTS)
ALONE = covering((1,), ("ulysses",), CASES, turns=TRANSPORTS)  # on one rank all strategies are the same


@pytest.mark.parametrize(("world", "strategy", "case", "transport"), RUNS + ALONE, ids=str)
def test_strategy_equals_unsharded_attention(
    ranks: Pool, world: int, transport: str, strategy: str, case: tuple[int, ...]
) -> None:
    skip_refused(strategy, world, case)
    got = torch.cat(ranks.run(world, sharded, strategy, transport, case), dim=2)
    assert (got - whole(case, ranks.device)).abs().max() < TOLERANCE


def told_tokens(rank: int, world: int, device: torch.device, strategy: str) -> int:
    mesh = mesh_for(strategy, world, device)
    return build(strategy, mesh, Shard(13, world), local_for(device)).tokens  # pyright: ignore


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_strategy_tells_the_tokens_of_the_whole_sequence(ranks: Pool, world: int, strategy: str) -> None:
    """A model uses this number to choose between GEMMs that round differently, so all ranks must have the same."""
    assert ranks.run(world, told_tokens, strategy) == [13] * world


def row_by_row(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
    """Attend for one query and head at a time, so that bits cannot depend on the number of rows or heads."""
    group, out = q_BLHD.shape[2] // k_BLGD.shape[2], torch.empty_like(q_BLHD)
    for b, row, head in torch.cartesian_prod(*(torch.arange(n) for n in q_BLHD.shape[:3])).tolist():
        k, v = (x[b, :, head // group].contiguous() for x in (k_BLGD, v_BLGD))
        weights = ((q_BLHD[b, row, head] * k).sum(-1) / DIM**0.5).softmax(-1)
        out[b, row, head] = (weights[:, None] * v).sum(0)
    return out, q_BLHD.new_empty(0)


def moved(rank: int, world: int, device: torch.device, strategy: str, transport: str, case: tuple[int, ...]) -> Tensor:
    mesh, shard = mesh_for(strategy, world, device), Shard(case[1], world)
    attend, outs = build(strategy, mesh, shard, row_by_row, transport), list[Tensor]()
    for call in range(CALLS):
        q, k, v = (x[:, shard.slice(mesh.sequence.rank)] for x in inputs(case, device, call))
        outs.append(attend((Given(q, k, v, Prepare()),))[0].clone())  # the next call writes there
    return torch.stack(outs)


@pytest.mark.parametrize(
    ("world", "strategy", "case", "transport"), covering((2, 3, 4), EXACT, CASES, turns=TRANSPORTS), ids=str
)
def test_strategy_that_only_moves_data_has_one_ranks_bits(
    ranks: Pool, world: int, transport: str, strategy: str, case: tuple[int, ...]
) -> None:
    skip_refused(strategy, world, case)
    got = torch.cat(ranks.run(world, moved, strategy, transport, case), dim=2)
    assert torch.equal(got, bits(ranks, case))


@cache
def bits(ranks: Pool, case: tuple[int, ...]) -> Tensor:
    """Return one rank's result, which is the same for all strategies and transports."""
    return ranks.run(1, moved, "ulysses", "collective", case)[0]


@pytest.mark.parametrize(("world", "strategy", "transport"), covering((6, 8), LAYOUTS, turns=TRANSPORTS))
def test_strategy_with_many_ranks(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    case = (2, 19, 5, 5)
    skip_refused(strategy, world, case)
    got = torch.cat(ranks.run(world, sharded, strategy, transport, case), dim=2)
    assert (got - whole(case, ranks.device)).abs().max() < TOLERANCE


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_strategy_negative_control_wrong_rotary_offset_is_noticed(ranks: Pool, strategy: str) -> None:
    case = CASES[1]
    # equal shifts on all ranks would cancel in q.k, so only the last rank is off by one
    got = torch.cat(ranks.run(2, shifted_on_last, strategy, case), dim=2)
    assert (got - whole(case, ranks.device)).abs().max() > 1e-3


def shifted_on_last(rank: int, world: int, device: torch.device, strategy: str, case: tuple[int, ...]) -> Tensor:
    return sharded(rank, world, device, strategy, "collective", case, shift=int(rank == world - 1))


def refuses_gradients(rank: int, world: int, device: torch.device, strategy: str) -> str:
    attend = build(strategy, mesh_for(strategy, world, device), Shard(8, world), reference.attend)
    x = torch.ones(1, 4, 2, DIM, requires_grad=True, device=device)
    try:
        attend((Given(x, x, x, Prepare()),))[0]
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_strategies_refuse_inputs_that_require_gradients(ranks: Pool, strategy: str) -> None:
    assert all("supports inference only" in message for message in ranks.run(2, refuses_gradients, strategy))


def talkative(rank: int, world: int, device: torch.device) -> dict[str, int]:
    """Make one call of each kind that the counter of collectives must see."""
    x, other, parts = torch.ones(world, device=device), 1 - rank, list(torch.ones(world, 1, device=device))

    def work() -> None:
        (dist.isend(x, other) if rank == 0 else dist.irecv(x, other)).wait()  # pyright: ignore
        (dist.send if rank == 0 else dist.recv)(x, other)
        dist.all_reduce(x)
        dist.all_gather(parts, x[:1].clone())
        dist.all_gather_object([None] * world, rank)
        dist.broadcast_object_list([rank], src=0, device=torch.device("cpu"))
        for move in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x + 1, other)]):
            move.wait()

    return counted_calls(work)


def test_no_call_of_torch_distributed_is_unseen(ranks: Pool) -> None:
    common = ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "batch_isend_irecv")
    sender, receiver = ranks.run(2, talkative)
    assert sender == dict.fromkeys(("isend", "send", *common), 1)
    assert receiver == dict.fromkeys(("irecv", "recv", *common), 1)
    others = {
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
        "send_object_list",
        "new_group",
    }
    assert others < talking().keys()
    assert talking()["isend"] is dist.isend  # the original function is back


def counted(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> dict[str, int]:
    mesh, shard = mesh_for(strategy, world, device), Shard(13, world)
    attend = build(strategy, mesh, shard, local_for(device), transport)
    q, k, v = (x[:, shard.slice(mesh.sequence.rank)] for x in inputs((2, 13, 5, 5), device))
    attend((Given(q, k, v, Prepare()),))[0]  # makes the buffers
    return counted_calls(lambda: attend((Given(q, k, v, Prepare()),))[0])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ulysses", {"all_to_all_single": 2}),
        ("ring", {"batch_isend_irecv": 3}),
        ("usp", {"all_to_all_single": 2, "batch_isend_irecv": 1}),
        ("kv_gather", {"batch_isend_irecv": 1}),
        ("kv_first", {"batch_isend_irecv": 1}),
    ],
)
def test_strategy_calls_as_few_collectives_as_it_says(ranks: Pool, strategy: str, expected: dict[str, int]) -> None:
    """Tokens and heads are uneven here, and still no sizes are exchanged."""
    assert ranks.run(4, counted, strategy, "collective") == [expected] * 4
    assert ranks.run(4, counted, strategy, "peer") == [{}] * 4


@pytest.mark.parametrize(
    ("strategy", "axes", "message"),
    [("ulysses", {"ring": 2}, "expected ring=1"), ("ring", {"ulysses": 2}, "expected ulysses=1")],
)
def test_strategy_refuses_a_mesh_that_it_would_not_use(
    ranks: Pool, strategy: str, axes: dict[str, int], message: str
) -> None:
    assert all(message in text for text in ranks.run(2, refused_mesh, strategy, axes))


def refused_mesh(rank: int, world: int, device: torch.device, strategy: str, axes: dict[str, int]) -> str:
    try:
        build(strategy, make_mesh(device, cfg=1, **axes), Shard(8, world), reference.attend)
    except ValueError as error:
        return str(error)
    return "nothing"


def refused_tokens(rank: int, world: int, device: torch.device, strategy: str, tokens: Tokens) -> str:
    mesh = mesh_for(strategy, world, device) if world > 1 else Mesh.single(device)
    try:
        build(strategy, mesh, tokens, reference.attend)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize(
    ("world", "tokens", "message"),
    [
        *(
            (n, Shard(12, parts), f"tokens sharded over {parts} ranks, expected {n}")
            for n, parts in ((1, 2), (2, 1), (2, 3), (4, 2), (4, 8))
        ),
        (2, JointShard((Shard(12, 3), Shard(9, 3))), "tokens sharded over 3 ranks, expected 2"),
        (4, Shard(3, 4), "got 3 tokens for 4 ranks, expected at least one token per rank"),
        (2, Shard(12, 2), "nothing"),
        (4, JointShard((Shard(3, 4), Shard(4, 4))), "nothing"),
    ],
    ids=str,
)
def test_strategy_refuses_tokens_sharded_over_other_ranks(
    ranks: Pool, strategy: str, world: int, tokens: Tokens, message: str
) -> None:
    """Every rank refuses before any exchange; the tokens must have as many parts as the sequence axis has ranks."""
    assert all(message in text for text in ranks.run(world, refused_tokens, strategy, tokens))
