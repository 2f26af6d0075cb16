"""Checkpoints of UniDiffuser's U-ViT: the original files, and the folders of diffusers' `UniDiffuserModel`.

They hold the same tensors under other names. An original file has q, k and v in one matrix, and a diffusers folder has
an unused copy of the patch convolution. In both, version 1 keeps the position of the data-type token apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from seqpar.loading import parts as schemas
from seqpar.loading.keys import KeyMap, Source, count_layers, shape_of
from seqpar.loop.models import _layers

HEAD_DIM = 64  # of every published UniDiffuser; the shapes do not tell it
DATA_TYPE = "use_data_type_embedding"
TEXT_TOKENS = 77  # CLIP's; the shapes tell only the number of all tokens

Shapes = Mapping[str, tuple[int, ...]]

_COPIED = {
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
"""diffusers' name of a size -> ours."""

_UNUSED = ("out_channels", "norm_num_groups", "num_embeds_ada_norm", "ff_final_dropout")


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
    found = {ours: getattr(read, theirs) for theirs, ours in _COPIED.items()}
    return {**found, "out_channels": read.out_channels or read.in_channels}


def config_of(config: Any) -> dict[str, Any]:
    """Return diffusers' config.json of a U-ViT with this `Config`."""
    fixed = Fields(in_channels=1, sample_size=1, patch_size=1, activation_fn="gelu")
    return {
        "_class_name": "UniDiffuserModel",
        **{theirs: getattr(config, ours) for theirs, ours in _COPIED.items()},
        "out_channels": config.out_channels,
        **{name: getattr(fixed, name) for name in Fields.__struct_fields__ if name not in (*_COPIED, *_UNUSED)},
    }


def is_original(shapes: Shapes) -> bool:
    """Return whether keys are those of an original UniDiffuser; other U-ViTs have no CLIP-image token."""
    return "in_blocks.0.attn.qkv.weight" in shapes and "clip_img_embed.weight" in shapes


