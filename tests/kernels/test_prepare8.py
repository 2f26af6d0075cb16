"""Tests of rounding q, k and v to e4m3 into outboxes: every norm and rotary, any heads, any destinations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.kernels.prepare8 import CASES, _run, block_of, launch, launch_into, prepare8, reference, restored, rotated
from seqpar.kernels.rows8 import E4M3
from seqpar.types.outboxes import Outbox, Outboxes
from seqpar.types.protocols import Prepare, Qkv8
from tests.conftest import DEVICE
from tests.kernels.shared import gpu
from tests.kernels.test_prepare import NORMS, ROTARY, preparation, project
from tests.support.meshes import random
from tests.support.pairs import covering

Case = dict[str, int]
SMALL = [case for case in CASES if case["tokens"] < 100]
DTYPE = torch.bfloat16 if DEVICE.startswith("cuda") else torch.float16  # the interpreter has no bf16


def eight(groups: int, dim: int, dtype: torch.dtype, device: str = DEVICE) -> Qkv8:
    """Return centres, and scales of k, that differ between heads."""
    k_scale = 2.0 ** (torch.arange(groups, device=device) % 4 - 2)
    centres = [random((groups, dim), seed, device) for seed in (31, 32)]
    return Qkv8(k_scale, centres[0], 4.0, centres[1].to(dtype))


def inputs(case: Case, norm: str = "none", rotary: str = "none") -> tuple[Tensor, Tensor, Tensor, Prepare]:
    how = replace(preparation(case, norm, rotary, DTYPE), eight=eight(case["kv_heads"], case["dim"], DTYPE))
    q, k, v = project(case, DTYPE)
    return q, k, v, how


def is_near(got: Tensor, want: Tensor) -> bool:
    """Return whether numbers are equal or neighbours in e4m3: a sum in another order may round to the other side."""
    a, b = got.double(), want.double()
    # Triton's interpreter halves numbers that it rounds up to a power of two
    powers = (a.abs().log2().frac() == 0) | (b.abs().log2().frac() == 0)
    same = ~powers if DEVICE == "cpu" else torch.ones_like(powers)
    near = (a - b).abs() <= (0.126 * b.abs()).clamp(min=2**-8)
    return bool(near[same].all()) and float((a != b)[same].double().mean()) < 0.02


@pytest.mark.parametrize(("norm", "rotary", "case"), covering(NORMS, ROTARY, turns=range(len(SMALL))))
def test_kernel_is_the_reference(norm: str, rotary: str, case: int) -> None:
    q, k, v, how = inputs(SMALL[case], norm, rotary)
    made = prepare8 if rotary == "some halves" else launch  # which the kernel does not take
    wide = torch.float32 if made is launch else DTYPE  # the kernel rounds once, at the end
    wanted = reference(q.to(wide), k.to(wide), v.to(wide), how)
    for got, want in zip(made(q, k, v, how), wanted, strict=True):
        assert want is not None
        assert got.dtype == want.dtype == E4M3
        assert is_near(got, want)


def test_keys_may_be_more_than_queries() -> None:
    q, k, v, how = inputs(SMALL[0])
    for got, want in zip(launch(q[:, :2], k, v, how), launch(q, k, v, how), strict=True):
        assert torch.equal(got.double(), want[:, : got.shape[1]].double())
    with pytest.raises(ValueError, match="different numbers of tokens"):
        _run(q[:, :2], k, v, how, launch(q, k, v, how))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_outboxes_get_what_one_reader_gets_and_a_part_alone_has_the_same_bits(case: Case) -> None:
    q, k, v, how = inputs(case, "rms per head", "pairs")
    whole = launch(q, k, v, how)
    batch, tokens, heads, groups, dim = case.values()
    each, made = heads // groups, []
    for start, stop in ((0, 1), (1, groups), (0, groups)):
        h, g = (stop - start) * each, stop - start
        slab = torch.zeros((tokens, batch, h + 2 * g, dim), dtype=E4M3, device=DEVICE)
        to_q, to_k, to_v = slab.split((h, g, g), dim=2)
        made.append(Outbox(to_q, to_k, to_v, slice(start * each, stop * each), slice(start, stop)))
    boxes = Outboxes(made)
    launch_into(q, None, None, how, boxes)
    launch_into(None, k, v, how, boxes)
    for box in boxes:
        for view, x, of in zip((box.q, box.k, box.v), whole, (box.heads, box.kv_heads, box.kv_heads), strict=True):
            assert view is not None
            got, want = view.transpose(0, 1), x[:, :, of]
            assert torch.equal(got.double(), want.double())


def test_numbers_over_the_largest_are_cut_and_nan_stays() -> None:
    case = SMALL[1]
    q, k, v, how = inputs(case)
    v = (v * 1e4).clamp(-6e4, 6e4)
    v[0, 0, 0, 0] = torch.nan
    for of in (launch, reference):
        got = of(q, k, v, how)[2]
        assert got is not None
        # Triton's interpreter has no NaN of e4m3
        assert got.isnan().sum() == (0 if of is launch and DEVICE == "cpu" else 1)
        assert got.double().nan_to_num().abs().max() == 448


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
def test_rotation_leaves_products_and_spreads_an_outlier(dim: int) -> None:
    q, k = (random((7, dim), seed) for seed in range(2))
    torch.testing.assert_close(rotated(q) @ rotated(k).T, q @ k.T, rtol=1e-13, atol=1e-13)
    assert rotated(torch.eye(dim)[3]).abs().max() == pytest.approx(block_of(dim) ** -0.5)


def test_the_centre_and_the_scale_come_back() -> None:
    how = eight(3, 32, torch.float32, "cpu")
    out = random((2, 5, 6, 32), 0, dtype=torch.float32)
    raw = (out - how.v_centre_GD.repeat_interleave(2, 0)) * how.v_scale
    torch.testing.assert_close(restored(raw, how, torch.float32), out)


@gpu
@pytest.mark.parametrize("case", [case for case in CASES if case["tokens"] > 100], ids=str)
def test_gpu_rows_have_the_same_bits_among_other_rows(case: Case) -> None:
    q, k, v, how = inputs(case)
    whole = launch(q, k, v, how)
    some = slice(13, 1000)
    for got, want in zip(launch(q[:, some], k[:, some], v[:, some], how), whole, strict=True):
        assert torch.equal(got.view(torch.uint8), want[:, some].view(torch.uint8))
    for got, want in zip(whole, reference(q, k, v, how), strict=True):
        assert want is not None
        assert is_near(got, want)
