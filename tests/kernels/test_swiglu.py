"""Tests of the activations of the MLP, SwiGLU and bias + GELU, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import gelu, sigmoid_gate, swiglu
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, rms
from tests.support.meshes import random

# numpy warns in the interpreter: exp(-x) is infinite far below 0, and x / inf is the right limit
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
FP32 = 4e-6  # fp32's own error before the one rounding, relative to the value or to 1
WORSE = 1.25
Case = dict[str, int]


def sizes(cases: tuple[Case, ...]) -> list[object]:
    small = [case for case in cases if case["tokens"] < 100]
    return [
        pytest.param(case, marks=() if case in small else gpu, id="-".join(map(str, case.values()))) for case in cases
    ]


def data(case: Case, dtype: torch.dtype, halves: int = 1) -> Tensor:
    """Return rows of a wider projection, with some large values."""
    batch, tokens, width = case.values()
    return (3 * random((batch, tokens, halves * width + 8), 0, DEVICE, dtype))[..., : halves * width]


def bias(case: Case, dtype: torch.dtype) -> Tensor:
    return random((case["width"],), 1, DEVICE, dtype)


def check(got: Tensor, want: Tensor, plain: Tensor) -> None:
    """Check that a result is rounded once to the storage dtype and no worse than plain torch in that dtype."""
    assert got.dtype == plain.dtype
    assert got.is_contiguous()
    bound = torch.finfo(got.dtype).eps / 2 * want.abs() + FP32 * want.abs().clamp(min=1)
    assert bool(((got - want).abs() <= bound).all())
    if got.dtype != torch.float32:
        assert rms(got, want) <= WORSE * rms(plain, want)


@pytest.mark.parametrize("case", sizes(swiglu.CASES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_as_close_to_fp64_as_plain_torch(case: Case, dtype: torch.dtype) -> None:
    packed = data(case, dtype, 2)
    gate, up = packed.chunk(2, dim=-1)
    check(swiglu.launch(packed), swiglu.reference(packed.double()), F.silu(gate) * up)


@pytest.mark.parametrize("case", sizes(sigmoid_gate.CASES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sigmoid_gate_is_as_close_to_fp64_as_plain_torch(case: Case, dtype: torch.dtype) -> None:
    """x is a part of wider rows; the result takes the place of the gate, which must be a contiguous one."""
    x, gate = data(case, dtype), data(case, dtype, 2)[..., case["width"] :].contiguous()
    want, plain = sigmoid_gate.reference(x.double(), gate.double()), x * gate.sigmoid()
    assert sigmoid_gate.launch(x, gate) is gate
    check(gate, want, plain)
    with pytest.raises(ValueError, match=r"expected a contiguous one"):
        sigmoid_gate.launch(x, data(case, dtype))


@pytest.mark.parametrize("case", sizes(gelu.CASES))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_gelu_is_as_close_to_fp64_as_plain_torch(case: Case, dtype: torch.dtype, biased: bool) -> None:
    """Both formulas are, and the result may take the place of the input."""
    x, extra = data(case, dtype), bias(case, dtype) if biased else None
    for exact, formula in ((False, "tanh"), (True, "none")):
        want = gelu.reference(x.double(), None if extra is None else extra.double(), exact=exact)
        got = gelu.launch(x, extra, exact=exact)
        check(got, want, F.gelu(x if extra is None else x + extra, approximate=formula))
        over = x.clone()
        assert gelu.launch(over, extra, exact=exact, reuse=True) is over
        assert torch.equal(over, got)
    with pytest.raises(ValueError, match=r"with reuse, expected a contiguous tensor"):
        gelu.launch(x.transpose(0, 1), extra, reuse=True)


def test_activations_far_out_are_their_limits() -> None:
    far = torch.tensor([[[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1.0]]], device=DEVICE)
    ones = torch.ones_like(far)
    for got, want in (
        (swiglu.launch(torch.cat((far, ones), -1)), swiglu.reference(torch.cat((far, ones), -1).double())),
        (gelu.launch(far, None), gelu.reference(far.double(), None)),
        (gelu.launch(far, None, exact=True), gelu.reference(far.double(), None, exact=True)),
        (gelu.launch(far.half(), None, exact=True), gelu.reference(far.double(), None, exact=True)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5 if got.dtype == torch.float32 else 1e-3, atol=1e-6)
    broken = torch.full((1, 1, 8), float("nan"), device=DEVICE, dtype=torch.float16)
    assert bool(gelu.launch(broken, None, exact=True).isnan().all())  # bounds must not hide it


def test_references_are_the_formulas() -> None:
    x, up = random((1, 2, 8), 0), random((1, 2, 8), 1)
    torch.testing.assert_close(swiglu.reference(torch.cat((x, up), -1)), x / (1 + (-x).exp()) * up)
    cubic = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu.reference(x - up, up), 0.5 * x * (1 + torch.tanh(cubic)))
    exact = gelu.reference(x - up, up, exact=True)
    torch.testing.assert_close(exact, 0.5 * x * (1 + torch.erf(x / 2**0.5)))
    assert float((exact - gelu.reference(x, None)).abs().max()) > 1e-5  # a negative control: the formulas differ


def test_halves_swapped_are_noticed() -> None:
    packed = data(swiglu.CASES[-1], torch.float32, 2)
    turned = torch.cat(packed.chunk(2, dim=-1)[::-1], dim=-1)
    assert float((swiglu.launch(turned) - swiglu.reference(packed)).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 1544])
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, width: int) -> None:
    case = {"batch": 2, "tokens": 5, "width": width}
    activations: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (swiglu.launch, data(case, dtype, 2)),
        (lambda x: gelu.launch(x, bias(case, dtype)), data(case, dtype)),
    ]
    for call, x in activations:
        assert torch.equal(call(x[1:, 2:4]), call(x)[1:, 2:4])


@pytest.mark.parametrize("shape", [(4, 256, 2), (2, 1024, 4)])
@pytest.mark.parametrize("width", [40, 1544])
def test_tiles_change_no_bits(shape: tuple[int, int, int], width: int) -> None:
    """Rows and columns do not fill a tile, and a program has more rows than there are."""
    case = {"batch": 3, "tokens": 3, "width": width}
    packed, x, extra = data(case, torch.float16, 2), data(case, torch.float16), bias(case, torch.float16)
    assert torch.equal(swiglu.launch(packed, tiled=swiglu.Tile(*shape)), swiglu.launch(packed))
    assert torch.equal(gelu.launch(x, extra, tiled=gelu.Tile(*shape)), gelu.launch(x, extra))
    assert torch.equal(gelu.launch(x[:1, :1], extra, tiled=gelu.Tile(*shape)), gelu.launch(x, extra)[:1, :1])


def test_no_rows_are_no_launch() -> None:
    assert swiglu.launch(torch.empty(2, 0, 16, device=DEVICE)).shape == (2, 0, 8)
    assert gelu.launch(torch.empty(2, 0, 16, device=DEVICE), None).shape == (2, 0, 16)
    x, weight = torch.empty(2, 0, 8, device=DEVICE), torch.empty(16, 8, device=DEVICE)
    assert gelu.linear_epilogue(x, weight, weight[:, 0].contiguous()).shape == (2, 0, 16)


@gpu
def test_public_functions_launch_the_kernels_unless_gradients_are_asked_for() -> None:
    x = data(swiglu.CASES[3], torch.bfloat16, 2)
    assert torch.equal(swiglu.swiglu(x), swiglu.launch(x))
    assert torch.equal(gelu.bias_gelu(x, None), gelu.launch(x, None))
    assert torch.equal(gelu.bias_gelu(x.clone(), None, exact=True, reuse=True), gelu.launch(x, None, exact=True))
    x = x.clone().requires_grad_()
    assert swiglu.swiglu(x).requires_grad
    assert gelu.bias_gelu(x, None).requires_grad
