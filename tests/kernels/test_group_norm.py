"""Tests of GroupNorm's kernels against fp64: moments of parts, their combination, and the normalisation with SiLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import group_norm
from seqpar.kernels.group_norm import CASES, Affine
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, turned
from tests.support.meshes import random
from tests.support.pairs import covering

# on CPUs there are half as many groups, because the interpreter needs milliseconds for each
SMALL = [
    {"shape": (case["shape"][0], case["shape"][1] // 2, *case["shape"][2:]), "groups": case["groups"] // 2}
    for case in CASES
    if case["shape"][-1] <= 40
]
SIZES = [*SMALL, *(pytest.param(case, marks=gpu) for case in CASES)]
FP32 = 2e-5  # largest error against fp64 for values of order 1


def data(case: dict[str, Any], dtype: torch.dtype, last: bool, offset: float = 0.0) -> tuple[Tensor, Affine]:
    x = random(case["shape"], 0, DEVICE, dtype) + offset
    channels = x.shape[1]
    weight, bias = 1 + 0.3 * random((channels,), 1, DEVICE, dtype), random((channels,), 2, DEVICE, dtype)
    return turned(x, last), Affine(weight, bias)


def exact(x: Tensor, groups: int, affine: Affine, silu: bool) -> Tensor:
    weight, bias = (None if each is None else each.double() for each in affine[:2])
    wide = F.group_norm(x.double().contiguous(), groups, weight, bias, affine.eps)
    return F.silu(wide) if silu else wide


@pytest.mark.parametrize(("case", "last", "dtype"), covering(SIZES, [True, False], turns=DTYPES, rest=gpu))
def test_kernels_are_as_close_to_fp64_as_plain_torch(case: dict[str, Any], dtype: torch.dtype, last: bool) -> None:
    """Two parts of the places, combined, normalise each other as the whole; layout and dtype stay."""
    x, affine = data(case, dtype, last)
    groups, most = case["groups"], FP32 if dtype == torch.float32 else torch.finfo(dtype).eps
    halves = [turned(part, last) for part in (x[:, :, :3], x[:, :, 3:])]
    for moments, combine, normalise in (
        (group_norm.launch_moments, group_norm.launch_combine, group_norm.launch_normalise),
        (group_norm.reference_moments, group_norm.reference_combine, group_norm.reference_normalise),
    ):
        of_both = combine(torch.stack([moments(part, groups) for part in halves]))
        torch.testing.assert_close(of_both, moments(x, groups), rtol=1e-5, atol=1e-6)
        for silu in (False, True):
            want, got = exact(x, groups, affine, silu), normalise(x, of_both, affine, silu)
            assert got.dtype == dtype
            assert got.stride() == x.stride()
            assert float(((got - want).abs() / want.abs().clamp(min=1)).max()) < most


@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_an_output_between_the_rows_of_neighbours_gets_the_same_bits(last: bool, dim: int) -> None:
    """The rows, columns or frames around it keep their values; a tensor with gaps along two dims is refused."""
    x, affine = data(SMALL[1], torch.float16, last)
    found = group_norm.launch_moments(x, 2)
    want = group_norm.launch_normalise(x, found, affine)
    shape = list(x.shape)
    shape[dim] += 3
    for normalise in (group_norm.launch_normalise, group_norm.reference_normalise):
        wide = turned(torch.full(shape, 7.0, dtype=x.dtype, device=DEVICE), last)
        inside = wide.narrow(dim, 1, x.shape[dim])
        assert normalise(x, found, affine, False, inside) is inside
        torch.testing.assert_close(inside, want, rtol=2e-3, atol=2e-3)
        assert bool((wide.narrow(dim, 0, 1) == 7.0).all())
        assert bool((wide.narrow(dim, x.shape[dim] + 1, 2) == 7.0).all())
        if normalise is group_norm.launch_normalise:
            assert torch.equal(inside, want)
    gaps = turned(torch.zeros(2, 12, 4, 7, 9, dtype=x.dtype, device=DEVICE), last)[:, :, 1:, 1:6, 1:8]
    with pytest.raises(ValueError, match="expected gaps along one dim"):
        group_norm.launch_normalise(x, found, affine, False, gaps)


@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
def test_a_large_mean_does_not_cancel(last: bool) -> None:
    x, affine = data(CASES[2], torch.float32, last, offset=1e4)
    want = exact(x, 16, affine, False)
    got = group_norm.launch_normalise(x, group_norm.launch_moments(x, 16), affine)
    wide = x.reshape(2, 16, -1)
    variance = wide.square().mean(-1) - wide.mean(-1).square()  # of two large sums: the careless way
    careless = (wide - wide.mean(-1)[..., None]) * torch.rsqrt(variance[..., None] + affine.eps)
    assert float((got - want).abs().max()) < 2e-2
    plain = exact(x, 16, Affine(None, None), False).reshape(wide.shape)
    assert float((careless - plain).abs().nan_to_num(1e9).max()) > 2e-2


def test_moments_of_no_places_count_nothing_and_memory_in_another_order_is_copied() -> None:
    x, _ = data(CASES[1], torch.float16, True)
    whole = group_norm.launch_moments(x, 4)
    for moments in (group_norm.launch_moments, group_norm.reference_moments):
        none = moments(x[:, :, :0], 4)
        assert not none.any()
        torch.testing.assert_close(group_norm.launch_combine(torch.stack((none, whole))), whole)
        assert torch.equal(group_norm.reference_combine(torch.stack((none, none))), none)
    turned = x.transpose(3, 4).contiguous().transpose(3, 4)
    assert torch.equal(group_norm.launch_moments(turned, 4), whole)
    plain = Affine(None, None)
    got = group_norm.launch_normalise(turned, whole, plain, True)
    assert torch.equal(got, group_norm.launch_normalise(x, whole, plain, True))
    assert float((got - exact(x, 4, plain, True)).abs().max()) < 5e-3


def test_arguments_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, affine = data(CASES[1], torch.float16, False)
    found = group_norm.launch_moments(x, 4)
    with pytest.raises(ValueError, match="got 24 channels and 5 groups"):
        group_norm.launch_moments(x, 5)
    with pytest.raises(ValueError, match="memory format"):
        group_norm.launch_normalise(x, found, affine, False, torch.empty_like(x, memory_format=torch.contiguous_format))
    with pytest.raises(ValueError, match=r"moments \(2, 4, 2\)"):
        group_norm.launch_normalise(x, found[..., :2], affine)
    for uses in (True, False):
        monkeypatch.setattr(group_norm, "fused", lambda *tensors, uses=uses: uses)
        want = (group_norm.launch_moments if uses else group_norm.reference_moments)(x, 4)
        assert torch.equal(group_norm.moments(x, 4), want)
