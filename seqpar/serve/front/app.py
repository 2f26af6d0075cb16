"""The HTTP interface: OpenAI's for pictures and models, and ours for jobs, files, health and metrics."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from starlette.types import ASGIApp

from seqpar.serve.front import log, schema
from seqpar.serve.front.errors import Problem, ProblemError, handle_errors
from seqpar.serve.front.files import FileStore
from seqpar.serve.front.gate import GENERATIONS, Gate
from seqpar.serve.front.jobs import Queue, ServedJob
from seqpar.serve.front.keys import Keys
from seqpar.serve.front.metrics import Metrics
from seqpar.serve.front.replica import Replica
from seqpar.serve.front.schema import Generation
from seqpar.serve.front.stream import JobStream
from seqpar.serve.messages import ServedModel

JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Front:
    """What requests are answered from."""

    queue: Queue
    replica: Replica
    files: FileStore
    metrics: Metrics
    longest_s: float
    show_prompts: bool
    started: int


def _front(request: Request) -> Front:
    return request.app.state.front


def _key(request: Request) -> str:
    return request.state.key


Here = Annotated[Front, Depends(_front)]
Key = Annotated[str, Depends(_key)]


def create_app(front: Front, keys: Keys | None, hosts: frozenset[str]) -> ASGIApp:
    """Return the application behind its gate. There is no page with scripts: /openapi.json describes it."""
    app = FastAPI(title="seqpar", docs_url=None, redoc_url=None)
    app.state.front = front
    handle_errors(app)
    app.add_api_route(GENERATIONS, generate, methods=["POST"])
    app.add_api_route("/v1/files/{name}", file, methods=["GET"], name="file")
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/jobs", jobs, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", job_of, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", cancel, methods=["DELETE"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    return Gate(app, keys, hosts)


async def generate(body: Generation, request: Request, front: Here, key: Key) -> Response:
    """Make pictures. The id of the answer's header x-request-id is also the id of the job."""
    model = _model(front, body.model)
    _check_loras(body, model)
    wanted = body.wanted(model, _deadline(front, body))
    job = front.queue.add(request.state.id, key, wanted)
    shown = body.prompt if front.show_prompts else "not shown"
    log.event("accepted", job.id, key=key, model=wanted.order.model, count=wanted.count, prompt=shown)
    headers = {"x-ignored": ", ".join(body.ignored)} if body.ignored else {}
    if body.stream:
        return JobStream(front.queue, job, "image_generation", with_steps=body.stream_steps, headers=headers)
    try:
        await _ended_or_left(request, front.queue, job)
        if job.problem is not None:
            raise ProblemError(job.problem)
        links = None
        if body.response_format == "url":
            contents = [job.files[index] for index in range(wanted.count)]
            names = front.files.keep(key, wanted.how.kind, contents)
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


def _model(front: Front, name: str | None) -> ServedModel:
    """Return a model by its name, the first one for None."""
    if front.queue.closed is not None:
        raise ProblemError(front.queue.closed)
    if front.replica.known is None:
        raise ProblemError(_not_ready())
    models = {model.name: model for model in front.replica.known.models}
    if name is not None and name not in models:
        text = f"got a model that is not served, expected one of {', '.join(models)}"
        raise ProblemError(Problem(404, "model_not_found", text, "model"))
    return models[name] if name is not None else next(iter(models.values()))


def _check_loras(body: Generation, model: ServedModel) -> None:
    names = [name for name, _ in body.loras]
    if not set(names) <= set(model.loras) or len(set(names)) < len(names):
        expected = f"some of {', '.join(model.loras)}, each once" if model.loras else f"none: {model.name} has none"
        raise ProblemError(Problem(400, "unknown_lora", f"got other LoRAs, expected {expected}", "lora"))


def _deadline(front: Front, body: Generation) -> float:
    if body.deadline_s is not None and body.deadline_s > front.longest_s:
        text = f"got deadline_s {body.deadline_s:g}, expected at most {front.longest_s:g}; ask for a shorter one"
        raise ProblemError(Problem(400, "invalid_value", text, "deadline_s"))
    return front.longest_s


def _not_ready() -> Problem:
    text = "the ranks load their models and are not ready; ask again later"
    return Problem(503, "not_ready", text, headers={"retry-after": "5"})


async def file(name: str, front: Here, key: Key) -> Response:
    """Return a picture that was asked for as a link; it expires."""
    found = front.files.get(key, name)
    if found is None:
        text = "got the name of no file of yours, expected one from an answer; links expire"
        raise ProblemError(Problem(404, "unknown_file", text))
    headers = {"cache-control": "private, no-store", "x-content-type-options": "nosniff"}
    return Response(found.content, media_type=f"image/{found.kind}", headers=headers)


async def models(front: Here) -> dict[str, Any]:
    """List the models that are loaded."""
    if front.replica.known is None:
        raise ProblemError(_not_ready())
    told = [schema.of_model(model, front.started) for model in front.replica.known.models]
    return {"object": "list", "data": told}


async def jobs(front: Here, key: Key) -> dict[str, Any]:
    """List the jobs of this key, in order of arrival, as long as they are remembered."""
    return {"object": "list", "data": [schema.of_job(job, front.queue) for job in front.queue.of_key(key)]}


async def job_of(job: str, front: Here, key: Key) -> dict[str, Any]:
    """Tell how far a job is."""
    return schema.of_job(front.queue.get(job, key), front.queue)


async def cancel(job: str, front: Here, key: Key) -> dict[str, Any]:
    """Cancel a job that waits or runs; one that has ended stays as it is."""
    found = front.queue.get(job, key)
    front.queue.cancel(found, "the job was cancelled by DELETE /v1/jobs")
    return schema.of_job(found, front.queue)


async def health() -> dict[str, str]:
    """Tell that the front lives."""
    return {"status": "ok"}


async def ready(front: Here) -> dict[str, Any]:
    """Tell whether the ranks are ready for a request."""
    if front.queue.closed is not None:
        raise ProblemError(front.queue.closed)
    known = front.replica.known
    if known is None or not front.replica.ready.is_set():
        raise ProblemError(_not_ready())
    return {
        "status": "ready",
        "ranks": known.ranks,
        "device": known.device,
        "since_s": int(time.time()) - front.started,
    }


async def metrics(front: Here) -> Response:
    """Return everything that is counted, in Prometheus' format."""
    return Response(front.metrics.text(), media_type=TEXT)
