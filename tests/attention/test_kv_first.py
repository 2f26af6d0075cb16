"""Tests that kv_first projects and sends keys and values before it projects queries, and where its products go.

`test_late.py` tests that it waits for no rank in between, `test_by_kernels.py` which values are made in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.attention import _streams
from seqpar.attention._streams import split_out
from seqpar.attention.kv_first import KVFirst
from seqpar.local import reference
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports import collective
from seqpar.types.protocols import Prepare, Projected, project
from tests.support.meshes import random

HEADS, GROUPS, DIM = 6, 2, 8


class Spy(collective.Transport):
    """Collectives on an axis of one rank that record GEMMs and sends in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.notes: list[str] = []
        linear = torch.nn.functional.linear

        def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self.notes.append(f"GEMM of {len(weight) // DIM} heads")
            return linear(x, weight, bias)

        patch.setattr(torch.nn.functional, "linear", noted)

    def key_values(self, axis: Any, layout: Any, overlap: bool = False) -> Any:
        assert overlap  # only such an exchange is asked to start
        exchange: Any = super().key_values(axis, layout, overlap)
        for name in ("start_keys", "start_values", "deliver"):
            setattr(exchange, name, partial(self._called, name, getattr(exchange, name)))
        return exchange

    def _called(self, name: str, call: Any, *args: Any) -> Any:
        self.notes.append(name)
        return call(*args)


def stream(tokens: int, seed: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> Projected:
    rows = (HEADS + 2 * GROUPS) * DIM
    x, weight, offset = (
        random(shape, seed + i, dtype=dtype) for i, shape in enumerate(((1, tokens, 32), (rows, 32), (rows,)))
    )
    return Projected(x, weight, offset if bias else None, HEADS, GROUPS, Prepare("rms"))


def test_keys_then_values_of_all_streams_are_sent_before_queries_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    text, image = stream(3, 0, bias=False), stream(5, 10)
    want = _streams.OneRank(reference.attend, Axis("sequence"), 8)((text, image))
    spy = Spy(monkeypatch)
    axis, again = Axis("sequence"), lambda tokens: pytest.fail("no call asks for a stream alone")
    make = partial(spy.key_values, axis, overlap=True)
    attend = KVFirst(reference.attend, axis, (8,), Shard(8, 1), spy, make, again)
    got = split_out(attend._attend((text, image), None, None), (text, image))
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
