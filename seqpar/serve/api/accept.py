"""From a request to a queued job: the model, its rules, input images, the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec
from fastapi import Request

from seqpar.serve.api import log
from seqpar.serve.api.admin import not_loaded
from seqpar.serve.api.codec import InputFiles, ProcessDiedError
from seqpar.serve.api.errors import ProblemError, refused
from seqpar.serve.api.jobs import JobSpec, ServerJob
from seqpar.serve.api.keys import PRIORITIES
from seqpar.serve.api.requests import CommonFields
from seqpar.serve.api.state import ApiServer
from seqpar.serve.messages import ServedModel
from seqpar.serve.rules import why_not

MOST_WAITING = 16  # requests with images that wait to be decoded, with up to 50 MB each
Purpose = Literal["images", "edits", "latents", "videos"]


async def accept(
    request: Request,
    server: ApiServer,
    key: str,
    body: CommonFields,
    purpose: Purpose,
    files: list[bytes],
    param: str,
    others: Mapping[str, bytes] | None = None,
) -> ServerJob:
    """Check a request, decode its files, and queue its job, with the request's id; ProblemError if it is refused.

    param: the field of the files. others: a mask and a control_image.
    """
    if purpose == "edits" and body.steps == 0:
        purpose = "latents"
    model = _model_for(server, body.model, purpose)
    longest_s = server.args.video_deadline_s if purpose == "videos" else server.args.deadline_s
    if body.deadline_s is not None and body.deadline_s > longest_s:
        text = f"got deadline_s {body.deadline_s:g}, expected at most {longest_s:g}"
        raise refused(400, "invalid_value", text, "deadline_s")
    others = others or {}
    if purpose in ("edits", "latents") and not files and "control_image" not in others:
        raise refused(400, "missing_field", f"{param} is required; see /openapi.json", param)
    inputs, roles = [*files, *others.values()], tuple(others)
    deadline_s = longest_s if body.deadline_s is None else body.deadline_s
    spec = body.spec(model, deadline_s, InputFiles.of(len(inputs), roles))
    if "priority" not in body.model_fields_set:  # of a client that does not know the field
        spec = replace(spec, priority=max(spec.priority, server.terms(key).priority, key=PRIORITIES.__getitem__))
    check(model, spec, body, param)
    if inputs:
        spec = spec.having(await decode_inputs(server, key, inputs, param, roles))
        check(model, spec, body, param)  # now it is known whether they are latents
    job = server.queue.add(request.state.id, key, spec)
    prompt = body.prompt if server.args.show_prompts else "not shown"
    facts = {"model": model.name, "count": spec.count, "frames": spec.request.frames}
    log.event("accepted", job.id, key=key, **facts, prompt=prompt)
    return job


async def decode_inputs(
    server: ApiServer, key: str, files: list[bytes], param: str, roles: Sequence[str] = ()
) -> InputFiles:
    """Decode a client's files; ProblemError for other files, or if too much waits. param: their field.

    roles: of the last ones, each the name of its field.
    """
    server.queue.check(key, 0)  # before the work of decoding
    if server.codec.waiting >= MOST_WAITING:
        text = f"{MOST_WAITING} requests with images wait to be decoded; retry later"
        raise refused(429, "queue_full", text, retry_after="1")
    try:
        return await server.codec.decode(files, partial(server.queue.check, key), roles)
    except ValueError as error:
        field = next((role for role in roles if str(error).removeprefix("got ").startswith(role)), param)
        raise refused(400, "invalid_picture", str(error), field) from error
    except ProcessDiedError as error:
        raise refused(500, "failure", str(error), param) from error
    except OSError as error:
        log.event("decoded images cannot be stored", level=40, reason=str(error))
        raise refused(500, "failure", "the server cannot store the images; retry later", param) from error


def found(server: ApiServer, name: str) -> ServedModel:
    """A model by one of its names; ProblemError if there is none."""
    models, name = {model.name: model for model in server.facts.models}, server.named.get(name, name)
    if name not in models:
        names = ", ".join(model.name for model in server.models)
        advice = f"use one of {names}" if names else "none is loaded; use it later"
        raise refused(404, "model_not_found", f"model not found; {advice}", "model")
    return models[name]


def _model_for(server: ApiServer, name: str | None, purpose: Purpose) -> ServedModel:
    """A model by its name, for None the first one that fits, and takes texts if one does."""
    if server.queue.closed is not None:
        raise ProblemError(server.queue.closed)
    models = sorted(server.facts.models, key=lambda model: (not model.loaded, model.kind == "classes"))
    fitting = next((model for model in models if _why_not(model, purpose) is None), models[0])
    model = fitting if name is None else found(server, name)
    if (reason := _why_not(model, purpose)) is not None:
        raise refused(400, "wrong_model", f"model {model.name} {reason}", "model")
    if not model.loaded and not server.args.swap:
        raise not_loaded(server, model)
    return model


def _why_not(model: ServedModel, purpose: Purpose) -> str | None:
    if purpose == "videos":
        return None if model.video is not None else "generates images; /v1/models lists models that generate videos"
    if model.video is not None:
        return "generates videos; use /v1/videos"
    if purpose == "edits" and not model.edits:
        return "takes no images; /v1/models lists models with edits"
    if purpose == "latents":
        return None if model.latent_pixels is not None else "has no latents in requests; use images"
    return "requires an image; use /v1/images/edits" if purpose == "images" and model.needs_picture else None


def check(model: ServedModel, spec: JobSpec, body: CommonFields, files: str) -> None:
    """Refuse at once what the ranks would refuse when the job's turn comes. files: their field."""
    request = msgspec.structs.replace(spec.request, deadline_s=spec.deadline_s)
    if (refusal := why_not(model, request)) is not None:
        ours = refusal.param
        name = body.aliases.get(ours, ours)  # the client's
        text = re.sub(rf"(?<![\w-]){ours}(?![\w-])", name, refusal.text, count=1)
        raise refused(400, refusal.code, text, {"image": files, **body.sources}.get(ours, name))
