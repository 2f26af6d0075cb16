"""What HTTP requests are answered from: the parts of the server, the loaded models, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request

from seqpar.serve.api.codec import Codec
from seqpar.serve.api.errors import ProblemError, refused
from seqpar.serve.api.files import JobFolder, MemoryStore
from seqpar.serve.api.jobs import Queue
from seqpar.serve.api.replica import Replica
from seqpar.serve.api.telemetry import Metrics
from seqpar.serve.messages import Ready, ServedModel

Purpose = Literal["images", "edits", "videos"]


@dataclass(frozen=True)
class ApiServer:
    """The parts of a server. name: with which ids of its jobs begin. longest_s: the longest deadline."""

    name: str
    queue: Queue
    replica: Replica
    files: MemoryStore | JobFolder
    codec: Codec
    metrics: Metrics
    longest_s: float
    longest_video_s: float
    keep_s: float
    show_prompts: bool
    started: int

    @property
    def folder(self) -> JobFolder | None:
        """The folder with records of ended jobs, if there is one."""
        return self.files if isinstance(self.files, JobFolder) else None

    @property
    def facts(self) -> Ready:
        """The loaded models and their ranks; ProblemError while they load."""
        if self.replica.facts is None:
            raise not_ready()
        return self.replica.facts


def _server(request: Request) -> ApiServer:
    return request.app.state.server


def _key(request: Request) -> str:
    return request.state.key


Server = Annotated[ApiServer, Depends(_server)]
Key = Annotated[str, Depends(_key)]


def model_for(server: ApiServer, name: str | None, purpose: Purpose) -> ServedModel:
    """A model by its name, for None the first one that fits; ProblemError if there is none."""
    if server.queue.closed is not None:
        raise ProblemError(server.queue.closed)
    models = {model.name: model for model in server.facts.models}
    if name is not None and name not in models:
        raise refused(404, "model_not_found", f"model not found; use one of {', '.join(models)}", "model")
    fitting = next((model for model in models.values() if _why_not(model, purpose) is None), None)
    model = models[name] if name is not None else fitting or next(iter(models.values()))
    if (reason := _why_not(model, purpose)) is not None:
        raise refused(400, "wrong_model", f"model {model.name} {reason}", "model")
    return model


def _why_not(model: ServedModel, purpose: Purpose) -> str | None:
    """Why a model does not fit a purpose, or None."""
    if purpose == "videos":
        return None if model.video is not None else "generates images; /v1/models lists models that generate videos"
    if model.video is not None:
        return "generates videos; use /v1/videos"
    if purpose == "edits" and not model.edits:
        return "takes no images; /v1/models lists models with edits"
    return "requires an image; use /v1/images/edits" if purpose == "images" and model.needs_picture else None


def check_loras(loras: Sequence[tuple[str, float]], model: ServedModel) -> None:
    """Raise ProblemError for unknown LoRAs, one named twice, or an ambiguous transformer."""
    names = [model.lora(name) for name, _ in loras]
    if None in names or len(set(names)) < len(names):
        available = f"use some of {', '.join(model.loras)}, each once" if model.loras else f"{model.name} has none"
        raise refused(400, "unknown_lora", f"unknown or repeated lora; {available}", "lora")


def deadline_of(requested_s: float | None, longest_s: float) -> float:
    """The deadline of a request, the longest by default; ProblemError for a longer one."""
    if requested_s is not None and requested_s > longest_s:
        raise refused(
            400, "invalid_value", f"got deadline_s {requested_s:g}, expected at most {longest_s:g}", "deadline_s"
        )
    return longest_s if requested_s is None else requested_s


def not_ready() -> ProblemError:
    """The error while the ranks load."""
    return refused(503, "not_ready", "the models are loading; retry later", retry_after="5")
