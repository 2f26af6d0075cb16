"""Keys and values first: models send them before they make queries, nobody waits meanwhile, and what it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar.kernels.prepare import prepare
from seqpar.layouts import Layout
from seqpar.local import reference
from seqpar.models import _layers, large_dit
from seqpar.predict import Load, predict
from seqpar.protocols import Prepare
from seqpar.rates import H200
from seqpar.shard import Shard
from tests.meshes import TRANSPORTS, build, mesh_for, random
from tests.pool import Pool

HEADS, GROUPS, DIM = 6, 2, 8
LATE_S = 0.4


class Spy:
    """Attention on one rank that wants keys first, and notes what happens in which order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Prepare, /) -> Tensor:
        return reference.attend(*prepare(q, k, how), v)[0]

    def send(self, k: Tensor, v: Tensor, heads: int, how: Prepare, /) -> Callable[[Tensor], Tensor]:
        self.notes.append(f"send {k.shape[2]} + {v.shape[2]} heads, {heads} will follow")
        return lambda q: self(q, k, v, how)


@pytest.mark.parametrize("bias", [True, False])
def test_models_send_keys_and_values_before_they_make_queries(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, h, spy = nn.Linear(32, (HEADS + 2 * GROUPS) * DIM, bias).double(), random((2, 5, 32), 0), Spy()
    heads = (HEADS, GROUPS, GROUPS)
    want = _layers.attention(h, qkv, heads, DIM, Prepare("rms"), spy.__call__)  # a plain function: all at once
    linear = _layers.F.linear

    def noted(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        spy.notes.append(f"product of {len(weight) // DIM} heads")
        return linear(x, weight, *rest)

    monkeypatch.setattr(_layers.F, "linear", noted)
    got = _layers.attention(h, qkv, heads, DIM, Prepare("rms"), spy)
    assert spy.notes == ["product of 4 heads", "send 2 + 2 heads, 6 will follow", "product of 6 heads"]
    assert (got - want).abs().max() < 1e-13


def patient(rank: int, world: int, device: torch.device, transport: str) -> tuple[float, float]:
    """Seconds that sending and receiving took a rank whose peer is late."""
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    q, k, v = (random((1, shard.sizes[rank], 3, DIM), seed, device) for seed in range(3))
    attend(q, k, v, Prepare())  # makes its buffers
    exchange = next(iter(attend._exchanges.values()))
    if transport == "peer":  # as in a graph: calls of the host begin together
        exchange.outboxes = lambda: exchange.open(1, False)
    mesh.collect(rank)
    time.sleep(2 * LATE_S * rank)
    start = time.perf_counter()
    receive = attend.send(k, v, 3, Prepare())
    sent = time.perf_counter()
    receive(q)
    return sent - start, time.perf_counter() - sent


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sending_does_not_wait_for_who_is_late(ranks: Pool, transport: str) -> None:
    sent, received = ranks.run(2, patient, transport)[0]
    assert sent < LATE_S < received


def dropped(rank: int, world: int, device: torch.device, transport: str) -> int:
    """How often attention was wrong around one that was sent and never received; all but one rank are late."""
    mesh, shard = mesh_for("kv_first", world, device), Shard(13, world)
    attend: Any = build("kv_first", mesh, shard, reference.attend, transport)
    mine, wrong = shard.slice(rank), 0
    for round_ in range(6):
        q, k, v = (random((1, 13, 3, DIM), 3 * round_ + seed, device) for seed in range(3))
        if round_ == 2:
            attend.send(k[:, mine], v[:, mine], 3, Prepare())  # and then an error, on every rank
            continue
        time.sleep(0.05 * rank)
        got = attend(q[:, mine], k[:, mine], v[:, mine], Prepare())
        wrong += not torch.allclose(got, reference.attend(q[:, mine], k, v)[0], rtol=0, atol=1e-12)
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_between_sending_and_receiving_leaves_later_calls_right(ranks: Pool, transport: str) -> None:
    assert ranks.run(3, dropped, transport) == [0, 0, 0]


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


SEVEN_B = large_dit.work(large_dit.PRESETS["large-dit-7b"])
ONE = Load(1, 4096, True, 25, 2, 7_290_000_000, 16, 2, 2 << 30)


def of(strategy: str, transport: str) -> Layout:
    return Layout(1, 2, 1, 2, strategy, transport)


@pytest.mark.parametrize("tokens", [256, 4096, 16384])
def test_predicted_what_travels_behind_the_queries_costs_only_what_they_do_not_cover(tokens: int) -> None:
    load = replace(ONE, tokens=tokens)
    plain, first = (predict(SEVEN_B, load, of(name, "peer"), H200) for name in ("kv_gather", "kv_first"))
    assert 0 < first.exchange < plain.exchange
    assert first.gemm >= plain.gemm  # two products for one
    assert first.attention == plain.attention
    assert first.elementwise > plain.elementwise  # one launch more


def test_predicted_nothing_is_hidden_where_kernels_move_it() -> None:
    plain, first = (predict(SEVEN_B, ONE, of(name, "nccl"), H200) for name in ("kv_gather", "kv_first"))
    assert first.exchange == plain.exchange
