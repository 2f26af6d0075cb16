"""Tests of the log-sum-exp merge: attention over split keys is attention over all of them, even with empty parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar.kernels.merge import CASES, launch, merge, reference
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, few

SIZES = few(CASES)
Merge = Callable[..., tuple[Tensor, Tensor]]
INF = float("inf")
FP32 = 4e-6  # largest error against fp64 of values of order 1, and of a log-sum-exp of order 10


def parts(case: dict[str, int], dtype: torch.dtype, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return partial results as torch's kernels do: (B, L, H, D) views of (B, H, L, D) memory, lse strided, too."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens, heads, dim = (case[name] for name in ("batch", "tokens", "heads", "dim"))
    out = torch.randn(count, batch, heads, tokens, dim, generator=generator).to(DEVICE, dtype).transpose(2, 3)
    lse = 4 * torch.randn(count, batch, heads, tokens + 3, generator=generator).to(DEVICE)[..., :tokens]
    return list(zip(out, lse, strict=True))


def exact(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge all parts at once, in fp64."""
    outs, lses = (torch.stack([piece[index].double() for piece in pieces]) for index in (0, 1))
    weights = lses.softmax(0).transpose(2, 3)[..., None]
    return (outs * weights).sum(0), lses.logsumexp(0)


def fold(pieces: list[tuple[Tensor, Tensor]], call: Merge, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    out = lse = None
    for index, piece in enumerate(pieces):
        out, lse = call(out, lse, *piece, dtype=dtype if index + 1 == len(pieces) else None)
    assert out is not None
    assert lse is not None
    return out, lse


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_merging_parts_is_attention_over_all(case: dict[str, int], dtype: torch.dtype, count: int) -> None:
    pieces = parts(case, dtype, count)
    want, plain, got = exact(pieces), fold(pieces, reference), fold(pieces, launch)
    assert got[1].dtype == torch.float32
    assert error(got[1], want[1]) < FP32
    if count > 1:
        assert got[0].dtype == torch.float32
        assert error(got[0], want[0]) < FP32
    rounded, plainly = fold(pieces, launch, dtype)[0], plain[0].to(dtype)
    assert rounded.dtype == dtype
    # fp32 arithmetic and one rounding, as in plain torch; if the dtype is fp32, the bound above holds
    assert error(rounded, want[0]) <= max(1.25 * error(plainly, want[0]), FP32)


@pytest.mark.parametrize("call", [launch, reference])
def test_empty_sides_do_not_count(call: Merge) -> None:
    """They do not count even if their values are NaN; two of them are empty."""
    (full, lse), (empty, none) = parts(CASES[1], torch.float16, 2)
    empty, none = torch.full_like(empty, torch.nan), torch.full_like(none, -INF)
    for pieces in ([(full, lse), (empty, none)], [(empty, none), (full, lse)]):
        out, merged = fold(pieces, call)
        assert torch.equal(out, full.float())
        assert torch.equal(merged, lse)
    out, merged = fold([(empty, none), (empty, none)], call)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((merged == -INF).all())


@pytest.mark.parametrize("gap", [1e4, -1e4, 80.0, -80.0])
def test_nothing_overflows(gap: float) -> None:
    pieces = parts(CASES[1], torch.float32, 2)
    pieces[1] = (pieces[1][0], pieces[1][1] + gap)
    want, got = exact(pieces), fold(pieces, launch)
    assert error(got[0], want[0]) < FP32
    assert error(got[1], want[1]) < 1e-3  # half a unit in the last place of 1e4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_updated_in_place_and_parts_are_left_as_they_were(dtype: torch.dtype) -> None:
    pieces = parts(CASES[2], dtype, 4)
    before = [(out.clone(), lse.clone()) for out, lse in pieces]
    state = fold(pieces[:2], launch)
    out, lse = launch(*state, *pieces[2])
    assert out is state[0]
    assert lse is state[1]
    assert launch(out, lse, *pieces[3], dtype=torch.float16)[0].dtype == torch.float16
    pairs = zip(pieces, before, strict=True)
    assert all(torch.equal(a, b) for piece, copy in pairs for a, b in zip(piece, copy, strict=True))


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    pieces = parts(CASES[2], torch.float16)
    whole = fold(pieces, launch)
    for some in (slice(0, 1), slice(30, 47), slice(80, 85)):
        out, lse = fold([(out[:, some], lse[..., some]) for out, lse in pieces], launch)
        assert torch.equal(out, whole[0][:, some])
        assert torch.equal(lse, whole[1][..., some])


def test_odd_strides_and_swapped_weights() -> None:
    pieces = parts({"batch": 2, "tokens": 5, "heads": 3, "dim": 7}, torch.float16)
    want = exact(pieces)
    assert error(fold(pieces, launch)[0], want[0]) < FP32
    swapped = [(out, lse) for (out, _), (_, lse) in zip(pieces, pieces[::-1], strict=True)]
    assert error(fold(swapped, launch)[0], want[0]) > 0.1  # a negative control


def test_fp64_stays_fp64() -> None:
    pieces = [(out.double(), lse.double()) for out, lse in parts(CASES[1], torch.float32)]
    out, lse = fold(pieces, merge)
    want = exact(pieces)
    assert max(error(out, want[0]), error(lse, want[1])) < 1e-12
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize("function", [launch, reference])
def test_nan_comes_out(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Merge three parts, of which the second is NaN: the third must not hide it."""
    part, lse = torch.ones(1, 2, 1, 8, device=DEVICE), torch.zeros(1, 1, 2, device=DEVICE)
    broken = torch.tensor([0.0, float("nan")], device=DEVICE).view(1, 1, 2)
    state = function(None, None, part, lse)
    state = function(*state, part + broken.view(1, 2, 1, 1), lse + broken)
    out, total = function(*state, part, lse)
    assert out[0, :, 0, 0].isnan().tolist() == [False, True]
    assert total[0, 0].isnan().tolist() == [False, True]
