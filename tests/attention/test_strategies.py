"""Tests that every strategy equals unsharded attention in fp64, by one table of cases, and what strategies refuse.

The cases have one stream, or text and image with separate weights, norms and rotary rows as in FLUX; uneven tokens and
heads, fewer heads or text tokens than ranks, grouped-query attention, key masks, streams that the model or the strategy
projects. In each case the streams attend together, each attends to itself alone, and work runs beside attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from seqpar.graphs.graphs import StepGraph
from seqpar.kernels.prepare import prepare
from seqpar.local import reference, sdpa
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.types.masks import joined_mask, key_bias
from seqpar.types.protocols import Attend, Given, Prepare, Projected, Stream
from tests.support.meshes import EXACT, LAYOUTS, TRANSPORTS, build, counted_calls, mesh_for, random, refused, talking
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool

DIM, WIDTH = 8, 20
TOLERANCE = 1e-12  # a few fp64 roundings of sums over at most 20 tokens
VISIBLE = 1e-3


@dataclass(frozen=True)
class Case:
    """tokens: of each stream. given: whether the model projects a stream; otherwise the strategy does."""

    batch: int
    tokens: tuple[int, ...]
    heads: int
    kv_heads: int
    masked: bool = False
    given: tuple[bool, ...] = (True, True)


CASES = (
    Case(1, (16,), 4, 4),
    Case(2, (13,), 4, 4),
    Case(3, (12,), 5, 5),
    Case(2, (9,), 2, 2),
    Case(1, (15,), 6, 3),
    Case(2, (10,), 8, 1),
    Case(1, (5, 9), 4, 4, False, (False, False)),  # image tokens are uneven on two ranks, too
    Case(2, (2, 7), 6, 2, True, (True, False)),  # fewer text tokens than three or four ranks; grouped-query
    Case(3, (6, 3), 5, 5, True, (False, True)),  # fewer image tokens than four ranks; uneven heads
    Case(2, (1, 11), 3, 1),
)
ONE_STREAM, TWO_STREAMS = CASES[:6], CASES[6:]
MANY = Case(2, (19,), 5, 5)  # for six and eight ranks
CALLS = 2  # with other data each, in the same buffers: a call that returns an earlier one's data is wrong


def whole_stream(case: Case, index: int, dtype: torch.dtype = torch.float64, call: int = 0) -> Projected:
    """Return all tokens of a stream, the same on every rank; streams share no numbers. Calls have other tokens."""
    seed, tokens, rows = 50 * index, case.tokens[index], (case.heads + 2 * case.kv_heads) * DIM
    x = random((case.batch, tokens, WIDTH), seed + 1000 * call, dtype=dtype)
    weight = random((rows, WIDTH), seed + 1, dtype=dtype) * WIDTH**-0.5
    bias = random((rows,), seed + 5, dtype=dtype) if index else None
    angles = random((tokens, DIM // 2), seed + 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    full = len(case.tokens) == 1 and case.heads == case.kv_heads  # a norm over all heads needs q as wide as k
    width = case.heads * DIM if full else DIM
    a, b, c, d = (random((width,), seed + 10 + i, dtype=dtype) for i in range(4))
    if full:
        how = Prepare("layer", False, 1e-5, a, b, c, d, cos, sin)
    else:
        how = Prepare("rms", True, 1e-6, 1 + a, None, 1 + c, None, cos, sin, interleaved=len(case.tokens) > 1)
    return Projected(x, weight, bias, case.heads, case.kv_heads, how)


def as_given(stream: Projected) -> Given:
    """Return the same stream as the model projects it, with separate GEMMs for q, k and v."""
    counts = (stream.heads, stream.kv_heads, stream.kv_heads)
    parts = F.linear(stream.x, stream.weight, stream.bias).unflatten(-1, (-1, DIM)).split(counts, dim=2)
    q, k, v = (part.contiguous() for part in parts)
    return Given(q, k, v, stream.prepare)


def lengths_mask(lengths_B: Tensor, tokens: int) -> Tensor:
    """Return a mask (B, tokens) bool that is True for the first `lengths_B[b]` tokens of row b."""
    return torch.arange(tokens) < lengths_B[:, None]


def masks(case: Case) -> list[Tensor]:
    """Return the masks of the text and image keys.

    In the last row the first half of both streams is masked; in a ring of two these are all keys of the first block.
    """
    text, image = case.tokens
    kept = [lengths_mask(torch.arange(case.batch) % text + 1, text), random((case.batch, image), 7) > -0.5]
    for mask in kept:
        mask[-1] = torch.arange(mask.shape[1]) >= -(-mask.shape[1] // 2)
    kept[1][:, -1] = True
    return kept


@cache
def truth(case: Case, call: int = 0, only: int | None = None) -> list[Tensor]:
    """Return attention of all tokens, or of one stream's, in fp64 on one device: (B, l, H, D) for each stream."""
    indices = range(len(case.tokens)) if only is None else (only,)
    streams = [as_given(whole_stream(case, index, call=call)) for index in indices]
    ready = [(*prepare(stream.q, stream.k, stream.prepare), stream.v) for stream in streams]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*ready, strict=True))
    mask = torch.cat([masks(case)[index] for index in indices], dim=1) if case.masked else None
    return list(reference.attend(q, k, v, mask)[0].split([stream.tokens for stream in streams], dim=1))


