"""Models that are loaded and unloaded at run time: by keys with admin=true, and with --swap by requests."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from seqpar.serve.api import log
from seqpar.serve.api.errors import NO_RETRY, Problem, ProblemError, refused
from seqpar.serve.api.gate import ADMIN_MODELS
from seqpar.serve.api.replica import RanksEndedError
from seqpar.serve.api.state import ApiServer, Key, Server, not_ready
from seqpar.serve.messages import Change, Failed, ServedModel

Names = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=100)]


class ModelChange(BaseModel):
    """Models to unload, and models to load then; all of it is done, or nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    load: Names = []
    unload: Names = []

    @model_validator(mode="after")
    def _changes_something(self) -> ModelChange:
        if not (self.load or self.unload) or {*self.load} & {*self.unload}:
            raise ValueError("load or unload must name models, and no model twice")
        return self


def add_admin(app: FastAPI) -> None:
    app.add_api_route(ADMIN_MODELS, known, methods=["GET"])
    app.add_api_route(ADMIN_MODELS, changed, methods=["POST"])


async def known(server: Server, key: Key) -> dict[str, Any]:
    """List all models that the server was started with, loaded or not."""
    _check_admin(server, key)
    return _listed(server)


async def changed(body: ModelChange, request: Request, server: Server, key: Key) -> dict[str, Any]:
    """Unload and load models when the running image is made; the answer comes when that is done."""
    _check_admin(server, key)
    load, unload = (tuple(server.named.get(name, name) for name in names) for names in (body.load, body.unload))
    for name in (*load, *unload):
        if server.replica.model(name) is None:
            names = ", ".join(model.name for model in server.facts.models)
            raise refused(404, "model_not_found", f"model not found; use one of {names}", "model")
    log.event("change of models", request.state.id, key=key, load=load, unload=unload)
    begun = time.monotonic()
    async with server.replica.turn:
        if not server.replica.ready.is_set():
            raise not_ready()
        try:
            failed = await change(server, Change(f"{request.state.id}/change/0", load, unload))
        except RanksEndedError as error:
            text = (
                "the ranks exited while the models changed; they restart with those before, and the log has the reason"
            )
            raise refused(503, "ranks_ended", text, x_should_retry="false") from error
    if failed is not None:
        status, code = (409, "invalid_value") if failed.why == "mistake" else (503, "failure")
        raise refused(status, code, f"{failed.text}; the models before are loaded", x_should_retry="false")
    return {**_listed(server), "seconds": time.monotonic() - begun}


async def change(server: ApiServer, order: Change) -> Failed | None:
    """Change the models on the ranks, which are ready, by who has the turn; return why they are still those before."""
    new = [name for name in order.load if (model := server.replica.model(name)) is not None and not model.loaded]
    failed = await server.replica.change(order)
    job = order.id.partition("/")[0]
    for name in new:
        model = server.replica.model(name)
        if failed is None or failed.why == "failure":
            server.metrics.loaded(name, None if failed or model is None else model.load_s)
    if failed is not None:
        log.event("models not changed", job, level=40, load=order.load, unload=order.unload, reason=failed.text)
    else:
        log.event("models changed", job, loaded=[x.name for x in server.facts.models if x.loaded])
    return failed


def not_loaded(server: ApiServer, model: ServedModel) -> ProblemError:
    """The error of a request for a model that is known and not loaded."""
    names = ", ".join(other.name for other in server.facts.models if other.loaded)
    text = f"model {model.name} is not loaded; use {names or 'it later'}, or ask the operator to load it"
    return ProblemError(Problem(409, "model_not_loaded", text, "model", NO_RETRY))


def _check_admin(server: ApiServer, key: str) -> None:
    if not server.terms(key).admin:
        raise refused(403, "forbidden", "only an API key with admin=true in --keys may see and change all models")


def _listed(server: ApiServer) -> dict[str, Any]:
    models = [
        {"id": x.name, "object": "model", "loaded": x.loaded, "predicted_bytes": x.memory, "load_s": x.load_s}
        for x in server.facts.models
    ]
    return {"object": "list", "data": models}
