"""Text and image encoders of a pipeline: rank 0 alone holds them, and gives their results to stubs on other ranks.

A stub is of the encoder's class and has its config, dtype and device, so that every pipeline's own code goes on. Its
`forward` and `generate` return what rank 0's return: tensors by a broadcast, and how they lie in an output of
transformers as a message. Caches of generation stay with rank 0; results have None in their place on all ranks.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.loading.checkpoint import SUFFIXES, Checkpoint, check_keys, find_checkpoint, open_checkpoint
from seqpar.loading.errors import context
from seqpar.loading.keys import KeyMap, Source
from seqpar.loading.names import errors_only
from seqpar.loading.parts import parts_of, read_json, transformers_of
from seqpar.loading.reading import Reader, check_finite
from seqpar.loading.shared_encoder import SharedEncoder, failing
from seqpar.mesh.inputs import agree
from seqpar.mesh.mesh import Mesh

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


def collect() -> None:
    """Give memory back that nothing holds any more, that of the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python look for no garbage by itself.

    Loading makes so many objects that it would look several times, each time through all those of torch, diffusers and
    transformers, which takes a fifth of a second.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


NAMES = ("text_encoder", "image_encoder")  # how the names of such parts begin


@dataclass(frozen=True)
class Begun:
    """Encoders that rank 0 reads. kinds: their classes by name. size: bytes that are read.

    ends: on rank 0 alone, what returns each when it has come, until it has. what: begins an error's message.
    """

    kinds: Mapping[str, Any]
    size: int
    ends: dict[str, Callable[[], Any]]
    what: str


def begin_encoders(
    folder: Path, index: Mapping[str, Any], dtype: torch.dtype, mesh: Mesh, reader: Reader, what: str
) -> Begun:
    """Begin to read the encoders of a folder, on rank 0. Every rank must call this at the same time."""
    kinds, ends = mesh.on_all_ranks(lambda: _kinds(folder, index)), dict[str, Callable[[], Any]]()
    agree(mesh, {"the encoders of the folder": [*kinds]})

    def begin() -> int:
        size = 0
        with context(what):
            for name, kind in kinds.items():
                ends[name], own = begin_encoder(kind, folder / name, dtype, reader)
                size += own
        return size

    return Begun(kinds, mesh.on_rank_0(begin, int), ends, what)


def load_encoders(pipeline: Any, folder: Path, begun: Begun, mesh: Mesh) -> dict[str, SharedEncoder]:
    """Return the encoders that rank 0 alone holds, by the names of their parts.

    Those of which the code of the class `pipeline` names layers are left out, after a line that says so. Every rank
    must call this at the same time.
    """
    encoders, likes = _of_rank_0(begun, mesh)

    def configs() -> dict[str, Any]:
        with context(begun.what):
            return {name: kind.config_class.from_pretrained(folder / name) for name, kind in begun.kinds.items()}

    shared = dict[str, SharedEncoder]()
    for name, config in mesh.on_all_ranks(configs).items():
        if layer := layer_named(pipeline, likes[name][1]):
            encoders.pop(name, None)
            if mesh.is_main and mesh.world.size > 1:
                print(f"seqpar: every rank loads {name}, because {pipeline.__name__} reads {layer}", flush=True)
        else:
            shared[name] = SharedEncoder(mesh, name, begun.kinds[name], config, likes[name], encoders.pop(name, None))
    return shared


def _of_rank_0(begun: Begun, mesh: Mesh) -> tuple[dict[str, Any], dict[str, tuple[torch.dtype, list[str]]]]:
    """Return the encoders, on rank 0 alone; and on every rank the dtype of each, and the names of its layers."""
    encoders = dict[str, Any]()

    def load() -> dict[str, tuple[torch.dtype, list[str]]]:
        with context(begun.what):
            while begun.ends:
                name = next(iter(begun.ends))
                encoders[name] = begun.ends.pop(name)()  # what ends it holds its tensors, and goes
        return {name: (each.dtype, [part for part, _ in each.named_children()]) for name, each in encoders.items()}

    likes = mesh.on_rank_0(load, dict[str, tuple[torch.dtype, list[str]]])
    return encoders, likes


def layer_named(pipeline: Any, parts: Sequence[str]) -> str | None:
    """Return a layer of an encoder that the code of a pipeline's class names, or None.

    parts: the names of the layers in an encoder. A stub cannot stand for a layer, as for one with a hook.
    """
    layers = "|".join(map(re.escape, parts))
    code = inspect.getsource(sys.modules[pipeline.__module__])
    match = re.search(rf"\b({'|'.join(NAMES)})(_\d)?\.({layers})\b", code)
    return None if match is None else match[0]


def _kinds(folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of each encoder of transformers that has a folder of its own, without programs beside it."""
    import transformers  # takes seconds, which models without text encoders do not need

    kinds = {
        name: getattr(transformers, kind, None)
        for name, (library, kind) in parts_of(index)
        if library == "transformers"
    }
    return {
        name: kind
        for name, kind in kinds.items()
        if name.startswith(NAMES) and isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if (folder / name).is_dir() and not any((folder / name).glob("*.py"))
    }


def name_encoders(pipe: Any, shared: Mapping[str, Any]) -> None:
    """Let the text encoders of a pipeline that are not shared among ranks say in one message that they fail."""

    def named(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            with failing(name):
                return forward(*args, **kwargs)

        return called

    for name in pipe.components:
        encoder = getattr(pipe, name, None) if name.startswith("text_encoder") and name not in shared else None
        if encoder is not None:
            encoder.forward = named(name, encoder.forward)


def forget_encoders(pipe: Any) -> None:
    """Drop a pipeline's text encoders when a transformer is called first: they are used once, before it.

    The pipeline can make no other picture of a text after that.
    """

    def forget() -> None:
        for name in pipe.components:
            if name.startswith("text_encoder"):
                setattr(pipe, name, None)
        collect()

    at_first_call(pipe, forget)


def at_first_call(pipe: Any, work: Callable[[], object]) -> None:
    """Do something once, when a transformer of a pipeline is called first."""

    def first(*_: object) -> None:
        for handle in handles:
            handle.remove()
        work()

    handles = [module.register_forward_pre_hook(first) for module in transformers_of(pipe).values()]


class _ReachedError(Exception):
    """A pipeline has called a transformer, after its encoders."""


def encode_first(pipe: Any, encoders: Mapping[str, SharedEncoder], encode: Callable[[Any], object], mesh: Mesh) -> None:
    """Call a pipeline up to its first call of a transformer, then put stubs with the results in its encoders' places.

    A transformer may still lack its weights. encode: calls the pipeline. Every rank must call this at the same time.
    """

    def reached(*_: object, **__: object) -> None:
        raise _ReachedError

    transformers = list(transformers_of(pipe).values())
    for module in (part for part in pipe.components.values() if isinstance(part, nn.Module)):
        if not any(x.is_meta for x in module.parameters()):
            module.to(mesh.device)
    for module in transformers:
        module.forward = reached
    for encoder in encoders.values():
        encoder.keep()
    with suppress(_ReachedError):
        encode(pipe)
    for module in transformers:
        del module.forward
    for name, encoder in encoders.items():
        encoder.end()
        setattr(pipe, name, encoder.module)
    collect()
