"""Tests of QK-norm and rotary into outboxes against fp64: every norm and rotary, any strides, any destinations.

The truth computes rotary as products of complex numbers. Tests of strategies rely on the meaning of `Prepare` that is
checked here, because they use `prepare` on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.attention._streams import into as into_outboxes
from seqpar.kernels import prepare as module
from seqpar.kernels.prepare import (
    CASES,
    Tile,
    launch,
    launch_into,
    launch_one,
    prepare,
    prepare_one,
    reference,
    reference_into,
)
from seqpar.types.outboxes import Outbox, Outboxes
from seqpar.types.protocols import Prepare
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu
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
ROTARY = ["none", "pairs", "halves", "some halves"]
HALF = torch.float16
FP32 = 1e-5  # fp32's own error before the one rounding, for values of order 10
Case = dict[str, int]


def project(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views of one fused projection that has further columns."""
    batch, tokens, heads, groups, dim = case.values()
    widths = (heads * dim, groups * dim, groups * dim, 16)
    packed = random((batch, tokens, sum(widths)), 0, DEVICE, dtype) + 0.5  # a mean, so that LayerNorm is not RMSNorm
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in packed.split(widths, dim=-1)[:3])
    return q, k, v


def preparation(case: Case, norm: str, rotary: str, dtype: torch.dtype, affine: bool = True) -> Prepare:
    """Return a preparation whose angles start at a later token; its eps is so large that another one shows."""
    _, tokens, heads, groups, dim = case.values()
    kind: Any = norm.split()[0]
    per_head = norm.endswith("head")
    widths = (dim,) * 4 if per_head else (heads * dim, heads * dim, groups * dim, groups * dim)
    weight, bias, k_weight, k_bias = (
        random((width,), 1 + i, DEVICE, dtype) if affine and (kind == "layer" or i % 2 == 0) else None
        for i, width in enumerate(widths)
    )
    turned = dim // 2 - (max(1, dim // 8) if rotary == "some halves" else 0)  # pairs, of 96 of 128 channels
    angles = torch.arange(5, 5 + tokens)[:, None] * 0.3 ** torch.arange(turned)
    cos, sin = (None, None) if rotary == "none" else (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    return Prepare(kind, per_head, 3e-3, weight, bias, k_weight, k_bias, cos, sin, interleaved=rotary == "pairs")


def double(how: Prepare) -> Prepare:
    return replace(how, **{name: x.double() for name, x in vars(how).items() if isinstance(x, Tensor)})


def truth(q_BlHD: Tensor, k_BlGD: Tensor, how: Prepare) -> tuple[Tensor, Tensor]:
    """Return q and k in fp64; rotary rows are (l, D/2), (B, l, D/2) or (B, l, H, D/2)."""
    how = double(how)

    def prepared(x_BlHD: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x_BlHD.double() if how.per_head else x_BlHD.double().flatten(2)
        x = x - x.mean(-1, keepdim=True) if how.norm == "layer" else x
        if how.norm != "none":
            x = x / (x.square().mean(-1, keepdim=True) + how.eps).sqrt()
            x = (x if weight is None else x * weight) + (0 if bias is None else bias)
        x = x.view(x_BlHD.shape)
        if how.cos_lD2 is None or how.sin_lD2 is None:
            return x
        angles = torch.complex(how.cos_lD2, how.sin_lD2)
        angles = angles if angles.dim() == 4 else angles.unsqueeze(-2)
        turned = 2 * angles.shape[-1]
        if how.interleaved:
            pairs = torch.view_as_complex(x[..., :turned].unflatten(-1, (-1, 2)).contiguous()) * angles
            return torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., turned:]), -1)
        pairs = torch.complex(*x[..., :turned].chunk(2, -1)) * angles
        return torch.cat((pairs.real, pairs.imag, x[..., turned:]), -1)

    return prepared(q_BlHD, how.q_weight, how.q_bias), prepared(k_BlGD, how.k_weight, how.k_bias)


def rounded_once(got: Tensor, want: Tensor) -> bool:
    """Return whether errors are within half a unit in the last place, plus the error of fp32 arithmetic."""
    bound = 1e-12 if got.dtype == torch.float64 else FP32
    return bool(((got - want).abs() <= torch.finfo(got.dtype).eps / 2 * want.abs() + bound).all())


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
        parts = (("q", box.q, box.heads), ("k", box.k, box.kv_heads), ("v", box.v, box.kv_heads))
        yield from ((name, view, heads) for name, view, heads in parts if view is not None)


def holds(outboxes: Outboxes, q: Tensor, k: Tensor, v: Tensor) -> bool:
    whole = dict(zip("qkv", (q, k, v), strict=True))
    return all(torch.equal(view, whole[name][:, :, heads].transpose(0, 1)) for name, view, heads in written(outboxes))


