"""Builds the pipeline of a preset: its transformer, decoder and scheduler, with random weights made on the device."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.modeling_utils import no_init_weights

from seqpar.loading.presets import Preset
from seqpar.loading.random_weights import randomise

WITHOUT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")  # parts for which random texts stand in


def random_pipeline(preset: Preset, kind: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a pipeline of a preset without encoders; its weights are equal on ranks of one device type.

    kind: the class of diffusers that has the preset's parts.
    """
    parts: dict[str, Any] = dict.fromkeys(WITHOUT)
    for name, (model, config) in preset.parts.items():
        parts[name] = _model(getattr(diffusers, model), config, dtype, device)
    return kind(**parts)


def _model(kind: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a part of a config: a model with random weights, or a scheduler."""
    if not issubclass(kind, torch.nn.Module):
        return kind(**config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), torch.device(device):
            model = kind(**config)
    finally:
        torch.set_default_dtype(before)
    randomise(model, 0)
    return model.requires_grad_(False).eval()
