"""Reads text and image encoders of transformers as fast as other weights.

When it wins: where an encoder's files are safetensors in the dtype that is asked for. transformers copies tensor after
tensor out of mapped files, at a tenth of the rate at which `seqpar.loading.reading` reads them; it gets the tensors on
the device, and its own code gives them their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from seqpar.loading.checkpoint import SUFFIXES, Checkpoint, check_keys, find_checkpoint, open_checkpoint
from seqpar.loading.hub import errors_only
from seqpar.loading.jsons import read_json
from seqpar.loading.keys import KeyMap, Source
from seqpar.loading.reading import Reader, check_finite

STEMS = ("model", "pytorch_model")  # of the names of transformers' weight files
FILES = ("model.safetensors", "model.safetensors.index.json")  # transformers reads others, and chooses among several


def begin_encoder(kind: Any, folder: Path, dtype: torch.dtype, reader: Reader) -> tuple[Callable[[], Any], int]:
    """Begin to read an encoder; return what ends it, and the bytes that the reader was asked for.

    What ends it returns what `kind.from_pretrained(folder, dtype=dtype, device_map=device)` does, with the same values.
    kind: a class of transformers. It raises ValueError if weights are not finite.
    """
    checkpoint, device = _readable(folder, dtype), {"": reader.device}
    if checkpoint is None:  # the host never holds it whole
        return lambda: load_encoder(kind, folder, dtype, device_map=device), 0
    keys = KeyMap({name: Source((name,)) for name in checkpoint.shapes})
    like = {
        name: torch.empty(shape, dtype=checkpoint.dtypes[name], device="meta")
        for name, shape in checkpoint.shapes.items()
    }
    found = reader.begin(checkpoint, keys, list(like), like)

    def whole() -> Any:
        config = kind.config_class.from_pretrained(folder)
        with _no_warmup():
            options = {"config": config, "state_dict": found.result(), "dtype": dtype, "device_map": device}
            encoder = _complete(kind, None, checkpoint.name, options)
        encoder.name_or_path = encoder.config.name_or_path = str(folder)
        if encoder.can_generate() and (folder / "generation_config.json").is_file():
            encoder.generation_config = type(encoder.generation_config).from_pretrained(folder)
        return encoder

    return whole, sum(each.nbytes for each in like.values())


def load_encoder(kind: Any, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Return an encoder that transformers reads: whole, finite, of files that did not change meanwhile."""
    checkpoint = open_encoder(folder)
    encoder = _complete(kind, folder, checkpoint.name, {"dtype": dtype, **options})
    checkpoint.check_unchanged()
    check_finite(checkpoint.name, encoder.state_dict())
    return encoder


def _complete(kind: Any, folder: Path | None, name: str, options: Mapping[str, Any]) -> Any:
    """Return what `kind.from_pretrained` does; ValueError for missing weights, to which it gives random values."""
    from transformers.utils import logging

    with errors_only(logging):
        encoder, info = kind.from_pretrained(folder, **options, output_loading_info=True)
    check_keys(name, info["missing_keys"], ())
    return encoder


def open_encoder(folder: Path) -> Checkpoint:
    """Open the weights in the folder of an encoder of transformers."""
    stems = [stem for stem in STEMS if any((folder / (stem + suffix)).is_file() for suffix in SUFFIXES)]
    return open_checkpoint(find_checkpoint(folder, (stems or STEMS)[0]))


@contextmanager
def _no_warmup() -> Iterator[None]:
    """Let transformers take no memory for an encoder's tensors, which have theirs: it would take as much again."""
    from transformers import modeling_utils

    own = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = own


def _readable(folder: Path, dtype: torch.dtype) -> Checkpoint | None:
    """Return the files of an encoder, or None where transformers does more than to give tensors their places."""
    config = read_json(folder / "config.json")
    if "quantization_config" in config or (folder / "adapter_config.json").exists():
        return None
    files = [folder / name for name in FILES if (folder / name).is_file()]
    if len(files) != 1:
        return None
    checkpoint = open_checkpoint(files[0])
    numbers = {kept for kept in checkpoint.dtypes.values() if kept.is_floating_point}
    return checkpoint if numbers <= {dtype} else None
