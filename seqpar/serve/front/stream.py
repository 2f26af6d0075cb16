"""The answer to a request for a stream: what happens to a job, as server-sent events in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from seqpar.serve.front import schema
from seqpar.serve.front.events import JobEnded, JobEvent, Moved, PartlyMade, PictureMade, Stepped
from seqpar.serve.front.jobs import Queue, ServedJob

QUIET_S = 15.0  # without an event after which a comment is sent, because proxies close connections that are silent
COMMENT = b": waiting\n\n"
LEFT = "the client left before the pictures were made"


class JobStream(StreamingResponse):
    """The events of a job until its end; see `events`. When the client leaves before, the job is cancelled."""

    media_type = "text/event-stream"

    def __init__(
        self, queue: Queue, job: ServedJob, prefix: str, *, with_steps: bool, headers: Mapping[str, str]
    ) -> None:
        told = {"cache-control": "no-store", "x-accel-buffering": "no", **headers}  # nginx would collect events
        heard = listening(job)  # from now on, because the ranks may begin before the answer does
        super().__init__(events(queue, job, heard, prefix, with_steps), headers=told)
        self._queue, self._job = queue, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. It may be cancelled before the first event, so that `events` cannot end the job."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._queue.cancel(self._job, LEFT)
            self._job.listener = None
            self._job.files.clear()


def listening(job: ServedJob) -> asyncio.Queue[JobEvent]:
    """Return what a job that was just added to the queue tells from now on."""
    heard = asyncio.Queue[JobEvent]()
    heard.put_nowait(Moved())
    job.listener = heard.put_nowait
    return heard


async def events(
    queue: Queue,
    job: ServedJob,
    heard: asyncio.Queue[JobEvent],
    prefix: str,
    with_steps: bool,
    quiet_s: float = QUIET_S,
) -> AsyncIterator[bytes]:
    """Yield what a job tells until it ends. prefix: of the types of pictures. with_steps: also its queue and steps."""
    before, partly = None, set[tuple[int, int]]()  # a picture that is tried once more has the same partial ones again
    while True:
        match await _next(heard, quiet_s):
            case None:
                yield COMMENT
            case JobEnded():
                break
            case Moved() if with_steps and job.state == "queued" and (waits := queue.ahead(job)) != before:
                before = waits
                yield sent("seqpar.queued", position=waits, estimated_s=queue.estimate_s(job))
            case Stepped(picture, step, steps) if with_steps:
                yield sent("seqpar.step", picture=picture, step=step, steps=steps)
            case PartlyMade(picture, index) as partial if (picture, index) not in partly:
                partly.add((picture, index))
                yield _partial(job, partial, prefix)
            case PictureMade(picture):
                yield sent(f"{prefix}.completed", **_completed(job, picture))
    if job.problem is not None:
        yield sent("error", error=job.problem.shape)


def _partial(job: ServedJob, partial: PartlyMade, prefix: str) -> bytes:
    fields = _picture(job, partial.picture, partial.size, partial.file)
    return sent(f"{prefix}.partial_image", **fields, partial_image_index=partial.index)


async def _next(heard: asyncio.Queue[JobEvent], quiet_s: float) -> JobEvent | None:
    """Return the next event, or None after some seconds without one."""
    try:
        async with asyncio.timeout(quiet_s):
            return await heard.get()
    except TimeoutError:
        return None


def _completed(job: ServedJob, picture: int) -> dict[str, Any]:
    """Return the fields of a picture that is made."""
    fields = _picture(job, picture, job.size or (0, 0), job.files[picture])
    return {**fields, "usage": schema.usage(), "seqpar": {**fields["seqpar"], "seconds": job.parts_s}}


def _picture(job: ServedJob, picture: int, size: tuple[int, int], file: bytes) -> dict[str, Any]:
    """Return OpenAI's fields of a picture, whole or partial, and ours."""
    height, width = size
    return {
        "b64_json": base64.b64encode(file).decode(),
        "created_at": int(time.time()),
        "size": f"{width}x{height}",
        "quality": "auto",
        "background": "opaque",
        "output_format": job.wanted.how.kind,
        "seqpar": {"id": job.id, "picture": picture, "seed": job.wanted.order.seed + picture},
    }


def sent(kind: str, **fields: Any) -> bytes:
    """Return an event as it is sent; JSON has no line ends of its own."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
