"""A diffusers pipeline for the planner, before any weight is read: its work, its tokens and its size.

Transformer and VAE are built from their configs without memory for weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqpar.families._find import patches_of, tokens_of
from seqpar.loading.folder import PipelineParts
from seqpar.loading.parts import part_of
from seqpar.pipelines.arguments import SIDES, draws_anew, frames_of, makes_videos
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.planner.predict import Load
from seqpar.transformer import estimate
from seqpar.types.facts import Work
from seqpar.vae.known import latent_frames, spatial_factor, temporal_factor

FACTORS = ("spatial_compression_ratio", "scale_factor_spatial", "block_out_channels")  # what says a VAE's factor
SEGMENT = "segment_frame_length"  # argument of pipelines whose videos have parts
EDITED = (1024, 1024)  # pixels to which pipelines scale the images that they edit, in their own shape
MORE_CALLS = {"pag_scale": 0, "stg_scale": 0, "modality_scale": 1}  # of a step, for scales over these


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
    """The tokens of a pipeline's images or frames: each has `patch` x `patch` latents of `factor` x `factor` pixels.

    trained: height and width of the decoder, where the transformer's config names no size and the pipeline makes
    patches. joins: whether tokens of an input image are beside those of the result, and not among their channels.
    """

    factor: int
    patch: int
    trained: tuple[int, int] | None
    joins: bool = False

    def check(self, size: tuple[int, int]) -> None:
        """Raise ValueError for a size that is no whole number of tokens along a side."""
        unit = self.factor * self.patch
        if any(side < unit or side % unit for side in size):
            shown = f"{size[0]}x{size[1]}, expected multiples of {unit}"
            raise ValueError(f"got size {shown} (patch {self.patch} x decoder {self.factor})")


def grid_of(config: Mapping[str, Any], vae: Any) -> Grid | None:
    """Return the tokens of a pipeline's images or frames, or None where the configs do not tell."""
    if vae is None:
        return None
    latent = vae.config.get("latent_channels") or vae.config.get("z_dim")
    if not isinstance(latent, int) or not (any(map(vae.config.get, FACTORS)) or hasattr(vae, FACTORS[0])):
        return None
    # a transformer may read channels of an input image besides those of the latents that it predicts
    packed = [_side(config.get(name), latent) for name in ("in_channels", "out_channels")]
    side, trained = next(filter(None, packed), 1), vae.config.get("sample_size")
    trained = (trained, trained) if isinstance(trained, int) else trained
    own = config.get("sample_size") is not None
    return Grid(
        spatial_factor(vae),
        side if side > 1 else patches_of(config)[-1],
        (trained[0], trained[-1]) if side > 1 and trained and not own else None,
        packed[0] is not None,
    )


def _side(channels: Any, latent: int) -> int | None:
    # the latents along a side of a token with so many channels, None if these are no square of latents
    count, rest = divmod(channels, latent) if isinstance(channels, int) else (0, 0)
    return math.isqrt(count) if count and not rest and math.isqrt(count) ** 2 == count else None


def planned(
    parts: PipelineParts,
    grid: Grid | None,
    request: GenerationRequest,
    parameters: Mapping[str, inspect.Parameter],
    guidance: bool,
    guided: bool,
) -> Planned:
    """Return the planner's view of a request; parameters: of the pipeline's call.

    guidance: whether it is classifier-free. guided: whether the two calls of such a step may run together.
    """
    transformer, config = parts.transformer, parts.transformer.config
    chosen = makes_videos(parameters) or edits_images(request, parameters)
    size = request.size or (None if grid is None or chosen else grid.trained)
    work = replace(estimate.planned_work(transformer), rounds=True)
    load = estimate.load_of(transformer, request.dtype, guided, work.joined)
    counted = _tokens(parts, grid, size, request, parameters)
    tokens, *more = counted or (load.tokens,)
    load = replace(
        load,
        tokens=tokens,
        others=(*work.joined[: len(work.joined) - len(more)], *more),
        images=len(request.pictures),
        steps=request.steps,
        labels=1 + guided,
        table=0,  # each call makes its modulation
        eight=request.precision is not None,
        calls=_calls(parts, parameters, guidance) / (1 + guided),
    )
    return Planned(work, load, int(config.get("in_channels") or 1), size, exact=counted is not None)


def edits_images(request: GenerationRequest, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a request's images are beside the picture that it makes, of which they may say the size."""
    return bool(request.images) and not draws_anew(parameters) and not makes_videos(parameters)


def _tokens(
    parts: PipelineParts,
    grid: Grid | None,
    size: tuple[int, int] | None,
    request: GenerationRequest,
    parameters: Mapping[str, inspect.Parameter],
) -> tuple[int, ...] | None:
    """Return the tokens of the state, and of further streams besides text; None if the files do not tell."""
    transformer, usual, video = parts.transformer, parts.published, makes_videos(parameters)
    config = transformer.config
    if grid is None:
        is_sound = isinstance(config.get("sample_size"), int) and config.get("patch_size") is None
        return tokens_of(transformer, (1, 1, config["sample_size"])) if is_sound else None
    default = [parameters[side].default for side in SIDES if side in parameters]
    if size is None and len(default) == 2 and all(isinstance(side, int) for side in default):
        size = (default[0], default[1])
    if size is None and config.get("sample_height"):
        size = (config["sample_height"] * grid.factor, config["sample_width"] * grid.factor)
    size = size or (None if usual is None else usual.size)
    known = frames_of(parameters, parts)
    frames = request.frames or (known.usual if known else None) or (None if usual is None else usual.frames)
    if "enable_temporal_reasoning" in parameters:
        frames = 5  # of which the last is returned
    if SEGMENT in parameters:  # with a frame of what is animated, which becomes one more latent frame
        frames = parameters[SEGMENT].default + temporal_factor(parts.vae)
    edits = edits_images(request, parameters)
    if video and (size is None or frames is None):
        return None
    if size is None and not edits:
        return (estimate.load_of(transformer, request.dtype, False).tokens,)

    def counted(sides: tuple[int, int]) -> tuple[int, ...]:
        deep = latent_frames(parts.vae, frames) if frames is not None else 1
        return tokens_of(transformer, (deep, sides[0] // grid.factor, sides[1] // grid.factor), grid.patch)

    tokens, *more = counted(size or EDITED)
    return (tokens + edits * grid.joins * len(request.images) * counted(EDITED)[0], *more)


def _calls(parts: PipelineParts, parameters: Mapping[str, inspect.Parameter], guidance: bool) -> int:
    """Return how often a step computes the transformer for each picture."""
    own = any(part_of(parts.index, name) for name in ("guider", "unconditional_transformer"))
    more = (name in parameters and parameters[name].default > least for name, least in MORE_CALLS.items())
    return 1 + (guidance or own) + sum(more)
