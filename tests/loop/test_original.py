"""Tests of the original DiT's samplers: DDPM with the model's variances, respaced DDIM, clipping; step by step in fp64.

The truth is the papers' arithmetic (tests/support/original.py) on diffusers' model in one process.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor, nn

from seqpar import DistributedDiT, Guidance, parallelize, release, sample
from seqpar.loading.schedulers import pass_variances, respace, spaced
from seqpar.loop import steppers as one_step
from seqpar.loop.loop import Sampler, draw_noise
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.loop.schedules import ddim_steps, ddpm_steps
from seqpar.loop.steppers import OneStep
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.support.meshes import mesh_for
from tests.support.original import Process, exact
from tests.support.pool import Pool
from tests.support.tiny import CLASSES, diffusers_dit, shared_dit

LINEAR: dict[str, Any] = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}
LABELS, STEPS = [3, 7], 5
THREE = Guidance(3.0, 3)


def learned(**config: Any) -> Any:
    return DDPMScheduler(**{**LINEAR, "variance_type": "learned_range", **config})


def noise() -> Tensor:
    return draw_noise((2, 4, 8, 8), torch.Generator().manual_seed(2))


def guided(x: Tensor, t: int, guidance: Guidance, model: nn.Module) -> Tensor:
    """Return the output of diffusers' model, of which the first channels are guided and the rest conditional."""
    labels, when = torch.tensor(LABELS, device=x.device), torch.full((2,), t, device=x.device)
    c, u = (model(x, timestep=when, class_labels=y).sample for y in (labels, torch.full_like(labels, CLASSES)))
    channels = guidance.channels or 4
    return torch.cat((u[:, :channels] + guidance.scale * (c - u)[:, :channels], c[:, channels:]), dim=1)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("250", (250,)),
        ("25", (25,)),
        ("1", (1,)),
        ("10,20,7", (10, 20, 7)),
        ("334,1,1", (334, 1, 1)),
        ("1000", (1000,)),
    ],
)
def test_respaced_sections_are_even_from_end_to_end(text: str, counts: tuple[int, ...]) -> None:
    parts = np.array_split(np.arange(1000), len(counts))
    chosen = [part[np.linspace(0, len(part) - 1, n).round().astype(int)] for part, n in zip(parts, counts, strict=True)]
    assert spaced(text, 1000) == np.concatenate(chosen)[::-1].tolist()


def test_respaced_ddim_has_an_integer_stride() -> None:
    assert spaced("ddim25", 1000) == list(range(960, -1, -40))
    assert spaced("ddim26", 1000) == list(range(975, -1, -39))
    for text in ("ddim300", "1001", "501,1", "ddim", "x", "", "10,,3", "0", "-5", "2.5", "ddim25,3"):
        with pytest.raises(ValueError, match=r"got respacing .*, expected "):
            spaced(text, 1000)


def test_respacing_ends_when_timesteps_are_set_again() -> None:
    scheduler, fresh = DDIMScheduler(**LINEAR), DDIMScheduler(**LINEAR)
    respace(scheduler, "7")
    ends = ddim_steps(copy.deepcopy(scheduler), {}).table_SK[:, 5]
    assert torch.equal(ends[:-1], scheduler.alphas_cumprod[scheduler.timesteps[1:]].double() ** 0.5)
    for each in (scheduler, fresh):
        each.set_timesteps(7)
    assert torch.equal(ddim_steps(scheduler, {}).table_SK, ddim_steps(fresh, {}).table_SK)


