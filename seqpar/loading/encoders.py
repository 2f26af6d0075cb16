"""Text and image encoders of a pipeline: rank 0 alone holds them and sends their results to stubs on other ranks.

A stub is of the encoder's class and has its config, dtype and device, so the pipeline's own code runs unchanged
(`seqpar.loading.shared_encoder`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.loading.checkpoint import SUFFIXES, Checkpoint, Fitted, check_keys, find_checkpoint, open_checkpoint
from seqpar.loading.errors import context
from seqpar.loading.names import errors_only
from seqpar.loading.parts import transformers_of
from seqpar.loading.reading import Reader, check_finite
from seqpar.loading.shared_encoder import INNER, SharedEncoder, failing
from seqpar.mesh.inputs import agree
from seqpar.mesh.mesh import Mesh
from seqpar.types.keys import KeyMap, TensorSource

STEMS = ("model", "pytorch_model")  # of the names of transformers' weight files
NAMES = ("text_encoder", "image_encoder", "prompt_upsampler", "prompt_enhancer")  # how names of encoders begin


def begin_encoder(
    kind: Any, folder: Path, checkpoint: Checkpoint, dtype: torch.dtype, reader: Reader
) -> tuple[Callable[[], Any], int]:
    """Begin to read an encoder of transformers; return a function that finishes it, and the bytes asked of the reader.

    It is what `kind.from_pretrained(folder, dtype=dtype, device_map=device)` returns, bit for bit; ValueError for
    weights that are not finite.
    """
    device = {"": reader.device}
    floating = {stored for stored in checkpoint.dtypes.values() if stored.is_floating_point}
    if not Path(checkpoint.name).name.startswith("model.safetensors") or not floating <= {dtype}:
        # transformers converts these, and the host never holds them whole
        return lambda: load_encoder(kind, folder, dtype, device_map=device), 0
    keys = KeyMap({name: TensorSource((name,)) for name in checkpoint.shapes})
    like = {
        name: torch.empty(shape, dtype=checkpoint.dtypes[name], device="meta")
        for name, shape in checkpoint.shapes.items()
    }
    tensors = reader.begin(checkpoint, keys, list(like), like)

    def finish() -> Any:
        config = kind.config_class.from_pretrained(folder)
        with _no_warmup():
            options = {"config": config, "state_dict": tensors.result(), "dtype": dtype, "device_map": device}
            encoder = _complete(kind, None, checkpoint.name, options)
        encoder.name_or_path = encoder.config.name_or_path = str(folder)
        if encoder.can_generate() and (folder / "generation_config.json").is_file():
            encoder.generation_config = type(encoder.generation_config).from_pretrained(folder)
        return encoder

    return finish, sum(tensor.nbytes for tensor in like.values())


def load_encoder(kind: Any, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Return an encoder that transformers reads; ValueError for missing or infinite weights, and for changed files."""
    checkpoint = open_encoder(folder)
    encoder = _complete(kind, folder, checkpoint.name, {"dtype": dtype, **options})
    checkpoint.check_unchanged()
    check_finite(checkpoint.name, encoder.state_dict())
    return encoder


def _complete(kind: Any, folder: Path | None, name: str, options: Mapping[str, Any]) -> Any:
    # transformers gives missing weights random values and only warns
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
    # transformers would allocate memory for all tensors, which are in memory already
    from transformers import modeling_utils

    original = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = original


def collect() -> None:
    """Free memory that nothing holds any more, also on the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable automatic garbage collection: loading makes so many objects that it would run several times, for 0.2 s
    each.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def begin_encoders(
    fitted: Mapping[str, Fitted], dtype: torch.dtype, mesh: Mesh, reader: Reader, fails: str
) -> tuple[Callable[[], dict[str, SharedEncoder]] | None, int]:
    """Begin to read the encoders among a pipeline's parts, on rank 0 alone. Collective: call on all ranks.

    Returns a collective function that finishes loading and returns them by the names of their parts (None where there
    are none), and the bytes that rank 0 reads. fails: how an error's message begins.
    """

    def known() -> dict[str, Fitted]:
        encoders = {name: part for name, part in fitted.items() if name.startswith(NAMES) and part.model is None}
        if not encoders:
            return {}
        from transformers import PreTrainedModel  # takes seconds, which models without text encoders do not need

        own = {name: part for name, part in encoders.items() if issubclass(part.kind, PreTrainedModel)}
        return {name: part for name, part in own.items() if not any(part.path.glob("*.py"))}  # else it may run programs

    encoders, pending = mesh.on_all_ranks(known), dict[str, Callable[[], Any]]()
    agree(mesh, {"the encoders of the folder": [*encoders]})

    def begin() -> int:
        size = 0
        with context(fails):
            for name, part in encoders.items():
                pending[name], count = begin_encoder(part.kind, part.path, part.checkpoint, dtype, reader)
                size += count
        return size

    def finish() -> dict[str, SharedEncoder]:
        loaded = dict[str, Any]()

        def load() -> dict[str, tuple[torch.dtype, list[str]]]:
            with context(fails):
                while pending:
                    name = next(iter(pending))
                    loaded[name] = pending.pop(name)()  # the function holds the tensors, and is dropped
            children = {name: dict(encoder.named_children()) for name, encoder in loaded.items()}
            inner = {name: parts[INNER].named_children() if INNER in parts else () for name, parts in children.items()}
            layers = {name: [*children[name], *(f"{INNER}.{part}" for part, _ in inner[name])] for name in loaded}
            return {name: (encoder.dtype, layers[name]) for name, encoder in loaded.items()}

        def configs() -> dict[str, Any]:
            with context(fails):
                return {name: part.kind.config_class.from_pretrained(part.path) for name, part in encoders.items()}

        likes = mesh.on_rank_0(load, dict[str, tuple[torch.dtype, list[str]]])
        return {
            name: SharedEncoder(mesh, name, encoders[name].kind, config, likes[name], loaded.pop(name, None))
            for name, config in mesh.on_all_ranks(configs).items()
        }

    return finish if encoders else None, mesh.on_rank_0(begin, int)


def name_encoders(pipe: Any, shared: Collection[str]) -> None:
    """Add the part's name to errors of text encoders that are not shared among ranks."""

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
    """Drop a pipeline's text encoders when a transformer is first called; it can encode no other prompts then."""

    def forget() -> None:
        for name in pipe.components:
            if name.startswith("text_encoder"):
                setattr(pipe, name, None)
        collect()

    at_first_call(pipe, forget)


def at_first_call(pipe: Any, work: Callable[[], object]) -> None:
    """Run `work` once, when a transformer of a pipeline is first called."""

    def first(*_: object) -> None:
        for handle in handles:
            handle.remove()
        work()

    handles = [module.register_forward_pre_hook(first) for module in transformers_of(pipe).values()]


class _ReachedError(BaseException):
    """A pipeline has called a transformer, after its encoders. Modular pipelines print other exceptions."""


def encode_first(
    pipe: Any, encoders: Mapping[str, SharedEncoder], calls: Sequence[Callable[[Any], object]], mesh: Mesh
) -> None:
    """Call a pipeline up to its first call of a transformer, then replace its encoders by stubs with their results.

    A transformer may still lack its weights. calls: each calls the pipeline. Collective: call on all ranks.
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
    for call in calls:
        with suppress(_ReachedError):
            call(pipe)
    for module in transformers:
        del module.forward
    for name, encoder in encoders.items():
        encoder.end()
        setattr(pipe, name, encoder.module)
    collect()
