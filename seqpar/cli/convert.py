"""`seqpar convert`: any published checkpoint as a folder of safetensors files, which diffusers loads where it can."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from seqpar.cli.args import ConvertArgs
from seqpar.cli.job import DTYPES
from seqpar.convert.export import folder_config, known_to_diffusers, tensors_of, write_folder
from seqpar.loading.checkpoint import Checkpoint, open_checkpoint
from seqpar.loading.folder import check_single
from seqpar.loading.layout import CONFIG, PARTS, PIPELINE, ModelFiles, layout_of
from seqpar.loading.names import resolve
from seqpar.loading.parts import read_json
from seqpar.loading.single_file import as_diffusers
from seqpar.loading.vae import decoder_tensors
from seqpar.loop.blueprint import Blueprint, locate


def run_convert(args: ConvertArgs) -> None:
    """Check, convert into a folder beside the target, and rename it, so that it appears whole or not at all."""
    if args.target.exists():
        raise ValueError(f"got target {args.target}, which exists, expected a new folder; remove it or name another")
    path = resolve(args.source)
    if path is None:
        raise ValueError(f"got {args.source}, a preset with random weights, expected a checkpoint to convert")
    layout = layout_of(path)
    if layout is None:
        raise ValueError(f"got {args.source}, expected a file or folder of a model to convert")
    single = check_single(path) if path.is_file() and as_diffusers(open_checkpoint(path), path) else None
    blueprint = None if single else locate(path, args.heads)
    if blueprint is not None:
        folder_config(blueprint)  # raises for a model that needs no conversion
    unfinished = args.target.with_name(args.target.name + ".part")
    unfinished.mkdir(parents=True)
    try:
        if blueprint is not None:
            lines = _write(unfinished, path, layout, blueprint, args.dtype)
        else:
            assert single is not None
            unfinished.rmdir()
            lines = [_write_single(unfinished, *single, DTYPES.get(args.dtype))]
        for line in lines:
            print(line, flush=True)
        unfinished.rename(args.target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{args.target}: written", flush=True)


def _write(folder: Path, path: Path, layout: ModelFiles, blueprint: Blueprint, dtype: str) -> list[str]:
    """Write all parts; return a line about each."""
    if layout.kind not in ("pipeline", "unidiffuser"):
        shutil.rmtree(folder)
        return [_write_model(folder, blueprint, dtype)]
    part = next(name for name in PARTS if name in layout.parts)
    lines = [_write_model(folder / part, blueprint, dtype)]
    for name, place in layout.parts.items():
        if name == "vae":
            if place.is_dir():
                _check_inside(path, place / CONFIG)
            config, tensors = decoder_tensors(place)
            cast = ((key, tensor.to(DTYPES.get(dtype, tensor.dtype))) for key, tensor in tensors)
            lines.append(f"vae: {write_folder(folder / 'vae', config, cast)} bytes")
        elif name != part and place.is_dir() and not any(place.glob("*.pdparams")):
            _copy(path, place, folder / name)
        elif name != part:
            lines.append(f"{name}: not converted")
    if layout.kind == "pipeline":
        _copy_json(path, folder)
    return [*lines, *(f"not converted: {reason}" for reason in layout.refused)]


def _write_single(folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype | None) -> str:
    """Write the folder of a transformer whose file diffusers converts; return a line about it."""
    read = ((key, checkpoint.tensor(key)) for key in checkpoint.shapes)
    size = write_folder(folder, config, ((key, tensor.to(dtype or tensor.dtype)) for key, tensor in read))
    return f"{config['_class_name']}: {size} bytes"


def _write_model(folder: Path, blueprint: Blueprint, dtype: str) -> str:
    """Write the model's folder; return a line about it, which says what computes it how."""
    config = folder_config(blueprint)[1]
    size = write_folder(folder, config, tensors_of(blueprint, DTYPES.get(dtype)))
    kind = config["_class_name"]
    if not hasattr(diffusers, kind):
        return f"{kind}: {size} bytes; diffusers has no such class, seqpar loads the folder"
    if known_to_diffusers(config) != config:
        what = "timestep frequencies" + ", the table of positions" * bool(config.get("pos_stored"))
        other = f"diffusers' arithmetic differs from the original's ({what}), seqpar keeps the original's"
        return f"{kind}: {size} bytes; {other}"
    return f"{kind}: {size} bytes"


def _copy_json(path: Path, folder: Path) -> None:
    """Copy the index, with the parts that diffusers has as diffusers', and the folders of configs alone."""
    _check_inside(path, path / PIPELINE)
    index = read_json(path / PIPELINE)
    for name, place in index.items():
        if isinstance(place, list) and place[:1] == ["ppdiffusers"] and hasattr(diffusers, str(place[1])):
            index[name] = ["diffusers", place[1]]
    if (path / PARTS[0] / CONFIG).is_file() and read_json(path / PARTS[0] / CONFIG).get(
        "_class_name"
    ) == "Transformer2DModel":
        index[PARTS[0]] = ["diffusers", "DiTTransformer2DModel"]
    index = {name: value for name, value in index.items() if name != "_ppdiffusers_version"}
    (folder / PIPELINE).write_text(json.dumps(index, indent=2))
    for place in path.iterdir():
        if place.is_dir() and not (folder / place.name).exists():
            _copy(path, place, folder / place.name)


def _copy(source: Path, place: Path, target: Path) -> None:
    """Copy a folder of the source without Paddle's files; `ValueError` if a link in it leads out of the source."""
    for file in (place, *place.rglob("*")):
        _check_inside(source, file)
        if file.is_symlink() and not file.is_file():  # linked folders could hold themselves, or links of their own
            raise ValueError(f"got {file}, a link to {os.readlink(file)}, expected a link to a file; remove the link")
        if not (file.is_file() or file.is_dir()):
            raise ValueError(f"got {file}, expected files and folders alone; remove it")
    shutil.copytree(place, target, ignore=shutil.ignore_patterns("*.pdparams"))


def _check_inside(source: Path, file: Path) -> None:
    """Raise ValueError if a link leads out of the source: what is copied could be a private file of the user.

    Files of a hub's snapshot are links to the blobs of the same repository in the cache, which may be copied.
    """
    root, leads = source.resolve(), Path(os.path.realpath(file))  # without an error for links in a circle
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not leads.is_relative_to(root) and not (leads.is_relative_to(blobs) and leads.is_file()):
        raise ValueError(f"got {file}, a link to {leads}, expected files of {source} alone; remove the link")
