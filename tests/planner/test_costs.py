"""Tests of the planner's costs against FLOP counters, real exchanges and counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqpar.local import reference
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.models import dit, large_dit
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.planner import costs
from seqpar.planner.predict import Load, totals
from seqpar.types.facts import Blocks, Layer, Layout, Move, Work
from seqpar.types.protocols import Given, Prepare
from tests.attention.test_strategies import ONE_STREAM
from tests.support.meshes import LAYOUTS, build, mesh_for, random, refused, ring_of
from tests.support.pairs import covering
from tests.support.pool import Pool

DIM = 8
# batch, tokens, heads, kv heads: batch 1 to 3, uneven tokens, heads and groups
CASES = [(case.batch, *case.tokens, case.heads, case.kv_heads) for case in ONE_STREAM if case.heads > 3][1:]
SEVEN_B = large_dit.work(large_dit.SIZES["large-dit-7b"])
# 3 heads and few key-value heads, so that a wrong formula cannot be right by accident
TINY = {
    "dit": (dit, dit.Config(3, 8, 2, sample_size=8, num_classes=5)),
    "large_dit": (large_dit, large_dit.Config(24, 2, 3, 1, 40, num_classes=5)),
}


def flops(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def layout(strategy: str, ring: int = 1, ulysses: int = 1, transport: str = "gloo") -> Layout:
    return Layout(1, 1, ring, ulysses, strategy, transport)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_has_the_flops_that_torch_counts(name: str, batch: int) -> None:
    module, config = TINY[name]
    model = Blueprint(name, module, config).build(torch.float64, torch.device("cpu"))
    x = random((batch, 4, 6, 8), 0)
    conditioning = model.modulate(torch.tensor([7.0] * batch), class_labels=torch.tensor([1] * batch))
    attend = build("ulysses", Mesh.single(), Shard(12, 1), reference.attend)
    streams, positions = {"image": model.patchify(x)}, {"image": model.positions(6, 8)}  # pyright: ignore
    counted = flops(lambda: model.forward_tokens(streams, positions, conditioning, attend))
    assert counted == module.work(config).step(batch, 12).flops
    assert counted != module.work(config).step(batch, 11).flops


@pytest.mark.parametrize("name", ["dit-xl/2", "dit-s/8", "large-dit-3b"])
def test_the_products_are_the_models_linear_layers(name: str) -> None:
    """The model's other matrices are modulation and conditioning, which are computed before the loop."""
    blueprint = locate(name)
    work: Work = blueprint.module.work(blueprint.config)
    model = blueprint.meta()
    inside = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "modulation" not in name]
    shapes = sorted((m.in_features, m.out_features) for m in inside)
    embedder = [(m.in_features, m.out_features) for m in model.get_submodule("t_embedder") if hasattr(m, "in_features")]  # pyright: ignore
    (blocks,) = work.blocks
    assert shapes == sorted([*blocks.gemms * blocks.count, *work.once, *embedder])
    conditioning = (
        Blueprint(name, blueprint.module, blueprint.config)
        .meta()
        .modulate(torch.zeros(1, device="meta"), class_labels=torch.zeros(1, dtype=torch.int64, device="meta"))
    )
    assert work.table == sum(table.numel() for table in conditioning.values())


def test_large_dit_by_hand() -> None:
    assert SEVEN_B.step(2, 256).flops == pytest.approx(6.70e12, rel=1e-3)
    assert large_dit.work(large_dit.SIZES["large-dit-3b"]).step(2, 256).flops == pytest.approx(3.76e12, rel=1e-3)
    # a block has 3 E^2 + E^2 + 3 E F matrix elements with 2 FLOPs each a row; attention has 4 b s^2 E FLOPs
    products = 2 * 512 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert SEVEN_B.block(SEVEN_B.blocks[0], 2, 256).flops == products + 4 * 2 * 256**2 * 4096


def test_one_rank_exchanges_nothing() -> None:
    for strategy in LAYOUTS:
        (alone,) = costs.layers(SEVEN_B, layout(strategy), 64)
        assert (alone.moves, alone.kept, alone.merges, alone.behind) == ((), 0, 0, ())


def of(heads: int, kv_heads: int) -> Work:
    return Work(heads * DIM, heads, kv_heads, DIM, (Blocks(1, (), ()),), False, (), 0, 0)


