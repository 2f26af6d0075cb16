"""Tests of the estimates of clean latents: they are diffusers' own, and the result keeps its bits."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_ipndm import IPNDMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.loading.schedulers import check_clean, clean_weights, input_scale
from seqpar.loop.loop import draw_noise
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import LABELS, STEPS, scheduler
from tests.support.meshes import counted_calls, mesh_for
from tests.support.pool import Pool
from tests.support.tiny import CLASSES, diffusers_dit, shared_dit

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
    """Return a scheduler; those of flow matching alone know no betas."""
    made = getattr(diffusers, name)(**config) if name.startswith("Flow") else scheduler(name, **config)
    made.set_timesteps(10)
    return made


def stepped(made: Any) -> list[tuple[Tensor, Any, Tensor]]:
    """Return of each step on random numbers: the estimate, what the scheduler returns, and the state before."""
    generator, found = torch.Generator().manual_seed(0), []
    x = torch.randn(1, 4, 4, 4, generator=generator, dtype=torch.float64) * float(getattr(made, "init_noise_sigma", 1))
    for t in made.timesteps:
        m = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        of_state, of_output = clean_weights(made, t)
        draws = "generator" in inspect.signature(made.step).parameters
        out = made.step(m, t, x, **({"generator": generator} if draws else {}))
        found.append((of_state * x + of_output * m, out, x))
        x = out.prev_sample.double()
    return found


def apart(x: Tensor, y: Tensor) -> float:
    """Return the largest difference, of the largest number."""
    return float((x - y).abs().max() / y.abs().max())


@pytest.mark.parametrize(("name", "config"), TELL, ids=str)
def test_estimates_are_those_that_schedulers_tell(name: str, config: dict[str, Any]) -> None:
    for clean, out, state in stepped(built(name, config)):
        own = out.pred_original_sample.double()
        assert apart(clean, own) < CLOSE < apart(state, own)


@pytest.mark.parametrize(("name", "config"), END, ids=str)
def test_the_last_step_ends_at_the_estimate(name: str, config: dict[str, Any]) -> None:
    *_, (clean, out, state) = stepped(built(name, config))
    assert apart(clean, out.prev_sample.double()) < CLOSE < apart(state, out.prev_sample.double())


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


# our loop ------------------------------------------------------------------------------------------------------------

GUIDANCE = Guidance(3.0)
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {}),  # one step, by its kernel
    ("EulerDiscreteScheduler", {}),  # traced, with scaled inputs
    ("DDPMScheduler", {"clip_sample": True, "clip_sample_range": 1.5}),  # on whole latents
]


def run(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], way: int
) -> tuple[Tensor, Tensor, dict[int, Tensor], list[dict[str, int]]]:
    """Return the latents without and with estimates, the estimates, and the calls of torch.distributed of both runs."""
    name, config = WAYS[way]
    dit = DistributedDiT(shared_dit(device), mesh_for(layout[0], world, device, *layout[1:]), layout[0], local(device))
    noise = draw_noise((3, 4, 8, 8), torch.Generator().manual_seed(2))
    found, calls, clean = list[Tensor](), list[dict[str, int]](), dict[int, Tensor]()
    with Sampler(dit) as sampler:

        def sampled() -> None:
            settings: Any = {"steps": STEPS, "guidance": GUIDANCE, "generator": torch.Generator().manual_seed(5)}
            found.append(sampler(scheduler(name, **config), noise, {"class_labels": torch.tensor(LABELS)}, **settings))

        sampled()  # makes exchanges, which later runs have
        calls.append(counted_calls(sampled))
        with sampler.estimating((), lambda index, latents: None):
            calls.append(counted_calls(sampled))
        with sampler.estimating({0, STEPS - 2}, lambda index, latents: clean.update({index: latents.cpu()})):
            calls.append(counted_calls(sampled))
        sampled()
    assert torch.equal(found[0], found[-1])
    return found[1], found[3], clean, calls


@cache
def by_hand(way: int) -> list[Tensor]:
    """Return the estimates of diffusers' model and scheduler in one process."""
    name, config = WAYS[way]
    model, made, generator = diffusers_dit().to(DEVICE), scheduler(name, **config), torch.Generator().manual_seed(5)
    x = draw_noise((3, 4, 8, 8), torch.Generator().manual_seed(2)).double().to(DEVICE) * made.init_noise_sigma
    made.set_timesteps(STEPS)
    labels, found = torch.tensor(LABELS, device=DEVICE), list[Tensor]()
    for t in made.timesteps:
        seen = made.scale_model_input(x, t)
        c, u = (
            model(seen, timestep=t.to(DEVICE).expand(len(x)), class_labels=y).sample[:, :4]
            for y in (labels, torch.full_like(labels, CLASSES))
        )
        out = made.step(u + GUIDANCE.scale * (c - u), t, x, generator=generator)
        x = out.prev_sample
        found.append(out.pred_original_sample.cpu())
    return found


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, ("ulysses", 1, 1)), (2, ("ulysses", 2, 1)), (3, ("kv_gather", 1, 1)), (2, ("ulysses", 1, 2))],
)
def test_our_loop_estimates_what_diffusers_does(
    ranks: Pool, world: int, layout: tuple[str, int, int], way: int
) -> None:
    clipped = WAYS[way][1].get("clip_sample_range", float("inf"))
    for plain, watched, clean, (without, none, some) in ranks.run(world, run, layout, way):
        assert torch.equal(plain, watched)
        assert without == none
        assert (without != some) == (world > 1)
        assert sorted(clean) == [0, STEPS - 2]
        for index, latents in clean.items():
            truth = by_hand(way)[index]
            assert apart(latents.clamp(-clipped, clipped), truth.double()) < 1e-4
            assert apart(latents.clamp(-clipped, clipped), by_hand(way)[1].double()) > 1e-3


def test_our_loop_refuses_a_scheduler_that_tells_of_none() -> None:
    dit = DistributedDiT(shared_dit(torch.device("cpu")), mesh_for("ulysses", 1, torch.device("cpu")), "ulysses")
    noise, steps = draw_noise((1, 4, 8, 8), torch.Generator()), list[int]()
    settings: Any = {"steps": 4, "guidance": Guidance(1.0), "on_step": steps.append}
    made, prompt = IPNDMScheduler(), {"class_labels": torch.tensor([1])}
    with Sampler(dit) as sampler:
        with (
            sampler.estimating({1}, lambda index, latents: None),
            pytest.raises(ValueError, match="previews are not supported with this scheduler"),
        ):
            sampler(made, noise, prompt, **settings)
        assert steps == []
        sampler(made, noise, prompt, **settings)
        assert len(steps) == 4
