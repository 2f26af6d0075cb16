"""The body of a request for pictures, as OpenAI's with fields of ours, and the answers about models, jobs and pictures.

Every number has a bound, and nothing is converted: "3" is no number here.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from seqpar.serve.front.jobs import Priority, Queue, ServedJob, Wanted
from seqpar.serve.front.pictures import NO_IMAGES, Format, InputImages, Kind
from seqpar.serve.messages import ImageRequest, ServedModel, size_of

# fields of OpenAI that mean nothing here
IGNORED = ("user", "quality", "style", "background", "moderation", "input_fidelity")
MOST_SIDE = 8192  # pixels; a message holds a picture of this width and height
MOST_SEED = 2**63 - 1
LEAST_STRENGTH = 0.001  # which makes a step of any number of them
Scale = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
LoraName = Annotated[str, Field(min_length=1, max_length=120, description="NAME or NAME@TRANSFORMER.")]
Nothing = Annotated[Any, Field(description="Accepted and ignored; named in the header x-ignored of the answer.")]


class LoraScale(BaseModel):
    """A LoRA, the factor by which its change of the weights is multiplied, and which of several transformers has it."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: LoraName
    scale: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)] = 1.0
    transformer: Annotated[str | None, Field(max_length=100, description="As NAME@TRANSFORMER.")] = None


def _named(value: Any) -> Any:
    """Take a name alone for a list of one LoRA."""
    return [{"name": value}] if isinstance(value, str) else value


class CommonFields(BaseModel):
    """What requests for pictures and videos have in common. `null` is as good as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    prompt: Annotated[str, Field(min_length=1, max_length=32000)]
    model: Annotated[str | None, Field(description="One of /v1/models; the first if left out.")] = None
    size: Annotated[str, Field(description='"WIDTHxHEIGHT" in pixels, or "auto" for the size of the model.')] = "auto"
    seed: Annotated[int | None, Field(ge=0, le=MOST_SEED, description="Of picture i: seed + i.")] = None
    steps: Annotated[int | None, Field(ge=1, le=1000)] = None
    guidance: Scale | None = None
    true_guidance: Scale | None = None
    negative_prompt: Annotated[str | None, Field(max_length=32000)] = None
    scheduler: Annotated[str | None, Field(pattern="^[A-Za-z0-9_]{1,64}$")] = None
    lora: Annotated[
        list[LoraScale],
        Field(max_length=8, description="A LoRA of the model (/v1/models), or several, each with its scale."),
        BeforeValidator(_named, json_schema_input_type=LoraName | list[LoraScale]),
    ] = []
    deadline_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="Seconds from arrival.")] = None
    priority: Priority = "normal"
    user: Nothing = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[Any, Any]", value)
        return {key: each for key, each in fields.items() if each is not None}

    @field_validator("size")
    @classmethod
    def _is_size(cls, value: str) -> str:
        size = size_of(value)
        if value != "auto" and (size is None or max(size) > MOST_SIDE):
            raise ValueError(f'expected "auto" or "WIDTHxHEIGHT" of 1 to {MOST_SIDE} pixels each, as "1024x768"')
        return value

    @field_validator("prompt", "negative_prompt", "model")
    @classmethod
    def _is_text(cls, value: str | None) -> str | None:
        try:
            (value or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError("expected a text without halves of surrogate pairs") from error
        return value

    @property
    def ignored(self) -> list[str]:
        """Return the fields of the request that mean nothing here."""
        return [name for name in IGNORED if name in self.model_fields_set]

    @property
    def loras(self) -> tuple[tuple[str, float], ...]:
        """Return the names of the LoRAs, with their scales."""
        return tuple((f"{x.name}@{x.transformer}" if x.transformer else x.name, x.scale) for x in self.lora)

    def order(self, model: ServedModel, inputs: InputImages = NO_IMAGES) -> ImageRequest:
        """Return the order of a model's first picture, or of its video, without an id."""
        return ImageRequest(
            "",
            model.name,
            self.prompt,
            secrets.randbelow(2**32) if self.seed is None else self.seed,
            size_of(self.size),
            self.steps,
            self.guidance,
            self.true_guidance,
            self.negative_prompt,
            self.scheduler,
            loras=tuple((model.lora(name) or name, scale) for name, scale in self.loras),
            images=inputs.images,
            pixels=inputs.path,
        )


