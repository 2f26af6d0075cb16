"""What seqpar knows of models: one file per family, found by its name. A new file needs no registration.

A file may export these tables, each by the name of diffusers' class; files whose names begin with `_` are helpers:

- `CUTS`: transformer -> `Cuts`: where its tokens are split, how its attention joins the ranks, what its masks mean. A
  family without fused blocks needs nothing else.
- `BLOCKS`: block -> `seqpar.families._block.Block`: the function that computes it with our kernels.
- `WORK`: transformer -> a function (config, text=...) that returns the planner's `Work`. text: number of text tokens.
- `PROMPT_TOKENS`: transformer without `WORK` -> the text tokens of a usual prompt, where 256 do not do. `OF_TEXT`:
  transformer without `WORK` -> a pattern of the layers of its blocks that text tokens alone pass.
- `TOKENS`: transformer -> a function (config, (frames, rows, columns) of latents) that returns how many tokens it makes
  of them, and those of further streams besides text; needed if it is not one for each patch.
- `PUBLISHED`: hub id -> a `Published`, so that `seqpar plan` needs none of its files.
- `TINY`: transformer -> `seqpar.families._tiny.Tiny`: its tiny model, where scaled defaults do not do.
- `PIPELINES`: a `Pipelines`: what its pipelines take.
- `config_of_file`: a function of the shapes in a transformer's file that returns its config.json, or None.
- `RANDOM_MODELS`: name -> a pipeline's class, its parts (name -> class, config) and texts (argument of its call ->
  shape of an encoded prompt), for random weights.
- `ROW_LISTS`, `WITHOUT_ROWS`: names of arguments that are lists with an entry per batch row, and of tensors of one or
  two dims that have no batch rows even if their first dim is as long. The names hold for all models. Where another
  model's argument of this name has batch rows, use `Cuts.prepare` instead (`minimax_h3.py` does).
- `UNSPLIT`: class of an attention processor that reads keys by their place in the whole image -> (name, reason).
- `UNGUIDED`: transformers whose pipelines compute no unconditional branch. Others with `CUTS` count as guided, unless
  their config sets `guidance_embeds`, and may get a cfg axis by default, unless they are in `UNPAIRED`: transformers of
  which no two calls run together, because a pipeline reads a call's result at once or gives it caches.

`python -m seqpar.families NAME` proves a family. Users write the cuts of their transformers with the names below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint

__all__ = ["Boundary", "CutTokens", "Cuts", "GatherTokens", "Joint"]


@dataclass(frozen=True)
class Preset:
    """How a model that was distilled to few steps is sampled, as its authors do: `--preset NAME`.

    pipelines: a pattern of classes' names. arguments: of the pipeline's call, beside the number of steps. sigmas: of
    the steps, before the 0 at the end; () keeps the schedule of the pipeline. loras: a pattern in the paths of its LoRA
    files (in small letters); None where the checkpoint itself is distilled. scale: by which its authors scale the LoRA.
    needs: a key of model_index.json, and whether it has to be set.
    """

    name: str
    pipelines: str
    steps: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sigmas: tuple[float, ...] = ()
    loras: str | None = None
    scale: float = 1.0
    needs: tuple[str, bool] | None = None

    def fits(self, pipeline: str, index: Mapping[str, Any]) -> bool:
        """Return whether it belongs to a pipeline. index: its model_index.json."""
        if self.needs is not None:
            value = index.get(self.needs[0])
            if bool(value[0] if isinstance(value, (list, tuple)) else value) != self.needs[1]:
                return False
        return re.fullmatch(self.pipelines, pipeline) is not None

    def __str__(self) -> str:
        values = [f"{name} {value:g}" for name, value in self.arguments.items()]
        sigmas = f"sigmas {', '.join(f'{x:.4g}' for x in self.sigmas)}"
        return ", ".join([f"{self.steps} steps", *([sigmas] if self.sigmas else []), *values])


@dataclass(frozen=True)
class Published:
    """What `seqpar plan` has to know of a published model, in place of its files.

    pipeline, transformer: classes. config: of the transformer, where it differs from its class's defaults. vae: that of
    its decoder (`latents`). size: height and width of a usual result, and frames: of a video, where the pipeline's call
    has no defaults. index: keys of its model_index.json that change what a step calls, or how many transformers there
    are, all of this config.
    """

    pipeline: str
    transformer: str
    config: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, int] = field(default_factory=lambda: latents())
    size: tuple[int, int] = (1024, 1024)
    frames: int | None = None
    index: Mapping[str, Any] = field(default_factory=dict)


def latents(channels: int = 16, pixels: int = 8, frames: int = 1, **more: int) -> Mapping[str, int]:
    """Return what the planner reads in a decoder's config.

    channels: of a latent. pixels: along a side of one. frames: of each latent frame after the first. more: entries.
    """
    sides = {"spatial_compression_ratio": pixels, "temporal_compression_ratio": frames}
    return {"latent_channels": channels, **sides, **more}


def twice(transformer: str, name: str = "transformer_2") -> Mapping[str, Any]:
    """Return the key of a model_index.json for a second transformer."""
    return {name: ("diffusers", transformer)}


GUIDER: Mapping[str, Any] = {"guider": ("diffusers", "ClassifierFreeGuidance")}  # of model_index.json: calls twice


@dataclass(frozen=True)
class Pipelines:
    """What a family's diffusers pipelines take, where the signatures of their calls do not say it.

    A name in the first four stands for all classes whose names begin with it.

    several_images: take several images for one result. one_result: take one prompt per call with an image. one_prompt:
    take one prompt per call, as a string.
    distilled: ignore a guidance scale if this key of model_index.json is true.
    image_class: a class for prompts -> a key of model_index.json and, where it is true, the key of the class for images
    in diffusers' table of image-to-video pipelines. Where it is false, no class takes an image.
    reads_layers: whole names of pipelines that read layers of their encoders, for which a stub cannot stand.
    sigmas: a pattern for the beginning of names of pipelines that pass their scheduler sigmas in equal steps from 1 to
    1 / steps.
    experts: each of several transformers -> what it is for, and what is found in the names of its LoRA files (in small
    letters). left_out: keys of LoRA files that diffusers' conversion drops with no warning.
    presets: how distilled models are sampled.
    """

    several_images: tuple[str, ...] = ()
    one_result: tuple[str, ...] = ()
    one_prompt: tuple[str, ...] = ()
    distilled: Mapping[str, str] = field(default_factory=dict)
    image_class: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    reads_layers: tuple[str, ...] = ()
    sigmas: str | None = None
    experts: Mapping[str, tuple[str, re.Pattern[str]]] = field(default_factory=dict)
    left_out: re.Pattern[str] | None = None
    presets: tuple[Preset, ...] = ()
