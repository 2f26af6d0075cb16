"""Tests of the push kernel against copies: each token goes to its rank's view, and nothing else is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.kernels import push
from seqpar.kernels.push import CASES, Destinations
from seqpar.mesh.shard import Shard
from tests.conftest import DEVICE
from tests.support.pairs import covering

DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
FEW, MANY = (85, 85) if DEVICE == "cuda" else (11, 43)  # tokens; the interpreter needs milliseconds for one
SMALL = [case for case in CASES if DEVICE == "cuda" or case["tokens"] * case["batch"] <= 256] + [
    {"batch": 2, "tokens": FEW, "heads": 2, "dim": 72},
    {"batch": 1, "tokens": 4, "heads": 40, "dim": 128},  # a row of several programs
]


def views(case: dict[str, int], parts: int, dtype: torch.dtype, pad: int) -> tuple[list[Tensor], Tensor]:
    """Return each rank's view, some heads of a wider output, and the whole memory behind them, all poisoned."""
    batch, tokens, heads, dim = case.values()
    wide = heads + pad
    memory = torch.full((batch * tokens * wide * dim,), float("nan"), dtype=dtype, device=DEVICE)
    found, start = [], 0
    for size in Shard(tokens, parts).sizes:
        count = batch * size * wide * dim
        out = memory[start : start + count].view(batch, size, wide, dim)
        found.append(out[:, :, pad:].transpose(0, 1))
        start += count
    return found, memory


def output(case: dict[str, int], strides: str, dtype: torch.dtype) -> Tensor:
    """Return (B, L, h, D) with these strides: a token's heads adjacent, with or without gaps, or head-major."""
    batch, tokens, heads, dim = case.values()
    if strides == "heads apart":
        return torch.randn(batch, heads, tokens, dim, device=DEVICE).to(dtype).transpose(1, 2)
    more = strides == "slab"
    return torch.randn(tokens, batch, heads + more, dim, device=DEVICE).to(dtype)[:, :, more:].transpose(0, 1)


STRIDES = ["contiguous", "slab", "heads apart"]


# each case with each number of parts; dtypes and strides take turns
TURNS = [pytest.param(dtype, strides) for strides in STRIDES for dtype in DTYPES]


@pytest.mark.parametrize(("case", "parts", "dtype", "strides"), covering(SMALL, (1, 2, 3, 4), turns=TURNS), ids=str)
def test_push_writes_every_token_and_nothing_else(
    case: dict[str, int], parts: int, dtype: torch.dtype, strides: str
) -> None:
    out = output(case, strides, dtype)
    into, memory = views(case, parts, dtype, pad=3)
    expected, truth = views(case, parts, dtype, pad=3)
    for first in {0, parts - 1}:
        memory.fill_(float("nan"))
        push.launch(out, Destinations(into, first))
        push.reference(out, Destinations(expected, first))
        assert torch.equal(memory.nan_to_num(7.0), truth.nan_to_num(7.0))


@pytest.mark.parametrize("programs", [1, 8, 32])
@pytest.mark.parametrize("parts", [1, 3])
def test_push_by_programs_of_several_rows(monkeypatch: pytest.MonkeyPatch, parts: int, programs: int) -> None:
    """A program moves several rows if there are many; the last program of a batch row has fewer."""
    monkeypatch.setattr(push, "PROGRAMS", programs)
    many = {"batch": 2, "tokens": MANY, "heads": 2, "dim": 72}
    test_push_writes_every_token_and_nothing_else(many, parts, DTYPES[-1], "slab")


def test_push_negative_control_another_order_of_ranks_is_noticed() -> None:
    case = {"batch": 1, "tokens": 8, "heads": 2, "dim": 8}
    out = torch.randn(1, 8, 2, 8, device=DEVICE)
    into, memory = views(case, 2, torch.float32, pad=0)
    push.launch(out, Destinations(into[::-1]))
    assert not torch.equal(memory, out.flatten())


def test_push_refuses_views_that_it_would_write_wrongly() -> None:
    out = torch.randn(1, 8, 2, 8, device=DEVICE)
    strided = torch.empty(8, 1, 2, 16, device=DEVICE)[..., :8]
    with pytest.raises(ValueError, match="strided heads"):
        push.launch(out, Destinations([strided]))
    apart = torch.randn(1, 8, 2, 16, device=DEVICE)[..., ::2]
    with pytest.raises(ValueError, match="contiguous last dim"):
        push.launch(apart, Destinations([torch.empty(8, 1, 2, 8, device=DEVICE)]))
