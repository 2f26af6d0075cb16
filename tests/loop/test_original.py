"""Tests of the original DiT's samplers: DDPM with the model's variances, respaced DDIM, clipping; step by step in fp64.

The truth is the papers' arithmetic (tests/support/original.py) on diffusers' model in one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar import Guidance, sample
from seqpar.loading.schedulers import spaced
from seqpar.loop import steppers
from seqpar.loop.loop import Sampler
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.loop.steppers import OneStep
from seqpar.pipelines.classes import Files
from tests.conftest import DEVICE
from tests.loop.test_sampling import ALONE, LABELS, LEARNED, SOME, Layout, engine, guided, scheduler, settings
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


def test_variances_are_taken_where_the_model_predicts_them() -> None:
    files = Files.locate("builtin")  # it predicts no variances
    assert files.scheduler("DDPMScheduler").config.variance_type == "fixed_small"
    assert len(files.schedule("DDPMScheduler", 9, respacing="ddim25").timesteps) == 25
    assert Files.locate("large-dit-3b").scheduler("DDPMScheduler").config.variance_type == "learned_range"
