"""Finds the parts of a UniDiffuser and checks them before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seqpar.loading import tokenizers as tokenizers_
from seqpar.loading.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from seqpar.loading.folder import check_files, check_model
from seqpar.loading.layout import layout_of
from seqpar.loading.parts import read_encoder, read_pipeline, read_scheduler
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.models.uvit import Config, Mode
from seqpar.pipelines import files as _files

PREFIX = "encode_prefix."  # of the caption decoder's layer that makes prompts narrower
NEEDED = ("text_encoder", "clip_tokenizer", "text_decoder")
# the text encoder of UniDiffuser, which its authors do not publish again, and the folder of its hub repository
CLIP, CLIP_FOLDER = "openai/clip-vit-large-patch14", "clip-vit-large-patch14"
CLIP_DEFAULTS = {"max_position_embeddings": 77, "hidden_size": 512}  # of transformers, for what a config leaves out
# the scheduler of diffusers' UniDiffuser, for models without a pipeline folder
DEFAULT = {
    "_class_name": "DPMSolverMultistepScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "solver_order": 3,
}


@dataclass(frozen=True)
class Parts:
    """Where the parts of a UniDiffuser are: folders, as diffusers and transformers save them, or original files.

    unet, vae, decoder: a folder or an original file. decoder: the caption decoder with the layer that makes prompts
    narrower. scheduler: None for original files, which come without one.
    """

    unet: Path
    vae: Path
    scheduler: Path | None
    text_encoder: Path
    clip_tokenizer: Path
    decoder: Path
    text_tokenizer: Path
    image_encoder: Path
    image_processor: Path

    @staticmethod
    def of(folder: Path) -> Parts:
        """Return the parts in a diffusers folder."""
        processors = (folder / name for name in ("clip_image_processor", "image_processor"))
        return Parts(
            unet=folder / "unet",
            vae=folder / "vae",
            scheduler=folder / "scheduler",
            text_encoder=folder / "text_encoder",
            clip_tokenizer=folder / "clip_tokenizer",
            decoder=folder / "text_decoder",
            text_tokenizer=folder / "text_tokenizer",
            image_encoder=folder / "image_encoder",
            image_processor=next((path for path in processors if path.is_dir()), folder / "image_processor"),
        )

    @staticmethod
    def of_original(parts: Mapping[str, Path], refused: Sequence[str] = ()) -> Parts:
        """Return the parts of UniDiffuser's original files, with CLIP and other folders beside them.

        parts, refused: those of `seqpar.loading.layout.ModelFiles`. Raises ValueError if a file or CLIP is missing.
        """
        folder, files = parts["unet"].parent, {"text_decoder": "caption_decoder.pth", "vae": "autoencoder_kl.pth"}
        if lost := [file for part, file in files.items() if part not in parts]:
            others = "".join(f"; {reason}" for reason in refused)
            raise ValueError(f"got {folder} without {lost[0]}, expected it beside {parts['unet'].name}{others}")
        text_encoder, clip_tokenizer = _clip_beside(folder)
        return replace(
            Parts.of(folder),
            unet=parts["unet"],
            vae=parts["vae"],
            scheduler=None,
            decoder=parts["text_decoder"],
            text_encoder=text_encoder,
            clip_tokenizer=clip_tokenizer,
        )


@dataclass(frozen=True)
class Files(_files.Files):
    """The checked parts of a UniDiffuser; see `seqpar.pipelines.files.Files`.

    blueprint: the U-ViT, whose config names the mode. source: `Parts`, diffusers' pipeline in memory, or None for a
    preset.
    """

    scheduling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT, kw_only=True)

    @staticmethod
    def locate(name: str | Path | Blueprint, mode: Mode = "text2img") -> Files:
        """Find and check a diffusers folder, hub id or original files, or take a preset (random weights, no encoders).

        mode: what is made of what; see `uvit.Config`. Raises ValueError if a file does not fit; reads
        only configs and the headers of weight files.
        """
        blueprint = locate(name)
        if not isinstance(blueprint.config, Config):
            raise ValueError(f"got {blueprint.name}, which is no UniDiffuser, expected one")
        blueprint = replace(blueprint, config=replace(blueprint.config, mode=mode))
        if blueprint.path is None:
            return Files(blueprint)
        parts = parts_of(blueprint.path)
        vae = _files.checked_vae(parts.vae, blueprint)
        check_encoders(parts, blueprint.config)
        scheduling = DEFAULT if parts.scheduler is None else read_scheduler(parts.scheduler)
        return Files(blueprint, parts, vae, scheduling=scheduling)

    @property
    def decoder(self) -> Path:
        """Return the folder or file of the decoder."""
        return self.source.vae

    def conditions(self, asked: Sequence[object]) -> int:
        """Return 1: the prompt is a stream, so modulation depends on the branch alone."""
        return 1


def parts_of(path: Path) -> Parts:
    """Return where the parts are in a diffusers folder, or in a folder (or by the U-ViT's file) of original files."""
    layout = layout_of(path)
    if layout is not None and layout.kind == "unidiffuser":
        return Parts.of_original(layout.parts, layout.refused)
    if not (path / "model_index.json").is_file():
        raise ValueError(f"got {path} without model_index.json, expected a pipeline's folder with its text encoder")
    tokenizers_.check_named(path, read_pipeline(path), NEEDED)
    return Parts.of(path)


def _clip_beside(folder: Path) -> tuple[Path, Path]:
    """Return the folders of CLIP's text encoder and tokenizer beside original files; ValueError if there are none."""
    if (folder / CLIP_FOLDER).is_dir():
        return folder / CLIP_FOLDER, folder / CLIP_FOLDER
    tokenizers = (folder / name for name in ("clip_tokenizer", "tokenizer"))
    tokenizer = next((path for path in tokenizers if path.is_dir()), None)
    if tokenizer is not None and (folder / "text_encoder").is_dir():
        return folder / "text_encoder", tokenizer
    raise ValueError(
        f"got UniDiffuser's original files in {folder} without CLIP, which encodes prompts, expected the files of "
        f"{CLIP} in {folder / CLIP_FOLDER}, or the folders text_encoder and tokenizer"
    )


def check_encoders(parts: Parts, config: Any) -> None:
    """Raise ValueError if text encoder, tokenizer or caption decoder are missing, or do not fit the U-ViT.

    config: the U-ViT's `Config`. Reads configs and headers, no weights.
    """
    check_files(parts.text_encoder)
    check_model(parts.text_encoder, "transformers", "CLIPTextModel")
    tokenizers_.check_tokenizer(parts.clip_tokenizer)
    sizes = CLIP_DEFAULTS | read_encoder(parts.text_encoder)
    tokens, width = sizes["max_position_embeddings"], sizes["hidden_size"]
    if tokens != config.text_tokens:
        raise ValueError(f"got a text encoder of {tokens} tokens, expected the model's {config.text_tokens}")
    shapes = caption_decoder(parts).shapes
    key = next((key for key in shapes if key.endswith(f"{PREFIX}weight")), None)
    got = (width, width) if key is None else shapes[key][::-1]
    if got != (width, config.text_width):
        raise ValueError(
            f"got a caption decoder that makes {got[0]} values {got[1]}, expected the text encoder's {width} and the "
            f"model's {config.text_width}"
        )


def caption_decoder(parts: Parts) -> Checkpoint:
    """Open the checkpoint of the caption decoder."""
    return open_checkpoint(find_checkpoint(parts.decoder) if parts.decoder.is_dir() else parts.decoder)
