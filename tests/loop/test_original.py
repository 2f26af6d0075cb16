"""Tests of the original DiT's samplers: DDPM with the model's variances, respaced DDIM, clipping; step by step in fp64.

The truth is the papers' arithmetic (tests/support/original.py) on diffusers' model in one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
from torch import Tensor, nn

from seqpar import DistributedDiT, Guidance, parallelize, release, sample
from seqpar.loading.schedulers import pass_variances, spaced
from seqpar.loop import steppers
from seqpar.loop.loop import Sampler
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.loop.steppers import OneStep
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import Files
from tests.conftest import DEVICE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import ALONE, LABELS, LEARNED, SOME, Layout, engine, guided, scheduler, settings
from tests.support.meshes import mesh_for
from tests.support.original import Process, exact
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

STEPS = LEARNED.steps


def learned(**config: Any) -> Any:
    return scheduler("DDPMScheduler", **{"variance_type": "learned_range", "clip_sample": False, **config})


def noise() -> Tensor:
    return LEARNED.noise().float()


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
    dit = engine(1, torch.device(DEVICE), ALONE, LEARNED)
    sched: Any = exact(learned() if kind == "ddpm" else scheduler())
    how: dict[str, Any] = {"respacing": respacing, "clip_denoised": clip, "generator": torch.Generator().manual_seed(5)}
    how |= {} if kind == "ddpm" else {"eta": eta}
    labels = torch.tensor(LABELS[:2])
    run = begin(dit, Request(sched, LEARNED.noise(), {"class_labels": labels}, 9, SOME, **how))
    assert all(isinstance(stepper, OneStep) for stepper in run.steppers.values())
    timesteps, generator = run.timesteps.tolist(), torch.Generator().manual_seed(5)
    process, found, truth = Process(timesteps[::-1]), [], []
    assert sched.config.clip_sample is False  # the caller's scheduler is not changed
    for index, t in list(enumerate(timesteps))[: 9 if respacing == "250" else None]:
        i, x = len(timesteps) - 1 - index, run.latents()["image"]
        z = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        out = guided(model, x, t, labels.to(DEVICE), SOME)
        run.step()
        found.append(run.latents()["image"])
        if kind == "ddpm":
            truth.append(process.p_sample(out, x, i, z, clip))
        else:
            truth.append(process.ddim_sample(out, x, i, z, eta, clip))
    got, want = torch.stack(found), torch.stack(truth)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-9
    if clip and respacing != "250":
        assert float(got[-1].abs().max()) <= 1  # the last step ends at the predicted picture


def without_blocks(rank: int, world: int, device: torch.device, layout: Layout, guidance: Guidance) -> Tensor:
    """Return fp32 latents of a model whose output is arithmetic of a token and its label, so that bits can last."""
    case = replace(LEARNED, guidance=guidance, dtype=torch.float32)
    dit = engine(world, device, layout, case)

    def outputs(streams: Any, positions: Any, conditioning: Any, attend: Any) -> dict[str, Tensor]:
        x, label = streams["image"], conditioning["final"][:, :1, :16]
        return {"image": torch.cat((0.3 * x + label, (x - label).clamp(-1, 1)), dim=-1)}

    dit.model.forward_tokens = outputs  # pyright: ignore[reportAttributeAccessIssue]
    return sample(dit, learned(), case.noise(), {"class_labels": torch.tensor(LABELS[:2])}, **settings(case)).cpu()


@pytest.mark.parametrize("guidance", [SOME, Guidance(1.0)], ids=str)
def test_ddpm_has_the_same_bits_on_every_mesh(ranks: Pool, guidance: Guidance) -> None:
    (truth,) = ranks.run(1, without_blocks, ALONE, guidance)
    layouts: list[tuple[int, Layout]] = [(4, ("usp", 1, 1))]
    if guidance.on:
        layouts = [(2, ("ulysses", 1, 2)), (3, ("kv_gather", 1, 1)), (4, ("ulysses", 2, 1)), (4, ("ulysses", 2, 2))]
    for world, layout in layouts:
        for got in ranks.run(world, without_blocks, layout, guidance):
            assert torch.equal(got, truth), (world, layout)


def test_noise_in_chunks_restarts_and_further_steps_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    dit = engine(1, torch.device(DEVICE), ALONE, LEARNED)

    def latents(sampler: Sampler, seed: int) -> Tensor:
        how: dict[str, Any] = settings(LEARNED) | {"generator": torch.Generator().manual_seed(seed)}
        return sampler(learned(), noise(), {"class_labels": torch.tensor(LABELS[:2])}, **how)

    with Sampler(dit) as sampler:
        whole, other, again = (latents(sampler, seed) for seed in (5, 6, 5))
        assert torch.equal(whole, again)
        assert not torch.equal(whole, other)
    monkeypatch.setattr(steppers, "NOISE_BYTES", 4 * whole.numel() * whole.element_size())
    with Sampler(dit) as sampler:
        latents(sampler, 6)
        run = sampler._run
        assert torch.equal(latents(sampler, 5), whole)
        assert run is not None
        assert run is sampler._run
        for _ in range(2 * LEARNED.steps):  # a benchmark may run more steps, with the same noise
            run.step()
        assert torch.equal(latents(sampler, 5), whole)
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
        made = pipe(LABELS[:2], 3.0, torch.Generator().manual_seed(2), STEPS, output_type="pt").images
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
    labels = torch.tensor([*LABELS[:2], 1000, 1000], device=DEVICE)
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


def test_variances_are_taken_where_the_model_predicts_them() -> None:
    with pytest.raises(ValueError, match="with DDPMScheduler, expected DDPMScheduler with variance_type"):
        pass_variances(type("Pipe", (), {"scheduler": scheduler("DDPMScheduler")}))
    files = Files.locate("builtin")  # it predicts no variances
    assert files.scheduler("DDPMScheduler").config.variance_type == "fixed_small"
    assert len(files.schedule("DDPMScheduler", 9, respacing="ddim25").timesteps) == 25
    assert Files.locate("large-dit-3b").scheduler("DDPMScheduler").config.variance_type == "learned_range"
