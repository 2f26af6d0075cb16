"""Routes for videos, as OpenAI's: a request is answered immediately, and clients poll its job until the file exists."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from seqpar.serve.api import records
from seqpar.serve.api.accept import accept
from seqpar.serve.api.errors import ProblemError, of_validation, refused
from seqpar.serve.api.gate import VIDEOS
from seqpar.serve.api.requests import VideoRequest, form_schema, read_form
from seqpar.serve.api.state import Key, Server

REFERENCES = ("input_reference", "image")  # OpenAI's name of the image that a video begins with, and ours
BODY = form_schema(VideoRequest, {name: {"description": "The first frame: PNG, JPEG or WebP."} for name in REFERENCES})


def add_videos(app: FastAPI) -> None:
    app.add_api_route(VIDEOS, create, methods=["POST"], openapi_extra=BODY)
    app.add_api_route(VIDEOS, videos, methods=["GET"])
    app.add_api_route(f"{VIDEOS}/{{video}}", video_of, methods=["GET"])
    app.add_api_route(f"{VIDEOS}/{{video}}", delete, methods=["DELETE"])
    app.add_api_route(f"{VIDEOS}/{{video}}/content", content, methods=["GET"])


async def create(request: Request, server: Server, key: Key) -> Response:
    """Queue a video. The header x-request-id of the answer is also the id of the video."""
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        form = await read_form(request)
        body, files = form.fields(VideoRequest), form.files_of(*REFERENCES)
    else:
        try:
            body, files = VideoRequest.model_validate_json(await request.body()), list[bytes]()
        except ValidationError as error:
            raise ProblemError(of_validation(error.errors(), VideoRequest.model_fields)) from error
    files += body.files
    job = await accept(request, server, key, body, "videos", files, REFERENCES[body.image is not None])
    return JSONResponse({**(records.of(server, job).video or {}), **body.warnings}, headers=body.headers)


async def videos(
    server: Server,
    key: Key,
    after: Annotated[str | None, Query(max_length=80)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the videos of this key."""
    listed = [record for record in await records.of_key(server, key) if record.video is not None]
    listed = listed if order == "asc" else listed[::-1]
    ids = [record.id for record in listed]
    if after is not None:
        if after not in ids:
            raise refused(404, "unknown_video", "the video of after is not found or expired", "after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[:limit]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": [record.video for record in page], **ends, "has_more": len(listed) > limit}


async def video_of(video: str, server: Server, key: Key) -> dict[str, Any]:
    """Report the progress of a video."""
    return (await records.get(server, key, video, "video")).video or {}


async def delete(video: str, server: Server, key: Key) -> dict[str, Any]:
    """Cancel a video that waits or runs, and delete it and its file."""
    record = await records.get(server, key, video, "video")
    await records.delete(server, key, record)
    return {"id": record.id, "object": "video.deleted", "deleted": True}


async def content(video: str, server: Server, key: Key, variant: Literal["video"] = "video") -> Response:
    """Download a completed video."""
    record = await records.get(server, key, video, "video")
    if record.stored is None:
        text = f"the status of the video is {(record.video or {})['status']}, not completed"
        raise refused(409, "not_completed", text, x_should_retry="false")
    response = await server.files.get(key, record.stored)
    if response is None:
        raise refused(404, "expired", "the file of the video has expired; request the video again")
    return response
