"""The parts of UniDiffuser around its U-ViT: prompts to text tokens and back, and pictures to image tokens.

A prompt becomes CLIP's last hidden states, which the caption decoder's first layer makes narrower (768 to 64). The rest
of the caption decoder, a small GPT-2, turns text tokens that were denoised into a caption. A given picture becomes its
latent and its CLIP image embedding. All of this runs on rank 0 alone, by the classes of diffusers and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from seqpar.loading import tokenizers as tokenizers_
from seqpar.loading.checkpoint import check_types
from seqpar.loading.encoder_files import load_encoder
from seqpar.loading.errors import naming
from seqpar.loading.folder import check_class
from seqpar.loading.hub import importing_pipelines
from seqpar.loading.reading import check_finite
from seqpar.pipelines.texts import Encode
from seqpar.pipelines.unidiffuser_files import PREFIX, Parts, caption_decoder
from seqpar.vae.shared import own


def load_encoders(parts: Parts, dtype: torch.dtype) -> tuple[Any, Any, Callable[[Tensor], Tensor]]:
    """Return CLIP's tokenizer and text encoder, and the layer that makes its output narrower; ValueError if it fails.

    Of the caption decoder only this layer is read.
    """
    import transformers  # seconds to import, and other models do not need it

    tokenizers: Any = transformers.AutoTokenizer
    with naming(f"got a text encoder in {parts.text_encoder} that does not load"):
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
        with naming("got a text encoder that fails on a prompt"):
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
    with naming(f"got a caption decoder in {parts.decoder} that does not load"):
        decoder = UniDiffuserTextDecoder.from_pretrained(parts.decoder)
        check_finite(str(parts.decoder), decoder.state_dict())
        return decoder, tokenizers.from_pretrained(parts.text_tokenizer, trust_remote_code=False)


def _seer(parts: Parts, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return CLIP's image encoder and the function that prepares pictures for it."""
    import transformers

    check_class(parts.image_encoder, transformers.CLIPVisionModelWithProjection)
    with naming(f"got an image encoder in {parts.image_encoder} that does not load"):
        encoder = load_encoder(transformers.CLIPVisionModelWithProjection, parts.image_encoder, dtype)
        with importing_pipelines():
            processor = transformers.CLIPImageProcessor
        return encoder, processor.from_pretrained(parts.image_processor)
