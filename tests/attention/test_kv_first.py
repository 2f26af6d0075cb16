"""Tests that kv_first projects and sends keys and values before it projects queries, without waiting in between."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT
from seqpar.attention import _streams
from seqpar.attention._streams import given, project
from seqpar.attention.kv_first import KVFirst, _write_values
from seqpar.local import reference
from seqpar.loop.models import large_dit
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports import collective
from seqpar.types.protocols import Given, Prepare, Projected
from tests.graphs.test_distributed import local
from tests.support.meshes import TRANSPORTS, Noted, build, comes, mesh_for, random
from tests.support.pool import Pool

HEADS, GROUPS, DIM = 6, 2, 8


class Spy(collective.Transport):
    """Collectives on an axis of one rank that record GEMMs and sends in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.notes: list[str] = []
        linear = _streams.F.linear

        def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self.notes.append(f"GEMM of {len(weight) // DIM} heads")
            return linear(x, weight, bias)

        patch.setattr(_streams.F, "linear", noted)

    def key_values(self, axis: Any, layout: Any, overlap: bool = False) -> Any:
        """Make an exchange that records its calls; it needs overlap, because only then is it asked to start."""
        assert overlap
        exchange: Any = super().key_values(axis, layout, overlap)
        for name in ("start_keys", "start_values", "deliver"):
            setattr(exchange, name, partial(self._called, name, getattr(exchange, name)))
        return exchange

    def _called(self, name: str, call: Any, *args: Any) -> Any:
        self.notes.append(name)
        return call(*args)


def stream(tokens: int, seed: int, bias: bool = True, batch: int = 1, dtype: torch.dtype = torch.float64) -> Projected:
    """Return a random stream of this many tokens, the same on all ranks."""
    rows = (HEADS + 2 * GROUPS) * DIM
    x, weight, offset = (
        random(shape, seed + i, dtype=dtype) for i, shape in enumerate(((batch, tokens, 32), (rows, 32), (rows,)))
    )
    return Projected(x, weight, offset if bias else None, HEADS, GROUPS, Prepare("rms"))


def test_keys_then_values_of_all_streams_are_sent_before_queries_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    text, image = stream(3, 0, bias=False), stream(5, 10)
    want = _streams.OneRank(reference.attend, Axis("sequence"), 8)((text, image))
    spy = Spy(monkeypatch)
    alone: Any = None  # which no call asks for
    got = KVFirst(reference.attend, Axis("sequence"), (8,), spy, alone)((text, image))
    k, q = ["GEMM of 2 heads"] * 2, ["GEMM of 6 heads"] * 2
    assert spy.notes == [*k, "start_keys", *k, "start_values", *q, "deliver"]
    for mine, truth in zip(got, want, strict=True):
        assert (mine - truth).abs().max() < 1e-13


