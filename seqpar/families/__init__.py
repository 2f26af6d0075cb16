"""What seqpar knows of models: one file per family, found by its name. A new file needs no registration.

A file may export these tables, each by the name of diffusers' class; files whose names begin with `_` are helpers:

- `CUTS`: transformer -> `Cuts`: where its tokens are split, how its attention joins the ranks, what its masks mean. A
  family without fused blocks needs nothing else.
- `BLOCKS`: block -> `seqpar.families._block.Block`: the function that computes it with our kernels.
- `WORK`: transformer -> a function (config, text=...) that returns the planner's `Work`. text: number of text tokens.
- `TINY`: transformer -> `seqpar.families._tiny.Tiny`: its tiny model, where scaled defaults do not do.
- `PIPELINES`: a `Pipelines`: what its pipelines take.
- `ROW_LISTS`, `WITHOUT_ROWS`: names of arguments that are lists with an entry per batch row, and of tensors that have
  no batch rows even if their first dim is as long.
- `UNSPLIT`: class of an attention processor that reads keys by their place in the whole image -> (name, reason).
- `UNGUIDED`: transformers whose pipelines compute no unconditional branch.

`python -m seqpar.families NAME` proves a family. Users write the cuts of their transformers with the names below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint

__all__ = ["Boundary", "CutTokens", "Cuts", "GatherTokens", "Joint"]


@dataclass(frozen=True)
class Pipelines:
    """What a family's diffusers pipelines take, where the signatures of their calls do not say it.

    A name in the first three stands for all classes whose names begin with it.

    several_images: take several images for one result. one_result: take one prompt per call with an image.
    distilled: ignore a guidance scale if this key of model_index.json is true.
    image_class: a class for prompts -> a key of model_index.json and, where it is true, the key of the class for images
    in diffusers' table of image-to-video pipelines. Where it is false, no class takes an image.
    """

    several_images: tuple[str, ...] = ()
    one_result: tuple[str, ...] = ()
    distilled: Mapping[str, str] = field(default_factory=dict)
    image_class: Mapping[str, tuple[str, str]] = field(default_factory=dict)
