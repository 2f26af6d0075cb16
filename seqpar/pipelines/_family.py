"""The seam between the command line and the families of pipelines: what is asked for, and what a family answers.

A family is one file in this folder. It exports `PIPELINES` (the class names in model_index.json that it runs), `PROMPT`
(the prompt of the native models that it runs without such a folder) and `check(order, path)`, which returns a `Job`.
The file adapted.py takes the folders of all other diffusers pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import seqpar.pipelines
from seqpar.planner.predict import Load
from seqpar.protocols import plugin, plugins
from seqpar.sampling.guidance import Guidance
from seqpar.weights.find import Blueprint, locate, resolve
from seqpar.weights.layout import pipeline_folder
from seqpar.weights.parts import read_pipeline

BUILTIN = Path(__file__).parents[1] / "assets" / "emoji-dit"
ANY = "adapted"  # the family of all pipelines that have no file of their own
NO_VAE_FACTOR = 8  # pixels along each side of a latent pixel, for models that come without a decoder


@dataclass(frozen=True)
class Order:
    """The pictures that are asked for; None and () leave a choice to the family.

    size: (height, width) in pixels. repeat: pictures of each class or prompt. guidance: scale of classifier-free
    guidance, or of embedded guidance for a model that takes the scale as an input. true_guidance: scale of
    classifier-free guidance beside the embedded one. The other fields are the flags of the same names.
    """

    model: str
    dtype: torch.dtype
    classes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    negative: str | None = None
    repeat: int = 1
    steps: int = 25
    guidance: float | None = None
    true_guidance: float | None = None
    guidance_channels: int | None = None
    eta: float | None = None
    respacing: str | None = None
    scheduler: str | None = None
    seed: int = 0
    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: int | None = None
    heads: int | None = None

    def refuse(self, reason: str, **flags: object) -> None:
        """Raise ValueError for the first of these flags (by their names) that is given; reason: why it cannot be."""
        for name, value in flags.items():
            if value is not None and value != ():
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"got --{name.replace('_', '-')} {shown} with --model {self.model}, {reason}")


@dataclass(frozen=True)
class Job:
    """Checked work of a family with a loop of its own, before any weight is read.

    pipeline: the family's class; `pipeline.load(**loading, plan=plan)` loads the weights, and `latents(**settings)` of
    what it returns samples. captions: a text for each picture; sheet: whether the pictures are one labelled sheet.
    named: what the user named (classes or prompts), for the metadata. schedule: keyword arguments of the scheduler's
    set_timesteps. notes: (title, text) of further lines of the summary.
    """

    pipeline: Any
    blueprint: Blueprint
    loading: Mapping[str, Any]
    settings: Mapping[str, Any]
    load: Load
    guidance: Guidance
    scheduler: Any
    dtype: torch.dtype
    pixels: tuple[int, int]
    captions: Sequence[str]
    named: Mapping[str, Sequence[str]]
    sheet: bool = False
    notes: Sequence[tuple[str, str]] = field(default_factory=tuple)

    @property
    def evaluations(self) -> int:
        """Return the number of calls of the model: one a step, about two a step for schedulers such as Heun's."""
        return self.load.steps


def family_of(name: str, heads: int | None = None) -> tuple[ModuleType, Path | None]:
    """Return the family that runs a model, and the model's path (None for a preset); a hub id is downloaded.

    heads: see `seqpar.weights.find.locate`. Raises ValueError if nothing has this name or no model of seqpar fits its
    files.
    """
    path = BUILTIN if is_builtin(name) else resolve(name)
    modules = [plugin(seqpar.pipelines, each, "family") for each in plugins(seqpar.pipelines)]
    folder = None if path is None else pipeline_folder(path)
    if folder is None:
        blueprint = locate(name if path is None else path, heads)
        for module in modules:
            if module.PROMPT == blueprint.module.Model.PROMPT:
                return module, path
        raise ValueError(f"got {blueprint.name}, expected a model that a pipeline here runs; use it as a library")
    kind = read_pipeline(folder)["_class_name"]
    found = next((module for module in modules if kind in module.PIPELINES), None)
    return found or plugin(seqpar.pipelines, ANY, "family"), path


def is_builtin(name: str | Path) -> bool:
    """Return whether a name stands for the model that comes with the package, whatever its case."""
    return str(name).lower() == "builtin"


def latent_size(pixels: tuple[int, int] | None, factor: int, config: Any) -> tuple[int, int]:
    """Return (height, width) of the latent of a picture; None stands for the size that the model was trained on.

    factor: number of pixels along each side of a latent pixel. Raises ValueError for sizes that are no whole patches.
    """
    if pixels is None:
        return config.sample_size, config.sample_size
    unit = config.patch_size * factor
    if any(side < unit or side % unit for side in pixels):
        raise ValueError(
            f"got size {pixels[0]}x{pixels[1]}, expected multiples of {unit} (patch {config.patch_size} "
            f"x decoder {factor})"
        )
    return pixels[0] // factor, pixels[1] // factor
