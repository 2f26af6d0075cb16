"""Bodies of requests: OpenAI's fields and ours, as JSON or multipart forms. Every number has a bound.

JSON values are not converted ("3" is no number); in forms all fields are texts. Some fields have second names, those of
SGLang and vLLM-Omni. A field of OpenAI whose meaning no image of ours can have is ignored (`Ignored`) where the image
is the same with and without it, and refused where it is not.
"""

from __future__ import annotations

import json
import re
import secrets
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from fastapi import Request
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from starlette.datastructures import UploadFile

from seqpar.serve.api.codec import Format, ImageKind, InputFiles
from seqpar.serve.api.errors import ProblemError, of_validation, refused, short
from seqpar.serve.api.jobs import JobSpec
from seqpar.serve.api.keys import Priority
from seqpar.serve.messages import MOST_STEPS, ImageRequest, ServedModel, VideoFacts, size_of
from seqpar.serve.rules import MOST_SIDE, nearest_frames, pixels_of, step_ratio

MOST_SEED = 2**63 - 1
DATA = re.compile("data:image/(png|jpe?g|webp);base64,")
LEAST_STRENGTH = 0.001  # at least one step of any number of steps
MOST_FRAMES = 4096
MOST_FILES, MOST_FIELDS = 17, 64  # of a form: sixteen images and a mask
Scale = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
LoraName = Annotated[str, Field(min_length=1, max_length=120, description="NAME or NAME@TRANSFORMER.")]
IGNORED = "Accepted and ignored; named in warnings and in the header x-ignored of the answer."
Ignored = Annotated[Any, Field(description=IGNORED)]
NESTED = re.compile(r"(\w{1,40})\[(\w{1,40})\]")  # how OpenAI's clients write an object into a form


def named(*others: str, **about: Any) -> Any:
    """A field with other names besides its own, which comes first."""
    return Field(validation_alias=AliasChoices(*others), **about)


class LoraScale(BaseModel):
    """A LoRA and its scale; `transformer` selects one of several transformers."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[LoraName, named("name", "lora_name", "adapter")]
    scale: Annotated[float, named("scale", "lora_scale", ge=-100, le=100, allow_inf_nan=False)] = 1.0
    transformer: Annotated[str | None, Field(max_length=100, description="As NAME@TRANSFORMER.")] = None
    path: Annotated[Any, named("path", "lora_path", "local_path", "lora_local_path", description=IGNORED)] = None
    int_id: Annotated[Any, named("int_id", "lora_int_id", description=IGNORED)] = None


def as_list(value: Any) -> Any:
    """The LoRAs of a request's field as a list, which may be invalid: a name or an object is one."""
    if isinstance(value, str) and value[:1] in ("{", "["):  # of a form
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict):
        return [value]
    return [{"name": value}] if isinstance(value, str) else value


def _random(seed: Any) -> Any:
    return None if seed in (-1, "-1") else seed


