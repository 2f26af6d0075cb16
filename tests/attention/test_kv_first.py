"""Keys and values first: models send them before they make queries, and nobody waits meanwhile."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar import DistributedDiT
from seqpar.kernels.prepare import prepare
from seqpar.local import reference
from seqpar.models import _layers, large_dit
from seqpar.protocols import Prepare
from seqpar.shard import Shard
from tests.support.meshes import TRANSPORTS, build, mesh_for, random
from tests.support.pool import Pool
from tests.test_distributed import local

HEADS, GROUPS, DIM = 6, 2, 8
LATE_S = 0.4


class Spy:
    """Attention on one rank that wants keys first, and notes what happens in which order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.room: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Prepare, /) -> Tensor:
        return reference.attend(*prepare(q, k, how), v)[0]

    def send_keys(self, k: Tensor, heads: int, how: Prepare, /) -> SpySent:
        self.notes.append(f"send {k.shape[2]} heads, {heads} will follow")
        return SpySent(self, k, how)


class SpySent:
    """What a `Spy` was sent; it has room for values where the spy has."""

    def __init__(self, spy: Spy, k: Tensor, how: Prepare) -> None:
        self.spy, self.k, self.how, self.room, self.v = spy, k, how, spy.room, k

    def send_values(self, v: Tensor, /) -> None:
        self.spy.notes.append(f"send {v.shape[2]} heads" + (", in their room" if v is self.room else ""))
        self.v = v

    def receive(self, q: Tensor, /) -> Tensor:
        self.spy.notes.append("receive")
        return self.spy(q, self.k, self.v, self.how)


HEADS_OF = (HEADS, GROUPS, GROUPS)


def projection(bias: bool, dtype: torch.dtype = torch.float64) -> nn.Linear:
    qkv = nn.Linear(32, sum(HEADS_OF) * DIM, bias).to(dtype).requires_grad_(False)
    for seed, parameter in enumerate(qkv.parameters()):
        parameter.copy_(random(tuple(parameter.shape), seed, dtype=dtype))
    return qkv