def test_what_autocast_casts_is_not_made_in_the_room() -> None:
    """Autocast does not cast `out=`, so a room of the keys' dtype cannot take a product in another dtype."""
    made = stream(5, 0, dtype=torch.float32)
    room = torch.full((1, 5, HEADS + 2 * GROUPS, DIM), float("nan"), dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = project(made.x, made.weight, made.bias, DIM, room)
    assert room.isnan().all()
    assert got.dtype == torch.bfloat16
    want = torch.nn.functional.linear(made.x, made.weight, made.bias)
    assert (got.flatten(2) - want).abs().max() <= 0.02 * want.abs().max()


def made_in_place(
    rank: int, world: int, device: torch.device, batch: int, bias: bool, transport: str
) -> tuple[bool, bool]:
    """Return whether the GEMM of the values writes them, and whether it writes v of both streams and nothing else."""
    mesh, shards = mesh_for("kv_first", world, device), (Shard(4, world), Shard(9, world))
    sizes = tuple(sum(shard.sizes[r] for shard in shards) for r in range(world))
    attend: Any = build("kv_first", mesh, Shard(13, world), reference.attend, transport)
    streams = [stream(shard.sizes[rank], 10 * rank + 3 * i, bias, batch) for i, shard in enumerate(shards)]
    exchange = attend._exchanges[_streams.layout_of(sizes, streams, given(streams[0]).k)]
    boxes = exchange.outboxes()
    parts, own = boxes.split([s.tokens for s in streams]), boxes[0].v
    for view in (boxes[0].k, own):
        view.fill_(float("nan"))
    passes = []
    with pytest.MonkeyPatch.context() as patch:
        into = attend.__call__.__globals__["prepare_into"]
        patch.setattr("seqpar.attention.kv_first.prepare_into", lambda *args: passes.append(into(*args)))
        for made, part in zip(streams, parts, strict=True):
            _write_values(made, part)
    want = torch.cat([given(made).v for made in streams], dim=1)
    right = torch.allclose(own.transpose(0, 1), want, rtol=0, atol=1e-12) and bool(boxes[0].k.isnan().all())
    exchange.start_keys()
    exchange.start_values()
    whole = exchange.deliver()[2]
    assert not whole.isnan().any()
    mesh.collect(rank, int)
    return not passes, right


@pytest.mark.parametrize(
    ("bias", "batch", "transport", "in_place"),
    [
        (True, 1, "peer", True),
        (False, 1, "peer", True),
        (True, 2, "peer", False),
        (True, 1, "collective", False),
        (False, 2, "collective", False),
    ],
)
def test_by_peer_the_values_of_one_batch_row_are_made_in_their_place(
    ranks: Pool, bias: bool, batch: int, transport: str, in_place: bool
) -> None:
    """In all other cases there is no matrix that one GEMM could write."""
    assert ranks.run(2, made_in_place, batch, bias, transport) == [(in_place, True)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_gpu_a_product_in_its_room_needs_no_memory_of_its_own(bias: bool) -> None:
    rows, width = 16384, 4096
    x = random((1, rows, width), 0, "cuda", torch.bfloat16)
    weight, offset = random((width, width), 1, "cuda", torch.bfloat16), random((width,), 2, "cuda", torch.bfloat16)
    slot = torch.zeros(2, 2 * rows, 1, width // DIM, DIM, device="cuda", dtype=torch.bfloat16)
    room = slot[1, rows:].transpose(0, 1)
    want = torch.nn.functional.linear(x, weight, offset if bias else None)  # makes cuBLAS's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    project(x, weight, offset if bias else None, DIM, room)
    more = torch.cuda.max_memory_allocated() - before
    assert more < room.numel() * room.element_size() / 2
    assert torch.equal(room.flatten(2), want)
    assert not slot[0].any()
    assert not slot[1, :rows].any()


def predicted(rank: int, world: int, device: torch.device, strategy: str, transport: str, batch: int) -> Tensor:
    """Return the output of a whole model for these batch rows, in fp64."""
    model: Any = large_dit.Model(large_dit.Config(48, 2, 6, 3, 40, num_classes=10)).double().requires_grad_(False)
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(random(tuple(parameter.shape), seed) * 0.2)
    engine = DistributedDiT(model.to(device), mesh_for(strategy, world, device), strategy, local(device), transport)
    labels, t = torch.arange(batch, device=device), torch.full((batch,), 300, device=device)
    out = engine(random((batch, 4, 10, 6), 0, device), timestep=t, class_labels=labels).sample
    engine.release()
    return out


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_model_has_the_bits_of_kv_gather(ranks: Pool, world: int, batch: int) -> None:
    """The bits do not depend on where values are written; on GPUs cuBLAS may use another kernel for fewer columns."""
    alike = torch.equal if ranks.device == "cpu" else partial(torch.allclose, rtol=0, atol=1e-10)
    truth = ranks.run(1, predicted, "kv_gather", "collective", batch)[0]
    for transport in TRANSPORTS:
        gathered, first = (ranks.run(world, predicted, name, transport, batch) for name in ("kv_gather", "kv_first"))
        assert all(alike(mine, other) for mine, other in zip(first, gathered, strict=True))
        assert all((out - truth).abs().max() < 1e-10 for out in first)


def patient(rank: int, world: int, device: torch.device, transport: str, told: Path) -> bool:
    """Return, on the last rank, whether the first one sent its values before it came, and on the first one whether it
    began to attend after that.

    On a GPU values are sent when the current stream, on which the queries come next, has reached that point: copies and
    NCCL work on streams of their own, which is the reason why nothing waits for them here. told: a file for that.
    """
    mesh, shard, came, found = mesh_for("kv_first", world, device), Shard(13, world), told.with_suffix(".came"), False

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        """Begin when everything has arrived; on a GPU the host does not wait for what it launches."""
        nonlocal found
        if q.is_cuda:
            torch.cuda.synchronize(q.device)
        found = came.exists()
        return reference.attend(q, k, v)

    moves = Noted(transport)
    attend = build("kv_first", mesh, shard, core, moves.transport)
    q, k, v = (random((1, shard.sizes[rank], 3, DIM), seed, device) for seed in range(3))
    attend((Given(q, k, v, Prepare()),))  # makes the buffers
    moves.as_in_a_graph()
    (exchange,) = moves.made
    start_values = exchange.start_values

    def noted() -> None:
        start_values()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        told.touch()

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nothing of the first call is left to wait for
    mesh.collect(rank, int)
    if rank == 0:
        exchange.start_values = noted
    is_early = rank > 0 and comes(told)
    if rank:
        came.touch()
    attend((Given(q, k, v, Prepare()),))
    return is_early if rank else found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sending_does_not_wait_for_a_rank_that_is_late(ranks: Pool, transport: str, tmp_path: Path) -> None:
    assert ranks.run(2, patient, transport, tmp_path / "told") == [True, True]


class MistakeError(Exception):
    """An error in the middle of a call."""


def dropped(rank: int, world: int, device: torch.device, transport: str, values: tuple[bool, ...]) -> int:
    """Return how often attention was wrong around a call that failed after keys were sent.

    The ranks named by `values` fail after their values were sent, the others before. All ranks but one are late.
    """
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    mine, wrong = shard.slice(rank), 0
    failing = "query" if values[rank] else "value"

    def fails(*args: object) -> Tensor:
        raise MistakeError

    for round_ in range(6):
        q, k, v = (random((1, 13, 3, DIM), 3 * round_ + seed, device) for seed in range(3))
        streams = (Given(q[:, mine], k[:, mine], v[:, mine], Prepare()),)
        if round_ == 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"seqpar.attention.kv_first.{failing}", fails)
                with pytest.raises(MistakeError):
                    attend(streams)
            continue
        time.sleep(0.05 * rank)
        got = attend(streams)[0]
        wrong += not torch.allclose(got, reference.attend(q[:, mine], k, v)[0], rtol=0, atol=1e-12)
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("values", [(True,) * 3, (False,) * 3, (True, False, False)], ids=str)
def test_an_error_between_sending_and_receiving_leaves_later_calls_right(
    ranks: Pool, transport: str, values: tuple[bool, ...]
) -> None:
    """This holds even if keys were sent but values were not, or only by some ranks."""
    assert ranks.run(3, dropped, transport, values) == [0, 0, 0]