def _number(value: Any) -> Any:
    """The number in a text: OpenAI's clients send seconds as text."""
    try:
        return float(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else value
    except (ValueError, OverflowError):
        return value


def _url_in(value: Any) -> Any:
    """The URL of OpenAI's reference to an image, {"image_url": URL}."""
    match value:
        case {"image_url": str(url), **others} if not others:
            return url
        case _:
            return value


def _data(value: str) -> str:
    if not DATA.match(value):
        raise ValueError("must be a data URL of a PNG, JPEG or WebP in base64; no other URL is read")
    return value


def file_in(name: str, url: str | None) -> list[bytes]:
    """The file of a data URL, if there is one; ProblemError if it is not base64. name: of its field."""
    try:
        return [] if url is None else [b64decode(url.partition(",")[2], validate=True)]
    except ValueError as error:
        raise refused(400, "invalid_picture", f"{name} is not base64: {error}", name) from error


DataUrl = Annotated[
    str, BeforeValidator(_url_in), AfterValidator(_data), Field(description="A data URL: data:image/png;base64,...")
]


def _parsed(value: Any) -> Any:
    """The JSON in a text of a form."""
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    except (ValueError, RecursionError):
        return value


class CommonFields(BaseModel):
    """Fields of requests for images and videos. `null` is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    prompt: Annotated[str, Field(min_length=1, max_length=32000)]
    model: Annotated[str | None, Field(description="One of /v1/models; if left out, the first that fits.")] = None
    size: Annotated[str, Field(description='"WIDTHxHEIGHT" in pixels, or "auto" for the size of the model.')] = "auto"
    width: Annotated[int | None, Field(ge=1, le=MOST_SIDE, description="With height, in place of size.")] = None
    height: Annotated[int | None, Field(ge=1, le=MOST_SIDE)] = None
    seed: Annotated[
        int | None,
        Field(ge=0, le=MOST_SEED, description="Of image i: seed + i; -1 is as none, a random one."),
        BeforeValidator(_random),  # last: a bound cannot be checked for None
    ] = None
    steps: Annotated[int | None, named("steps", "num_inference_steps", ge=1, le=MOST_STEPS)] = None
    guidance: Annotated[Scale | None, named("guidance", "guidance_scale")] = None
    true_guidance: Annotated[Scale | None, named("true_guidance", "true_cfg_scale")] = None
    negative_prompt: Annotated[str | None, Field(max_length=32000)] = None
    scheduler: Annotated[str | None, Field(pattern="^[A-Za-z0-9_]{1,64}$")] = None
    preset: Annotated[
        str | None,
        Field(max_length=64, description="How a distilled model is sampled; one of the model's (/v1/models)."),
    ] = None
    lora: Annotated[
        list[LoraScale],
        Field(max_length=8, description="A LoRA of the model (/v1/models), or several, each with its scale."),
        BeforeValidator(as_list, json_schema_input_type=LoraName | LoraScale | list[LoraScale]),
    ] = []
    sigmas: Annotated[
        list[Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]],
        Field(max_length=1000, description="Of flow matching, one of each step, falling, without the 0 at the end."),
        BeforeValidator(_parsed),
    ] = []
    deadline_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="Seconds from arrival.")] = None
    priority: Priority = "normal"
    user: Ignored = None
    safety_identifier: Ignored = None
    generator_device: Ignored = None

    _sent: frozenset[str] = frozenset()  # the names of fields in the body

    @model_validator(mode="wrap")
    @classmethod
    def _without_null(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        fields = {name: field for name, field in cast("dict[Any, Any]", value).items() if field is not None}
        body = handler(fields)
        body._sent = frozenset(fields)
        return body

    @field_validator("size")
    @classmethod
    def _is_size(cls, value: str) -> str:
        size = size_of(value)
        if value != "auto" and (size is None or max(size) > MOST_SIDE):
            raise ValueError(f'must be "auto" or "WIDTHxHEIGHT" of 1 to {MOST_SIDE} pixels each, such as "1024x768"')
        return value

    @model_validator(mode="after")
    def _joins_sides(self) -> Self:
        if (self.width, self.height) != (None, None):
            if None in (self.width, self.height) or self.size != "auto":
                raise ValueError("width and height come together, and in place of size")
            self.size = f"{self.width}x{self.height}"
        return self

    @property
    def aliases(self) -> dict[str, str]:
        """Fields -> the names that the client gave them, where they are others."""
        fields = type(self).model_fields.items()
        aliases = {name: field.validation_alias for name, field in fields}
        others = {name: alias.choices for name, alias in aliases.items() if isinstance(alias, AliasChoices)}
        return {name: str(x) for name, choices in others.items() for x in choices if x in self._sent and x != name}

    @property
    def sources(self) -> dict[str, str]:
        """Fields of an `ImageRequest` -> those of the client from which they are computed."""
        pairs = (("size", "width"), ("frames", "seconds"))
        return {name: other for name, other in pairs if other in self._sent}

    @property
    def ignored(self) -> list[str]:
        """The fields of the request without a meaning here."""

        def of(body: BaseModel) -> list[str]:
            fields = type(body).model_fields.items()
            return [name for name, field in fields if field.description == IGNORED and name in body.model_fields_set]

        return [*of(self), *dict.fromkeys(f"lora.{name}" for lora in self.lora for name in of(lora))]

    @property
    def headers(self) -> dict[str, str]:
        """The header of the answer that names ignored fields, if there are some."""
        return {"x-ignored": ", ".join(self.ignored)} if self.ignored else {}

    @property
    def warnings(self) -> dict[str, list[str]]:
        """The field of the answer that names them."""
        return {"warnings": [f"{name} is ignored" for name in self.ignored]} if self.ignored else {}

    @property
    def loras(self) -> tuple[tuple[str, float], ...]:
        return tuple((f"{x.name}@{x.transformer}" if x.transformer else x.name, x.scale) for x in self.lora)

    def spec(self, model: ServedModel, deadline_s: float, inputs: InputFiles, **fields: Any) -> JobSpec:
        """The job of a checked request. fields: more of the first image's request. ProblemError for unfit frames."""
        request = ImageRequest(
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
            mask=inputs.mask,
            control=inputs.control_image,
            pixels=inputs.path,
            preset=self.preset,
            sigmas=tuple(self.sigmas),
            latents=inputs.latents,
            **fields,
        )
        own = model.steps if self.steps is None else self.steps
        steps = len(self.sigmas) or model.presets.get(self.preset or "", own)
        work, ratio = _work(request, model), step_ratio(model, request)
        job = request, self.priority, steps, model.step_s, deadline_s, inputs.file
        return JobSpec(*job, work=work, ratio=ratio)


class Generation(CommonFields):
    """A request for images."""

    n: Annotated[int, Field(ge=1, le=10, description="Number of images.")] = 1
    response_format: Annotated[
        Literal["b64_json", "url", "file"] | None,
        Field(description="b64_json if left out, url if the model is named dall-e...; file: the image without JSON."),
    ] = None
    output_format: Annotated[ImageKind, BeforeValidator(lambda kind: "jpeg" if kind == "jpg" else kind)] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100, description="Quality of JPEG and WebP.")] = 100
    stream: Annotated[bool, Field(description="Answer with events as they happen.")] = False
    partial_images: Annotated[int, Field(ge=0, le=3, description="Previews of each image in the stream.")] = 0
    controlnet: Annotated[
        str | None, Field(min_length=1, max_length=100, description="A ControlNet of the model (/v1/models).")
    ] = None
    control_scale: Annotated[float | None, Field(ge=0, le=10, allow_inf_nan=False)] = None
    control_image: DataUrl | None = None
    stream_steps: Annotated[bool, Field(description="Stream the place in the queue and each step.")] = False
    quality: Ignored = None
    style: Ignored = None
    background: Ignored = None
    moderation: Ignored = None
    complexity: Ignored = None
    svg: Ignored = None  # with the two below of output formats that are refused
    frame_count: Ignored = None
    frame_duration_ms: Ignored = None

    @field_validator("response_format")
    @classmethod
    def _is_one_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "file" and info.data.get("n") != 1:
            raise ValueError("is one image; request n 1, or b64_json")
        return value

    @field_validator("stream")
    @classmethod
    def _holds_images(cls, value: bool, info: ValidationInfo) -> bool:
        form = info.data.get("response_format")
        if value and form not in (None, "b64_json"):
            raise ValueError(f"is not supported with response_format {form!r}; streams hold images as b64_json")
        return value

    @field_validator("background")
    @classmethod
    def _is_opaque(cls, value: Any) -> Any:
        if value == "transparent":
            raise ValueError("is not supported, because models make opaque images; use auto or opaque")
        return value

    @field_validator("partial_images", "stream_steps")
    @classmethod
    def _is_streamed(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("stream"):
            raise ValueError("requires stream true")
        return value

    @model_validator(mode="after")
    def _seeds_fit(self) -> Generation:
        if (self.seed or 0) + self.n - 1 > MOST_SEED:
            raise ValueError(f"seed + n - 1 must be at most {MOST_SEED}; use a smaller seed")
        return self

    def spec(self, model: ServedModel, deadline_s: float, inputs: InputFiles, **fields: Any) -> JobSpec:
        fields |= {"controlnet": self.controlnet, "control_scale": self.control_scale}
        fields["returns"] = "latents" if self.output_format == "latents" else "file"
        spec = super().spec(model, deadline_s, inputs, partial_images=self.partial_images, **fields)
        return replace(spec, count=self.n, how=Format(self.output_format, self.output_compression))


class Edit(Generation):
    """A request for edited images; their files are other parts of the form."""

    strength: Annotated[
        float | None, Field(ge=LEAST_STRENGTH, le=1, description="Image-to-image strength; 1 ignores the image.")
    ] = None
    steps: Annotated[
        int | None,
        named("steps", "num_inference_steps", ge=0, le=MOST_STEPS, description="0: latents are only decoded."),
    ] = None
    input_fidelity: Ignored = None

    def spec(self, model: ServedModel, deadline_s: float, inputs: InputFiles, **fields: Any) -> JobSpec:
        return super().spec(model, deadline_s, inputs, strength=self.strength)


class VideoRequest(CommonFields):
    """A request for a video; the image that it begins with is a data URL, or a file of a form."""

    image: DataUrl | None = None
    input_reference: DataUrl | None = None

    seconds: Annotated[
        float | None,
        BeforeValidator(_number),
        Field(gt=0, le=3600, allow_inf_nan=False, description="Rounded to a number of frames that the model makes."),
    ] = None
    frames: Annotated[
        int | None, named("frames", "num_frames", ge=1, le=MOST_FRAMES, description="In place of seconds.")
    ] = None
    fps: Annotated[int | None, Field(ge=1, le=1000, description="Frames per second.")] = None
    n: Annotated[int, named("n", "num_outputs_per_prompt", ge=1, le=1, description="Number of videos.")] = 1
    output_format: Literal["mp4", "safetensors"] = "mp4"

    @property
    def files(self) -> list[bytes]:
        """The files in data URLs; ProblemError for one that is not base64."""
        return [*file_in("image", self.image), *file_in("input_reference", self.input_reference)]

    def spec(self, model: ServedModel, deadline_s: float, inputs: InputFiles, **fields: Any) -> JobSpec:
        facts = model.video
        assert facts is not None  # the model was found by its purpose
        returns = "file" if self.output_format == "mp4" else "arrays"
        spec = super().spec(model, deadline_s, inputs, frames=self._frames(facts), fps=self.fps, returns=returns)
        return replace(spec, fps=float(self.fps or facts.fps))

    def _frames(self, facts: VideoFacts) -> int:
        if self.seconds is None:
            return facts.frames if self.frames is None else self.frames
        if self.frames is not None:
            raise refused(400, "invalid_value", "seconds and frames exclude each other; leave one out", "seconds")
        fps = self.fps or facts.fps
        frames = nearest_frames(round(self.seconds * fps), facts.frames, facts.unit)
        if frames > MOST_FRAMES:
            text = f"seconds {self.seconds:g} at {fps:g} frames per second exceed {MOST_FRAMES} frames"
            raise refused(400, "invalid_value", f"{text}; request a shorter video", "seconds")
        return frames


def _work(request: ImageRequest, model: ServedModel) -> float:
    """The pixels of all frames of a request, relative to the model's own size and frames."""
    own = pixels_of(model, ImageRequest("", model.name, ""))
    return pixels_of(model, request) / own if own else 1.0


# forms ---------------------------------------------------------------------------------------------------------------

FieldsT = TypeVar("FieldsT", bound=CommonFields)


@dataclass(frozen=True)
class FormBody:
    """A multipart body. Files have no names here: what a client calls them means nothing."""

    texts: dict[str, Any]
    files: dict[str, list[bytes]]

    def fields(self, kind: type[FieldsT]) -> FieldsT:
        """The texts as fields of a request, "3" as a number; ProblemError for invalid ones."""
        try:
            return kind.model_validate(self.texts, strict=False)
        except ValidationError as error:
            raise ProblemError(of_validation(error.errors(), kind.model_fields)) from error

    def one_of(self, name: str) -> list[bytes]:
        """Take the file of a field, if there is one, out of the others; ProblemError for several."""
        files = [*self.files.pop(name, ())]
        if len(files) > 1:
            raise refused(400, "invalid_value", f"got {len(files)} files {name}; send a single file", name)
        return files

    def files_of(self, *names: str) -> list[bytes]:
        """The files of some fields, in order; ProblemError for files of other fields."""
        other = next((name for name in self.files if name not in names), None)
        if other is not None:
            text = f"unknown files {short(other)!r}; send files as {' or '.join(names)}"
            raise refused(400, "unknown_field", text, short(other))
        return [file for name in names for file in self.files.get(name, ())]


async def read_form(request: Request) -> FormBody:
    """Read a multipart body, whose length the gate has bounded; ProblemError for a repeated text."""
    texts, files = dict[str, Any](), dict[str, list[bytes]]()
    async with request.form(max_files=MOST_FILES, max_fields=MOST_FIELDS) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.setdefault(name, []).append(await value.read())
            elif name in texts:
                raise refused(400, "invalid_value", f"{short(name)!r} is given twice; send it once", short(name))
            elif (nested := NESTED.fullmatch(name)) and isinstance(texts.setdefault(nested[1], {}), dict):
                texts[nested[1]][nested[2]] = value
            else:
                texts[name] = value
    return FormBody(texts, files)


def form_schema(kind: type[CommonFields], files: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a form in /openapi.json. files: name -> what is said of it."""
    schema = kind.model_json_schema()
    schema["properties"] |= {name: {"type": "string", "format": "binary", **about} for name, about in files.items()}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
