"""SwiGLU in the epilogue of its product, and cuBLAS's own GELU epilogue, against fp64."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launch.products import QUACK
from seqpar.kernels import gated_linear as module
from seqpar.kernels import gelu, swiglu
from seqpar.kernels._quack import QuackTile, why_not
from seqpar.kernels.gated_linear import CASES, TILE, Tile, gated_linear, launch, reference
from tests.conftest import DEVICE
from tests.meshes import random

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
SMALL = [case for case in CASES if case["tokens"] < 100]
SIZES = [pytest.param(case, marks=() if case in SMALL else gpu, id="-".join(map(str, case.values()))) for case in CASES]
NARROW = Tile(64, 32, 32, 2, 4)  # several tiles of rows and columns, of which the last are not full
FP32 = 1e-5  # fp32's own error before the one rounding, relative to the value or to 1
Case = dict[str, int]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


interpreted = pytest.mark.skipif(
    DEVICE == "cpu" and numbers(version("triton")) < (3, 7) and numbers(version("numpy")) >= (2, 4),
    reason="Triton 3.6's interpreter has no loops of unknown length with numpy 2.4",
)


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a wider matrix, and weights that make values of order 1."""
    batch, tokens, inner, width = case.values()
    x = random((batch, tokens, inner + 8), 0, DEVICE, dtype)[..., :inner]
    return x, (2 * random((2 * width, inner), 1, DEVICE) / inner**0.5).to(dtype)


def exact(x: Tensor, packed: Tensor) -> Tensor:
    return reference(x.double(), packed.double())


def rms(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt())


@interpreted
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [TILE, NARROW])
def test_kernel_is_closer_to_fp64_than_a_product_that_is_rounded(case: Case, dtype: torch.dtype, tile: Tile) -> None:
    x, packed = data(case, dtype)
    if tile is TILE and dtype == torch.float32 and DEVICE != "cpu":
        pytest.skip("a stage of fp32 has twice the bytes: it does not fit")
    got, want = launch(x, packed, tiled=tile), exact(x, packed)
    assert got.dtype == dtype
    assert got.is_contiguous()
    bound = torch.finfo(dtype).eps / 2 * want.abs() + FP32 * want.abs().clamp(min=1)
    assert bool(((got - want).abs() <= bound).all())
    if dtype != torch.float32:
        assert rms(got, want) <= rms(swiglu.swiglu(F.linear(x, packed)), want)


def test_reference_is_the_formula() -> None:
    x, packed = data(SMALL[0], torch.float64)
    w1, w3 = packed.chunk(2)
    torch.testing.assert_close(exact(x, packed), F.silu(x @ w1.t()) * (x @ w3.t()))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("tile", [TILE, NARROW])
