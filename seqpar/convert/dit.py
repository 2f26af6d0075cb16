"""Original files of facebookresearch/DiT: config, key map, and the folder that keeps the original's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.convert._sizes import confirm_heads, heads_of
from seqpar.loading.checkpoint import Checkpoint
from seqpar.loading.keys import KeyMap, count_layers, shape_of
from seqpar.loop.models import _layers, dit
from seqpar.loop.models._dit_keys import ends, pairs, table_of
from seqpar.loop.models._label_dit import check_outputs, confirm, count_classes

# largest distances of a table of positions from the sine-cosine one: by rounding to fp32, and by averaging over a whole
# training (3e-4 at a decay of 0.9999) or bfloat16 (2e-3)
ROUNDED, MOVED = 2**-22, 4e-3


def is_original(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether these are keys of an original DiT."""
    return any(key.startswith("blocks.0.attn.") for key in shapes)


def config_of(checkpoint: Checkpoint, args: Mapping[str, Any], heads: int | None) -> dit.Config:
    """Return the config from the tensors' shapes, confirmed by the arguments of training where they are stored."""
    shapes = checkpoint.shapes
    width, channels, patch, _ = shape_of(shapes, "x_embedder.proj.weight", 4)
    layers, final = count_layers(shapes, "blocks"), "final_layer.linear.weight"
    released = dit.PRESETS.get(str(args.get("model")).lower())
    if released is not None:
        stated = {"width": released.width, "layers": released.num_layers, "patch_size": released.patch_size}
        confirm("DiT", stated, {"width": width, "layers": layers, "patch_size": patch})
        confirm_heads("DiT", args, heads, released)
    count = heads_of("DiT", width, layers, args, heads, dit.PRESETS.values())
    side = _table_side(shapes, width) if "pos_embed" in shapes else 32 // patch
    config = dit.Config(
        num_attention_heads=count,
        attention_head_dim=width // count,
        num_layers=layers,
        patch_size=patch,
        in_channels=channels,
        out_channels=_layers.output_channels(final, shape_of(shapes, final, 2)[0], patch),
        sample_size=side * patch,
        num_classes=count_classes(shapes),
        attention_bias=any(key.endswith(".attn.qkv.bias") for key in shapes),
    )
    confirm("DiT", args, {"num_classes": config.num_classes, "image_size": config.sample_size * 8})
    check_outputs("DiT", config.in_channels, config.out_channels)
    return _with_table(config, checkpoint.tensor("pos_embed")) if "pos_embed" in shapes else config


def _table_side(shapes: Mapping[str, tuple[int, ...]], width: int) -> int:
    batch, tokens, columns = shape_of(shapes, "pos_embed", 3)
    side = math.isqrt(tokens)
    if (batch, side**2, columns) != (1, tokens, width) or not side:
        shape = (batch, tokens, columns)
        raise ValueError(f"pos_embed has shape {shape}, expected (1, side x side, {width}): positions of a square")
    return side


def _with_table(config: dit.Config, table_1LE: Tensor) -> dit.Config:
    # The sine-cosine table is computed at run time. A table that only rounding has moved from it is stored, and other
    # sizes continue the sine-cosine one. Any other table was learned and has positions for its own size alone.
    index = torch.arange(config.sample_size // config.patch_size, dtype=torch.float32, device=table_1LE.device)
    computed = _layers.sincos_2d(index, index, config.width)
    distance = float((table_1LE[0].double() - computed).abs().max())
    if distance <= ROUNDED:
        return config
    return replace(config, pos_stored=True, pos_scaling="none" if distance <= MOVED else "refuse")


def key_map(config: dit.Config) -> KeyMap:
    """Return the key map of the original files."""
    t, table = ("t_embedder.mlp.0", "t_embedder.mlp.2"), "y_embedder.embedding_table.weight"
    final = ("final_layer.adaLN_modulation.1", "final_layer.linear")
    sources = ends(config, "x_embedder.proj", t, table, *final)
    for i in range(config.num_layers):
        block = f"blocks.{i}"  # in both
        sources |= pairs(f"{block}.modulation", f"{block}.adaLN_modulation.1")
        sources |= pairs(f"{block}.qkv", f"{block}.attn.qkv", bias=config.attention_bias)
        sources |= pairs(f"{block}.proj", f"{block}.attn.proj")
        sources |= pairs(f"{block}.fc1", f"{block}.mlp.fc1") | pairs(f"{block}.fc2", f"{block}.mlp.fc2")
    return KeyMap(sources | table_of(config), frozenset() if config.pos_stored else frozenset({"pos_embed"}))


def folder_config(config: dit.Config) -> dict[str, Any]:
    """Return the config.json of the folder that holds this model.

    `freq_shift` and `pos_scaling` keep the original's arithmetic when seqpar loads the folder; diffusers ignores them.
    A learned table of positions has a class name that diffusers does not know, because it would compute others.
    """
    same = ("num_attention_heads", "attention_head_dim", "num_layers", "patch_size", "in_channels", "out_channels")
    return {
        "_class_name": dit.LEARNED if config.pos_scaling == "refuse" else "DiTTransformer2DModel",
        **{name: getattr(config, name) for name in (*same, "sample_size", "attention_bias")},
        "num_embeds_ada_norm": config.num_classes,
        "norm_eps": config.mlp_norm_eps,
        "freq_shift": config.freq_shift,
        "pos_scaling": config.pos_scaling,
        **({"pos_stored": True} if config.pos_stored else {}),
    }
