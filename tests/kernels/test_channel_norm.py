"""Tests of the kernels of RMSNorm over channels and of upsampling by 2, against diffusers' modules and plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import channel_norm, upsample
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, turned
from tests.support.meshes import random

NORMS = [pytest.param(case, marks=gpu if case[-1] > 16 else ()) for case in channel_norm.CASES]
PICTURES = [pytest.param(case, marks=gpu if case[-1] > 16 else ()) for case in upsample.CASES]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the norm in fp64, as diffusers writes it."""
    each = (-1, *[1] * (x.dim() - 2))
    wide = F.normalize(x.double(), dim=1) * x.shape[1] ** 0.5 * weight.double().view(each)
    wide = wide if bias is None else wide + bias.double().view(each)
    return F.silu(wide) if silu else wide


@pytest.mark.parametrize("shape", NORMS, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
def test_the_norm_is_as_close_to_fp64_as_plain_torch(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    """A place of zeros has no direction: it stays zero, or becomes the bias."""
    x = turned(random(shape, 0, DEVICE, dtype), last)
    x[0].select(-1, 1).zero_()
    weight, bias = (random(shape[1:2], seed, DEVICE, dtype) for seed in (1, 2))
    most = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for silu, shift in ((True, None), (False, bias), (True, bias)):
        want = exact(x, weight, shift, silu)
        for norm in (channel_norm.launch, channel_norm.reference):
            got = norm(x, weight, shift, silu)
            assert got.dtype == dtype
            assert got.stride() == x.stride()
            assert float(((got - want).abs() / want.abs().clamp(min=1)).max()) < most
    wrong = channel_norm.launch(x, weight, bias), channel_norm.launch(x, bias, bias, True)  # SiLU, or weights swapped
    assert all(float((got - want).abs().max()) > 0.1 for got in wrong)


@pytest.mark.parametrize("shape", PICTURES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
def test_upsampling_copies_bits(shape: tuple[int, int, int, int], last: bool) -> None:
    x = turned(random(shape, 0, DEVICE, torch.float16), last)
    got = upsample.launch(x)
    assert torch.equal(got, upsample.reference(x))
    assert torch.equal(got, x.repeat_interleave(2, -1).repeat_interleave(2, -2))
    assert last or got.is_contiguous(memory_format=torch.channels_last)


def test_arguments_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random((1, 24, 3, 4), 0, DEVICE), random((24,), 1, DEVICE)
    with pytest.raises(ValueError, match=r"got weights of shapes \[\(12,\)\], expected \(24,\)"):
        channel_norm.launch(x, weight[:12])
    assert channel_norm.launch(x[:, :, :0], weight).shape == (1, 24, 0, 4)
    assert upsample.launch(x[:, :, :0]).shape == (1, 24, 0, 8)
    for uses in (True, False):
        monkeypatch.setattr(channel_norm, "fused", lambda *tensors, uses=uses: uses)
        monkeypatch.setattr(upsample, "fused", lambda *tensors, uses=uses: uses)
        kernel, norm = (file.launch if uses else file.reference for file in (upsample, channel_norm))
        assert torch.equal(upsample.double(x), kernel(x))
        assert torch.equal(channel_norm.channel_norm(x, weight), norm(x, weight))
    wide = random((1, 4096, 2), 0, DEVICE)  # more channels than the kernel takes
    monkeypatch.setattr(channel_norm, "fused", lambda *tensors: True)
    assert torch.equal(channel_norm.channel_norm(wide, wide[0, :, 0]), channel_norm.reference(wide, wide[0, :, 0]))
