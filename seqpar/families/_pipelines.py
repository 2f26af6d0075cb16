"""What a family's diffusers pipelines take, where the signatures of their calls do not say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pipelines:
    """Facts about pipeline classes. A name in the first three stands for all classes whose names begin with it.

    several_images: take several images for one result. one_result: take one prompt per call with an image.
    distilled: ignore a guidance scale if this key of model_index.json is true.
    image_class: a class for prompts -> a key of model_index.json and, where it is true, the key of the class for images
    in diffusers' table of image-to-video pipelines. Where it is false, no class takes an image.
    """

    several_images: tuple[str, ...] = ()
    one_result: tuple[str, ...] = ()
    distilled: Mapping[str, str] = field(default_factory=dict)
    image_class: Mapping[str, tuple[str, str]] = field(default_factory=dict)
