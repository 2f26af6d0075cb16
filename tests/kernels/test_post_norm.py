"""Tests of the kernel of LayerNorm(x + y) against fp64, and the mistakes of a careless kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import post_norm
from seqpar.kernels.post_norm import CASES, Affine, Tile, launch, reference
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, few, rms
from tests.support.meshes import random

SIZES = few(CASES)
FP32 = 2e-5  # largest error against fp64 for values of order 1: a hundred roundings or so
Data = tuple[Tensor, Tensor, Affine]


def data(case: dict[str, int], dtype: torch.dtype, offset: float = 0.0) -> Data:
    """Return x, which is a part of wider rows, y, and a norm with weights, as models pass them."""
    batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
    x = random((batch, tokens, pad + width), 0, DEVICE, dtype)[..., pad:] + offset
    x = torch.cat((x.new_zeros(batch, tokens, pad), x), dim=-1)[..., pad:]
    weight, bias = 1 + 0.3 * random((width,), 2, DEVICE, dtype), random((width,), 3, DEVICE, dtype)
    return x, random((batch, tokens, width), 1, DEVICE, dtype), Affine(weight, bias)


def exact(x: Tensor, y: Tensor | None, norm: Affine) -> Tensor:
    """Return the result in fp64, by the formula."""
    row = x.double() if y is None else x.double() + y.double()
    row = row - row.mean(-1, keepdim=True)
    row = row / (row.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return row * norm.weight_E.double() + norm.bias_E.double()


@pytest.mark.parametrize("case", SIZES, ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("summed", [False, True])
def test_kernel_is_as_close_to_fp64_as_plain_torch(case: dict[str, int], dtype: torch.dtype, summed: bool) -> None:
    """It is closer than torch's norm of a rounded sum, and it may write into the other half of x's rows."""
    x, y, norm = data(case, dtype)
    branch = y if summed else None
    want, plain = exact(x, branch, norm), reference(x, branch, norm)
    got = launch(x, branch, norm)
    assert got.is_contiguous()
    for made in (got, plain):
        assert made.dtype == dtype
        most = FP32 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert float(((made - want).abs() / want.abs().clamp(min=1)).max()) < most
    assert rms(got, want) <= 1.25 * rms(plain, want) + 1e-12
    pair = torch.full((*x.shape[:2], 2 * x.shape[2]), 7.0, dtype=dtype, device=DEVICE)
    for call, whole in ((launch, got), (reference, plain)):
        left, right = pair.chunk(2, dim=-1)
        assert call(x, branch, norm, left) is left
        assert torch.equal(left, whole)
        assert bool((right == 7.0).all())
    if summed and dtype != torch.float32:
        rounded = F.layer_norm(x + y, x.shape[-1:], norm.weight_E, norm.bias_E, norm.eps)
        assert rms(got, want) < rms(rounded, want)


@pytest.mark.parametrize("width", [384, 385])
def test_a_row_depends_on_neither_other_rows_nor_strides_nor_rows_of_a_program(width: int) -> None:
    x, y, norm = data({"batch": 3, "tokens": 11, "width": width, "pad": 0}, torch.float16)
    whole = launch(x, y, norm)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    some = slice(3, 8)
    assert torch.equal(launch(turned, y, norm), whole)
    assert torch.equal(launch(x[1:2, some], y[1:2, some], norm), whole[1:2, some])
    assert torch.equal(launch(x, y, norm, tiled=Tile(4, post_norm.tile(width).warps)), whole)


def test_a_large_mean_does_not_cancel() -> None:
    x, _, norm = data(CASES[0], torch.float32, offset=1e4)
    want = exact(x, None, norm)
    mean, squares = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    careless = (x - mean) * torch.rsqrt(squares - mean.square() + norm.eps) * norm.weight_E + norm.bias_E
    assert float((launch(x, None, norm) - want).abs().max()) < 5e-3
    assert float((careless - want).abs().nan_to_num(1e9).max()) > 5e-3


def test_swapped_and_missing_arguments_are_noticed() -> None:
    """This is a negative control of the bounds above."""
    x, y, norm = data(CASES[1], torch.float32)
    want = exact(x, y, norm)
    swapped, other = Affine(norm.bias_E, norm.weight_E), Affine(norm.weight_E, norm.bias_E, 0.1)
    for wrong in (launch(x, None, norm), launch(x, y, swapped), launch(x, y, other), launch(x, y.flip(0), norm)):
        assert float((wrong - want).abs().max()) > 0.02


def test_arguments_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, norm = data(CASES[2], torch.float16)
    with pytest.raises(ValueError, match="contiguous last dim"):
        launch(x.repeat_interleave(2, -1)[..., ::2], y, norm)
    with pytest.raises(ValueError, match=r"of shapes \[\(2, 2, 1536\), \(2, 3, 1536\)\], expected \(2, 3, 1536\)"):
        launch(x, y[:, :2], norm)
    assert launch(x[:, :0], y[:, :0], norm).shape == (2, 0, 1536)
    for uses in (True, False):
        monkeypatch.setattr(post_norm, "fused", lambda *tensors, uses=uses: uses)
        assert torch.equal(post_norm.post_norm(x, y, norm), (launch if uses else reference)(x, y, norm))
