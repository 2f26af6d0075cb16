"""Configs of a pipeline's folder: its index, and the parts around the transformer.

Checked are the fields with which this package computes and the names that select code. diffusers and transformers check
the others; `seqpar.loading.errors.context` adds the file to their errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from torch import nn

from seqpar.loading.schemas import Channels, Number, Positive, Schema, checked
from seqpar.types.arguments import shown

# a pipeline's transformers; Wan 2.2 has one for early and one for late steps, MiniMax-H3 one for references, and
# Ideogram 4 one for the unconditional branch
UNCONDITIONAL = "unconditional_transformer"
NAMES = ("transformer", "transformer_2", "transformer_ref", UNCONDITIONAL)
INDEX, CONFIG, SCHEDULER = "model_index.json", "config.json", "scheduler_config.json"
MODULAR = "modular_model_index.json"
PLACES = "_places"  # in the index of a modular pipeline: name of a part -> where it lies, as `ComponentSpec` says it
MOST_BYTES = 1 << 27  # of a JSON file; tokenizers of published models have up to 40 MB


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


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ValueError if the file is missing, too long, or holds no JSON object."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"got {path}, expected a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Return key -> file name of a sharded checkpoint's index; ValueError if it is none, or names other folders."""
    names = read_json(path).get("weight_map")
    beside = re.compile(r"(?!\.{1,2}$)[^/\\\x00]+(?<!\.json)")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) and beside.fullmatch(name) for name in names.values())
    ):
        raise ValueError(f"got index {path}, expected a weight_map of keys to names of weight files beside it")
    return names


class Labels(Schema, frozen=True):
    """The field of a model_index.json that this package reads beside the names of parts."""

    id2label: Annotated[dict[Annotated[str, Meta(pattern=r"^\d{1,9}$")], str], Meta(max_length=1 << 20)] | None = None


class Autoencoder(Schema, frozen=True):
    """The fields of diffusers' AutoencoderKL with which this package computes."""

    out_channels: Annotated[int, Meta(ge=3, le=3)] | None = None
    latent_channels: Channels | None = None
    block_out_channels: Annotated[list[Channels], Meta(min_length=1, max_length=8)] | None = None
    scaling_factor: Positive | None = None
    shift_factor: Number | None = None


def index_of(folder: Path) -> Path | None:
    """Return the file that makes a folder a pipeline's, or None."""
    return next((file for name in (INDEX, MODULAR) if (file := folder / name).is_file()), None)


def read_pipeline(folder: Path) -> dict[str, Any]:
    """Return the model_index.json of a pipeline's folder; a modular_model_index.json in the same form, with `PLACES`.

    Raises ValueError if it names no class of a pipeline, if a part is no [library, class] or [null, null], or if
    id2label is no object of class numbers and names.
    """
    path = index_of(folder) or folder / INDEX
    index = read_json(path) if path.name == INDEX else _plain(read_json(path))
    if not isinstance(index.get("_class_name"), str):
        name = shown(index.get("_class_name"))
        raise ValueError(f"got {path} with _class_name={name}, expected the name of a pipeline's class")
    checked(str(path), index, Labels)
    for name, value in index.items():
        if not name.startswith("_") and _may_be_part(value):
            part_of(index, name, path)
    return index


def _plain(index: Mapping[str, Any]) -> dict[str, Any]:
    # a part is [library, class, where it lies]; library and class are null if it was never loaded
    plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in index.items()}
    places = plain[PLACES] = dict[str, Any]()
    for name, value in index.items():
        match value:
            case [library, kind, {"type_hint": hint, **place}] if not name.startswith("_"):
                plain[name] = hint if kind is None else [library, kind]
                places[name] = place
            case _:
                pass
    return plain


def part_of(index: Mapping[str, Any], name: str, path: object = INDEX) -> tuple[str, str] | None:
    """Return (library, class) of a part that a model_index.json names, or None if the pipeline has no such part.

    path: the index, for the message. Raises ValueError if the field is no part.
    """
    match index.get(name):
        case None | [None, None]:
            return None
        case [str(library), str(kind)] if all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", word) for word in (library, kind)):
            return library, kind
        case value:
            expected = "expected [library, class] or [null, null]"
            raise ValueError(f"got {path} with {name[:60]}={shown(value)}, {expected}")


def _may_be_part(value: object) -> bool:
    # a list of numbers is a setting
    return isinstance(value, list) and (not value or not all(type(x) is int for x in value))


def parts_of(index: Mapping[str, Any]) -> list[tuple[str, tuple[str, str]]]:
    """Return name and (library, class) of each part that a model_index.json names, in its order."""
    names = [name for name, value in index.items() if not name.startswith("_") and _may_be_part(value)]
    return [(name, part) for name in names if (part := part_of(index, name)) is not None]


def read_scheduler(folder: Path) -> dict[str, Any]:
    config = read_json(folder / SCHEDULER)
    check_scheduler(config, str(folder / SCHEDULER))
    return config


def check_scheduler(config: Mapping[str, Any], where: str = "a scheduler config") -> None:
    """Raise ValueError if a scheduler's config names no class."""
    if not isinstance(config.get("_class_name", ""), str):
        raise ValueError(f"got {where} with _class_name={shown(config['_class_name'])}, expected a class")


def check_autoencoder(config: Mapping[str, Any], where: object) -> None:
    """Raise ValueError for a field of an AutoencoderKL's config with which no image can be computed."""
    fields = checked(str(where), config, Autoencoder)
    if "scaling_factor" in config and fields.scaling_factor is None:  # diffusers would take the null as it is
        raise ValueError(f"got {where} with scaling_factor=None, expected float > 0.0")
