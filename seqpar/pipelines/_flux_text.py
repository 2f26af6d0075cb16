"""Turns prompts into FLUX.1's text tokens and pooled vectors, by the text encoders of diffusers' own pipeline.

Rank 0 alone loads the encoders (10 GB in bf16), encodes, and frees them; the denoising loop then gives rank 0's tensors
to all ranks, as it does with every input. Each prompt is encoded alone, so that its tensors do not depend on others.
When it wins: always; the encoders run once a picture, and the memory of all other ranks never holds them.
"""

from __future__ import annotations

import gc
import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.mesh import Mesh
from seqpar.weights.checkpoint import find_checkpoint, open_checkpoint, read_json

TOKENS = 512  # T5's tokens of a prompt, as diffusers' FluxPipeline has them by default
# part -> (the size in its config.json, the size of the transformer that it must equal)
ENCODERS = {
    "text_encoder": ("hidden_size", "pooled_projection_dim"),
    "text_encoder_2": ("d_model", "joint_attention_dim"),
}
TOKENIZERS = ("tokenizer", "tokenizer_2")


class Texts:
    """The prompts of one model as tensors; it keeps those of the last call, so that they are encoded once.

    source: a pipeline folder, whose encoders are loaded for the time of a call; diffusers' FluxPipeline in memory; or
    None for a model with random weights, for which random numbers stand in for encoded prompts. config: the
    transformer's `Config`. tokens: the length to which T5 pads or cuts each prompt.
    """

    def __init__(self, source: Path | Any | None, config: Any, tokens: int, mesh: Mesh, dtype: torch.dtype) -> None:
        self._source, self._tokens, self._mesh, self._dtype = source, tokens, mesh, dtype
        self._widths = {"encoder_hidden_states": config.joint_attention_dim}
        self._widths |= {"pooled_projections": config.pooled_projection_dim}
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def encode(self, prompts: Sequence[str], on_prompt: Callable[[int], None] = lambda index: None) -> None:
        """Encode these prompts on rank 0, and forget all others; other ranks return at once.

        on_prompt(index): called when a prompt is encoded. Raises ValueError on rank 0 if the encoders do not load.
        """
        if not self._mesh.is_main:
            return
        wanted = list(dict.fromkeys(prompts))
        missing = [text for text in wanted if text not in self._known]
        made = {text: self._known[text] for text in wanted if text in self._known}
        if missing:
            encoder = self._encoder()
            for index, text in enumerate(missing):
                made[text] = encoder(text)
                on_prompt(index)
            del encoder
            if isinstance(self._source, Path):
                _free(self._mesh.device)
        self._known = made

    def rows(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the keyword arguments of the model's `encode`, a row for each prompt.

        Only rank 0's values count; other ranks return tensors of the same shapes. The prompts must be encoded.
        """
        width, pooled = self._widths.values()
        if self._mesh.is_main:
            texts = (torch.stack(each) for each in zip(*(self._known[text] for text in prompts), strict=True))
        else:
            shapes = (len(prompts), self._tokens, width), (len(prompts), pooled)
            texts = (torch.zeros(shape, dtype=self._dtype, device=self._mesh.device) for shape in shapes)
        return dict(zip(self._widths, texts, strict=True))

    def _encoder(self) -> Callable[[str], tuple[Tensor, Tensor]]:
        """Return a function that encodes one prompt; it holds the encoders."""
        if self._source is None:
            return self._stand_in
        pipe = load_encoders(self._source, self._dtype) if isinstance(self._source, Path) else self._source
        for name in ENCODERS:
            encoder = getattr(pipe, name)
            if encoder.device != self._mesh.device:  # to() visits hundreds of weights, also when all are in place
                encoder.to(self._mesh.device)

        def encode(text: str) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                made = pipe.encode_prompt(text, device=self._mesh.device, max_sequence_length=self._tokens)
            tokens, pooled = (x[0].to(self._dtype) for x in made[:2])
            return tokens, pooled

        return encode

    def _stand_in(self, text: str) -> tuple[Tensor, Tensor]:
        """Return random numbers that depend on the prompt."""
        width, pooled = self._widths.values()
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        made = (torch.randn(shape, generator=generator) for shape in ((self._tokens, width), (pooled,)))
        tokens, vector = (x.to(self._mesh.device, self._dtype) for x in made)
        return tokens, vector


def check_encoders(folder: Path, index: Mapping[str, Any], config: Any) -> None:
    """Raise ValueError if text encoders or tokenizers are missing, or do not fit the transformer.

    index: the folder's model_index.json. config: the transformer's `Config`. Reads configs and headers, no weights.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "got a model with text encoders, which need the package transformers; pip install transformers"
        )
    for name in (*ENCODERS, *TOKENIZERS):
        if not (index.get(name) or [None])[0]:
            raise ValueError(f"got pipeline {folder} without {name}, expected one: prompts need it")
    for name, (size, wanted) in ENCODERS.items():
        got, expected = read_json(folder / name / "config.json").get(size), getattr(config, wanted)
        if got != expected:
            raise ValueError(f"got {name} of {size} {got}, expected the transformer's {wanted} of {expected}")
        stems = ("model", "pytorch_model")
        found = next((stem for stem in stems if next((folder / name).glob(f"{stem}.*"), None)), stems[0])
        open_checkpoint(find_checkpoint(folder / name, found))
    for name in TOKENIZERS:
        if not (folder / name / "tokenizer_config.json").is_file():
            raise ValueError(f"got {folder / name} without tokenizer_config.json, expected a tokenizer's folder")


def load_encoders(folder: Path, dtype: torch.dtype) -> Any:
    """Return diffusers' FluxPipeline with text encoders and tokenizers alone, on the CPU; ValueError if it fails."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline  # needs transformers, which other models do not

    try:
        return FluxPipeline.from_pretrained(folder, transformer=None, vae=None, torch_dtype=dtype)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"got text encoders in {folder} that do not load: {error}") from error


def _free(device: torch.device) -> None:
    """Give the memory of dropped encoders back to the device, because the transformer's weights need it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
