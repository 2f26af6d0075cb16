"""The seam between the command line and the families of pipelines: what is asked for, and what a family answers.

A family is one file in this folder. It exports `PIPELINES` (the class names in model_index.json that it runs), `MODELS`
(the classes of native models that it runs without such a folder, with their subclasses), `ASKED` (the field of an order
that says what its pictures show, "classes" or "prompts") and `check(order, model)`, which returns a `Job`; model: what
the order's name stands for (`family_of`), or the `files` of an earlier job. What families share is in _files.py
(checked files), _texts.py (prompts) and _loaded.py (loaded models). The file adapted.py takes the folders of all other
diffusers pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

import seqpar.pipelines
from seqpar.pipelines._files import Files
from seqpar.pipelines._image_files import Picture
from seqpar.pipelines._lora import Lora
from seqpar.pipelines._pictures import to_pil
from seqpar.planner.plan import make, work_of
from seqpar.planner.predict import Load
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.arguments import check_loading, check_pictures
from seqpar.sampling.guidance import Guidance
from seqpar.types.facts import Work
from seqpar.types.protocols import plugin, plugins
from seqpar.weights.find import Blueprint, check_heads, locate, resolve
from seqpar.weights.layout import pipeline_folder
from seqpar.weights.parts import read_pipeline
from seqpar.weights.presets import PRESETS, Preset

ANY = "adapted"  # the family of all pipelines that have no file of their own
FOR_CLASSES = "expected none: it is for models that make pictures of classes"
NO_VIDEOS = "expected none: this model makes no videos"
NO_IMAGES = "expected none: this model takes no picture"
NO_LORA = "expected none: it is for folders of diffusers pipelines that make pictures of texts (--prompt)"


@dataclass(frozen=True)
class Order:
    """The pictures that are asked for; None and () leave a choice to the family.

    size: (height, width) in pixels. repeat: pictures of each class or prompt. guidance: scale of classifier-free
    guidance, or of embedded guidance for a model that takes the scale as an input. true_guidance: scale of
    classifier-free guidance beside the embedded one. loras: files that change the transformer, with their scales.
    images: the pictures that it begins with. The other fields are the flags of the same names.
    """

    model: str
    dtype: torch.dtype
    classes: tuple[str | int, ...] = ()
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
    loras: tuple[Lora, ...] = ()
    images: tuple[Picture, ...] = ()
    strength: float | None = None

    @property
    def pictures(self) -> list[str]:
        """Return the prompt of each picture."""
        return [text for text in self.prompts for _ in range(self.repeat)]

    def refuse(self, reason: str, **flags: object) -> None:
        """Raise ValueError for the first of these flags (by their names) that is given; reason: why it cannot be."""
        for name, value in flags.items():
            if value is not None and value != ():
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"got --{name.replace('_', '-')} {shown} with --model {self.model}, {reason}")

    def needs_prompts(self) -> None:
        """Raise ValueError for flags of other models than those that make pictures of texts, and without a prompt."""
        self.refuse("expected none: this model makes pictures of texts (--prompt)", classes=self.classes)
        self.refuse(NO_VIDEOS, frames=self.frames, fps=self.fps)
        self.refuse(NO_IMAGES, image=self.images, strength=self.strength)
        self.refuse(FOR_CLASSES, respacing=self.respacing)
        if not self.prompts:
            raise ValueError(f"got --model {self.model} without --prompt, expected one: it makes pictures of texts")

    def free_guidance(self, scale: float) -> Guidance:
        """Return classifier-free guidance of `--guidance`, or of this scale without one; ValueError if it is none."""
        guidance = Guidance(scale if self.guidance is None else self.guidance, self.guidance_channels)
        if self.guidance_channels is not None and not guidance.on:
            off = f"with --guidance {guidance.scale:g}, expected guidance over 1: without it there is nothing to guide"
            raise ValueError(f"got --guidance-channels {self.guidance_channels} {off}")
        return guidance


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
    def files(self) -> Any:
        """Return the checked files, with which the family checks further orders."""
        return self.loading["files"]

    @property
    def work(self) -> Work:
        """Return what the planner needs of the model."""
        return work_of(self.blueprint.config)

    @property
    def decodes(self) -> bool:
        """Return whether a decoder comes with the model."""
        return self.files.vae is not None

    @property
    def evaluations(self) -> int:
        """Return the number of calls of the model: one a step, about two a step for schedulers such as Heun's."""
        return self.load.steps

    @staticmethod
    def of(
        pipeline: Any, files: Files, order: Order, guidance: Guidance, scheduler: Any, asked: Sequence[Any], **more: Any
    ) -> Job:
        """Return the job of these files for one picture of each of `asked`, the classes or prompts.

        scheduler: with its timesteps set; without one the order's steps are the evaluations. more: further fields;
        `loading` and `settings` are added to those that every family has.
        """
        check_heads(files.blueprint.name, files.blueprint.config, order.heads)
        height, width = files.latent_size(order.size)
        evaluations = order.steps if scheduler is None else len(scheduler.timesteps)
        settings = {"steps": order.steps, "seed": order.seed, "size": order.size, "guidance": guidance}
        return Job(
            pipeline=pipeline,
            blueprint=files.blueprint,
            loading={"files": files, "dtype": order.dtype, **more.pop("loading", {})},
            settings={**settings, **more.pop("settings", {})},
            load=files.load_of(asked, guidance.on, evaluations, order.dtype, order.size),
            guidance=guidance,
            scheduler=scheduler,
            dtype=order.dtype,
            pixels=(height * files.factor, width * files.factor),
            **more,
        )


