"""Gate and residual in the epilogue of a branch's last product, against fp64; when it is taken; its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launch.products import RESIDUAL_TILES
from seqpar.kernels import _quack, adaln
from seqpar.kernels import gated_residual as module
from seqpar.kernels._quack import Faster, Tile, tile_for
from seqpar.kernels.adaln import Norm
from seqpar.kernels.gated_residual import CASES, FASTER, launch, linear_gate_norm_modulate, reference
from tests.conftest import DEVICE
from tests.meshes import needs_quack, random

gpu = pytest.mark.gpu
SIZES = [pytest.param(case, id="-".join(map(str, case.values()))) for case in CASES]
SMALL = {"batch": 2, "tokens": 37, "inner": 72, "width": 136}
Case = dict[str, int]


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weights, stream, gate: a slice of a table of modulations, as a model has it."""
    batch, tokens, inner, width = case.values()
    h, x = random((batch, tokens, inner), 0, DEVICE, dtype), random((batch, tokens, width), 2, DEVICE, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = random((batch, 6, width), 3, DEVICE, wide)
    return h, (2 * random((width, inner), 1, DEVICE) / inner**0.5).to(dtype), x, table[:, 2]


def after(width: int) -> tuple[Tensor, Tensor, Norm]:
    """Shift, scale and norm."""
    shift, scale, weight = (random((2, width), seed, DEVICE) for seed in (4, 5, 6))
    return shift, scale, Norm("rms", 1e-5, weight[0])


def rms(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt())


def test_reference_is_the_formula() -> None:
    h, weight, x, gate = data(SMALL, torch.float64)
    torch.testing.assert_close(reference(h, weight, x, gate), x + gate[:, None] * (h @ weight.t()))


@pytest.mark.parametrize("keep", [True, False])
def test_elsewhere_it_is_a_product_and_a_kernel(keep: bool) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        h, weight, x, gate = data(SMALL, dtype)
        got = linear_gate_norm_modulate(h, weight, x, gate, *after(136), 4096, keep=keep)
        want = adaln.gate_norm_modulate(x, gate, F.linear(h, weight), *after(136), keep=keep)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("tokens", [1024, 1025, 4096, 16384])
def test_the_arithmetic_of_a_long_sequence_is_the_same_on_any_number_of_ranks(tokens: int) -> None:
    for found in FASTER.values():
        made = {tile_for(found, rows, tokens) is None for rows in (*range(1, 2049, 7), 2 * tokens)}
        assert len(made) == 1


def test_the_whole_sequence_decides_and_the_norm_sees_what_was_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, x, gate = data(SMALL, torch.bfloat16)
    asked: list[Tile] = []

    def made(h: Tensor, weight: Tensor, x: Tensor, gate: Tensor, *, tiled: Tile) -> Tensor:
        asked.append(tiled)
        return reference(h, weight, x, gate)

    monkeypatch.setattr(_quack, "fused", lambda *tensors: True)
    monkeypatch.setattr(_quack, "why_not", lambda: None)
    monkeypatch.setattr(module, "launch", made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "FASTER", {((9, 0), 136, 72): Faster(100, Tile(128, 192))})
    for tokens in (None, 37, 99):
        linear_gate_norm_modulate(h, weight, x, gate, *after(136), tokens)
    assert not asked
    got = linear_gate_norm_modulate(h, weight, x, gate, *after(136), 100)
    assert asked == [Tile(128, 192)]
    assert torch.equal(got[0], reference(h, weight, x, gate))
    assert torch.equal(got[1], adaln.reference(got[0], None, *after(136))[1])


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_the_sum_is_closer_to_fp64_than_where_the_branch_is_rounded(case: Case) -> None:
    needs_quack()
    h, weight, x, gate = data(case, torch.bfloat16)
    want = reference(h.double(), weight.double(), x.double(), gate.double())
    got = launch(h, weight, x, gate, tiled=RESIDUAL_TILES[0])
    shift, scale, norm = after(case["width"])
    two = adaln.gate_norm_modulate(x, gate, F.linear(h, weight), shift[: len(x)], scale[: len(x)], norm)[0]
    assert rms(got, want) <= rms(two, want)
    other = launch(h, weight, x, gate.flip(-1), tiled=RESIDUAL_TILES[0])
    assert rms(other, want) > 0.1


@gpu
@pytest.mark.parametrize("case", SIZES)
def test_gpu_all_tiles_give_the_same_bits_at_any_number_of_rows(case: Case) -> None:
    """What `FASTER` relies on: few rows may have another tile. Each batch row has a gate of its own."""
    needs_quack()
    h, weight, x, gate = data(case, torch.bfloat16)
    whole = launch(h, weight, x, gate, tiled=RESIDUAL_TILES[0])
    for tile in RESIDUAL_TILES:
        assert torch.equal(launch(h, weight, x, gate, tiled=tile), whole)
        last = slice(len(x) - 1, len(x))
        for some in (slice(0, 1), slice(5, 90), slice(100, 229)):
            part = launch(h[last, some], weight, x[last, some], gate[last], tiled=tile)
            assert torch.equal(part, whole[last, some])
