"""Tests of SwiGLU and GELU in a product's epilogue (quack, cuBLAS) against fp64, and of when it is used."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack, activations, linear
from seqpar.kernels._quack import QUACK, Tile
from seqpar.kernels.linear import CASES, GATED_FASTER, GELU_EPILOGUE, GELU_FASTER, Faster, gated_linear, tile_for
from tests.conftest import DEVICE
from tests.kernels.shared import gpu, rms
from tests.support.meshes import random

SIZES = [pytest.param(case, id="-".join(map(str, case.values()))) for case in CASES]
# shapes of programs that differ in rows, columns, clusters and in whether two tiles take turns
TILES = (
    Tile(128, 192, 2),
    Tile(128, 192, 1, 4),
    Tile(128, 128),
    Tile(64, 192, 1, 2),
    Tile(128, 256, 1, 2, pingpong=False),
    Tile(256, 192, 2, pingpong=False),
)
SMALL = {"batch": 2, "tokens": 37, "inner": 72, "width": 136}
SEVEN_B = GATED_FASTER[(9, 0), 11008, 4096]
Case = dict[str, int]


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows, and weights that make values of order 1."""
    batch, tokens, inner, width = case.values()
    x = random((batch, tokens, inner), 0, DEVICE, dtype)
    return x, (2 * random((2 * width, inner), 1, DEVICE) / inner**0.5).to(dtype)


def feed_forward(rows: int, inner: int = 1152, width: int = 4608) -> tuple[Tensor, Tensor, Tensor]:
    x = random((1, rows, inner), 0, DEVICE, torch.bfloat16)
    weight = (random((width, inner), 1, DEVICE) / inner**0.5).to(torch.bfloat16)
    return x, weight, random((width,), 2, DEVICE, torch.bfloat16)


def test_elsewhere_it_is_a_product_and_a_kernel() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, packed = data(SMALL, dtype)
        bias = random((len(packed),), 2, DEVICE, dtype)
        assert torch.equal(gated_linear(x, packed, tokens=4096), activations.swiglu(F.linear(x, packed)))
        assert torch.equal(gated_linear(x, packed, bias), activations.swiglu(F.linear(x, packed, bias)))
    x, packed = data(SMALL, torch.float64)
    w1, w3 = packed.chunk(2)
    torch.testing.assert_close(linear.reference(x, packed), F.silu(x @ w1.t()) * (x @ w3.t()))
    x, weight, bias = feed_forward(3, 16, 24)
    assert torch.equal(linear.linear_gelu(x, weight, bias), activations.bias_gelu(F.linear(x, weight), bias))
    assert linear.linear_epilogue(x[:, :0].float(), weight.float(), bias.float()).shape == (1, 0, 24)


@pytest.mark.parametrize("tokens", [1024, 1025, 4096, 16384])
def test_the_arithmetic_of_a_long_sequence_is_the_same_on_any_number_of_ranks(tokens: int) -> None:
    for faster in GATED_FASTER.values():
        assert None not in {tile_for(faster, rows, tokens) for rows in (*range(1, 2049, 7), 2 * tokens)}


