"""Tests of the built-in model: our pipeline, and diffusers' pipeline with our transformer, against diffusers alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
from torch import Tensor

from seqpar import DistributedDiT, Guidance
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.classes import BUILTIN, Files, Pipeline
from tests.conftest import DEVICE
from tests.support.meshes import mesh_for
from tests.support.pool import Pool

CLASSES, STEPS, SEED = ["cat", "rocket", "pizza"], 3, 3
SAME_PSNR_DB = 60.0


@pytest.fixture(scope="module")
def theirs() -> Tensor:
    """Diffusers alone, in fp32, on the same kind of device."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return diffusers_pictures(DiTPipeline.from_pretrained(BUILTIN).to(DEVICE))


def diffusers_pictures(pipe: DiTPipeline) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SEED)
    result: Any = pipe(pipe.get_label_ids(CLASSES), 3.0, generator, STEPS, output_type="pt")
    return result.images.cpu()


def psnr(a: Tensor, b: Tensor) -> float:
    return float(-10 * (a.float().cpu() - b.float().cpu()).square().mean().log10())


def ours(rank: int, world: int, device: torch.device, layout: tuple[str, int, int]) -> Tensor:
    strategy, cfg, data = layout
    pipeline = Pipeline.load(Files.locate("builtin"), mesh_for(strategy, world, device, cfg, data), strategy=strategy)
    return pipeline.decode(pipeline.latents(CLASSES, steps=STEPS, guidance=Guidance(3.0), seed=SEED))


@pytest.mark.parametrize(
    ("world", "layout"), [(1, ("ulysses", 1, 1)), (2, ("kv_gather", 2, 1)), (3, ("ulysses", 1, 3))], ids=str
)
def test_built_in_pictures_are_diffusers_pictures(ranks: Pool, theirs: Tensor, world: int, layout: tuple) -> None:
    for images in ranks.run(world, ours, layout):
        assert images.shape == (3, 3, 64, 64)
        assert psnr(images, theirs) > SAME_PSNR_DB


def inside_diffusers(rank: int, world: int, device: torch.device, strategy: str) -> Tensor:
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    pipe = DiTPipeline.from_pretrained(BUILTIN).to(device)
    pipe.transformer = DistributedDiT(pipe.transformer, mesh_for(strategy, world, device), strategy)
    return diffusers_pictures(pipe)


@pytest.mark.parametrize(("world", "strategy"), [(2, "ulysses"), (3, "kv_gather")])
def test_a_diffusers_pipeline_runs_sharded(ranks: Pool, theirs: Tensor, world: int, strategy: str) -> None:
    for images in ranks.run(world, inside_diffusers, strategy):
        assert psnr(images, theirs) > SAME_PSNR_DB


def test_negative_control_another_seed_is_another_picture(theirs: Tensor) -> None:
    pipeline = Pipeline.load(Files.locate("builtin"), Mesh.single())
    latents = pipeline.latents(CLASSES, steps=STEPS, guidance=Guidance(3.0), seed=SEED + 1)
    assert psnr(pipeline.decode(latents), theirs) < 30


def test_the_built_in_model_is_small() -> None:
    assert sum(path.stat().st_size for path in BUILTIN.rglob("*")) <= 12e6
    assert len(Files.locate("builtin").labels) >= 32


def test_other_sizes_and_schedulers_work() -> None:
    pipeline = Pipeline.load(Files.locate("builtin"), Mesh.single())
    other = {"size": (72, 96), "scheduler": "UniPCMultistepScheduler"}
    latents = pipeline.latents(["sun"], steps=4, guidance=Guidance(3.0), **other)  # pyright: ignore[reportArgumentType]
    assert pipeline.decode(latents).shape == (1, 3, 72, 96)
