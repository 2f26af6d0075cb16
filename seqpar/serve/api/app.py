"""The HTTP application: OpenAI's routes for images, videos and models; ours for the page, jobs, files and health."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from seqpar.serve.api import records
from seqpar.serve.api.accept import found
from seqpar.serve.api.access import AccessLog
from seqpar.serve.api.admin import add_admin
from seqpar.serve.api.errors import ProblemError, handle_errors, refused
from seqpar.serve.api.gate import EDITS, GENERATIONS, Gate
from seqpar.serve.api.images import EDIT_BODY, edit, generate
from seqpar.serve.api.keys import KeyFile
from seqpar.serve.api.requests import Generation
from seqpar.serve.api.state import ApiServer, Key, Server, not_ready
from seqpar.serve.api.videos import add_videos
from seqpar.serve.messages import ServedModel

TEXT = "text/plain; version=0.0.4; charset=utf-8"
PACKAGE, PAGE, PARTS = "seqpar.serve.api", "page.html", re.compile(r"page\.[a-z.]*(?:css|js)")


def create_app(server: ApiServer, keys: KeyFile | None, hosts: frozenset[str]) -> ASGIApp:
    """The application behind its gate. /openapi.json describes it; FastAPI's own pages would load foreign scripts."""
    app = FastAPI(title="seqpar", docs_url=None, redoc_url=None)
    app.state.server = server
    handle_errors(app, Generation.model_fields)
    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_api_route(GENERATIONS, generate, methods=["POST"])
    app.add_api_route(EDITS, edit, methods=["POST"], openapi_extra=EDIT_BODY)
    add_videos(app)
    add_admin(app)
    app.add_api_route("/v1/files/{name}", file, methods=["GET"], name="file")
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", model_of, methods=["GET"])
    app.add_api_route("/v1/jobs", jobs, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", job_of, methods=["GET"])
    app.add_api_route("/v1/jobs/{job}", cancel, methods=["DELETE"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ready", ready, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    return AccessLog(Gate(app, keys, hosts), server.name, server.metrics.answered)


async def page() -> Response:
    """The page for browsers, the same for everyone: it asks for the key itself, and uses the same routes as clients.

    Its policy allows its own script and style, by their hashes, and nothing else: no script that arrives in a prompt or
    a name, no other host, no frame around it.
    """

    def part(name: str) -> str:
        return (files(PACKAGE) / name).read_text(encoding="utf-8")

    text = PARTS.sub(lambda name: part(name[0]), part(PAGE))

    def hash_of(tag: str) -> str:
        (content,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    policy = {
        "default-src": "'none'",
        "script-src": hash_of("script"),
        "style-src": hash_of("style"),
        "img-src": "blob: data:",  # blob: the page's own objects; data: its icon
        "media-src": "blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text cannot become markup by any function of the browser
        "trusted-types": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


async def file(name: str, server: Server, key: Key) -> Response:
    """Download an image that was requested as a link; links expire."""
    response = await server.files.get(key, name)
    if response is None:
        raise refused(404, "unknown_file", "file not found or expired")
    return response


async def models(server: Server, key: Key) -> dict[str, Any]:
    """List the models that requests may name, and tell the name of the client's key."""
    models = {model.name: model for model in server.models}
    others = {name: models[first] for name, first in server.named.items() if first in models}
    data = [_model(model, server, name) for name, model in (models | others).items()]
    return {"object": "list", "data": data, "seqpar": {"key": key if server.args.keys else None}}


async def model_of(model: str, server: Server) -> dict[str, Any]:
    """Describe a loaded model."""
    return _model(found(server, model), server, model)


async def jobs(server: Server, key: Key) -> dict[str, Any]:
    """List the jobs of this key, in order of arrival."""
    return {"object": "list", "data": [record.job for record in await records.of_key(server, key)]}


async def job_of(job: str, server: Server, key: Key) -> dict[str, Any]:
    """Report the progress of a job."""
    return (await records.get(server, key, job)).job


async def cancel(job: str, server: Server, key: Key) -> dict[str, Any]:
    """Cancel a job that waits or runs; one that has ended stays as it is."""
    records.cancel(server, await records.get(server, key, job))
    return (await records.get(server, key, job)).job


async def health() -> dict[str, str]:
    """Report that the API server is alive."""
    return {"status": "ok"}


async def ready(server: Server) -> dict[str, Any]:
    """Report whether the ranks are ready."""
    if server.queue.closed is not None:
        raise ProblemError(server.queue.closed)
    facts = server.facts
    if not server.replica.ready.is_set():
        raise not_ready()
    since_s = int(time.time()) - server.started
    about = {"ranks": facts.ranks, "device": facts.device, "precision": facts.models[0].precision}
    return {"status": "ready", **about, "since_s": since_s}


async def metrics(server: Server) -> Response:
    """Metrics in Prometheus' format."""
    return Response(server.metrics.text(), media_type=TEXT)


def _model(model: ServedModel, server: ApiServer, name: str) -> dict[str, Any]:
    """A model as OpenAI's list has it, with our fields in `seqpar`. alias: whether the command has another name."""
    height, width = model.size
    about: dict[str, Any] = {
        "kind": model.kind,
        "alias": name not in server.args.models,
        "makes": "pictures" if model.video is None else "videos",
        "edits": model.edits,
        "needs_picture": model.needs_picture,
        "size": f"{width}x{height}" if width else "auto",
        "size_unit": model.unit,
        "steps": model.steps,
        "layout": model.layout,
        "sizes": [f"{wide}x{high}" for high, wide in model.sizes],
        "classes": model.classes,
        "loras": model.loras,
        "presets": model.presets,
        "controlnets": model.controlnets,
        "schedulers": model.schedulers,
        "takes": msgspec.to_builtins(model.takes),
        "latent_pixels": model.latent_pixels,
        "precision": model.precision,
        "min_psnr": model.min_psnr,
        "cache": model.cache,
        "loaded": model.loaded,
    }
    if model.video is not None:
        about |= msgspec.structs.asdict(model.video)
    return {"id": name, "object": "model", "created": server.started, "owned_by": "seqpar", "seqpar": about}
