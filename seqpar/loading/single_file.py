"""Opens the transformer that a path stands for: in a folder of diffusers, or in one file in the keys of its authors.

Black Forest Labs and ComfyUI publish FLUX.1 as one file. diffusers' converters know how such keys become those of its
classes. They run here on tensors without numbers, which record the operations: a weight is read and converted when it
is asked for. diffusers' `from_single_file` reads and converts all weights in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.loading.checkpoint import Checkpoint, checkpoint_context, find_checkpoint, open_checkpoint
from seqpar.loading.keys import count_layers, shape_of
from seqpar.loading.parts import CONFIG, INDEX, read_json

PARTS = ("transformer", "unet")  # subfolders with the model that is sampled; UniDiffuser's is named unet

PREFIX = "model.diffusion_model."  # before the keys of a transformer that ComfyUI saves, with its other parts or alone
OTHERS = ("vae.", "audio_vae.", "vocoder.", "text_encoders.", "first_stage_model.", "conditioner.", "cond_stage_model.")
FLUX = ("double_blocks.0.img_attn.norm.query_norm.scale", "single_blocks.0.linear1.weight", "vector_in.in_layer.weight")
FAILURES = (LookupError, RuntimeError, TypeError, ValueError, AttributeError)  # of a converter with unknown keys


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
    """Return the arguments of a call with the tensors that were remembered in them."""
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

    The config lies in the file's folder, or in its folder `transformer`; that of a FLUX.1 follows from its shapes.
    Raises ValueError if the file does not fit the class of its config.
    """
    source, folder = _transformer(checkpoint), config_folder(path)
    if folder is None and not all(key in source for key in FLUX):
        return None
    with checkpoint_context(checkpoint):
        config = flux_config(source, checkpoint.shapes) if folder is None else read_json(folder / "config.json")
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
    """Return what a converter of diffusers makes of the keys of a file; ValueError for keys that it does not know."""
    unread: dict[str, Any] = {key: _read_later(checkpoint, own) for key, own in source.items()}
    kind = config["_class_name"]
    try:
        converted = convert(config=config, checkpoint=unread)
    except FAILURES as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(
            f"{checkpoint.name}: diffusers' converter for a {kind} does not take these keys ({reason}); if the file is "
            f"diffusers' own, use its folder"
        ) from error
    if converted is not unread and unread:
        unknown = ", ".join(sorted(unread)[:3])
        raise ValueError(f"{checkpoint.name}: wrong keys. Unknown {len(unread)} to a {kind}: {unknown}")
    return {key: later for key, later in converted.items() if later is not None}


def _transformer(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the keys of the transformer in a file, without their prefix -> the file's own keys."""
    keys = [key for key in checkpoint.shapes if key.startswith(PREFIX)] or [
        key for key in checkpoint.shapes if not key.startswith(OTHERS)
    ]
    return {key.removeprefix(PREFIX): key for key in keys}


def _read_later(checkpoint: Checkpoint, key: str) -> Later:
    like = torch.empty(checkpoint.shapes[key], dtype=checkpoint.dtypes[key], device="meta")
    return _later(like, lambda: checkpoint.read(key))


def config_folder(path: Path) -> Path | None:
    """Return the folder of the config.json that describes the transformer in a file, or None."""
    places = (path.parent, path.parent / "transformer")
    return next((folder for folder in places if (folder / "config.json").is_file()), None)


def flux_config(source: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the config.json of a FLUX.1 with these shapes; ValueError if they do not determine it."""
    shapes = {key: shapes[own] for key, own in source.items()}
    width, inputs = shape_of(shapes, "img_in.weight", 2)
    (head_dim,) = shape_of(shapes, FLUX[0], 1)
    if head_dim != 128 or width % head_dim:
        raise ValueError(
            f"a FLUX.1 of width {width} with heads {head_dim} wide; released ones have 128. Put the config.json of "
            f"diffusers' transformer next to the file"
        )
    return {
        "_class_name": "FluxTransformer2DModel",
        "num_layers": count_layers(shapes, "double_blocks"),
        "num_single_layers": count_layers(shapes, "single_blocks"),
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "joint_attention_dim": shape_of(shapes, "txt_in.weight", 2)[1],
        "pooled_projection_dim": shape_of(shapes, FLUX[2], 2)[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": [16, 56, 56],
        "in_channels": inputs,
        "out_channels": shape_of(shapes, "final_layer.linear.weight", 2)[0],
        "patch_size": 1,
    }
