"""The key map of diffusers' DiT folders, from parts that `seqpar convert` shares. config: `dit.Config`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.loading.keys import KeyMap, TensorSource
from seqpar.loop.models import _layers


def pairs(ours: str, *theirs: str, bias: bool = True) -> dict[str, TensorSource]:
    """Return the sources of one layer's weight and bias; several source layers are concatenated along the rows."""
    names = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{name}": TensorSource(tuple(f"{key}.{name}" for key in theirs), _rows) for name in names}


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def ends(
    config: Any, embed: str, t: tuple[str, str], table: str, modulation: str, final: str
) -> dict[str, TensorSource]:
    """Return the sources of all parameters outside the blocks.

    The weight of the patch convolution becomes a matrix, and the final rows are reordered (see `_layers.reordered`).
    """
    channels, patch = config.out_channels, config.patch_size
    return {
        "x_embedder.weight": TensorSource((f"{embed}.weight",), lambda weight: weight.flatten(1)),
        "x_embedder.bias": TensorSource((f"{embed}.bias",)),
        **pairs("t_embedder.0", t[0]),
        **pairs("t_embedder.2", t[1]),
        "y_embedder.weight": TensorSource((table,)),
        **pairs("final_modulation", modulation),
        **{
            f"final.{name}": TensorSource((f"{final}.{name}",), lambda rows: _layers.reordered(rows, channels, patch))
            for name in ("weight", "bias")
        },
    }


def table_of(config: Any) -> dict[str, TensorSource]:
    """Return the source of stored positions, a key that `seqpar convert` adds and diffusers does not read."""
    return {"pos_embed": TensorSource(("pos_embed",))} if config.pos_stored else {}


def key_map(config: Any) -> KeyMap:
    """Return the key map. Each block holds a copy of the embedders: the first is read, and all must be equal."""
    emb, table = "transformer_blocks.{}.norm1.emb.", "class_embedder.embedding_table.weight"
    t = ("timestep_embedder.linear_1", "timestep_embedder.linear_2")
    first = emb.format(0)
    sources = ends(config, "pos_embed.proj", (first + t[0], first + t[1]), first + table, "proj_out_1", "proj_out_2")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        qkv = (f"{theirs}.attn1.to_{x}" for x in "qkv")
        sources |= pairs(f"{ours}.modulation", f"{theirs}.norm1.linear")
        sources |= pairs(f"{ours}.qkv", *qkv, bias=config.attention_bias)
        sources |= pairs(f"{ours}.proj", f"{theirs}.attn1.to_out.0")
        sources |= pairs(f"{ours}.fc1", f"{theirs}.ff.net.0.proj") | pairs(f"{ours}.fc2", f"{theirs}.ff.net.2")
    copied = (table, *(f"{layer}.{kind}" for layer in t for kind in ("weight", "bias")))
    repeats = {emb.format(i) + key: first + key for i in range(1, config.num_layers) for key in copied}
    return KeyMap(sources | table_of(config), frozenset({"pos_embed.pos_embed"}), repeats)