class Generation(CommonFields):
    """A request for pictures."""

    n: Annotated[int, Field(ge=1, le=10, description="Number of pictures.")] = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Kind = "png"
    output_compression: Annotated[int, Field(ge=0, le=100, description="Quality of JPEG and WebP.")] = 100
    stream: Annotated[bool, Field(description="Answer with events as they happen.")] = False
    partial_images: Annotated[int, Field(ge=0, le=3, description="Partial pictures of each picture in the stream.")] = 0
    stream_steps: Annotated[bool, Field(description="Tell of the queue and of each step in the stream.")] = False
    quality: Nothing = None
    style: Nothing = None
    background: Nothing = None
    moderation: Nothing = None

    @field_validator("stream")
    @classmethod
    def _holds_pictures(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("response_format") == "url":
            raise ValueError("expected False with response_format 'url'; a stream holds pictures as b64_json")
        return value

    @field_validator("partial_images", "stream_steps")
    @classmethod
    def _is_streamed(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("stream"):
            raise ValueError(f"expected {type(value)()} without a stream; add stream true")
        return value

    @model_validator(mode="after")
    def _seeds_fit(self) -> Generation:
        if (self.seed or 0) + self.n - 1 > MOST_SEED:
            raise ValueError(f"expected a seed of at most {MOST_SEED} for the last of {self.n} pictures")
        return self

    def wanted(self, model: ServedModel, deadline_s: float, inputs: InputImages = NO_IMAGES) -> Wanted:
        """Return what the request asks of a model, with a checked deadline. inputs: pictures that it begins with."""
        order = msgspec.structs.replace(self.order(model, inputs), partial_images=self.partial_images)
        how = Format(self.output_format, self.output_compression)
        steps = self.steps or model.steps
        return Wanted(order, self.n, how, self.priority, steps, model.step_s, deadline_s, pixels=inputs.file)


class Edit(Generation):
    """The fields of a request for edited pictures beside its files."""

    strength: Annotated[
        float | None, Field(ge=LEAST_STRENGTH, le=1, description="How far a picture is changed if it is drawn anew.")
    ] = None
    input_fidelity: Nothing = None

    def wanted(self, model: ServedModel, deadline_s: float, inputs: InputImages = NO_IMAGES) -> Wanted:
        """Return what the request asks of a model; see `Generation.wanted`."""
        wanted = super().wanted(model, deadline_s, inputs)
        return replace(wanted, order=msgspec.structs.replace(wanted.order, strength=self.strength))


def pictures(job: ServedJob, links: Sequence[str] | None) -> dict[str, Any]:
    """Return the answer with the pictures of a job that has ended well. links: where they are, else they are inside."""
    seed, count = job.wanted.order.seed, job.wanted.count
    height, width = job.size or (0, 0)
    told = (
        [{"url": link} for link in links]
        if links is not None
        else [{"b64_json": base64.b64encode(job.files[index]).decode()} for index in range(count)]
    )
    return {
        "created": int(job.ended or job.arrived),
        "data": [{**each, "seed": seed + index} for index, each in enumerate(told)],
        "output_format": job.wanted.how.kind,
        "size": f"{width}x{height}",
        "usage": usage(),
        "seqpar": {"id": job.id, "seconds": job.parts_s, "queue_s": (job.started or job.arrived) - job.arrived},
    }


def usage() -> dict[str, Any]:
    """Return OpenAI's count of tokens, which are not charged for here."""
    details = {"image_tokens": 0, "text_tokens": 0}
    counts = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    return {**counts, "input_tokens_details": details, "output_tokens_details": details}


def of_job(job: ServedJob, queue: Queue) -> dict[str, Any]:
    """Return what is known of a job. step: of the steps of the picture that runs. Times are Unix seconds."""
    return {
        "id": job.id,
        "object": "job",
        "state": job.state,
        "model": job.wanted.order.model,
        "priority": job.wanted.priority,
        "pictures": job.ordered,
        "of_pictures": job.wanted.count,
        "position": queue.ahead(job),
        "step": job.step,
        "steps": job.wanted.steps,
        "estimated_s": queue.estimate_s(job),
        "arrived": job.arrived,
        "started": job.started,
        "ended": job.ended,
        "error": None if job.problem is None else {"code": job.problem.code, "message": job.problem.text},
    }


def of_model(model: ServedModel, created: int) -> dict[str, Any]:
    """Return a model as OpenAI's list has it, with what is known of it here."""
    height, width = model.size
    about: dict[str, Any] = {"kind": model.kind, "makes": "pictures" if model.video is None else "videos"}
    about |= {"edits": model.edits, "needs_picture": model.needs_picture}
    about |= {"size": f"{width}x{height}" if width else "auto", "steps": model.steps, "layout": model.layout}
    about |= {"sizes": [f"{wide}x{high}" for high, wide in model.sizes], "classes": model.classes, "loras": model.loras}
    if model.video is not None:
        about |= msgspec.structs.asdict(model.video)
    return {"id": model.name, "object": "model", "created": created, "owned_by": "seqpar", "seqpar": about}
