"""Tests of QK-norm and rotary into outboxes against fp64: every norm and rotary, any strides, any destinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels.prepare import (
    CASES,
    Tile,
    launch,
    launch_into,
    launch_one,
    prepare,
    prepare_into,
    prepare_one,
    reference,
    reference_into,
)
from seqpar.types.outboxes import Outbox, Outboxes
from seqpar.types.protocols import Prepare
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu, rms
from tests.support.meshes import random
from tests.support.pairs import covering

TOKENS = 5 if DEVICE == "cuda" else 2  # at most; the interpreter needs milliseconds for a token
SMALL = [{**case, "tokens": min(TOKENS, case["tokens"])} for case in CASES if case["tokens"] < 100]
INTERPRETED = [case for case in SMALL if case["dim"] not in (48, 96)]  # they are padded and read like 72
SIZES = [
    pytest.param(case, marks=() if case in INTERPRETED else gpu, id="-".join(map(str, case.values())))
    for case in [*(case for case in CASES if case["tokens"] >= 100), *SMALL]
]
NORMS = ["none", "layer", "rms", "layer per head", "rms per head"]
ROTARY = ["none", "pairs", "halves"]
FP32 = 1e-5  # fp32's own error before the one rounding, for values of order 10
WORSE = 1.25
Case = dict[str, int]


def project(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views of one fused projection that has further columns."""
    batch, tokens, heads, groups, dim = case.values()
    widths = (heads * dim, groups * dim, groups * dim, 8)
    packed = random((batch, tokens, sum(widths)), 0, DEVICE, dtype) + 0.5  # a mean, so that LayerNorm is not RMSNorm
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in packed.split(widths, dim=-1)[:3])
    return q, k, v


