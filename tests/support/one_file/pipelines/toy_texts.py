"""Makes pictures from prompts with the toy model of two streams, as one file of `seqpar/pipelines` would.

Only `tests/test_one_file.py` adds this family to the folder. Its model has no text encoders, so random numbers stand in
for encoded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from seqpar.loop.models.two_streams import Model  # pyright: ignore[reportMissingImports]
from torch import Tensor

from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.loop import draw_noise
from seqpar.pipelines import own_loop as timed_
from seqpar.pipelines.own_loop import Files, FromTexts, Job, drawn_in
from seqpar.pipelines.request import GenerationRequest
from seqpar.types.guidance import Guidance

ASKED = "prompts"
PIPELINES = ()
MODELS = (Model,)
TOKENS, WIDTH = 5, 6


@dataclass(frozen=True)
class Pipeline(FromTexts):
    """A loaded toy on a mesh."""

    @staticmethod
    def text_shapes(files: Files) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a prompt."""
        return {"text": (TOKENS, WIDTH), "pooled": (WIDTH,)}

    def latents(
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Return sampled latents (N, C, h, w) for N prompts, equal on every rank."""
        self.dit.mesh.on_all_ranks(lambda: self.texts.encode(prompts))
        shape = len(prompts), self.dit.config.in_channels, *self.files.latent_size(size)
        noise = draw_noise(shape, torch.Generator().manual_seed(seed), drawn_in(self.dit.dtype))
        settings: Any = {"steps": steps, "guidance": guidance, "on_step": on_step}
        return self.sampler(DDIMScheduler(clip_sample=False), noise, self.texts.rows(prompts), **settings)


def check(request: GenerationRequest, model: Path | Blueprint) -> Job:
    """Return the job that a request describes."""
    request.needs_prompts()
    files, prompts = Files(locate(model)), request.pictures
    scheduler = DDIMScheduler(clip_sample=False)
    timed_.timed(scheduler, request.steps)
    return Job.of(
        Pipeline,
        files,
        request,
        request.free_guidance(3.0),
        scheduler,
        prompts,
        loading={"prompts": prompts},
        settings={"prompts": prompts},
        captions=prompts,
        named={"prompts": request.prompts},
    )
