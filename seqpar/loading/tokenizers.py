"""Checks of tokenizer folders, before transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from seqpar.loading.folder import TOKENIZER_BYTES, check_files
from seqpar.loading.jsons import read_json
from seqpar.loading.parts import part_of
from seqpar.types.arguments import shown

CONFIG, WHOLE, VOCABULARIES = "tokenizer_config.json", "tokenizer.json", ("vocab.json", "added_tokens.json")
MOST_TOKENS = 1 << 26  # of a text; pipelines pad texts to it, at 6 bytes a token
NO_LIMIT = 1e20  # transformers takes a larger model_max_length for none
IDS = 1 << 32


def check_named(folder: Path, index: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if a pipeline's model_index.json lacks one of these parts."""
    for name in names:
        if part_of(index, name) is None:
            raise ValueError(f"got pipeline {folder} without {name}, expected one: prompts need it")


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError if this is not the folder of a tokenizer, or if a file in it cannot be read or used."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"got {folder} without {CONFIG}, expected a tokenizer's folder")
    check_files(folder)
    most = read_json(folder / CONFIG, TOKENIZER_BYTES).get("model_max_length")
    number = isinstance(most, (int, float)) and not isinstance(most, bool)
    if most is not None and not (number and (1 <= most <= MOST_TOKENS or most > NO_LIMIT)):
        expected = f"1 to {MOST_TOKENS} tokens, or 1e30 for no limit"
        raise ValueError(f"got {folder / CONFIG} with model_max_length={shown(most)}, expected {expected}")
    for file in (folder / name for name in VOCABULARIES if (folder / name).is_file()):
        for token, place in read_json(file, TOKENIZER_BYTES).items():
            if type(place) is not int or not 0 <= place < IDS:
                raise ValueError(f"got {file} with token {token[:60]!a}={shown(place)}, expected a number below 2^32")
    if (folder / WHOLE).exists():
        _check_whole(folder / WHOLE)


def _check_whole(file: Path) -> None:
    if not file.is_file() or file.stat().st_size > TOKENIZER_BYTES:
        raise ValueError(f"got {file}, expected a regular file of at most {TOKENIZER_BYTES} bytes")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # the library has no class of its own for a file that it does not understand
            raise
        raise ValueError(f"got {file}, which is no tokenizer: {error}") from error
