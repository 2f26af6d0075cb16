"""The models of a server before any weight is read: found, checked and planned, with the work of each order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from seqpar.loading.folder import PipelineParts
from seqpar.loading.lora import Lora
from seqpar.loading.names import Preset, preset_of
from seqpar.loop.blueprint import Blueprint
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import diffusers as adapted
from seqpar.pipelines.arguments import class_of_pictures, needs_picture
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.find import family_of
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.own_loop import Job
from seqpar.pipelines.request import GenerationRequest
from seqpar.pipelines.videos import check_encoder
from seqpar.planner.plan import Plan, make
from seqpar.planner.predict import predict
from seqpar.planner.search import Preferences
from seqpar.serve.messages import ImageRequest, ServedModel, VideoFacts
from seqpar.serve.ranks.loras import FittingLoras
from seqpar.serve.ranks.sizes import check_step, offered

EXAMPLE = 256  # pixels along a side of the picture that a model is planned with which needs one


@dataclass(frozen=True)
class Found:
    """A checked model before any weight is read. example: the work of an order that names nothing.

    drawing: the class of diffusers that begins with a picture, or None. needs_picture: whether no other makes anything.
    room: GiB of a rank that this model and its run may take, None before that is known.
    """

    name: str
    family: Any
    dtype: torch.dtype
    example: Job | Adapted
    plan: Plan
    loras: FittingLoras
    drawing: Any = None
    needs_picture: bool = False
    video: VideoFacts | None = None
    room: float | None = None

    @staticmethod
    def of(name: str, dtype: torch.dtype, ranks: Mesh, loras: Mapping[str, Lora]) -> Found:
        """Find and plan a model; the same ValueError on every rank for one that makes no pictures of orders.

        loras: those of the server, of which some fit the model.
        """
        family, source = ranks.on_all_ranks(lambda: family_of(name))
        if family is None:
            raise ValueError(f"got {name}, expected a model that `seqpar sample` makes pictures or videos with")
        texts = () if family.ASKED == "classes" else ("a",)
        parts = ranks.on_all_ranks(lambda: _parts_of(family, source))
        drawing, needs = _drawing(parts)
        order = GenerationRequest(name, dtype, prompts=texts, images=example_pictures(needs))
        example = ranks.on_all_ranks(lambda: family.check(order, parts))
        video = ranks.on_all_ranks(lambda: _video_facts(example)) if isinstance(example, Adapted) else None
        plan = make(example.work, example.load, dtype, ranks, Preferences())
        fitting = ranks.on_all_ranks(lambda: FittingLoras.of(example, loras))
        if ranks.is_main and preset_of(name) is not None:
            print(f"seqpar: {name} has random weights (preset)", flush=True)
        return Found(name, family, dtype, example, plan, fitting, drawing, needs, video)

    @property
    def prompt(self) -> str:
        """Return something that the model can show, for a run whose result nobody sees."""
        return "0" if self.family.ASKED == "classes" else "a"

    @property
    def begun(self) -> tuple[Picture, ...]:
        """Return a picture for such a run, if the model makes nothing without one."""
        return example_pictures(self.needs_picture)

    @property
    def memory(self) -> int:
        """Return the predicted bytes that a rank needs for the model, a run of the example, and what LoRAs change."""
        ranking = self.plan.ranking
        run = predict(ranking.work, self.example.load, self.plan.layout, ranking.rates).memory.total
        return run + self.loras.weights * self.dtype.itemsize

    def job(self, order: ImageRequest, images: Sequence[Picture]) -> Job | Adapted:
        """Return the checked work of an order; ValueError for whatever does not fit."""
        is_classes = self.family.ASKED == "classes"
        asked = GenerationRequest(
            self.name,
            self.dtype,
            seed=order.seed,
            size=order.size,
            guidance=order.guidance,
            true_guidance=order.true_guidance,
            negative=order.negative_prompt,
            scheduler=order.scheduler,
            classes=(order.prompt,) if is_classes else (),
            prompts=() if is_classes else (order.prompt,),
            images=tuple(images),
            strength=order.strength,
            frames=order.frames,
            fps=order.fps,
        )
        if order.steps is not None:
            asked = replace(asked, steps=order.steps)
        job = self.family.check(asked, self.example.files)
        check_step(order, self.plan, job.load, self.room)
        return job

    def facts(self, size: tuple[int, int]) -> ServedModel:
        """Return what the front tells of the model, whose pictures have this size by default."""
        is_classes, job = self.family.ASKED == "classes", self.example
        files = job.files if is_classes and isinstance(job, Job) else None
        names = () if files is None else tuple(map(files.class_name, sorted(files.labels)))
        steps = job.steps if isinstance(job, Adapted) else job.evaluations
        asked = "a" if files is None else str(min(files.labels, default=0))

        def fits(other: tuple[int, int]) -> object:
            return self.job(ImageRequest("", self.name, asked, size=other), ())

        return ServedModel(
            self.name,
            "classes" if is_classes else "texts",
            size,
            steps,
            str(self.plan.layout),
            self.plan.ms / 1e3,
            names,
            tuple(self.loras.every),
            self.drawing is not None,
            self.needs_picture,
            self.video,
            offered(size, fits) if self.video is None and not self.needs_picture else (),
        )


def example_pictures(needed: bool) -> tuple[Picture, ...]:
    """Return a picture that stands for one of an order, if it is needed."""
    return (Picture("an example", Image.new("RGB", (EXAMPLE, EXAMPLE))),) if needed else ()


def _parts_of(family: Any, source: Path | Blueprint | Preset) -> Any:
    """Return the checked parts of a pipeline of diffusers, and what other families are given as it is."""
    return adapted.parts_of(source) if family is adapted and not isinstance(source, Blueprint) else source


def _drawing(parts: Any) -> tuple[Any, bool]:
    """Return the class of diffusers that runs a model with a picture, or None, and whether it needs one."""
    if not isinstance(parts, PipelineParts):
        return None, False
    return class_of_pictures(parts.kind, parts.index), needs_picture(parts.kind)


def _video_facts(job: Adapted) -> VideoFacts | None:
    """Return what a model of videos makes by default, None for pictures; ValueError where videos cannot be made."""
    if not job.video:
        return None
    check_encoder()
    frames = job.frames
    if frames is None:
        raise ValueError(f"got {job.request.model}, expected a model whose files tell how many frames it makes")
    return VideoFacts(job.fps, frames.usual, frames.unit)
