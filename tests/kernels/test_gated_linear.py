"""Tests of SwiGLU and GELU in a GEMM's epilogue (quack), of when it is used, and of cuBLAS's GELU, against fp64."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import _quack, gelu, swiglu
from seqpar.kernels import gated_linear as module
from seqpar.kernels._quack import QUACK, Tile, why_not
from seqpar.kernels.gated_linear import CASES, FASTER, Faster, gated_linear, launch, reference, tile_for
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
SEVEN_B = FASTER[(9, 0), 11008, 4096]
Case = dict[str, int]


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows, and weights that make values of order 1."""
    batch, tokens, inner, width = case.values()
    x = random((batch, tokens, inner), 0, DEVICE, dtype)
    return x, (2 * random((2 * width, inner), 1, DEVICE) / inner**0.5).to(dtype)


def test_reference_is_the_formula() -> None:
    x, packed = data(SMALL, torch.float64)
    w1, w3 = packed.chunk(2)
    torch.testing.assert_close(reference(x, packed), F.silu(x @ w1.t()) * (x @ w3.t()))


def test_elsewhere_it_is_a_product_and_a_kernel() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, packed = data(SMALL, dtype)
        bias = random((len(packed),), 2, DEVICE, dtype)
        assert torch.equal(gated_linear(x, packed, tokens=4096), swiglu.swiglu(F.linear(x, packed)))
        assert torch.equal(gated_linear(x, packed, bias), swiglu.swiglu(F.linear(x, packed, bias)))


@pytest.mark.parametrize("tokens", [1024, 1025, 4096, 16384])
def test_the_arithmetic_of_a_long_sequence_is_the_same_on_any_number_of_ranks(tokens: int) -> None:
    for found in FASTER.values():
        tiles = {tile_for(found, rows, tokens) for rows in (*range(1, 2049, 7), 2 * tokens)}
        assert None not in tiles


def test_short_sequences_take_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_for(SEVEN_B, 512, 256) is None
    assert tile_for(SEVEN_B, 256, 256) is None
    assert tile_for(SEVEN_B, 128, 256) == Tile(128, 192, 1, 4)
    assert tile_for(SEVEN_B, 64, 256) == Tile(64, 192, 1, 2)
    assert tile_for(SEVEN_B, 512, 1024) == SEVEN_B.tile
    monkeypatch.setattr(module.exact, "is_on", lambda: True)
    assert {tile_for(SEVEN_B, rows, 256) for rows in (1, 64, 128, 512)} == {None}


def test_the_whole_sequence_decides_and_not_a_ranks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, packed = data(SMALL, torch.bfloat16)
    asked: list[Tile] = []

    def made(x_BlE: Tensor, packed_F2E: Tensor, *, tiled: Tile) -> Tensor:
        asked.append(tiled)
        return reference(x_BlE, packed_F2E)

    monkeypatch.setattr(module, "fused", lambda *tensors: True)
    monkeypatch.setattr(_quack, "why_not", lambda: None)
    monkeypatch.setattr(module, "launch", made)
    monkeypatch.setattr(module.swiglu, "fused", lambda *tensors: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "FASTER", {((9, 0), 136, 72): Faster(100, Tile(128, 192), ((80, Tile(64, 192)),))})
    for tokens in (None, 37, 99, 100):
        gated_linear(x, packed, tokens=tokens)
    assert asked == [Tile(64, 192)] * 4
    asked.clear()
    for tokens in (None, 99, 100):
        gated_linear(x.repeat(2, 1, 1), packed, tokens=tokens)
    assert asked == [Tile(128, 192)]  # at 100 tokens alone
    gated_linear(x[:, :0], packed, tokens=100)
    gated_linear(x, packed, x.new_zeros(len(packed)), tokens=100)
    monkeypatch.setattr(_quack, "why_not", lambda: "not here")
    gated_linear(x, packed, tokens=100)
    assert len(asked) == 1


def test_a_product_that_quack_would_compute_faster_is_a_reason_to_say_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def weight(*shape: int) -> Any:
        return SimpleNamespace(shape=shape, is_cuda=True, device=DEVICE)

    capability, width, inner = next(iter(FASTER))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(_quack, "why_not", lambda: "is not here")
    others = [weight(7, inner), weight(width, inner)]
    assert module.why_not_faster(others) is None
    assert module.why_not_faster([*others, weight(2 * width, inner)]) == "is not here"
    assert module.why_not_faster([weight(*next(iter(gelu.FASTER))[1:])]) == "is not here"
    assert module.why_not_faster([torch.empty(2 * width, inner, device="meta")]) is None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine could run quack, which is not loaded yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delitem(sys.modules, "seqpar.kernels._epilogues", raising=False)
    monkeypatch.delattr("seqpar.kernels._epilogues", raising=False)


@pytest.mark.usefixtures("hopper")
def test_no_quack_or_another_one_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quack, "version", lambda name: "0.6.0")
    assert _quack.load.__wrapped__() == f"needs quack-kernels {QUACK}, 0.6.0 is here"
    monkeypatch.setattr(_quack, "version", lambda name: QUACK)
    monkeypatch.setitem(sys.modules, "quack.activation", None)
    assert _quack.load.__wrapped__().startswith(f"needs quack-kernels {QUACK}: ")


