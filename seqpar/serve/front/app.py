"""The HTTP interface: OpenAI's for pictures, videos and models, and ours for jobs, files, health and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from seqpar.serve.front import records, schema
from seqpar.serve.front.edits import BODY, edit
from seqpar.serve.front.errors import Problem, ProblemError, handle_errors
from seqpar.serve.front.folder import JobRecord
from seqpar.serve.front.gate import EDITS, GENERATIONS, Gate
from seqpar.serve.front.generations import generate
from seqpar.serve.front.keys import Keys
from seqpar.serve.front.page import page
from seqpar.serve.front.state import Front, Here, Key, not_ready
from seqpar.serve.front.videos import add_videos

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(front: Front, keys: Keys | None, hosts: frozenset[str]) -> ASGIApp:
    """Return the application behind its gate. /openapi.json describes it; FastAPI's own pages load foreign scripts."""
    app = FastAPI(title="seqpar", docs_url=None, redoc_url=None)
    app.state.front = front
    handle_errors(app)
    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_api_route(GENERATIONS, generate, methods=["POST"])
    app.add_api_route(EDITS, edit, methods=["POST"], openapi_extra=BODY)
    add_videos(app)
    app.add_api_route("/v1/files/{name}", file, methods=["GET"], name="file")
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/jobs", jobs, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", job_of, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", cancel, methods=["DELETE"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    return Gate(app, keys, hosts)


async def file(name: str, front: Here, key: Key) -> Response:
    """Return a picture that was asked for as a link; it expires."""
    found = await front.files.get(key, name)
    if found is None:
        text = "got the name of no file of yours, expected one from an answer; links expire"
        raise ProblemError(Problem(404, "unknown_file", text))
    return found.response()


async def models(front: Here) -> dict[str, Any]:
    """List the models that are loaded."""
    if front.replica.known is None:
        raise ProblemError(not_ready())
    told = [schema.of_model(model, front.started) for model in front.replica.known.models]
    return {"object": "list", "data": told}


async def jobs(front: Here, key: Key) -> dict[str, Any]:
    """List the jobs of this key, in order of arrival, as long as they are remembered."""
    return {"object": "list", "data": [record.job for record in await records.of_key(front, key)]}


async def job_of(job: str, front: Here, key: Key) -> dict[str, Any]:
    """Tell how far a job is."""
    return (await _found(front, key, job)).job


async def cancel(job: str, front: Here, key: Key) -> dict[str, Any]:
    """Cancel a job that waits or runs; one that has ended stays as it is."""
    await records.end(front, key, await _found(front, key, job), "cancel")
    return (await _found(front, key, job)).job


async def _found(front: Front, key: str, id_: str) -> JobRecord:
    record = await records.get(front, key, id_)
    if record is None:
        raise ProblemError(Problem(404, "unknown_job", "got the id of no job of yours, expected one of /v1/jobs"))
    return record


async def health() -> dict[str, str]:
    """Tell that the front lives."""
    return {"status": "ok"}


async def ready(front: Here) -> dict[str, Any]:
    """Tell whether the ranks are ready for a request."""
    if front.queue.closed is not None:
        raise ProblemError(front.queue.closed)
    known = front.replica.known
    if known is None or not front.replica.ready.is_set():
        raise ProblemError(not_ready())
    return {
        "status": "ready",
        "ranks": known.ranks,
        "device": known.device,
        "since_s": int(time.time()) - front.started,
    }


async def metrics(front: Here) -> Response:
    """Return everything that is counted, in Prometheus' format."""
    return Response(front.metrics.text(), media_type=TEXT)
