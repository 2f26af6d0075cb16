"""Tests of traced schedulers on local tokens against diffusers' steps: all steps, fp64 and fp32, sharded, any start."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance
from seqpar.loop import steppers
from seqpar.loop.loop import Sampler, draw_noise
from seqpar.loop.request import Course, Request, course, why_not_captured
from seqpar.loop.run import Run
from seqpar.loop.schedules import Schedule
from seqpar.loop.steppers import OneStep, Replicated, Traced, decide, traced_steps
from seqpar.mesh.mesh import Mesh
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import CLASSES, diffusers_dit, shared_dit

STEPS, LABELS, GUIDANCE = 16, [3, 7], Guidance(3.0)  # diffusers' solvers take other last steps in runs below 15
NOISES = 6  # of which errors in fp32 are averaged
LINEAR = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
FLOW = (("prediction_type", "flow_prediction"), ("use_flow_sigmas", True))
Config = tuple[tuple[str, Any], ...]
Case = tuple[str, Config]
NAMED: dict[str, Case] = {
    "DPM++ 2M": ("DPMSolverMultistepScheduler", ()),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", (("use_karras_sigmas", True),)),
    "DPM++ 2M flow": ("DPMSolverMultistepScheduler", FLOW),
    "UniPC": ("UniPCMultistepScheduler", ()),
    "UniPC flow": ("UniPCMultistepScheduler", FLOW),
    "Euler": ("EulerDiscreteScheduler", ()),
    "Heun": ("HeunDiscreteScheduler", ()),
    "FlowMatchEuler": ("FlowMatchEulerDiscreteScheduler", (("shift", 3.0),)),
    "DEIS": ("DEISMultistepScheduler", ()),
}
NOISY: dict[str, Case] = {
    "SDE-DPM++ 2M": ("DPMSolverMultistepScheduler", (("algorithm_type", "sde-dpmsolver++"),)),
    "Euler ancestral": ("EulerAncestralDiscreteScheduler", ()),
    "KDPM2 ancestral": ("KDPM2AncestralDiscreteScheduler", ()),
    "DDPM": ("DDPMScheduler", (("clip_sample", False),)),
    "LCM": ("LCMScheduler", (("clip_sample", False),)),
    "TCD": ("TCDScheduler", ()),  # its default eta is 0.3
    "SA-Solver": ("SASolverScheduler", ()),
    # these make the state fp32 before they draw like it
    "FlowMatchEuler stochastic": ("FlowMatchEulerDiscreteScheduler", (("stochastic_sampling", True),)),
    "LTX ancestral": ("LTXEulerAncestralRFScheduler", ()),
}
WHOLE: dict[str, Case] = {
    "PNDM": ("PNDMScheduler", ()),
    "DPM++ thresholds": ("DPMSolverMultistepScheduler", (("thresholding", True),)),
}
CASES = NAMED | NOISY | WHOLE | {"DDIM": ("DDIMScheduler", (("clip_sample", False),))}


def scheduler(name: str) -> Any:
    """Return a new scheduler of a case above, with the betas of the tests' model if it has betas."""
    kind, config = getattr(diffusers, CASES[name][0]), dict(CASES[name][1])
    known = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in (LINEAR | config).items() if key in known})


def small_dit() -> Any:
    """Return a DiT of two blocks: these tests are about steps."""
    return diffusers_dit(num_layers=2)


def noise(seed: int = 2) -> Tensor:
    return draw_noise((2, 4, 8, 8), torch.Generator().manual_seed(seed))


@cache
def diffusers_own(
    name: str,
    dtype: torch.dtype = torch.float64,
    begin: int = 0,
    scales: tuple[float, ...] | None = None,
    eta: float | None = None,
) -> Tensor:
    """Return the latents of diffusers' model and scheduler in one process."""
    sched, model = scheduler(name), small_dit().to(DEVICE, dtype)
    # this one alone computes with its sigmas on the latents' device, the others with numbers
    placed = {"device": DEVICE} if name == "LTX ancestral" else {}
    sched.set_timesteps(STEPS, **placed)
    if begin:
        sched.set_begin_index(begin)
    x = noise().to(DEVICE, dtype) * (1.0 if begin else float(getattr(sched, "init_noise_sigma", 1.0)))
    labels, generator = torch.tensor(LABELS, device=DEVICE), torch.Generator().manual_seed(5)
    options: dict[str, Any] = {} if eta is None else {"eta": eta}
    options |= {"generator": generator} if "generator" in inspect.signature(sched.step).parameters else {}
    for i, t in enumerate(sched.timesteps[begin:]):
        seen = sched.scale_model_input(x, t) if hasattr(sched, "scale_model_input") else x
        c, u = (
            model(seen.to(dtype), timestep=t.to(DEVICE).expand(len(x)), class_labels=y).sample[:, :4]
            for y in (labels, torch.full_like(labels, CLASSES))
        )
        x = sched.step(u + (scales[i] if scales else GUIDANCE.scale) * (c - u), t, x, **options).prev_sample
    return x.double().cpu()


