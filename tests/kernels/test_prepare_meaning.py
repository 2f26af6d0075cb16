"""Tests of what `Prepare` means, against torch.nn's norms and rotary computed in another way.

The tests of strategies rely on this meaning: `tests/attention/test_strategies.py` uses `prepare` on both sides, and
`tests/kernels/test_prepare.py` compares kernel and reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from seqpar.kernels.prepare import prepare, prepare_into
from seqpar.types.outboxes import Outbox
from seqpar.types.protocols import Prepare
from tests.conftest import DEVICE
from tests.support.meshes import random

Norm = Literal["none", "layer", "rms"]
BATCH, TOKENS, DIM = 2, 5, 8
EPS = 3e-3  # so large that another one shows
TOLERANCE = 1e-13  # fp64
WIDTHS = [(4, 4), (6, 3), (8, 1)]  # query and key-value heads


class Case(NamedTuple):
    """One way to prepare."""

    norm: Norm
    per_head: bool
    rotary: Literal["none", "interleaved", "halves"]
    affine: bool
    heads: int = 4
    kv_heads: int = 4


NORMS: list[tuple[Norm, bool]] = [("none", False), ("layer", False), ("layer", True), ("rms", False), ("rms", True)]
CASES = [
    Case(norm, per_head, rotary, affine, *widths)
    for norm, per_head in NORMS
    for rotary in ("none", "interleaved", "halves")
    for affine in (True, False)
    for widths in WIDTHS
    if norm != "none" or not affine
]


def project(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views of one projection, with a mean, so that LayerNorm and RMSNorm differ."""
    heads = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (random((BATCH, TOKENS, sum(heads), DIM), 0, DEVICE) + 0.5).split(heads, dim=2)
    return q, k, v


