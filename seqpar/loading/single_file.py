"""Opens the transformer that a path stands for: in a folder of diffusers, or in one file in the keys of its authors.

Black Forest Labs and ComfyUI publish FLUX.1 as one file. diffusers' converters know how such keys become those of its
classes. They run here on tensors without numbers, which record the operations: a weight is read and converted when it
is asked for. diffusers' `from_single_file` reads and converts all weights in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.families._find import config_of_file
from seqpar.loading.checkpoint import Checkpoint, checkpoint_context, find_checkpoint, open_checkpoint
from seqpar.loading.errors import FAILURES
from seqpar.loading.parts import CONFIG, INDEX, read_json

PARTS = ("transformer", "unet")  # subfolders with the model that is sampled; UniDiffuser's is named unet

PREFIX = "model.diffusion_model."  # before the keys of a transformer that ComfyUI saves, with its other parts or alone
OTHERS = ("vae.", "audio_vae.", "vocoder.", "text_encoders.", "first_stage_model.", "conditioner.", "cond_stage_model.")

SCALES = (".scale_weight", ".weight_scale")  # of a weight of ComfyUI in 8 bits: one number, or one for each row
BESIDE = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")  # for its own arithmetic alone
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


class Later(Tensor):
    """A tensor on the meta device that remembers how it is made."""

    make: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a function of torch returns, whose tensors remember this call."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            like = func(*args, **kwargs)

        def call(index: int | None) -> Tensor:
            result = func(*_numbers(args), **kwargs)
            return result if index is None else result[index]

        if isinstance(like, Tensor):
            return _later(like, lambda: call(None))
        if isinstance(like, (tuple, list)) and like and all(isinstance(each, Tensor) for each in like):
            return type(like)(_later(each, lambda i=i: call(i)) for i, each in enumerate(like))
        return like


def _later(like: Tensor, make: Callable[[], Tensor]) -> Later:
    later = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Later)
    later.make = make
    return later


def _numbers(args: Any) -> Any:
    if isinstance(args, Later):
        return args.make()
    return type(args)(map(_numbers, args)) if type(args) in (tuple, list) else args


def open_model(path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Open the transformer of a path under diffusers' keys, and its config.

    path: a pipeline's folder, the folder of one transformer, or its file. Reads headers, no weights.
    """
    if path.is_file():
        checkpoint = open_checkpoint(path)
        converted = as_diffusers(checkpoint, path)
        if converted is None:
            keys = ", ".join(f"{key:.100}" for key in list(checkpoint.shapes)[:3])
            raise ValueError(
                f"{path} has keys like {keys}, and no config.json of a class that diffusers converts. Put it into the "
                f"folder of its pipeline, or the config.json of its transformer next to it; for DiT, Large-DiT and "
                f"UniDiffuser run seqpar convert {path} FOLDER"
            )
        return converted
    folder = path
    if (path / INDEX).is_file():
        folder = next((path / name for name in PARTS if (path / name / CONFIG).is_file()), path / PARTS[0])
    elif not (path / CONFIG).is_file():
        raise ValueError(f"{path} is not a folder of diffusers: it has no {INDEX} or {CONFIG}")
    config = read_json(folder / CONFIG)
    return open_checkpoint(find_checkpoint(folder)), config


def as_diffusers(checkpoint: Checkpoint, path: Path) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return a file's weights under diffusers' keys, and the config of diffusers' class; None for any other file.

    The config lies in the file's folder or in its folder `transformer`; some families know theirs by the shapes alone.
    Raises ValueError if the file does not fit the class of its config.
    """
    # without the keys of other parts, and without the transformer's prefix
    keys = [key for key in checkpoint.shapes if key.startswith(PREFIX)]
    keys = keys or [key for key in checkpoint.shapes if not key.startswith(OTHERS)]
    source = {key.removeprefix(PREFIX): key for key in keys}
    places = (path.parent / CONFIG, path.parent / "transformer" / CONFIG)
    place = next((place for place in places if place.is_file()), None)
    with checkpoint_context(checkpoint):
        shapes = {key: checkpoint.shapes[own] for key, own in source.items()}
        config = config_of_file(shapes) if place is None else read_json(place)
    if config is None:
        return None
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES  # takes long, and few files need it

    known = SINGLE_FILE_LOADABLE_CLASSES.get(str(config.get("_class_name")))
    if known is None:
        return None
    weights = _converted(checkpoint, source, known["checkpoint_mapping_fn"], config)
    shapes = {key: tuple(later.shape) for key, later in weights.items()}
    dtypes = {key: later.dtype for key, later in weights.items()}
    files = checkpoint.files
    return Checkpoint(checkpoint.name, shapes, lambda key: weights[key].make(), dtypes, files=files), config


def _converted(
    checkpoint: Checkpoint, source: Mapping[str, str], convert: Callable[..., Any], config: Mapping[str, Any]
) -> dict[str, Later]:
    unread: dict[str, Any] = _unread(checkpoint, source)
    kind = config["_class_name"]
    try:
        converted = convert(config=config, checkpoint=unread)
    except FAILURES as error:  # unknown keys
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(
            f"{checkpoint.name}: diffusers' converter for a {kind} does not take these keys ({reason}); if the file is "
            f"diffusers' own, use its folder"
        ) from error
    if converted is not unread and unread:
        unknown = ", ".join(sorted(unread)[:3])
        raise ValueError(f"{checkpoint.name}: wrong keys. Unknown {len(unread)} to a {kind}: {unknown}")
    return {key: later for key, later in converted.items() if later is not None}


def _unread(checkpoint: Checkpoint, source: Mapping[str, str]) -> dict[str, Later]:
    # weights in 8 bits with a scale, as ComfyUI saves them, are read as their products in fp32
    ends = ((key, own, end) for key, own in source.items() for end in SCALES if key.endswith(end))
    scales = {key.removesuffix(end) + ".weight": own for key, own, end in ends}
    left_out, unread = (*SCALES, *BESIDE) if scales else (), dict[str, Later]()
    for key, own in source.items():
        if left_out and key.endswith(left_out):
            continue
        shape, dtype, read = checkpoint.shapes[own], checkpoint.dtypes[own], partial(checkpoint.read, own)
        if (scale := scales.pop(key, None)) is not None:
            sizes = checkpoint.shapes[scale]
            if dtype not in EIGHT or prod(sizes) not in (1, shape[0]):
                raise ValueError(
                    f"{checkpoint.name}: {own} is {dtype} with a scale of shape {sizes}; expected 8 bits with one, "
                    f"or one for each row; load another file of this model".replace("torch.", "")
                )
            dtype, read = torch.float32, partial(_scaled, checkpoint, own, scale)
        unread[key] = _later(torch.empty(shape, dtype=dtype, device="meta"), read)
    if scales:
        raise ValueError(f"{checkpoint.name}: {next(iter(scales.values()))} is a scale without its weight")
    return unread


def _scaled(checkpoint: Checkpoint, weight: str, scale: str) -> Tensor:
    values = checkpoint.read(weight).float()
    return values * checkpoint.read(scale).float().view(-1, *(1 for _ in values.shape[1:]))