def note_products(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among what the spy is sent."""

    def noting(product: Any, weight: int, dim: int) -> Any:
        def noted(*args: Any, **rest: Any) -> Tensor:
            spy.notes.append(f"product of {args[weight].shape[dim] // DIM} heads")
            return product(*args, **rest)

        return noted

    monkeypatch.setattr(_layers.F, "linear", noting(_layers.F.linear, 1, 0))
    monkeypatch.setattr(torch, "mm", noting(torch.mm, 1, 1))
    monkeypatch.setattr(torch, "addmm", noting(torch.addmm, 2, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("room", [True, False])
def test_models_send_keys_then_values_before_they_make_queries(
    bias: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, h, spy = projection(bias), random((2, 5, 32), 9), Spy()
    want = _layers.attention(h, qkv, HEADS_OF, DIM, Prepare("rms"), spy.__call__)  # a plain function: all at once
    spy.room = torch.full((2, 5, GROUPS, DIM), float("nan"), dtype=torch.float64) if room else None
    note_products(spy, monkeypatch)
    got = _layers.attention(h, qkv, HEADS_OF, DIM, Prepare("rms"), spy)
    values = "send 2 heads" + (", in their room" if room else "")
    assert spy.notes == ["product of 2 heads", "send 2 heads, 6 will follow", "product of 2 heads", values,
                         "product of 6 heads", "receive"]  # fmt: skip
    assert (got - want).abs().max() < 1e-13


def test_what_autocast_casts_is_not_made_in_the_room() -> None:
    """`out=` is not cast: a room of the keys' dtype would not take a product of the weights'."""
    qkv, h, spy = projection(True, torch.float32), random((1, 5, 32), 9, dtype=torch.float32), Spy()
    spy.room = torch.full((1, 5, GROUPS, DIM), float("nan"), dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        want = _layers.attention(h, qkv, HEADS_OF, DIM, Prepare(), spy.__call__)
        got = _layers.attention(h, qkv, HEADS_OF, DIM, Prepare(), spy)
    assert spy.room.isnan().all()
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() <= 0.02 * want.abs().max()


def made_in_place(
    rank: int, world: int, device: torch.device, batch: int, bias: bool, transport: str
) -> tuple[bool, bool, bool, bool]:
    """Whether there is room for v, whether it is v's place in the exchange, whether a product writes it all, and
    whether nothing else changes."""
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    mine, qkv, h = shard.slice(rank), projection(bias), random((batch, 13, 32), 9)
    k, v = (x.unflatten(-1, (-1, DIM)).to(device) for x in qkv(h).split([n * DIM for n in HEADS_OF], dim=2)[1:])
    sent = attend.send_keys(k[:, mine], HEADS, Prepare())
    if sent.room is None:
        return False, False, False, False
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mesh.collect(rank)  # k is there, and v of nobody
    whole = sent._exchange.made.slot()[rank]
    whole[1].fill_(float("nan"))
    before = whole.clone()
    qkv, h = qkv.to(device), h.to(device)
    made = _layers._project(h[:, mine], qkv.weight[-GROUPS * DIM :], qkv.bias[-GROUPS * DIM :] if bias else None, DIM,
                            sent.room)  # fmt: skip
    in_place = made is sent.room and whole[1, mine].data_ptr() == made.data_ptr()
    wrote = torch.allclose(whole[1, mine].transpose(0, 1), v[:, mine], rtol=0, atol=1e-13)
    before[1, mine] = whole[1, mine]
    untouched = torch.equal(whole.nan_to_num(7e9), before.nan_to_num(7e9))
    mesh.collect(rank)
    sent.send_values(made)
    sent.receive(random((batch, 13, HEADS, DIM), 3, device)[:, mine])
    got_k, got_v = sent._exchange.made.read()[1:]
    assert torch.equal(got_k, k)
    assert torch.allclose(got_v, v, rtol=0, atol=1e-13)
    return True, in_place, wrote, untouched


@pytest.mark.parametrize("bias", [True, False])
def test_by_peer_the_values_of_one_batch_row_are_made_in_their_place(ranks: Pool, bias: bool) -> None:
    assert ranks.run(2, made_in_place, 1, bias, "peer") == [(True, True, True, True)] * 2


@pytest.mark.parametrize(("batch", "transport"), [(2, "peer"), (1, "collective"), (2, "collective")])
def test_elsewhere_values_have_no_room_that_one_product_could_write(ranks: Pool, batch: int, transport: str) -> None:
    assert ranks.run(2, made_in_place, batch, True, transport) == [(False,) * 4] * 2


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
    _layers._project(x, weight, offset if bias else None, DIM, room)
    more = torch.cuda.max_memory_allocated() - before
    assert more < room.numel() * room.element_size() / 2
    assert torch.equal(room.flatten(2), want)
    assert not slot[0].any()
    assert not slot[1, :rows].any()


def predicted(rank: int, world: int, device: torch.device, strategy: str, transport: str, batch: int) -> Tensor:
    """What a whole model says of these batch rows, in fp64."""
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
    """Wherever values are made. A CPU's fp64 products round their columns alike; cuBLAS may take another kernel."""
    alike = torch.equal if ranks.device == "cpu" else partial(torch.allclose, rtol=0, atol=1e-10)
    truth = ranks.run(1, predicted, "kv_gather", "collective", batch)[0]
    for transport in TRANSPORTS:
        for strategy in ("kv_gather", "kv_first"):
            assert all(alike(out, truth) for out in ranks.run(world, predicted, strategy, transport, batch))


def patient(rank: int, world: int, device: torch.device, transport: str) -> tuple[float, float]:
    """Seconds that sending and receiving took a rank whose peer is late."""
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    q, k, v = (random((1, shard.sizes[rank], 3, DIM), seed, device) for seed in range(3))
    attend(q, k, v, Prepare())  # makes its buffers
    exchange = next(iter(attend._exchanges.values()))
    if transport == "peer":  # as in a graph: calls of the host begin together
        exchange.made.outboxes = lambda: exchange.made.open(1, False)
    mesh.collect(rank)
    time.sleep(2 * LATE_S * rank)
    start = time.perf_counter()
    sent = attend.send_keys(k, 3, Prepare())
    sent.send_values(v)
    after = time.perf_counter()
    sent.receive(q)
    return after - start, time.perf_counter() - after


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sending_does_not_wait_for_who_is_late(ranks: Pool, transport: str) -> None:
    sent, received = ranks.run(2, patient, transport)[0]
    assert sent < LATE_S < received


def dropped(rank: int, world: int, device: torch.device, transport: str, values: tuple[bool, ...]) -> int:
    """How often attention was wrong around one that was sent, its values only by these ranks, and never received; all
    but one rank are late."""
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    mine, wrong = shard.slice(rank), 0
    for round_ in range(6):
        q, k, v = (random((1, 13, 3, DIM), 3 * round_ + seed, device) for seed in range(3))
        if round_ == 2:
            sent = attend.send_keys(k[:, mine], 3, Prepare())
            if values[rank]:
                sent.send_values(v[:, mine])
            continue  # an error, on every rank
        time.sleep(0.05 * rank)
        got = attend(q[:, mine], k[:, mine], v[:, mine], Prepare())
        wrong += not torch.allclose(got, reference.attend(q[:, mine], k, v)[0], rtol=0, atol=1e-12)
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("values", [(True,) * 3, (False,) * 3, (True, False, False)], ids=str)
def test_an_error_between_sending_and_receiving_leaves_later_calls_right(
    ranks: Pool, transport: str, values: tuple[bool, ...]
) -> None:
    """Also where keys were sent, and values not, or by some ranks alone."""
    assert ranks.run(3, dropped, transport, values) == [0, 0, 0]


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """What is said when queries, or keys, want gradients."""
    mesh, shard, told = mesh_for("kv_first", world, device), Shard(4, world), []
    attend: Any = build("kv_first", mesh, shard, reference.attend)
    for wanting in range(2):
        inputs = [random((1, 2, 2, DIM), seed, device).requires_grad_(seed == wanting) for seed in range(3)]
        try:
            attend(*inputs, Prepare())
        except ValueError as error:
            told.append(str(error))
    return told


def test_queries_that_require_gradients_are_refused_as_keys_are(ranks: Pool) -> None:
    for told in ranks.run(2, refused):
        assert len(told) == 2
        assert all("kv_first is for inference; use ulysses" in text for text in told)
