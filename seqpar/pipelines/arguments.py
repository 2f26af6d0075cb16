"""The flags of an order as arguments of a diffusers pipeline's call, and the refusal of those that it does not take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from seqpar.loading.folder import PipelineParts
from seqpar.loading.names import importing_pipelines
from seqpar.pipelines.images import Picture
from seqpar.pipelines.order import FOR_CLASSES, Order

# in the names of pipelines that make nothing without a picture, though their calls have a default for it
NEEDS = re.compile("Img2Img|Edit|ImageToVideo|Image2Video|I2V|I2I|Refiner")
# how the names of pipelines begin that take several pictures for one result
SEVERAL = ("Flux2", "QwenImageEditPlus", "QwenImage21", "ZImageOmni", "GlmImage")
SIDES = ("height", "width")  # arguments of a pipeline's call
SLIGHT = 0.02  # a change of the ratio of a picture's sides that cannot be seen
# how the names of those begin that take one prompt a call with a picture
ONE_RESULT = ("QwenImageEdit", "CogVideoXImageToVideo", "HunyuanVideoImageToVideo", "HunyuanVideo15ImageToVideo")
AREA = "max_area"  # the argument of pipelines (FLUX.1 Kontext) that keep the shape of a size, but not its pixels
OTHERS = {
    "mask_image": "a mask, which no flag names",
    "control_image": "a picture that controls another, which no flag names",
    "layers": "a number of layers, which no file here holds",
}


def taking_images(order: Order, kind: Any, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that runs an order: with pictures, one that takes them with the same parts.

    kind: that of the folder. index: its model_index.json. Raises ValueError if no class takes them, or needs more.
    """
    parameters = inspect.signature(kind.__call__).parameters
    for name, what in OTHERS.items():
        if name in parameters:
            raise ValueError(f"got a {kind.__name__}, which takes {what}; load it by seqpar.load, and call it yourself")
    if not order.images:
        order.refuse("expected --image, too: it says how far a picture is changed", strength=order.strength)
        if needs_picture(kind):
            raise ValueError(f"got --model {order.model} without --image, expected one: {kind.__name__} begins with it")
        return kind
    sister = class_of_pictures(kind, index)
    if sister is None:
        got = f"got --image {' '.join(map(str, order.images))} with --model {order.model}"
        expected = f"expected none: {kind.__name__} takes no picture"
        raise ValueError(f"{got}, {expected}; name a model that edits pictures, or makes videos of them")
    _check_count(order, sister.__name__)
    return sister


def class_of_pictures(kind: Any, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that begins with a picture and has the parts of a folder of `kind`, or None."""
    return kind if "image" in inspect.signature(kind.__call__).parameters else _sister(kind, index)


def needs_picture(kind: Any) -> bool:
    """Return whether a pipeline makes nothing without a picture."""
    image = inspect.signature(kind.__call__).parameters.get("image")
    return image is not None and bool(NEEDS.search(kind.__name__) or image.default is image.empty)


def draws_anew(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a pipeline draws a picture anew from some step on, as `strength` among its parameters says.

    In one of videos (LTX) it says how firmly a picture is kept.
    """
    return "strength" in parameters and "num_frames" not in parameters


def sides(order: Order, parameters: Mapping[str, inspect.Parameter]) -> dict[str, int]:
    """Return what makes a pipeline with a size of its own keep that of the order, or the shape of its picture."""
    if AREA not in parameters:
        return {}
    if order.size is not None:
        return {AREA: order.size[0] * order.size[1]}
    return dict(zip(SIDES, order.images[0].size, strict=True)) if order.images else {}


def images_for(order: Order, name: str, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """Return the pictures of an order as the pipeline of this name takes them: one, or a list.

    parameters: those of its call. A picture that is drawn anew has the size of the result, if that is named, as
    pipelines make it; one of them (Z-Image) does not.
    """
    images = [picture.image for picture in order.images]
    if order.size is not None and draws_anew(parameters):
        height, width = order.size
        images = [image.resize((width, height), Image.Resampling.LANCZOS) for image in images]
    return images if name.startswith(SEVERAL) else images[0]


def shown_image(picture: Picture, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the summary's text about a picture: its size, and whether the pipeline stretches it to another shape.

    arguments, parameters: those of the pipeline's call.
    """
    height, width = picture.size
    text = f"{picture}, {height}x{width} pixels"
    own = (parameters[side].default if side in parameters else None for side in SIDES)
    rows, columns = (arguments.get(side, default) for side, default in zip(SIDES, own, strict=True))
    if not (draws_anew(parameters) or "num_frames" in parameters):  # others keep its shape
        return text
    if not (rows and columns):
        return f"{text}, stretched if the pipeline's own size has another shape; --size names one"
    stretched = abs(rows / columns * width / height - 1) > SLIGHT
    return f"{text}, stretched to {rows}x{columns}; --size names another size" if stretched else text


def _sister(kind: Any, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that begins with a picture, and has the parts of one that does not; or None."""
    with importing_pipelines():
        from diffusers.pipelines import auto_pipeline as theirs

    videos: Any = theirs.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING
    if kind.__name__ == "WanPipeline":  # of whose models only the one with a timestep a token (TI2V) takes a picture
        return videos["wan-i2v"] if index.get("expand_timesteps") else None
    pictures: Any = theirs.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING
    pairs = ((theirs.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, pictures), (theirs.AUTO_TEXT2VIDEO_PIPELINES_MAPPING, videos))
    sisters = (images.get(name) for texts, images in pairs for name, known in texts.items() if known is kind)
    return next(filter(None, sisters), None)


def _check_count(order: Order, name: str) -> None:
    """Raise ValueError for more pictures, or more results, than a pipeline takes."""
    if len(order.images) > 1 and not name.startswith(SEVERAL):
        order.refuse(f"expected one picture, which serves all prompts: {name} takes no more", image=order.images)
    if name.startswith(ONE_RESULT) and len(order.pictures) > 1:
        got = f"got {len(order.pictures)} pictures to make with --image"
        raise ValueError(f"{got}, expected one: {name} takes one prompt; run it again for others")


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
