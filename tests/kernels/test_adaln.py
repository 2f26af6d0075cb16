"""Tests of the adaLN kernel against fp64: every case, every norm, and the mistakes of a careless kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import adaln
from seqpar.kernels.adaln import (
    CASES,
    BranchNorm,
    Gated,
    Norm,
    Summed,
    Vectors,
    added,
    gate_norm_modulate,
    launch,
    norm_modulate,
    reference,
)
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, few, gpu, rms
from tests.support.pairs import covering

MANY = 85 if DEVICE == "cuda" else 21  # tokens: an odd number, so that the last program of several rows is not full
SIZES = few(CASES)
FP32 = 2e-5  # largest error against fp64 for values of order 1: a hundred roundings or so


def data(case: dict[str, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Gated, Tensor, Tensor, Tensor]:
    """Return x, gated, shift, scale, weight as models pass them: views of padded tokens and of a modulation table."""
    drawn = partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    batch, tokens, width, pad = (case[name] for name in ("batch", "tokens", "width", "pad"))
    streams = drawn(2, batch, tokens, width + pad).to(dtype)[..., :width]
    table = 0.5 * drawn(batch, 3, 6, width)
    weight = 1 + 0.1 * drawn(width).to(dtype)
    return streams[0], Gated(table[:, 1, 2], streams[1]), table[:, 1, 3], table[:, 1, 4], weight


def norm(kind: Any, weight: Tensor | None = None) -> Norm:
    return Norm(kind, 1e-6, weight)


def double(gated: Gated | None) -> Gated | None:
    if gated is None:
        return None
    assert isinstance(gated.gate_BE, Tensor)
    return Gated(gated.gate_BE.double(), gated.branch_BlE.double())


def exact(x: Tensor, gated: Gated | None, shift: Tensor, scale: Tensor, how: Norm) -> tuple[Tensor, Tensor]:
    weight = None if how.weight is None else how.weight.double()
    return reference(x.double(), double(gated), shift.double(), scale.double(), Norm(how.kind, how.eps, weight))


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Return the largest errors, relative to the value where that is larger than 1."""
    return [float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize(
    ("case", "kind", "affine", "branched", "dtype"),
    covering(SIZES, ["layer", "rms"], [False, True], [False, True], turns=DTYPES, rest=gpu),
)
def test_kernel_is_as_close_to_fp64_as_plain_torch(
    case: dict[str, int], dtype: torch.dtype, kind: str, affine: bool, branched: bool
) -> None:
    case = {**case, "tokens": MANY if case["tokens"] == 85 else case["tokens"]}
    x, gated, shift, scale, weight = data(case, dtype)
    how, both = norm(kind, weight if affine else None), gated if branched else None
    want, plain = exact(x, both, shift, scale, how), reference(x, both, shift, scale, how)
    got = launch(x, both, shift, scale, how)
    assert [(y.dtype, y.shape) for y in got] == [(y.dtype, y.shape) for y in plain]
    if dtype == torch.float32:
        assert max(errors(got, want)) < FP32
    else:
        assert max(errors(got, want)) <= torch.finfo(dtype).eps
        assert all(rms(a, b) <= 1.25 * rms(c, b) + 1e-12 for a, b, c in zip(got, want, plain, strict=True))


@pytest.mark.parametrize("width", [384, 1160])
def test_a_row_does_not_depend_on_the_number_of_rows(width: int) -> None:
    x, gated, shift, scale, _ = data({"batch": 3, "tokens": MANY, "width": width, "pad": 0}, torch.float16)
    whole = launch(x, gated, shift, scale, norm("layer"))
    assert isinstance(gated.gate_BE, Tensor)
    for row, some in ((0, slice(0, 1)), (2, slice(MANY - 5, MANY)), (1, slice(3, 20))):
        one = slice(row, row + 1)
        few = Gated(gated.gate_BE[one], gated.branch_BlE[one, some])
        got = launch(x[one, some], few, shift[one], scale[one], norm("layer"))
        assert all(torch.equal(a, b[one, some]) for a, b in zip(got, whole, strict=True))


def tables(case: dict[str, int], dtype: torch.dtype) -> tuple[tuple[Vectors, ...], list[Tensor], Tensor]:
    """Return gate, shift and scale of a table of five rows, of which one is the same for all and two share a vector.

    The second result holds them for each token, (B, l, E), in fp64; the third is the index (B, l).
    """
    generator = torch.Generator().manual_seed(3)
    batch, tokens, width = case["batch"], case["tokens"], case["width"]
    index = torch.randint(5, (batch, tokens), generator=generator).to(DEVICE)
    table = 0.5 * torch.randn(5, 3, width, generator=generator).to(DEVICE, dtype)  # rows of other vectors lie between
    shared = 0.5 * torch.randn(3, width, generator=generator).to(DEVICE)
    vectors = Summed(table[:, 0], shared[0]), table[:1, 1], Summed(table[:, 2], shared[2])
    gate, scale = (table[:, j].double()[index] + shared[j].double() for j in (0, 2))
    return vectors, [gate, table[0, 1].double().expand_as(gate), scale], index.int()


@pytest.mark.parametrize(("case", "kind"), [(CASES[1], "layer"), (CASES[2], "rms"), (CASES[3], "layer")])
def test_tokens_may_have_rows_of_a_table(case: dict[str, int], kind: str) -> None:
    """The truth modulates each token as a batch row of its own; one row for each picture gives the bits of no index."""
    case = {**case, "tokens": min(case["tokens"], MANY)}
    x, gated, shift, scale, weight = data(case, torch.float32)
    (gate, low, high), wide, index = tables(case, torch.float32)
    how, alone = norm(kind, weight), [y.double().flatten(0, 1)[:, None] for y in (x, gated.branch_BlE)]
    flat = [y.flatten(0, 1) for y in wide]
    want = exact(alone[0], Gated(flat[0], alone[1]), flat[1], flat[2], how)
    for call in (launch, reference):
        got = call(x, Gated(gate, gated.branch_BlE), low, high, how, index_Bl=index)
        assert max(errors([y.flatten(0, 1)[:, None] for y in got], want)) < FP32
        other = call(x, Gated(gate, gated.branch_BlE), low, high, how, index_Bl=(index + 1) % 5)
        assert max(errors([y.flatten(0, 1)[:, None] for y in other], want)) > 0.1
    same = torch.arange(case["batch"], device=DEVICE, dtype=torch.int32)[:, None]
    for call in (launch, reference):
        got, bits = call(x, gated, shift, scale, how, index_Bl=same), call(x, gated, shift, scale, how)
        assert all(torch.equal(a, b) for a, b in zip(got, bits, strict=True))


@pytest.mark.parametrize("case", [{"batch": 2, "tokens": 5, "width": 385, "pad": 2}, CASES[2]])
def test_strides_come_as_they_are(case: dict[str, int]) -> None:
    """Odd widths, transposed batch and tokens, and one vector for all rows give the bits of contiguous tensors."""
    x, gated, shift, scale, weight = data(case, torch.float16)
    turned = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, gated.branch_BlE)]
    want = launch(x.contiguous(), Gated(gated.gate_BE, turned[1].contiguous()), shift[:1], scale, norm("layer", weight))
    got = launch(turned[0], Gated(gated.gate_BE, turned[1]), shift[:1].expand_as(shift), scale, norm("layer", weight))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="contiguous last dim"):
        launch(x.repeat_interleave(2, -1)[..., ::2], None, shift, scale, norm("layer"))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_mean_does_not_cancel(offset: float) -> None:
    """E[x^2] - mean^2 has an error of 1e8 * 6e-8 = 6 here, for a variance of 1."""
    x, _, shift, scale, _ = data(CASES[3], torch.float32)
    x = x + offset
    want = exact(x, None, shift, scale, norm("layer"))[1]
    got, plain = launch(x, None, shift, scale, norm("layer"))[1], reference(x, None, shift, scale, norm("layer"))[1]
    naive = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.square().mean(-1, True) - x.mean(-1, True).square() + 1e-6)
    careless = naive * (1 + scale[:, None]) + shift[:, None]
    assert float((got - want).abs().max()) < 5e-3 < float((careless - want).abs().nan_to_num(1e9).max())
    assert rms(got, want) <= 1.25 * rms(plain, want) + 1e-3


