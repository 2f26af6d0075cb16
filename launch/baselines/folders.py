"""Folders of FLUX.1 and Qwen-Image with random weights of released sizes, as diffusers saves pipelines, and LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from launch.baselines import flux_pipeline, qwen_pipeline
from launch.baselines.released import RELEASED

PARTS: dict[str, Any] = {"flux.1-dev": flux_pipeline, "qwen-image": qwen_pipeline}
"""Name of a released transformer -> the module of the other parts of its pipeline."""


def saved(model: str, folder: Path, dtype: torch.dtype, small: bool = not torch.cuda.is_available()) -> None:
    """Write a pipeline of released or tiny sizes, unless the folder is there."""
    if (folder / "model_index.json").is_file():
        return
    device, known, parts = torch.device("cuda" if torch.cuda.is_available() else "cpu"), RELEASED[model], PARTS[model]
    transformer = (known.small() if small else known).build(dtype, device)
    parts.pipeline(transformer, dtype, device, parts.SMALL if small else None).save_pretrained(folder)


def saved_loras(folder: Path, transformer: Path, names: Sequence[str], rank: int) -> None:
    """Write NAME.safetensors for each name: random LoRAs on every linear layer of a saved transformer's blocks."""
    config: Any = FluxTransformer2DModel.load_config(str(transformer))
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(config)
    linear = {path: each for path, each in model.named_modules() if isinstance(each, nn.Linear) and "blocks" in path}
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        drawn, state = torch.Generator().manual_seed(seed), dict[str, Tensor]()
        for path, layer in linear.items():
            shapes = {"A": (rank, layer.in_features), "B": (layer.out_features, rank)}
            for side, shape in shapes.items():
                state[f"transformer.{path}.lora_{side}.weight"] = 0.02 * torch.randn(shape, generator=drawn)
        save_file(state, folder / f"{name}.safetensors")