def sizes_of_original(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of `seqpar.loop.models.uvit.Config` that follow from an original file's shapes."""
    width, channels, patch, _ = shape_of(shapes, "patch_embed.proj.weight", 4)
    final = "decoder_pred.weight"
    tokens = shape_of(shapes, "pos_embed", 3)[1] - TEXT_TOKENS - 3
    side = round(max(tokens, 0) ** 0.5)
    if width % HEAD_DIM or side**2 != tokens or not tokens:
        raise ValueError(
            f"got a UniDiffuser of width {width} with {tokens} image tokens, expected a multiple of {HEAD_DIM}, the "
            f"head dim, and a square image with {TEXT_TOKENS} text tokens; convert it to a diffusers folder, whose "
            f"config names the sizes"
        )
    return {
        "num_attention_heads": width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "num_layers": 2 * count_layers(shapes, "in_blocks"),
        "sample_size": side * patch,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": _layers.output_channels(final, shape_of(shapes, final, 2)[0], patch),
        "text_tokens": TEXT_TOKENS,
        "text_width": shape_of(shapes, "text_embed.weight", 2)[1],
        "clip_width": shape_of(shapes, "clip_img_embed.weight", 2)[1],
        "data_type": "token_embedding.weight" in shapes,
    }


def original_keys(half: int, channels: int, patch: int, data_type: bool) -> KeyMap:
    """Return the key map of an original file. half: the blocks before and after the middle one."""
    ends = {"into.image": "patch_embed.proj", "final.image": "decoder_pred", "final_norm": "norm"}
    for ours, theirs in (("text", "text"), ("clip", "clip_img")):
        ends |= {f"into.{ours}": f"{theirs}_embed", f"final.{ours}": f"{theirs}_out"}
    sources = _ends(ends, channels, patch)
    sources |= _tokens(("pos_embed_token", "token_embedding") if data_type else None)
    blocks = [(f"first.{i}", f"in_blocks.{i}") for i in range(half)] + [("middle", "mid_block")]
    blocks += [(f"second.{i}", f"out_blocks.{i}") for i in range(half)]
    for ours, theirs in blocks:
        sources |= _pairs(f"{ours}.qkv", f"{theirs}.attn.qkv", kinds=("weight",))
        layers = {
            "proj": "attn.proj",
            "attention_norm": "norm2",
            "fc1": "mlp.fc1",
            "fc2": "mlp.fc2",
            "mlp_norm": "norm3",
        }
        if ours.startswith("second"):
            layers |= {"skip": "skip_linear", "skip_norm": "norm1"}
        for layer, its in layers.items():
            sources |= _pairs(f"{ours}.{layer}", f"{theirs}.{its}")
    return KeyMap(sources)


def diffusers_keys(half: int, channels: int, patch: int, data_type: bool) -> KeyMap:
    """Return the key map of diffusers' `UniDiffuserModel`; see `original_keys`."""
    ends = {"final_norm": "transformer.norm_out", "into.image": "vae_img_in.proj", "final.image": "vae_img_out"}
    for ours, theirs in (("text", "text"), ("clip", "clip_img")):
        ends |= {f"into.{ours}": f"{theirs}_in", f"final.{ours}": f"{theirs}_out"}
    sources = _ends(ends, channels, patch)
    sources |= _tokens(("data_type_pos_embed_token", "data_type_token_embedding") if data_type else None)
    for i in range(half):
        sources |= _diffusers_block(f"first.{i}", f"transformer.transformer_in_blocks.{i}")
        theirs = f"transformer.transformer_out_blocks.{i}"
        sources |= _diffusers_block(f"second.{i}", f"{theirs}.block")
        sources |= _pairs(f"second.{i}.skip", f"{theirs}.skip.skip_linear")
        sources |= _pairs(f"second.{i}.skip_norm", f"{theirs}.skip.norm")
    sources |= _diffusers_block("middle", "transformer.transformer_mid_block")
    unused = frozenset(f"transformer.pos_embed.proj.{kind}" for kind in ("weight", "bias"))
    return KeyMap(sources, ignored=unused)


def _diffusers_block(ours: str, theirs: str) -> dict[str, Source]:
    sources = _pairs(f"{ours}.qkv", *(f"{theirs}.attn1.to_{part}" for part in "qkv"), kinds=("weight",))
    layers = {"proj": "attn1.to_out.0", "attention_norm": "norm1", "mlp_norm": "norm3"}
    for layer, its in (layers | {"fc1": "ff.net.0.proj", "fc2": "ff.net.2"}).items():
        sources |= _pairs(f"{ours}.{layer}", f"{theirs}.{its}")
    return sources


def _ends(names: Mapping[str, str], channels: int, patch: int) -> dict[str, Source]:
    """Return the sources of the layers outside the blocks.

    The weight of the patch convolution becomes a matrix, and the rows of the image's last layer are reordered (see
    `_layers.reordered`).
    """
    sources: dict[str, Source] = {}
    for ours, theirs in names.items():
        sources |= _pairs(ours, theirs)
    (weight,) = sources["into.image.weight"].keys
    sources["into.image.weight"] = Source((weight,), lambda kernel: kernel.flatten(1))
    for kind in ("weight", "bias"):
        keys = sources[f"final.image.{kind}"].keys
        sources[f"final.image.{kind}"] = Source(keys, lambda rows: _layers.reordered(rows, channels, patch))
    return sources


def _tokens(data_type: tuple[str, str] | None) -> dict[str, Source]:
    """Return the sources of the positions and, with the names of its position and table, of the data-type token."""
    if data_type is None:
        return {"pos_embed": Source(("pos_embed",), lambda positions: positions[0])}
    position, table = data_type
    return {
        "pos_embed": Source(("pos_embed", position), _with_data_type),
        "data_types.weight": Source((f"{table}.weight",)),
    }


def _with_data_type(positions_1LE: Tensor, token_11E: Tensor) -> Tensor:
    """Insert the position of the data-type token after those of the two timesteps."""
    return torch.cat((positions_1LE[0, :2], token_11E[0], positions_1LE[0, 2:]))


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _pairs(ours: str, *theirs: str, kinds: tuple[str, ...] = ("weight", "bias")) -> dict[str, Source]:
    """Return the sources of a layer's parameters: one layer unchanged, or the rows of several layers."""
    keys = {kind: tuple(f"{key}.{kind}" for key in theirs) for kind in kinds}
    return {f"{ours}.{kind}": Source(found, _rows) if len(found) > 1 else Source(found) for kind, found in keys.items()}
