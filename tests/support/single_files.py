"""Writes diffusers' transformers under the keys of their authors, independently of diffusers' converters.

The names are those of the modules in Black Forest Labs' `flux`, Stability's `sd3-ref` and Wan's `wan/modules/model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from torch import Tensor

COMFY = "model.diffusion_model."


def prefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the keys as ComfyUI saves them, with another part of the model in the same file."""
    return {f"{COMFY}{key}": tensor for key, tensor in state.items()} | {"vae.decoder.conv_in.bias": torch.ones(4)}


def converter_of_width(width: int) -> Any:
    """Return diffusers' converter of FLUX.1 for models of another width: it has that of the released ones in it."""
    convert: Any = SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]["checkpoint_mapping_fn"]
    constants = tuple(width if each == 3072 else each for each in convert.__code__.co_consts)
    assert constants != convert.__code__.co_consts
    return FunctionType(convert.__code__.replace(co_consts=constants), convert.__globals__)


def flux(model: Any) -> dict[str, Tensor]:
    names = {"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear"}
    embedders = {"timestep_embedder": "time_in", "text_embedder": "vector_in", "guidance_embedder": "guidance_in"}
    for theirs, bfl in embedders.items():
        for i, layer in ((1, "in"), (2, "out")):
            names[f"time_text_embed.{theirs}.linear_{i}"] = f"{bfl}.{layer}_layer"
    fused: dict[str, list[str]] = {}
    for i in range(len(model.transformer_blocks)):
        a, b = f"transformer_blocks.{i}", f"double_blocks.{i}"
        names |= {f"{a}.norm1.linear": f"{b}.img_mod.lin", f"{a}.norm1_context.linear": f"{b}.txt_mod.lin"}
        names |= {f"{a}.attn.to_out.0": f"{b}.img_attn.proj", f"{a}.attn.to_add_out": f"{b}.txt_attn.proj"}
        names |= {f"{a}.ff.net.0.proj": f"{b}.img_mlp.0", f"{a}.ff.net.2": f"{b}.img_mlp.2"}
        names |= {f"{a}.ff_context.net.0.proj": f"{b}.txt_mlp.0", f"{a}.ff_context.net.2": f"{b}.txt_mlp.2"}
        for side, norms in (("img", ("norm_q", "norm_k")), ("txt", ("norm_added_q", "norm_added_k"))):
            for norm, bfl in zip(norms, ("query_norm", "key_norm"), strict=True):
                names[f"{a}.attn.{norm}.weight"] = f"{b}.{side}_attn.norm.{bfl}.scale"
        fused[f"{b}.img_attn.qkv"] = [f"{a}.attn.to_{x}" for x in "qkv"]
        fused[f"{b}.txt_attn.qkv"] = [f"{a}.attn.add_{x}_proj" for x in "qkv"]
    for i in range(len(model.single_transformer_blocks)):
        a, b = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        names |= {f"{a}.norm.linear": f"{b}.modulation.lin", f"{a}.proj_out": f"{b}.linear2"}
        for x, bfl in (("q", "query"), ("k", "key")):
            names[f"{a}.attn.norm_{x}.weight"] = f"{b}.norm.{bfl}_norm.scale"
        fused[f"{b}.linear1"] = [*(f"{a}.attn.to_{x}" for x in "qkv"), f"{a}.proj_mlp"]
    swapped = {"norm_out.linear": "final_layer.adaLN_modulation.1"}  # the authors' shift comes before the scale
    return dict(renamed(model.state_dict(), names, fused, swapped))


def sd3(model: Any) -> dict[str, Tensor]:
    names = {"pos_embed.proj": "x_embedder.proj", "pos_embed.pos_embed": "pos_embed"}
    names |= {"context_embedder": "context_embedder", "proj_out": "final_layer.linear"}
    for theirs, own in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder")):
        names |= {f"time_text_embed.{theirs}.linear_{i}": f"{own}.mlp.{layer}" for i, layer in ((1, 0), (2, 2))}
    fused: dict[str, list[str]] = {}
    swapped = {"norm_out.linear": "final_layer.adaLN_modulation.1"}
    last = len(model.transformer_blocks) - 1
    for i in range(last + 1):
        a, b = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        (swapped if i == last else names)[f"{a}.norm1_context.linear"] = f"{b}.context_block.adaLN_modulation.1"
        names |= {f"{a}.norm1.linear": f"{b}.x_block.adaLN_modulation.1"}
        for attn in ("attn", "attn2"):
            names |= {f"{a}.{attn}.to_out.0": f"{b}.x_block.{attn}.proj"}
            names |= {f"{a}.{attn}.norm_{x}": f"{b}.x_block.{attn}.ln_{x}" for x in "qk"}
            fused[f"{b}.x_block.{attn}.qkv"] = [f"{a}.{attn}.to_{x}" for x in "qkv"]
        names |= {f"{a}.attn.norm_added_{x}": f"{b}.context_block.attn.ln_{x}" for x in "qk"}
        names |= {f"{a}.attn.to_add_out": f"{b}.context_block.attn.proj"}
        fused[f"{b}.context_block.attn.qkv"] = [f"{a}.attn.add_{x}_proj" for x in "qkv"]
        for theirs, own in (("ff", "x_block"), ("ff_context", "context_block")):
            names |= {f"{a}.{theirs}.net.0.proj": f"{b}.{own}.mlp.fc1", f"{a}.{theirs}.net.2": f"{b}.{own}.mlp.fc2"}
    return dict(renamed(model.state_dict(), names, fused, swapped))


def wan(model: Any) -> dict[str, Tensor]:
    names = {"patch_embedding": "patch_embedding", "proj_out": "head.head", "scale_shift_table": "head.modulation"}
    embedder = "condition_embedder"
    names |= {f"{embedder}.time_proj": "time_projection.1"}
    for theirs, own in (("time_embedder", "time_embedding"), ("text_embedder", "text_embedding")):
        names |= {f"{embedder}.{theirs}.linear_{i}": f"{own}.{layer}" for i, layer in ((1, 0), (2, 2))}
    for i in range(len(model.blocks)):
        block = f"blocks.{i}"
        names |= {f"{block}.scale_shift_table": f"{block}.modulation", f"{block}.norm2": f"{block}.norm3"}
        for theirs, own in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            layers = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
            names |= {f"{block}.{theirs}.{a}": f"{block}.{own}.{b}" for a, b in layers.items()}
        names |= {f"{block}.ffn.net.0.proj": f"{block}.ffn.0", f"{block}.ffn.net.2": f"{block}.ffn.2"}
    return dict(renamed(model.state_dict(), names, {}, {}))


def renamed(
    state: Mapping[str, Tensor], names: Mapping[str, str], fused: Mapping[str, list[str]], swapped: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a state dict under other names of its layers or tensors; every tensor must be used once.

    fused: name -> layers whose rows it joins. swapped: layers whose two halves of rows change places.
    """
    used: list[str] = []

    def layer(theirs: str, own: str) -> Iterator[tuple[str, Tensor]]:
        for end in ("", ".weight", ".bias"):
            if theirs + end in state:
                used.append(theirs + end)
                yield own + end, state[theirs + end]

    for theirs, own in names.items():
        yield from layer(theirs, own)
    for own, layers in fused.items():
        for parts in zip(*(layer(each, own) for each in layers), strict=True):
            yield parts[0][0], torch.cat([tensor for _, tensor in parts])
    for theirs, own in swapped.items():
        for key, tensor in layer(theirs, own):
            yield key, torch.cat(tensor.chunk(2)[::-1])
    assert sorted(used) == sorted(state), set(state) ^ set(used)
