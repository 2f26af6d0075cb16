"""Where Kandinsky 5's tokens are split: those of the video or picture; the text is read by cross-attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts
from seqpar.families._tiny import GRID, TEXT, Tiny


def _kandinsky5() -> Cuts:
    blocks = "visual_transformer_blocks"
    places = {
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
TINY = {
    "Kandinsky5Transformer3DModel": Tiny(
        {"in_text_dim": 24, "in_text_dim2": 16, "model_dim": 48, "ff_dim": 64, "axes_dims": (4, 6, 6)},
        _inputs,
        fp32=("time_embeddings",),
    )
}
