"""Routes for images: generations and edits, answered when they are made or as a stream of events."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from seqpar.serve.api.accept import accept
from seqpar.serve.api.errors import ProblemError, refused
from seqpar.serve.api.files import MEDIA
from seqpar.serve.api.jobs import ImageMade, JobEvent, PreviewMade, Queue, ServerJob, Stepped
from seqpar.serve.api.requests import Edit, Generation, file_in, form_schema, read_form
from seqpar.serve.api.state import ApiServer, Key, Server

FILES = {
    "image": "A PNG, JPEG or WebP; several as image[].",
    "mask": "A PNG or WebP of the size of the image, transparent where it is repainted.",
    "control_image": "What the ControlNet follows.",
}
EDIT_BODY = form_schema(Edit, {name: {"description": text} for name, text in FILES.items()})
OF_LINKS = "dall-e-"  # names of models whose images OpenAI returned as links by default
LEFT = "the client disconnected before the images were made"
QUIET_S = 15.0  # without an event, after which a comment is sent: proxies close silent connections
COMMENT = b": waiting\n\n"


def others_of(body: Generation) -> dict[str, bytes]:
    """The file in a data URL of a body, by its field."""
    return dict.fromkeys(("control_image",), file[0]) if (file := file_in("control_image", body.control_image)) else {}


async def generate(body: Generation, request: Request, server: Server, key: Key) -> Response:
    """Generate images. The header x-request-id of the answer is also the id of the job."""
    job = await accept(request, server, key, body, "images", [], "image", others_of(body))
    return await _answer(body, job, "image_generation", request, server)


async def edit(request: Request, server: Server, key: Key) -> Response:
    """Edit images. The header x-request-id of the answer is also the id of the job."""
    form = await read_form(request)
    body = form.fields(Edit)
    named = {name: file for name in ("mask", "control_image") for file in form.one_of(name)}
    if named.keys() & (in_text := others_of(body)).keys():
        raise refused(400, "invalid_value", "control_image is a file and a text; send one of them", "control_image")
    named |= in_text
    job = await accept(request, server, key, body, "edits", form.files_of("image", "image[]"), "image", named)
    del form  # up to 50 MB, which the job does not need
    return await _answer(body, job, "image_edit", request, server)


async def _answer(body: Generation, job: ServerJob, prefix: str, request: Request, server: ApiServer) -> Response:
    """Answer with the images of a job or their stream. prefix: of the types of the stream's events."""
    spec = job.spec
    if body.stream:
        return JobStream(server.queue, job, prefix, body)
    try:
        await _ended_or_left(request, server.queue, job)
        if job.problem is not None:
            raise ProblemError(job.problem)
        files = [job.files[index] for index in range(spec.count)]
        if body.response_format == "file":
            media = MEDIA.get(spec.how.kind, f"image/{spec.how.kind}")
            return Response(files[0], media_type=media, headers=body.headers)
        default = "url" if (body.model or spec.request.model).startswith(OF_LINKS) else "b64_json"
        if (body.response_format or default) == "url":
            names = await server.files.keep(job.key, spec.how.kind, files)
            data = [{"url": str(request.url_for("file", name=name))} for name in names]
        else:
            data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
    finally:
        job.files.clear()
    height, width = job.size or (0, 0)
    text = msgspec.json.encode(
        {
            "created": int(job.ended or job.arrived),
            "data": [{**image, "seed": spec.request.seed + index} for index, image in enumerate(data)],
            "output_format": spec.how.kind,
            "size": f"{width}x{height}",
            "usage": _usage(),
            **body.warnings,
            "seqpar": {
                "id": job.id,
                "seconds": job.parts_s,
                **job.computed,
                "queue_s": (job.started or job.arrived) - job.arrived,
            },
        }
    )
    return Response(text, media_type="application/json", headers=body.headers)


async def _ended_or_left(request: Request, queue: Queue, job: ServerJob) -> None:
    """Wait until a job has ended; cancel it when its client disconnects before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    ended, gone = asyncio.create_task(job.done.wait()), asyncio.create_task(left())
    try:
        await asyncio.wait([ended, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        gone.cancel()
        queue.cancel(job, LEFT)


def _usage() -> dict[str, Any]:
    """OpenAI's count of tokens, which are not charged for here."""
    details = {"image_tokens": 0, "text_tokens": 0}
    counts = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    return {**counts, "input_tokens_details": details, "output_tokens_details": details}


# streams: server-sent events in OpenAI's shapes ----------------------------------------------------------------------


class JobStream(StreamingResponse):
    """The events of a job until its end; the job is cancelled when the client disconnects before."""

    media_type = "text/event-stream"

    def __init__(self, queue: Queue, job: ServerJob, prefix: str, body: Generation) -> None:
        # nginx would collect events without x-accel-buffering
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **body.headers}
        arriving = listen(job)  # from now on, because the ranks may begin before the answer does
        super().__init__(events(queue, job, arriving, prefix, body), headers=headers)
        self._queue, self._job = queue, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # may be cancelled before the first event, so that `events` cannot end the job
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._queue.cancel(self._job, LEFT)
            self._job.listener = None
            self._job.files.clear()


def listen(job: ServerJob) -> asyncio.Queue[JobEvent]:
    """Collect the events of a job that was just queued."""
    arriving = asyncio.Queue[JobEvent]()
    arriving.put_nowait("moved")
    job.listener = arriving.put_nowait
    return arriving


async def events(
    queue: Queue, job: ServerJob, arriving: asyncio.Queue[JobEvent], prefix: str, body: Generation
) -> AsyncIterator[bytes]:
    """Yield the events of a job until it ends. prefix: of the types of images."""
    with_steps = body.stream_steps
    last_place, previews = None, set[tuple[int, int]]()  # an image that is retried has the same previews again
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                event = await arriving.get()
        except TimeoutError:
            yield COMMENT
            continue
        match event:
            case "ended":
                break
            case "moved" if with_steps and job.state == "queued" and (place := queue.ahead(job)) != last_place:
                last_place = place
                yield encode_event("seqpar.queued", position=place, estimated_s=queue.estimate_s(job))
            case Stepped(image, step, steps) if with_steps:
                rest_s = queue.estimate_s(job)
                yield encode_event("seqpar.step", picture=image, step=step, steps=steps, estimated_s=rest_s)
            case PreviewMade(image, index, size, file) if (image, index) not in previews:
                previews.add((image, index))
                fields = _image_fields(job, image, size, file)
                yield encode_event(f"{prefix}.partial_image", **fields, partial_image_index=index)
            case ImageMade(image):
                fields = _image_fields(job, image, job.size or (0, 0), job.files[image])
                fields |= {"usage": _usage(), "seqpar": {**fields["seqpar"], "seconds": job.parts_s, **job.computed}}
                fields |= body.warnings
                yield encode_event(f"{prefix}.completed", **fields)
    if job.problem is not None:
        yield encode_event("error", error=job.problem.shape)


def _image_fields(job: ServerJob, image: int, size: tuple[int, int], file: bytes) -> dict[str, Any]:
    """OpenAI's fields of an image or preview, and ours."""
    height, width = size
    return {
        "b64_json": base64.b64encode(file).decode(),
        "created_at": int(time.time()),
        "size": f"{width}x{height}",
        "quality": "auto",
        "background": "opaque",
        "output_format": job.spec.how.kind,
        "seqpar": {"id": job.id, "picture": image, "seed": job.spec.request.seed + image},
    }


def encode_event(kind: str, **fields: Any) -> bytes:
    """An event as it is sent; JSON has no line ends."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