def preparation(case: Case, norm: str, rotary: str, dtype: torch.dtype, affine: bool = True) -> Prepare:
    _, tokens, heads, groups, dim = case.values()
    kind: Any = norm.split()[0]
    per_head = norm.endswith("head")
    widths = (dim,) * 4 if per_head else (heads * dim, heads * dim, groups * dim, groups * dim)
    weight, bias, k_weight, k_bias = (
        random((width,), 1 + i, DEVICE, dtype) if affine and (kind == "layer" or i % 2 == 0) else None
        for i, width in enumerate(widths)
    )
    angles = torch.arange(5, 5 + tokens)[:, None] * 0.3 ** torch.arange(dim // 2)
    cos, sin = (None, None) if rotary == "none" else (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    return Prepare(kind, per_head, 1e-5, weight, bias, k_weight, k_bias, cos, sin, interleaved=rotary == "pairs")


def double(how: Prepare) -> Prepare:
    return replace(how, **{name: x.double() for name, x in vars(how).items() if isinstance(x, Tensor)})


def plain(x_BlHD: Tensor, how: Prepare, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute as models do in torch: the norm in the dtype of the input, then rotary in fp32."""
    x = x_BlHD if how.per_head else x_BlHD.flatten(2)
    if how.norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, how.eps)
    elif how.norm == "rms":
        x = F.rms_norm(x, x.shape[-1:], weight, how.eps)
    return reference(x.reshape(x_BlHD.shape), x_BlHD[:, :, :1], replace(how, norm="none"))[0]


def rounded_once(got: Tensor, want: Tensor) -> bool:
    """Return whether errors are within half a unit in the last place, plus the error of fp32 arithmetic."""
    return bool(((got - want).abs() <= torch.finfo(got.dtype).eps / 2 * want.abs() + FP32).all())


def boxes(case: Case, dtype: torch.dtype) -> Outboxes:
    """Return poisoned outboxes in larger slabs: readers of one group, of none, of the rest, and of k and v only."""
    batch, tokens, heads, groups, dim = case.values()
    made, each = [], heads // groups
    for start, stop in ((0, 1), (1, 1), (1, groups), (0, groups)):
        h, g = (stop - start) * each, stop - start
        slab = torch.full((tokens, batch, h + 2 * g + len(made), dim), float("nan"), dtype=dtype, device=DEVICE)
        q, k, v = slab[:, :, : h + 2 * g].split((h, g, g), dim=2)
        made.append(Outbox(q, k, v, slice(start * each, stop * each), slice(start, stop)))
    return Outboxes([*made[:-1], replace(made[-1], q=None)])


def written(outboxes: Outboxes) -> Iterator[tuple[str, Tensor, slice]]:
    for box in outboxes:
        named = (("q", box.q, box.heads), ("k", box.k, box.kv_heads), ("v", box.v, box.kv_heads))
        yield from ((name, view, heads) for name, view, heads in named if view is not None)


def covered() -> list[Any]:
    """Every norm with every rotary at sizes of each kind; elsewhere every norm, and every rotary with some of them.

    A GPU compiles a kernel for each: what heads are made of (a power of two or padded, groups, an odd number of them)
    decides the code, not how many there are.
    """
    whole, found = [CASES[0], CASES[4], CASES[5], SMALL[1], SMALL[4]], []
    for place, size in enumerate(SIZES):
        (case,) = size.values
        for i, norm in enumerate(NORMS):
            for j, rotary in enumerate(ROTARY):
                if case in whole or (place + i) % len(ROTARY) == j:
                    found.append(pytest.param(case, norm, rotary, marks=size.marks))
    return found


@pytest.mark.parametrize(("case", "norm", "rotary", "dtype"), covering(covered(), turns=DTYPES, rest=gpu))
def test_kernel_is_as_close_to_fp64_as_plain_torch(case: Case, dtype: torch.dtype, norm: str, rotary: str) -> None:
    q, k, _ = project(case, dtype)
    how = preparation(case, norm, rotary, dtype)
    exact = reference(q.double(), k.double(), double(how))
    usual = plain(q, how, how.q_weight, how.q_bias), plain(k, how, how.k_weight, how.k_bias)
    for got, want, other in zip(launch(q, k, how), exact, usual, strict=True):
        assert got.dtype == dtype
        assert got.is_contiguous()
        assert rounded_once(got, want)
        if dtype != torch.float32:
            assert rms(got, want) <= WORSE * rms(other, want)


@pytest.mark.parametrize(("case", "norm"), covering(SMALL, turns=NORMS[1:], rest=gpu), ids=str)
def test_norm_without_affine(case: Case, norm: str) -> None:
    q, k, _ = project(case, torch.float32)
    how = preparation(case, norm, "pairs", torch.float32, affine=False)
    for got, want in zip(launch(q, k, how), reference(q.double(), k.double(), double(how)), strict=True):
        assert rounded_once(got, want)


WAYS = [pytest.param(*way) for way in (("layer", "pairs"), ("rms per head", "halves"), ("layer", "none"))]


@pytest.mark.parametrize(("case", "norm", "rotary", "dtype"), covering(SIZES, WAYS, turns=DTYPES, rest=gpu))
def test_outboxes_get_the_bits_of_one_rank(case: Case, dtype: torch.dtype, norm: str, rotary: str) -> None:
    q, k, v = project(case, dtype)
    how, outboxes = preparation(case, norm, rotary, dtype), boxes(case, dtype)
    launch_into(q, k, v, how, outboxes)
    whole = dict(zip("qkv", (*launch(q, k, how), v), strict=True))
    for name, view, heads in written(outboxes):
        assert torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


@pytest.mark.parametrize("into", [launch_into, reference_into])
@pytest.mark.parametrize("case", [SMALL[1], *(pytest.param(CASES[i], marks=gpu) for i in (0, 5))], ids=str)
@pytest.mark.parametrize(
    ("norm", "parts"), [("none", "kv q"), ("layer", "k v q"), ("rms", "qv k"), ("rms per head", "v qk")]
)
def test_some_first_and_others_later_are_the_bits_of_all_at_once(case: Case, norm: str, into: Any, parts: str) -> None:
    dtype = torch.float16
    inputs, how = project(case, dtype), preparation(case, norm, "pairs", dtype)
    once, bit_by_bit, there = boxes(case, dtype), boxes(case, dtype), ""
    into(*inputs, how, once)
    for names in parts.split():
        into(*(x if name in names else None for name, x in zip("qkv", inputs, strict=True)), how, bit_by_bit)
        there += names
        assert all(
            bool(view.isnan().any()) == (name not in there) for name, view, _ in written(bit_by_bit) if view.numel()
        )
    for (_, view, _), (_, other, _) in zip(written(once), written(bit_by_bit), strict=True):
        assert torch.equal(view, other)


def test_nothing_to_write_is_refused() -> None:
    with pytest.raises(ValueError, match="got nothing to write"):
        prepare_into(None, None, None, Prepare(), boxes(SMALL[0], torch.float16))


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_copies_put_every_element_in_its_place_and_touch_no_other(case: Case, dtype: torch.dtype) -> None:
    views = project(case, dtype)
    for name, x in enumerate(views):  # numbers that the dtype holds exactly
        codes = torch.arange(x.numel(), device=DEVICE).view(x.shape) + name
        x.copy_(codes % int(2 / torch.finfo(dtype).eps))
    got, want = boxes(case, dtype), boxes(case, dtype)
    launch_into(*views, Prepare(), got)
    reference_into(*views, Prepare(), want)
    for (name, view, heads), (_, other, _) in zip(written(got), written(want), strict=True):
        assert torch.equal(view, views["qkv".index(name)][:, :, heads].transpose(0, 1))
        mine, theirs = (x._base if x._base is not None else x for x in (view, other))
        assert torch.equal(mine.isnan(), theirs.isnan())


def test_places_are_the_addresses_of_the_views() -> None:
    outboxes = boxes(SMALL[0], torch.float16)
    table = outboxes.places.table.tolist()
    assert outboxes.places is outboxes.places
    assert outboxes.places.dtype == torch.float16
    assert outboxes.places.alignment == 16
    seen = 0
    for name, view, heads in written(outboxes):
        for index, head in enumerate(range(heads.start, heads.stop)):
            place = [view[0, 0, index].data_ptr(), view.stride(0), view.stride(1)]
            assert place in [copy[head] for copy in table["qkv".index(name)]]
            seen += 1
    assert seen == sum(address != 0 for part in table for copy in part for address, _, _ in copy)


def test_places_know_how_narrow_stores_must_be() -> None:
    slab = torch.zeros(4, 1, 3, 6, dtype=torch.float16, device=DEVICE)
    q, k, v = slab.split(1, dim=2)
    assert Outboxes([Outbox(q, k, v, slice(0, 1), slice(0, 1))]).places.alignment == 4


def test_outboxes_of_another_dtype_are_refused() -> None:
    views = project(SMALL[0], torch.float16)
    with pytest.raises(ValueError, match="expected q, k, v and outboxes of one dtype"):
        launch_into(*views, Prepare(), boxes(SMALL[0], torch.float32))
    mixed = Outboxes([*boxes(SMALL[0], torch.float32), *boxes(SMALL[0], torch.float16)])
    with pytest.raises(ValueError, match="must have one dtype"):
        _ = mixed.places


@pytest.mark.parametrize("case", [SMALL[0], *(pytest.param(case, marks=gpu) for case in CASES[:6])], ids=str)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_a_row_does_not_depend_on_the_number_of_rows(case: Case, norm: str) -> None:
    q, k, _ = project(case, torch.float16)
    how = preparation(case, norm, "pairs", torch.float16)
    assert how.cos_lD2 is not None
    assert how.sin_lD2 is not None
    few = slice(case["tokens"] - 1, case["tokens"])
    part = replace(how, cos_lD2=how.cos_lD2[few], sin_lD2=how.sin_lD2[few])
    for some, all_ in zip(launch(q[1:, few], k[1:, few], part), launch(q, k, how), strict=True):
        assert torch.equal(some, all_[1:, few])


@pytest.mark.parametrize(
    ("norm", "rotary"),
    [("none", "pairs"), ("layer", "halves"), ("rms", "none"), ("layer per head", "pairs"), ("rms per head", "halves")],
)
def test_rotary_rows_read_early_change_no_bits(norm: str, rotary: str) -> None:
    case = SMALL[0]
    q, k, v = project(case, torch.float16)
    how, early = preparation(case, norm, rotary, torch.float16), Tile(2, early=True)
    want, both = launch(q, k, how, tiled=Tile(2)), (boxes(case, torch.float16), boxes(case, torch.float16))
    assert all(torch.equal(a, b) for a, b in zip(launch(q, k, how, tiled=early), want, strict=True))
    for into, tiled in zip(both, (Tile(2), early), strict=True):
        launch_into(q, k, v, how, into, tiled=tiled)
    for one, other in zip(*both, strict=True):
        for name in ("q", "k", "v"):
            x, y = getattr(one, name), getattr(other, name)
            assert x is y is None or torch.equal(x, y)


def test_inputs_of_any_strides() -> None:
    """Heads that are not dense and an odd first column need narrow loads."""
    wide = random((2, 3, 4, 2, 25), 0, DEVICE, torch.float16)
    q, k = wide[:, :, :, 0, 1:], wide[:, :, ::2, 1, 1:]
    case = {"batch": 2, "tokens": 3, "heads": 4, "kv_heads": 2, "dim": 24}
    how = preparation(case, "layer", "halves", torch.float16)
    for got, want in zip(launch(q, k, how), reference(q.double(), k.double(), double(how)), strict=True):
        assert rounded_once(got, want)


@pytest.mark.parametrize("rotary", ROTARY[1:])
def test_negative_control_rotary_the_other_way_is_noticed(rotary: str) -> None:
    q, k, _ = project(SMALL[0], torch.float16)
    how = preparation(SMALL[0], "layer", rotary, torch.float16)
    assert how.sin_lD2 is not None
    turned = launch(q, k, replace(how, sin_lD2=-how.sin_lD2))
    swapped = launch(q, k, replace(how, interleaved=not how.interleaved))
    for got in (turned, swapped):
        for mine, want in zip(got, reference(q.double(), k.double(), double(how)), strict=True):
            assert not rounded_once(mine, want)


def test_negative_control_heads_in_another_order_are_noticed() -> None:
    q, k, v = project(SMALL[0], torch.float16)
    how, outboxes = preparation(SMALL[0], "layer", "pairs", torch.float16), boxes(SMALL[0], torch.float16)
    launch_into(q.flip(2), k.flip(2), v.flip(2), how, outboxes)
    whole = dict(zip("qkv", (*launch(q, k, how), v), strict=True))
    for name, view, heads in written(outboxes):
        assert not view.numel() or not torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


def test_no_rows_are_no_launch() -> None:
    q, k, _ = project({**SMALL[0], "tokens": 0}, torch.float16)
    assert launch(q, k, Prepare("rms"))[0].shape == q.shape


@gpu
def test_public_functions_launch_the_kernel() -> None:
    case, dtype = CASES[5], torch.bfloat16
    q, k, v = project(case, dtype)
    how = preparation(case, "rms per head", "halves", dtype)
    for got, want in zip(prepare(q, k, how), launch(q, k, how), strict=True):
        assert torch.equal(got, want)
    once, listed = boxes(case, dtype), boxes(case, dtype)
    prepare_into(q, k, v, how, once)
    prepare_into(q, k, v, how, list(listed))
    for (_, view, _), (_, other, _) in zip(written(once), written(listed), strict=True):
        assert torch.equal(view, other)


@gpu
def test_gradients_flow_where_they_are_asked_for() -> None:
    q, k, _ = project(CASES[5], torch.bfloat16)
    how = preparation(CASES[5], "rms per head", "halves", torch.bfloat16)
    assert prepare(q.clone().requires_grad_(), k, how)[0].requires_grad


@gpu
def test_a_captured_call_replays_on_new_inputs() -> None:
    case, dtype = CASES[0], torch.bfloat16
    q, k, v = project(case, dtype)
    how, outboxes = preparation(case, "layer", "pairs", dtype), boxes(case, dtype)
    prepare_into(q, k, v, how, outboxes)  # compiles, and makes the table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_into(q, k, v, how, outboxes)
    for x in (q, k, v):
        x.neg_()
    graph.replay()
    whole = dict(zip("qkv", (*launch(q, k, how), v), strict=True))
    for name, view, heads in written(outboxes):
        assert torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


@pytest.mark.parametrize("rotary", ["pairs", "halves"])
def test_batch_rows_may_have_rotary_rows_of_their_own(rotary: str) -> None:
    """The truth prepares each batch row alone; with the first one's rows for all, the others differ."""
    case = SMALL[0]
    q, k, v = project(case, torch.float16)
    how = preparation(case, "rms per head", rotary, torch.float16)
    assert how.cos_lD2 is not None
    assert how.sin_lD2 is not None
    cos, sin = (torch.stack([x, x.flip(0)]) for x in (how.cos_lD2, how.sin_lD2))
    both, each = replace(how, cos_lD2=cos, sin_lD2=sin), [replace(how, cos_lD2=cos[b], sin_lD2=sin[b]) for b in (0, 1)]
    for call in (launch, reference):
        alone = [call(q[b : b + 1], k[b : b + 1], each[b]) for b in (0, 1)]
        for got, *rows, first in zip(call(q, k, both), *alone, call(q, k, how), strict=True):
            assert torch.equal(got, torch.cat(rows))
            assert not torch.equal(got, first)
    into, whole = boxes(case, torch.float16), dict(zip("qkv", (*launch(q, k, both), v), strict=True))
    launch_into(q, k, v, both, into)
    for name, view, heads in written(into):
        assert torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


@pytest.mark.parametrize("rotary", ["pairs", "halves"])
@pytest.mark.parametrize("rows", [1, 2])
def test_heads_may_have_rotary_rows_of_their_own(rotary: str, rows: int) -> None:
    """The truth rotates each head alone; with the first one's rows for all, the others differ."""
    case = {**SMALL[0], "kv_heads": SMALL[0]["heads"]}
    q, k, v = project(case, torch.float16)
    how = preparation(case, "rms", rotary, torch.float16)
    angles = random((rows, case["tokens"], case["heads"], case["dim"] // 2), 9, DEVICE)
    each = replace(how, cos_lD2=angles.cos(), sin_lD2=angles.sin())
    exact = reference(q.double(), k.double(), double(each))
    normed = reference(q.double(), k.double(), double(replace(how, cos_lD2=None, sin_lD2=None)))
    for head in range(case["heads"]):
        one = Prepare(cos_lD2=angles[:, :, head].cos(), sin_lD2=angles[:, :, head].sin(), interleaved=how.interleaved)
        alone = reference(normed[0][:, :, head : head + 1], normed[1][:, :, head : head + 1], double(one))
        assert all(torch.allclose(x[:, :, head : head + 1], y) for x, y in zip(exact, alone, strict=True))
    first = replace(how, cos_lD2=angles[:, :, 0].cos(), sin_lD2=angles[:, :, 0].sin())
    for got, want, other in zip(launch(q, k, each), exact, launch(q, k, first), strict=True):
        assert rounded_once(got, want)
        assert not rounded_once(other, want)
    into, whole = boxes(case, torch.float16), dict(zip("qkv", (*launch(q, k, each), v), strict=True))
    launch_into(q, k, v, each, into)
    for name, view, heads in written(into):
        assert torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


@pytest.mark.parametrize("norm", ["rms", "layer per head"])
def test_one_input_alone_has_the_bits_of_both(norm: str) -> None:
    case = {**SMALL[0], "kv_heads": SMALL[0]["heads"]}
    q, k, _ = project(case, torch.float16)
    how = preparation(case, norm, "pairs", torch.float16)
    of_k = replace(how, q_weight=how.k_weight, q_bias=how.k_bias)
    for got, want in zip((launch_one(q, how), launch_one(k, of_k)), launch(q, k, how), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(prepare_one(q.double(), double(how)), reference(q.double(), k.double(), double(how))[0])


def test_rotary_rows_of_other_heads_are_refused() -> None:
    q, k, _ = project(SMALL[0], torch.float16)
    rows = random((1, SMALL[0]["tokens"], SMALL[0]["heads"] + 1, SMALL[0]["dim"] // 2), 9, DEVICE)
    with pytest.raises(ValueError, match="expected a row per head of q and of k"):
        launch(q, k, Prepare(cos_lD2=rows, sin_lD2=rows))
