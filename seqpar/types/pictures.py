"""Checks of a request's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from seqpar.types.arguments import MOST_STEPS, check_dtype, check_kind, check_picture, check_whole, shown
from seqpar.types.guidance import Guidance


def check_pictures(name: str, wanted: object, steps: object, guidance: object, size: object, seed: object) -> None:
    """Refuse arguments of pictures that are of other types or out of range. name: of `wanted`, classes or prompts."""
    if isinstance(wanted, (str, Mapping)) or not isinstance(wanted, Iterable):
        raise ValueError(f"got {name}={shown(wanted)}, expected a list, one entry a picture")
    check_picture(size, seed)
    check_whole("steps", steps, 1, MOST_STEPS)
    check_kind("guidance", guidance, Guidance, expected="seqpar.Guidance(scale)")


def check_loading(model: object, dtype: object) -> None:
    """Refuse what no model can be loaded from, or as."""
    check_kind("model", model, str, Path, expected="a name, folder or file of a model")
    check_dtype(dtype)
