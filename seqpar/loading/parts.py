"""Checks of the parts of a pipeline folder around the model: index, scheduler, decoder, text encoders.

Checked are the numbers that size memory, the names that select code and the fields that this package computes with.
All others are checked by diffusers and transformers, whose errors `seqpar.pipelines` names by the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types
from torch import nn

from seqpar.types.arguments import shown

NAMES = ("transformer", "transformer_2")  # a pipeline's transformers; Wan 2.2 has one for early and one for late steps


def transformers_of(pipe_or_transformer: Any) -> dict[str, nn.Module]:
    """Return the transformers of a pipeline by name, or the transformer itself; ValueError if there is none."""
    if isinstance(pipe_or_transformer, nn.Module):
        return {"transformer": pipe_or_transformer}
    parts = {name: getattr(pipe_or_transformer, name, None) for name in NAMES}
    modules = {name: module for name, module in parts.items() if isinstance(module, nn.Module)}
    if not modules:
        raise ValueError(
            f"got pipe_or_transformer={shown(pipe_or_transformer)} without {' or '.join(NAMES)}, expected a diffusers "
            f"transformer or a pipeline that has one"
        )
    return modules


CONFIG_BYTES = 1 << 22  # that of a published model has some kilobytes, with the labels of its classes a megabyte
INDEX_BYTES = 1 << 24  # of an index of 100,000 tensors

# the name of a file in the same folder, which is no index itself
Beside = Annotated[str, Meta(pattern=r"^(?!\.{0,2}$)[^/\\\x00]{1,255}(?<!\.json)$")]
WeightMap = Annotated[dict[str, Beside], Meta(min_length=1)]


def read_json(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes.

    Raises ValueError if the file is missing, no regular file or too long, or if it holds no JSON object.
    """
    try:
        if not path.is_file():
            raise ValueError("there is no such file" if not path.exists() else "it is no regular file")
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most} bytes")
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"got {path}, expected a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"got {path} holding a {type(value).__name__}, expected a JSON object")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Return key -> file name of a sharded checkpoint's index; `ValueError` if it is none, or names other folders."""
    try:
        return msgspec.convert(read_json(path, INDEX_BYTES).get("weight_map"), WeightMap)
    except msgspec.ValidationError as error:
        expected = "a weight_map of keys to names of weight files beside it"
        raise ValueError(f"got index {path}, expected {expected}: {error}") from error


