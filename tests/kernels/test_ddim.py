"""Tests of guidance with DDIM, and with DDPM by the model's variances, in one kernel: it has the reference's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.kernels.ddim import BLOCK, CASES, Update, guided_step, launch, reference
from tests.conftest import DEVICE
from tests.kernels.shared import DTYPES, gpu
from tests.support.pairs import covering

# on CPUs an image is a few elements larger than a block, because the interpreter needs milliseconds for each program
SMALL = [
    {**case, "tokens": min(case["tokens"], BLOCK // case["columns"] + 3)} for case in CASES if case["tokens"] <= 130
]
SIZES = [*SMALL, *(pytest.param(case, marks=gpu) for case in CASES)]
KINDS = ["ddim", "ddpm"]
CALLS = [launch, reference]
STEPS = 3
BOUNDS = torch.tensor((1.0, float("inf"), 0.7))  # of the clipping in each step
CHANGES: dict[str, dict[str, Any]] = {
    "guided": {},
    "all channels": {"guided": None},
    "one branch, strided": {},
    "no noise": {"noise_TnlC": None},
    "clipped": {"clipped": True},
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def data(
    case: dict[str, int], kind: str = "ddim", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Update]:
    """Return the state, both branches (two halves of one output) and all steps; noise is loaded from step 1 on."""
    images, tokens, columns, outputs = (case[name] for name in ("images", "tokens", "columns", "outputs"))
    cond, uncond = draw(2 * images, tokens, outputs, seed=0).to(dtype).chunk(2)
    noise, guidance = draw(2, images, tokens, columns, seed=2), torch.tensor((4.0, 1.3, 7.7), device=DEVICE)
    table, first = draw(STEPS, 7 if kind == "ddpm" else 8, seed=1), torch.tensor(1, device=DEVICE)
    table[:, 2] = BOUNDS.to(DEVICE)
    table = table.double() if kind == "ddpm" else table
    update = Update(table, guidance, columns // 4 * 3, noise, first, learned=kind == "ddpm")
    return draw(images, tokens, columns, seed=3), cond, uncond, update


def counters(step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(step, device=DEVICE), torch.tensor(STEPS, device=DEVICE)


# DDPM has neither of the last two changes
WAYS = [pytest.param(kind, change) for kind in KINDS for change in CHANGES][:8]


@pytest.mark.parametrize(("case", "kind", "change", "dtype"), covering(SIZES, WAYS, turns=DTYPES, rest=gpu))
def test_kernel_gives_the_bits_of_plain_torch(case: dict[str, int], dtype: torch.dtype, kind: str, change: str) -> None:
    if kind == "ddpm" and case["outputs"] < 2 * case["columns"]:
        case = {**case, "outputs": 2 * case["columns"]}
    state, cond, uncond, update = data(case, kind, dtype)
    update, branch = replace(update, **CHANGES[change]), uncond
    if change.endswith("strided"):
        cond, branch = cond.transpose(0, 1).contiguous().transpose(0, 1), None
    for step in (1, 2):  # one without clipping, one with
        got, want = state.clone(), state.clone()
        index, bad = counters(step)
        launch(got, cond, branch, update, index, bad)
        reference(want, cond, branch, update, index, bad)
        assert torch.equal(got, want)
        assert int(bad) == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_papers_arithmetic(kind: str) -> None:
    """In fp64; DDPM's variance as it is written: fractions of two logarithms, of the conditional branch."""
    *tensors, update = data(CASES[1], kind)
    assert update.noise_TnlC is not None
    x, c, u, z = (tensor.double() for tensor in (*tensors, update.noise_TnlC[1]))
    a, scale = update.coefficients_SK[2].double(), update.guidance_S[2].double()
    m = c[..., :16].clone()
    m[..., :12] = u[..., :12] + scale * (c[..., :12] - u[..., :12])
    x0 = (a[0] * x + a[1] * m).clamp(-a[2], a[2])
    if kind == "ddim":
        want = a[5] * x0 + a[6] * (a[3] * x + a[4] * m) + a[7] * z
    else:
        low, high = 2 * (a[5] - a[6]), 2 * (a[5] + a[6])  # logarithms of the variance at v = -1 and v = 1
        fraction = (c[..., 16:] + 1) / 2
        want = a[3] * x0 + a[4] * x + torch.exp(0.5 * (fraction * high + (1 - fraction) * low)) * z
    wide = {name: value.double() for name, value in vars(update).items() if name.endswith(("_SK", "_S", "_TnlC"))}
    index, bad = counters(2)
    guided_step(x, c, u, replace(update, **wide), index, bad)
    assert float(((x - want) / want.abs().clamp_min(1)).abs().max()) < 1e-12


def test_a_token_does_not_depend_on_the_others() -> None:
    state, cond, uncond, update = data(CASES[3])
    whole, index, bad = state.clone(), *counters(1)
    launch(whole, cond, uncond, replace(update, noise_TnlC=None), index, bad)
    part = state[:, 40:45].clone()
    launch(part, cond[:, 40:45], uncond[:, 40:45], replace(update, noise_TnlC=None), index, bad)
    assert torch.equal(part, whole[:, 40:45])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("kind", "column"), [("ddim", 15), ("ddpm", 15), ("ddpm", 31)])
@pytest.mark.parametrize("call", CALLS)
def test_the_first_bad_step_is_kept(call: Callable[..., None], kind: str, column: int, value: float) -> None:
    state, cond, uncond, update = data(CASES[1], kind)
    index, bad = counters(1)
    cond[2, 84, column] = abs(value) if column == 31 else value  # exp(-inf) is a variance of 0
    uncond[..., 16:] = float("nan")  # columns that do not count: the other branch's variances, and padding
    update.coefficients_SK[:, 6] = update.coefficients_SK[:, 6].abs()
    call(state, cond, uncond, update, index, bad)
    assert int(bad) == 1
    assert int(state.isfinite().logical_not().sum()) == 1
    call(state, cond, uncond, update, index + 1, bad)
    assert int(bad) == 1


def test_swapped_branches_and_other_steps_are_noticed() -> None:
    """This is a negative control."""
    state, cond, uncond, update = data(CASES[1])
    results = []
    for first, second, step in ((cond, uncond, 1), (uncond, cond, 1), (cond, uncond, 2)):
        index, bad = counters(step)
        results.append(state.clone())
        launch(results[-1], first, second, update, index, bad)
    assert float((results[0] - results[1]).abs().max()) > 0.1
    assert float((results[0] - results[2]).abs().max()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernel_cannot_take_is_refused(kind: str) -> None:
    state, cond, uncond, update = data(CASES[1], kind)
    index, bad = counters(1)
    with pytest.raises(ValueError, match=r"got state torch\.float32 .*, expected contiguous torch\.float32"):
        launch(state.transpose(0, 1), cond, uncond, update, index, bad)
    with pytest.raises(ValueError, match=rf"at least {32 if kind == 'ddpm' else 16} contiguous columns"):
        launch(state, cond[..., :8], uncond, update, index, bad)
