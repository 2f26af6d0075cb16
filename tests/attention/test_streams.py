"""Tests that attention over two streams, text and image, equals an unsharded block with the structure of FLUX.

Each stream has its own weights, norms and rotary rows. The tests cover every strategy and transport, uneven streams,
fewer text tokens than ranks, and key masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.attention._streams import OneRank
from seqpar.graphs.graphs import StepGraph
from seqpar.kernels.prepare import prepare
from seqpar.local import reference, sdpa
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import JointShard, Shard
from seqpar.types.masks import is_kept, joined_mask, key_bias
from seqpar.types.outboxes import Outbox, Outboxes, take_turns
from seqpar.types.protocols import Attend, Given, Prepare, Projected, Stream
from tests.support.meshes import LAYOUTS, TRANSPORTS, Noted, build, coded, mesh_for, random, refused
from tests.support.pairs import covering
from tests.support.pool import Pool

DIM, WIDTH = 8, 20
TOLERANCE = 1e-12  # a few fp64 roundings of sums over at most 20 tokens
VISIBLE = 1e-3
Mistake = Literal["none", "streams swapped", "mask shifted", "rotary rows of the other stream"]


@dataclass(frozen=True)
class Case:
    """The numbers of text and image tokens and of heads, whether keys are masked, which streams the model projects."""

    batch: int
    tokens: tuple[int, int]
    heads: int
    kv_heads: int
    masked: bool
    given: tuple[bool, bool]


CASES = (
    Case(1, (5, 9), 4, 4, False, (False, False)),  # image tokens are uneven on two ranks, too
    Case(2, (2, 7), 6, 2, True, (True, False)),  # fewer text tokens than three or four ranks; grouped-query
    Case(3, (6, 3), 5, 5, True, (False, True)),  # fewer image tokens than four ranks; uneven heads
    Case(2, (1, 11), 3, 1, False, (True, True)),
)


def whole_stream(case: Case, index: int, dtype: torch.dtype = torch.float64) -> Projected:
    """Return all tokens of a stream, the same on every rank; the two streams share no numbers."""
    seed, tokens, rows = 50 * index, case.tokens[index], (case.heads + 2 * case.kv_heads) * DIM
    x, weight = random((case.batch, tokens, WIDTH), seed, dtype=dtype), random((rows, WIDTH), seed + 1, dtype=dtype)
    angles = random((tokens, DIM // 2), seed + 2, dtype=torch.float64)
    q_weight, k_weight = (1 + random((DIM,), seed + 3 + i, dtype=dtype) for i in range(2))
    how = Prepare(
        "rms", True, 1e-6, q_weight, None, k_weight, None, angles.cos().to(dtype), angles.sin().to(dtype), True
    )
    bias = random((rows,), seed + 5, dtype=dtype) if index else None
    return Projected(x, weight * WIDTH**-0.5, bias, case.heads, case.kv_heads, how)


def lengths_mask(lengths_B: Tensor, tokens: int) -> Tensor:
    """Return a mask (B, tokens) bool that is True for the first `lengths_B[b]` tokens of row b."""
    return torch.arange(tokens) < lengths_B[:, None]


def masks(case: Case) -> list[Tensor]:
    """Return the masks of the text and image keys.

    In the last row the first half of both streams is masked; in a ring of two these are all keys of the first block.
    """
    text, image = case.tokens
    lengths = torch.arange(case.batch) % text + 1
    kept = [lengths_mask(lengths, text), random((case.batch, image), 7) > -0.5]
    for mask in kept:
        mask[-1] = torch.arange(mask.shape[1]) >= -(-mask.shape[1] // 2)
    kept[1][:, -1] = True
    return kept


def key_mask(case: Case, tokens: JointShard, device: torch.device) -> Tensor | None:
    """Return the mask of the keys of all ranks, in the order in which strategies join them."""
    return joined_mask(masks(case), tokens, torch.empty(case.batch, device=device)) if case.masked else None


def as_given(stream: Projected) -> Given:
    """Return the same stream as the model projects it, with separate GEMMs for q, k and v."""
    counts = (stream.heads, stream.kv_heads, stream.kv_heads)
    made = F.linear(stream.x, stream.weight, stream.bias).unflatten(-1, (-1, DIM)).split(counts, dim=2)
    q, k, v = (part.contiguous() for part in made)
    return Given(q, k, v, stream.prepare)


def truth(case: Case) -> list[Tensor]:
    """Return attention of all tokens, text before image, in fp64, as (B, l, H, D) for each stream."""
    streams = [as_given(whole_stream(case, index)) for index in range(2)]
    ready = [(*prepare(stream.q, stream.k, stream.prepare), stream.v) for stream in streams]
    q, k, v = (torch.cat(parts, dim=1) for parts in zip(*ready, strict=True))
    mask = torch.cat(masks(case), dim=1) if case.masked else None
    return list(reference.attend(q, k, v, mask)[0].split(case.tokens, dim=1))


def mine_of(stream: Projected, mine: slice, other: Projected, mistake: Mistake) -> Projected:
    """Return a rank's tokens of a stream with their rotary rows."""
    rows = other.prepare if mistake == "rotary rows of the other stream" else stream.prepare
    assert rows.cos_lD2 is not None
    assert rows.sin_lD2 is not None
    place = torch.arange(mine.start, mine.stop) % len(rows.cos_lD2)
    how = replace(stream.prepare, cos_lD2=rows.cos_lD2[place], sin_lD2=rows.sin_lD2[place])
    return replace(stream, x=stream.x[:, mine], prepare=how)