def test_a_row_does_not_depend_on_the_number_of_rows(case: Case, dtype: torch.dtype, tile: Tile) -> None:
    x, packed = data(case, dtype)
    whole, tokens = launch(x, packed, tiled=tile), case["tokens"]
    # from the first row on: the interpreter's dot is numpy's, where a row's place in a tile changes its last bits
    for count in (1, tokens // 2 + 1, tokens):
        assert torch.equal(launch(x[:1, :count], packed, tiled=tile), whole[:1, :count])


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_a_row_does_not_depend_on_its_place(case: Case) -> None:
    x, packed = data(case, torch.bfloat16)
    whole, tokens = launch(x, packed), case["tokens"]
    for some in (slice(tokens // 3, tokens // 2 + 1), slice(tokens - 1, tokens)):
        assert torch.equal(launch(x[-1:, some], packed), whole[-1:, some])


@gpu
@pytest.mark.parametrize("tile", QUACK)
def test_gpu_quacks_product_is_as_good_and_row_by_row(tile: QuackTile) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    x, packed = data({"batch": 2, "tokens": 1023, "inner": 1536, "width": 4096}, torch.bfloat16)
    whole, want = launch(x, packed, tiled=tile), exact(x, packed)
    assert rms(whole, want) <= rms(swiglu.swiglu(F.linear(x, packed)), want)
    for some in (slice(0, 1), slice(5, 90), slice(1000, 1023)):
        assert torch.equal(launch(x[:1, some], packed, tiled=tile), whole[:1, some])
    swapped = torch.cat(packed.chunk(2)[::-1])
    assert float((launch(x, swapped, tiled=tile) - want).abs().max()) > 0.1


@interpreted
def test_weights_the_wrong_way_round_are_noticed() -> None:
    """Negative controls: w1 and w3 swapped; the neighbouring row of weights."""
    x, packed = data(SMALL[0], torch.float32)
    want = exact(x, packed)
    for wrong in (torch.cat(packed.chunk(2)[::-1]), packed.roll(1, 0)):
        assert float((launch(x, wrong, tiled=NARROW) - want).abs().max()) > 0.1


def test_what_the_copy_engine_cannot_read_is_refused() -> None:
    x, packed = data(SMALL[0], torch.float16)
    with pytest.raises(ValueError, match="rows that start on 16 bytes"):
        launch(x[..., 1:], packed[:, 1:].contiguous())
    with pytest.raises(ValueError, match="one dtype for all"):
        launch(x, packed.float())


def test_no_rows_are_no_launch() -> None:
    x, packed = data(SMALL[0], torch.float16)
    assert launch(x[:, :0], packed).shape == (2, 0, 136)


def test_without_a_measurement_it_is_a_product_and_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, packed = data(SMALL[0], torch.float16)
    two = swiglu.swiglu(F.linear(x, packed))
    assert torch.equal(gated_linear(x, packed), two)
    monkeypatch.setattr(module, "FASTER", {((0, 0), 136, 72): NARROW})  # another chip's
    assert torch.equal(gated_linear(x, packed), two)


@interpreted
def test_one_line_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x, packed = data(SMALL[0], torch.float16)
    monkeypatch.setattr(module, "fused", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "FASTER", {((9, 0), 136, 72): NARROW})
    assert torch.equal(gated_linear(x, packed), launch(x, packed, tiled=NARROW))


# The GELU epilogue of cuBLASLt ---------------------------------------------------------------------------------


def feed_forward(rows: int, inner: int = 1152, width: int = 4608) -> tuple[Tensor, Tensor, Tensor]:
    x = random((1, rows, inner), 0, DEVICE, torch.bfloat16)
    weight = (random((width, inner), 1, DEVICE) / inner**0.5).to(torch.bfloat16)
    return x, weight, random((width,), 2, DEVICE, torch.bfloat16)


def test_linear_gelu_is_a_product_and_a_kernel_until_it_is_measured() -> None:
    x, weight, bias = feed_forward(3, 16, 24)
    assert torch.equal(gelu.linear_gelu(x, weight, bias), gelu.bias_gelu(F.linear(x, weight), bias))


@gpu
def test_gpu_the_gelu_epilogue_is_as_close_to_fp64_as_product_and_kernel() -> None:
    x, weight, bias = feed_forward(2048)
    want = gelu.linear_reference(x.double(), weight.double(), bias.double())
    got, two = gelu.linear_epilogue(x, weight, bias), gelu.launch(F.linear(x, weight), bias)
    assert rms(got, want) <= 1.25 * rms(two, want)


@gpu
@pytest.mark.parametrize("rows", [1, 85, 512, 1024, 1025, 2048, 4096, 8191])
def test_gpu_a_row_of_the_gelu_epilogue_does_not_depend_on_the_number_of_rows(rows: int) -> None:
    """What `gelu.EPILOGUE` asks of a shape before it may be in it."""
    x, weight, bias = feed_forward(8192)
    whole = gelu.linear_epilogue(x, weight, bias)
    for start in (0, 8192 - rows):
        some = slice(start, start + rows)
        assert torch.equal(gelu.linear_epilogue(x[:, some], weight, bias), whole[:, some])
