"""The models of a server: each is loaded once, and makes a picture of an order on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from PIL import Image

from seqpar.adapter.passing import passing
from seqpar.engine.distributed import settled
from seqpar.pipelines._family import Job, Order, family_of
from seqpar.pipelines._load import placed
from seqpar.pipelines._lora import Lora, switched
from seqpar.pipelines._pictures import to_pil
from seqpar.pipelines.adapted import Adapted
from seqpar.planner.plan import Plan, make
from seqpar.planner.predict import predict
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.serve.messages import PictureOrder, ServedModel
from seqpar.serve.ranks.loras import FittingLoras
from seqpar.serve.ranks.preview import NO_ESTIMATES, Estimates
from seqpar.serve.ranks.scheduled import watched

Pass = Callable[[], None]
Tell = Callable[[int, int], None]


@dataclass
class Clock:
    """Takes the seconds of a picture's parts, by the host of this rank."""

    parts_s: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def ends(self, part: str) -> None:
        """Add the seconds since the last part ended to a part."""
        now = time.perf_counter()
        self.parts_s[part], self.begun = self.parts_s.get(part, 0.0) + now - self.begun, now


class Resident(Protocol):
    """A loaded model. facts: what the front tells of it."""

    facts: ServedModel

    def make(
        self, order: PictureOrder, boundary: Pass, tell: Tell, clock: Clock, estimates: Estimates = NO_ESTIMATES
    ) -> tuple[Image.Image, int]:
        """Return the picture of an order and its number of steps, on every rank; every rank must call this alike.

        boundary: passed between steps and parts. tell(index, count): called after each step. estimates: of the clean
        latents, which change nothing.
        Raises ValueError for an order that does not fit, and FloatingPointError for numbers that are not finite.
        """
        ...


@dataclass(frozen=True)
class Found:
    """A checked model before any weight is read. example: the work of an order that names nothing."""

    name: str
    family: Any
    dtype: torch.dtype
    example: Job | Adapted
    plan: Plan
    loras: FittingLoras

    @staticmethod
    def of(name: str, dtype: torch.dtype, ranks: Mesh, loras: Mapping[str, Lora]) -> Found:
        """Find and plan a model; the same ValueError on every rank for one that makes no pictures of orders.

        loras: those of the server, of which some fit the model.
        """
        family, source = family_of(name)
        if family is None:
            raise ValueError(f"got {name}, expected a model that `seqpar sample` makes pictures with")
        texts = () if family.ASKED == "classes" else ("a",)
        example = ranks.together(lambda: family.check(Order(name, dtype, prompts=texts), source))
        if isinstance(example, Adapted) and example.video:
            raise ValueError(f"got {name}, which makes videos, expected a model of pictures; use `seqpar sample`")
        plan = make(example.work, example.load, dtype, ranks, Wish())
        fitting = ranks.together(lambda: FittingLoras.of(example, loras))
        return Found(name, family, dtype, example, plan, fitting)

    @property
    def memory(self) -> int:
        """Return the predicted bytes that a rank needs for the model, a run of the example, and what LoRAs change."""
        ranking = self.plan.ranking
        run = predict(ranking.work, self.example.load, self.plan.layout, ranking.rates).memory.total
        return run + self.loras.weights * self.dtype.itemsize

    def job(self, order: PictureOrder) -> Job | Adapted:
        """Return the checked work of an order; ValueError for whatever does not fit."""
        is_classes = self.family.ASKED == "classes"
        asked = Order(
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
        )
        if order.steps is not None:
            asked = replace(asked, steps=order.steps)
        return self.family.check(asked, self.example.files)

    def facts(self, size: tuple[int, int]) -> ServedModel:
        """Return what the front tells of the model, whose pictures have this size by default."""
        is_classes, job = self.family.ASKED == "classes", self.example
        files = job.files if is_classes and isinstance(job, Job) else None
        names = () if files is None else tuple(map(files.class_name, sorted(files.labels)))
        steps = job.steps if isinstance(job, Adapted) else job.evaluations
        kind, plan = "classes" if is_classes else "texts", self.plan
        loras = tuple(self.loras.every)
        return ServedModel(self.name, kind, size, steps, str(plan.layout), plan.ms / 1e3, names, loras)

    def load(self, ranks: Mesh) -> Resident:
        """Read the weights; every rank must call this at the same time."""
        if isinstance(self.example, Adapted):
            return DiffusersModel(self, self.example, ranks)
        return OwnModel(self, self.example)


class OwnModel:
    """A model with a loop of this package."""

    def __init__(self, found: Found, example: Job) -> None:
        self._found = found
        self._pipeline = example.pipeline.load(**example.loading, plan=found.plan)
        self.facts = found.facts(example.pixels)

    def make(
        self, order: PictureOrder, boundary: Pass, tell: Tell, clock: Clock, estimates: Estimates = NO_ESTIMATES
    ) -> tuple[Image.Image, int]:
        """See `Resident`."""
        if order.loras:
            raise ValueError(f"got lora {order.loras[0][0]}, expected none: {order.model} is no pipeline of diffusers")
        pipeline = self._pipeline
        job = pipeline.dit.mesh.together(lambda: self._found.job(order))

        def step(index: int) -> None:
            tell(index + 1, job.evaluations)
            boundary()

        boundary()
        with pipeline.sampler.estimating(*estimates.looked(job.evaluations, job.pixels)):
            latents = pipeline.latents(**job.settings, on_step=step)
        clock.ends("steps")
        (picture,) = to_pil(pipeline.decode(latents, lambda index: boundary()))
        clock.ends("decode")
        return picture, job.evaluations


class DiffusersModel:
    """A parallelized pipeline of diffusers, with its own loop."""

    def __init__(self, found: Found, example: Adapted, ranks: Mesh) -> None:
        self._found, self._mesh = found, settled(found.plan, None)
        self._pipe = example.pipeline(ranks)
        self._pipe.set_progress_bar_config(disable=True)
        self._loras = switched(self._pipe, found.loras.every) if found.loras.every else None
        placed(self._pipe, found.plan, self._mesh)
        self._scheduler = self._pipe.scheduler
        self.facts = found.facts(example.pixels or (0, 0))

    def make(
        self, order: PictureOrder, boundary: Pass, tell: Tell, clock: Clock, estimates: Estimates = NO_ESTIMATES
    ) -> tuple[Image.Image, int]:
        """See `Resident`."""
        job: Any = self._mesh.together(lambda: self._found.job(order))
        if self._loras is None and order.loras:
            raise ValueError(f"got lora {order.loras[0][0]}, expected none: {order.model} was started without LoRAs")
        if self._loras is not None and self._loras.switch(order.loras):
            clock.ends("lora")
        self._pipe.scheduler = job.scheduler_of(self._scheduler)

        def step(index: int) -> None:
            clock.ends("encode and steps" if not index else "steps")
            tell(index + 1, job.steps)

        try:
            with passing(self._pipe, boundary), watched(self._pipe.scheduler, estimates, job.pixels):
                (picture,) = job.make(self._pipe, step, self._mesh)
        finally:
            self._pipe.scheduler = self._scheduler
        clock.ends("decode")
        return picture, job.steps
