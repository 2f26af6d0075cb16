"""Folders of diffusers' `UniDiffuserModel`: sizes in config.json and the key map, from parts that convert shares.

A folder has an unused copy of the patch convolution. Version 1 keeps the position of the data-type token apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from seqpar.loading import schemas
from seqpar.loading.keys import KeyMap, TensorSource
from seqpar.loop.models import _layers

DATA_TYPE = "use_data_type_embedding"

COPIED = {  # diffusers' name of a size -> ours
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "num_layers": "num_layers",
    "in_channels": "in_channels",
    "sample_size": "sample_size",
    "patch_size": "patch_size",
    "num_text_tokens": "text_tokens",
    "text_dim": "text_width",
    "clip_img_dim": "clip_width",
    DATA_TYPE: "data_type",
}
UNUSED = ("out_channels", "norm_num_groups", "num_embeds_ada_norm", "ff_final_dropout")


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of diffusers' config, with its defaults, and with the values that the model implements."""

    num_attention_heads: schemas.Heads = 16
    attention_head_dim: schemas.HeadDim = 88
    num_layers: schemas.Layers = 1
    in_channels: schemas.Channels
    sample_size: schemas.Side
    patch_size: schemas.Patch
    num_text_tokens: schemas.Tokens = 77
    text_dim: schemas.Width = 768
    clip_img_dim: schemas.Width = 512
    use_data_type_embedding: bool = False
    activation_fn: Literal["gelu"]  # diffusers' default is another one
    out_channels: schemas.Channels | None = None
    attention_bias: schemas.No = False
    block_type: Literal["unidiffuser"] = "unidiffuser"
    cross_attention_dim: None = None
    dropout: schemas.Zero = 0.0
    norm_elementwise_affine: schemas.Yes = True
    norm_type: Literal["layer_norm"] = "layer_norm"
    num_vector_embeds: None = None
    only_cross_attention: schemas.No = False
    pre_layer_norm: schemas.No = False
    upcast_attention: schemas.No = False
    use_linear_projection: schemas.No = False
    use_patch_pos_embed: schemas.No = False
    use_timestep_embedding: schemas.No = False
    # these have no effect
    norm_num_groups: schemas.Width | None = None
    num_embeds_ada_norm: schemas.Classes | None = None
    ff_final_dropout: bool | None = None


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `uvit.Config` from diffusers' config; `ValueError` for an unknown variant."""
    read = schemas.checked("a UniDiffuser config", config, Fields)
    found = {ours: getattr(read, theirs) for theirs, ours in COPIED.items()}
    return {**found, "out_channels": read.out_channels or read.in_channels}


def key_map(half: int, channels: int, patch: int, data_type: bool) -> KeyMap:
    """Return the key map of diffusers' folders. half: the number of blocks before and after the middle one."""
    names = {"final_norm": "transformer.norm_out", "into.image": "vae_img_in.proj", "final.image": "vae_img_out"}
    for ours, theirs in (("text", "text"), ("clip", "clip_img")):
        names |= {f"into.{ours}": f"{theirs}_in", f"final.{ours}": f"{theirs}_out"}
    sources = ends(names, channels, patch)
    sources |= tokens(("data_type_pos_embed_token", "data_type_token_embedding") if data_type else None)
    for i in range(half):
        sources |= _diffusers_block(f"first.{i}", f"transformer.transformer_in_blocks.{i}")
        theirs = f"transformer.transformer_out_blocks.{i}"
        sources |= _diffusers_block(f"second.{i}", f"{theirs}.block")
        sources |= pairs(f"second.{i}.skip", f"{theirs}.skip.skip_linear")
        sources |= pairs(f"second.{i}.skip_norm", f"{theirs}.skip.norm")
    sources |= _diffusers_block("middle", "transformer.transformer_mid_block")
    unused = frozenset(f"transformer.pos_embed.proj.{kind}" for kind in ("weight", "bias"))
    return KeyMap(sources, ignored=unused)


def _diffusers_block(ours: str, theirs: str) -> dict[str, TensorSource]:
    sources = pairs(f"{ours}.qkv", *(f"{theirs}.attn1.to_{part}" for part in "qkv"), kinds=("weight",))
    layers = {"proj": "attn1.to_out.0", "attention_norm": "norm1", "mlp_norm": "norm3"}
    for layer, its in (layers | {"fc1": "ff.net.0.proj", "fc2": "ff.net.2"}).items():
        sources |= pairs(f"{ours}.{layer}", f"{theirs}.{its}")
    return sources


def ends(names: Mapping[str, str], channels: int, patch: int) -> dict[str, TensorSource]:
    """Return the sources of the layers outside the blocks.

    The weight of the patch convolution becomes a matrix, and the rows of the image's last layer are reordered (see
    `_layers.reordered`).
    """
    sources: dict[str, TensorSource] = {}
    for ours, theirs in names.items():
        sources |= pairs(ours, theirs)
    (weight,) = sources["into.image.weight"].keys
    sources["into.image.weight"] = TensorSource((weight,), lambda kernel: kernel.flatten(1))
    for kind in ("weight", "bias"):
        keys = sources[f"final.image.{kind}"].keys
        sources[f"final.image.{kind}"] = TensorSource(keys, lambda rows: _layers.reordered(rows, channels, patch))
    return sources


def tokens(data_type: tuple[str, str] | None) -> dict[str, TensorSource]:
    """Return the sources of the positions and, with the names of its position and table, of the data-type token."""
    if data_type is None:
        return {"pos_embed": TensorSource(("pos_embed",), lambda positions: positions[0])}
    position, table = data_type
    return {
        "pos_embed": TensorSource(("pos_embed", position), _with_data_type),
        "data_types.weight": TensorSource((f"{table}.weight",)),
    }


def _with_data_type(positions_1LE: Tensor, token_11E: Tensor) -> Tensor:
    """Insert the position of the data-type token after those of the two timesteps."""
    return torch.cat((positions_1LE[0, :2], token_11E[0], positions_1LE[0, 2:]))


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def pairs(ours: str, *theirs: str, kinds: tuple[str, ...] = ("weight", "bias")) -> dict[str, TensorSource]:
    """Return the sources of a layer's parameters: one layer unchanged, or the rows of several layers."""
    keys = {kind: tuple(f"{key}.{kind}" for key in theirs) for kind in kinds}
    return {
        f"{ours}.{kind}": TensorSource(found, _rows) if len(found) > 1 else TensorSource(found)
        for kind, found in keys.items()
    }
