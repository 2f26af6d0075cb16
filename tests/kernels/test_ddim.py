"""Tests of guidance and DDIM in one kernel: it has the reference's bits with any strides and at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seqpar.kernels.ddim import CASES, Update, guided_step, launch, reference
from tests.conftest import DEVICE

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
SIZES = [pytest.param(case, marks=gpu if case["tokens"] > 130 else ()) for case in CASES]
STEPS = 3


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def data(case: dict[str, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Update]:
    """Return the state, both predictions (two halves of one model output) and all steps with noise."""
    images, tokens, columns, outputs = (case[name] for name in ("images", "tokens", "columns", "outputs"))
    cond, uncond = draw(2 * images, tokens, outputs, seed=0).to(dtype).chunk(2)
    noise, guidance = draw(STEPS, images, tokens, columns, seed=2), torch.tensor((4.0, 1.3, 7.7), device=DEVICE)
    update = Update(draw(STEPS, 7, seed=1), guidance, columns // 4 * 3, 1.0, noise)
    return draw(images, tokens, columns, seed=3), cond, uncond, update


def counters(step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(step, device=DEVICE), torch.tensor(STEPS, device=DEVICE)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("variant", ["all", "no clip", "no noise", "all channels", "no guidance", "clipped"])
def test_kernel_gives_the_bits_of_plain_torch(
    case: dict[str, int], dtype: torch.dtype, step: int, variant: str
) -> None:
    state, cond, uncond, update = data(case, dtype)
    changes = {
        "no clip": {"clip": None},
        "no noise": {"noise_SnlC": None},
        "all channels": {"guided": None},
        "clipped": {"clipped": True},
    }
    update = replace(update, **changes.get(variant, {}))
    branch = None if variant == "no guidance" else uncond
    got, want = state.clone(), state.clone()
    index, bad = counters(step)
    launch(got, cond, branch, update, index, bad)
    reference(want, cond, branch, update, index, bad)
    assert torch.equal(got, want)
    assert int(bad) == STEPS


def test_reference_is_the_papers_arithmetic() -> None:
    """The formulas are computed in fp64, column by column, also for a state in fp64."""
    *tensors, update = data(CASES[1])
    state, cond, uncond = (x.double() for x in tensors)
    assert update.noise_SnlC is not None
    noise = update.noise_SnlC.double()
    table, scales = update.coefficients_S7.double(), update.guidance_S.double()
    update = replace(update, coefficients_S7=table, guidance_S=scales, noise_SnlC=noise)
    index, bad = counters(1)
    c, m = update.coefficients_S7[1], cond[..., :16].clone()
    m[..., :12] = uncond[..., :12] + scales[1] * (cond[..., :12] - uncond[..., :12])
    want = c[4] * (c[0] * state + c[1] * m).clamp(-1, 1) + c[5] * (c[2] * state + c[3] * m) + c[6] * noise[1]
    guided_step(state, cond, uncond, update, index, bad)
    assert float((state - want).abs().max()) < 1e-12


def test_predictions_may_have_any_strides() -> None:
    state, cond, uncond, update = data(CASES[1], torch.float16)
    want, index, bad = state.clone(), *counters(1)
    launch(want, cond, uncond, update, index, bad)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (cond, uncond)]
    launch(state, turned[0], turned[1], update, index, bad)
    assert torch.equal(state, want)


def test_a_token_does_not_depend_on_the_others() -> None:
    state, cond, uncond, update = data(CASES[3])
    whole, index, bad = state.clone(), *counters(1)
    launch(whole, cond, uncond, replace(update, noise_SnlC=None), index, bad)
    part = state[:, 40:45].clone()
    launch(part, cond[:, 40:45], uncond[:, 40:45], replace(update, noise_SnlC=None), index, bad)
    assert torch.equal(part, whole[:, 40:45])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", [launch, reference])
def test_the_first_bad_step_is_kept(value: float, call: Callable[..., None]) -> None:
    state, cond, uncond, update = data(CASES[1])
    index, bad = counters(1)
    cond[2, 84, 15] = value
    call(state, cond, uncond, update, index, bad)
    assert int(bad) == 1
    call(state, cond, uncond, update, index + 1, bad)
    assert int(bad) == 1


def test_columns_that_do_not_count_may_be_anything() -> None:
    state, cond, uncond, update = data(CASES[1])
    cond[..., 16:], uncond[..., 16:] = float("nan"), float("inf")
    index, bad = counters(0)
    launch(state, cond, uncond, update, index, bad)
    assert int(bad) == STEPS


def test_swapped_branches_and_other_steps_are_noticed() -> None:
    """This is a negative control."""
    state, cond, uncond, update = data(CASES[1])
    results = []
    for first, second, step in ((cond, uncond, 0), (uncond, cond, 0), (cond, uncond, 1)):
        index, bad = counters(step)
        results.append(state.clone())
        launch(results[-1], first, second, update, index, bad)
    assert float((results[0] - results[1]).abs().max()) > 0.1
    assert float((results[0] - results[2]).abs().max()) > 0.1


def test_what_the_kernel_cannot_take_is_refused() -> None:
    state, cond, uncond, update = data(CASES[1])
    index, bad = counters(0)
    with pytest.raises(ValueError, match="contiguous fp32"):
        launch(state.transpose(0, 1), cond, uncond, update, index, bad)
    with pytest.raises(ValueError, match="16 contiguous columns"):
        launch(state, cond[..., :8], uncond, update, index, bad)
