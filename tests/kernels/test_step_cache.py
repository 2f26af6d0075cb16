"""Tests the kernels of a step cache: sums that no split changes, and a stream from residuals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.kernels import step_cache
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES
from tests.support.meshes import random

STREAMS = 5  # x, start, before, and two residuals


def streams(case: dict[str, int], dtype: torch.dtype) -> list[Tensor]:
    shape = (case["batch"], case["tokens"], case["width"] + case["pad"])
    return [random(shape, seed, DEVICE, dtype)[..., : case["width"]] for seed in range(STREAMS)]


def change(call: str, x: Tensor, start: Tensor, before: Tensor) -> list[int]:
    sums = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    getattr(step_cache, f"{call}_change")(x, start, before, sums)
    return sums.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", step_cache.CASES)
def test_the_kernels_compute_what_their_references_do(case: dict[str, int], dtype: torch.dtype) -> None:
    x, start, before, first, second = streams(case, dtype)
    if case.get("transposed"):
        x, start = (y.mT.contiguous().mT for y in (x, start))
    assert change("launch", x, start, before) == change("reference", x, start, before)
    for count in (1, 2, 3):
        residuals, out = [first, second, before][:count], torch.empty_like(before)
        weights = torch.tensor([1.75, -1.25, 0.5][:count], dtype=torch.float64, device=DEVICE)
        step_cache.launch_extrapolate(x, residuals, weights, out)
        wanted = x.double() + sum(weight * y.double() for weight, y in zip(weights, residuals, strict=True))
        assert (out - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()


def test_sums_are_those_of_all_parts_whatever_the_split() -> None:
    x, start, before, *_ = streams({"batch": 2, "tokens": 7, "width": 40, "pad": 8}, torch.float32)
    whole = change("launch", x, start, before)
    for sizes in ([3, 4], [2, 2, 3], [7]):
        parts = zip(*(y.split(sizes, 1) for y in (x, start, before)), strict=True)
        assert [sum(two) for two in zip(*(change("launch", *part) for part in parts), strict=True)] == whole
    # what no sum may overflow, or hide
    x[0, 0, 0], x[0, 0, 1] = torch.inf, torch.nan
    assert change("launch", x, start, before) == change("reference", x, start, before)
    assert change("launch", x, start, before)[0] > 2 * step_cache.MOST
