"""`seqpar convert`: a checkpoint in its authors' format becomes a folder of safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.convert import consolidated
from seqpar.convert.export import OURS, tensors_of, write_folder
from seqpar.convert.formats import is_uvit
from seqpar.convert.originals import is_autoencoder, open_autoencoder, open_file, open_transformer
from seqpar.families._find import stored_in_8_bits
from seqpar.kernels.weight8 import Weight8
from seqpar.loading.checkpoint import Checkpoint
from seqpar.loading.folder import QUANTIZATION, check_single, parts_of_folder
from seqpar.loading.parts import CONFIG, INDEX, NAMES, index_of
from seqpar.loading.scaled import MARK, SCALE, STANDS_FOR
from seqpar.loading.single_file import as_diffusers
from seqpar.loop.models.dit import LEARNED
from seqpar.loop.models.large_dit import CLASS
from seqpar.pipelines.unidiffuser_parts import DEFAULT, PREFIX
from seqpar.transformer.calibration import Precision

# the text encoder of UniDiffuser: its repository under openai/ on the hub, and the files of that
CLIP = "clip-vit-large-patch14"
ENCODER = ("config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json")
LOOSE = (".pth", ".pt", ".ckpt", ".safetensors")
UNIDIFFUSER = {
    "_class_name": "UniDiffuserPipeline",
    "unet": ["unidiffuser", "UniDiffuserModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "clip_tokenizer": ["transformers", "CLIPTokenizer"],
    "text_decoder": ["unidiffuser", "UniDiffuserTextDecoder"],
    "scheduler": ["diffusers", DEFAULT["_class_name"]],
}


@dataclass(frozen=True)
class Part:
    """A model to write. folder: its place in the target, "" for the target itself. note: printed next to its size."""

    folder: str
    config: Mapping[str, Any]
    tensors: Iterable[tuple[str, Tensor]]
    note: str = ""


def convert(
    source: Path,
    target: Path,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> None:
    """Convert a file or folder into a new folder, which appears whole or not at all; print what was written.

    heads: the number of attention heads, where the source does not state it. dtype: None keeps the source's. precision:
    "fp8" copies a folder of diffusers with its transformers' weights in 8 bits (`seqpar.loading.scaled`). Raises
    ValueError before anything is written if the source is no checkpoint of a format that this reads.
    """
    _check_new(target)
    if not source.exists():
        raise ValueError(f"{source} not found")
    if precision is not None:
        _convert_to_8_bits(source, target, dtype)
        return
    if index_of(source) is not None or (source / "config.json").is_file():
        raise ValueError(f"{source} is a folder of diffusers; seqpar loads it as it is")
    files = {} if consolidated.parts_of(source) else _unidiffuser(source)
    parts = list(_unidiffuser_parts(files)) if len(files) > 1 else [_single(files.get("unet", source), heads)]
    with _becoming(target) as unfinished:
        for part in parts:
            tensors = ((key, tensor.to(dtype or tensor.dtype)) for key, tensor in part.tensors)
            size = write_folder(unfinished / part.folder, part.config, tensors)
            print(f"{part.config['_class_name']}: {size} bytes{part.note and '; '}{part.note}", flush=True)
        if len(files) > 1:
            # the index and the scheduler, and CLIP, which the authors do not publish again
            (unfinished / "model_index.json").write_text(json.dumps(UNIDIFFUSER, indent=2))
            (unfinished / "scheduler").mkdir()
            (unfinished / "scheduler" / "scheduler_config.json").write_text(json.dumps(DEFAULT, indent=2))
            for folder, patterns in (("text_encoder", ENCODER), ("clip_tokenizer", TOKENIZER)):
                (unfinished / folder).mkdir()
                for file in (file for pattern in patterns for file in (files["unet"].parent / CLIP).glob(pattern)):
                    shutil.copyfile(file, unfinished / folder / file.name)


def _check_new(target: Path) -> None:
    if target.exists():
        raise ValueError(f"target {target} exists; remove it or choose another")


@contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    # a folder that becomes the target when all is written, and is removed if it is not
    unfinished = target.with_name(target.name + ".part")
    try:
        unfinished.mkdir(parents=True)  # which one of several conversions can do
    except FileExistsError:
        what = f"got {unfinished}, of another conversion, which may still run; remove it if none does"
        raise ValueError(what) from None
    try:
        _check_new(target)  # another conversion may have ended since the first check
        yield unfinished
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{target}: written", flush=True)


def _convert_to_8_bits(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    if dtype not in (None, STANDS_FOR):
        raise ValueError(f"--precision fp8 rounds weights in bf16; leave --dtype out, got {dtype}")
    if index_of(source) is None:
        raise ValueError(f"{source} has no {INDEX}; --precision fp8 converts folders of diffusers' pipelines")
    fitted = {name: x for name, x in parts_of_folder(source).fitted.items() if name in NAMES}
    for name, model in fitted.items():
        if not stored_in_8_bits(model.model):
            raise ValueError(f"{source / name}: a {model.kind.__name__} has no blocks that compute in 8 bits")
        if model.checkpoint.raw is not None:
            raise ValueError(f"{source / name} is in 8 bits already")

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) in [source / part for part in fitted] and name != CONFIG]

    with _becoming(target) as unfinished:
        shutil.copytree(source, unfinished, ignore=left_out, dirs_exist_ok=True)
        for name, model in fitted.items():
            config = {**model.config, QUANTIZATION: MARK}
            size = write_folder(unfinished / name, config, _rounded(model.checkpoint, stored_in_8_bits(model.model)))
            print(f"{name}: {size} bytes", flush=True)


def _rounded(checkpoint: Checkpoint, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for key in checkpoint.shapes:
        tensor = checkpoint.tensor(key)
        if key in stored:
            weight = Weight8.of(tensor.to(device).to(STANDS_FOR))
            yield key, weight.e4m3.cpu()
            yield key + SCALE, weight.scales[:, None].cpu()
        else:
            yield key, tensor


def _single(path: Path, heads: int | None) -> Part:
    # an autoencoder, or a transformer under diffusers' or its authors' keys
    if path.is_file() and not consolidated.parts_of(path):
        checkpoint, _ = open_file(path)
        if is_autoencoder(checkpoint.shapes):
            return _autoencoder("", path)
        if path.suffix == ".safetensors" and as_diffusers(checkpoint, path) is not None:
            single = check_single(path)
            converted = single.checkpoint
            return Part("", single.config, ((key, converted.tensor(key)) for key in converted.shapes))
    return _transformer("", path, heads)


def _transformer(folder: str, path: Path, heads: int | None = None) -> Part:
    blueprint, config = open_transformer(path, heads)
    note = ""
    if config["_class_name"] in (LEARNED, CLASS):
        note = "diffusers has no such class, seqpar loads the folder"
    elif OURS[0] in config:
        what = "timestep frequencies" + ", the table of positions" * bool(config.get("pos_stored"))
        note = f"diffusers' arithmetic differs from the original's ({what}), seqpar keeps the original's"
    return Part(folder, config, tensors_of(blueprint, config), note)


def _autoencoder(folder: str, path: Path) -> Part:
    config, checkpoint, keys = open_autoencoder(path)
    sources = keys.sources.items()
    tensors = ((key, source.combine(*map(checkpoint.tensor, source.keys)).clone()) for key, source in sources)
    return Part(folder, config, tensors)


# UniDiffuser's folder -------------------------------------------------------------------------------------------------


def _unidiffuser(path: Path) -> dict[str, Path]:
    # name of a part -> its file, recognised by its keys; {} without a U-ViT. path: a folder, or its U-ViT where the
    # folder has several (v0 and v1)
    folder = path if path.is_dir() else path.parent
    if path.is_file() and (path.suffix not in LOOSE or _part_of(path) != "unet"):
        return {}
    files: dict[str, Path] = {} if path.is_dir() else {"unet": path}
    for file in sorted(file for file in folder.iterdir() if file.suffix in LOOSE and file.is_file()):
        part = _part_of(file)
        if part is None or (part == "unet" and path.is_file()):
            continue
        if part in files:
            raise ValueError(f"{folder} has two files of the {part}: {files[part].name} and {file.name}; remove one")
        files[part] = file
    return files if "unet" in files else {}


def _part_of(path: Path) -> str | None:
    try:
        shapes = open_file(path)[0].shapes
    except ValueError:  # a training script leaves other files, such as an optimizer's state
        return None
    if is_uvit(shapes):
        return "unet"
    if f"{PREFIX}weight" in shapes:
        return "text_decoder"
    return "vae" if is_autoencoder(shapes) else None


def _unidiffuser_parts(files: Mapping[str, Path]) -> Iterator[Part]:
    folder = files["unet"].parent
    for part, name in (("vae", "autoencoder_kl.pth"), ("text_decoder", "caption_decoder.pth")):
        if part not in files:
            raise ValueError(f"{folder} has no {part}; put {name} there")
    if not (folder / CLIP).is_dir():
        raise ValueError(f"{folder} has no CLIP to encode prompts; put openai/{CLIP} into {folder / CLIP}")
    yield _transformer("unet", files["unet"])
    yield _autoencoder("vae", files["vae"])
    decoder, _ = open_file(files["text_decoder"])
    tensors = [(key, decoder.tensor(key)) for key in decoder.shapes if key.startswith(PREFIX)]
    yield Part("text_decoder", {"_class_name": "UniDiffuserTextDecoder"}, tensors, "the layer for prompts alone")
