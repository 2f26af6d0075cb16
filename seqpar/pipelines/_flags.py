"""The flags of an order as arguments of a diffusers pipeline's call, and the refusal of those that it does not take."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from seqpar.pipelines._family import FOR_CLASSES, Order


def makes_videos(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a pipeline whose call has these parameters makes videos."""
    return "num_frames" in parameters


def check_flags(order: Order, name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for flags that no pipeline takes this way, and for a pipeline that needs more than a prompt."""
    order.refuse(f"expected none: {name} takes texts", classes=order.classes)
    order.refuse(FOR_CLASSES, respacing=order.respacing)
    order.refuse("expected none: its files say the number", heads=order.heads)
    order.refuse("expected none: diffusers' loop has none", eta=order.eta, guidance_channels=order.guidance_channels)
    if "num_frames" not in parameters:
        order.refuse(f"expected none: {name} makes no videos", frames=order.frames, fps=order.fps)
    if not order.prompts:
        raise ValueError(f"got --model {order.model} without --prompt, expected one: {name} takes texts")
    known, plain = ("self", "prompt"), inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind is plain]
    needed = [key for key in needed if key not in known]
    if "prompt" not in parameters or needed:
        takes = ", ".join(needed) or "no prompt"
        raise ValueError(f"got a {name}, which takes {takes}, expected one that needs nothing but a prompt")


def arguments_of(order: Order, name: str, parameters: Mapping[str, Any], embeds: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the flags name.

    parameters: those of the call. embeds: whether the transformer takes the guidance scale as an input.
    """
    prompts = order.pictures
    arguments: dict[str, Any] = {"prompt": prompts, "num_inference_steps": order.steps}
    flags: dict[str, tuple[str, Any]] = {
        "negative_prompt": ("negative_prompt", None if order.negative is None else [order.negative] * len(prompts)),
        "guidance_scale": ("guidance", order.guidance),
        "true_cfg_scale": ("true_guidance", order.true_guidance),
        "num_frames": ("frames", order.frames),
        "height": ("size", None if order.size is None else order.size[0]),
        "width": ("size", None if order.size is None else order.size[1]),
    }
    for argument, (flag, value) in flags.items():
        if argument not in parameters:
            order.refuse(f"expected none: {name} takes no {argument}", **{flag: value})
        elif value is not None:
            arguments[argument] = value
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


def check_exporter(name: str) -> None:
    """Raise ValueError if diffusers cannot write a video here, so that a long run does not fail at its end."""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        return
    raise ValueError(
        f"got a {name}, whose videos diffusers writes by other packages; pip install imageio imageio-ffmpeg"
    )
