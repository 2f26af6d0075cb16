"""Tests of the estimates of clean latents: they are diffusers' own, and the result keeps its bits."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_ipndm import IPNDMScheduler
from torch import Tensor

from seqpar import Guidance, Sampler
from seqpar.loading.schedulers import check_clean, clean_weights, input_scale
from seqpar.loop.schedules import step_options
from tests.loop.test_sampling import ALONE, LABELS, STEPS, Case, Layout, by_diffusers, engine, scheduler, settings
from tests.support.meshes import counted_calls
from tests.support.pool import Pool

FLOW: dict[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
CLOSE = 1e-6  # relative; diffusers' tables are fp32
# those that tell their own estimate, and those whose last step ends at it
TELL: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),
    ("DDIMScheduler", {"prediction_type": "v_prediction"}),
    ("DDIMScheduler", {"prediction_type": "sample"}),
    ("DDPMScheduler", {"clip_sample": False}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", {"prediction_type": "v_prediction", "use_karras_sigmas": True}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("KDPM2AncestralDiscreteScheduler", {}),
]
END: list[tuple[str, dict[str, Any]]] = [
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    ("UniPCMultistepScheduler", {}),
    ("UniPCMultistepScheduler", FLOW),
    ("DPMSolverMultistepScheduler", FLOW),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
]


def built(name: str, config: dict[str, Any]) -> Any:
    made = scheduler(name, **config)
    made.set_timesteps(10)
    return made


def stepped(made: Any) -> list[tuple[Tensor, Any, Tensor]]:
    """Of each step on random numbers: the estimate, what the scheduler returns, and the state before."""
    generator, found = torch.Generator().manual_seed(0), []
    x = torch.randn(1, 4, 4, 4, generator=generator, dtype=torch.float64) * float(getattr(made, "init_noise_sigma", 1))
    for t in made.timesteps:
        m = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        of_state, of_output = clean_weights(made, t)
        out = made.step(m, t, x, **step_options(made, generator=generator))
        found.append((of_state * x + of_output * m, out, x))
        x = out.prev_sample.double()
    return found


def apart(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((x - y).abs().max() / y.abs().max())


@pytest.mark.parametrize(("name", "config"), [*TELL, *END], ids=str)
def test_estimates_are_those_that_schedulers_tell_or_end_at(name: str, config: dict[str, Any]) -> None:
    tells, steps = (name, config) in TELL, stepped(built(name, config))
    for clean, out, state in steps if tells else steps[-1:]:
        own = (out.pred_original_sample if tells else out.prev_sample).double()
        assert apart(clean, own) < CLOSE < apart(state, own)


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "HeunDiscreteScheduler", "DDIMScheduler"])
def test_inputs_are_scaled_as_the_scheduler_does(name: str) -> None:
    made, x = built(name, {}), torch.ones(1, dtype=torch.float64)
    scales = [input_scale(made, t) for t in made.timesteps]
    assert scales == [float(built(name, {}).scale_model_input(x, t)) for t in made.timesteps]
    assert (len(set(scales)) > 1) == (name != "DDIMScheduler")


def test_noise_that_says_nothing_of_the_picture_gives_none() -> None:
    made = scheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    made.set_timesteps(4)
    assert clean_weights(made, made.timesteps[0]) == (0.0, 0.0)
    assert all(clean_weights(made, made.timesteps[1]))


@pytest.mark.parametrize("name", ["DDIMInverseScheduler", "EDMEulerScheduler", "CMStochasticIterativeScheduler"])
def test_other_schedulers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"because {name} .*; use a scheduler such as DDIMScheduler"):
        check_clean(getattr(diffusers, name)())


# Our loop ------------------------------------------------------------------------------------------------------------

WAYS = [
    Case(),  # one step, by its kernel
    Case("EulerDiscreteScheduler"),  # traced, with scaled inputs
    Case("DDPMScheduler", (("clip_sample", True), ("clip_sample_range", 1.5))),  # on whole latents
]
Run = tuple[Tensor, Tensor, dict[int, Tensor], list[dict[str, int]]]


def runs(rank: int, world: int, device: torch.device, layout: Layout) -> list[Run]:
    """For each way: latents without and with estimates, the estimates, and the calls of torch.distributed per run."""
    results = []
    for case in WAYS:
        found, calls, clean = list[Tensor](), list[dict[str, int]](), dict[int, Tensor]()
        with Sampler(engine(world, device, layout, case)) as sampler:

            def sampled(case: Case = case, sampler: Sampler = sampler, found: list[Tensor] = found) -> None:
                labels = {"class_labels": torch.tensor(LABELS)}
                found.append(sampler(case.scheduler(), case.noise(), labels, **settings(case)))

            sampled()  # makes exchanges, which later runs have
            calls.append(counted_calls(sampled))
            with sampler.estimating((), lambda index, latents: None):
                calls.append(counted_calls(sampled))
            keep = lambda index, latents, clean=clean: clean.update({index: latents.cpu()})  # noqa: E731
            with sampler.estimating({0, STEPS - 2}, keep):
                calls.append(counted_calls(sampled))
            sampled()
        assert torch.equal(found[0], found[-1])
        results.append((found[1], found[3], clean, calls))
    return results


@pytest.mark.parametrize(("world", "layout"), [(1, ALONE), (4, ("ulysses", 2, 2))])
def test_our_loop_estimates_what_diffusers_does(ranks: Pool, world: int, layout: Layout) -> None:
    for found in ranks.run(world, runs, layout):
        for case, (plain, watched, clean, (without, none, some)) in zip(WAYS, found, strict=True):
            clipped, truths = dict(case.config).get("clip_sample_range", float("inf")), by_diffusers(case)
            assert torch.equal(plain, watched)
            assert without == none
            assert (without != some) == (world > 1)
            assert sorted(clean) == [0, STEPS - 2]
            for index, latents in clean.items():
                got = latents.clamp(-clipped, clipped)
                assert apart(got, truths[index].pred_original_sample.cpu()) < 1e-4
                assert apart(got, truths[1].pred_original_sample.cpu()) > 1e-3


def test_our_loop_refuses_a_scheduler_that_tells_of_none() -> None:
    steps = list[int]()
    how: Any = {"steps": 4, "guidance": Guidance(1.0), "on_step": steps.append}
    made, labels = IPNDMScheduler(), {"class_labels": torch.tensor(LABELS)}
    with Sampler(engine(1, torch.device("cpu"), ALONE, Case())) as sampler:
        with (
            sampler.estimating({1}, lambda index, latents: None),
            pytest.raises(ValueError, match="previews are not supported with this scheduler"),
        ):
            sampler(made, Case().noise(), labels, **how)
        assert steps == []
        sampler(made, Case().noise(), labels, **how)
        assert len(steps) == 4
