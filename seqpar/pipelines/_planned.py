"""What the planner needs of a diffusers pipeline before any weight is read: its transformer's work, and a run's size.

Transformer and VAE are built from their configs without memory for weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from seqpar.adapter import estimate
from seqpar.pipelines._naming import naming
from seqpar.planner.predict import Load
from seqpar.types.facts import Work
from seqpar.vae.known import spatial_factor
from seqpar.weights.find import WithoutValues


@dataclass(frozen=True)
class Planned:
    """The planner's view of a run. work: of the transformer. load: the run. channels: of the transformer's input.

    pixels: height and width of the pictures; None where the pipeline chooses them. exact: whether the load has the
    number of tokens of this very run, and not of its family's usual size.
    """

    work: Work
    load: Load
    channels: int
    pixels: tuple[int, int] | None
    exact: bool


@dataclass(frozen=True)
class Grid:
    """The tokens of a pipeline's pictures: each has `patch` x `patch` latent pixels of `factor` x `factor` pixels.

    packed: whether the pipeline makes the patches, so that the transformer's config names no size.
    """

    factor: int
    patch: int
    packed: bool
    trained: tuple[int, int] | None

    def check(self, size: tuple[int, int]) -> None:
        """Raise ValueError for a size that is no whole number of tokens along a side."""
        unit = self.factor * self.patch
        if any(side < unit or side % unit for side in size):
            shown = f"{size[0]}x{size[1]}, expected multiples of {unit}"
            raise ValueError(f"got size {shown} (patch {self.patch} x decoder {self.factor})")

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the number of tokens of a picture."""
        return math.prod(side // (self.factor * self.patch) for side in size)


def built(kind: Any, config: Mapping[str, Any], what: str) -> Any:
    """Return a model of diffusers without memory for its weights; ValueError if its config describes none."""
    with naming(f"got {what}, which describes no {kind.__name__}"), torch.device("meta"), WithoutValues():
        return kind.from_config(dict(config))


def grid_of(config: Mapping[str, Any], vae: Any) -> Grid | None:
    """Return the tokens of a pipeline's pictures, or None for videos and where the configs do not tell.

    config: the transformer's. vae: of the meta device, or None.
    """
    patch, inputs = config.get("patch_size"), config.get("in_channels")
    if vae is None or not isinstance(patch, int) or not isinstance(inputs, int):
        return None
    latent = vae.config.get("latent_channels") or vae.config.get("z_dim")
    if not isinstance(latent, int) or inputs % latent or math.isqrt(inputs // latent) ** 2 != inputs // latent:
        return None
    packed, trained = inputs != latent, vae.config.get("sample_size")
    trained = (trained, trained) if isinstance(trained, int) else trained
    own = config.get("sample_size") is not None
    return Grid(
        spatial_factor(vae),
        math.isqrt(inputs // latent) if packed else patch,
        packed,
        tuple(trained) if packed and trained and not own else None,
    )


def planned(
    transformer: Any,
    grid: Grid | None,
    size: tuple[int, int] | None,
    count: int,
    steps: int,
    guided: bool,
    dtype: torch.dtype,
) -> Planned:
    """Return the planner's view of a run that makes `count` pictures or videos.

    transformer: of the meta device. size: in pixels, None for the pipeline's own. guided: whether there are two
    branches.
    """
    size = size or (grid.trained if grid is not None else None)
    work = estimate.planned_work(transformer)
    load = estimate.load_of(transformer, dtype, guided, work.joined)
    tokens = load.tokens
    if grid is not None and size is not None:
        grid.check(size)
        tokens = grid.tokens(size)
    load = replace(load, images=count, steps=steps, tokens=tokens, labels=1 + guided, table=0)  # made in each call
    channels = int(transformer.config.get("in_channels") or 1)
    return Planned(work, load, channels, size, exact=grid is not None)