@pytest.mark.usefixtures("hopper")
def test_what_quack_says_where_it_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise TypeError("it depends on something\nunknown")

    monkeypatch.setattr(_quack, "version", lambda name: QUACK)
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
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_quack_is_closer_to_fp64_than_a_product_that_is_rounded(case: Case) -> None:
    needs_quack()
    x, packed = data(case, torch.bfloat16)
    want = reference(x.double(), packed.double())
    got = gated_linear(x, packed, tokens=1 << 20)
    assert rms(got, want) <= rms(swiglu.swiglu(F.linear(x, packed)), want)
    swapped = torch.cat(packed.chunk(2)[::-1])
    assert float((gated_linear(x, swapped, tokens=1 << 20) - want).abs().max()) > 0.1


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_all_of_quacks_tiles_give_the_same_bits_at_any_number_of_rows(case: Case) -> None:
    """`FASTER` relies on this: few rows may use another tile."""
    needs_quack()
    x, packed = data(case, torch.bfloat16)
    whole = launch(x, packed, tiled=TILES[0])
    for tile in TILES:
        assert torch.equal(launch(x, packed, tiled=tile), whole)
        for some in (slice(0, 1), slice(5, 90), slice(100, 229)):
            assert torch.equal(launch(x[:1, some], packed, tiled=tile), whole[:1, some])


# GELU in an epilogue -------------------------------------------------------------------------------------------


def feed_forward(rows: int, inner: int = 1152, width: int = 4608) -> tuple[Tensor, Tensor, Tensor]:
    x = random((1, rows, inner), 0, DEVICE, torch.bfloat16)
    weight = (random((width, inner), 1, DEVICE) / inner**0.5).to(torch.bfloat16)
    return x, weight, random((width,), 2, DEVICE, torch.bfloat16)


def test_linear_gelu_of_another_shape_is_a_product_and_a_kernel() -> None:
    x, weight, bias = feed_forward(3, 16, 24)
    assert torch.equal(gelu.linear_gelu(x, weight, bias), gelu.bias_gelu(F.linear(x, weight), bias))


def test_the_shape_alone_decides_who_adds_gelu_to_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = feed_forward(3, 16, 24)
    shape, asked = ((9, 0), 24, 16), list[str]()

    def noted(name: str) -> None:
        monkeypatch.setattr(gelu, name, lambda *args, **how: asked.append(name))

    for name in ("linear_quack", "linear_epilogue", "bias_gelu"):
        noted(name)
    monkeypatch.setattr(gelu, "fused", lambda *tensors: True)
    monkeypatch.setattr(_quack, "why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gelu, "EPILOGUE", frozenset({shape}))
    monkeypatch.setattr(gelu, "FASTER", frozenset({shape}))
    for rows in (x, x[:, :1], x[:, :0]):
        gelu.linear_gelu(rows, weight, bias)
    gelu.linear_gelu(x, weight, bias, exact=True)
    gelu.linear_gelu(x, weight, None)
    gelu.linear_gelu(x.float(), weight.float(), bias.float())
    assert asked == ["linear_quack", "linear_quack", *["bias_gelu"] * 4]
    monkeypatch.setattr(_quack, "why_not", lambda: "not here")
    gelu.linear_gelu(x, weight, bias)
    assert asked[6:] == ["linear_epilogue"]


QUACKS = sorted((inner, width) for _, width, inner in gelu.FASTER)
SHAPES = sorted((inner, width) for _, width, inner in gelu.EPILOGUE | gelu.FASTER)


@gpu
@pytest.mark.parametrize(("inner", "width"), SHAPES)
def test_gpu_gelu_in_an_epilogue_is_as_close_to_fp64_as_product_and_kernel(inner: int, width: int) -> None:
    if (inner, width) in QUACKS:
        needs_quack()
    x, weight, bias = feed_forward(2048, inner, width)
    want = gelu.linear_reference(x.double(), weight.double(), bias.double())
    got, two = gelu.linear_gelu(x, weight, bias), gelu.launch(F.linear(x, weight), bias)
    assert rms(got, want) <= 1.25 * rms(two, want)
    assert rms(gelu.linear_gelu(x, weight, -bias), want) > 0.1


@gpu
@pytest.mark.parametrize("rows", [1, 85, 512, 1024, 1025, 2048, 4096, 8191])
@pytest.mark.parametrize(("inner", "width"), SHAPES)
def test_gpu_a_row_of_gelu_in_an_epilogue_does_not_depend_on_the_number_of_rows(
    inner: int, width: int, rows: int
) -> None:
    """A shape may be in `gelu.EPILOGUE` or `gelu.FASTER` only if this holds."""
    if (inner, width) in QUACKS:
        needs_quack()
    x, weight, bias = feed_forward(8192, inner, width)
    whole = gelu.linear_gelu(x, weight, bias)
    for start in (0, 8192 - rows):
        some = slice(start, start + rows)
        assert torch.equal(gelu.linear_gelu(x[:, some], weight, bias), whole[:, some])
