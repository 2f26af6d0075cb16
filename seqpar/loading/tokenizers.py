"""Checks of tokenizer folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqpar.loading.folder import check_files
from seqpar.loading.parts import part_of


def check_named(folder: Path, index: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a pipeline's model_index.json lacks one of these parts."""
    for name in names:
        if part_of(index, name) is None:
            raise ValueError(f"got pipeline {folder} without {name}, expected one: prompts need it")


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError if this is not the folder of a tokenizer, or if a file in it cannot be read."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"got {folder} without tokenizer_config.json, expected a tokenizer's folder")
    check_files(folder)