def test_constant_and_zero_rows_are_finite() -> None:
    x = torch.tensor([0.0, 3.0]).repeat_interleave(384).view(1, 2, 384).to(DEVICE)
    shift, scale = torch.ones(1, 384, device=DEVICE), torch.zeros(1, 384, device=DEVICE)
    # the mean may be off by one unit in the last place, times 1 / sqrt(eps); torch's own norm is no better
    assert (launch(x, None, shift, scale, norm("layer"))[1] - 1).abs().max() < 1e-3
    assert torch.equal(launch(x[:, :1], None, shift, scale, norm("rms"))[1], torch.ones_like(x[:, :1]))


def test_the_norm_sees_the_sum_before_it_is_rounded() -> None:
    x, gated, shift, scale, _ = data(CASES[1], torch.float16)
    want = exact(x, gated, shift, scale, norm("layer"))[1]
    x_new, h = launch(x, gated, shift, scale, norm("layer"))
    late = launch(x_new, None, shift, scale, norm("layer"))[1]
    assert rms(h, want) < 0.9 * rms(late, want)


def test_swapped_arguments_are_noticed() -> None:
    """This is a negative control of the bounds above."""
    x, gated, shift, scale, _ = data(CASES[1], torch.float32)
    want = exact(x, gated, shift, scale, norm("layer"))
    other = data(CASES[1], torch.float32, seed=1)[1]
    for wrong in (
        launch(x, gated, scale, shift, norm("layer")),
        launch(x, gated, shift, scale, norm("rms")),
        launch(x, Gated(other.gate_BE, gated.branch_BlE), shift, scale, norm("layer")),
        launch(x, gated, shift.flip(0), scale, norm("layer")),
    ):
        assert max(errors(wrong, want)) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_alone_has_the_bits_of_the_sum_before_a_norm(dtype: torch.dtype) -> None:
    x, gated, shift, scale, _ = data(CASES[2], dtype)
    (gate, _, _), (wide, _, _), index = tables(CASES[2], torch.float32)
    for of, by, gates in ((gated, None, None), (Gated(gate, gated.branch_BlE), index, wide)):
        got = launch(x, of, index_Bl=by)[0]
        rows = (shift[:1], scale[:1]) if by is not None else (shift, scale)
        assert torch.equal(got, launch(x, of, *rows, norm("layer"), index_Bl=by)[0])
        wanted = exact(x, gated, shift, scale, norm("layer"))[0] if gates is None else gates * gated.branch_BlE + x
        plain = added(x, of.gate_BE, of.branch_BlE, index_Bl=by)
        assert got.dtype == plain.dtype == dtype
        assert max(errors([got, plain], [wanted, wanted])) <= max(FP32, torch.finfo(dtype).eps)
        assert max(errors([x], [wanted])) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_branch_may_have_a_norm_of_its_own(dtype: torch.dtype) -> None:
    """The truth adds a branch that torch has normalised; without the norm the result is another one."""
    x, gated, shift, scale, weight = data(CASES[2], dtype)
    branch, last = gated.branch_BlE.double(), norm("rms", weight)
    normed = F.rms_norm(branch, branch.shape[-1:], weight.double(), 1e-2)
    want = exact(x, Gated(gated.gate_BE, normed), shift, scale, last)
    of, bound = BranchNorm(weight, 1e-2), max(FP32, torch.finfo(dtype).eps)
    for call in (launch, reference):
        got = call(x, gated._replace(norm=of), shift, scale, last)
        assert max(errors(got, want)) <= bound
        assert max(errors(call(x, gated, shift, scale, last), want)) > 0.1
    assert torch.equal(launch(x, gated._replace(norm=of))[0], launch(x, gated._replace(norm=of), shift, scale, last)[0])
    plain = added(x, gated.gate_BE, gated.branch_BlE, branch_norm=of)
    assert max(errors([plain], want[:1])) <= bound


