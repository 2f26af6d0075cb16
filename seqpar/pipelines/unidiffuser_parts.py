"""The parts of UniDiffuser around its U-ViT: prompts to text tokens and back, and images to image tokens.

A prompt becomes CLIP's last hidden states, which the caption decoder's first layer makes narrower (768 to 64). The rest
of the caption decoder, a small GPT-2, turns denoised text tokens into a caption. An input image becomes its latent and
its CLIP image embedding. All of this runs on rank 0 alone, by the classes of diffusers and transformers. A `source` is
the pipeline's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seqpar.loading.checkpoint import Checkpoint, check_types, find_checkpoint, open_checkpoint
from seqpar.loading.encoders import load_encoder
from seqpar.loading.errors import context
from seqpar.loading.folder import check_class, check_files, check_tokenizer
from seqpar.loading.names import importing_pipelines
from seqpar.loading.parts import CONFIG, read_json
from seqpar.loading.reading import check_finite
from seqpar.loop.models.uvit import Config
from seqpar.vae.shared import original

Encode = Callable[[str], tuple[Tensor, ...]]
PREFIX = "encode_prefix."  # of the caption decoder's layer that makes prompts narrower
NEEDED = ("text_encoder", "clip_tokenizer", "text_decoder")
CLIP_DEFAULTS = {"max_position_embeddings": 77, "hidden_size": 512}  # of transformers, for what a config leaves out
# the scheduler of diffusers' UniDiffuser, for models without a pipeline folder
DEFAULT = {
    "_class_name": "DPMSolverMultistepScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "solver_order": 3,
}


def check_encoders(folder: Path, config: Config) -> None:
    """Raise ValueError if text encoder, tokenizer or caption decoder do not fit the U-ViT. Reads headers."""
    import transformers  # takes seconds to import, and other models do not need it

    check_files(folder / "text_encoder")
    check_class(folder / "text_encoder", transformers.CLIPTextModel)
    check_tokenizer(folder / "clip_tokenizer")
    sizes = read_json(folder / "text_encoder" / CONFIG)
    text = sizes.get("text_config")  # of CLIP's own folder the half that reads text
    sizes = CLIP_DEFAULTS | (text if isinstance(text, dict) else sizes)
    tokens, width = sizes["max_position_embeddings"], sizes["hidden_size"]
    if tokens != config.text_tokens:
        raise ValueError(f"the text encoder has {tokens} tokens, the U-ViT {config.text_tokens}")
    shapes = caption_decoder(folder).shapes
    key = next((key for key in shapes if key.endswith(f"{PREFIX}weight")), None)
    got = (width, width) if key is None else shapes[key][::-1]
    if got != (width, config.text_width):
        raise ValueError(
            f"the caption decoder makes {got[0]} values {got[1]}, but the text encoder has {width} and the U-ViT "
            f"{config.text_width}"
        )


def caption_decoder(folder: Path) -> Checkpoint:
    return open_checkpoint(find_checkpoint(folder / "text_decoder"))


def load_encoders(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, Callable[[Tensor], Tensor]]:
    """Return CLIP's tokenizer and text encoder, and the layer that makes its output narrower."""
    import transformers

    tokenizers: Any = transformers.AutoTokenizer
    place = folder / "text_encoder"
    with context(f"text encoder {place} does not load"):
        tokenizer = tokenizers.from_pretrained(folder / "clip_tokenizer", trust_remote_code=False)
        encoder = load_encoder(transformers.CLIPTextModel, place, dtype)
    decoder = caption_decoder(folder)
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


def text_encoder(source: Path, tokens: int, device: torch.device, dtype: torch.dtype) -> Encode:
    """Return a function that encodes one prompt; it holds the encoders. tokens: length of each encoded prompt."""
    tokenizer, encoder, narrower = load_encoders(source, dtype)
    encoder = encoder.to(device)
    masked = getattr(encoder.config, "use_attention_mask", False)

    def encode(text: str) -> tuple[Tensor, ...]:
        ids = tokenizer(text, padding="max_length", max_length=tokens, truncation=True, return_tensors="pt")
        mask = ids.attention_mask.to(device) if masked else None
        with context("the text encoder fails on a prompt"):
            hidden = encoder(ids.input_ids.to(device), attention_mask=mask)[0]
        return (narrower(hidden)[0],)

    return encode


def captions(source: Path, text_NLC: Tensor) -> list[str]:
    """Return the caption of each row of text tokens, by the caption decoder's beam search; ValueError if none loads."""
    decoder, tokenizer = _captioner(source)
    decoder = decoder.to(text_NLC.device)
    tokens, lengths = decoder.generate_captions(
        text_NLC.to(decoder.dtype), tokenizer.eos_token_id, device=text_NLC.device
    )
    pairs = zip(tokens.tolist(), lengths.tolist(), strict=True)
    return [tokenizer.decode(row[:length], skip_special_tokens=True) for row, length in pairs]


def _captioner(folder: Path) -> tuple[Any, Any]:
    import transformers

    with importing_pipelines():
        from diffusers.pipelines.deprecated.unidiffuser.modeling_text_decoder import UniDiffuserTextDecoder

    place, tokenizers = folder / "text_decoder", transformers.AutoTokenizer
    if "prefix_length" not in read_json(place / "config.json"):
        raise ValueError(f"{place} has the layer for prompts alone; captions need a folder of diffusers' UniDiffuser")
    check_class(place, UniDiffuserTextDecoder)
    check_tokenizer(folder / "text_tokenizer")
    with context(f"caption decoder {place} does not load"):
        decoder = UniDiffuserTextDecoder.from_pretrained(place)
        check_finite(str(place), decoder.state_dict())
        return decoder, tokenizers.from_pretrained(folder / "text_tokenizer", trust_remote_code=False)


def image_streams(
    source: Path, vae: Any, pictures: Sequence[Image.Image], generator: torch.Generator
) -> Mapping[str, Tensor]:
    """Return {"image": latents (N, C, h, w), "clip": embeddings (N, 1, width)} of images of one size.

    generator: draws the sample of the autoencoder's distribution.
    """
    from diffusers.image_processor import VaeImageProcessor

    encoder, processor = _image_encoder(source, vae.dtype)
    device, encoder = vae.device, encoder.to(vae.device)
    pixels = VaeImageProcessor(vae_scale_factor=2 ** (len(vae.config.block_out_channels) - 1)).preprocess([*pictures])
    with torch.no_grad():
        latents = original(vae, "encode")(pixels.to(device, vae.dtype)).latent_dist.sample(generator=generator)
        seen = processor.preprocess([*pictures], return_tensors="pt").to(device=device, dtype=vae.dtype)
        embedded = encoder(**seen).image_embeds
    return {"image": latents * vae.config.scaling_factor, "clip": embedded[:, None]}


def _image_encoder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    import transformers

    place = folder / "image_encoder"
    check_class(place, transformers.CLIPVisionModelWithProjection)
    with context(f"image encoder {place} does not load"):
        encoder = load_encoder(transformers.CLIPVisionModelWithProjection, place, dtype)
        with importing_pipelines():
            processor = transformers.CLIPImageProcessor
        names = ("clip_image_processor", "image_processor")
        return encoder, processor.from_pretrained(next(folder / name for name in names if (folder / name).is_dir()))
