"""Turns prompts into FLUX.1's text tokens and pooled vectors, by the text encoders of diffusers' own pipeline.

Rank 0 alone loads the encoders (10 GB in bf16), encodes, and frees them before the transformer's weights load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.pipelines import _texts
from seqpar.pipelines._folder import check_encoder, check_files
from seqpar.pipelines._naming import naming
from seqpar.pipelines._texts import Encode
from seqpar.weights.parts import part_of, read_encoder

TOKENS = 512  # T5's tokens of a prompt, as diffusers' FluxPipeline has them by default
# part -> (the size in its config.json, the size of the transformer that it must equal)
ENCODERS = {
    "text_encoder": ("hidden_size", "pooled_projection_dim"),
    "text_encoder_2": ("d_model", "joint_attention_dim"),
}
TOKENIZERS = ("tokenizer", "tokenizer_2")


def encoder(source: Path | Any, tokens: int, device: torch.device, dtype: torch.dtype) -> Encode:
    """Return a function that encodes one prompt; it holds the encoders.

    source: a pipeline folder, whose encoders are loaded, or diffusers' FluxPipeline in memory. tokens: the length to
    which T5 pads or cuts each prompt.
    """
    pipe = load_encoders(source, dtype) if isinstance(source, Path) else source
    for part in (getattr(pipe, name) for name in ENCODERS):
        if part.device != device:  # to() visits hundreds of weights, also when all are in place
            part.to(device)

    def encode(text: str) -> tuple[Tensor, ...]:
        with naming("got text encoders that fail on a prompt"):
            hidden, pooled = pipe.encode_prompt(text, device=device, max_sequence_length=tokens)[:2]
        return hidden[0], pooled[0]

    return encode


def check_encoders(folder: Path, index: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError if text encoders or tokenizers are missing, or do not fit the transformer.

    index: the folder's model_index.json. config: the transformer's `Config`. Reads configs and headers, no weights.
    """
    _texts.check_named(folder, index, (*ENCODERS, *TOKENIZERS))
    for name, (size, wanted) in ENCODERS.items():
        got, expected = read_encoder(folder / name).get(size), getattr(config, wanted)
        if got != expected:
            raise ValueError(f"got {name} of {size} {got}, expected the transformer's {wanted} of {expected}")
        check_files(folder / name)
        _, kind = part_of(index, name) or ("", "")
        check_encoder(folder / name, kind)
    for name in TOKENIZERS:
        _texts.check_tokenizer(folder / name)


def load_encoders(folder: Path, dtype: torch.dtype) -> Any:
    """Return diffusers' FluxPipeline with text encoders and tokenizers alone, on the CPU; ValueError if it fails."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline  # takes seconds to import

    with naming(f"got text encoders in {folder} that do not load"):
        return FluxPipeline.from_pretrained(folder, transformer=None, vae=None, dtype=dtype)
