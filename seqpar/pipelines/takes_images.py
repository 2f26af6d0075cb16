"""Which pipelines of diffusers take pictures (`--image`), how many, and which class a folder of texts is run by then.

A pipeline that makes pictures or videos of texts alone has a sister class for its parts that begins with a picture.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image

from seqpar.loading.hub import importing_pipelines
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.order import Order

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
