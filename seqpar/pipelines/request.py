"""`GenerationRequest`: a request, before it is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seqpar.loading.lora import Lora
from seqpar.pipelines.image_files import Picture
from seqpar.types.guidance import Guidance

FOR_CLASSES = "only models of classes take it"
NO_VIDEOS = "this model generates images, no videos"
NO_IMAGES = "this model takes no input image"
NO_LORA = "LoRAs need the folder of a diffusers pipeline for prompts"


@dataclass(frozen=True)
class GenerationRequest:
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
    loras: tuple[Lora, ...] = ()
    images: tuple[Picture, ...] = ()
    strength: float | None = None

    @property
    def pictures(self) -> list[str]:
        """Return the prompt of each picture."""
        return [text for text in self.prompts for _ in range(self.repeat)]

    def refuse(self, reason: str, **flags: object) -> None:
        """Raise ValueError for the first of these flags (by their names) that is given; reason: a clause."""
        for name, value in flags.items():
            if value is not None and value != ():
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"--{name.replace('_', '-')} {shown} with --model {self.model}: {reason}")

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
