"""How a `GenerationRequest` becomes images: `check`, plan, `load_model`, `generate`. Nothing here imports a model.

`seqpar.pipelines.find.find` returns the `Source` of a name; `Source.check` a `Job`, from whose `work` and `load` the
planner makes a plan; `Job.load_model` a `Model` on all ranks; `Model.generate` the `Result`. Implementations:
`diffusers` (any pipeline, diffusers' own loop), `classes` and `unidiffuser` (the loop of `seqpar.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from seqpar.families import Preset
from seqpar.loading.lora import Lora
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.pictures import Sound
from seqpar.planner.plan import Plan
from seqpar.planner.predict import Load
from seqpar.transformer.budget import MOST_PSNR, check_budget
from seqpar.transformer.calibration import Precision, why_not_here
from seqpar.transformer.step_cache import step_cache
from seqpar.types.facts import Work
from seqpar.types.guidance import Guidance
from seqpar.vae.strips import DecodeMode

FOR_CLASSES = "only models of classes take it"
NO_VIDEOS = "this model generates images, no videos"
NO_IMAGES = "this model takes no input image"
NO_EIGHT = "this model has no blocks that compute in 8 bits"
NO_PRESET = "this model has no presets, and takes no sigmas"
NO_CACHE = "the loop of seqpar's own models has no step cache"
NO_LORA = "LoRAs need the folder of a diffusers pipeline for prompts"


@dataclass(frozen=True)
class Control:
    """An image that a ControlNet follows. name: of the ControlNet. scale: how much its residuals weigh."""

    name: str
    picture: Picture
    scale: float = 1.0


def inputs_of(pictures: Sequence[Picture], controlnet: str | None, scale: float | None) -> dict[str, Any]:
    """Return the fields of a request that hold its pictures: the mask has one channel, a ControlNet's image is last."""
    mask = next((x for x in pictures if x.image.mode == "L"), None)
    images = [x for x in pictures if x is not mask]
    control = None if controlnet is None else Control(controlnet, images.pop(), 1.0 if scale is None else scale)
    return {"images": tuple(images), "mask": mask, "control": control}


@dataclass(frozen=True)
class GenerationRequest:
    """The images that are asked for; None and () leave a choice to the family.

    size: (height, width) in pixels. repeat: images of each class or prompt. guidance: scale of classifier-free
    guidance, or of embedded guidance for a model that takes the scale as an input. true_guidance: scale of classifier-
    free guidance beside the embedded one. images: input images; mask: white where the only one is repainted. preset:
    sets the steps, their sigmas and the scales that are None. sigmas: of the steps of flow matching, before the 0 at
    the end, in place of the scheduler's. planned: whether nothing but a plan is made of it, which needs no further
    inputs. The other fields are the flags of the same names.
    """

    model: str
    dtype: torch.dtype
    classes: tuple[str | int, ...] = ()
    prompts: tuple[str, ...] = ()
    negative: str | None = None
    repeat: int = 1
    steps: int = 25
    preset: str | None = None
    sigmas: tuple[float, ...] = ()
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
    loras: tuple[Lora, ...] = ()
    images: tuple[Picture, ...] = ()
    mask: Picture | None = None
    control: Control | None = None
    strength: float | None = None
    precision: Precision | None = None
    min_psnr: float | None = None
    attention_steps: str | None = None
    cache: str | None = None
    park: bool = False
    planned: bool = False

    @property
    def pictures(self) -> list[str]:
        """The prompt of each image."""
        return [text for text in self.prompts for _ in range(self.repeat)]

    def refuse(self, reason: str, **flags: object) -> None:
        """Raise ValueError for the first of these flags (by their names) that is given; reason: a clause."""
        for name, value in flags.items():
            if value is not None and value != ():
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"--{name.replace('_', '-')} {shown} with --model {self.model}: {reason}")

    def check_precision(self, device: torch.device) -> None:
        """Raise ValueError if a device cannot compute in this precision, or for a bound of an error there is not."""
        if self.min_psnr is not None and self.precision is None and self.cache is None:
            self.refuse("it bounds the error of --precision fp8 or --cache; add one", min_psnr=self.min_psnr)
        if self.min_psnr is not None and not 0 < self.min_psnr <= MOST_PSNR:
            raise ValueError(f"got --min-psnr {self.min_psnr}, expected more than 0 and at most {MOST_PSNR:g} dB")
        check_budget(self.min_psnr, None, self.precision, step_cache(self.cache))
        if self.precision is not None and (reason := why_not_here(device, self.dtype)) is not None:
            self.refuse(reason, precision=self.precision)

    def needs_prompts(self) -> None:
        """Raise ValueError for flags that models of prompts do not take, and without a prompt."""
        self.refuse("this model generates images from prompts (--prompt)", classes=self.classes)
        self.refuse(NO_VIDEOS, frames=self.frames, fps=self.fps)
        self.refuse(NO_IMAGES, image=self.images, strength=self.strength)
        self.refuse(FOR_CLASSES, respacing=self.respacing)
        if not self.prompts:
            raise ValueError(f"--model {self.model} needs --prompt: it generates images from prompts")

    def free_guidance(self, default: float) -> Guidance:
        """Return classifier-free guidance of `--guidance`, or of the default scale."""
        guidance = Guidance(default if self.guidance is None else self.guidance, self.guidance_channels)
        if self.guidance_channels is not None and not guidance.on:
            raise ValueError(
                f"--guidance-channels {self.guidance_channels} needs guidance over 1, got --guidance {guidance.scale:g}"
            )
        return guidance


