"""Tests of attention at head dims over 256: against the formula in fp64, with every way to cut the work, and chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqpar.kernels import softmax_weights
from seqpar.kernels.softmax_weights import Tile
from seqpar.local import reference, sdpa, wide
from seqpar.local.wide import Tiling
from seqpar.planner.plan import choose_local
from tests.conftest import DEVICE
from tests.support.meshes import random

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
SMALL = Tile(rows=16, keys=32, dims=64)
overflows = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # weights in fp16 overflow on the way


def views(queries: int, keys: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return q (2, L, 4, D), and k and v (2, L', 2, D), as strided views of packed projections."""
    q, _ = random((2, queries, 4, 2, dim), 0, device, dtype).unbind(3)
    k, v = random((2, keys, 2, 2, dim), 1, device, dtype).unbind(3)
    return q, k, v


def rising(q: Tensor, k: Tensor, most: float) -> None:
    """Change q and k so that the scores of later keys are larger, up to about `most`."""
    q[..., 0], k[..., 0] = q.shape[-1] ** 0.5, torch.linspace(0, most, k.shape[1], device=k.device)[:, None]


def errors(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float, float]:
    """Return the errors against the formula in fp64: of out, of torch's own kernel, and of the log-sum-exp."""
    truth, truth_lse = reference.attend(q.double(), k.double(), v.double())
    plain = sdpa.attend(q, k, v)[0]
    ours, theirs = (float((x.double() - truth).norm() / truth.norm()) for x in (out, plain))
    return ours, theirs, float((lse.double() - truth_lse).abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("cut", [Tiling(64, 128, 3), Tiling(32, 64, 1), Tiling(17, 32, 4), Tiling(64, 32, 2)])
def test_any_cut_of_the_work_is_attention(cut: Tiling, dtype: torch.dtype) -> None:
    q, k, v = views(45, 131, 264, dtype)
    out, lse = wide.attend_in(q, k, v, SMALL, cut)
    ours, plain, far = errors(out, lse, q, k, v)
    assert ours <= 1.25 * plain
    assert far < 1e-5
    assert (out.dtype, lse.dtype, lse.shape) == (dtype, torch.float32, (2, 4, 45))


@overflows
@pytest.mark.parametrize(("queries", "keys", "dim"), [(20, 100, 264), (16, 64, 320)])
@pytest.mark.parametrize("most", [0.0, 40.0])
def test_the_kernel_is_the_formula(
    queries: int, keys: int, dim: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If scores rise far over those of the first keys, all weights are computed again with another shift."""
    monkeypatch.setattr(softmax_weights, "fused", lambda *given: True)
    q, k, v = (x[:1, :, :1] for x in views(queries, keys, dim, torch.float16, DEVICE))
    rising(q, k, most)
    ours, plain, far = errors(*wide.attend_in(q, k, v, SMALL, Tiling(16, 64, 2)), q, k, v)
    assert ours <= 1.25 * plain
    assert far < 1e-4


@overflows
def test_without_a_second_shift_large_scores_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a negative control of the test above."""
    monkeypatch.setattr(softmax_weights, "fused", lambda *given: True)
    monkeypatch.setitem(softmax_weights.ROOM, torch.float16, 1000)
    q, k, v = (x[:1, :, :1] for x in views(16, 64, 264, torch.float16, DEVICE))
    rising(q, k, 40.0)
    assert not wide.attend_in(q, k, v, SMALL, Tiling(16, 64, 1))[0].isfinite().all()


@pytest.mark.parametrize("units", [1, 8, 132, 148])
@pytest.mark.parametrize("keys", [1, 300, 4096, 14400, 16385, 65536, 262144, 1 << 20])
def test_blocks_fill_the_gpu_and_bound_the_memory(keys: int, units: int) -> None:
    tile = Tile()
    cut = wide.blocks(keys, tile, units)
    parts = -(-keys // cut.span)
    assert cut.span % tile.keys == cut.queries % tile.rows == 0
    assert 1 <= cut.together <= parts
    assert cut.queries * cut.span * cut.together <= max(wide.MOST, wide.WAVES * cut.queries * wide.LONGEST)
    programs = cut.queries // tile.rows * cut.together
    assert programs >= min(units, parts) - wide.WAVES


def test_auto_chooses_wide_where_it_wins_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    major = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    for dim in (264, 384, 512, 1024):
        assert choose_local("auto", CUDA, BF16, dim).name == "wide"
        assert choose_local("auto", CUDA, torch.float16, dim).name == "wide"
        assert choose_local("auto", CUDA, BF16, dim, True).name == "sdpa"  # masks
        assert choose_local("auto", CUDA, torch.float32, dim).name == "sdpa"
    assert choose_local("auto", CUDA, BF16, 256).name == "sdpa"
    assert choose_local("auto", CUDA, BF16, 260).name == "reference"
    for major[0] in (8, 10):
        assert choose_local("auto", CUDA, BF16, 512).name == "sdpa"


def test_what_wide_refuses() -> None:
    x = random((1, 2, 1, 264), 0, dtype=BF16)
    assert wide.why_not(torch.device("cpu"), BF16, 512) == "needs a GPU"
    assert wide.why_not(CUDA, BF16, 512, True) == "takes no key masks"
    assert wide.why_not(CUDA, torch.float32, 512) == "takes fp16 and bf16, not torch.float32"
    with pytest.raises(ValueError, match="does not support key masks"):
        wide.attend(x, x, x, torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(
    ("queries", "keys", "dim"), [(257, 1001, 512), (777, 4096, 384), (130, 2500, 1024), (1, 9, 264)]
)
@pytest.mark.parametrize("most", [0.0, 100.0])
def test_gpu_wide_is_as_precise_as_torch(queries: int, keys: int, dim: int, most: float, dtype: torch.dtype) -> None:
    if (reason := wide.why_not(torch.device(DEVICE), dtype, dim)) is not None:
        pytest.skip(reason)
    q, k, v = views(queries, keys, dim, dtype, DEVICE)
    rising(q, k, most)
    out, lse = wide.attend(q, k, v)
    ours, plain, far = errors(out, lse, q, k, v)
    assert ours <= 1.25 * plain
    assert far < 1e-3
    assert lse.shape == (2, 4, queries)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [264, 384, 512])
def test_gpu_sdpa_takes_masks_at_wide_heads(dim: int) -> None:
    q, k, v = views(130, 257, dim, BF16, DEVICE)
    mask = torch.arange(257, device=DEVICE)[None] < torch.tensor([[200], [3]], device=DEVICE)
    out, lse = sdpa.attend(q, k, v, mask)
    truth, truth_lse = reference.attend(q.double(), k.double(), v.double(), mask)
    assert (out.double() - truth).norm() / truth.norm() < 5e-3
    assert (lse.double() - truth_lse).abs().max() < 1e-2