def moved_to(stream: Projected, device: torch.device) -> Projected:
    def there(thing: Any) -> Any:
        return replace(thing, **{name: x.to(device) for name, x in vars(thing).items() if isinstance(x, Tensor)})

    return replace(there(stream), prepare=there(stream.prepare))


def built(
    rank: int,
    world: int,
    device: torch.device,
    strategy: str,
    transport: str,
    case: Case,
    mistake: Mistake = "none",
    dtype: torch.dtype = torch.float64,
) -> tuple[Attend, tuple[Shard, ...], list[Stream]]:
    """Return an attention of a strategy, the split of both streams, and this rank's tokens of them."""
    mesh, shards = mesh_for(strategy, world, device), tuple(Shard(tokens, world) for tokens in case.tokens)
    core = sdpa.attend if device.type == "cpu" and case.given[0] else reference.attend
    whole = [whole_stream(case, index, dtype) for index in range(2)]
    mine = [
        moved_to(mine_of(stream, shard.slice(mesh.sequence.rank), other, mistake), device)
        for stream, shard, other in zip(whole, shards, whole[::-1], strict=True)
    ]
    streams: list[Stream] = [as_given(x) if given else x for x, given in zip(mine, case.given, strict=True)]
    return build(strategy, mesh, JointShard(shards), core, transport), shards, streams


def sharded(
    rank: int,
    world: int,
    device: torch.device,
    strategy: str,
    transport: str,
    case: Case,
    mistake: Mistake = "none",
    dtype: torch.dtype = torch.float64,
    calls: int = 3,
) -> list[Tensor]:
    """Return this rank's outputs of both streams, the same ones of several calls."""
    attend, shards, streams = built(rank, world, device, strategy, transport, case, mistake, dtype)
    tokens = JointShard(shards)
    mask = key_mask(case, tokens, device)
    mask = mask.roll(1, dims=1) if mask is not None and mistake == "mask shifted" else mask
    if mistake == "streams swapped":
        return [out.clone() for out in reversed(attend(streams[::-1], mask))]
    assert attend.tokens == tokens.total
    outs = [[out.clone() for out in attend(streams, mask)] for _ in range(calls - 1)]
    bias = None if mask is None else key_bias(mask, dtype)
    outs.append([out.clone() for out in attend(streams, bias)])  # buffers are reused: every call must be right
    for again in outs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outs[0], again, strict=True))
    return outs[0]