Estimates = tuple[Collection[int], Callable[[int, Tensor], None]]
"""Indices of evaluations whose estimate of the clean latents is asked for, and what gets index and estimate."""


class Source(Protocol):
    """The checked files of a model, before any weight is read.

    takes: which field of a request says what its images show. class_labels: the names of each class by its number, of a
    model of classes. needs_image: whether it generates nothing without an input image. needs_mask: whether it only
    repaints what a mask names. presets: by their names.
    """

    takes: ClassVar[Literal["classes", "prompts"]]

    @property
    def class_labels(self) -> Mapping[int, tuple[str, ...]]: ...

    @property
    def needs_image(self) -> bool: ...

    @property
    def needs_mask(self) -> bool: ...

    @property
    def presets(self) -> Mapping[str, Preset]: ...

    @property
    def controls(self) -> Mapping[str, Any]:
        """ControlNets by name."""
        ...

    def having(self, controls: Mapping[str, Any], all_fit: bool = False) -> Self:
        """Return the same source with the ControlNets of these that fit it.

        all_fit: whether one that does not fit raises ValueError.
        """
        ...

    def schedule(self, name: str | None, steps: int) -> Any:
        """Return a diffusers scheduler by its class name, None for the model's own.

        ValueError for one that does not fit the model or its pipeline, or cannot make so many steps.
        """
        ...

    def check(self, request: GenerationRequest) -> Job:
        """Return the job of a request; ValueError if it does not fit. Reads configs and headers, no weights."""
        ...


@dataclass(frozen=True)
class Frames:
    """Numbers of frames that a decoder generates: `usual`, and those that differ from it by a multiple of `unit`.

    least, most: of the pipeline, None if it has no such limit.
    """

    usual: int
    unit: int
    least: int = 1
    most: int | None = None