def spied(rank: int, world: int, device: torch.device, strategy: str, case: tuple[int, ...]) -> tuple[Any, int, int]:
    """Return one layer's calls of torch.distributed, the bytes of the buffers it keeps, and its attention's FLOPs."""
    batch, tokens, heads, kv = case
    mesh, seen = mesh_for(strategy, world, device), []
    where = mesh.ulysses.rank

    def all_to_all(received: Tensor, sent: Tensor, into: list[int], out: list[int], **how: Any) -> Any:
        seen.append((sum(out) - out[where], sum(into) - into[where], len(out) - 1))
        return original[0](received, sent, into, out, **how)

    def batched(moves: list[Any]) -> Any:
        sizes = [[move.tensor.nbytes for move in moves if move.op is op] for op in (dist.isend, dist.irecv)]
        seen.append((sum(sizes[0]), sum(sizes[1]), len(sizes[0])))
        return original[1](moves)

    mine = Shard(tokens, world).slice(mesh.sequence.rank)
    q, k, v = (random((batch, tokens, n, DIM), seed, device)[:, mine] for seed, n in enumerate((heads, kv, kv)))
    attend = build(strategy, mesh, Shard(tokens, world), reference.attend)
    original = dist.all_to_all_single, dist.batch_isend_irecv
    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batched
    try:
        counted = flops(lambda: attend((Given(q, k, v, Prepare()),)))
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = original
    return seen, sum(kept(attend, {}).values()), counted


def kept(thing: Any, found: dict[int, int]) -> dict[int, int]:
    if isinstance(thing, Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict | list | tuple):
        for part in thing.values() if isinstance(thing, dict) else thing:
            kept(part, found)
    elif type(thing).__module__.startswith("seqpar."):
        kept(vars(thing), found)
    return found


