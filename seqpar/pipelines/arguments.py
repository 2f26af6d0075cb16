"""The flags of an order as arguments of a diffusers pipeline's call, and the refusal of those that it does not take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seqpar.loading.known_parts import PipelineParts
from seqpar.pipelines.order import FOR_CLASSES, Order
from seqpar.pipelines.takes_images import draws_anew, images_for, sides

TEMPORAL = ("temporal_compression_ratio", "scale_factor_temporal")  # what says how many frames a latent one becomes
RATE = "frame_rate"  # what pipelines call the frames a second that their models are told
FPS = 16  # frames a second of a video if neither the user nor the pipeline names any


@dataclass(frozen=True)
class Frames:
    """The numbers of frames that a decoder makes: `usual`, and those that differ from it by a multiple of `unit`."""

    usual: int
    unit: int


def makes_videos(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a pipeline whose call has these parameters makes videos."""
    return "num_frames" in parameters


def frame_rate(order: Order, parameters: Mapping[str, inspect.Parameter]) -> float:
    """Return the frames a second of a video: the user's, the pipeline's own, or those of most models."""
    own = parameters[RATE].default if RATE in parameters else None
    return order.fps or (own if isinstance(own, (int, float)) else FPS)


def check_flags(order: Order, name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for flags that no pipeline takes this way, and for a pipeline that needs more than a prompt."""
    order.refuse(f"expected none: {name} takes texts", classes=order.classes)
    order.refuse(FOR_CLASSES, respacing=order.respacing)
    order.refuse("expected none: its files say the number", heads=order.heads)
    order.refuse("expected none: diffusers' loop has none", eta=order.eta, guidance_channels=order.guidance_channels)
    if "num_frames" not in parameters:
        order.refuse(f"expected none: {name} makes no videos", frames=order.frames, fps=order.fps)
    if "enable_temporal_reasoning" in parameters:
        order.refuse(f"expected none: {name} makes five frames, of which the last is its result", frames=order.frames)
    if "strength" in parameters and not draws_anew(parameters):
        order.refuse(f"expected none: that of {name} says how firmly a picture is kept", strength=order.strength)
    if not order.prompts:
        raise ValueError(f"got --model {order.model} without --prompt, expected one: {name} takes texts")
    known, plain = ("self", "prompt", "image"), inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind is plain]
    needed = [key for key in needed if key not in known]
    if "prompt" not in parameters or needed:
        takes = ", ".join(needed) or "no prompt"
        raise ValueError(
            f"got a {name}, which takes {takes}, expected one that needs nothing but a prompt and a picture"
        )


def arguments_of(order: Order, name: str, parameters: Mapping[str, Any], embeds: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the flags name.

    parameters: those of the call. embeds: whether the transformer takes the guidance scale as an input.
    """
    prompts = order.pictures
    arguments: dict[str, Any] = {"prompt": prompts, "num_inference_steps": order.steps, **sides(order, parameters)}
    flags: dict[str, tuple[str, Any]] = {
        "negative_prompt": ("negative_prompt", None if order.negative is None else [order.negative] * len(prompts)),
        "guidance_scale": ("guidance", order.guidance),
        "true_cfg_scale": ("true_guidance", order.true_guidance),
        "num_frames": ("frames", order.frames),
        "strength": ("strength", order.strength),
        "height": ("size", None if order.size is None else order.size[0]),
        "width": ("size", None if order.size is None else order.size[1]),
    }
    for argument, (flag, value) in flags.items():
        if argument not in parameters:
            order.refuse(f"expected none: {name} takes no {argument}", **{flag: value})
        elif value is not None:
            arguments[argument] = value
    if order.images:
        arguments["image"] = images_for(order, name, parameters)
    if order.fps is not None and RATE in parameters:
        arguments[RATE] = order.fps
    if "true_cfg_scale" in parameters:
        arguments |= _distilled(order, name, embeds, len(prompts))
    if "output_type" in parameters:  # arrays show NaN, which pictures hide as black
        arguments["output_type"] = "np"
    return arguments


def _distilled(order: Order, name: str, embeds: bool, count: int) -> dict[str, Any]:
    """Return further arguments of a pipeline with both guidances; ValueError for a flag that would have no effect."""
    if not embeds:
        without = f"expected --true-guidance: the transformer of this {name} takes no scale as an input"
        order.refuse(without, guidance=order.guidance)
    if (order.true_guidance or 1.0) <= 1:
        order.refuse(
            "expected --true-guidance over 1, too: without it there is one branch", negative_prompt=order.negative
        )
        return {}
    return {} if order.negative is not None else {"negative_prompt": [""] * count}


def frames_of(parameters: Mapping[str, inspect.Parameter], parts: PipelineParts) -> Frames | None:
    """Return the numbers of frames that a pipeline's decoder makes; None for pictures, and where no file tells.

    A decoder makes some frames of each latent one, or of each but the first, as the pipeline's default number tells.
    """
    factor = next((each for each in (_fact(parts.vae, field) for field in TEMPORAL) if each), None)
    usual = parts.config.get("sample_frames")
    if "num_frames" in parameters and parameters["num_frames"].default is not None:
        usual = parameters["num_frames"].default
    if not (makes_videos(parameters) and isinstance(usual, int)):
        return None
    return Frames(usual, factor if isinstance(factor, int) else 1)


def check_frames(order: Order, name: str, frames: Frames | None) -> None:
    """Raise ValueError for a number of frames that the decoder does not make; the pipeline would make another one."""
    if order.frames is None or frames is None:
        return
    factor = frames.unit
    over, rest = (order.frames - frames.usual) % factor, frames.usual % factor
    if over:
        below, above = order.frames - over, order.frames - over + factor
        near = f"{below} or {above}" if below > 0 else str(above)
        counted = f"{rest} more than a multiple of {factor}" if rest else f"a multiple of {factor}"
        why = f"the decoder of this {name} makes {factor} frames of a latent one"
        raise ValueError(f"got --frames {order.frames}, expected {counted}, as {near}: {why}")


def _fact(vae: Any, field: str) -> Any:
    """Return what a VAE or its config says; None if it does not."""
    return None if vae is None else getattr(vae.config, field, None) or getattr(vae, field, None)
