"""Requests for pictures that begin with pictures: a model edits them, or draws them anew."""

from __future__ import annotations

from fastapi import Request, Response

from seqpar.serve.front import log
from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.forms import body_of, read_form
from seqpar.serve.front.generations import answered
from seqpar.serve.front.pictures import InputImages, ProcessDiedError
from seqpar.serve.front.schema import Edit
from seqpar.serve.front.state import Front, Here, Key, check_loras, deadline_of, model_for

BODY = body_of(Edit, {"image": {"description": "A PNG, JPEG or WebP; several as image[]."}})
MOST_WAITING = 16  # requests with images that wait to be decoded
NO_MASK = "got a mask, expected none: no model that is served here takes one; leave it out, and say what to change"


async def edit(request: Request, front: Here, key: Key) -> Response:
    """Make pictures of pictures. The id of the answer's header x-request-id is also the id of the job."""
    form = await read_form(request)
    if "mask" in form.files:
        raise ProblemError(Problem(400, "unknown_field", NO_MASK, "mask"))
    body, files = form.fields(Edit), form.files_of("image", "image[]")
    model, deadline_s = model_for(front, body.model, "edits"), deadline_of(body.deadline_s, front.longest_s)
    check_loras(body.loras, model)
    if not files:
        raise ProblemError(Problem(400, "missing_field", "got no image, expected a file; see /openapi.json", "image"))
    front.queue.check(0)  # before the work of decoding
    wanted = body.wanted(model, deadline_s, await decoded(front, files, "image"))
    del form, files  # up to 50 MB, which the job does not need
    return await answered(body, wanted, "image_edit", request, front, key)


async def decoded(front: Front, files: list[bytes], param: str) -> InputImages:
    """Return the pictures in a client's files; ProblemError for what is none, or too large. param: their field."""
    if front.pictures.waiting >= MOST_WAITING:
        text = f"{MOST_WAITING} requests with images wait to be decoded; retry later"
        raise ProblemError(Problem(429, "queue_full", text))
    try:
        return await front.pictures.inputs_of(files, front.queue.check)
    except ValueError as error:
        raise ProblemError(Problem(400, "invalid_picture", str(error), param)) from error
    except ProcessDiedError as error:
        raise ProblemError(Problem(500, "failure", str(error), param)) from error
    except OSError as error:
        log.event("decoded images cannot be stored", level=40, reason=str(error))
        text = "the server cannot store the images; retry later"
        raise ProblemError(Problem(500, "failure", text, param)) from error