def family_of(name: str, heads: int | None = None) -> tuple[ModuleType | None, Path | Blueprint | Preset]:
    """Return the family of a model, and what its name stands for: a pipeline's folder, a file in one, or a preset.

    A hub id is downloaded. heads: see `seqpar.weights.find.locate`. The family is None for a native model that none
    names: it can be planned (`planned`), but no pictures are made with it here. Raises ValueError if nothing has this
    name or no model of seqpar fits its files.
    """
    if name.lower() in PRESETS:
        return plugin(seqpar.pipelines, ANY, "family"), PRESETS[name.lower()]
    path = resolve(name)
    families = [plugin(seqpar.pipelines, each, "family") for each in plugins(seqpar.pipelines)]
    folder = None if path is None else pipeline_folder(path)
    if path is None or folder is None:
        model = locate(name if path is None else path, heads)
        return next((family for family in families if issubclass(model.module.Model, family.MODELS)), None), model
    kind = read_pipeline(folder)["_class_name"]
    known = next((family for family in families if kind in family.PIPELINES), None)
    return known or plugin(seqpar.pipelines, ANY, "family"), path


def planned(order: Order, model: Blueprint) -> Job:
    """Return what the planner needs of an order for a model that no family runs: its config, and its `work`.

    Guidance of over 1, or none that is named where the model's usual run has it, counts as two branches.
    """
    order.refuse(NO_LORA, lora=order.loras)
    order.refuse(NO_IMAGES, image=order.images, strength=order.strength)
    files = Files(model)
    scale = (4.0 if work_of(files.blueprint.config).guided else 1.0) if order.guidance is None else order.guidance
    asked = [each for each in order.classes or order.prompts or ("",) for _ in range(order.repeat)]
    return Job.of(None, files, order, Guidance(scale), None, asked, captions=list(map(str, asked)), named={})


def generated(
    order: Order,
    mesh: Mesh | None,
    kind: str,
    guidance: Callable[[], Guidance | None],
    job: Callable[[Order, Guidance | None, str], Job],
) -> list[Image.Image]:
    """Return a picture of each class or prompt on every rank, from rank 0's order; every rank must call this.

    order: unchecked, as a caller of the library gave it. kind: its field of what is asked for, "classes" or "prompts".
    guidance: returns the caller's, None for the model's own. job: returns the checked work for rank 0's order and its
    model.
    """
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    ranks.together(lambda: check_loading(mesh, order.model, order.dtype))
    asked: Any = getattr(order, kind)
    ranks.together(lambda: check_pictures(kind, asked, order.steps, guidance() or Guidance(), order.size, order.seed))
    given: Any = {kind: tuple(asked), "model": str(order.model)}
    shared, scale = ranks.share((replace(order, **given), guidance()), tuple[Order, Guidance | None])
    if not getattr(shared, kind):
        raise ValueError(f"got no {kind}, expected one a picture")
    work = ranks.together(lambda: job(shared, scale, shared.model))
    plan = make(work_of(work.blueprint.config), work.load, work.dtype, ranks, Wish(), mesh)
    with work.pipeline.load(**work.loading, mesh=mesh, plan=plan) as pipeline:
        return to_pil(pipeline.decode(pipeline.latents(**work.settings)))