def ours(
    rank: int,
    world: int,
    device: torch.device,
    layout: tuple[str, int],
    name: str,
    dtype: torch.dtype = torch.float64,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the engine's latents on this mesh."""
    model = shared_dit(device, 2) if dtype == torch.float64 else small_dit().to(device, dtype)
    dit = DistributedDiT(model, mesh_for(layout[0], world, device, layout[1]), layout[0], local(device))
    run = Run(dit, ordered(name, dtype, **(options or {})))
    for _ in run.timesteps:
        run.step()
    assert run.first_bad() == len(run.timesteps)
    return run.latents()["image"].double().cpu()


def ordered(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Course:
    labels = {"class_labels": torch.tensor(LABELS)}
    options = {"guidance": GUIDANCE, "generator": torch.Generator().manual_seed(5), **options}
    return course(Request(scheduler(name), noise().to(dtype), labels, STEPS, **options))


@cache
def alone(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
    """Return what one rank samples."""
    return ours(0, 1, torch.device(DEVICE), ("ulysses", 1), name, dtype, options)


def stepper(run: Run) -> steppers.Stepper:
    (only,) = run.steppers.values()
    return only


def off(got: Tensor, truth: Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


def norm(values: list[float]) -> float:
    return sum(value**2 for value in values) ** 0.5


def smooth(seen: Tensor, index: int) -> Tensor:
    """A prediction that depends on what is seen and on the step, in fp64 and then in the dtype of what is seen."""
    return torch.cos(seen.double() + 0.1 * index).to(seen.dtype)


def stepped_here(name: str, dtype: torch.dtype) -> Tensor:
    """All steps on one rank's tokens, without a model."""
    sched = scheduler(name)
    sched.set_timesteps(STEPS)
    schedule = decide(sched).schedule
    assert schedule is not None
    tokens = many().to(DEVICE, dtype) * float(getattr(sched, "init_noise_sigma", 1.0))
    state: Any = SimpleNamespace(tokens=tokens, guided_width=None, shape=tokens.shape)
    count, generator = len(sched.timesteps), torch.Generator()
    steps = traced_steps(state, schedule, torch.ones(count, device=DEVICE, dtype=dtype), generator)
    step, bad = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.tensor(count, device=DEVICE)
    made = Traced(state, schedule, steps)
    for index in range(count):
        made(smooth(tokens, index), None, index, step, bad)
        step += 1
    assert int(bad) == count
    return tokens.double().cpu()


def stepped_by_diffusers(name: str, dtype: torch.dtype) -> Tensor:
    """The same by the scheduler itself."""
    sched = scheduler(name)
    sched.set_timesteps(STEPS)
    x = many().to(DEVICE, dtype) * float(getattr(sched, "init_noise_sigma", 1.0))
    for index, t in enumerate(sched.timesteps):
        seen = sched.scale_model_input(x, t) if hasattr(sched, "scale_model_input") else x
        x = sched.step(smooth(seen, index), t, x).prev_sample
    return x.double().cpu()


def many() -> Tensor:
    """Tokens enough that errors are averages."""
    return draw_noise((1, 512, 16), torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [*NAMED, *NOISY])
def test_all_steps_in_fp64_are_diffusers_own(name: str) -> None:
    """The remaining difference comes from diffusers' casts to fp32 inside its steps."""
    assert off(alone(name), diffusers_own(name)) <= 1e-6


@pytest.mark.parametrize("name", ["UniPC", "Heun", "SDE-DPM++ 2M"])
@pytest.mark.parametrize("world", [3])
def test_all_steps_on_uneven_tokens_are_diffusers_own(ranks: Pool, name: str, world: int) -> None:
    """Sixteen tokens do not divide by three ranks."""
    for got in ranks.run(world, ours, ("kv_gather", 1), name):
        assert off(got, diffusers_own(name)) <= 1e-6


@pytest.mark.parametrize("name", ["DPM++ 2M"])
def test_all_steps_in_fp32_are_as_near_to_fp64_as_diffusers_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over several noises: the model's own rounding, which differs from diffusers' model, is most of the error.

    Of one noise the two errors are 0.7 to 1.3 times each other, however the steps are made; that is luck.
    """
    mine, theirs, draw = [], [], noise
    for seed in range(NOISES):
        monkeypatch.setattr(sys.modules[__name__], "noise", partial(draw, seed))
        truth = alone.__wrapped__(name)  # not results that are kept: they are of another noise
        mine.append(off(alone.__wrapped__(name, torch.float32), truth))
        theirs.append(off(diffusers_own.__wrapped__(name, torch.float32), truth))
    assert norm(mine) <= 1.25 * norm(theirs)


@pytest.mark.parametrize("name", NAMED)
def test_the_steps_alone_in_fp32_are_as_near_to_fp64_as_diffusers_own(name: str) -> None:
    """With the outputs of no model: a smooth function of what is seen, computed in fp64, so that only steps round."""
    truth = stepped_here(name, torch.float64)
    mine, theirs = stepped_here(name, torch.float32), stepped_by_diffusers(name, torch.float32)
    assert off(stepped_by_diffusers(name, torch.float64), truth) <= 1e-6
    assert off(mine, truth) <= 1.25 * off(theirs, truth)


@pytest.mark.parametrize("name", NOISY)
def test_noise_in_fp32_is_drawn_like_diffusers_own(name: str) -> None:
    """Random draws depend on the dtype, so fp32 is compared with fp32."""
    assert off(alone(name, torch.float32), diffusers_own(name, torch.float32)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_noise_of_ddim_is_drawn_like_diffusers_own(dtype: torch.dtype) -> None:
    assert off(alone("DDIM", dtype, eta=0.7), diffusers_own("DDIM", dtype, eta=0.7)) < 3e-6


@pytest.mark.parametrize("name", ["DPM++ 2M", "UniPC", "Heun", "FlowMatchEuler", "DPM++ thresholds"])
def test_a_run_may_begin_at_any_step(name: str) -> None:
    """Image-to-image begins so. Heun evaluates twice a step; a scheduler with thresholding steps whole images."""
    begin = 7
    got = alone(name, begin=begin)
    assert off(got, diffusers_own(name, begin=begin)) <= 1e-6
    assert off(got, diffusers_own(name)) > 1e-2


@pytest.mark.parametrize("name", ["DPM++ 2M", "FlowMatchEuler", "PNDM"])
def test_guidance_may_have_a_scale_for_each_evaluation(name: str) -> None:
    sched = scheduler(name)
    sched.set_timesteps(STEPS)
    scales = tuple(1.0 + 0.25 * (index % 9) for index in range(len(sched.timesteps)))
    got = alone(name, guidance=Guidance(scales=scales))
    assert off(got, diffusers_own(name, scales=scales)) <= 1e-6
    assert off(got, diffusers_own(name, scales=(*scales[1:], scales[0]))) > 1e-2


def test_too_few_guidance_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3 guidance scales, expected 16, one per evaluation"):
        alone("UniPC", guidance=Guidance(scales=(2.0, 3.0, 4.0)))


@pytest.mark.parametrize("name", ["UniPC", "DPM++ 2M", "Heun", "SDE-DPM++ 2M", "Euler"])
def test_a_kept_run_has_the_bits_of_a_new_one_whatever_the_history_holds(name: str) -> None:
    dit = DistributedDiT(small_dit().to(DEVICE), Mesh.single(DEVICE), local=local(torch.device(DEVICE)))
    found, labels = [], {"class_labels": torch.tensor(LABELS)}
    with Sampler(dit) as sampler:
        for _ in range(2):
            found.append(
                sampler(
                    scheduler(name),
                    noise(),
                    labels,
                    steps=STEPS,
                    guidance=GUIDANCE,
                    generator=torch.Generator().manual_seed(5),
                )
            )
            run = sampler._run
            assert run is not None
            kept = stepper(run)
            assert isinstance(kept, Traced)
            kept = kept.history
            for ring in (kept.states_PnlC, kept.outputs_QnlC):
                if ring is not None:
                    ring.fill_(float("nan"))
    assert torch.equal(*found)


WRONG: dict[str, Callable[[Schedule], Schedule]] = {
    "coefficients of the row before": lambda it: Schedule(
        it.inputs_S, it.states_SP.roll(1, 0), it.outputs_SQ.roll(1, 0), it.noise_SK, it.draws, it.residual
    ),
    "no history of outputs": lambda it: Schedule(
        it.inputs_S, it.states_SP, it.outputs_SQ * torch.tensor([1.0, 0.0]), it.noise_SK, it.draws, it.residual
    ),
    "input scales of the step before": lambda it: Schedule(
        it.inputs_S.roll(1, 0) * 1.01, it.states_SP, it.outputs_SQ, it.noise_SK, it.draws, it.residual
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_negative_control_wrong_coefficients_are_noticed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(
        steppers, "traced_steps", lambda state, schedule, *rest: traced_steps(state, WRONG[how](schedule), *rest)
    )
    assert off(alone.__wrapped__("DPM++ 2M"), diffusers_own("DPM++ 2M")) > 1e-4  # calls past the cache


def test_negative_control_stale_history_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history's outputs are one step too old."""
    right = steppers.guided_multistep

    def stale(history: Any, cond: Tensor, uncond: Tensor, steps: Any, step: Tensor, bad: Tensor) -> None:
        before = history.outputs_QnlC.clone()
        right(history, cond, uncond, steps, step, bad)
        history.outputs_QnlC.copy_(before if int(step) % 2 else history.outputs_QnlC)

    monkeypatch.setattr(steppers, "guided_multistep", stale)
    assert off(alone.__wrapped__("DPM++ 2M"), diffusers_own("DPM++ 2M")) > 1e-4  # calls past the cache


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("DDPMScheduler", {}, "because of its clip_sample"),
        ("DPMSolverMultistepScheduler", {"thresholding": True}, "because of its thresholding"),
        ("DDIMScheduler", {"thresholding": True, "clip_sample": False}, "because of its thresholding"),
        ("PNDMScheduler", {}, "is not linear in the last 4 states and outputs"),
        ("UnCLIPScheduler", {}, "because of its clip_sample"),
    ],
)
def test_what_is_not_linear_is_stepped_whole_and_says_why(name: str, config: dict[str, Any], reason: str) -> None:
    sched = getattr(diffusers, name)(**config)
    sched.set_timesteps(STEPS)
    assert reason in str(decide(sched).whole)
    assert reason in str(decide(sched))


@pytest.mark.parametrize("kind", ["DDPMParallelScheduler", "UnCLIPScheduler"])
def test_learned_variances_that_the_loop_does_not_pass_on_are_refused(kind: str) -> None:
    sched = getattr(diffusers, kind)(variance_type="learned_range")
    dit = DistributedDiT(small_dit(), Mesh.single())
    with pytest.raises(ValueError, match=rf"'{kind}', which needs the model's variances .* passes on to DDPMScheduler"):
        Sampler(dit)(sched, noise(), {"class_labels": torch.tensor(LABELS)}, steps=STEPS, guidance=GUIDANCE)


def test_large_values_that_are_clipped_are_noticed() -> None:
    """The clipping range is beyond ordinary values, but the trace's vectors have elements of 1000."""
    sched: Any = DDPMScheduler(clip_sample=True, clip_sample_range=100.0)
    sched.set_timesteps(STEPS)
    assert "clip_sample" in str(decide(sched).whole)


def test_tracing_leaves_the_scheduler_and_torchs_generator_as_they_are() -> None:
    sched = scheduler("SDE-DPM++ 2M")
    sched.set_timesteps(STEPS)
    before, state = {**sched.__dict__}, torch.get_rng_state()
    assert decide(sched).schedule is not None
    assert sched.__dict__ == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("name", "kind"), [("UniPC", Traced), ("PNDM", Replicated)])
def test_only_what_steps_on_the_host_has_no_graph(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    dit = DistributedDiT(small_dit().to(DEVICE, torch.float32), Mesh.single(DEVICE))
    order = ordered(name, torch.float32)
    assert isinstance(stepper(Run(dit, order)), kind)
    monkeypatch.setattr(DistributedDiT, "device", torch.device("cuda"))
    reason = why_not_captured(dit, order.decision)
    assert reason is None if kind is Traced else "steps on the host (PNDMScheduler is not traced" in str(reason)


@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("clipped", [False, True])
def test_ddim_with_clipped_model_output_is_diffusers_own(eta: float, clipped: bool) -> None:
    sched: Any = DDIMScheduler(**LINEAR, clip_sample=True, clip_sample_range=0.5)
    dit = DistributedDiT(small_dit().to(DEVICE), Mesh.single(DEVICE), local=local(torch.device(DEVICE)))
    request = Request(
        sched,
        noise().double(),
        {"class_labels": torch.tensor(LABELS)},
        6,
        Guidance(1.0),
        eta,
        torch.Generator().manual_seed(5),
        clipped,
    )
    run = Run(dit, course(request))
    sched.set_timesteps(6)
    assert isinstance(stepper(run), OneStep)
    model, x, labels = small_dit().to(DEVICE), noise().double().to(DEVICE), torch.tensor(LABELS, device=DEVICE)
    generator = torch.Generator().manual_seed(5)
    for t in sched.timesteps:
        run.step()
        out = model(x, timestep=t.to(DEVICE).expand(len(x)), class_labels=labels).sample[:, :4]
        x = sched.step(out, t, x, eta=eta, use_clipped_model_output=clipped, generator=generator).prev_sample
    assert off(run.latents()["image"], x) < 1e-5


def test_eta_of_none_is_the_schedulers_own_default() -> None:
    assert off(alone("TCD"), alone("TCD", eta=0.3)) == 0
    assert off(alone("TCD"), alone("TCD", eta=0.0)) > 1e-2