def angles() -> Tensor:
    """Return rotary angles, (l, D/2), that start at a later token of a sequence."""
    return (torch.arange(3, 3 + TOKENS, dtype=torch.float64)[:, None] * 0.3 ** torch.arange(DIM // 2)).to(DEVICE)


def affine(case: Case) -> dict[str, Tensor]:
    """Return random weights and biases for this case, by their names in `Prepare`."""
    names = {"none": (), "layer": ("weight", "bias"), "rms": ("weight",)}[case.norm] if case.affine else ()
    wide = {"q": case.heads * DIM, "k": case.kv_heads * DIM}
    found = [(f"{x}_{name}", DIM if case.per_head else wide[x]) for x in "qk" for name in names]
    return {name: random((width,), 1 + seed, DEVICE) for seed, (name, width) in enumerate(found)}


def preparation(case: Case) -> Prepare:
    rows = (None, None) if case.rotary == "none" else (angles().cos(), angles().sin())
    return Prepare(
        case.norm,
        case.per_head,
        EPS,
        cos_lD2=rows[0],
        sin_lD2=rows[1],
        interleaved=case.rotary == "interleaved",
        **affine(case),
    )


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """Return q and k after torch.nn's norms, rotated by the angles themselves."""
    turn: dict[str, Callable[[Tensor], Tensor]] = {"interleaved": by_complex, "halves": by_matrix}
    q, k = (normalised(x, case, name) for name, x in zip("qk", project(case)[:2], strict=True))
    return (q, k) if case.rotary == "none" else (turn[case.rotary](q), turn[case.rotary](k))


def normalised(x_BlHD: Tensor, case: Case, name: str) -> Tensor:
    if case.norm == "none":
        return x_BlHD
    x = x_BlHD if case.per_head else x_BlHD.reshape(BATCH, TOKENS, -1)
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[case.norm]
    module = kind(x.shape[-1], eps=EPS, elementwise_affine=case.affine, device=DEVICE, dtype=torch.float64)
    module.load_state_dict({key[2:]: value for key, value in affine(case).items() if key.startswith(name)})
    return module(x).detach().reshape(x_BlHD.shape)


def by_complex(x_BlHD: Tensor) -> Tensor:
    """Rotate pairs (2j, 2j + 1) as complex numbers, by a product with exp(i angle)."""
    turned = torch.view_as_complex(x_BlHD.reshape(*x_BlHD.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(turned * torch.exp(1j * angles())[:, None]).reshape(x_BlHD.shape)


def by_matrix(x_BlHD: Tensor) -> Tensor:
    """Rotate each pair (j, j + D/2) by its 2 x 2 matrix."""
    out, half = x_BlHD.clone(), DIM // 2
    for token, row in enumerate(angles()):
        for j, angle in enumerate(row):
            matrix = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).view(2, 2)
            out[:, token, :, [j, j + half]] = x_BlHD[:, token, :, [j, j + half]] @ matrix.T
    return out


def off(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> str:
    """Return which of q and k differ."""
    return "".join(name for name, a, b in zip("qk", got, want, strict=True) if (a - b).abs().max() > TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_prepare_is_torchs_norm_and_rotary(case: Case) -> None:
    q, k, v = project(case)
    how, want = preparation(case), truth(case)
    got = prepare(q, k, how)
    assert [x.dtype for x in got] == [torch.float64] * 2
    assert [x.shape for x in got] == [q.shape, k.shape]
    assert off(got, want) == ""
    into = [x.new_full(x.transpose(0, 1).shape, float("nan")) for x in (q, k, v)]
    prepare_into(q, k, v, how, [Outbox(into[0], into[1], into[2], slice(0, case.heads), slice(0, case.kv_heads))])
    q_lBHD, k_lBGD, v_lBGD = into
    assert off((q_lBHD.transpose(0, 1), k_lBGD.transpose(0, 1)), want) == ""
    assert torch.equal(v_lBGD.transpose(0, 1), v)


def test_prepare_without_norm_and_rotary_is_the_input() -> None:
    q, k, _ = project(CASES[0])
    assert all(a is b for a, b in zip(prepare(q, k, Prepare()), (q, k), strict=True))


Change = Callable[[Prepare], dict[str, Any]]


def turned_rows(how: Prepare, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return both tables of rotary rows after the change."""
    assert how.cos_lD2 is not None
    assert how.sin_lD2 is not None
    return {"cos_lD2": change(how.cos_lD2), "sin_lD2": change(how.sin_lD2)}


LAYER, RMS = Case("layer", False, "interleaved", True), Case("rms", True, "halves", True)
# what is changed, and which of q and k must then be wrong
WRONG: list[tuple[str, Case, Change, str]] = [
    *(
        (f"{name} dropped", LAYER, lambda how, name=name: {name: None}, name[0])
        for name in ("q_weight", "q_bias", "k_weight", "k_bias")
    ),
    *(
        (f"{name} negated", LAYER, lambda how, name=name: {name: -getattr(how, name)}, name[0])
        for name in ("q_weight", "q_bias", "k_weight", "k_bias")
    ),
    *((f"rms {name} dropped", RMS, lambda how, name=name: {name: None}, name[0]) for name in ("q_weight", "k_weight")),
    *(
        (f"{case.norm} {name}", case, change, "qk")
        for case in (LAYER, RMS)
        for name, change in (
            ("rotary backwards", lambda how: {"sin_lD2": -how.sin_lD2}),
            ("cosines negated", lambda how: {"cos_lD2": -how.cos_lD2}),
            ("rotary of the next token", lambda how: turned_rows(how, lambda x: x.roll(-1, 0))),
            ("rotary by other pairs", lambda how: {"interleaved": not how.interleaved}),
            ("rotary by columns in another order", lambda how: turned_rows(how, lambda x: x.flip(1))),
            ("no rotary", lambda how: {"cos_lD2": None, "sin_lD2": None}),
            ("eps of another size", lambda how: {"eps": 1e-5}),
            ("no norm", lambda how: {"norm": "none"}),
            ("weights exchanged", lambda how: {"q_weight": how.k_weight, "k_weight": how.q_weight}),
        )
    ),
    ("biases exchanged", LAYER, lambda how: {"q_bias": how.k_bias, "k_bias": how.q_bias}, "qk"),
    ("RMSNorm for LayerNorm", LAYER, lambda how: {"norm": "rms", "q_bias": None, "k_bias": None}, "qk"),
    ("LayerNorm for RMSNorm", RMS, lambda how: {"norm": "layer"}, "qk"),
    *(
        (f"{case.norm} over the other width", case, lambda how: {"per_head": not how.per_head}, "qk")
        for case in (LAYER._replace(affine=False), RMS._replace(affine=False))
    ),
]


@pytest.mark.parametrize(("case", "change", "wrong"), [x[1:] for x in WRONG], ids=[x[0] for x in WRONG])
def test_prepare_negative_control_is_noticed(case: Case, change: Change, wrong: str) -> None:
    q, k, _ = project(case)
    how = preparation(case)
    assert off(prepare(q, k, how), truth(case)) == ""
    assert off(prepare(q, k, replace(how, **change(how))), truth(case)) == wrong


@pytest.mark.parametrize("name", ["q_bias", "k_bias"])
def test_a_bias_for_an_rms_norm_is_refused(name: str) -> None:
    bias: dict[str, Any] = {name: torch.zeros(DIM)}
    with pytest.raises(ValueError, match="RMSNorm has no bias"):
        Prepare("rms", True, **bias)
    assert Prepare("layer", True, **bias)
