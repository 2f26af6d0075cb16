"""Tests of what single kernels promise: limits, layouts, tables of rows, memory of results, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from seqpar.kernels import activations, adaln, group_norm, images, post_norm
from seqpar.kernels.adaln import Gated, Norm, Summed
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, rms, turned
from tests.kernels.test_kernels import (
    FP32,
    ROWS,
    VISIBLE,
    Case,
    double,
    error,
    exact_gelu,
    gelu,
    modulated,
    modulation,
    of_groups,
    of_sum,
    projected,
    shifted,
    silu,
    vector,
    with_bias,
)
from tests.support.meshes import random

# numpy warns in the interpreter: exp(-x) is infinite far below 0, and x / inf is the right limit
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


def test_results_may_take_the_place_of_inputs_or_lie_beside_others() -> None:
    x, bias = with_bias(activations.CASES[-1], torch.float16)
    over = x.clone()
    assert activations.launch_gelu(over, bias, reuse=True) is over
    assert torch.equal(over, activations.launch_gelu(x, bias))
    x, y, norm = of_sum(post_norm.CASES[2], torch.float16)
    for call in (post_norm.launch, post_norm.reference):
        left, right = torch.full((*x.shape[:2], 2 * x.shape[2]), 7.0, dtype=x.dtype, device=DEVICE).chunk(2, -1)
        assert call(x, y, norm, left) is left
        assert torch.equal(left, call(x, y, norm))
        assert bool((right == 7.0).all())
    first, second = shifted("xy")({"shape": images.CASES[1]}, torch.float16)
    for call in (images.launch_sum, images.reference_sum):
        inside = first[0].clone()
        assert call((inside, first[1]), second, inside) is inside
        assert torch.equal(inside, call(first, second))


X, E = random((2, 3, 24), 0, DEVICE, FP32), random((24,), 1, DEVICE, FP32)
IMAGE = random((2, 24, 3, 5), 0, DEVICE, FP32)
STRIDED = X.repeat_interleave(2, -1)[..., ::2]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "adaln, strides": (lambda: adaln.launch(STRIDED, None, X[:, 0], X[:, 1], Norm()), "contiguous last dim"),
    "post_norm, strides": (lambda: post_norm.launch(STRIDED, X, post_norm.Affine(E, E)), "contiguous last dim"),
    "post_norm, shapes": (
        lambda: post_norm.launch(X, X[:, :2], post_norm.Affine(E, E)),
        r"of shapes \[\(2, 2, 24\), \(2, 3, 24\)\], expected \(2, 3, 24\)",
    ),
    "gelu": (
        lambda: activations.launch_gelu(X.transpose(0, 1), None, reuse=True),
        "with reuse, expected a contiguous tensor",
    ),
    "gate": (lambda: activations.launch_gate(X, X.transpose(0, 1)), "expected a contiguous one"),
    "channel_norm": (lambda: images.launch_norm(IMAGE, E[:12]), r"got weights of shapes \[\(12,\)\], expected \(24,\)"),
    "residual": (lambda: images.launch_sum((turned(IMAGE), None), (IMAGE, None)), "in channels-last memory"),
    "group_norm, shift": (lambda: group_norm.launch_moments(IMAGE, 4, E), "expected channels-last memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("case", "kind"), [(adaln.CASES[1], "layer"), (adaln.CASES[2], "rms"), (ROWS, "layer")])
def test_tokens_may_have_rows_of_a_table(case: Case, kind: str) -> None:
    """The truth modulates each token as a batch row; one row for each image gives the bits of no index."""
    x, gated, shift, scale, norm = modulation(kind, True, True)(case, torch.float32)
    batch, tokens, width = x.shape
    index = torch.randint(5, (batch, tokens), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    # five rows, of which one is the same for all and two share a vector; rows of other vectors lie between
    table, shared = 0.5 * random((5, 3, width), 4, DEVICE, FP32), 0.5 * random((3, width), 5, DEVICE, FP32)
    gate, low, high = Summed(table[:, 0], shared[0]), table[:1, 1], Summed(table[:, 2], shared[2])
    per_token = [table[:, 0][index] + shared[0], table[0, 1].expand_as(x), table[:, 2][index] + shared[2]]
    flat = [y.double().flatten(0, 1) for y in (*per_token, x, gated.branch_BlE)]
    want = modulated(flat[3][:, None], Gated(flat[0], flat[4][:, None]), flat[1], flat[2], *double((norm,)))
    of = Gated(gate, gated.branch_BlE)
    for call in (adaln.launch, adaln.reference):
        got = call(x, of, low, high, norm, index_Bl=index.int())
        assert error(tuple(y.flatten(0, 1)[:, None] for y in got), want) < 2e-5
        other = call(x, of, low, high, norm, index_Bl=(index.int() + 1) % 5)
        assert error(tuple(y.flatten(0, 1)[:, None] for y in other), want) > 0.1
        same = torch.arange(batch, device=DEVICE, dtype=torch.int32)[:, None]
        bits = zip(call(x, gated, shift, scale, norm, index_Bl=same), call(x, gated, shift, scale, norm), strict=True)
        assert all(torch.equal(a, b) for a, b in bits)
    assert torch.equal(
        adaln.launch(x, of, index_Bl=index.int())[0], adaln.launch(x, of, low, high, norm, index_Bl=index.int())[0]
    )
    plain = adaln.added(x, gate, gated.branch_BlE, index_Bl=index.int())
    assert error(plain.flatten(0, 1)[:, None], want[0]) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed_branch", [False, True])
def test_the_sum_alone_has_the_bits_of_the_sum_before_a_norm(dtype: torch.dtype, normed_branch: bool) -> None:
    x, gated, shift, scale, norm = modulation("rms", True, True, normed_branch)(adaln.CASES[2], dtype)
    got = adaln.launch(x, gated)[0]
    assert torch.equal(got, adaln.launch(x, gated, shift, scale, norm)[0])
    want = modulated(*double((x, gated, shift, scale, norm)))[0]
    plain = adaln.added(x, gated.gate_BE, gated.branch_BlE, branch_norm=gated.norm)
    assert plain.dtype == dtype
    assert error((got, plain), (want, want)) <= max(2e-5, torch.finfo(dtype).eps)
    assert error(x, want) > 0.1


def test_adaln_of_the_last_layer_constant_rows_and_one_vector_for_all() -> None:
    x, gated, shift, scale, norm = modulation("layer", True, True)(ROWS, torch.float16)
    whole = adaln.launch(x, gated, shift, scale, norm)
    for call in (adaln.launch, adaln.reference):
        x_new, h = call(x, gated, shift, scale, norm, keep=False)
        assert x_new is x  # the sum is not written
        assert torch.equal(h, call(x, gated, shift, scale, norm)[1])
    expanded = adaln.launch(x, gated, shift[:1].expand_as(shift), scale, norm)
    assert torch.equal(expanded[1], adaln.launch(x, gated, shift[:1], scale, norm)[1])
    # the norm sees the sum before it is rounded
    want = modulated(*double((x, gated, shift, scale, norm)))[1]
    late = adaln.launch(whole[0], None, shift, scale, norm)[1]
    assert rms(whole[1], want) < 0.9 * rms(late, want)
    x = torch.tensor([0.0, 3.0]).repeat_interleave(384).view(1, 2, 384).to(DEVICE)
    shift, scale = torch.ones(1, 384, device=DEVICE), torch.zeros(1, 384, device=DEVICE)
    # the mean may be off by one unit in the last place, times 1 / sqrt(eps); torch's own norm is no better
    assert (adaln.launch(x, None, shift, scale, Norm())[1] - 1).abs().max() < 1e-3
    assert torch.equal(adaln.launch(x[:, :1], None, shift, scale, Norm("rms"))[1], torch.ones_like(x[:, :1]))


def test_activations_far_out_are_their_limits() -> None:
    far = torch.tensor([[[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1.0]]], device=DEVICE)
    for got, want in (
        (activations.launch_swiglu(torch.cat((far, torch.ones_like(far)), -1)), silu(far.double())),
        (activations.launch_gelu(far, None), gelu(far.double(), None)),
        (activations.launch_gelu(far, None, exact=True), exact_gelu(far.double(), None)),
        (activations.launch_gelu(far.half(), None, exact=True), exact_gelu(far.double(), None)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5 if got.dtype == torch.float32 else 1e-3, atol=1e-6)
    broken = torch.full((1, 1, 8), float("nan"), device=DEVICE, dtype=torch.float16)
    assert bool(activations.launch_gelu(broken, None, exact=True).isnan().all())  # bounds must not hide it
    assert error(gelu(far, None), exact_gelu(far, None)) > 1e-5 < error(gelu(X, None), exact_gelu(X, None))


@pytest.mark.parametrize("tile", [(4, 256, 2), (2, 1024, 4)])
@pytest.mark.parametrize("width", [40, 1544])
def test_tiles_of_activations_change_no_bits(
    tile: tuple[int, int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns do not fill a tile, and a program has more rows than there are."""
    case = {"batch": 3, "tokens": 3, "width": width}
    packed, (x, bias) = projected(case, torch.float16, 2), with_bias(case, torch.float16)
    want = activations.launch_swiglu(packed), activations.launch_gelu(x, bias)
    monkeypatch.setattr(activations, "tile", lambda width, rows=1: activations.Tile(*tile))
    assert torch.equal(activations.launch_swiglu(packed), want[0])
    assert torch.equal(activations.launch_gelu(x, bias), want[1])
    assert torch.equal(activations.launch_gelu(x[:1, :1], bias), want[1][:1, :1])