def test_short_sequences_take_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {512: None, 256: None, 128: Tile(128, 192, 1, 4), 64: Tile(64, 192, 1, 2)}
    assert {rows: tile_for(SEVEN_B, rows, 256) for rows in tiles} == tiles
    assert tile_for(SEVEN_B, 512, 1024) == SEVEN_B.tile
    monkeypatch.setattr(linear.exact, "is_on", lambda: True)
    assert {tile_for(SEVEN_B, rows, 256) for rows in (1, 64, 128, 512)} == {None}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as on a Hopper GPU with quack."""
    monkeypatch.setattr(linear, "fused", lambda *tensors: True)
    monkeypatch.setattr(_quack, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("on_hopper")
def test_the_whole_sequence_decides_and_not_a_ranks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, packed), tiles = data(SMALL, torch.bfloat16), list[Tile]()

    def launch(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
        tiles.append(tiled)
        return linear.reference(x_BlE, packed_F2E)

    monkeypatch.setattr(linear, "launch", launch)
    monkeypatch.setattr(
        linear, "GATED_FASTER", {((9, 0), 136, 72): Faster(100, Tile(128, 192), ((80, Tile(64, 192)),))}
    )
    for tokens in (None, 37, 99, 100):
        gated_linear(x, packed, tokens=tokens)
    assert tiles == [Tile(64, 192)] * 4
    tiles.clear()
    for tokens in (None, 99, 100):
        gated_linear(x.repeat(2, 1, 1), packed, tokens=tokens)
    assert tiles == [Tile(128, 192)]  # at 100 tokens alone
    gated_linear(x[:, :0], packed, tokens=100)
    gated_linear(x, packed, x.new_zeros(len(packed)), tokens=100)
    monkeypatch.setattr(_quack, "why_not", lambda: "not here")
    gated_linear(x, packed, tokens=100)
    assert len(tiles) == 1


@pytest.mark.usefixtures("on_hopper")
def test_the_shape_alone_decides_who_adds_gelu_to_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, weight, bias), calls = feed_forward(3, 16, 24), list[str]()
    for name in ("linear_quack", "linear_epilogue", "bias_gelu"):
        monkeypatch.setattr(linear, name, lambda *args, name=name, **options: calls.append(name))
    for name in ("GELU_EPILOGUE", "GELU_FASTER"):
        monkeypatch.setattr(linear, name, frozenset({((9, 0), 24, 16)}))
    for rows in (x, x[:, :1], x[:, :0]):
        linear.linear_gelu(rows, weight, bias)
    linear.linear_gelu(x, weight, bias, exact=True)
    linear.linear_gelu(x, weight, None)
    linear.linear_gelu(x.float(), weight.float(), bias.float())
    assert calls == ["linear_quack", "linear_quack", *["bias_gelu"] * 4]
    monkeypatch.setattr(_quack, "why_not", lambda: "not here")
    linear.linear_gelu(x, weight, bias)
    assert calls[6:] == ["linear_epilogue"]


def test_why_quack_computes_no_product_is_said_where_it_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(*shape: int) -> Any:
        return SimpleNamespace(shape=shape, is_cuda=True, device=DEVICE)

    capability, width, inner = next(iter(GATED_FASTER))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(_quack, "why_not", lambda: "is not here")
    others = [weight(7, inner), weight(width, inner)]
    assert linear.why_not_faster(others) is None
    assert linear.why_not_faster([*others, weight(2 * width, inner)]) == "is not here"
    assert linear.why_not_faster([weight(*next(iter(GELU_FASTER))[1:])]) == "is not here"
    assert linear.why_not_faster([torch.empty(2 * width, inner, device="meta")]) is None


def test_no_quack_or_another_one_or_one_that_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise TypeError("it depends on something\nunknown")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delitem(sys.modules, "seqpar.kernels._epilogues", raising=False)
    monkeypatch.delattr("seqpar.kernels._epilogues", raising=False)
    monkeypatch.setattr(_quack, "version", lambda name: "0.6.0")
    assert _quack.load.__wrapped__() == f"needs quack-kernels {QUACK}, 0.6.0 is here"
    monkeypatch.setattr(_quack, "version", lambda name: QUACK)
    monkeypatch.setitem(sys.modules, "quack.activation", None)
    assert _quack.load.__wrapped__().startswith(f"needs quack-kernels {QUACK}: ")
    for name, values in {
        "quack": {},
        "quack.activation": {"swiglu": None},
        "quack.epilogue": {"gemm_epilogue": refuse, "unpack": None},
        "quack.gemm_config": {"GemmConfig": None},
        "quack.gemm_interface": {"gemm_act": None},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**values))
    assert _quack.load.__wrapped__() == "quack refuses: it depends on something"


def needs_quack() -> None:
    if (reason := _quack.why_not()) is not None:
        pytest.skip(reason)


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_quack_is_closer_to_fp64_than_a_rounded_product_and_all_tiles_give_the_same_bits(case: Case) -> None:
    """`GATED_FASTER` relies on the bits: few rows may use another tile."""
    needs_quack()
    x, packed = data(case, torch.bfloat16)
    want, got = linear.reference(x.double(), packed.double()), gated_linear(x, packed, tokens=1 << 20)
    assert rms(got, want) <= rms(activations.swiglu(F.linear(x, packed)), want)
    swapped = torch.cat(packed.chunk(2)[::-1])
    assert float((gated_linear(x, swapped, tokens=1 << 20) - want).abs().max()) > 0.1
    whole = linear.launch(x, packed, tiled=TILES[0])
    for tile in TILES:
        assert torch.equal(linear.launch(x, packed, tiled=tile), whole)
        for some in (slice(0, 1), slice(5, 90), slice(100, 229)):
            assert torch.equal(linear.launch(x[:1, some], packed, tiled=tile), whole[:1, some])


SHAPES = sorted((inner, width) for _, width, inner in GELU_EPILOGUE | GELU_FASTER)


@gpu
@pytest.mark.parametrize(("inner", "width"), SHAPES)
def test_gpu_gelu_in_an_epilogue_is_close_to_fp64_and_a_row_does_not_depend_on_others(inner: int, width: int) -> None:
    """A shape may be in `GELU_EPILOGUE` or `GELU_FASTER` only if this holds."""
    if ((9, 0), width, inner) in GELU_FASTER:
        needs_quack()
    x, weight, bias = feed_forward(8192, inner, width)
    whole, some = linear.linear_gelu(x, weight, bias), slice(0, 2048)
    want = linear.linear_reference(x[:, some].double(), weight.double(), bias.double())
    two = activations.launch_gelu(F.linear(x[:, some], weight), bias)
    assert rms(whole[:, some], want) <= 1.25 * rms(two, want)
    assert rms(linear.linear_gelu(x[:, some], weight, -bias), want) > 0.1
    for rows in (1, 85, 512, 1024, 1025, 2048, 4096, 8191):
        for some in (slice(0, rows), slice(8192 - rows, 8192)):
            assert torch.equal(linear.linear_gelu(x[:, some], weight, bias), whole[:, some])