def joined(pieces: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate the outputs of all ranks to all tokens of each stream."""
    return [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return torch.stack([(mine - other).abs().max() for mine, other in zip(got, want, strict=True)]).max().item()


def all_cases(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> list[list[Tensor]]:
    return [sharded(rank, world, device, strategy, transport, case) for case in cases_of(strategy, world)]


def cases_of(strategy: str, world: int) -> list[Case]:
    """Return the cases with heads that the strategy takes on so many ranks."""
    return [case for case in CASES if refused(strategy, world, case.heads, case.kv_heads) is None]


# every strategy on every world, by one transport after the other; on one rank all strategies are the same
RUNS = [*covering((2, 3, 4), LAYOUTS, turns=TRANSPORTS), *((1, "ulysses", name) for name in TRANSPORTS)]


@pytest.mark.parametrize(("world", "strategy", "transport"), RUNS)
def test_two_streams_equal_the_unsharded_block(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    got = ranks.run(world, all_cases, strategy, transport)
    for index, case in enumerate(cases_of(strategy, world)):
        assert error(joined([outs[index] for outs in got]), truth(case)) < TOLERANCE, case


@pytest.mark.parametrize("mistake", ["streams swapped", "mask shifted", "rotary rows of the other stream"])
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_streams_negative_controls_are_noticed(ranks: Pool, strategy: str, mistake: Mistake) -> None:
    """The order of streams matters because the mask follows it."""
    got = joined(ranks.run(2, sharded, strategy, "collective", CASES[1], mistake))
    assert error(got, truth(CASES[1])) > VISIBLE


def alone(
    rank: int, world: int, device: torch.device, strategy: str, transport: str
) -> list[tuple[list[Tensor], dict[int, Tensor]]]:
    """Return for each case the outputs of both streams, and of each stream that attends to itself alone.

    Both kinds of calls come in turn, as in a block of Stable Diffusion 3.5 Medium, with work beside every other call.
    """
    outputs = []
    for case in cases_of(strategy, world):
        attend, shards, streams = built(rank, world, device, strategy, transport, case)
        own = [mask.to(device) for mask in masks(case)]
        mask = (
            joined_mask(masks(case), JointShard(shards), torch.empty(case.batch, device=device))
            if case.masked
            else None
        )
        whole = [out.clone() for out in attend(streams, mask)]
        ran, single = [], dict[int, Tensor]()
        for round_, index in ((0, 1), (0, 0), (1, 1), (1, 0)):
            if case.tokens[index] < world:
                with pytest.raises(ValueError, match="expected at least one token per rank"):
                    attend(streams[index : index + 1], only=index)
                continue
            beside = (lambda ran=ran: ran.append(None)) if round_ else None
            (out,) = attend(streams[index : index + 1], own[index] if case.masked else None, beside=beside, only=index)
            assert round_ == 0 or torch.equal(out, single[index])
            single[index] = out.clone()
            assert all(torch.equal(x, y) for x, y in zip(attend(streams, mask), whole, strict=True))
        assert len(ran) == len(single)
        outputs.append((whole, single))
    return outputs


def true_alone(case: Case, index: int) -> Tensor:
    """Return attention of all tokens of one stream to themselves, in fp64."""
    stream = as_given(whole_stream(case, index))
    q, k = prepare(stream.q, stream.k, stream.prepare)
    return reference.attend(q, k, stream.v, masks(case)[index] if case.masked else None)[0]


@pytest.mark.parametrize(("world", "strategy", "transport"), RUNS)
def test_a_stream_alone_attends_to_its_own_tokens(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    """It differs from what both streams attend to together; streams of fewer tokens than ranks are refused."""
    pieces = ranks.run(world, alone, strategy, transport)
    for number, case in enumerate(cases_of(strategy, world)):
        both = joined([outputs[number][0] for outputs in pieces])
        assert error(both, truth(case)) < TOLERANCE
        for index in pieces[0][number][1]:
            got = torch.cat([outputs[number][1][index] for outputs in pieces], dim=1)
            assert error([got], [true_alone(case, index)]) < TOLERANCE
            assert error([got], [both[index]]) > VISIBLE


def test_a_stream_alone_is_named_by_its_place() -> None:
    attend, _, streams = built(0, 1, torch.device("cpu"), "kv_gather", "collective", CASES[0])
    for given, only in ((streams, 1), (streams[:1], 2), (streams[:1], -1)):
        with pytest.raises(ValueError, match=rf"got {len(given)} streams with only={only}, expected 1 stream and its"):
            attend(given, only=only)


class Recorder:
    """A stand-in for attention that records its inputs and returns twice the queries."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, ...]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        self.seen.append((q.clone(), k.clone(), v.clone()))
        return 2 * q, q.new_empty(0)


def moved(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> bool:
    """Return whether every key and value arrives at its place, and every output gets back, with the same bits."""
    batch, heads, groups, counts = 2, 6, 3, (2, 7)
    mesh, shards, core = mesh_for(strategy, world, device), [Shard(n, world) for n in counts], Recorder()
    attend = build(strategy, mesh, JointShard(tuple(shards)), core, transport)
    whole = [
        [coded(batch, n, h, DIM, 3 * i + j).to(device) for j, h in enumerate((heads, groups, groups))]
        for i, n in enumerate(counts)
    ]
    streams = []
    for shard, (q, k, v) in zip(shards, whole, strict=True):
        streams.append(Given(*(x[:, shard.slice(rank)] for x in (q, k, v)), Prepare()))  # pyright: ignore
    outs = [out.clone() for out in attend(streams)]
    right = all(torch.equal(out, 2 * stream.q) for out, stream in zip(outs, streams, strict=True))
    order = [(i, shard.slice(r)) for r in range(world) for i, shard in enumerate(shards)]
    here = Shard(groups, world).slice(rank) if strategy == "ulysses" else slice(0, groups)
    for _, *kv in core.seen:
        for part, got in enumerate(kv, start=1):
            want = torch.cat([whole[i][part][:, tokens, here] for i, tokens in order], dim=1)
            right = right and torch.equal(got, want)
    return right and len(core.seen) == int(here.stop > here.start)


@pytest.mark.parametrize("strategy", ["ulysses", "kv_gather", "kv_first"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_joined_tokens_come_in_order(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    """The order is [t0 i0 t1 i1 ...]; with four ranks, two have no text and one has no heads."""
    assert ranks.run(world, moved, strategy, transport) == [True] * world


def test_one_stream_on_one_rank_is_not_copied() -> None:
    """Attention gets strided views of the fused projection."""
    core = KeepsViews()
    stream = replace(whole_stream(CASES[0], 0), prepare=Prepare())
    OneRank(core, Axis("sequence"), 5)((stream,))
    q, k, v = core.given
    assert q.stride(1) == k.stride(1) == (4 + 4 + 4) * DIM
    assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == 4 * DIM * 8


class KeepsViews:
    """A stand-in for attention that keeps its inputs."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        self.given = q, k, v
        return reference.attend(q, k, v)


LARGE = Case(2, (77, 515), 8, 4, True, (True, False))
LAYERS = 3  # odd, because the two slots of kv_gather alternate, so the last layer uses the slot of the first


def rounded(rank: int, world: int, device: torch.device, strategy: str, transport: str) -> list[Tensor]:
    """Return both streams in bf16 from the replay of a CUDA graph of several attentions, all with the eager bits."""
    mesh, shards = mesh_for(strategy, world, device), [Shard(tokens, world) for tokens in LARGE.tokens]
    tokens, part = JointShard(tuple(shards)), mesh.sequence.rank
    attend = build(strategy, mesh, tokens, sdpa.attend, transport)
    whole = [whole_stream(LARGE, index, torch.bfloat16) for index in range(2)]
    mine = [
        moved_to(mine_of(stream, shard.slice(part), stream, "none"), device)
        for stream, shard in zip(whole, shards, strict=True)
    ]
    mask = joined_mask(masks(LARGE), tokens, whole[0].x.to(device))
    bias = key_bias(mask, torch.bfloat16)
    layers = [[replace(stream, x=stream.x * (layer + 1)) for stream in mine] for layer in range(LAYERS)]
    kept = [
        [torch.zeros(LARGE.batch, s.tokens, LARGE.heads, DIM, device=device, dtype=s.x.dtype) for s in mine]
        for _ in layers
    ]

    def step() -> None:
        for streams, outs in zip(layers, kept, strict=True):
            for into, out in zip(outs, attend(streams, bias), strict=True):
                into.copy_(out)

    step()
    eager = [out.clone() for outs in kept for out in outs]
    graph = StepGraph(step, ()) if device.type == "cuda" else None
    for _ in range(5 if graph else 0):
        for out in (out for outs in kept for out in outs):
            out.fill_(float("nan"))
        graph.replay()  # pyright: ignore
        assert all(torch.equal(out, want) for out, want in zip((o for outs in kept for o in outs), eager, strict=True))
    if graph:
        graph.release()
    return eager[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gpu_streams_in_bf16_and_in_graphs(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    """The error against fp64 is at most 1.25 times that of one GPU."""
    want = [x.double() for x in truth(LARGE)]
    one, many = (joined(ranks.run(n, rounded, strategy, transport)) for n in (1, world))
    for index, exact in enumerate(want):
        assert (many[index].double() - exact).norm() <= 1.25 * (one[index].double() - exact).norm()
        assert (one[index].double() - exact).norm() < 2e-2 * exact.norm()


def misfits(rank: int, world: int, device: torch.device, strategy: str) -> list[str]:
    """Return the errors for streams with unequal heads, and with other lengths than the strategy was built for."""
    tokens, told = JointShard((Shard(4, world), Shard(8, world))), []
    attend = build(strategy, mesh_for(strategy, world, device), tokens, reference.attend)
    share = 4 // world
    for heads, more in ((2, 0), (3, 1)):
        made = [random((1, n, h, DIM), 0, device) for n, h in ((share, 3), (2 * share + more, heads))]
        try:
            attend([Given(x, x, x, Prepare()) for x in made])
        except ValueError as wrong:
            told.append(str(wrong))
    return told


@pytest.mark.parametrize("strategy", ["ulysses", "kv_first", "kv_gather"])
@pytest.mark.parametrize("world", [1, 2])
def test_streams_that_do_not_fit_are_refused(ranks: Pool, world: int, strategy: str) -> None:
    for heads, tokens in ranks.run(world, misfits, strategy):
        assert "expected the same in all streams" in heads
        assert f"expected {12 // world} tokens together" in tokens


def test_the_parts_of_a_split_are_made_once_for_all_slots() -> None:
    """Their tables are made, too, because the second slot is first used in a capture, which must not copy."""
    slots = [torch.zeros(2, 7, 1, 3, DIM) for _ in range(2)]
    every = slice(0, 3)
    first, second = kept = take_turns([Outboxes([Outbox(None, slot[0], slot[1], every, every)]) for slot in slots])
    text, image = first.split((3, 4))
    assert first.split([3, 4]) == (text, image)
    assert [part.places for part in second._splits[3, 4]]
    assert all("places" in vars(part) for boxes in (first, second) for part in boxes._splits[3, 4])
    assert image.places.table[1, 0, 0, 0] == slots[0][0, 3].data_ptr()
    assert second.split((3, 4))[1].places.table[2, 0, 2, 0] == slots[1][1, 3, 0, 2].data_ptr()
    assert first.split((7,))[0] is first
    assert kept[0] is first
    with pytest.raises(ValueError, match=r"got streams of \(3, 5\) tokens on this rank, expected 7 tokens together"):
        first.split((3, 5))


def slots(rank: int, world: int, device: torch.device, strategy: str) -> list[bool]:
    """Return for each slot of an exchange by peer memory whether it has the parts for the streams of a call."""
    tokens = JointShard((Shard(5, world), Shard(9, world)))
    moves = Noted("peer")
    attend = build(strategy, mesh_for(strategy, world, device), tokens, reference.attend, moves.transport)
    made = [random((1, stream.sizes[rank], 3, DIM), 0, device) for stream in tokens.streams]
    attend([Given(x, x, x, Prepare()) for x in made])
    (exchange,) = moves.made
    counts = tuple(stream.sizes[rank] for stream in tokens.streams)
    return [all("places" in vars(part) for part in boxes._splits[counts]) for boxes in exchange._boxes]


@pytest.mark.parametrize("strategy", ["kv_gather", "kv_first"])
def test_one_call_makes_the_parts_of_both_slots_of_peers_memory(ranks: Pool, strategy: str) -> None:
    assert ranks.run(2, slots, strategy) == [[True, True]] * 2


def test_masks_are_joined_in_the_order_of_keys() -> None:
    tokens = JointShard((Shard(3, 2), Shard(4, 2)))
    text, image = lengths_mask(torch.tensor([1, 3]), 3), torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    got = joined_mask((text, image), tokens, torch.zeros(2))
    # t0 t1 | i0 i1 | t2 | i2 i3
    assert got.int().tolist() == [[1, 0, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 1, 1]]
    assert torch.equal(joined_mask((text, None), tokens, torch.zeros(2))[0].int(), torch.tensor([1, 0, 1, 1, 0, 1, 1]))
    with pytest.raises(ValueError, match=r"got a mask of \(2, 4\), torch.bool, expected \(2, 3\), torch.bool"):
        joined_mask((image, image), tokens, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_key_bias_is_finite_and_its_rows_are_aligned(dtype: torch.dtype) -> None:
    mask = lengths_mask(torch.tensor([5, 0, 19]), 19)
    bias = key_bias(mask, dtype)
    assert bias.isfinite().all()
    assert bias.stride() == (32, 1)
    assert torch.equal(is_kept(bias), mask)
