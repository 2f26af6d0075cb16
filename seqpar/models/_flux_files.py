"""Diffusers' checkpoints of FLUX.1: the sizes that a config names, and the key map.

Every parameter of the model is one tensor of diffusers' module, or several of them concatenated along their rows (q, k
and v), so that diffusers' parameters can be views of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from seqpar.types import schemas
from seqpar.types.keys import KeyMap, Source

PATCH = 2  # diffusers' pipeline cuts the latent into patches of 2 x 2, and its transformer has a patch size of 1


RotaryPart = Annotated[int, Meta(ge=0, le=4096, multiple_of=2)]
Values = Annotated[int, Meta(ge=PATCH**2, le=1 << 16, multiple_of=PATCH**2)]  # of a patch of the latent
_COPIED = (
    "num_layers",
    "num_single_layers",
    "num_attention_heads",
    "attention_head_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
    "guidance_embeds",
    "axes_dims_rope",
)


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True):
    """The fields of diffusers' config; its pipeline makes the patches."""

    num_layers: schemas.Layers | None = None
    num_single_layers: schemas.Layers | None = None
    num_attention_heads: schemas.Heads | None = None
    attention_head_dim: schemas.HeadDim | None = None
    joint_attention_dim: schemas.Width | None = None
    pooled_projection_dim: schemas.Width | None = None
    guidance_embeds: bool | None = None
    axes_dims_rope: tuple[RotaryPart, RotaryPart, RotaryPart] | None = None
    in_channels: Values = 16 * PATCH**2
    out_channels: Values | None = None
    patch_size: Literal[1] = 1


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `seqpar.models.flux.Config` from diffusers' config; `ValueError` for an unknown variant."""
    read = schemas.checked("a FLUX.1 config", config, Fields)
    found = {key: value for key in _COPIED if (value := getattr(read, key)) is not None}
    outputs = read.out_channels or read.in_channels
    return {**found, "in_channels": read.in_channels // PATCH**2, "out_channels": outputs // PATCH**2}


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def _pairs(ours: str, *theirs: str, kinds: tuple[str, ...] = ("weight", "bias")) -> dict[str, Source]:
    """Return the sources of a layer's parameters: one layer unchanged, or the rows of several layers."""
    keys = {kind: tuple(f"{key}.{kind}" for key in theirs) for kind in kinds}
    return {f"{ours}.{kind}": Source(found, _rows) if len(found) > 1 else Source(found) for kind, found in keys.items()}


def key_map(layers: int, single_layers: int, guidance: bool) -> KeyMap:
    """Return the key map of diffusers' FLUX.1 with so many blocks; guidance: whether it embeds the guidance scale."""
    sources = _pairs("x_embedder", "x_embedder") | _pairs("context_embedder", "context_embedder")
    sources |= _pairs("final_modulation", "norm_out.linear") | _pairs("final", "proj_out")
    embedders = {"t_embedder": "timestep_embedder", "pooled_embedder": "text_embedder"}
    if guidance:
        embedders["g_embedder"] = "guidance_embedder"
    for ours, theirs in embedders.items():
        for index, layer in ((0, "linear_1"), (2, "linear_2")):
            sources |= _pairs(f"{ours}.{index}", f"time_text_embed.{theirs}.{layer}")
    for i in range(layers):
        sources |= _double_keys(f"blocks.{i}", f"transformer_blocks.{i}")
    for i in range(single_layers):
        ours, theirs = f"single.{i}", f"single_transformer_blocks.{i}"
        sources |= _pairs(f"{ours}.modulation", f"{theirs}.norm.linear")
        sources |= _attention_keys(ours, f"{theirs}.attn", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
        sources |= _pairs(f"{ours}.fc1", f"{theirs}.proj_mlp") | _pairs(f"{ours}.out", f"{theirs}.proj_out")
    return KeyMap(sources)


def _double_keys(ours: str, theirs: str) -> dict[str, Source]:
    """Return the sources of a double block; diffusers names the text's layers "context" or "added"."""
    image, text, attn = f"{ours}.image", f"{ours}.text", f"{theirs}.attn"
    return {
        **_pairs(f"{image}.modulation", f"{theirs}.norm1.linear"),
        **_pairs(f"{text}.modulation", f"{theirs}.norm1_context.linear"),
        **_attention_keys(image, attn, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")),
        **_attention_keys(text, attn, ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k")),
        **_pairs(f"{image}.proj", f"{attn}.to_out.0"),
        **_pairs(f"{text}.proj", f"{attn}.to_add_out"),
        **_pairs(f"{image}.fc1", f"{theirs}.ff.net.0.proj"),
        **_pairs(f"{text}.fc1", f"{theirs}.ff_context.net.0.proj"),
        **_pairs(f"{image}.fc2", f"{theirs}.ff.net.2"),
        **_pairs(f"{text}.fc2", f"{theirs}.ff_context.net.2"),
    }


def _attention_keys(ours: str, attn: str, qkv: tuple[str, ...], norms: tuple[str, str]) -> dict[str, Source]:
    sources = _pairs(f"{ours}.qkv", *(f"{attn}.{layer}" for layer in qkv))
    for name, norm in zip(("q_norm", "k_norm"), norms, strict=True):
        sources |= _pairs(f"{ours}.{name}", f"{attn}.{norm}", kinds=("weight",))
    return sources
