"""Tests of rows in 8 bits: kernels round what their references round, and a row of a product has its bits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from seqpar.kernels import adaln, few_rows8, rows8, weight8
from seqpar.kernels.adaln import Gated, Norm
from seqpar.kernels.rows8 import Activation, Rounding, Rows8, product8, rounded
from tests.conftest import DEVICE
from tests.kernels.shared import gpu
from tests.support.meshes import random
from tests.support.pairs import covering

pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
STEP = 1 / 8  # between neighbours of e4m3, relative: kernel and reference may round a number to either side
SMALLEST = 2.0**-9  # the step below 2^-6
HALF = torch.bfloat16
NORMS = (("layer", False), ("rms", True), ("layer", True), ("rms", False))  # and whether rows are centred


def close(got: Rows8, want: Rows8) -> bool:
    assert got.values.shape == want.values.shape
    assert got.scales.shape == want.scales.shape
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-5, atol=0)
    a, b = got.values.float(), want.values.float()
    # Triton's interpreter halves numbers that it rounds up to a power of two
    compared = b.abs().log2().frac() != 0 if DEVICE == "cpu" else torch.ones_like(b, dtype=torch.bool)
    assert compared.float().mean() > 0.5
    return bool(((a - b).abs() <= (STEP * b.abs()).clamp(min=SMALLEST))[compared].all())


def centre_of(width: int) -> Tensor:
    return 0.5 * random((width,), 9, DEVICE, torch.float32)


@pytest.mark.parametrize(
    ("case", "activation", "centred"),
    covering(rows8.CASES, (None, "gelu", "swiglu", "swiglu, gate last"), turns=(False, True)),
)
def test_a_pass_rounds_as_its_formula(case: dict[str, int], activation: Activation | None, centred: bool) -> None:
    batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
    inputs = width if activation in (None, "gelu") else 2 * width
    x = random((batch, tokens, inputs + pad), 0, DEVICE, HALF)[..., :inputs]
    rounding = Rounding(centre_of(width) if centred else None)
    got, want = (work(x, rounding, activation, 0.25) for work in (rows8.launch, rows8.reference))
    assert close(got, want)
    plain = rows8.reference(x, rounding, activation)
    assert torch.equal(want.wide(), plain.wide() / 4)
    other = rows8.reference(x, Rounding(centre_of(width) + 1), activation, 0.25)
    assert width < 100 or not torch.allclose(got.scales, other.scales, rtol=1e-5)  # a negative control


@pytest.mark.parametrize("case", weight8.CASES)
def test_weights_are_widened_as_their_formula(case: dict[str, int]) -> None:
    values, scales = rounded(random((case["rows"], case["width"] + 16), 0, DEVICE, torch.float32))
    values, scales = values[:, : case["width"]], scales.flatten()
    assert torch.equal(*(work(values, scales, torch.float32) for work in (weight8.launch, weight8.reference)))
    got, want = (work(values, scales, HALF) for work in (weight8.launch, weight8.reference))
    torch.testing.assert_close(got, want, rtol=0 if DEVICE != "cpu" else 2**-7, atol=0)  # the interpreter cuts off


@pytest.mark.parametrize(("width", "dtype"), [(1, HALF), (7, torch.float32), (3072, torch.float32), (18432, HALF)])
def test_weights_are_rounded_to_the_bits_of_their_formula(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":  # the interpreter rounds e4m3 neither to even nor up to a power of two
        true = interpreter._convert_float

        def convert(x: Any, start: Any, end: Any, mode: Any) -> Any:
            if end != tl.float8e4nv:
                return true(x, start, end, mode)
            return torch.from_numpy(x.copy()).to(rows8.E4M3).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", convert)
    weight = random((6, width), 0, DEVICE, dtype)
    weight[2], weight[3] = 0, weight[3] * 1e-30
    values, scales = torch.empty(6, 2 * width, device=DEVICE).to(rows8.E4M3)[:, :width], torch.empty(6, device=DEVICE)
    weight8.launch_narrowing(weight, values, scales)
    want, scale = rounded(weight.cpu().float())
    assert torch.equal(values.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales.cpu(), scale.flatten())
    assert weight8.narrowed(weight)[0].view(torch.uint8).equal(values.view(torch.uint8))


@pytest.mark.parametrize(
    ("case", "branches", "kind", "centred"),
    covering(adaln.CASES[1:4], (0, 1, 2), turns=[pytest.param(*way) for way in NORMS]),
)
def test_a_norm_rounds_its_result_for_the_product(
    case: dict[str, int], kind: str, branches: int, centred: bool
) -> None:
    batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
    x, first, padded = random((3, batch, tokens, width + pad), 0, DEVICE, HALF)[..., :width]
    second = padded.contiguous()  # of other strides than the first
    gate, shift, scale = 0.5 * random((3, batch, width), 1, DEVICE, torch.float32)
    of = (None, Gated(gate, first), Gated(gate, (first, second)))[branches]
    norm, rounding = Norm("layer" if kind == "layer" else "rms"), Rounding(centre_of(width) if centred else None)
    (x_got, got), (x_want, want) = (
        work(x, of, shift, scale, norm, rounding=rounding) for work in (adaln.launch, adaln.reference)
    )
    assert close(got, want)
    torch.testing.assert_close(x_got, x_want)
    for of_both in (first, (first, second), (second, first)):  # what is added where nothing follows
        truth = x.double() + gate[:, None].double() * (first if of_both is first else first.double() + second)
        torch.testing.assert_close(adaln.added(x, gate, of_both), truth.to(HALF))
        assert branches < 2 or torch.allclose(x_got.double(), truth, rtol=1e-2, atol=1e-2) is (of_both is not first)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_zeros_and_what_is_not_finite_are_kept() -> None:
    x = torch.zeros(1, 3, 64, device=DEVICE, dtype=HALF)
    x[0, 1, 5], x[0, 2, 5] = float("nan"), float("inf")
    for work in (rows8.launch, rows8.reference):
        zeros, nan, inf = work(x, Rounding(None)).wide()[0]
        assert not zeros.any()
        assert nan.isnan().any() or (work is rows8.launch and DEVICE == "cpu")  # the interpreter loses it
        assert not inf.isfinite().all()


def test_kernels_leave_room_for_a_product_of_fast_sums() -> None:
    x, zero = random((1, 3, 24), 0, DEVICE, torch.float32), torch.zeros(1, 24, device=DEVICE)
    normed = adaln.launch(x, None, zero, zero, Norm(), rounding=Rounding(None))[1]
    for rows in (rows8.launch(x, Rounding(None)), normed):
        assert rows8.launch(x[:, :0], Rounding(None)).scales.shape == (1, 0, 1)  # fewer tokens than ranks
        for made in (rows.values[0], rows.scales[0]):
            more = rows8.at_least(rows8.FEWEST, made)
            assert len(more) == rows8.FEWEST
            assert more.data_ptr() == made.data_ptr()
            few = rows8.at_least(rows8.FEWEST, made.clone())  # memory of its own has no room
            assert torch.equal(few[:3].double(), made.double())
            assert not few[3:].double().any()


def product(rows: int, inner: int, width: int) -> tuple[Rows8, Tensor, Tensor, Tensor]:
    x = 0.3 + random((1, rows, inner), 0, DEVICE, HALF)
    values, scales = rounded(0.02 * random((width, inner), 1, DEVICE, torch.float32))
    return rows8.round_rows(x, Rounding(None)), values, scales.flatten(), random((width,), 2, DEVICE, HALF)


def part(x: Rows8, rows: slice) -> Rows8:
    # cuBLAS reads scales from addresses that 16 divides, as a kernel writes them
    return x._replace(values=x.values[:, rows].clone(), scales=x.scales[:, rows].clone())


@gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("inner", "width"), [(3072, 9216), (3072, 12288), (12288, 3072), (5120, 13824), (15360, 3072)])
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(inner: int, width: int, fast: bool) -> None:
    x, values, scales, bias = product(4608, inner, width)
    whole = product8(x, values, scales, bias, fast=fast)
    truth = x.wide() @ (values.double() * scales.double()[:, None]).t() + bias.double()
    assert float((whole - truth).norm() / truth.norm()) < (6e-2 if fast else 6e-3)  # inputs with a mean, not centred
    for start, count in ((0, 1), (3, 16), (7, 37), (1000, 128), (16, 1152), (2303, 2305)):
        rows = slice(start, start + count)
        assert torch.equal(product8(part(x, rows), values, scales, bias, fast=fast), whole[:, rows]), (start, count)


@gpu
def test_columns_of_a_weight_are_read_where_they_are() -> None:
    _, values, scales, bias = product(16, 15360, 3072)
    for columns in (slice(0, 3072), slice(3072, 15360)):
        x = product(512, columns.stop - columns.start, 16)[0]
        copy = product8(x, values[:, columns].contiguous(), scales, bias)
        assert torch.equal(product8(x, values[:, columns], scales, bias), copy)


@pytest.mark.parametrize(("case", "dtype"), covering(few_rows8.CASES, turns=(HALF, torch.float32)))
def test_few_rows_times_a_weight_in_8_bits(case: dict[str, int], dtype: torch.dtype) -> None:
    rows, inner, width = case.values()
    x = random((2 * rows, inner + 16), 0, DEVICE, dtype)[::2, :inner]
    values, scales = rounded(random((width, inner), 1, DEVICE, torch.float32))
    want = few_rows8.reference(x.double(), values, scales.flatten())
    for work in (few_rows8.launch, few_rows8.reference):
        got = work(x, values, scales.flatten())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        assert (work(x, values, scales.flatten().flip(0)) - want).abs().max() > 1e-2  # a negative control
    each = [few_rows8.launch(x[row : row + 1], values[3:], scales.flatten()[3:]) for row in range(rows)]
    assert torch.equal(torch.cat(each), few_rows8.launch(x, values, scales.flatten())[:, 3:])
