"""Shared by tests of kernels. bf16 and large cases run on GPUs alone: the interpreter is slow and has no bf16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]


def few(cases: Iterable[dict[str, int]], most: int = 85) -> list[Any]:
    """Return cases as parameters; cases with more than `most` tokens run on GPUs alone."""
    return [pytest.param(case, marks=gpu if case["tokens"] > most else ()) for case in cases]


def rms(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt())


def turned(x: Tensor, last: bool = False) -> Tensor:
    """Return x in contiguous (`last`: its places come last) or channels-last memory."""
    return x.contiguous() if last else x.movedim(1, -1).contiguous().movedim(-1, 1)
