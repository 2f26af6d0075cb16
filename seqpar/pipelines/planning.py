"""A diffusers pipeline for the planner, before any weight is read: its work, its tokens and its size.

Transformer and VAE are built from their configs without memory for weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqpar.pipelines.protocol import GenerationRequest
from seqpar.planner.predict import Load
from seqpar.transformer import estimate
from seqpar.types.facts import Work
from seqpar.vae.known import spatial_factor

FACTORS = ("spatial_compression_ratio", "scale_factor_spatial", "block_out_channels")  # what says a VAE's factor


@dataclass(frozen=True)
class Planned:
    """The planner's view of a run. work: of the transformer. channels: of its input.

    pixels: height and width of the images; None where the pipeline chooses them. exact: whether the load has the number
    of tokens of this very run, and not of its family's usual size.
    """

    work: Work
    load: Load
    channels: int
    pixels: tuple[int, int] | None
    exact: bool


@dataclass(frozen=True)
class Grid:
    """The tokens of a pipeline's images: each has `patch` x `patch` latent pixels of `factor` x `factor` pixels.

    trained: height and width of the decoder, where the transformer's config names no size and the pipeline makes
    patches.
    """

    factor: int
    patch: int
    trained: tuple[int, int] | None

    def check(self, size: tuple[int, int]) -> None:
        """Raise ValueError for a size that is no whole number of tokens along a side."""
        unit = self.factor * self.patch
        if any(side < unit or side % unit for side in size):
            shown = f"{size[0]}x{size[1]}, expected multiples of {unit}"
            raise ValueError(f"got size {shown} (patch {self.patch} x decoder {self.factor})")

    def tokens(self, size: tuple[int, int]) -> int:
        return math.prod(side // (self.factor * self.patch) for side in size)


def grid_of(config: Mapping[str, Any], vae: Any) -> Grid | None:
    """Return the tokens of a pipeline's images, or None for videos and where the configs do not tell."""
    patch, inputs = config.get("patch_size"), config.get("in_channels")
    if vae is None or not isinstance(patch, int) or not isinstance(inputs, int):
        return None
    latent = vae.config.get("latent_channels") or vae.config.get("z_dim")
    if not (any(vae.config.get(name) for name in FACTORS) or hasattr(vae, FACTORS[0])):
        return None
    if not isinstance(latent, int) or inputs % latent or math.isqrt(inputs // latent) ** 2 != inputs // latent:
        return None
    packed, trained = inputs != latent, vae.config.get("sample_size")
    trained = (trained, trained) if isinstance(trained, int) else trained
    own = config.get("sample_size") is not None
    return Grid(
        spatial_factor(vae),
        math.isqrt(inputs // latent) if packed else patch,
        (trained[0], trained[-1]) if packed and trained and not own else None,
    )


def planned(transformer: Any, grid: Grid | None, request: GenerationRequest, guided: bool) -> Planned:
    size = request.size or (grid.trained if grid is not None else None)
    work = replace(estimate.planned_work(transformer), rounds=True)
    load = estimate.load_of(transformer, request.dtype, guided, work.joined)
    tokens = load.tokens
    if grid is not None and size is not None:
        tokens = grid.tokens(size)
    # each call makes its modulation, of which no table is kept
    load = replace(load, images=len(request.pictures), steps=request.steps, tokens=tokens, labels=1 + guided, table=0)
    load = replace(load, eight=request.precision is not None)
    channels = int(transformer.config.get("in_channels") or 1)
    return Planned(work, load, channels, size, exact=grid is not None)
