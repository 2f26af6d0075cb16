"""Where Kandinsky 5's tokens are split: those of the video or picture; the text is read by cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.families import Published, latents
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts
from seqpar.families._tiny import GRID, TEXT, Tiny


def _kandinsky5() -> Cuts:
    blocks = "visual_transformer_blocks"
    places = {
        "time_embeddings": Boundary(constants=("freqs",)),
        f"{blocks}.0": Boundary(inputs={"visual_embed": IMAGE}),
        f"{blocks}.*": Boundary(inputs={"rope": IMAGE}),
        f"{blocks}.-1": OUT,
    }
    local = (f"{blocks}.*.cross_attention", "text_transformer_blocks.*.self_attention")
    sparse = {"sparse_params": "it chooses keys for blocks of 64 tokens, which no strategy splits"}
    alone = {f"{blocks}.*.self_attention": ALONE}
    return Cuts(places, alone, refused=sparse, local=local, calls_twice=True)


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    frames, rows, columns = (side * patch for side, patch in zip(GRID, config["patch_size"], strict=True))
    return {
        "hidden_states": random(2, frames, rows, columns, config["in_visual_dim"]),
        "encoder_hidden_states": random(2, TEXT, config["in_text_dim"]),
        "pooled_projections": random(2, config["in_text_dim2"]),
        "visual_rope_pos": [torch.arange(side) for side in GRID],
        "text_rope_pos": torch.arange(TEXT),
    }


CUTS = {"Kandinsky5Transformer3DModel": _kandinsky5()}


def _published(pipeline: str, dim: int, blocks: int, axes: tuple[int, int, int], vae: Mapping[str, int]) -> Published:
    config = {"model_dim": dim, "ff_dim": 4 * dim, "num_visual_blocks": blocks, "axes_dims": axes}
    sides = {"in_visual_dim": 16, "out_visual_dim": 16, "visual_cond": "2V" in pipeline}
    return Published(pipeline, "Kandinsky5Transformer3DModel", {**config, **sides}, vae)


PUBLISHED = {
    "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers": _published(
        "Kandinsky5T2VPipeline", 1792, 32, (16, 24, 24), latents(frames=4)
    ),
    "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers": _published(
        "Kandinsky5T2IPipeline", 2560, 50, (32, 48, 48), latents()
    ),
}
TINY = {
    "Kandinsky5Transformer3DModel": Tiny(
        {"in_text_dim": 24, "in_text_dim2": 16, "model_dim": 48, "ff_dim": 64, "axes_dims": (4, 6, 6)},
        _inputs,
        fp32=("time_embeddings",),
    )
}