@pytest.mark.parametrize(
    ("kind", "respacing", "clip"),
    [
        ("ddpm", "250", False),
        ("ddpm", "4,3,2", False),
        ("ddpm", "9", True),
        ("ddim", "ddim10", False),
        ("ddim", "4,3,2", True),
        ("ddim with noise", "9", True),
    ],
)
def test_every_step_is_the_originals(kind: str, respacing: str, clip: bool) -> None:
    """Each step starts from the engine's own state, so that the errors of steps do not add up."""
    model, eta = diffusers_dit().to(DEVICE), 0.7 if "noise" in kind else 0.0
    dit = DistributedDiT(diffusers_dit().to(DEVICE), Mesh.single(DEVICE), local=local(torch.device(DEVICE)))
    scheduler: Any = exact(learned() if kind == "ddpm" else DDIMScheduler(**LINEAR))
    how: dict[str, Any] = {"respacing": respacing, "clip_denoised": clip, "generator": torch.Generator().manual_seed(5)}
    how |= {} if kind == "ddpm" else {"eta": eta}
    run = begin(dit, Request(scheduler, noise().double(), {"class_labels": torch.tensor(LABELS)}, 9, THREE, **how))
    assert all(isinstance(stepper, OneStep) for stepper in run.steppers.values())
    timesteps, generator = run.timesteps.tolist(), torch.Generator().manual_seed(5)
    process, found, truth = Process(timesteps[::-1]), [], []
    assert scheduler.config.clip_sample is False  # the caller's scheduler is not changed
    for index, t in list(enumerate(timesteps))[: 9 if respacing == "250" else None]:
        i, x = len(timesteps) - 1 - index, run.latents()["image"]
        z = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        out = guided(x, t, THREE, model)
        run.step()
        found.append(run.latents()["image"])
        ddpm_step = kind == "ddpm"
        truth.append(
            process.p_sample(out, x, i, z, clip) if ddpm_step else process.ddim_sample(out, x, i, z, eta, clip)
        )
    got, want = torch.stack(found), torch.stack(truth)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-9
    if clip and respacing != "250":
        assert float(got[-1].abs().max()) <= 1  # the last step ends at the predicted picture


def test_all_coefficients_are_the_originals() -> None:
    """All 250 steps, without a model: x, its output and noise are random."""
    scheduler = exact(learned())
    scheduler.set_timesteps(timesteps=spaced("250", 1000))  # pyright: ignore[reportAttributeAccessIssue]
    process = Process(spaced("250", 1000)[::-1])
    x, m, v, z = (torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(4))
    for i, c in zip(range(249, -1, -1), ddpm_steps(scheduler).table_SK, strict=True):
        got = c[3] * (c[0] * x + c[1] * m) + c[4] * x + (torch.exp(c[5] + c[6] * v) * z if i else 0)
        want = process.p_sample(torch.cat((m, v), 1), x, i, z)
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def diffusers_own(guidance: Guidance, scheduler: Any) -> Tensor:
    """Return the latents of diffusers' model and scheduler in one process."""
    model, x, generator = diffusers_dit().to(DEVICE), noise().double().to(DEVICE), torch.Generator().manual_seed(5)
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        x = scheduler.step(guided(x, int(t), guidance, model), t, x, generator=generator).prev_sample
    return x.cpu()


def ours(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], guidance: Guidance, config: Any = ()
) -> Tensor:
    """Return the engine's latents on this mesh."""
    strategy, cfg, data = layout
    mesh = mesh_for(strategy, world, device, cfg, data)
    dit = DistributedDiT(shared_dit(device), mesh, strategy, local(device))
    labels, generator = {"class_labels": torch.tensor(LABELS)}, torch.Generator().manual_seed(5)
    scheduler: Any = exact(learned(**dict(config)))
    return sample(dit, scheduler, noise().double(), labels, steps=STEPS, guidance=guidance, generator=generator).cpu()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddpm_is_diffusers_own(prediction: str) -> None:
    """With diffusers' spacing, an offset (so that the last step adds noise, too) and clipping."""
    config = {"prediction_type": prediction, "steps_offset": 1, "clip_sample": True, "clip_sample_range": 0.5}
    got = ours(0, 1, torch.device(DEVICE), ("ulysses", 1, 1), THREE, tuple(config.items()))
    truth = diffusers_own(THREE, exact(learned(**config)))
    assert float((got - truth).abs().max() / truth.abs().max()) < 1e-9


