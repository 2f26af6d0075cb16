"""Requests for pictures: the job that they become, and the answer when it has ended."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import Request, Response

from seqpar.serve.front import log, schema
from seqpar.serve.front.errors import ProblemError
from seqpar.serve.front.jobs import Queue, ServedJob, Wanted
from seqpar.serve.front.schema import Generation
from seqpar.serve.front.state import Front, Here, Key, check_loras, deadline_of, model_for
from seqpar.serve.front.stream import JobStream

JSON = "application/json"


async def generate(body: Generation, request: Request, front: Here, key: Key) -> Response:
    """Make pictures. The id of the answer's header x-request-id is also the id of the job."""
    model = model_for(front, body.model, "pictures")
    check_loras(body.loras, model)
    wanted = body.wanted(model, deadline_of(body.deadline_s, front.longest_s))
    return await answered(body, wanted, "image_generation", request, front, key)


async def answered(body: Generation, wanted: Wanted, events: str, request: Request, front: Front, key: str) -> Response:
    """Have pictures made, and return them or their stream. events: how the types of a stream's events begin."""
    job = front.queue.add(request.state.id, key, wanted)
    shown = body.prompt if front.show_prompts else "not shown"
    log.event("accepted", job.id, key=key, model=wanted.order.model, count=wanted.count, prompt=shown)
    headers = {"x-ignored": ", ".join(body.ignored)} if body.ignored else {}
    if body.stream:
        return JobStream(front.queue, job, events, with_steps=body.stream_steps, headers=headers)
    try:
        await _ended_or_left(request, front.queue, job)
        if job.problem is not None:
            raise ProblemError(job.problem)
        links = None
        if body.response_format == "url":
            contents = [job.files[index] for index in range(wanted.count)]
            names = await front.files.keep(key, wanted.how.kind, contents)
            links = [str(request.url_for("file", name=name)) for name in names]
        text = msgspec.json.encode(schema.pictures(job, links))
    finally:
        job.files.clear()
    return Response(text, media_type=JSON, headers=headers)


async def _ended_or_left(request: Request, queue: Queue, job: ServedJob) -> None:
    """Wait until a job has ended; it is cancelled when its client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    ended, gone = asyncio.create_task(job.done.wait()), asyncio.create_task(left())
    try:
        await asyncio.wait([ended, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        gone.cancel()
        queue.cancel(job, "the client left before the pictures were made")