def test_moments_of_no_places_count_nothing_and_memory_in_another_order_is_copied() -> None:
    x = random((2, 24, 3, 5, 7), 0, DEVICE, torch.float16)
    whole, plain = group_norm.launch_moments(x, 4), group_norm.Affine(None, None)
    for moments in (group_norm.launch_moments, group_norm.reference_moments):
        nothing = moments(x[:, :, :0], 4)
        assert not nothing.any()
        torch.testing.assert_close(group_norm.launch_combine(torch.stack((nothing, whole))), whole)
        assert torch.equal(group_norm.reference_combine(torch.stack((nothing, nothing))), nothing)
    apart = x.transpose(3, 4).contiguous().transpose(3, 4)
    assert torch.equal(group_norm.launch_moments(apart, 4), whole)
    got = group_norm.launch_normalise(apart, whole, plain, True)
    assert torch.equal(got, group_norm.launch_normalise(x, whole, plain, True))
    assert error(got, of_groups(x.double(), 4, plain, True)) < 5e-3


def test_moments_and_norms_of_a_shifted_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift is added without rounding; public functions take the kernels on GPUs."""
    x, shift = turned(IMAGE.half()), E.half()
    affine = group_norm.Affine(E.half(), None, shift_C=shift)
    want = of_groups(x.double() + vector(shift.double(), x), 4, group_norm.Affine(E.half().double(), None), False)
    for uses, way in ((True, "launch"), (False, "reference")):
        monkeypatch.setattr(group_norm, "fused", lambda *tensors, uses=uses: uses)
        moments = group_norm.moments(x, 4, shift)
        assert torch.equal(moments, getattr(group_norm, f"{way}_moments")(x, 4, shift))
        assert error(group_norm.normalise(x, moments, affine), want) < 5e-3
        assert error(group_norm.normalise(x, group_norm.moments(x, 4), affine), want) > VISIBLE


PICTURES = [pytest.param(case, marks=gpu if case[-1] > 16 else ()) for case in images.UPSAMPLED]


@pytest.mark.parametrize("shape", PICTURES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("last", [True, False], ids=["contiguous", "channels-last"])
def test_upsampling_copies_bits(shape: tuple[int, ...], last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = turned(random(shape, 0, DEVICE, torch.float16), last)
    for uses in (True, False):
        monkeypatch.setattr(images, "fused", lambda *tensors, uses=uses: uses)
        got = images.double(x)
        assert torch.equal(got, x.repeat_interleave(2, -1).repeat_interleave(2, -2))
        assert last or got.is_contiguous(memory_format=torch.channels_last)


def test_channels_beyond_a_programs_registers_and_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "fused", lambda *tensors: True)
    wide = random((1, 4096, 2), 0, DEVICE, FP32)
    assert torch.equal(images.channel_norm(wide, wide[0, :, 0]), images.reference_norm(wide, wide[0, :, 0]))
    assert images.launch_norm(IMAGE[:, :, :0], E).shape == (2, 24, 0, 5)
    assert images.launch_double(IMAGE[:, :, :0]).shape == (2, 24, 0, 10)
