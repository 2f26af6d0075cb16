"""Tests of the coefficients of steps: DDIM's, DDPM's and traced ones against diffusers', and what is not traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, sample
from seqpar.loading.schedulers import respace, spaced, steps_locally
from seqpar.loop import steppers
from seqpar.loop.loop import draw_noise
from seqpar.loop.request import Request, course, why_not_captured
from seqpar.loop.run import Run
from seqpar.loop.schedules import Schedule, ddim_steps, ddpm_steps
from seqpar.loop.steppers import Replicated, Traced, decide, traced_steps
from seqpar.mesh.mesh import Mesh
from tests.conftest import DEVICE
from tests.loop.test_sampling import NAMED, NOISY, WHOLE, Case, afresh, by_diffusers, off, scheduler
from tests.support.meshes import random
from tests.support.original import Process, exact
from tests.support.tiny import diffusers_dit

# DDIM and DDPM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_ddim_coefficients_are_diffusers(prediction: str, zero_snr: bool) -> None:
    """With zero terminal SNR the first state is pure noise, for which an epsilon prediction is meaningless."""
    options: Any = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if zero_snr else {}
    sched = scheduler(prediction_type=prediction, **options)
    sched.alphas_cumprod, sched.final_alpha_cumprod = sched.alphas_cumprod.double(), sched.final_alpha_cumprod.double()
    x, m, z = (random((2, 4, 4, 4), seed) for seed in range(3))
    for steps, eta in ((1, 0.7), (7, 0.0), (25, 0.7)):
        sched.set_timesteps(steps)
        if zero_snr and prediction == "epsilon":
            with pytest.raises(ValueError, match="'epsilon' with zero terminal SNR"):
                ddim_steps(sched, {"eta": eta})
            continue
        for t, c in zip(sched.timesteps, ddim_steps(sched, {"eta": eta}).table_SK, strict=True):
            ours = c[5] * (c[0] * x + c[1] * m) + c[6] * (c[3] * x + c[4] * m) + c[7] * z
            theirs: Any = sched.step(m, int(t), x, eta=eta, variance_noise=z if eta else None)
            assert torch.allclose(ours, theirs.prev_sample, rtol=1e-10, atol=1e-10)


def test_all_coefficients_of_ddpm_are_the_originals() -> None:
    """All 250 steps, without a model: x, its output and noise are random."""
    sched: Any = exact(scheduler("DDPMScheduler", variance_type="learned_range", clip_sample=False))
    sched.set_timesteps(timesteps=spaced("250", 1000))
    process = Process(spaced("250", 1000)[::-1])
    x, m, v, z = (random((1, 4, 4, 4), seed) for seed in range(4))
    for i, c in zip(range(249, -1, -1), ddpm_steps(sched).table_SK, strict=True):
        got = c[3] * (c[0] * x + c[1] * m) + c[4] * x + (torch.exp(c[5] + c[6] * v) * z if i else 0)
        want = process.p_sample(torch.cat((m, v), 1), x, i, z)
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def test_respacing_ends_when_timesteps_are_set_again() -> None:
    respaced, fresh = scheduler(), scheduler()
    respace(respaced, "7")
    ends = ddim_steps(copy.deepcopy(respaced), {}).table_SK[:, 5]
    assert torch.equal(ends[:-1], respaced.alphas_cumprod[respaced.timesteps[1:]].double() ** 0.5)
    for each in (respaced, fresh):
        each.set_timesteps(7)
    assert torch.equal(ddim_steps(respaced, {}).table_SK, ddim_steps(fresh, {}).table_SK)


# Traced steps --------------------------------------------------------------------------------------------------------

TOKENS = draw_noise((1, 512, 16), torch.Generator().manual_seed(3))  # enough that errors are averages


def smooth(seen: Tensor, index: int) -> Tensor:
    """A prediction that depends on what is seen and on the step, in fp64 and then in the dtype of what is seen."""
    return torch.cos(seen.double() + 0.1 * index).to(seen.dtype)


def stepped(case: Case, dtype: torch.dtype, theirs: bool) -> Tensor:
    """All steps on one rank's tokens, without a model: by traced coefficients or the scheduler itself."""
    sched = case.scheduler()
    sched.set_timesteps(case.steps)
    x = TOKENS.to(DEVICE, dtype) * float(getattr(sched, "init_noise_sigma", 1.0))
    if theirs:
        for index, t in enumerate(sched.timesteps):
            seen = sched.scale_model_input(x, t) if hasattr(sched, "scale_model_input") else x
            x = sched.step(smooth(seen, index), t, x).prev_sample
        return x
    schedule, count = decide(sched).schedule, len(sched.timesteps)
    assert schedule is not None
    state: Any = SimpleNamespace(tokens=x, guided_width=None, shape=x.shape)
    ones = torch.ones(count, device=DEVICE, dtype=dtype)
    stepper = Traced(state, schedule, traced_steps(state, schedule, ones, torch.Generator()))
    step, bad = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.tensor(count, device=DEVICE)
    for index in range(count):
        stepper(smooth(x, index), None, index, step, bad)
        step += 1
    assert int(bad) == count
    return x