def check_what_is_counted(ranks: Pool, world: int, strategy: str, case: tuple[int, ...], run: Any = spied) -> None:
    """Compare every rank's messages, buffers and attention FLOPs with the costs that the strategy's file predicts."""
    batch, tokens, heads, kv = case
    ring = ring_of(strategy, world)
    work, where = of(heads, kv), layout(strategy, ring, world // ring)
    value = batch * DIM * 8  # fp64
    every = costs.layers(work, where, tokens, batch)
    results = ranks.run(world, run, strategy, case)
    for layer, (seen, held, counted) in zip(every, results, strict=True):
        moves = [move for move in layer.moves if move.messages]
        assert seen == [(move.sent * value, move.received * value, move.messages) for move in moves]
        assert held == layer.kept * value
        assert counted == sum(call.flops for call in costs.attention_calls(work, layer, batch))
    most = max(max(sent, got) for seen, _, _ in results for sent, got, _ in seen)
    assert most == max(costs.busiest(every)) * value
    assert max(layer.kept for layer in every) == every[0].kept  # the planner looks at rank 0 only: it is slowest


@pytest.mark.parametrize(("strategy", "case", "world"), covering(LAYOUTS, CASES, turns=(2, 3, 4)), ids=str)
def test_exchanges_move_and_keep_what_is_counted(ranks: Pool, world: int, strategy: str, case: tuple[int, ...]) -> None:
    if (reason := refused(strategy, world, *case[2:])) is not None:
        pytest.skip(reason)
    check_what_is_counted(ranks, world, strategy, case)


def test_negative_control_another_layout_moves_something_else() -> None:
    def moves(*where: Any) -> tuple[Move, ...]:
        return costs.layers(of(4, 4), layout(*where), 16)[0].moves

    assert moves("ulysses", 1, 4) == (Move(36, 36, 3, 4), Move(12, 12, 3, 4))
    assert moves("kv_gather", 1, 4) == (Move(96, 96, 3),)
    assert moves("ring", 4, 1) == (Move(32, 32, 1),) * 3
    assert moves("usp", 2, 2) == (Move(24, 24, 1, 2), Move(32, 32, 1), Move(8, 8, 1, 2))  # heads stay in pairs


def test_peer_memory_writes_less_locally_and_keeps_less() -> None:
    """128 tokens a rank, 4 heads, two ranks, norms and rotary; counted by hand, in values of one head."""
    work = Work(16, 4, 4, 4, (Blocks(1, (), ()),), True, (), 0, 0)

    def rank(
        strategy: str, ring: int = 1, ulysses: int = 1, transport: str = "gloo", batch: int = 1, of: Work = work
    ) -> Layer:
        return costs.layers(of, layout(strategy, ring, ulysses, transport), 256, batch)[0]

    nccl, peer = rank("ulysses", 1, 2, "nccl"), rank("ulysses", 1, 2, "peer")
    # read and write: q, k, v; this rank's 2 heads of 256 tokens; the interleaved output of both ranks
    assert nccl.passes == ((2 * 128 * 12, 1), (2 * 256 * 2, 1), (2 * 128 * 4, 2))
    assert peer.passes == ((128 * 12 * 3 // 2, 1), (256 * 2 * 3 // 2, 1))
    assert rank("kv_gather", 1, 2).passes == ((2 * 128 * 12, 1),)
    q_k_v = ((2 * 128 * 4, 1),) * 3
    assert rank("kv_first", 1, 2).passes == q_k_v
    assert rank("kv_first", 1, 2, "peer", 2).passes == q_k_v
    assert rank("kv_first", 1, 2, "peer").passes == q_k_v[:2]  # the GEMM of v writes it into the readers' buffers
    assert rank("kv_first").passes == ((2 * 256 * 8, 1),)
    plain = replace(work, prepares=False)  # queries are not prepared
    assert rank("kv_gather", 1, 2, of=plain).passes == ((2 * 128 * 8, 1),)
    assert rank("kv_first", 1, 2, "peer", of=plain).passes == q_k_v[:1]
    assert rank("ring", 2, 1).passes == ((2 * 128 * 8, 1), (4 * 128 * 4, 2))
    assert rank("ulysses").passes == ((2 * 256 * 8, 1),)
    assert nccl.kept == 2 * 128 * 12 + 3 * 128 * 4
    assert peer.kept == 128 * 12 + 128 * 4
    assert rank("kv_gather", 1, 2, "peer").kept == 128 * 4 + 2 * 256 * 8


def test_merges_of_a_ring_by_hand() -> None:
    """Merging two bf16 parts moves 6 bytes a value; each further part moves 10 (fp32 read and written, bf16 read)."""

    def merged(strategy: str, ring: int) -> tuple[int, int]:
        return costs.merge_bytes(of(4, 4), costs.layers(of(4, 4), layout(strategy, ring), 64)[0], 1, 2)

    assert merged("ring", 2) == (32 * 4 * DIM * 6, 1)
    assert merged("ring", 4) == (16 * 4 * DIM * 26, 3)
    assert merged("kv_gather", 2) == (0, 0)


def test_totals_of_a_step_by_hand() -> None:
    """Large-DiT-7B sends 3.1 MB a layer for one guided picture of 256 tokens in bf16 on four ranks by ulysses."""
    load = Load(1, 256, True, steps=1, itemsize=2, parameters=0, latent=16, labels=2, table=0)
    found = totals(SEVEN_B, load, layout("ulysses", 1, 4))
    assert found.flops == SEVEN_B.step(2, 256).flops
    assert found.elements == SEVEN_B.step(2, 256).elements
    assert found.sent / 32 == pytest.approx(3.1e6, abs=0.05e6)
    assert found.messages == 32 * 2 * 3
    apart = totals(SEVEN_B, load, Layout(1, 2, 1, 2, "ulysses", "gloo"))
    assert apart.flops == found.flops
    assert apart.sent / 32 == pytest.approx(4.2e6 / 2, abs=0.05e6)  # each rank has one guidance branch
    assert totals(SEVEN_B, load, layout("ulysses")).sent == 0


def test_what_strategies_say_is_the_same_for_all_that_ask() -> None:
    known = costs.strategies()
    assert list(known) == sorted(known, key=lambda name: known[name].order)
    assert costs.exact_strategies() == tuple(name for name, facts in known.items() if facts.moves_only)
    assert {"kv_gather": True, "ulysses": True, "kv_first": True, "usp": False, "ring": False}.items() <= {
        name: facts.moves_only for name, facts in known.items()
    }.items()
    assert costs.why_not("ring", 2, 2, 4, 4) == "got strategy ring with ulysses=2, expected ulysses=1; use strategy usp"
    with pytest.raises(ValueError, match=f"got strategy 'none', expected one of {', '.join(sorted(known))}"):
        costs.facts_of("none")
