"""The models of a server: each is loaded once, and makes a picture of an order on all ranks."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.load import placed
from seqpar.pipelines.own_loop import Job
from seqpar.pipelines.pictures import to_pil
from seqpar.planner.plan import settled
from seqpar.serve.messages import ImageRequest, ServedModel
from seqpar.serve.ranks.found import Found
from seqpar.serve.ranks.preview import NO_ESTIMATES, Estimates
from seqpar.serve.ranks.scheduled import watched
from seqpar.serve.ranks.sizes import usual_size
from seqpar.transformer.lora import switched
from seqpar.transformer.parallelize import keep_fp32, passing

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


@dataclass(frozen=True)
class OrderResult:
    """What an order made: a picture, or the frames of a video as values in [0, 1] with their number a second."""

    steps: int
    picture: Image.Image | None = None
    frames_FHW3: Any = None
    fps: float = 0.0


def untold(index: int, count: int) -> None:
    """Tell nobody of a step."""


@dataclass(frozen=True)
class OrderRun:
    """How an order is made. images: those of the order. boundary: passed between steps and parts.

    tell(index, count): called after each step. estimates: of the clean latents, which change nothing.
    """

    images: Sequence[Picture]
    boundary: Pass
    tell: Tell = untold
    clock: Clock = field(default_factory=Clock)
    estimates: Estimates = NO_ESTIMATES


class Resident(Protocol):
    """A loaded model. facts: what the front tells of it."""

    facts: ServedModel

    def make(self, order: ImageRequest, run: OrderRun) -> OrderResult:
        """Return what an order asks for, on every rank; every rank must call this alike.

        Raises ValueError for an order that does not fit, and FloatingPointError for numbers that are not finite.
        """
        ...


def load(found: Found, ranks: Mesh) -> Resident:
    """Read a model's weights; every rank must call this at the same time."""
    if isinstance(found.example, Adapted):
        return DiffusersModel(found, found.example, ranks)
    return OwnModel(found, found.example)


def _beside(pipe: Any, kind: Any) -> Any:
    """Return a pipeline of another class with the same parts; diffusers' own `from_pipe` changes their dtypes."""
    wanted = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in pipe.config.items() if name in wanted}
    return kind(**{**settings, **{name: part for name, part in pipe.components.items() if name in wanted}})


class OwnModel:
    """A model with a loop of this package."""

    def __init__(self, found: Found, example: Job) -> None:
        self._found = found
        self._pipeline = example.pipeline.load(**example.loading, plan=found.plan)
        self.facts = found.facts(example.pixels)

    def make(self, order: ImageRequest, run: OrderRun) -> OrderResult:
        """See `Resident`."""
        if order.loras:
            raise ValueError(f"got lora {order.loras[0][0]}, expected none: {order.model} is no pipeline of diffusers")
        pipeline = self._pipeline
        job = pipeline.dit.mesh.on_all_ranks(lambda: self._found.job(order, run.images))

        def step(index: int) -> None:
            run.tell(index + 1, job.evaluations)
            run.boundary()

        run.boundary()
        with pipeline.sampler.estimating(*run.estimates.looked(job.evaluations, job.pixels)):
            latents = pipeline.latents(**job.settings, on_step=step)
        run.clock.ends("steps")
        (picture,) = to_pil(pipeline.decode(latents, lambda index: run.boundary()))
        run.clock.ends("decode")
        return OrderResult(job.evaluations, picture)


class DiffusersModel:
    """A parallelized pipeline of diffusers, with its own loop."""

    def __init__(self, found: Found, example: Adapted, ranks: Mesh) -> None:
        self._found, self._mesh = found, settled(found.plan, None)
        pipe = example.pipeline(ranks)
        self._pipes = {example.kind: pipe}  # by their classes; they share all parts
        self._loras = switched(pipe, found.loras.every) if found.loras.every else None
        reason = placed(pipe, found.plan, self._mesh)
        if found.drawing not in (None, example.kind):
            beside = self._pipes[found.drawing] = _beside(pipe, found.drawing)
            if reason is None:  # as for the first
                keep_fp32(beside)
        for each in self._pipes.values():
            each.set_progress_bar_config(disable=True)
        self._scheduler = pipe.scheduler
        self.facts = found.facts(usual_size(example))

    def make(self, order: ImageRequest, run: OrderRun) -> OrderResult:
        """See `Resident`."""
        job: Any = self._mesh.on_all_ranks(lambda: self._found.job(order, run.images))
        if self._loras is None and order.loras:
            raise ValueError(f"got lora {order.loras[0][0]}, expected none: {order.model} was started without LoRAs")
        if self._loras is not None and self._loras.switch(order.loras):
            run.clock.ends("lora")
        pipe = self._pipes[job.kind]
        pipe.scheduler = job.scheduler_of(self._scheduler)

        def step(index: int) -> None:
            run.clock.ends("encode and steps" if not index else "steps")
            run.tell(index + 1, job.steps)

        try:
            with passing(pipe, run.boundary), watched(pipe.scheduler, run.estimates, job.pixels):
                (made,) = job.make(pipe, step, self._mesh)
        finally:
            pipe.scheduler = self._scheduler
        run.clock.ends("decode")
        return OrderResult(job.steps, frames_FHW3=made, fps=job.fps) if job.video else OrderResult(job.steps, made)