@pytest.mark.parametrize("name", NAMED)
def test_the_steps_alone_in_fp32_are_as_near_to_fp64_as_diffusers_own(name: str) -> None:
    truth, ours = (stepped(NAMED[name], dtype, False) for dtype in (torch.float64, torch.float32))
    assert off(stepped(NAMED[name], torch.float64, True), truth) <= 1e-6
    assert off(ours, truth) <= 1.25 * off(stepped(NAMED[name], torch.float32, True), truth)


WRONG: dict[str, Callable[[Schedule], dict[str, Tensor]]] = {
    "coefficients of the row before": lambda it: {
        "states_SP": it.states_SP.roll(1, 0),
        "outputs_SQ": it.outputs_SQ.roll(1, 0),
    },
    "no history of outputs": lambda it: {"outputs_SQ": it.outputs_SQ * torch.tensor([1.0, 0.0])},
    "input scales of the step before": lambda it: {"inputs_S": it.inputs_S.roll(1, 0) * 1.01},
    "outputs of the step before": lambda it: {},
}


@pytest.mark.parametrize("how", WRONG)
def test_negative_control_wrong_coefficients_and_stale_history_are_noticed(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    right = steppers.guided_multistep

    def stale(history: Any, cond: Tensor, uncond: Tensor, steps: Any, step: Tensor, bad: Tensor) -> None:
        before = history.outputs_QnlC.clone()
        right(history, cond, uncond, steps, step, bad)
        history.outputs_QnlC.copy_(before if int(step) % 2 else history.outputs_QnlC)

    if how == "outputs of the step before":
        monkeypatch.setattr(steppers, "guided_multistep", stale)
    else:
        wrong = lambda state, it, *rest: traced_steps(state, replace(it, **WRONG[how](it)), *rest)  # noqa: E731
        monkeypatch.setattr(steppers, "traced_steps", wrong)
    case = NAMED["DPM++ 2M"]
    assert off(afresh(case), by_diffusers(case)[-1].prev_sample) > 1e-4


# What is traced ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("DDPMScheduler", {}, "because of its clip_sample"),
        # the range is beyond ordinary values, but the trace's vectors have elements of 1000
        ("DDPMScheduler", {"clip_sample": True, "clip_sample_range": 100.0}, "because of its clip_sample"),
        ("DPMSolverMultistepScheduler", {"thresholding": True}, "because of its thresholding"),
        ("DDIMScheduler", {"thresholding": True, "clip_sample": False}, "because of its thresholding"),
        ("PNDMScheduler", {}, "is not linear in the last 4 states and outputs"),
        ("UnCLIPScheduler", {}, "because of its clip_sample"),
    ],
)
def test_what_is_not_linear_is_stepped_whole_and_says_why(name: str, config: dict[str, Any], reason: str) -> None:
    sched = getattr(diffusers, name)(**config)
    assert not steps_locally(sched)
    sched.set_timesteps(16)
    decision = decide(sched)
    assert reason in str(decision.whole)
    assert reason in str(decision)