class Job(Protocol):
    """A checked request. work, load: the model and the run, for the planner.

    guidance: classifier-free. embedded: the scale that the model takes as an input, or None. channels: of the latents.
    pixels: height and width of the images; None where the pipeline chooses them.
    """

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def guidance(self) -> Guidance: ...

    @property
    def source(self) -> Source: ...

    @property
    def work(self) -> Work: ...

    @property
    def load(self) -> Load: ...

    @property
    def embedded(self) -> float | None: ...

    @property
    def channels(self) -> int: ...

    @property
    def pixels(self) -> tuple[int, int] | None: ...

    @property
    def default_pixels(self) -> tuple[int, int]:
        """Height and width of the images by default; (0, 0) if the pipeline chooses them."""
        ...

    @property
    def why_not_planned(self) -> str | None: ...  # why the planner does not know this run, or None

    @property
    def why_no_steps(self) -> str | None: ...  # why `Events.step` is not called after each step, or None

    @property
    def steps(self) -> int:
        """Number of steps, or of the model's evaluations in our own loop: about two per step for some schedulers."""
        ...

    @property
    def texts(self) -> int: ...  # number of different prompts to encode

    @property
    def decodes(self) -> bool: ...  # whether a decoder comes with the model

    @property
    def video(self) -> bool: ...

    @property
    def fps(self) -> float: ...  # frames per second of videos

    @property
    def frames(self) -> Frames | None: ...  # numbers of frames of videos; None for images, and if no file tells

    @property
    def labels(self) -> Sequence[str] | None:
        """Label of each image if all of them are written as one sheet, otherwise None."""
        ...

    def lora_layers(self, lora: Lora) -> dict[Lora, dict[str, int]]:
        """Return what a LoRA changes, as `seqpar.transformer.lora.check_switched`; ValueError if it does not fit.

        Layers whose weights without LoRAs are kept in memory of the host (in 8 bits, or parked) count as 0.
        """
        ...

    def load_model(
        self,
        mesh: Mesh,
        plan: Plan,
        *,
        vae: DecodeMode = "auto",
        on_encode: Callable[[int], None] | None = None,
        loras: Mapping[str, Lora] | None = None,
    ) -> Model:
        """Load the weights. Collective: call on all ranks; raises the same ValueError on every rank.

        mesh: all ranks. plan: of this job. on_encode: for a model that runs this job alone: its prompts are encoded
        first, and the encoders then leave memory; called with numbers of encoded prompts, 0 at the beginning. None
        keeps the encoders. loras: those that `Model.switch_loras` may name, in addition to the request's.
        """
        ...


def no_event(count: int) -> None:
    pass


@dataclass(frozen=True)
class Events:
    """What a run calls. All ranks make the same calls of `boundary` and `step`.

    step(index): after each step. boundary(): before the first step, and between steps and parts; may raise to end the
    run. encode(done): input images encoded since the last call, 0 at the beginning. decode(done, total): the same for
    the results that this rank decodes. estimates(evaluations): which clean latents to estimate, or None.
    """

    step: Callable[[int], None] = no_event
    boundary: Callable[[], None] = lambda: None
    encode: Callable[[int], None] = no_event
    decode: Callable[[int, int], None] = lambda done, total: None
    estimates: Callable[[int], Estimates] | None = None


@dataclass(frozen=True)
class Result:
    """Images (PIL) or videos (frames, height, width, 3) with values in [0, 1], on every rank.

    digest(): 16 hex digits over the latents or pixels (and sounds), to compare runs; digest_of: which of them. sounds:
    one of each video, or none. computed: how many steps were computed, and of how many, with a step cache.
    """

    images: list[Any]
    digest_of: Literal["latents", "pixels"]
    digest: Callable[[], str]
    sounds: Sequence[Sound] = ()
    computed: tuple[int, int] | None = None


class Model(Protocol):
    """A loaded model on all ranks. Use it in a `with` block, which frees buffers and graphs at the end.

    job: of the same source.
    """

    @property
    def mesh(self) -> Mesh: ...

    @property
    def plan(self) -> Plan: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def notes(self, job: Any) -> list[tuple[str, str]]:
        """Return (title, text) for the lines of a run's summary: its work, state, graph, decoder."""
        ...

    def facts(self, job: Any) -> dict[str, Any]:
        """Return what the metadata of results says besides flags and plan: scheduler, prompts, decoder."""
        ...

    def verified(self, job: Any, evaluations: int) -> tuple[Any, dict[str, Any]]:
        """Return target and keyword arguments of `seqpar.verify` for the first evaluations of a job."""
        ...

    def takes(self, job: Any) -> bool:
        """Return whether the loaded pipeline takes a job's size."""
        ...

    def switch_loras(self, loras: Sequence[tuple[str, float]]) -> bool:
        """Apply these LoRAs, with scales, to the next jobs; return whether weights changed.

        loras: names of `Job.load_model`'s.
        """
        ...

    def generate(self, job: Any, events: Events) -> Result:
        """Return the results of a job on all ranks. Collective.

        Raises FloatingPointError on every rank for values that are not finite.
        """
        ...


def as_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scales(job: Job) -> str:
    if job.embedded is None:
        return f"guidance {job.guidance.scale:g}"
    beside = f", classifier-free guidance {job.guidance.scale:g}" if job.guidance.on else ""
    return f"guidance {job.embedded:g} as an input{beside}"
