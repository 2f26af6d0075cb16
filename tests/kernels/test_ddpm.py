"""Tests of guidance and DDPM with the model's variances in one kernel: it has the reference's bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.kernels.ddpm import CASES, Steps, guided_ddpm, launch, reference
from tests.conftest import DEVICE
from tests.kernels.test_ddim import STEPS, counters, draw

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
SIZES = [pytest.param(case, marks=gpu if case["tokens"] > 130 else ()) for case in CASES]


def data(case: dict[str, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Steps]:
    """Return the state, both branches (two halves of one model output), and all steps, of which two are loaded."""
    images, tokens, columns, outputs = (case[name] for name in ("images", "tokens", "columns", "outputs"))
    cond, uncond = draw(2 * images, tokens, outputs, seed=0).to(dtype).chunk(2)
    noise, guidance = draw(2, images, tokens, columns, seed=2), torch.tensor((4.0, 1.3, 7.7), device=DEVICE)
    table = draw(STEPS, 7, seed=1).double()
    table[:, 6] = torch.tensor((0.3, float("inf"), 0.7), dtype=torch.float64)
    first = torch.tensor(1, device=DEVICE)
    return draw(images, tokens, columns, seed=3), cond, uncond, Steps(table, guidance, noise, first, columns // 4 * 3)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["guided", "all channels", "one branch, strided"])
def test_kernel_gives_the_bits_of_plain_torch(case: dict[str, int], dtype: torch.dtype, variant: str) -> None:
    state, cond, uncond, steps = data(case, dtype)
    steps = replace(steps, guided=None) if variant == "all channels" else steps
    if variant.endswith("strided"):
        cond, uncond = cond.transpose(0, 1).contiguous().transpose(0, 1), None
    for step in (1, 2):  # one without clipping, one with
        got, want = state.clone(), state.clone()
        index, bad = counters(step)
        launch(got, cond, uncond, steps, index, bad)
        reference(want, cond, uncond, steps, index, bad)
        assert torch.equal(got, want)
        assert int(bad) == STEPS


def test_reference_is_the_papers_arithmetic() -> None:
    """The variance is computed as it is written: fractions of two logarithms, of the conditional branch."""
    state, cond, uncond, steps = data(CASES[1])
    x, c, u, z = (t.double() for t in (state, cond, uncond, steps.noise_TnlC[1]))
    a, scale = steps.coefficients_S7[2], steps.guidance_S[2].double()
    m = c[..., :16].clone()
    m[..., :12] = u[..., :12] + scale * (c[..., :12] - u[..., :12])
    low, high = 2 * (a[4] - a[5]), 2 * (a[4] + a[5])  # logarithms of the variance at v = -1 and v = 1
    fraction = (c[..., 16:] + 1) / 2
    sigma = torch.exp(0.5 * (fraction * high + (1 - fraction) * low))
    want = a[2] * (a[0] * x + a[1] * m).clamp(-0.7, 0.7) + a[3] * x + sigma * z
    wide = replace(steps, guidance_S=steps.guidance_S.double(), noise_TnlC=steps.noise_TnlC.double())
    index, bad = counters(2)
    guided_ddpm(x, c, u, wide, index, bad)
    assert float(((x - want) / want.abs().clamp_min(1)).abs().max()) < 1e-12


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("column", [15, 31], ids=["prediction", "variance"])
@pytest.mark.parametrize("call", [launch, reference])
def test_the_first_bad_step_is_kept(column: int, call: Callable[..., None]) -> None:
    state, cond, uncond, steps = data(CASES[1])
    index, bad = counters(1)
    cond[2, 84, column] = float("nan")
    uncond[..., 16:] = float("nan")  # the other branch's variances do not count
    call(state, cond, uncond, steps, index, bad)
    assert int(bad) == 1
    assert int(state.isfinite().logical_not().sum()) == 1
    call(state, cond, uncond, steps, index + 1, bad)
    assert int(bad) == 1


def test_what_the_kernel_cannot_take_is_refused() -> None:
    state, cond, uncond, steps = data(CASES[1])
    index, bad = counters(1)
    with pytest.raises(ValueError, match="expected contiguous"):
        launch(state.transpose(0, 1), cond, uncond, steps, index, bad)
    with pytest.raises(ValueError, match="at least 32 contiguous columns"):
        launch(state, cond[..., :16], uncond, steps, index, bad)