def test_ddim_with_and_without_clipping_has_a_kernel() -> None:
    assert steps_locally(scheduler())
    assert steps_locally(scheduler(clip_sample=True))
    assert not steps_locally(scheduler("EulerDiscreteScheduler"))


def test_tracing_leaves_the_scheduler_and_torchs_generator_as_they_are() -> None:
    sched = NOISY["SDE-DPM++ 2M"].scheduler()
    sched.set_timesteps(16)
    before, state = {**sched.__dict__}, torch.get_rng_state()
    assert decide(sched).schedule is not None
    assert sched.__dict__ == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("case", "kind"), [(NAMED["UniPC"], Traced), (WHOLE["PNDM"], Replicated)])
def test_only_what_steps_on_the_host_has_no_graph(case: Case, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    dit, labels = DistributedDiT(diffusers_dit(num_layers=2).float(), Mesh.single(DEVICE)), torch.tensor([3, 7])
    it = course(Request(case.scheduler(), case.noise(), {"class_labels": labels}, case.steps, case.guidance))
    assert isinstance(Run(dit, it).steppers["image"], kind)
    monkeypatch.setattr(DistributedDiT, "device", torch.device("cuda"))
    reason = why_not_captured(dit, it.decision)
    assert reason is None if kind is Traced else "steps on the host (PNDMScheduler is not traced" in str(reason)


@pytest.mark.parametrize(
    ("sched", "settings", "message"),
    [
        *(
            (
                getattr(diffusers, kind)(variance_type="learned_range"),
                {},
                rf"'{kind}', which needs the model's variances .* passes on to DDPMScheduler",
            )
            for kind in ("DDPMParallelScheduler", "UnCLIPScheduler")
        ),
        (scheduler("DDPMScheduler", variance_type="learned_range"), {}, "'learned_range' with a model of 4 output"),
        *(
            (sched, settings, "expected DDIMScheduler or DDPMScheduler without thresholding")
            for sched in (DDIMScheduler(thresholding=True), DDPMScheduler(thresholding=True))
            for settings in ({"respacing": "25"}, {"clip_denoised": True})
        ),
    ],
)
def test_variances_and_settings_that_do_not_fit_are_refused(sched: Any, settings: dict[str, Any], message: str) -> None:
    dit = DistributedDiT(diffusers_dit(learned_sigma=False), Mesh.single())
    with pytest.raises(ValueError, match=message):
        sample(
            dit,
            sched,
            Case().noise(),
            {"class_labels": torch.tensor([3, 7, 3])},
            steps=5,
            guidance=Guidance(3.0),
            **settings,
        )


# docs/schedulers.md --------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_installed_diffusers_does() -> None:
    """It was made with the packages of all classes; `NEEDS` names every class that diffusers replaces without its."""
    from docs.tools.schedulers_page import missing, page  # here: copies of the tree with planted faults have no docs

    committed = (Path(__file__).parents[2] / "docs" / "schedulers.md").read_text().splitlines()
    names = {name for name in dir(diffusers) if name.endswith("Scheduler")}
    assert {name for name in names if ".dummy_" in getattr(diffusers, name).__module__} == missing()
    assert not any("is not in diffusers here" in line for line in committed)
    if f"diffusers {diffusers.__version__} " not in committed[2]:
        pytest.skip(f"the page was made with another diffusers than {diffusers.__version__}")
    assert {line.split("|")[1].strip() for line in committed if "Scheduler |" in line} == names
    installed = [
        [line for line in lines if not line.startswith("|") or line.split("|")[1].strip() not in missing()]
        for lines in (page().splitlines(), committed)
    ]
    assert installed[0] == installed[1]