def test_the_last_layer_writes_no_stream() -> None:
    x, gated, shift, scale, _ = data(CASES[1], torch.float16)
    for call in (launch, reference):
        x_new, h = call(x, gated, shift, scale, norm("layer"), keep=False)
        assert x_new is x
        assert torch.equal(h, call(x, gated, shift, scale, norm("layer"))[1])


def test_public_functions_pick_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gated, shift, scale, _ = data(CASES[1], torch.float16)
    for uses in (True, False):
        monkeypatch.setattr(adaln, "fused", lambda *tensors, uses=uses: uses)
        call = launch if uses else reference
        assert torch.equal(norm_modulate(x, shift, scale, norm("layer")), call(x, None, shift, scale, norm("layer"))[1])
        got = gate_norm_modulate(x, gated.gate_BE, gated.branch_BlE, shift, scale, norm("layer"))
        assert all(torch.equal(a, b) for a, b in zip(got, call(x, gated, shift, scale, norm("layer")), strict=True))


def test_no_tokens() -> None:
    x, gated, shift, scale, _ = data(CASES[1], torch.float16)
    none = Gated(gated.gate_BE, gated.branch_BlE[:, :0])
    assert launch(x[:, :0], none, shift, scale, norm("layer"))[1].shape == (2, 0, 1152)
