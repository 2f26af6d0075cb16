# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
"""A tiny diffusers DiT with random weights, and its weights in the original format: oracles of model and loop tests."""

from __future__ import annotations

from functools import cache

import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor, nn

from seqpar.loop.blueprint import from_diffusers
from seqpar.loop.interface import SequenceModel

CLASSES = 10
HEADS, HEAD_DIM = 3, 8


def diffusers_dit(learned_sigma: bool = True, classes: int = CLASSES, patch: int = 2, **config: object) -> nn.Module:
    """Return a DiT in fp64 with random weights (adaLN's too, so no gate is zero) and equal embedders in all blocks."""
    options = {
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD_DIM,
        "in_channels": 4,
        "num_layers": 3,
        "out_channels": 8 if learned_sigma else 4,
        "sample_size": 8,
        "patch_size": patch,
        "num_embeds_ada_norm": classes,
        **config,
    }
    model = DiTTransformer2DModel(**options).double().eval()  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(first)
    return model.requires_grad_(False)


@cache
def shared_dit(device: torch.device, layers: int = 3) -> SequenceModel:
    """Return our fp64 model with the weights of `diffusers_dit`, made once in a process; nobody may change it."""
    return from_diffusers(diffusers_dit(num_layers=layers)).build(torch.float64, device)


def with_original_arithmetic(model: nn.Module) -> nn.Module:
    """Change diffusers' DiT to compute as facebookresearch's; on its own size the positions are already equal."""
    for block in model.transformer_blocks:  # pyright: ignore
        block.norm1.emb.time_proj.downscale_freq_shift = 0
        block.norm3.eps = 1e-6
    return model


def original_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under facebookresearch/DiT's names."""
    theirs, ours = model.state_dict(), {}

    def both(new: str, *old: str) -> None:
        for kind in ("weight", "bias"):
            ours[f"{new}.{kind}"] = torch.cat([theirs[f"{name}.{kind}"] for name in old])

    both("x_embedder.proj", "pos_embed.proj")
    embedder = "transformer_blocks.0.norm1.emb"
    both("t_embedder.mlp.0", f"{embedder}.timestep_embedder.linear_1")
    both("t_embedder.mlp.2", f"{embedder}.timestep_embedder.linear_2")
    ours["y_embedder.embedding_table.weight"] = theirs[f"{embedder}.class_embedder.embedding_table.weight"]
    for i in range(len(model.transformer_blocks)):  # pyright: ignore
        old, new = f"transformer_blocks.{i}", f"blocks.{i}"
        both(f"{new}.adaLN_modulation.1", f"{old}.norm1.linear")
        both(f"{new}.attn.qkv", *(f"{old}.attn1.to_{x}" for x in "qkv"))
        both(f"{new}.attn.proj", f"{old}.attn1.to_out.0")
        both(f"{new}.mlp.fc1", f"{old}.ff.net.0.proj")
        both(f"{new}.mlp.fc2", f"{old}.ff.net.2")
    both("final_layer.adaLN_modulation.1", "proj_out_1")
    both("final_layer.linear", "proj_out_2")
    ours["pos_embed"] = model.pos_embed.pos_embed  # pyright: ignore
    return ours
