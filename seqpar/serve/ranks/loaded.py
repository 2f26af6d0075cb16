"""The loaded models of a server: each runs requests, one at a time, on all ranks."""

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
from seqpar.serve.ranks.checked import CheckedModel, default_size
from seqpar.serve.ranks.preview import NO_ESTIMATES, Estimates, estimating
from seqpar.transformer.lora import switched
from seqpar.transformer.parallelize import keep_fp32, passing


@dataclass
class Clock:
    """Seconds per part of a run, by the host of this rank."""

    parts_s: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def ends(self, part: str) -> None:
        """Add the time since the last call to a part."""
        now = time.perf_counter()
        self.parts_s[part], self.begun = self.parts_s.get(part, 0.0) + now - self.begun, now


@dataclass(frozen=True)
class ModelOutput:
    """An image, or the frames of a video as values in [0, 1] with their rate."""

    steps: int
    image: Image.Image | None = None
    frames_FHW3: Any = None
    fps: float = 0.0


@dataclass(frozen=True)
class Run:
    """How a request is run. images: its input images. boundary: called between steps and parts; raises to stop.

    on_step(index, count): called after each step. estimates: of the clean latents; they change no result.
    """

    images: Sequence[Picture]
    boundary: Callable[[], None]
    on_step: Callable[[int, int], object] = lambda index, count: None
    clock: Clock = field(default_factory=Clock)
    estimates: Estimates = NO_ESTIMATES


class LoadedModel(Protocol):
    """facts: the model as the API describes it."""

    facts: ServedModel

    def make(self, request: ImageRequest, run: Run) -> ModelOutput:
        """Run a request. Collective: call on all ranks.

        ValueError for a request that does not fit, FloatingPointError for numbers that are not finite.
        """
        ...


def load(checked: CheckedModel, ranks: Mesh) -> LoadedModel:
    """Load a model's weights. Collective."""
    if isinstance(checked.example, Adapted):
        return DiffusersModel(checked, checked.example, ranks)
    return OwnModel(checked, checked.example)


class OwnModel:
    """A model with a loop of this package."""

    def __init__(self, checked: CheckedModel, example: Job) -> None:
        self._checked = checked
        self._pipeline = example.pipeline.load(**example.loading, plan=checked.plan)
        self.facts = checked.facts(example.pixels)

    def make(self, request: ImageRequest, run: Run) -> ModelOutput:
        if request.loras:
            raise ValueError(f"model {request.model} takes no LoRA; leave lora out")
        pipeline = self._pipeline
        job = pipeline.dit.mesh.on_all_ranks(lambda: self._checked.job(request, run.images))

        def step(index: int) -> None:
            run.on_step(index + 1, job.evaluations)
            run.boundary()

        run.boundary()
        with pipeline.sampler.estimating(*run.estimates.watched(job.evaluations, job.pixels)):
            latents = pipeline.latents(**job.settings, on_step=step)
        run.clock.ends("steps")
        (image,) = to_pil(pipeline.decode(latents, lambda index: run.boundary()))
        run.clock.ends("decode")
        return ModelOutput(job.evaluations, image)


class DiffusersModel:
    """A parallelized diffusers pipeline, with its own loop."""

    def __init__(self, checked: CheckedModel, example: Adapted, ranks: Mesh) -> None:
        self._checked, self._mesh = checked, settled(checked.plan, None)
        pipe = example.pipeline(ranks)
        self._pipes = {example.kind: pipe}  # by class; they share all parts
        self._loras = switched(pipe, checked.loras.by_name) if checked.loras.by_name else None
        reason = placed(pipe, checked.plan, self._mesh)
        if checked.image_class not in (None, example.kind):
            other = self._pipes[checked.image_class] = _with_parts_of(pipe, checked.image_class)
            if reason is None:  # as for the first
                keep_fp32(other)
        for each_pipe in self._pipes.values():
            each_pipe.set_progress_bar_config(disable=True)
        self._scheduler = pipe.scheduler
        self.facts = checked.facts(default_size(example))

    def make(self, request: ImageRequest, run: Run) -> ModelOutput:
        job: Any = self._mesh.on_all_ranks(lambda: self._checked.job(request, run.images))
        if self._loras is None and request.loras:
            raise ValueError(f"model {request.model} has no LoRAs; leave lora out")
        if self._loras is not None and self._loras.switch(request.loras):
            run.clock.ends("lora")
        pipe = self._pipes[job.kind]
        pipe.scheduler = job.scheduler_of(self._scheduler)

        def step(index: int) -> None:
            run.clock.ends("encode and steps" if not index else "steps")
            run.on_step(index + 1, job.steps)

        try:
            with passing(pipe, run.boundary), estimating(pipe.scheduler, run.estimates, job.pixels):
                (made,) = job.make(pipe, step, self._mesh)
        finally:
            pipe.scheduler = self._scheduler
        run.clock.ends("decode")
        return ModelOutput(job.steps, frames_FHW3=made, fps=job.fps) if job.video else ModelOutput(job.steps, made)


def _with_parts_of(pipe: Any, kind: Any) -> Any:
    """A pipeline of another class with the same parts; diffusers' own `from_pipe` changes their dtypes."""
    parameters = inspect.signature(kind.__init__).parameters
    settings = {name: value for name, value in pipe.config.items() if name in parameters}
    return kind(**{**settings, **{name: part for name, part in pipe.components.items() if name in parameters}})