# far beyond every published model, and small enough that a model of these sizes can be described without memory for it
Layers = Annotated[int, Meta(ge=1, le=4096)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
HeadDim = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Channels = Annotated[int, Meta(ge=1, le=1 << 16)]
Patch = Annotated[int, Meta(ge=1, le=256)]
Side = Annotated[int, Meta(ge=1, le=1024)]  # of the latent that a model was trained on, if nothing else is asked for
Tokens = Annotated[int, Meta(ge=1, le=1 << 16)]
Classes = Annotated[int, Meta(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Meta(gt=0, lt=1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]  # NaN and infinity are outside of every range
Zero = Annotated[float, Meta(ge=0, le=0)]
ZeroOrOne = Annotated[float, Meta(ge=0, le=1, multiple_of=1)]
Yes = Annotated[bool, Meta(extra={"only": True})]
No = Annotated[bool, Meta(extra={"only": False})]


class Schema(msgspec.Struct, frozen=True):
    """The base class of schemas; a field that may be absent has the default None."""


S = TypeVar("S", bound=Schema)


def checked(what: str, config: Mapping[str, Any], schema: type[S]) -> S:
    """Return the fields of a config as an object of the schema.

    what: what has the fields, for messages: "a DiT config", or a file. A null counts as absent. Fields that begin with
    "_" are comments; others that the schema lacks are refused if it forbids them (`forbid_unknown_fields`). Raises
    ValueError, with the field, for a value of another type or out of its range, and for one that is absent and needed.
    """
    fields = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    try:
        read = msgspec.convert(fields, schema, strict=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace("`", "").partition(" - at ")
        if (name := re.search(r"\$\.(\w+)", path)) is None:  # an unknown field, or one that is missing
            raise ValueError(f"got {what}: {text[:200]}") from error
        raise _refusal(what, name[1], fields[name[1]], schema, text.removeprefix("Expected ")) from error
    for name in _few(schema).keys() & fields.keys():
        if fields[name] not in _few(schema)[name]:
            raise _refusal(what, name, fields[name], schema, "")
    return read


def _refusal(what: str, name: str, value: object, schema: type[Schema], expected: str) -> ValueError:
    """Return the error of a field; expected: what msgspec says, for fields that take more than a few values."""
    if name in _few(schema):
        values = " or ".join(map(repr, _few(schema)[name]))
        expected = f"{values}: the other variant is not implemented"
    return ValueError(f"got {what} with {name}={shown(value)}, expected {expected}")


@cache
def _few(schema: type[Schema]) -> dict[str, tuple[Any, ...]]:
    """Return field -> its values, for fields that take only a few; msgspec knows no single truth value."""
    few: dict[str, tuple[Any, ...]] = {}
    for field in msgspec.structs.fields(schema):
        info = types.type_info(field.type)
        for each in info.types if isinstance(info, types.UnionType) else (info,):
            if isinstance(each, types.LiteralType):
                few[field.name] = each.values
            elif isinstance(each, types.Metadata):
                few[field.name] = ((each.extra or {})["only"],)
    return few


INDEX, SCHEDULER = "model_index.json", "scheduler_config.json"
# the largest numbers of configs by words in their names; the first word that fits counts
MOST = (("size", (1 << 31) - 1), ("layer|block|depth|order", 4096), ("timesteps|inference_steps", 100_000))
MOST_OTHERS = (1 << 31) - 1

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Pixels = Annotated[int, Meta(ge=1, le=1 << 17)]  # along a side of a picture


class Labels(Schema, frozen=True):
    """What this package takes from a model_index.json; the other fields name the pipeline's parts or are settings."""

    id2label: Annotated[dict[Annotated[str, Meta(pattern=r"^\d{1,9}$")], str], Meta(max_length=1 << 20)] | None = None


class Autoencoder(Schema, frozen=True):
    """The fields of diffusers' AutoencoderKL that size it or with which pictures are computed here."""

    out_channels: Annotated[int, Meta(ge=3, le=3)] | None = None
    latent_channels: Channels | None = None
    block_out_channels: Annotated[list[Channels], Meta(min_length=1, max_length=8)] | None = None
    layers_per_block: Annotated[int, Meta(ge=1, le=64)] | None = None
    sample_size: Pixels | Annotated[list[Pixels], Meta(min_length=2, max_length=2)] | None = None
    scaling_factor: Positive | None = None
    shift_factor: Number | None = None


def read_pipeline(folder: Path) -> dict[str, Any]:
    """Return the model_index.json of a pipeline's folder.

    Raises ValueError if it names no class of a pipeline, if a part is no [library, class] or [null, null], or if
    id2label is no object of class numbers and names.
    """
    path = folder / INDEX
    index = read_json(path)
    if not isinstance(index.get("_class_name"), str):
        name = shown(index.get("_class_name"))
        raise ValueError(f"got {path} with _class_name={name}, expected the name of a pipeline's class")
    checked(str(path), index, Labels)
    for name, value in index.items():
        if not name.startswith("_") and isinstance(value, list):
            part_of(index, name, path)
    return index


def part_of(index: Mapping[str, Any], name: str, path: object = INDEX) -> tuple[str, str] | None:
    """Return (library, class) of a part that a model_index.json names, or None if the pipeline has no such part.

    path: the index, for the message. Raises ValueError if the field is no part.
    """
    match index.get(name):
        case None | [None, None]:
            return None
        case [str(library), str(kind)] if all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", each) for each in (library, kind)):
            return library, kind
        case value:
            expected = "expected [library, class] or [null, null]"
            raise ValueError(f"got {path} with {name[:60]}={shown(value)}, {expected}")


def parts_of(index: Mapping[str, Any]) -> list[tuple[str, tuple[str, str]]]:
    """Return (name, (library, class)) of each part that a model_index.json names."""
    names = [name for name, value in index.items() if isinstance(value, list) and not name.startswith("_")]
    return [(name, part) for name in names if (part := part_of(index, name)) is not None]


def read_scheduler(folder: Path) -> dict[str, Any]:
    """Return the scheduler's config in a folder; `ValueError` for a field that `check_scheduler` refuses."""
    config = read_json(folder / SCHEDULER)
    check_scheduler(config, str(folder / SCHEDULER))
    return config


def check_scheduler(config: Mapping[str, Any], where: str = "a scheduler config") -> None:
    """Raise ValueError if a scheduler's config would size a table beyond all use, or names no class."""
    check_numbers(config, where)
    if not isinstance(config.get("_class_name", ""), str):
        raise ValueError(f"got {where} with _class_name={shown(config['_class_name'])}, expected a class")


def check_autoencoder(config: Mapping[str, Any], where: object) -> None:
    """Raise ValueError if a field of an AutoencoderKL's config sizes it beyond all use or makes no picture.

    where: its file, for the message.
    """
    fields = checked(str(where), config, Autoencoder)
    check_numbers(config, where)
    if "scaling_factor" in config and fields.scaling_factor is None:  # diffusers would take the null as it is
        raise ValueError(f"got {where} with scaling_factor=None, expected float > 0.0")


def read_encoder(folder: Path) -> dict[str, Any]:
    """Return the config.json of an encoder of transformers; of CLIP's own folder that of the half that reads text.

    Raises ValueError if a number in it sizes something beyond all use.
    """
    config = read_json(folder / "config.json")
    check_numbers(config, folder / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_numbers(config: Mapping[str, Any], where: object) -> None:
    """Raise ValueError if a config has whole numbers that no model has: of layers, of timesteps, or any other."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_numbers(value, where)
        most = next((most for words, most in MOST if re.search(words, key)), MOST_OTHERS)
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int) and abs(number) > most:
                raise ValueError(f"got {where} with {key[:60]}={shown(number)}, expected at most {most}")
