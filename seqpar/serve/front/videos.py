"""Videos by OpenAI's interface: a request is answered at once, and its job is asked for until the file is there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from seqpar.serve.front import log, records
from seqpar.serve.front.edits import decoded
from seqpar.serve.front.errors import NO_RETRY, Problem, ProblemError, of_validation
from seqpar.serve.front.folder import JobRecord
from seqpar.serve.front.forms import body_of, read_form
from seqpar.serve.front.gate import VIDEOS
from seqpar.serve.front.jobs import Wanted
from seqpar.serve.front.pictures import NO_IMAGES, Format
from seqpar.serve.front.state import Front, Here, Key, check_loras, deadline_of, model_for
from seqpar.serve.front.video_request import VideoRequest
from seqpar.serve.messages import ServedModel

REFERENCE = "input_reference"
BODY = body_of(VideoRequest, {REFERENCE: {"description": "The first frame, as a PNG, JPEG or WebP."}})
GONE = "got a video whose file is no longer kept, expected one that has not expired; make it again"


def add_videos(app: FastAPI) -> None:
    """Add the routes of videos to an application."""
    app.add_api_route(VIDEOS, create, methods=["POST"], openapi_extra=BODY)
    app.add_api_route(VIDEOS, videos, methods=["GET"])
    app.add_api_route(f"{VIDEOS}/{{video}}", video_of, methods=["GET"])
    app.add_api_route(f"{VIDEOS}/{{video}}", delete, methods=["DELETE"])
    app.add_api_route(f"{VIDEOS}/{{video}}/content", content, methods=["GET"])


async def create(request: Request, front: Here, key: Key) -> Response:
    """Put a video into the queue. The id of the answer's header x-request-id is also the id of the video."""
    body, files = await _read(request)
    model, deadline_s = model_for(front, body.model, "videos"), deadline_of(body.deadline_s, front.longest_video_s)
    check_loras(body.loras, model)
    _check_pictures(model, len(files))
    front.queue.check(0)  # before the work of decoding
    inputs = await decoded(front, files, REFERENCE) if files else NO_IMAGES
    steps = body.steps or model.steps
    order, fps = body.video_order(model, inputs)
    wanted = Wanted(order, 1, Format(), body.priority, steps, model.step_s, deadline_s, fps, inputs.file)
    job = front.queue.add(request.state.id, key, wanted)
    shown = body.prompt if front.show_prompts else "not shown"
    log.event("accepted", job.id, key=key, model=model.name, frames=wanted.order.frames, prompt=shown)
    await records.announce(front, job)
    headers = {"x-ignored": ", ".join(body.ignored)} if body.ignored else {}
    return JSONResponse(records.of(front, job).video, headers=headers)


async def _read(request: Request) -> tuple[VideoRequest, list[bytes]]:
    """Return the body of a request, JSON or a form, and the files in it."""
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        form = await read_form(request)
        return form.fields(VideoRequest), form.files_of(REFERENCE)
    try:
        return VideoRequest.model_validate_json(await request.body()), []
    except ValidationError as error:
        raise ProblemError(of_validation(error.errors())) from error


def _check_pictures(model: ServedModel, count: int) -> None:
    """Raise ProblemError for more or fewer pictures than a model of videos begins with."""
    most = int(model.edits)
    if count > most or (model.needs_picture and not count):
        expected = "one" if model.needs_picture else "one or none" if model.edits else "none"
        text = f"got {count} files of {REFERENCE} with model {model.name}, expected {expected}"
        raise ProblemError(Problem(400, "invalid_value", text, REFERENCE))


async def videos(
    front: Here,
    key: Key,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the videos of this key, as long as they are remembered."""
    found = [record for record in await records.of_key(front, key) if record.video is not None]
    found = found if order == "asc" else found[::-1]
    ids = [record.id for record in found]
    if after is not None:
        if after not in ids:
            raise ProblemError(_unknown("after"))
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": [record.video for record in page], **ends, "has_more": len(found) > limit}


async def video_of(video: str, front: Here, key: Key) -> dict[str, Any]:
    """Tell how far a video is."""
    return (await _found(front, key, video))[1]


async def delete(video: str, front: Here, key: Key) -> dict[str, Any]:
    """Cancel a video that waits or runs, and forget it and its file."""
    record, _ = await _found(front, key, video)
    await records.end(front, key, record, "delete")
    return {"id": record.id, "object": "video.deleted", "deleted": True}


async def content(video: str, front: Here, key: Key, variant: Literal["video"] = "video") -> Response:
    """Return the file of a video that is completed."""
    record, told = await _found(front, key, video)
    if record.stored is None:
        text = f"got a video that is {told['status']}, expected one that is completed; ask for its status"
        raise ProblemError(Problem(409, "not_completed", text, headers=NO_RETRY))
    file = await front.files.get(key, record.stored)
    if file is None:
        raise ProblemError(Problem(404, "expired", GONE))
    return file.response()


async def _found(front: Front, key: str, id_: str) -> tuple[JobRecord, dict[str, Any]]:
    """Return what is known of a video, and the object that answers tell."""
    record = await records.get(front, key, id_)
    if record is None or record.video is None:
        raise ProblemError(_unknown(None))
    return record, record.video


def _unknown(param: str | None) -> Problem:
    return Problem(404, "unknown_video", "got the id of no video of yours, expected one of /v1/videos", param)