def without_blocks(
    rank: int, world: int, device: torch.device, layout: tuple[str, int, int], guidance: Guidance
) -> Tensor:
    """Return fp32 latents of a model whose output is arithmetic of a token and its label, so that bits can last."""
    strategy, cfg, data = layout
    dit = DistributedDiT(diffusers_dit().float().to(device), mesh_for(strategy, world, device, cfg, data), strategy)

    def outputs(streams: Any, positions: Any, conditioning: Any, attend: Any) -> dict[str, Tensor]:
        x, label = streams["image"], conditioning["final"][:, :1, :16]
        return {"image": torch.cat((0.3 * x + label, (x - label).clamp(-1, 1)), dim=-1)}

    dit.model.forward_tokens = outputs  # pyright: ignore[reportAttributeAccessIssue]
    labels, generator = {"class_labels": torch.tensor(LABELS)}, torch.Generator().manual_seed(5)
    return sample(dit, learned(), noise(), labels, steps=STEPS, guidance=guidance, generator=generator).cpu()


@pytest.mark.parametrize("guidance", [THREE, Guidance(1.0), Guidance(3.0, rescale=0.7)], ids=str)
def test_ddpm_is_the_same_on_every_mesh(ranks: Pool, guidance: Guidance) -> None:
    """With the model to its rounding; without its blocks bit by bit, but for rescaling, which sums over tokens."""
    truth, bits = (ranks.run(1, run, ("ulysses", 1, 1), guidance)[0] for run in (ours, without_blocks))
    if guidance.on and not guidance.rescale:
        by = diffusers_own(guidance, exact(learned()))
        assert float((truth - by).abs().max() / by.abs().max()) < 1e-9
    layouts = [(2, ("ulysses", 1, 2)), (3, ("kv_gather", 1, 1)), (4, ("usp", 1, 1))]
    split = [(2, ("ulysses", 2, 1)), (4, ("ulysses", 2, 1)), (4, ("ulysses", 2, 2))]
    # all meshes with guidance on some channels; without guidance those of tokens, with rescaling some of both
    meshes = layouts + split if guidance == THREE else [layouts[1], split[2]] if guidance.on else layouts[1:]
    for world, layout in meshes:
        for got in ranks.run(world, ours, layout, guidance):
            assert float((got - truth).abs().max() / truth.abs().max()) < 1e-9, (world, layout)
        for got in [] if guidance.rescale else ranks.run(world, without_blocks, layout, guidance):
            assert torch.equal(got, bits), (world, layout)


def test_noise_in_chunks_restarts_and_further_steps_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    dit = DistributedDiT(diffusers_dit().to(DEVICE), Mesh.single(DEVICE), local=local(torch.device(DEVICE)))

    def made(sampler: Sampler, seed: int) -> Tensor:
        generator, labels = torch.Generator().manual_seed(seed), {"class_labels": torch.tensor(LABELS)}
        return sampler(learned(), noise(), labels, steps=STEPS, guidance=THREE, generator=generator)

    with Sampler(dit) as sampler:
        whole, other, again = (made(sampler, seed) for seed in (5, 6, 5))
        assert torch.equal(whole, again)
        assert not torch.equal(whole, other)
    monkeypatch.setattr(one_step, "NOISE_BYTES", 4 * whole.numel() * whole.element_size())
    with Sampler(dit) as sampler:
        made(sampler, 6)
        run = sampler._run
        assert torch.equal(made(sampler, 5), whole)
        assert run is not None
        assert run is sampler._run
        for _ in range(2 * STEPS):  # a benchmark may run more steps, with the same noise
            run.step()
        assert torch.equal(made(sampler, 5), whole)
        assert run is sampler._run


class Lookalike(nn.Module):
    """A decoder that returns its input."""

    class config:  # noqa: N801
        scaling_factor = 1000.0

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def decode(self, latents: Tensor) -> Any:
        return type("Decoded", (), {"sample": latents})


def inside_diffusers(rank: int, world: int, device: torch.device, how: str) -> Tensor | str:
    """Return the latents of diffusers' DiTPipeline; how: what passes the variances on, if anything does.

    Without a generator of steps, the default one draws their noise, and rank 0's must count.
    """
    model, mesh = diffusers_dit(classes=1000).to(device), mesh_for("ulysses", world, device)
    dit: Any = model if how == "parallelize" else DistributedDiT(model, mesh, local=local(device))
    pipe: Any = DiTPipeline(dit, Lookalike(device), exact(learned()))  # pyright: ignore[reportArgumentType]
    pipe.set_progress_bar_config(disable=True)
    if how == "parallelize":
        parallelize(pipe, mesh)
    elif how != "nothing":
        pass_variances(pipe, torch.Generator().manual_seed(5) if how == "generator" else None)
    torch.manual_seed(5 + rank)
    try:
        made = pipe(LABELS, 3.0, torch.Generator().manual_seed(2), STEPS, output_type="pt").images
    except TypeError as error:
        return str(error)
    if how == "parallelize":
        release(pipe)
        assert "step" not in vars(pipe.scheduler)
        assert not model._forward_hooks
    return (2 * made.double() - 1).cpu() * Lookalike.config.scaling_factor


