"""Reads requests, without a GPU, and hands each to a replica, or to a second one if that dies before it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import msgspec
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from seqpar.serve.front.errors import NO_RETRY, Problem, ProblemError
from seqpar.serve.front.forms import read_form
from seqpar.serve.front.gate import BODIES, read_body, replayed
from seqpar.serve.front.stream import sent
from seqpar.serve.ray.replica import CHUNK, EVENTS, Head, HttpCall

ATTEMPTS = 2  # at a request whose replica died before it answered
DIED = (RayActorError, httpx.TransportError)
SERVES = (b"x-request-id", b"date")  # headers that Serve adds; the id of a job is also in the body
NONE = "without LoRAs"
METRICS = "got /metrics of several replicas, expected one; ask for those of Ray, or a replica at its own port"
Parts = DeploymentResponseGenerator[Any]  # of an answer, as a replica yields them


class Named(msgspec.Struct):
    """A LoRA in a body."""

    name: str


class Hint(msgspec.Struct):
    """What of a body decides which replica is best; the replica checks all of it."""

    lora: str | list[Named] | None = None


class Ingress:
    """The deployment that gets requests. has_loras: whether a replica is better than another one for some."""

    def __init__(self, replicas: DeploymentHandle, has_loras: bool) -> None:
        self._replicas, self._has_loras = replicas, has_loras
        self._counted = set[asyncio.Task[None]]()  # calls of videos, which last until these are made

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            call = await _call(request)
            loras = await _loras(call, request) if self._has_loras and call.body else ""
            return await self._answered(call, loras)
        except ProblemError as error:
            return error.problem.response()

    async def _answered(self, call: HttpCall, loras: str) -> Response:
        """Ask a replica, and a second one if it dies before the answer is whole, or before a long one has begun."""
        for _ in range(ATTEMPTS):
            handle = self._replicas.options(stream=True, multiplexed_model_id=loras)
            answer = cast("Parts", handle.answer.remote(call))
            try:
                head = await anext(answer)
                body = self._body(call, head, answer)
                if _is_long(call, head):
                    response: Response = StreamingResponse(body, head.status)
                else:
                    response = Response(b"".join([chunk async for chunk in body]), head.status)
            except DIED as error:
                logging.getLogger("ray.serve").warning("a replica died before it answered: %s", error)
                continue
            except asyncio.CancelledError:
                answer.cancel()
                raise
            response.raw_headers = [pair for pair in head.headers if pair[0] not in SERVES]
            return response
        text = f"got a request whose replica died {ATTEMPTS} times, so that it is not tried again; change it"
        raise ProblemError(Problem(500, "replica_died", text, headers=NO_RETRY))

    async def _body(self, call: HttpCall, head: Head, answer: Parts) -> AsyncIterator[bytes]:
        """Yield the body. A stream of events whose replica dies ends with an error, any other answer raises it."""
        has_ended = False
        try:
            async for chunk in answer:
                if chunk is None:
                    has_ended = True
                    break
                yield chunk
        except DIED:
            if not _is_stream(head):
                raise
            problem = Problem(500, "replica_died", "the replica died before the answer was whole; ask again")
            yield sent("error", error=problem.shape)
        finally:
            if has_ended and call.makes_video:
                task = asyncio.create_task(_drain(answer))
                self._counted.add(task)
                task.add_done_callback(self._counted.discard)
            elif not has_ended:
                answer.cancel()


def _is_long(call: HttpCall, head: Head) -> bool:
    """Return whether an answer is sent on in parts: a stream of events, or a large file.

    Any other one is read whole first, so that the picture is asked for again when its replica dies within its answer.
    """
    is_large = call.method == "GET" and int(dict(head.headers).get(b"content-length", b"0")) > CHUNK
    return is_large or _is_stream(head)


def _is_stream(head: Head) -> bool:
    return dict(head.headers).get(b"content-type", b"").startswith(EVENTS)


async def _drain(answer: Parts) -> None:
    """Wait for the end of a call. What its job comes to is told by the folder of jobs."""
    try:
        async for _ in answer:
            pass
    except DIED as error:
        logging.getLogger("ray.serve").warning("a replica died while it made a video: %s", error)


async def _call(request: Request) -> HttpCall:
    """Read a request, with a body only where one is taken, whose length is bounded."""
    path, scope = request.url.path, request.scope
    if path == "/metrics":
        raise ProblemError(Problem(404, "not_found", METRICS))
    kinds = BODIES.get(path) if request.method == "POST" else None
    body = b"" if kinds is None else await read_body(kinds, request.headers, request.receive)
    query = scope["query_string"]
    raw = scope.get("raw_path") or path.encode()
    return HttpCall(request.method, raw + (b"?" + query if query else b""), tuple(scope["headers"]), body)


async def _loras(call: HttpCall, request: Request) -> str:
    """Return the names of a body's LoRAs as one word. A wrong body has none here; the replica says what is wrong."""
    try:
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            form = await read_form(Request(request.scope, replayed(call.body, request.receive)))
            return form.texts.get("lora", NONE)
        lora = msgspec.json.decode(call.body, type=Hint).lora
    except (ProblemError, msgspec.MsgspecError):
        return NONE
    names = [lora] if isinstance(lora, str) else [each.name for each in lora or ()]
    return "+".join(sorted(names)) or NONE
