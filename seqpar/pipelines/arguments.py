"""Turns a request into arguments of a diffusers pipeline's call; refuses what the pipeline or its parts do not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import diffusers
from PIL import Image

from seqpar.families import Preset, _find
from seqpar.families._modular import is_modular, parameters_of, takes_image
from seqpar.loading.checkpoint import Fitted
from seqpar.loading.folder import PipelineParts
from seqpar.loading.names import importing_pipelines
from seqpar.loading.pipeline import SHARING
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.protocol import FOR_CLASSES, Frames, GenerationRequest
from seqpar.transformer.step_cache import check_blocks_for, step_cache
from seqpar.types.guidance import Guidance

SIDES = ("height", "width")  # arguments of a pipeline's call
SLIGHT = 0.02  # a change of the ratio of a picture's sides that cannot be seen
AREA = "max_area"  # the argument of pipelines that keep the shape of a size, but not its pixels
MASK, CONTROL = "mask_image", "control_image"  # arguments of a pipeline's call
BY_HAND = "load it by seqpar.load, and call it yourself"
OTHERS = {  # arguments that no flag gives, and what to do
    CONTROL: f"a control image, which no flag gives to this class; {BY_HAND}, or use the folder of a pipeline without "
    "one, and --controlnet",
    "layers": f"a number of layers, which no file here holds; {BY_HAND}",
}


def taking_images(request: GenerationRequest, caller: Any, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that runs a request: with images, one that takes them with the same parts.

    caller: the class of the folder, or its modular pipeline. index: its model_index.json. Raises ValueError if no class
    takes them, or needs more.
    """
    kind = caller if isinstance(caller, type) else type(caller)
    parameters = parameters_of(caller, bool(request.images))
    if _find.takes_one_prompt(kind.__name__) and len(request.pictures) > 1:
        raise ValueError(f"{len(request.pictures)} results, but {kind.__name__} takes one prompt; run it once for each")
    for name, what in OTHERS.items():
        if name in parameters and not request.planned:
            raise ValueError(f"got a {kind.__name__}, which takes {what}")
    if request.mask is not None or request.control is not None:
        return _with_inputs(request, kind)
    if MASK in parameters and not request.planned:
        raise ValueError(f"--model {request.model} needs --image and --mask: {kind.__name__} repaints part of an image")
    if not request.images:
        request.refuse("it changes an input image; add --image", strength=request.strength)
        if _find.needs_picture(caller):
            raise ValueError(f"--model {request.model} needs --image: {kind.__name__} starts from an input image")
        return kind
    taking = class_of_pictures(caller, index)
    if taking is None:
        other = "use a model that edits images or generates videos from them"
        return request.refuse(f"{kind.__name__} takes no input image; {other}", image=request.images)  # raises
    name = taking.__name__
    if len(request.images) > 1 and not _find.takes_several_images(name):
        request.refuse(f"{name} takes one input image, for all prompts", image=request.images)
    if _find.makes_one_result(name) and len(request.pictures) > 1:
        results = f"{len(request.pictures)} results with --image"
        raise ValueError(f"{results}, but {name} takes one prompt; run it once for each")
    return taking


def _with_inputs(request: GenerationRequest, kind: Any) -> Any:
    """Return the class of diffusers that takes a request's mask, or its image for a ControlNet, with the same parts."""
    repaints, controlled = request.mask is not None, request.control is not None
    if len(request.images) > 1:
        raise ValueError(f"got {len(request.images)} images with a mask or a ControlNet; send a single image")
    if repaints and not request.images:
        raise ValueError("got a mask without an image, expected the image that it repaints")
    needed = {"image": bool(request.images), MASK: repaints, CONTROL: controlled}
    middle = "ControlNet" * controlled + ("Inpaint" if repaints else "Img2Img" * bool(request.images))
    with importing_pipelines():
        other = getattr(diffusers, f"{kind.__name__.removesuffix('Pipeline')}{middle}Pipeline", None)
    for found in () if is_modular(kind) else (kind, other):
        taken = set[str]() if found is None else parameters_of(found).keys()
        if {name for name, wanted in needed.items() if wanted} <= taken and (CONTROL in taken) == controlled:
            return found
    what = " and ".join(name for name, wanted in needed.items() if wanted)
    raise ValueError(f"no pipeline like {kind.__name__} takes {what}")


# of transformers and ControlNets, whose tokens, texts and residuals have these sizes
WIDTHS = ("num_attention_heads", "attention_head_dim", "joint_attention_dim", "pooled_projection_dim", "dim", "n_heads")


