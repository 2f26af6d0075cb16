"""Finds the parts of a UniDiffuser and checks them before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.models.uvit import Config, Mode
from seqpar.pipelines import _family, _schedulers, _texts
from seqpar.pipelines._family import NO_VAE_FACTOR
from seqpar.pipelines._folder import check_encoder, check_files
from seqpar.planner.plan import work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.sampling.request import set_timesteps
from seqpar.sampling.schedules import FAILURES
from seqpar.sampling.steppers import check_eta
from seqpar.vae.decoder import check_vae, vae_factor
from seqpar.weights.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from seqpar.weights.find import Blueprint, locate, resolve
from seqpar.weights.layout import layout_of
from seqpar.weights.parts import read_encoder, read_pipeline, read_scheduler

PREFIX = "encode_prefix."  # of the caption decoder's layer that makes prompts narrower
PARTS = ("text_encoder", "clip_tokenizer", "text_decoder")
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
class Places:
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
    def of(folder: Path) -> Places:
        """Return the places in a diffusers folder."""
        processors = (folder / name for name in ("clip_image_processor", "image_processor"))
        return Places(
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
    def of_original(parts: Mapping[str, Path], refused: Sequence[str] = ()) -> Places:
        """Return the places of UniDiffuser's original files, with CLIP and other folders beside them.

        parts, refused: those of `seqpar.weights.layout.Layout`. Raises ValueError if a file or CLIP is missing.
        """
        folder, files = parts["unet"].parent, {"text_decoder": "caption_decoder.pth", "vae": "autoencoder_kl.pth"}
        if lost := [file for part, file in files.items() if part not in parts]:
            others = "".join(f"; {reason}" for reason in refused)
            raise ValueError(f"got {folder} without {lost[0]}, expected it beside {parts['unet'].name}{others}")
        text_encoder, clip_tokenizer = _clip_beside(folder)
        return replace(
            Places.of(folder),
            unet=parts["unet"],
            vae=parts["vae"],
            scheduler=None,
            decoder=parts["text_decoder"],
            text_encoder=text_encoder,
            clip_tokenizer=clip_tokenizer,
        )


@dataclass(frozen=True)
class Files:
    """The checked parts of a UniDiffuser, before any weights are loaded.

    blueprint: the U-ViT, whose config names the mode. places: where the other parts are, or None for a preset. vae: the
    config of the decoder, or None. scheduling: the scheduler's config.
    """

    blueprint: Blueprint
    places: Places | None
    vae: Any
    scheduling: Mapping[str, Any]

    @staticmethod
    def locate(name: str | Path, mode: Mode = "text2img") -> Files:
        """Find and check a diffusers folder, hub id or original files, or take a preset (random weights, no encoders).

        mode: what is made of what; see `seqpar.models.uvit.Config`. Raises ValueError if a file does not fit; reads
        only configs and the headers of weight files.
        """
        path = resolve(name)
        places = None if path is None else places_of(path)
        blueprint = locate(name if places is None else places.unet)
        if not isinstance(blueprint.config, Config):
            raise ValueError(f"got {blueprint.name}, which is no UniDiffuser, expected one")
        blueprint = replace(blueprint, config=replace(blueprint.config, mode=mode))
        if places is None:
            return Files(blueprint, None, None, DEFAULT)
        vae, channels = check_vae(places.vae), blueprint.config.in_channels
        if vae.latent_channels != channels:
            raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
        check_encoders(places, blueprint.config)
        told = DEFAULT if places.scheduler is None else read_scheduler(places.scheduler)
        return Files(blueprint, places, vae, told)

    @property
    def factor(self) -> int:
        """Return the number of pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else vae_factor(self.vae)

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; None stands for the trained size (512 x 512 pixels)."""
        return _family.latent_size(pixels, self.factor, self.blueprint.config)

    def schedule(self, name: str | None, steps: int, eta: float | None = None) -> Any:
        """Return the scheduler with its timesteps set; ValueError if steps or eta do not fit it.

        name: the class of another scheduler, which takes the folder's configuration.
        """
        scheduler = self.scheduler(name)
        _schedulers.check_steps(scheduler, steps)
        check_eta(scheduler, eta)
        try:
            set_timesteps(scheduler, steps, {})
        except FAILURES as error:
            told = f"which {type(scheduler).__name__} cannot do: {error}; try more or fewer"
            raise ValueError(f"got {steps} steps, {told}") from error
        _schedulers.tried(scheduler, eta)
        return scheduler

    def scheduler(self, name: str | None) -> Any:
        """Return the folder's scheduler, or the diffusers class `name` with the same configuration."""
        return _schedulers.build(self.scheduling, name)

    def smallest(self, dtype: torch.dtype) -> Callable[[bool], Load]:
        """Return a function that returns the `Load` of one picture, with two branches or one."""
        return lambda guided: self.load_of(1, guided, 1, dtype, None)

    def load_of(
        self, images: int, guided: bool, evaluations: int, dtype: torch.dtype, size: tuple[int, int] | None
    ) -> Load:
        """Return the planner's `Load`; guided: whether there are two branches."""
        config, (height, width) = self.blueprint.config, self.latent_size(size)
        return Load(
            images=images,
            tokens=height * width // config.patch_size**2,
            guidance=guided,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=1 + guided,  # the prompt is a stream, so modulation depends on the branch alone
            table=TABLE_BYTES,
            others=work_of(config).joined,
        )


def places_of(path: Path) -> Places:
    """Return where the parts are in a diffusers folder, or in a folder (or by the U-ViT's file) of original files."""
    layout = layout_of(path)
    if layout is not None and layout.kind == "unidiffuser":
        _texts.check_installed()
        return Places.of_original(layout.parts, layout.refused)
    if not (path / "model_index.json").is_file():
        raise ValueError(f"got {path} without model_index.json, expected a pipeline's folder with its text encoder")
    _texts.check_named(path, read_pipeline(path), PARTS)
    return Places.of(path)


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


def check_encoders(places: Places, config: Any) -> None:
    """Raise ValueError if text encoder, tokenizer or caption decoder are missing, or do not fit the U-ViT.

    config: the U-ViT's `Config`. Reads configs and headers, no weights.
    """
    check_files(places.text_encoder)
    check_encoder(places.text_encoder, "CLIPTextModel")
    _texts.check_tokenizer(places.clip_tokenizer)
    told = CLIP_DEFAULTS | read_encoder(places.text_encoder)
    tokens, width = told["max_position_embeddings"], told["hidden_size"]
    if tokens != config.text_tokens:
        raise ValueError(f"got a text encoder of {tokens} tokens, expected the model's {config.text_tokens}")
    shapes = caption_decoder(places).shapes
    key = next((key for key in shapes if key.endswith(f"{PREFIX}weight")), None)
    got = (width, width) if key is None else shapes[key][::-1]
    if got != (width, config.text_width):
        raise ValueError(
            f"got a caption decoder that makes {got[0]} values {got[1]}, expected the text encoder's {width} and the "
            f"model's {config.text_width}"
        )


def caption_decoder(places: Places) -> Checkpoint:
    """Open the checkpoint of the caption decoder."""
    return open_checkpoint(find_checkpoint(places.decoder) if places.decoder.is_dir() else places.decoder)
