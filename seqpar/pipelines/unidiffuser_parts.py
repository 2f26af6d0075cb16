"""The parts of UniDiffuser around its U-ViT: prompts to text tokens and back, and pictures to image tokens.

A prompt becomes CLIP's last hidden states, which the caption decoder's first layer makes narrower (768 to 64). The rest
of the caption decoder, a small GPT-2, turns text tokens that were denoised into a caption. A given picture becomes its
latent and its CLIP image embedding. All of this runs on rank 0 alone, by the classes of diffusers and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seqpar.loading import folder as tokenizers_
from seqpar.loading.checkpoint import Checkpoint, check_types, find_checkpoint, open_checkpoint
from seqpar.loading.encoders import load_encoder
from seqpar.loading.errors import context
from seqpar.loading.folder import check_class, check_files, check_model
from seqpar.loading.layout import layout_of
from seqpar.loading.names import importing_pipelines
from seqpar.loading.parts import read_encoder, read_pipeline, read_scheduler
from seqpar.loading.reading import check_finite
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.models.uvit import Config, Mode
from seqpar.pipelines import own_loop as _files
from seqpar.pipelines.own_loop import Encode
from seqpar.vae.shared import own


def load_encoders(parts: Parts, dtype: torch.dtype) -> tuple[Any, Any, Callable[[Tensor], Tensor]]:
    """Return CLIP's tokenizer and text encoder, and the layer that makes its output narrower; ValueError if it fails.

    Of the caption decoder only this layer is read.
    """
    import transformers  # seconds to import, and other models do not need it

    tokenizers: Any = transformers.AutoTokenizer
    with context(f"got a text encoder in {parts.text_encoder} that does not load"):
        tokenizer = tokenizers.from_pretrained(parts.clip_tokenizer, trust_remote_code=False)
        encoder = load_encoder(transformers.CLIPTextModel, parts.text_encoder, dtype)
    decoder = caption_decoder(parts)
    keys = sorted(key for key in decoder.shapes if PREFIX in key)  # bias, weight; none if the widths are equal
    check_types(decoder, keys)
    layer = {key: decoder.tensor(key).to(dtype) for key in keys}
    decoder.check_unchanged()
    check_finite(decoder.name, layer)
    bias, weight = layer.values() if layer else (None, None)

    def narrower(hidden: Tensor) -> Tensor:
        if weight is None or bias is None:
            return hidden
        return F.linear(hidden, weight.to(hidden.device), bias.to(hidden.device))

    return tokenizer, encoder, narrower


def captions(source: Parts | Any, text_NLC: Tensor) -> list[str]:
    """Return the caption of each row of text tokens, by the caption decoder's beam search; ValueError if none loads.

    source: as for `text_encoder`. It runs on the device and in the dtype of the tokens.
    """
    decoder, tokenizer = (
        _captioner(source) if isinstance(source, Parts) else (source.text_decoder, source.text_tokenizer)
    )
    decoder = decoder.to(text_NLC.device)
    tokens, lengths = decoder.generate_captions(
        text_NLC.to(decoder.dtype), tokenizer.eos_token_id, device=text_NLC.device
    )
    pairs = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [tokenizer.decode(row[:length], skip_special_tokens=True) for row, length in pairs]


def image_streams(
    source: Parts | Any, vae: Any, pictures: Sequence[Image.Image], generator: torch.Generator
) -> Mapping[str, Tensor]:
    """Return {"image": latents (N, C, h, w), "clip": embeddings (N, 1, width)} of pictures of one size.

    source: as for `text_encoder`. generator: draws the sample of the autoencoder's distribution, as in diffusers'
    pipeline.
    """
    from diffusers.image_processor import VaeImageProcessor

    encoder, processor = (
        _seer(source, vae.dtype) if isinstance(source, Parts) else (source.image_encoder, source.clip_image_processor)
    )
    device, encoder = vae.device, encoder.to(vae.device)
    pixels = VaeImageProcessor(vae_scale_factor=2 ** (len(vae.config.block_out_channels) - 1)).preprocess([*pictures])
    with torch.no_grad():
        latents = own(vae, "encode")(pixels.to(device, vae.dtype)).latent_dist.sample(generator=generator)
        seen = processor.preprocess([*pictures], return_tensors="pt").to(device=device, dtype=vae.dtype)
        embedded = encoder(**seen).image_embeds
    return {"image": latents * vae.config.scaling_factor, "clip": embedded[:, None]}


def text_encoder(source: Parts | Any, tokens: int, device: torch.device, dtype: torch.dtype) -> Encode:
    """Return a function that encodes one prompt; it holds the encoders.

    source: the parts with the encoders, which are loaded, or diffusers' UniDiffuserPipeline in memory. tokens: the
    length to which each prompt is padded or cut.
    """
    if isinstance(source, Parts):
        tokenizer, encoder, narrower = load_encoders(source, dtype)
    else:
        tokenizer, encoder, narrower = source.clip_tokenizer, source.text_encoder, source.text_decoder.encode
        if source.text_decoder.device != device:  # to() visits all weights, also when they are in place
            source.text_decoder.to(device)
    encoder = encoder if encoder.device == device else encoder.to(device)
    masked = getattr(encoder.config, "use_attention_mask", False)

    def encode(text: str) -> tuple[Tensor, ...]:
        ids = tokenizer(text, padding="max_length", max_length=tokens, truncation=True, return_tensors="pt")
        mask = ids.attention_mask.to(device) if masked else None
        with context("got a text encoder that fails on a prompt"):
            hidden = encoder(ids.input_ids.to(device), attention_mask=mask)[0]
        return (narrower(hidden)[0],)

    return encode


def _captioner(parts: Parts) -> tuple[Any, Any]:
    """Return the caption decoder and its tokenizer; of an original file only the layer for prompts is used."""
    if not parts.decoder.is_dir():
        where = parts.decoder
        raise ValueError(f"got the original caption decoder {where}, expected diffusers' folder for captions")
    import transformers

    with importing_pipelines():
        from diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder import UniDiffuserTextDecoder

    tokenizers: Any = transformers.AutoTokenizer
    check_class(parts.decoder, UniDiffuserTextDecoder)
    tokenizers_.check_tokenizer(parts.text_tokenizer)
    with context(f"got a caption decoder in {parts.decoder} that does not load"):
        decoder = UniDiffuserTextDecoder.from_pretrained(parts.decoder)
        check_finite(str(parts.decoder), decoder.state_dict())
        return decoder, tokenizers.from_pretrained(parts.text_tokenizer, trust_remote_code=False)


def _seer(parts: Parts, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return CLIP's image encoder and the function that prepares pictures for it."""
    import transformers

    check_class(parts.image_encoder, transformers.CLIPVisionModelWithProjection)
    with context(f"got an image encoder in {parts.image_encoder} that does not load"):
        encoder = load_encoder(transformers.CLIPVisionModelWithProjection, parts.image_encoder, dtype)
        with importing_pipelines():
            processor = transformers.CLIPImageProcessor
        return encoder, processor.from_pretrained(parts.image_processor)


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
    """The checked parts of a UniDiffuser; see `seqpar.pipelines.own_loop.Files`.

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