def by_hand() -> Tensor:
    """Return the latents of the original's loop, which draws noise for both halves of the batch."""
    model, generator = diffusers_dit(classes=1000).to(DEVICE), torch.Generator().manual_seed(5)
    timesteps = list(range(0, 1000, 1000 // STEPS))[:STEPS]
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
    labels = torch.tensor([*LABELS, 1000, 1000], device=DEVICE)
    for i, t in reversed(list(enumerate(timesteps))):
        out = model(torch.cat((x, x)), timestep=torch.full((4,), t, device=DEVICE), class_labels=labels).sample
        c, u = out.chunk(2)
        z = torch.randn(4, 4, 8, 8, generator=generator, dtype=torch.float64).to(x)[:2] if i else x
        x = Process(timesteps).p_sample(torch.cat(((u + 3.0 * (c - u))[:, :4], c[:, 4:]), 1), x, i, z)
    return x.cpu()


def test_diffusers_dit_pipeline_samples_with_variances(ranks: Pool) -> None:
    """The pipeline clamps pictures to 0 ... 1, so the scaling factor makes them small."""
    truth = by_hand()
    assert float(truth.abs().max()) < Lookalike.config.scaling_factor
    for world in (1, 2):
        for got in ranks.run(world, inside_diffusers, "generator"):
            assert float((got - truth).abs().max() / truth.abs().max()) < 1e-9
    assert "NoneType" in ranks.run(1, inside_diffusers, "nothing")[0]  # diffusers cuts the variances off


def test_a_parallelized_dit_pipeline_samples_with_variances_until_it_is_released(ranks: Pool) -> None:
    (truth,) = ranks.run(1, inside_diffusers, "default")
    for got in ranks.run(2, inside_diffusers, "parallelize"):
        assert float((got - truth).abs().max() / truth.abs().max()) < 1e-9
    model, plain = diffusers_dit(learned_sigma=False), Lookalike(torch.device("cpu"))
    pipe = DiTPipeline(model, plain, learned())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'learned_range' with a model of 4 output channels, expected 8"):
        parallelize(pipe, Mesh.single())
    assert "forward" not in vars(model)


def test_what_does_not_fit_is_refused() -> None:
    dit = DistributedDiT(diffusers_dit(learned_sigma=False), Mesh.single())
    given = (noise(), {"class_labels": torch.tensor(LABELS)})
    options: dict[str, Any] = {"steps": STEPS, "guidance": THREE}
    with pytest.raises(ValueError, match="'learned_range' with a model of 4 output channels, expected 8"):
        sample(dit, learned(), *given, **options)
    fixed: Any = DDPMScheduler(**LINEAR)
    with pytest.raises(
        ValueError, match="got a pipeline with DDPMScheduler, expected DDPMScheduler with variance_type"
    ):
        pass_variances(type("Pipe", (), {"scheduler": fixed}))
    for scheduler in (DDIMScheduler(**{**LINEAR, "thresholding": True}), DDPMScheduler(**LINEAR, thresholding=True)):
        changes: list[Any] = [{"respacing": "25"}, {"clip_denoised": True}]
        for change in changes:
            with pytest.raises(ValueError, match="expected DDIMScheduler or DDPMScheduler without thresholding"):
                sample(dit, scheduler, *given, **{**options, **change})
    files = Files.locate("builtin")  # it predicts no variances
    assert files.scheduler("DDPMScheduler").config.variance_type == "fixed_small"
    assert len(files.schedule("DDPMScheduler", 9, respacing="ddim25").timesteps) == 25
    assert Files.locate("large-dit-3b").scheduler("DDPMScheduler").config.variance_type == "learned_range"