def controlled(kind: Any) -> Any:
    """Return the class of diffusers that runs a pipeline's parts with a ControlNet; ValueError if there is none."""
    with importing_pipelines():
        found = getattr(diffusers, f"{kind.__name__.removesuffix('Pipeline')}ControlNetPipeline", None)
    if found is None:
        raise ValueError(f"no pipeline like {kind.__name__} takes a ControlNet")
    return found


def check_control(kind: Any, net: Fitted | None, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a ControlNet of another pipeline or transformer. kind: the pipeline's class that runs it."""
    if net is None:
        raise ValueError("got an unknown ControlNet")
    if net.kind.__name__ == SHARING:
        raise ValueError(f"{net.kind.__name__} shares layers with the transformer; load its pipeline by seqpar.load")
    expected = str(inspect.signature(kind.__init__).parameters["controlnet"].annotation)
    if net.kind.__name__ not in expected:
        raise ValueError(f"{kind.__name__} takes no {net.kind.__name__}")
    for name in WIDTHS:
        got, wanted = net.model.config.get(name), config.get(name)
        if None not in (got, wanted) and got != wanted:
            raise ValueError(f"got a {net.kind.__name__} with {name}={got}, expected the transformer's {wanted}")


def class_of_pictures(caller: Any, index: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that begins with an image and has the parts of a folder of this one, or None."""
    kind = caller if isinstance(caller, type) else type(caller)
    if takes_image(caller) or is_modular(caller):
        return kind if takes_image(caller) else None
    with importing_pipelines():
        from diffusers.pipelines import auto_pipeline as theirs

    videos: Any = theirs.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING
    if (sister := _find.image_class(kind.__name__)) is not None:
        needed, name = sister
        return videos[name] if index.get(needed) else None
    pictures: Any = theirs.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING
    pairs = ((theirs.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, pictures), (theirs.AUTO_TEXT2VIDEO_PIPELINES_MAPPING, videos))
    sisters = (images.get(name) for texts, images in pairs for name, known in texts.items() if known is kind)
    return next(filter(None, sisters), None)


def draws_anew(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a pipeline runs image-to-image from some step on, by its parameter `strength`.

    In a video pipeline `strength` means how closely the image is kept.
    """
    return "strength" in parameters and "num_frames" not in parameters


def sides(request: GenerationRequest, parameters: Mapping[str, inspect.Parameter]) -> dict[str, int]:
    """Return arguments with which a pipeline that chooses sizes keeps the request's, or its image's shape."""
    if AREA not in parameters:
        return {}
    if request.size is not None:
        return {AREA: request.size[0] * request.size[1]}
    return dict(zip(SIDES, request.images[0].size, strict=True)) if request.images else {}


def shown_image(picture: Picture, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the summary's text about an image: its size, and whether the pipeline stretches it to another shape."""
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


# what says how many frames a latent one becomes, or a clip of several (MiniMax-H3)
PREPARE = "prepare_latents"  # a method of pipelines
TEMPORAL = ("clip_length", "temporal_compression_ratio", "scale_factor_temporal")
RATE = "frame_rate"  # argument of pipelines whose models take the frames per second
FPS = 16  # frames a second of a video if neither the user nor the pipeline names any


def makes_videos(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return "num_frames" in parameters


def frame_rate(request: GenerationRequest, parameters: Mapping[str, inspect.Parameter], caller: Any = None) -> float:
    """Return the frames a second of a video: the user's, the pipeline's own, or those of most models."""
    own = parameters[RATE].default if RATE in parameters else own_rate(caller)
    return request.fps or (own if isinstance(own, (int, float)) else FPS)


def own_rate(caller: Any) -> float | None:
    """Return the frames a second of a pipeline that makes no others, as MiniMax-H3's; or None."""
    return getattr(caller, "fps", None) if is_modular(caller) else None


def length_of(caller: Any) -> tuple[int, int] | None:
    """Return the least and most frames of a modular pipeline that says how long its videos are, or None."""
    rate = own_rate(caller)
    if rate is None or not hasattr(caller, "min_duration"):
        return None
    return int(caller.min_duration * rate), int(caller.max_duration * rate)


def check_limits(request: GenerationRequest, caller: Any) -> None:
    """Raise ValueError for a size or a length that a modular pipeline says it does not make."""
    name, rate = type(caller).__name__, own_rate(caller)
    if rate is not None:
        request.refuse(f"{name} makes {rate:g} frames per second, with sound of their length", fps=request.fps)
    unit = getattr(caller, "canvas_multiple", 1)
    if request.size is not None and any(side % unit for side in request.size):
        height, width = request.size
        raise ValueError(f"size {height}x{width} is not divisible by {unit}, as {name} needs")
    if request.frames is not None and (length := length_of(caller)) is not None:
        least, most = length
        if not least <= request.frames <= most:
            raise ValueError(f"got --frames {request.frames}, expected {least} to {most}: {name} makes no others")


def check_flags(request: GenerationRequest, name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ValueError for flags that no pipeline takes this way, and for a pipeline that needs more than a prompt."""
    request.refuse(f"{name} takes prompts", classes=request.classes)
    request.refuse(FOR_CLASSES, respacing=request.respacing)
    request.refuse("diffusers' loop has no such setting", eta=request.eta, guidance_channels=request.guidance_channels)
    if "num_frames" not in parameters:
        request.refuse(f"{name} generates images, no videos", frames=request.frames, fps=request.fps)
    if "enable_temporal_reasoning" in parameters:
        request.refuse(f"{name} generates five frames and returns the last", frames=request.frames)
    if "strength" in parameters and not draws_anew(parameters):
        request.refuse(
            f"for {name} it means how closely the image is kept; use seqpar.load for it", strength=request.strength
        )
    if request.planned:
        return
    if not request.prompts:
        raise ValueError(f"--model {request.model} needs --prompt: {name} takes prompts")
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    others = ", ".join(sorted(required - {"self", "prompt", "image", MASK, CONTROL}))
    if "prompt" not in parameters or others:
        raise ValueError(
            f"{name} takes {others or 'no prompt'}; seqpar passes prompts and images alone: use seqpar.load and call it"
        )


def arguments_of(request: GenerationRequest, name: str, parameters: Mapping[str, Any], embeds: bool) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that the flags name.

    embeds: whether the transformer takes the guidance scale as an input.
    """
    prompts = request.pictures
    several = not _find.takes_one_prompt(name)
    negative = [request.negative] * len(prompts) if several and request.negative is not None else request.negative
    prompt = prompts if several else prompts[0]
    arguments: dict[str, Any] = {"prompt": prompt, "num_inference_steps": request.steps, **sides(request, parameters)}
    flags: dict[str, tuple[str, Any]] = {
        "negative_prompt": ("negative_prompt", negative),
        "guidance_scale": ("guidance", request.guidance),
        "true_cfg_scale": ("true_guidance", request.true_guidance),
        "num_frames": ("frames", request.frames),
        "strength": ("strength", request.strength),
        "height": ("size", None if request.size is None else request.size[0]),
        "width": ("size", None if request.size is None else request.size[1]),
    }
    for argument, (flag, value) in flags.items():
        if argument not in parameters:
            request.refuse(f"{name} takes no {argument}", **{flag: value})
        elif value is not None:
            arguments[argument] = value
    if request.images:
        images = [picture.image for picture in request.images]
        if request.size is not None and draws_anew(parameters):  # as pipelines do, but Z-Image
            height, width = request.size
            images = [image.resize((width, height), Image.Resampling.LANCZOS) for image in images]
        arguments["image"] = images if _find.takes_several_images(name) else images[0]
    if request.mask is not None:
        arguments[MASK] = request.mask.image
    if request.control is not None:
        arguments |= {CONTROL: request.control.picture.image, "controlnet_conditioning_scale": request.control.scale}
    if request.fps is not None and RATE in parameters:
        arguments[RATE] = request.fps
    if "true_cfg_scale" in parameters:
        if not embeds:
            without = f"the transformer of this {name} takes no scale as an input; use --true-guidance"
            request.refuse(without, guidance=request.guidance)
        if (request.true_guidance or 1.0) <= 1:
            without = "it has no effect without classifier-free guidance; add --true-guidance over 1"
            request.refuse(without, negative_prompt=request.negative)
        elif request.negative is None:
            arguments["negative_prompt"] = [""] * len(prompts)
    if "output_type" in parameters:  # arrays show NaN, which pictures hide as black
        arguments["output_type"] = "np"
    return arguments


def frames_of(parameters: Mapping[str, inspect.Parameter], parts: PipelineParts) -> Frames | None:
    """Return the numbers of frames that a pipeline's decoder makes; None for images, and where no file tells.

    It makes some frames of each latent one, or of each but the first, as the pipeline's default number tells.
    """
    vae = parts.vae  # of which some say it in their config, others as an attribute
    facts = () if vae is None else (getattr(x, field, None) for field in TEMPORAL for x in (vae.config, vae))
    factor = next(filter(None, facts), None)
    usual = parts.config.get("sample_frames")
    if "num_frames" in parameters and parameters["num_frames"].default is not None:
        usual = parameters["num_frames"].default
    if usual is None and hasattr(parts.kind, PREPARE):  # LTX-2 names it there alone
        default = inspect.signature(parts.kind.prepare_latents).parameters.get("num_frames")
        usual = None if default is None else default.default
    if not (makes_videos(parameters) and isinstance(usual, int)):
        return None
    return Frames(usual, factor if isinstance(factor, int) else 1)


def check_frames(request: GenerationRequest, name: str, frames: Frames | None) -> None:
    if request.frames is None or frames is None:
        return
    factor = frames.unit
    over, rest = (request.frames - frames.usual) % factor, frames.usual % factor
    if over:
        below, above = request.frames - over, request.frames - over + factor
        near = f"{below} or {above}" if below > 0 else str(above)
        counted = f"{rest} more than a multiple of {factor}" if rest else f"a multiple of {factor}"
        why = f"the decoder of {name} generates {factor} frames per latent frame"
        raise ValueError(f"got --frames {request.frames}, expected {counted}, such as {near}: {why}")


# Preset, precision, step cache and guidance -------------------------------------------------------------------------


def preset_of(request: GenerationRequest, name: str, index: Mapping[str, Any]) -> Preset | None:
    """Return the preset that a request names, or that of its own sigmas. name, index: of the pipeline's class."""
    known = _find.presets(name, index)
    if request.sigmas:
        request.refuse("the sigmas set the steps", preset=request.preset)
        return Preset("sigmas", "", len(request.sigmas), sigmas=request.sigmas)
    if request.preset not in known:
        request.refuse(_find.why_no_preset(name, known), preset=request.preset)
    return known.get(request.preset or "")


def check_guidance(
    request: GenerationRequest, preset: Preset, parameters: Mapping[str, inspect.Parameter], embeds: bool
) -> None:
    """Refuse a preset with guidance as an input of a transformer that takes none. embeds: whether it takes one."""
    if "guidance_scale" in preset.arguments and "true_cfg_scale" in parameters and not embeds:
        request.refuse("it sets guidance as an input, which this transformer does not take", preset=request.preset)


def with_preset(request: GenerationRequest, preset: Preset) -> GenerationRequest:
    """Return the request with a preset's steps, and with its scales where the request has none."""
    scale, true_scale = preset.arguments.get("guidance_scale"), preset.arguments.get("true_cfg_scale")
    what = f"the preset {preset.name} sets" if not request.sigmas else "the sigmas set"
    request.refuse(f"{what} it; leave one out", scheduler=request.scheduler)
    return replace(
        request,
        steps=preset.steps,
        guidance=scale if request.guidance is None else request.guidance,
        true_guidance=true_scale if request.true_guidance is None else request.true_guidance,
    )


def check_blocks(request: GenerationRequest, parts: PipelineParts, why_not: Callable[[Any], str | None]) -> None:
    """Refuse a precision that a transformer's blocks cannot compute in."""
    if request.precision is None:
        return
    for module in parts.transformers.values():
        if (reason := why_not(module)) is not None:
            request.refuse(reason, precision=request.precision)


def check_cache(request: GenerationRequest, parts: PipelineParts) -> None:
    """Refuse a step cache that a transformer cannot have."""
    options = step_cache(request.cache)
    try:
        check_blocks_for(options, parts.transformers.values())
    except ValueError as error:
        request.refuse(str(error), cache=request.cache)


def guidance_of(
    request: GenerationRequest, parts: PipelineParts, parameters: Mapping[str, inspect.Parameter]
) -> tuple[Guidance, float | None]:
    """Return classifier-free guidance, and the scale that the transformer takes as an input, or None."""
    scale: Any = request.guidance
    if scale is None and "guidance_scale" in parameters:
        scale = parameters["guidance_scale"].default
    if _find.is_distilled(str(parts.index["_class_name"]), parts.index):
        request.refuse("this model is distilled: it has one branch", guidance=request.guidance)
        scale = 1.0
    scale = float(scale) if isinstance(scale, (int, float)) else 1.0
    if "true_cfg_scale" in parameters:
        return Guidance(request.true_guidance or 1.0), scale if parts.config.get("guidance_embeds") else None
    if _find.is_guided(parts.transformer) or "guidance_scale" not in parameters:
        return Guidance(scale), None
    return Guidance(1.0), scale