def covered() -> list[Any]:
    """Every norm with every rotary at sizes of each kind; elsewhere every norm, and every rotary with some of them.

    A GPU compiles a kernel for each: what heads are made of (a power of two or padded, groups, an odd number of them)
    decides the code, not their number.
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
def test_kernel_and_reference_round_the_truth_once(case: Case, dtype: torch.dtype, norm: str, rotary: str) -> None:
    q, k, _ = project(case, dtype)
    for affine in (True, False):
        how = preparation(case, norm, rotary, dtype, affine)
        want, wide = truth(q, k, how), truth(q, k, double(how))
        for call in (launch, reference):
            for got, expected in zip(call(q, k, how), want, strict=True):
                assert got.dtype == dtype
                assert got.is_contiguous() or got is q or got is k
                assert rounded_once(got, expected)
        for got, expected in zip(prepare(q.double(), k.double(), double(how)), wide, strict=True):
            assert rounded_once(got, expected)


WAYS = [
    pytest.param(*way)
    for way in (("layer", "pairs"), ("rms per head", "halves"), ("layer", "none"), ("rms per head", "some halves"))
]


@pytest.mark.parametrize(
    ("case", "norm", "rotary", "dtype"), covering(SIZES, [*WAYS, pytest.param("none", "none")], turns=DTYPES, rest=gpu)
)
def test_outboxes_get_the_bits_of_one_rank_and_nothing_else_is_written(
    case: Case, dtype: torch.dtype, norm: str, rotary: str
) -> None:
    q, k, v = project(case, dtype)
    how, outboxes, others = preparation(case, norm, rotary, dtype), boxes(case, dtype), boxes(case, dtype)
    launch_into(q, k, v, how, outboxes)
    reference_into(q, k, v, how, others)
    assert holds(outboxes, *launch(q, k, how), v)
    assert holds(others, *reference(q, k, how), v)
    for (_, view, _), (_, other, _) in zip(written(outboxes), written(others), strict=True):
        slab, slab_of_other = (x._base if x._base is not None else x for x in (view, other))
        assert torch.equal(slab.isnan(), slab_of_other.isnan())


@pytest.mark.parametrize("into", [launch_into, reference_into])
@pytest.mark.parametrize("case", [SMALL[1], *(pytest.param(CASES[i], marks=gpu) for i in (0, 5))], ids=str)
@pytest.mark.parametrize(
    ("norm", "parts"), [("none", "kv q"), ("layer", "k v q"), ("rms", "qv k"), ("rms per head", "v qk")]
)
def test_some_first_and_others_later_are_the_bits_of_all_at_once(case: Case, norm: str, into: Any, parts: str) -> None:
    inputs, how = project(case, HALF), preparation(case, norm, "pairs", HALF)
    once, bit_by_bit, there = boxes(case, HALF), boxes(case, HALF), ""
    into(*inputs, how, once)
    for names in parts.split():
        into(*(x if name in names else None for name, x in zip("qkv", inputs, strict=True)), how, bit_by_bit)
        there += names
        for name, view, _ in written(bit_by_bit):
            assert not view.numel() or bool(view.isnan().any()) == (name not in there)
    for (_, view, _), (_, other, _) in zip(written(once), written(bit_by_bit), strict=True):
        assert torch.equal(view, other)


def test_places_are_the_addresses_of_the_views_and_know_how_narrow_stores_must_be() -> None:
    outboxes, seen = boxes(SMALL[0], HALF), 0
    table = outboxes.places.table.tolist()
    assert outboxes.places is outboxes.places
    assert (outboxes.places.dtype, outboxes.places.alignment) == (HALF, 16)
    for name, view, heads in written(outboxes):
        for index, head in enumerate(range(heads.start, heads.stop)):
            place = [view[0, 0, index].data_ptr(), view.stride(0), view.stride(1)]
            assert place in [copy[head] for copy in table["qkv".index(name)]]
            seen += 1
    assert seen == sum(address != 0 for part in table for copy in part for address, _, _ in copy)
    q, k, v = torch.zeros(4, 1, 3, 6, dtype=HALF, device=DEVICE).split(1, dim=2)
    assert Outboxes([Outbox(q, k, v, slice(0, 1), slice(0, 1))]).places.alignment == 4


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = SMALL[0]
    q, k, v = project(case, HALF)
    with pytest.raises(ValueError, match="expected q, k, v and outboxes of one dtype"):
        launch_into(q, k, v, Prepare(), boxes(case, torch.float32))
    with pytest.raises(ValueError, match="must have one dtype"):
        _ = Outboxes([*boxes(case, torch.float32), *boxes(case, HALF)]).places
    angles = random((1, case["tokens"], case["heads"] + 1, case["dim"] // 2), 9, DEVICE)
    with pytest.raises(ValueError, match="expected a row per head of q and of k"):
        launch(q, k, Prepare(cos_lD2=angles, sin_lD2=angles))
    biases: list[dict[str, Any]] = [{"q_bias": torch.zeros(8)}, {"k_bias": torch.zeros(8)}]
    for given in biases:
        with pytest.raises(ValueError, match="RMSNorm has no bias"):
            Prepare("rms", True, **given)
        assert Prepare("layer", True, **given)
    assert all(a is b for a, b in zip(prepare(q, k, Prepare()), (q, k), strict=True))
    assert launch(q[:, :0], k[:, :0], Prepare("rms"))[0].shape == q[:, :0].shape


@pytest.mark.parametrize("case", [SMALL[0], *(pytest.param(case, marks=gpu) for case in CASES[:6])], ids=str)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_a_row_does_not_depend_on_the_number_of_rows(case: Case, norm: str) -> None:
    q, k, _ = project(case, HALF)
    how = preparation(case, norm, "pairs", HALF)
    few = slice(case["tokens"] - 1, case["tokens"])
    part = replace(how, **turned_rows(how, lambda x: x[few]))
    for some, all_ in zip(launch(q[1:, few], k[1:, few], part), launch(q, k, how), strict=True):
        assert torch.equal(some, all_[1:, few])


def turned_rows(how: Prepare, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return both tables of rotary rows after the change."""
    assert how.cos_lD2 is not None
    assert how.sin_lD2 is not None
    return {"cos_lD2": change(how.cos_lD2), "sin_lD2": change(how.sin_lD2)}


