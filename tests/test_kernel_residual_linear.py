"""Gate and residual in the epilogue of a matrix product, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import gated_linear
from seqpar.kernels import residual_linear as module
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gated_linear import Tile
from seqpar.kernels.residual_linear import CASES, TILE, launch, linear_gate_norm_modulate, reference
from tests.conftest import DEVICE
from tests.meshes import random
from tests.test_kernel_gated_linear import DTYPES, FP32, NARROW, interpreted, rms

gpu = pytest.mark.gpu
SMALL = [case for case in CASES if case["tokens"] < 100]
SIZES = [pytest.param(case, marks=() if case in SMALL else gpu, id="-".join(map(str, case.values()))) for case in CASES]
Case = dict[str, int]
NORM = Norm("rms", 1e-5)


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, gate, h, weight: rows of wider matrices, the gate out of a table of modulation."""
    batch, tokens, inner, width = case.values()
    x = random((batch, tokens, width + 8), 0, DEVICE, dtype)[..., :width]
    h = random((batch, tokens, inner + 8), 1, DEVICE, dtype)[..., :inner]
    weight = (random((width, inner), 2, DEVICE) / inner**0.5).to(dtype)
    return x, random((batch, 3, width), 3, DEVICE)[:, 1], h, weight


def exact(*inputs: Tensor) -> Tensor:
    return reference(*(x.double() for x in inputs))


@interpreted
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [TILE, NARROW])
def test_kernel_is_closer_to_fp64_than_a_branch_that_is_rounded(case: Case, dtype: torch.dtype, tile: Tile) -> None:
    x, gate, h, weight = data(case, dtype)
    if tile is TILE and dtype == torch.float32 and DEVICE != "cpu":
        pytest.skip("a stage of fp32 has twice the bytes: it does not fit")
    got, want = launch(x, gate, h, weight, tiled=tile), exact(x, gate, h, weight)
    assert got.dtype == dtype
    assert got.is_contiguous()
    bound = torch.finfo(dtype).eps / 2 * want.abs() + FP32 * want.abs().clamp(min=1)
    assert bool(((got - want).abs() <= bound).all())
    if dtype != torch.float32:
        plain = (x.float() + gate[:, None] * F.linear(h, weight).float()).to(dtype)
        assert rms(got, want) <= rms(plain, want)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("tile", [TILE, NARROW])
def test_a_row_does_not_depend_on_the_number_of_rows(case: Case, dtype: torch.dtype, tile: Tile) -> None:
    x, gate, h, weight = data(case, dtype)
    whole, tokens = launch(x, gate, h, weight, tiled=tile), case["tokens"]
    # from the first row on, for the reason that the other product's test gives
    for count in (1, tokens // 2 + 1, tokens):
        assert torch.equal(launch(x[:1, :count], gate[:1], h[:1, :count], weight, tiled=tile), whole[:1, :count])


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_a_row_does_not_depend_on_its_place(case: Case) -> None:
    x, gate, h, weight = data(case, torch.bfloat16)
    whole, tokens = launch(x, gate, h, weight), case["tokens"]
    for some in (slice(tokens // 3, tokens // 2 + 1), slice(tokens - 1, tokens)):
        assert torch.equal(launch(x[-1:, some], gate[-1:], h[-1:, some], weight), whole[-1:, some])


@interpreted
def test_what_is_mixed_up_is_noticed() -> None:
    """Negative controls: another image's gate, the neighbouring weights, the stream forgotten."""
    x, gate, h, weight = data(SMALL[0], torch.float32)
    want = exact(x, gate, h, weight)
    for wrong in ((x, gate.roll(1, 0), h, weight), (x, gate, h, weight.roll(1, 0)), (0 * x, gate, h, weight)):
        assert float((launch(*wrong, tiled=NARROW) - want).abs().max()) > 0.1


def test_what_the_kernel_cannot_read_is_refused() -> None:
    x, gate, h, weight = data(SMALL[0], torch.float16)
    with pytest.raises(ValueError, match="rows that start on 16 bytes"):
        launch(x, gate, h[..., 1:], weight[:, 1:].contiguous())
    with pytest.raises(ValueError, match="one dtype for all"):
        launch(x, gate, h, weight.float())
    with pytest.raises(ValueError, match="contiguous last dim"):
        launch(x, gate.repeat_interleave(2, 1)[:, ::2], h, weight)


def test_no_rows_are_no_launch() -> None:
    x, gate, h, weight = data(SMALL[0], torch.float16)
    assert launch(x[:, :0], gate, h[:, :0], weight).shape == (3, 0, 136)


@interpreted
def test_one_line_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate, h, weight = data(SMALL[0], torch.float16)
    shift, scale = gate.roll(1, 1), gate.roll(2, 1)
    two = gate_norm_modulate(x, gate, F.linear(h, weight), shift, scale, NORM)
    got = linear_gate_norm_modulate(x, gate, h, weight, shift, scale, NORM)
    assert all(torch.equal(a, b) for a, b in zip(got, two, strict=True))
    monkeypatch.setattr(gated_linear, "fused", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "FASTER", {((9, 0), 136, 72): NARROW})
    x_new, normed = linear_gate_norm_modulate(x, gate, h, weight, shift, scale, NORM)
    assert torch.equal(x_new, launch(x, gate, h, weight, tiled=NARROW))
    assert torch.equal(normed, norm_modulate(x_new, shift, scale, NORM))
    assert not torch.equal(x_new, two[0])  # the branch is not rounded on its way