def mine_of(stream: Projected, mine: slice, rows: Prepare | None = None) -> Projected:
    """Return a rank's tokens of a stream with their rotary rows, or with those of another stream."""
    rows = rows or stream.prepare
    assert rows.cos_lD2 is not None
    assert rows.sin_lD2 is not None
    place = torch.arange(mine.start, mine.stop) % len(rows.cos_lD2)
    how = replace(stream.prepare, cos_lD2=rows.cos_lD2[place], sin_lD2=rows.sin_lD2[place])
    return replace(stream, x=stream.x[:, mine], prepare=how)


def moved_to(stream: Projected, device: torch.device) -> Projected:
    def there(thing: Any) -> Any:
        return replace(thing, **{name: x.to(device) for name, x in vars(thing).items() if isinstance(x, Tensor)})

    return replace(there(stream), prepare=there(stream.prepare))


def tokens_of(case: Case, world: int) -> Tokens:
    shards = tuple(Shard(tokens, world) for tokens in case.tokens)
    return JointShard(shards) if case.tokens[1:] else shards[0]


def streams_of(
    case: Case, rank: int, world: int, device: torch.device, call: int = 0, dtype: torch.dtype = torch.float64
) -> list[Stream]:
    """Return a rank's tokens of each stream, projected or not."""
    streams = []
    for index, (tokens, given) in enumerate(zip(case.tokens, case.given, strict=False)):
        mine = mine_of(whole_stream(case, index, dtype, call), Shard(tokens, world).slice(rank))
        streams.append(as_given(moved_to(mine, device)) if given else moved_to(mine, device))
    return streams


def built(case: Case, world: int, device: torch.device, strategy: str, transport: str) -> tuple[Attend, Tensor | None]:
    """Return attention of a strategy, and the key mask of all ranks in the order in which strategies join keys."""
    core = sdpa.attend if device.type == "cpu" and case.given[0] else reference.attend
    tokens, mesh = tokens_of(case, world), mesh_for(strategy, world, device)
    like = torch.empty(case.batch, device=device)
    mask = joined_mask(masks(case), tokens, like) if case.masked and isinstance(tokens, JointShard) else None
    return build(strategy, mesh, tokens, core, transport), mask


