"""Checks of the parts of a pipeline folder around the model: index, scheduler, decoder, text encoders.

Checked are the numbers that size memory, the names that select code and the fields that this package computes with.
All others are checked by diffusers and transformers, whose errors `seqpar.pipelines` names by the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from seqpar.loading.jsons import read_json
from seqpar.loading.schemas import Channels, Number, Schema, checked
from seqpar.types.arguments import shown

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
