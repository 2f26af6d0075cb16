"""The loaded models of a server: each runs requests, one at a time, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.protocol import Events
from seqpar.serve.messages import ImageRequest
from seqpar.serve.ranks.checked import CheckedModel
from seqpar.serve.ranks.preview import NO_ESTIMATES, Estimates


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
class RequestRun:
    """How a request is run. images: its input images. boundary: called between steps and parts; raises to stop.

    on_step(index, count): called after each step. estimates: of the clean latents; they change no result.
    """

    images: Sequence[Picture]
    boundary: Callable[[], None]
    on_step: Callable[[int, int], object] = lambda index, count: None
    clock: Clock = field(default_factory=Clock)
    estimates: Estimates = NO_ESTIMATES


class LoadedModel:
    """A model on all ranks. facts: the model as the API describes it."""

    def __init__(self, checked: CheckedModel, ranks: Mesh) -> None:
        """Load the weights. Collective."""
        self._checked = checked
        self._model = checked.example.load_model(ranks, checked.plan, loras=checked.loras.by_name)
        self.facts = checked.facts(checked.example.default_pixels)

    def make(self, request: ImageRequest, run: RequestRun) -> ModelOutput:
        """Run a request. Collective: call on all ranks.

        ValueError for a request that does not fit, FloatingPointError for numbers that are not finite.
        """
        job, clock = self._model.mesh.on_all_ranks(lambda: self._checked.job(request, run.images)), run.clock
        if request.loras and not self._checked.loras.by_name:
            raise ValueError(f"model {request.model} has no LoRAs; leave lora out")
        if self._model.switch_loras(request.loras):
            clock.ends("lora")

        def step(index: int) -> None:
            clock.ends("encode and steps" if index == 0 and job.texts else "steps")
            run.on_step(index + 1, job.steps)

        def decode(done: int, total: int) -> None:
            if not done:  # decoding begins
                clock.ends("steps")

        estimates = None
        if run.estimates is not NO_ESTIMATES:
            estimates = partial(run.estimates.watched, pixels=job.pixels)
        (image,) = self._model.generate(job, Events(step, run.boundary, decode=decode, estimates=estimates)).images
        clock.ends("decode")
        if job.video:
            return ModelOutput(job.steps, frames_FHW3=image, fps=job.fps)
        return ModelOutput(job.steps, image)
