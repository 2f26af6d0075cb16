"""Which files a path stands for, recognised by what is in them.

- a diffusers or ppdiffusers pipeline folder (model_index.json), or the folder of one transformer (config.json);
- LLaMA2-Accessory's folder of `consolidated[_ema].XX-of-NN` files, or one of these files;
- UniDiffuser's original folder, or its U-ViT: the U-ViT, caption decoder and autoencoder are known by their keys;
- a transformer in one file, in the keys of its authors, which diffusers converts (`seqpar.loading.single_file`);
- any other file with weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqpar.convert.consolidated import is_part, open_consolidated, parts_in
from seqpar.loading.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from seqpar.loading.parts import read_json
from seqpar.loading.single_file import as_diffusers

PIPELINE, CONFIG = "model_index.json", "config.json"
PARTS = ("transformer", "unet")  # the folder of the model that is sampled; UniDiffuser's is named unet
# keys by which the parts of UniDiffuser's original folder are known, without the prefixes of wrappers
MARKS = {
    "unet": ("patch_embed.proj.weight", "mid_block.attn.qkv.weight"),
    "text_decoder": ("encode_prefix.weight",),
    "vae": ("decoder.conv_in.weight", "post_quant_conv.weight"),
}
NAMES = ("uvit_v0.pth", "uvit_v1.pth", "caption_decoder.pth", "autoencoder_kl.pth")  # as published
LOOSE = (".pth", ".pt", ".safetensors")


@dataclass(frozen=True)
class ModelFiles:
    """What a path stands for.

    parts: name of a part -> its file or folder; a single model is the part "transformer". refused: why each other file
    of UniDiffuser's folder could not be opened; it may be no part, and so matters only if a part is missing.
    """

    kind: str
    parts: Mapping[str, Path] = field(default_factory=dict)
    refused: Sequence[str] = ()


def layout_of(path: Path) -> ModelFiles | None:
    """Return the layout of a file or folder: "pipeline", "model", "consolidated", "unidiffuser" or "file", or None.

    Raises ValueError if two files of UniDiffuser's folder are the same part, if one with a published name cannot be
    opened, or if none that can be opened is a U-ViT.
    """
    if path.is_file():
        return _layout_of_file(path)
    if (path / PIPELINE).is_file():
        return ModelFiles("pipeline", {part.name: part for part in path.iterdir() if (part / CONFIG).is_file()})
    if (path / CONFIG).exists():  # whose reader refuses a pipe
        return ModelFiles("model", {"transformer": path})
    if not path.is_dir():
        return None
    if parts_in(path):
        return ModelFiles("consolidated", {"transformer": path})
    layout = _unidiffuser(path)
    if "unet" not in layout.parts and layout.refused:
        raise ValueError(f"{layout.refused[0]}; expected a U-ViT of UniDiffuser among the other files of {path}")
    return layout if "unet" in layout.parts else None


def _layout_of_file(path: Path) -> ModelFiles:
    """Return the layout of a file; a U-ViT of UniDiffuser has its decoders beside it."""
    if is_part(path):
        return ModelFiles("consolidated", {"transformer": path})
    if path.suffix in LOOSE and _part(open_checkpoint(path).shapes) == "unet":
        return _unidiffuser(path.parent, path)
    return ModelFiles("file", {"transformer": path})


def open_model(path: Path) -> tuple[Checkpoint, Mapping[str, Any] | None]:
    """Open the checkpoint of the model that a path stands for, with its config.json, or None if it has none."""
    if not path.is_dir() and not (path.is_file() and is_part(path)):
        checkpoint = open_checkpoint(path)  # which refuses pipes and devices
        return as_diffusers(checkpoint, path) or (checkpoint, None)
    layout = layout_of(path)
    if layout is None:
        raise ValueError(
            f"got model {path}, which is not a diffusers folder (no {PIPELINE} or {CONFIG}), and has no files of "
            f"Large-DiT (consolidated.00-of-01.pth) or UniDiffuser (uvit_v1.pth)"
        )
    if layout.kind == "consolidated":
        return open_consolidated(path), None
    if layout.kind == "pipeline":
        part = next((layout.parts[name] for name in PARTS if name in layout.parts), path / PARTS[0])
        return open_folder(part)
    if layout.kind == "model":
        return open_folder(path)
    return open_checkpoint(layout.parts["unet"]), None


def pipeline_folder(path: Path) -> Path | None:
    """Return the pipeline folder that a path stands for, or in which it is the transformer's file; None without one."""
    if path.is_file():
        inside = (path.parent / PIPELINE).is_file() and as_diffusers(open_checkpoint(path), path) is not None
        return path.parent if inside else None
    return path if (path / PIPELINE).is_file() else None


def open_folder(folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Open the checkpoint in a folder with a config.json."""
    config = read_json(folder / CONFIG)
    return open_checkpoint(find_checkpoint(folder)), config


def _unidiffuser(folder: Path, unet: Path | None = None) -> ModelFiles:
    """Return the layout of UniDiffuser's original folder with the parts that are there, by the keys in its files.

    unet: the U-ViT that is meant, where the folder has several (v0 and v1).
    """
    parts: dict[str, Path] = {} if unet is None else {"unet": unet}
    refused: list[str] = []
    for file in sorted(path for path in folder.iterdir() if path.suffix in LOOSE and path.is_file()):
        try:
            part = _part(open_checkpoint(file).shapes)
        except ValueError as error:  # a training script leaves other files, such as an optimizer's state
            if unet is None and file.name in NAMES:
                raise
            refused.append(str(error))
            continue
        if part is None or (part == "unet" and unet is not None):
            continue
        if part in parts:
            raise ValueError(f"got {parts[part].name} and {file.name} in {folder}, expected one {part}; name the file")
        parts[part] = file
    return ModelFiles("unidiffuser", parts, refused)


def _part(shapes: Mapping[str, object]) -> str | None:
    """Return the part of UniDiffuser that has these keys, or None."""
    return next((part for part, marks in MARKS.items() if all(mark in shapes for mark in marks)), None)
