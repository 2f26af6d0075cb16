"""The key maps of DiT's two formats: facebookresearch/DiT's files and diffusers' folders.

config: `seqpar.loop.models.dit.Config`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqpar.loading.keys import KeyMap, Source
from seqpar.loop.models import _layers


def _pairs(ours: str, *theirs: str, bias: bool = True) -> dict[str, Source]:
    """Return the sources of one layer's weight and bias; several source layers are concatenated along the rows."""
    names = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{name}": Source(tuple(f"{key}.{name}" for key in theirs), _rows) for name in names}


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _ends(config: Any, embed: str, t: tuple[str, str], table: str, modulation: str, final: str) -> dict[str, Source]:
    """Return the sources of all parameters outside the blocks.

    The weight of the patch convolution becomes a matrix, and the final rows are reordered (see `_layers.reordered`).
    """
    channels, patch = config.out_channels, config.patch_size
    return {
        "x_embedder.weight": Source((f"{embed}.weight",), lambda weight: weight.flatten(1)),
        "x_embedder.bias": Source((f"{embed}.bias",)),
        **_pairs("t_embedder.0", t[0]),
        **_pairs("t_embedder.2", t[1]),
        "y_embedder.weight": Source((table,)),
        **_pairs("final_modulation", modulation),
        **{
            f"final.{name}": Source((f"{final}.{name}",), lambda rows: _layers.reordered(rows, channels, patch))
            for name in ("weight", "bias")
        },
    }


def original(config: Any) -> KeyMap:
    """Return the key map of facebookresearch/DiT's files."""
    t, table = ("t_embedder.mlp.0", "t_embedder.mlp.2"), "y_embedder.embedding_table.weight"
    final = ("final_layer.adaLN_modulation.1", "final_layer.linear")
    sources = _ends(config, "x_embedder.proj", t, table, *final)
    for i in range(config.num_layers):
        ours = theirs = f"blocks.{i}"
        sources |= _pairs(f"{ours}.modulation", f"{theirs}.adaLN_modulation.1")
        sources |= _pairs(f"{ours}.qkv", f"{theirs}.attn.qkv", bias=config.attention_bias)
        sources |= _pairs(f"{ours}.proj", f"{theirs}.attn.proj")
        sources |= _pairs(f"{ours}.fc1", f"{theirs}.mlp.fc1") | _pairs(f"{ours}.fc2", f"{theirs}.mlp.fc2")
    return KeyMap(sources | _table(config), frozenset() if config.pos_stored else frozenset({"pos_embed"}))


def _table(config: Any) -> dict[str, Source]:
    """Return the source of stored positions; diffusers does not read this key, which `seqpar convert` adds."""
    return {"pos_embed": Source(("pos_embed",))} if config.pos_stored else {}


def diffusers(config: Any) -> KeyMap:
    """Return the key map of diffusers' DiT, whose blocks each hold a copy of the embedders.

    The copy of block 0 is read; the others must be equal to it.
    """
    emb, table = "transformer_blocks.{}.norm1.emb.", "class_embedder.embedding_table.weight"
    t = ("timestep_embedder.linear_1", "timestep_embedder.linear_2")
    first = emb.format(0)
    sources = _ends(config, "pos_embed.proj", (first + t[0], first + t[1]), first + table, "proj_out_1", "proj_out_2")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        qkv = (f"{theirs}.attn1.to_{x}" for x in "qkv")
        sources |= _pairs(f"{ours}.modulation", f"{theirs}.norm1.linear")
        sources |= _pairs(f"{ours}.qkv", *qkv, bias=config.attention_bias)
        sources |= _pairs(f"{ours}.proj", f"{theirs}.attn1.to_out.0")
        sources |= _pairs(f"{ours}.fc1", f"{theirs}.ff.net.0.proj") | _pairs(f"{ours}.fc2", f"{theirs}.ff.net.2")
    copied = (table, *(f"{layer}.{kind}" for layer in t for kind in ("weight", "bias")))
    repeats = {emb.format(i) + key: first + key for i in range(1, config.num_layers) for key in copied}
    return KeyMap(sources | _table(config), frozenset({"pos_embed.pos_embed"}), repeats)