@pytest.mark.parametrize(
    ("norm", "rotary"),
    [("none", "pairs"), ("layer", "halves"), ("rms", "none"), ("layer per head", "pairs"), ("rms per head", "halves")],
)
def test_rotary_rows_read_early_change_no_bits(norm: str, rotary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = project(SMALL[0], HALF)
    how, results = preparation(SMALL[0], norm, rotary, HALF), []
    for early in (False, True):
        monkeypatch.setattr(module, "tile", lambda *sizes, early=early: Tile(2, early))
        into = boxes(SMALL[0], HALF)
        launch_into(q, k, v, how, into)
        results.append([*launch(q, k, how), *(view for _, view, _ in written(into))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_inputs_of_any_strides() -> None:
    """Heads that are not dense and an odd first column need narrow loads."""
    wide = random((2, 3, 4, 2, 25), 0, DEVICE, HALF)
    q, k = wide[:, :, :, 0, 1:], wide[:, :, ::2, 1, 1:]
    case = {"batch": 2, "tokens": 3, "heads": 4, "kv_heads": 2, "dim": 24}
    how = preparation(case, "layer", "halves", HALF)
    for got, want in zip(launch(q, k, how), truth(q, k, how), strict=True):
        assert rounded_once(got, want)


CASE = {"batch": 2, "tokens": 5, "heads": 6, "kv_heads": 3, "dim": 8}
WAY = {"layer": ("layer", "pairs"), "rms": ("rms per head", "halves"), "plain": ("layer", "pairs")}


def negated(x: Tensor | None) -> Tensor:
    assert x is not None
    return -x


# a norm -> what is changed, and which of q and k must then be wrong; a mistake of rotary is tried with one norm
WRONG: dict[str, dict[str, tuple[Callable[[Prepare], dict[str, Any]], str]]] = {
    "layer": {
        **{
            f"{name} dropped": (lambda how, name=name: {name: None}, name[0])
            for name in ("q_weight", "q_bias", "k_weight", "k_bias")
        },
        "rotary backwards": (lambda how: {"sin_lD2": negated(how.sin_lD2)}, "qk"),
        "cosines negated": (lambda how: {"cos_lD2": negated(how.cos_lD2)}, "qk"),
        "rotary by other pairs": (lambda how: {"interleaved": not how.interleaved}, "qk"),
        "no norm": (lambda how: {"norm": "none"}, "qk"),
        "RMSNorm for LayerNorm": (lambda how: {"norm": "rms", "q_bias": None, "k_bias": None}, "qk"),
    },
    "rms": {
        **{f"{name} dropped": (lambda how, name=name: {name: None}, name[0]) for name in ("q_weight", "k_weight")},
        "rotary of the next token": (lambda how: turned_rows(how, lambda x: x.roll(-1, 0)), "qk"),
        "rotary by other pairs": (lambda how: {"interleaved": not how.interleaved}, "qk"),
        "rotary by columns in another order": (lambda how: turned_rows(how, lambda x: x.flip(1)), "qk"),
        "no rotary": (lambda how: {"cos_lD2": None, "sin_lD2": None}, "qk"),
        "eps of another size": (lambda how: {"eps": 1e-5}, "qk"),
        "weights exchanged": (lambda how: {"q_weight": how.k_weight, "k_weight": how.q_weight}, "qk"),
        "LayerNorm for RMSNorm": (lambda how: {"norm": "layer"}, "qk"),
    },
    "plain": {"norm over the other width": (lambda how: {"per_head": not how.per_head}, "qk")},
}


@pytest.mark.parametrize("way", WRONG)
def test_negative_control_a_mistake_is_noticed_in_q_or_k(way: str) -> None:
    for call, dtype, visible in ((prepare, torch.float64, 1e-12), (launch, torch.float32, 1e-4)):
        q, k, _ = project(CASE, dtype)
        how = preparation(CASE, *WAY[way], dtype, affine=way != "plain")
        right: Any = {"nothing": (lambda how: {}, "")}
        want = truth(q, k, how)
        for mistake, (change, wrong) in (right | WRONG[way]).items():
            pairs = zip("qk", call(q, k, replace(how, **change(how))), want, strict=True)
            assert "".join(name for name, got, x in pairs if (got - x).abs().max() > visible) == wrong, mistake


def test_negative_control_heads_in_another_order_are_noticed() -> None:
    q, k, v = project(SMALL[0], HALF)
    how, outboxes = preparation(SMALL[0], "layer", "pairs", HALF), boxes(SMALL[0], HALF)
    launch_into(q.flip(2), k.flip(2), v.flip(2), how, outboxes)
    whole = dict(zip("qkv", (*launch(q, k, how), v), strict=True))
    for name, view, heads in written(outboxes):
        assert not view.numel() or not torch.equal(view, whole[name][:, :, heads].transpose(0, 1))


@pytest.mark.parametrize(
    ("rows", "rotary"), [("of batch rows", "halves"), ("of heads", "pairs"), ("of heads of one image", "halves")]
)
def test_batch_rows_and_heads_may_have_rotary_rows_of_their_own(rotary: str, rows: str) -> None:
    """With the first one's rows for all, the results differ."""
    case = {**SMALL[0], "kv_heads": SMALL[0]["heads"]}
    (q, k, v), tokens = project(case, HALF), case["tokens"]
    how = preparation(case, "rms per head", rotary, HALF)
    shape = {
        "of batch rows": (2, tokens),
        "of heads": (2, tokens, case["heads"]),
        "of heads of one image": (1, tokens, case["heads"]),
    }[rows]
    angles = random((*shape, case["dim"] // 2), 9, DEVICE, torch.float32)
    first = angles[0] if rows == "of batch rows" else angles[:, :, 0]
    each, other = (replace(how, cos_lD2=x.cos(), sin_lD2=x.sin()) for x in (angles, first))
    for call in (launch, reference):
        for got, want, wrong in zip(call(q, k, each), truth(q, k, each), call(q, k, other), strict=True):
            assert rounded_once(got, want)
            assert not rounded_once(wrong, want)
    into = boxes(case, HALF)
    launch_into(q, k, v, each, into)
    assert holds(into, *launch(q, k, each), v)


@pytest.mark.parametrize("norm", ["rms", "layer per head"])
def test_one_input_alone_has_the_bits_of_both(norm: str) -> None:
    case = {**SMALL[0], "kv_heads": SMALL[0]["heads"]}
    q, k, _ = project(case, HALF)
    how = preparation(case, norm, "pairs", HALF)
    of_k = replace(how, q_weight=how.k_weight, q_bias=how.k_bias)
    for got, want in zip((launch_one(q, how), launch_one(k, of_k)), launch(q, k, how), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(prepare_one(q.double(), double(how)), reference(q.double(), k.double(), double(how))[0])


@gpu
def test_public_functions_launch_the_kernel() -> None:
    case, dtype = CASES[5], torch.bfloat16
    q, k, v = project(case, dtype)
    how = preparation(case, "rms per head", "halves", dtype)
    for got, want in zip(prepare(q, k, how), launch(q, k, how), strict=True):
        assert torch.equal(got, want)
    into = boxes(case, dtype)
    into_outboxes(q, k, v, how, into)
    assert holds(into, *launch(q, k, how), v)


@gpu
def test_a_captured_call_replays_on_new_inputs() -> None:
    case, dtype = CASES[0], torch.bfloat16
    q, k, v = project(case, dtype)
    how, outboxes = preparation(case, "layer", "pairs", dtype), boxes(case, dtype)
    into_outboxes(q, k, v, how, outboxes)  # compiles, and makes the table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        into_outboxes(q, k, v, how, outboxes)
    for x in (q, k, v):
        x.neg_()
    graph.replay()
    assert holds(outboxes, *launch(q, k, how), v)
