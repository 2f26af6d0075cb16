"""Makes pictures from prompts with the toy model of two streams, as one file of `seqpar/pipelines` would.

Only `tests/test_one_file.py` adds this family to the folder. Its model has no text encoders, so random numbers stand in
for encoded prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from seqpar.loop.models.two_streams import Model  # pyright: ignore[reportMissingImports]

from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.loop import draw_noise
from seqpar.loop.request import Request
from seqpar.pipelines import own_loop, unidiffuser
from seqpar.pipelines.own_loop import OwnJob, drawn_in, timed
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.types.guidance import Guidance

PIPELINES = ()
MODELS = (Model,)
TOKENS, WIDTH = 5, 6


@dataclass(frozen=True)
class Pipeline(unidiffuser.Pipeline):
    """A loaded toy on a mesh."""

    @staticmethod
    def text_shapes(files: Files) -> Mapping[str, tuple[int, ...]]:
        return {"text": (TOKENS, WIDTH), "pooled": (WIDTH,)}

    def request(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompts: Sequence[str],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
    ) -> Request:
        """Return the inputs of a run of N prompts."""
        self.dit.mesh.on_all_ranks(lambda: self.texts.encode(prompts))
        shape = len(prompts), self.dit.config.in_channels, *self.files.latent_size(size)
        noise = draw_noise(shape, torch.Generator().manual_seed(seed), drawn_in(self.dit.dtype))
        return Request(DDIMScheduler(clip_sample=False), noise, self.texts.rows(prompts), steps, guidance)


@dataclass(frozen=True)
class Files(own_loop.Files):
    """The files of a toy."""

    @staticmethod
    def locate(name: str | Path | Blueprint) -> Files:
        return Files(locate(name))

    def check(self, request: GenerationRequest) -> OwnJob:
        request.needs_prompts()
        prompts, scheduler = request.pictures, DDIMScheduler(clip_sample=False)
        timed(scheduler, request.steps)
        return self.job(
            Pipeline,
            request,
            request.free_guidance(3.0),
            scheduler,
            prompts,
            loading={"prompts": prompts},
            settings={"prompts": prompts},
            named={"prompts": request.prompts},
        )
