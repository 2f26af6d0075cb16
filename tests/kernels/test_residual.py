"""Tests of the kernel that adds two outputs of convolutions and their biases, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.kernels import residual
from seqpar.kernels.residual import CASES, Shifted
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, turned
from tests.support.meshes import random

SIZES = [pytest.param(shape, marks=gpu if shape[-1] > 8 else ()) for shape in CASES]


def exact(*pairs: Shifted | None) -> Tensor:
    """Return the sum in fp64."""
    given = [pair for pair in pairs if pair is not None]
    each = (-1, *[1] * (given[0][0].dim() - 2))
    return sum(
        (x.double() + (0 if b is None else b.double().view(each)) for x, b in given), torch.zeros((), device=DEVICE)
    )


@pytest.mark.parametrize("shape", SIZES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_rounded_once_and_may_replace_an_input(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = (turned(random(shape, seed, DEVICE, dtype)) for seed in (0, 1))
    bias, other = (random(shape[1:2], seed, DEVICE, dtype) for seed in (2, 3))
    most = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for first, second in (((x, bias), (y, other)), ((x, None), (y, other)), ((x, bias), (y, None)), ((x, bias), None)):
        want = exact(first, second)
        for add in (residual.launch, residual.reference):
            got = add(first, second)
            assert got.stride() == x.stride()
            assert got.dtype == dtype
            assert float(((got - want).abs() / want.abs().clamp(min=1)).max()) < most
            inside = first[0].clone()
            assert add((inside, first[1]), second, inside) is inside
            assert torch.equal(inside, got)
    assert float((residual.launch((x, other), (y, other)) - exact((x, bias), (y, other))).abs().max()) > 0.1


def test_contiguous_pictures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random((1, 32, 8, 8), 0, DEVICE)
    with pytest.raises(ValueError, match="in channels-last memory"):
        residual.launch((turned(x), None), (x, None))
    for uses in (True, False):
        monkeypatch.setattr(residual, "fused", lambda *tensors, uses=uses: uses)
        want = (residual.launch if uses else residual.reference)((turned(x), x[0, :, 0, 0]))
        assert torch.equal(residual.add((turned(x), x[0, :, 0, 0])), want)
