"""What requests are answered from: the parts of the front, the models that are loaded, and the longest deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request

from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.files import KeptFiles
from seqpar.serve.front.folder import JobFolder
from seqpar.serve.front.jobs import Queue
from seqpar.serve.front.metrics import Metrics
from seqpar.serve.front.pictures import Pictures
from seqpar.serve.front.replica import Replica
from seqpar.serve.messages import ServedModel

Purpose = Literal["pictures", "edits", "videos"]
WITHOUT_PICTURE = "which makes nothing without a picture, expected one that makes pictures of texts; send it to edits"
WHY_NOT: dict[Purpose, str] = {
    "pictures": "which makes videos, expected one that makes pictures; ask /v1/videos",
    "edits": "which takes no picture, expected one that does: /v1/models tells which",
    "videos": "which makes pictures, expected one that makes videos: /v1/models tells which",
}


@dataclass(frozen=True)
class Front:
    """What requests are answered from. longest_s: the longest deadline. keep_s: how long files are kept.

    folder: where fronts keep their jobs for each other, if they do.
    """

    queue: Queue
    replica: Replica
    files: KeptFiles
    pictures: Pictures
    metrics: Metrics
    longest_s: float
    longest_video_s: float
    keep_s: float
    show_prompts: bool
    started: int
    folder: JobFolder | None = None


def _front(request: Request) -> Front:
    return request.app.state.front


def _key(request: Request) -> str:
    return request.state.key


Here = Annotated[Front, Depends(_front)]
Key = Annotated[str, Depends(_key)]


def model_for(front: Front, name: str | None, purpose: Purpose) -> ServedModel:
    """Return a model by its name, for None the first one that fits; ProblemError if there is none."""
    if front.queue.closed is not None:
        raise ProblemError(front.queue.closed)
    if front.replica.known is None:
        raise ProblemError(not_ready())
    models = {model.name: model for model in front.replica.known.models}
    if name is not None and name not in models:
        text = f"got a model that is not served, expected one of {', '.join(models)}"
        raise ProblemError(Problem(404, "model_not_found", text, "model"))
    fits = next((model for model in models.values() if _why_not(model, purpose) is None), None)
    model = models[name] if name is not None else fits or next(iter(models.values()))
    reason = _why_not(model, purpose)
    if reason is not None:
        raise ProblemError(Problem(400, "wrong_model", f"got model {model.name}, {reason}", "model"))
    return model


def _why_not(model: ServedModel, purpose: Purpose) -> str | None:
    """Return why a model does not fit a purpose, or None."""
    if (model.video is not None) != (purpose == "videos"):
        return WHY_NOT["pictures" if model.video is not None else "videos"]
    if purpose == "edits" and not model.edits:
        return WHY_NOT["edits"]
    return WITHOUT_PICTURE if purpose == "pictures" and model.needs_picture else None


def check_loras(loras: Sequence[tuple[str, float]], model: ServedModel) -> None:
    """Raise ProblemError for LoRAs that a model does not have, for one named twice, or without its transformer."""
    names = [model.lora(name) for name, _ in loras]
    if None in names or len(set(names)) < len(names):
        expected = f"some of {', '.join(model.loras)}, each once" if model.loras else f"none: {model.name} has none"
        raise ProblemError(Problem(400, "unknown_lora", f"got other LoRAs, expected {expected}", "lora"))


def deadline_of(asked_s: float | None, longest_s: float) -> float:
    """Return the deadline of a request, the longest if it names none; ProblemError for a longer one."""
    if asked_s is not None and asked_s > longest_s:
        text = f"got deadline_s {asked_s:g}, expected at most {longest_s:g}; ask for a shorter one"
        raise ProblemError(Problem(400, "invalid_value", text, "deadline_s"))
    return longest_s if asked_s is None else asked_s


def not_ready() -> Problem:
    """Return what is answered while the ranks load."""
    text = "the ranks load their models and are not ready; ask again later"
    return Problem(503, "not_ready", text, headers={"retry-after": "5"})
