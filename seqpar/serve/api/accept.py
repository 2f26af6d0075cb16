"""From a request to a queued job: the model, its rules, input images, the queue."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

from fastapi import Request

from seqpar.serve.api import log
from seqpar.serve.api.codec import NO_INPUTS, InputFiles, ProcessDiedError
from seqpar.serve.api.errors import ProblemError, refused, short
from seqpar.serve.api.jobs import ServerJob
from seqpar.serve.api.requests import MOST_SIDE, CommonFields
from seqpar.serve.api.state import ApiServer
from seqpar.serve.messages import ServedModel, size_of

FEW = 5  # names that a message suggests
MOST_WAITING = 16  # requests with images that wait to be decoded, with up to 50 MB each
Purpose = Literal["images", "edits", "videos"]


async def accept(
    request: Request, server: ApiServer, key: str, body: CommonFields, purpose: Purpose, files: list[bytes], param: str
) -> ServerJob:
    """Check a request, decode its files, and queue its job, with the request's id; ProblemError if it is refused.

    param: the field of the files.
    """
    model = _model_for(server, body.model, purpose)
    longest_s = server.args.video_deadline_s if purpose == "videos" else server.args.deadline_s
    if body.deadline_s is not None and body.deadline_s > longest_s:
        text = f"got deadline_s {body.deadline_s:g}, expected at most {longest_s:g}"
        raise refused(400, "invalid_value", text, "deadline_s")
    check_fields(body, model)
    if purpose == "edits" and not files:
        raise refused(400, "missing_field", f"{param} is required; see /openapi.json", param)
    if purpose == "videos" and model.needs_picture and not files:
        raise refused(400, "invalid_value", f"model {model.name} requires a file {param}", param)
    if purpose == "videos" and len(files) > int(model.edits):
        takes = f"takes one file {param}, got {len(files)}" if model.edits else f"takes no file {param}"
        raise refused(400, "invalid_value", f"model {model.name} {takes}", param)
    inputs = await decode_inputs(server, files, param) if files else NO_INPUTS
    spec = body.spec(model, longest_s if body.deadline_s is None else body.deadline_s, inputs)
    job = server.queue.add(request.state.id, key, spec)
    prompt = body.prompt if server.args.show_prompts else "not shown"
    facts = {"model": model.name, "count": spec.count, "frames": spec.request.frames}
    log.event("accepted", job.id, key=key, **facts, prompt=prompt)
    return job


async def decode_inputs(server: ApiServer, files: list[bytes], param: str) -> InputFiles:
    """Decode a client's files; ProblemError for other files, or if too much waits. param: their field."""
    server.queue.check(0)  # before the work of decoding
    if server.codec.waiting >= MOST_WAITING:
        text = f"{MOST_WAITING} requests with images wait to be decoded; retry later"
        raise refused(429, "queue_full", text, retry_after="1")
    try:
        return await server.codec.decode(files, server.queue.check)
    except ValueError as error:
        raise refused(400, "invalid_picture", str(error), param) from error
    except ProcessDiedError as error:
        raise refused(500, "failure", str(error), param) from error
    except OSError as error:
        log.event("decoded images cannot be stored", level=40, reason=str(error))
        raise refused(500, "failure", "the server cannot store the images; retry later", param) from error


def _model_for(server: ApiServer, name: str | None, purpose: Purpose) -> ServedModel:
    """A model by its name, for None the first one that fits."""
    if server.queue.closed is not None:
        raise ProblemError(server.queue.closed)
    models = {model.name: model for model in server.facts.models}
    if name is not None and name not in models:
        raise refused(404, "model_not_found", f"model not found; use one of {', '.join(models)}", "model")
    fitting = next((model for model in models.values() if _why_not(model, purpose) is None), None)
    model = models[name] if name is not None else fitting or next(iter(models.values()))
    if (reason := _why_not(model, purpose)) is not None:
        raise refused(400, "wrong_model", f"model {model.name} {reason}", "model")
    return model


def _why_not(model: ServedModel, purpose: Purpose) -> str | None:
    if purpose == "videos":
        return None if model.video is not None else "generates images; /v1/models lists models that generate videos"
    if model.video is not None:
        return "generates videos; use /v1/videos"
    if purpose == "edits" and not model.edits:
        return "takes no images; /v1/models lists models with edits"
    return "requires an image; use /v1/images/edits" if purpose == "images" and model.needs_picture else None


def check_fields(body: CommonFields, model: ServedModel) -> None:
    """Refuse at once what the ranks would refuse when the job's turn comes, by the rules that they sent."""
    names = [model.lora(name) for name, _ in body.loras]
    if None in names or len(set(names)) < len(names):
        available = f"use some of {', '.join(model.loras)}, each once" if model.loras else f"{model.name} has none"
        raise refused(400, "unknown_lora", f"unknown or repeated lora; {available}", "lora")
    if body.scheduler is not None and model.schedulers and body.scheduler not in model.schedulers:
        fitting = _like(body.scheduler, model.schedulers) or model.schedulers
        advice = ", ".join(fitting) if len(fitting) <= FEW else "the name of a scheduler of diffusers"
        text = f"scheduler {body.scheduler!r} is unknown; use {advice}, or leave it out for the model's own"
        raise refused(400, "invalid_value", text, "scheduler")
    if body.preset is not None and body.preset not in model.presets:
        advice = f"use {' or '.join(model.presets)}" if model.presets else f"{model.name} has none"
        raise refused(400, "invalid_value", f"preset {short(body.preset)!r} is unknown; {advice}", "preset")
    labels = {body.prompt, *(part.strip() for part in body.prompt.split(","))}  # names of a class, or its number
    if model.kind == "classes" and not (body.prompt.isdecimal() or labels & {*model.labels}):
        alike = ", ".join(_like(body.prompt, model.labels)) or ("a name that /v1/models lists" if model.labels else "")
        advice = f"{alike}, or the number of a class" if alike else "the number of a class"
        text = f"class {short(body.prompt)!r} is not of model {model.name}; use {advice}"
        raise refused(400, "invalid_value", text, "prompt")
    size, unit = size_of(body.size), model.unit
    if size is not None and any(side % unit for side in size):
        below = [max(1, side // unit) * unit for side in size]
        above = [min(-(-side // unit), MOST_SIDE // unit) * unit for side in size]
        nearest = dict.fromkeys(f"{width}x{height}" for height, width in (below, above))
        text = f"size {body.size} is not divisible by {unit}; nearest: {', '.join(nearest)}"
        raise refused(400, "invalid_value", text, "size")


def _like(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that are most like this one, without the word that all schedulers end in."""
    stems = {other.lower().removesuffix("scheduler"): other for other in known}
    alike = get_close_matches(name.lower().removesuffix("scheduler"), stems, n=FEW, cutoff=0.5)
    return tuple(stems[stem] for stem in alike)
