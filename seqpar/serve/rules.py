"""What a model takes: one function, by the data of `ServedModel`, decides in the API server and on the ranks.

The API server asks it before a request is queued; so a wrong one is refused at once, however long the queue is. No
torch import.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from math import prod

from seqpar.serve.messages import CONTROL, IMAGE, MASK, ImageRequest, ServedModel, Takes
from seqpar.types.names import class_number

FEW = 5  # names that a message suggests
SHOWN = 80  # characters of a client's text that a message quotes
MOST_SIDE = 8192  # pixels; a message holds an image of this width and height
SLOW_S = 60.0  # a step that is predicted to take less is never refused: predictions are no measurements
FLOW = "FlowMatchEulerDiscreteScheduler"  # steps sigmas of requests
OF_STEPS = (
    *("size", "guidance", "true_guidance", "negative_prompt", "scheduler", "loras", "strength", "preset", "sigmas"),
    *("mask", "control", "controlnet", "control_scale"),
)
OPTIONAL = ("negative_prompt", "guidance", "true_guidance", "strength", "fps")  # fields that not all models take


@dataclass(frozen=True)
class Refusal:
    """Why a model does not take a request. param: the field."""

    param: str
    text: str
    code: str = "invalid_value"


def why_not(model: ServedModel, request: ImageRequest) -> Refusal | None:
    """Why a model does not take a request, as far as is known without its files; None if it does."""
    rules = (_latents, _inputs, _fields, _class, _loras, _sampling, _sigmas, _size, _frames, _load)
    rules = rules[:1] if _decodes(request) else rules
    return next((refusal for rule in rules if (refusal := rule(model, request)) is not None), None)


def _decodes(request: ImageRequest) -> bool:
    return request.steps == 0 and (request.latents is not None or bool(request.images))


def _latents(model: ServedModel, request: ImageRequest) -> Refusal | None:
    given, returned, sent = request.latents, request.returns == "latents", request.images
    if _decodes(request) and (field := next((x for x in OF_STEPS if getattr(request, x) not in (None, ())), None)):
        param = {"loras": "lora", "control": "control_image"}.get(field, field)
        return Refusal(param, f"{param} has no effect on latents that are only decoded (steps 0); leave it out")
    if model.latent_pixels is None and (given or returned or _decodes(request)):
        return Refusal("model", f"model {model.name} has no latents in requests; use images", "wrong_model")
    if _decodes(request) and (returned or (given is None and sent[0].height)):
        return Refusal("steps", "steps 0 decodes latents to an image; send latents, or more steps")
    if given is not None:
        height, width = (count * (model.latent_pixels or 1) for count in given.shape[-2:])
        if max(height, width) > MOST_SIDE or (model.limit is not None and height * width >= model.limit):
            return Refusal(
                "image", f"latents of {width}x{height} pixels are too many for model {model.name}; send fewer"
            )
        if given.shape[2:-2] not in ((), (1,)):
            return Refusal("image", f"got latents of {given.shape[2]} frames, expected those of one image")
    if given is None or _decodes(request):
        return None
    if request.size is not None:
        return Refusal("size", "latents have a size; leave size out")
    if "strength" in model.takes.get(IMAGE, Takes({"strength": ""})).refused:
        return Refusal("image", f"model {model.name} starts from no latents; send an image, or none")
    return None


def _inputs(model: ServedModel, request: ImageRequest) -> Refusal | None:
    given, name = request.start, request.controlnet
    if name is not None and name not in model.controlnets:
        advice = f"use {' or '.join(model.controlnets)}" if model.controlnets else f"{model.name} has none"
        return Refusal("controlnet", f"controlnet {name[:SHOWN]!r} is unknown; {advice}")
    if (name is None) != (request.control is None):
        return Refusal("control_image", "controlnet and control_image need each other; send both")
    if name is None and request.control_scale is not None:
        return Refusal("control_scale", "control_scale has no effect without a controlnet; add it, or leave it out")
    if given not in model.takes and name is not None:
        start = given.removesuffix(f"+{CONTROL}").replace("+", " and ")
        return Refusal("controlnet", f"model {model.name} takes no controlnet with {start}")
    if given not in model.takes:
        if request.mask is not None:
            needs = "requires an image with a mask" if f"{IMAGE}+{MASK}" in model.takes else "takes no mask"
            return Refusal(MASK, f"model {model.name} {needs}")
        if request.images and model.edits:
            return Refusal(MASK, f"model {model.name} requires a mask")
        return Refusal(IMAGE, f"model {model.name} {'takes no images' if request.images else 'requires an image'}")
    if len(request.images) > 1 and not model.takes[given].several:
        return Refusal(IMAGE, f"model {model.name} takes one image, got {len(request.images)}; send one")
    return None


def _fields(model: ServedModel, request: ImageRequest) -> Refusal | None:
    takes = model.takes[request.start]
    given = [name for name in OPTIONAL if getattr(request, name) is not None]
    for name in given:
        if name in takes.refused:
            reason = f": {takes.refused[name]}" if takes.refused[name] else ""
            return Refusal(name, f"model {model.name} takes no {name}{reason}; leave it out")
        if (other := takes.beside.get(name)) is not None and (getattr(request, other) or 0.0) <= 1:
            return Refusal(name, f"{name} has no effect on model {model.name} without {other} over 1; add it")
    return None


def _class(model: ServedModel, request: ImageRequest) -> Refusal | None:
    if not model.labels:
        return None
    try:
        class_number(request.prompt, model.labels)
    except ValueError as error:
        text = str(error).replace(repr(request.prompt), repr(request.prompt[:SHOWN]))
        return Refusal("prompt", text)
    return None


def _loras(model: ServedModel, request: ImageRequest) -> Refusal | None:
    names = [name for name, _ in request.loras]
    if {*names} <= {*model.loras} and len({*names}) == len(names):
        return None
    available = f"use some of {', '.join(model.loras)}, each once" if model.loras else f"{model.name} has none"
    return Refusal("lora", f"unknown or repeated lora; {available}", "unknown_lora")


def _sampling(model: ServedModel, request: ImageRequest) -> Refusal | None:
    name, preset, steps = request.scheduler, request.preset, request.steps
    if preset is not None and preset not in model.presets:
        advice = f"use {' or '.join(model.presets)}" if model.presets else f"{model.name} has none"
        return Refusal("preset", f"preset {preset[:SHOWN]!r} is unknown; {advice}")
    if preset is not None and (steps is not None or name is not None):
        return Refusal("preset", "preset sets steps and scheduler; leave it or them out")
    if name is not None and name not in model.schedulers:
        fitting = _like(name, model.schedulers) or tuple(model.schedulers)
        advice = f"use {', '.join(fitting[:FEW])}, or leave" if fitting else "leave"
        return Refusal("scheduler", f"scheduler {name!r} does not fit model {model.name}; {advice} it out")
    least, most = model.own if name is None else model.schedulers[name]
    if steps is not None and not least <= steps <= most:
        of = f"model {model.name}" if name is None else name
        return Refusal("steps", f"got steps {steps}, expected {least} to {most} with {of}")
    return None


def _sigmas(model: ServedModel, request: ImageRequest) -> Refusal | None:
    if not request.sigmas:
        return None
    if FLOW not in model.schedulers:
        return Refusal(
            "sigmas", f"model {model.name} takes no sigmas, which are those of flow matching; leave them out"
        )
    if not (request.steps is request.scheduler is request.preset is None):
        return Refusal("sigmas", "sigmas set steps and scheduler; leave them, or steps, scheduler and preset out")
    if any(after >= before for before, after in pairwise(request.sigmas)):
        return Refusal("sigmas", "sigmas must fall from step to step; sort them")
    return None


def _size(model: ServedModel, request: ImageRequest) -> Refusal | None:
    size, unit = request.size, model.unit
    if size is None or not any(side % unit for side in size):
        return None
    below = [max(1, side // unit) * unit for side in size]
    above = [min(-(-side // unit), MOST_SIDE // unit) * unit for side in size]
    nearest = dict.fromkeys(f"{width}x{height}" for height, width in (below, above))
    text = f"size {size[1]}x{size[0]} is not divisible by {unit}; nearest: {', '.join(nearest)}"
    return Refusal("size", text)


def _frames(model: ServedModel, request: ImageRequest) -> Refusal | None:
    frames, facts = request.frames, model.video
    if frames is None:
        return None
    if facts is None:
        return Refusal("frames", f"model {model.name} generates images, no videos")
    if frames < facts.least or (facts.most is not None and frames > facts.most):
        return Refusal("frames", f"got frames {frames}, expected {facts.least} to {facts.most} of model {model.name}")
    if frames % facts.unit == facts.frames % facts.unit:
        return None
    text = f"got frames {frames}, expected {facts.frames % facts.unit} more than a multiple of {facts.unit}"
    return Refusal("frames", f"{text}, such as {nearest_frames(frames, facts.frames, facts.unit)}")


def _load(model: ServedModel, request: ImageRequest) -> Refusal | None:
    """By memory, and by the time of one step: runs stop between steps, so that it must end before the deadline."""
    pixels, param = pixels_of(model, request), "frames" if request.size is None and model.video else "size"
    if not model.loads or not pixels:
        return None
    smaller = "request a smaller size" if model.video is None else "request a smaller size or fewer frames"
    if model.limit is not None and _in_memory(model, request) >= model.limit:
        return Refusal(param, f"the request needs more memory than the server has for model {model.name}; {smaller}")
    step_s, limit_s = predicted_s(model.loads, pixels) * step_ratio(model, request), request.deadline_s
    if limit_s is not None and step_s > max(limit_s, SLOW_S):
        text = f"one step is predicted to take {step_s:.0f} s, but {limit_s:.0f} s remain before the deadline"
        return Refusal(param, f"{text}; {smaller}")
    return None


def fills(model: ServedModel, request: ImageRequest) -> bool:
    """Whether memory suffices for a request only while no other model is loaded."""
    return model.beside is not None and _in_memory(model, request) >= model.beside


def _in_memory(model: ServedModel, request: ImageRequest) -> float:
    """The pixels of a request; a second branch of guidance needs memory as it needs time: that of so many more."""
    return pixels_of(model, request) * max(1.0, step_ratio(model, request))


def pixels_of(model: ServedModel, request: ImageRequest) -> int:
    """The pixels of all frames of a request; 0 where the pipeline chooses a size."""
    frames = 1 if model.video is None else request.frames or model.video.frames
    if (latents := request.latents) is not None:
        return prod(latents.shape[-2:]) * (model.latent_pixels or 1) ** 2
    return prod(request.size or model.size) * frames


def step_ratio(model: ServedModel, request: ImageRequest) -> float:
    """The predicted seconds of a step with the guidance of a request, in those of one with the model's own."""
    scale, ratios = request.guidance, model.ratios
    if (request.true_guidance or 0.0) > 1:
        return ratios.get("true guidance", 1.0)
    if scale is None:
        return ratios.get(request.preset or "", 1.0)
    return ratios.get("guidance on" if scale > 1 else "guidance off", 1.0)


def predicted_s(loads: tuple[tuple[int, float], ...], pixels: int) -> float:
    """Seconds of a step for so many pixels, on the line between the loads next to it."""
    index = bisect_left(loads, pixels, key=lambda load: load[0])
    if index in (0, len(loads)):
        return loads[min(index, len(loads) - 1)][1]
    (few, short_s), (many, long_s) = loads[index - 1], loads[index]
    return short_s + (long_s - short_s) * (pixels - few) / (many - few)


def nearest_frames(frames: int, usual: int, unit: int) -> int:
    """The number of frames closest to this one that a model makes. usual, unit: as in `VideoFacts`."""
    rest = usual % unit
    near = round((frames - rest) / unit) * unit + rest
    return near if near > 0 else near + unit


def _like(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that are most like this one, without the word that all schedulers end in."""
    stems = {other.lower().removesuffix("scheduler"): other for other in known}
    alike = get_close_matches(name.lower().removesuffix("scheduler"), stems, n=FEW, cutoff=0.5)
    return tuple(stems[stem] for stem in alike)