def copied(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [out.clone() for out in outputs]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def cases_of(strategy: str, world: int) -> list[Case]:
    """Return the cases with heads that the strategy takes on so many ranks."""
    cases = CASES if world <= 4 else (MANY,)
    return [case for case in cases if refused(strategy, world, case.heads, case.kv_heads) is None]


Outputs = tuple[list[list[Tensor]], dict[int, list[Tensor]]]
"""The outputs of each call, and of each stream that attends to itself alone."""


def sharded(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> list[Outputs]:
    """Return this rank's outputs in each case; the same call gives the same bits, whatever comes between."""
    results = []
    for case in cases_of(strategy, world):
        attend, mask = built(case, world, device, strategy, transport)
        # a model chooses by this number between GEMMs that round differently, so all ranks must have the same
        assert attend.tokens == sum(case.tokens)
        inputs = [streams_of(case, rank, world, device, call) for call in range(CALLS)]
        outs = [copied(attend(streams, mask)) for streams in inputs]
        # the output projection must get contiguous (B, l, H D) rows: strided rows would use a GEMM with other bits
        assert len(case.tokens) > 1 or outs[0][0].flatten(2).is_contiguous()
        bias, ran = None if mask is None else key_bias(mask, torch.float64), list[Tensor]()
        for streams, before in zip(inputs, outs, strict=True):
            assert equal(copied(attend(streams, bias, beside=lambda ran=ran: ran.append(busy(device)))), before), case
        assert len(ran) == CALLS
        alone = dict[int, list[Tensor]]()
        for index, beside in product(range(len(case.tokens)), (None, lambda: None)):
            own = masks(case)[index].to(device) if case.masked else None
            if case.tokens[index] < world:
                with pytest.raises(ValueError, match="expected at least one token per rank"):
                    attend(inputs[0][index : index + 1], only=index)
                continue
            out = copied(attend(inputs[0][index : index + 1], own, beside=beside, only=index))
            assert equal(alone.setdefault(index, out), out), case
            assert equal(copied(attend(inputs[0], mask)), outs[0]), case
        results.append((outs, alone))
    return results


def busy(device: torch.device) -> Tensor:
    """Return memory with other contents than the exchanges of the tests have."""
    return torch.full((50, 50), float("nan"), device=device) @ torch.ones(50, 50, device=device)


def joined(pieces: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate the outputs of all ranks to all tokens of each stream."""
    return [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return torch.stack([(mine.cpu() - other).abs().max() for mine, other in zip(got, want, strict=True)]).max().item()


@pytest.mark.parametrize(
    ("world", "strategy", "transport"),
    [
        *covering((2, 3, 4), LAYOUTS, turns=TRANSPORTS),
        *((1, "ulysses", name) for name in TRANSPORTS),  # on one rank all strategies are the same
        *((6, "usp", "peer"), (6, "kv_first", "collective"), (8, "ring", "peer")),
    ],
)
def test_strategy_equals_unsharded_attention(ranks: Pool, world: int, strategy: str, transport: str) -> None:
    pieces = ranks.run(world, sharded, strategy, transport)
    for number, case in enumerate(cases_of(strategy, world)):
        for call in range(CALLS):
            assert error(joined([piece[number][0][call] for piece in pieces]), truth(case, call)) < TOLERANCE, case
        for index in pieces[0][number][1]:
            alone = joined([piece[number][1][index] for piece in pieces])
            assert error(alone, truth(case, 0, index)) < TOLERANCE, case
            assert len(case.tokens) == 1 or error(alone, truth(case)[index : index + 1]) > VISIBLE, case


# Negative controls ---------------------------------------------------------------------------------------------


def mistaken(rank: int, world: int, device: torch.device, strategy: str) -> dict[str, list[Tensor]]:
    """Return this rank's outputs by mistake. The order of the streams counts because the mask follows it."""
    case, last = TWO_STREAMS[1], int(rank == world - 1)
    attend, mask = built(case, world, device, strategy, "collective")
    assert mask is not None
    streams, whole = streams_of(case, rank, world, device), [whole_stream(case, index) for index in range(2)]
    places = [Shard(tokens, world).slice(rank) for tokens in case.tokens]
    exchanged = [
        as_given(moved_to(mine_of(whole[index], places[index], whole[1 - index].prepare), device)) for index in range(2)
    ]
    outputs = {
        "streams swapped": copied(attend(streams[::-1], mask))[::-1],
        "mask shifted": copied(attend(streams, mask.roll(1, dims=1))),
        "rotary rows of the other stream": copied(attend(exchanged, mask)),
    }
    # equal shifts on all ranks would cancel in q.k, so only the last rank is off by one
    attend, _ = built(ONE_STREAM[1], world, device, strategy, "collective")
    stream, place = whole_stream(ONE_STREAM[1], 0), Shard(13, world).slice(rank)
    rows = mine_of(stream, slice(place.start + last, place.stop + last)).prepare
    shifted = as_given(moved_to(replace(mine_of(stream, place), prepare=rows), device))
    return {**outputs, "rotary rows shifted": copied(attend((shifted,)))}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_strategy_negative_controls_are_noticed(ranks: Pool, strategy: str) -> None:
    pieces = ranks.run(2, mistaken, strategy)
    for mistake in pieces[0]:
        case = ONE_STREAM[1] if mistake == "rotary rows shifted" else TWO_STREAMS[1]
        assert error(joined([piece[mistake] for piece in pieces]), truth(case)) > VISIBLE, mistake


# What is refused -----------------------------------------------------------------------------------------------


def attempts(rank: int, world: int, device: torch.device, strategy: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls that are refused on so many ranks, and a few that are not."""
    mesh = mesh_for(strategy, world, device) if world > 1 else Mesh.single(device)

    def made(tokens: Tokens, on: Mesh = mesh) -> Attend:
        return build(strategy, on, tokens, reference.attend)

    def given(*tokens_and_heads: tuple[int, int]) -> list[Given]:
        tensors = [random((1, tokens, heads, DIM), 0, device) for tokens, heads in tokens_and_heads]
        return [Given(x, x, x, Prepare()) for x in tensors]

    for parts in {1, 2, 3, 4, 8} - {world}:
        yield f"tokens sharded over {parts} ranks, expected {world}", lambda parts=parts: made(Shard(12, parts))
    yield "tokens sharded over 5 ranks", lambda: made(JointShard((Shard(12, 5), Shard(9, 5))))
    yield "accepted", lambda: made(Shard(12, world))
    if world > 1:
        yield f"got {world - 1} tokens for {world} ranks, expected at least one", lambda: made(Shard(world - 1, world))
        yield "accepted", lambda: made(JointShard((Shard(world - 1, world), Shard(world, world))))
        both = (Shard(3, world), Shard(5, world))
        for wrong in (JointShard(both, by_stream=True), JointShard(both, padding=1)) if world < 4 else ():
            what = "accepted" if strategy in EXACT else "merges the results of ranks, so it supports neither keys"
            yield what, lambda wrong=wrong: made(wrong)
    two, share = JointShard((Shard(4, world), Shard(8, world))), 4 // world
    if world != 3 and strategy in EXACT:
        yield "expected the same in all streams", lambda: made(two)(given((share, 3), (2 * share, 2)))
        longer = given((share, 3), (2 * share + 1, 3))
        yield f"expected {3 * share} tokens together", lambda: made(two)(longer)
    for count, only in ((2, 1), (1, 2), (1, -1)):
        what = f"got {count} streams with only={only}, expected 1 stream and its"
        yield what, lambda count=count, only=only: made(two)(given(*[(share, 3)] * count), only=only)
    axis = {"ulysses": "ring", "ring": "ulysses"}.get(strategy)
    if world == 2 and axis is not None:
        unused = make_mesh(device, cfg=1, **{axis: 2})
        yield f"{axis}=2, expected {axis}=1", lambda: made(Shard(8, world), unused)


def refusals(rank: int, world: int, device: torch.device, strategy: str) -> list[tuple[str, str]]:
    """Return what each attempt is to tell, and what it tells."""
    texts = []
    for expected, work in attempts(rank, world, device, strategy):
        try:
            work()
            texts.append((expected, "accepted"))
        except ValueError as wrong:
            texts.append((expected, str(wrong)))
    return texts


@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_strategy_refuses_on_every_rank_before_any_exchange(ranks: Pool, strategy: str, world: int) -> None:
    for texts in ranks.run(world, refusals, strategy):
        assert [pair for pair in texts if pair[0] not in pair[1]] == []


# Collectives ---------------------------------------------------------------------------------------------------


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
    others = "all_to_all_single reduce_scatter_tensor all_gather_into_tensor broadcast gather barrier new_group"
    assert {*others.split()} < talking().keys()
    assert talking()["isend"] is dist.isend  # the original function is back


def counted(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> dict[str, int]:
    case = Case(2, (13,), 5, 5)
    attend, _ = built(case, world, device, strategy, transport)
    streams = streams_of(case, rank, world, device)
    attend(streams)  # makes the buffers
    return counted_calls(lambda: attend(streams))


COLLECTIVES = {
    "ulysses": {"all_to_all_single": 2},
    "ring": {"batch_isend_irecv": 3},
    "usp": {"all_to_all_single": 2, "batch_isend_irecv": 1},
    "kv_gather": {"batch_isend_irecv": 1},
    "kv_first": {"batch_isend_irecv": 1},
}


@pytest.mark.parametrize(("strategy", "expected"), COLLECTIVES.items())
def test_strategy_calls_as_few_collectives_as_it_says(ranks: Pool, strategy: str, expected: dict[str, int]) -> None:
    """Tokens and heads are uneven here, and still no sizes are exchanged."""
    assert ranks.run(4, counted, strategy, "collective") == [expected] * 4
    assert ranks.run(4, counted, strategy, "peer") == [{}] * 4


# GPUs ----------------------------------------------------------------------------------------------------------

LARGE = Case(2, (77, 515), 8, 4, True, (True, False))
LAYERS = 3  # odd, because the two slots of kv_gather alternate, so the last layer uses the slot of the first


def rounded(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> list[Tensor]:
    """Return both streams in bf16 from the replay of a CUDA graph of several attentions, all with the eager bits."""
    tokens = tokens_of(LARGE, world)
    assert isinstance(tokens, JointShard)
    attend = build(strategy, mesh_for(strategy, world, device), tokens, sdpa.attend, transport)
    mask = joined_mask(masks(LARGE), tokens, torch.empty(LARGE.batch, device=device))
    bias = key_bias(mask, torch.bfloat16)
    projected = replace(LARGE, given=(False, False))
    mine: list[Any] = streams_of(projected, rank, world, device, dtype=torch.bfloat16)
    layers = [[replace(stream, x=stream.x * (layer + 1)) for stream in mine] for layer in range(LAYERS)]
    shapes = [(LARGE.batch, stream.tokens, LARGE.heads, DIM) for stream in mine]
    outs = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in layers for shape in shapes]

    def step() -> None:
        attended = (out for streams in layers for out in attend(streams, bias))
        for into, out in zip(outs, attended, strict=True):
            into.copy_(out)

    step()
    eager = [out.clone() for out in outs]
    graph = StepGraph(step, ())
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert equal(outs, eager)
    graph.release()
    return eager[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpu_strategies_in_bf16_and_in_graphs(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    """The error against fp64 is at most 1.25 times that of one GPU."""
    one, many = (joined(ranks.run(n, rounded, strategy, transport)) for n in (1, world))
    for index, exact in enumerate(truth(LARGE)):
        assert (many[index].double() - exact).norm() <= 1.25 * (one[index].double() - exact).norm()
        assert (one[index].double() - exact).norm() < 2e-2 * exact.norm()
