"""Writes small checkpoints as their authors publish them, independently of the code that reads them.

Names and layouts follow the publishers' own modules: which layers are tensor-parallel, which weights are linear,
how the decoder's levels are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

# fairscale's layers in LLaMA2-Accessory's model
COLUMN_PARALLEL = ("wq", "wk", "wv", "w1", "w3", "x_embedder", "t_embedder.mlp.0", "adaLN_modulation.1", "linear")
ROW_PARALLEL = ("wo", "w2", "t_embedder.mlp.2")
PER_RANK = ("q_norm", "k_norm")  # made for the heads of one rank


def rank_parts(state: Mapping[str, Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """Return what each of `ranks` model-parallel ranks saves of a Large-DiT's state dict."""
    parts = [dict[str, Tensor]() for _ in range(ranks)]
    for key, tensor in state.items():
        layer, kind = key.rsplit(".", 1)
        if layer.endswith((*COLUMN_PARALLEL, *PER_RANK)):
            pieces = tensor.chunk(ranks, 0)
        elif layer.endswith("embedding_table") or (layer.endswith(ROW_PARALLEL) and kind == "weight"):
            pieces = tensor.chunk(ranks, 1)
        else:
            pieces = [tensor] * ranks
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece.clone()
    return parts


def save_consolidated(folder: Path, state: Mapping[str, Tensor], ranks: int, name: str = "consolidated_ema") -> None:
    """Write one file a model-parallel rank, as LLaMA2-Accessory does."""
    for rank, part in enumerate(rank_parts(state, ranks)):
        torch.save(part, folder / f"{name}.{rank:02d}-of-{ranks:02d}.pth")


def small_vae() -> Any:
    """Return an autoencoder of three levels with random weights."""
    torch.manual_seed(0)
    levels: dict[str, Any] = {
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "block_out_channels": (32, 64, 64),
    }
    return AutoencoderKL(layers_per_block=2, **levels).eval().requires_grad_(False)


def original_decoder(vae: Any) -> dict[str, Tensor]:
    """Return the weights of diffusers' AutoencoderKL under the names of the latent-diffusion code."""
    found: dict[str, Tensor] = {}

    def put(name: str, layer: nn.Module) -> None:
        found.update({f"{name}.{kind}": tensor for kind, tensor in layer.state_dict().items()})

    def block(name: str, theirs: Any) -> None:
        for layer in ("norm1", "conv1", "norm2", "conv2"):
            put(f"{name}.{layer}", getattr(theirs, layer))
        if theirs.conv_shortcut is not None:
            put(f"{name}.nin_shortcut", theirs.conv_shortcut)

    def half(name: str, theirs: Any) -> None:
        put(f"{name}.conv_in", theirs.conv_in)
        for index, resnet in enumerate(theirs.mid_block.resnets, start=1):
            block(f"{name}.mid.block_{index}", resnet)
        attention = theirs.mid_block.attentions[0]
        layers = {"norm": attention.group_norm, "proj_out": attention.to_out[0]}
        for layer, module in {**layers, "q": attention.to_q, "k": attention.to_k, "v": attention.to_v}.items():
            put(f"{name}.mid.attn_1.{layer}", module)
            if layer != "norm":  # 1 x 1 convolutions there
                found[f"{name}.mid.attn_1.{layer}.weight"] = module.weight[:, :, None, None]
        put(f"{name}.norm_out", theirs.conv_norm_out)
        put(f"{name}.conv_out", theirs.conv_out)

    half("encoder", vae.encoder)
    half("decoder", vae.decoder)
    for level, down in enumerate(vae.encoder.down_blocks):
        for index, resnet in enumerate(down.resnets):
            block(f"encoder.down.{level}.block.{index}", resnet)
        if down.downsamplers:
            put(f"encoder.down.{level}.downsample.conv", down.downsamplers[0].conv)
    for level, up in enumerate(reversed(vae.decoder.up_blocks)):
        for index, resnet in enumerate(up.resnets):
            block(f"decoder.up.{level}.block.{index}", resnet)
        if up.upsamplers:
            put(f"decoder.up.{level}.upsample.conv", up.upsamplers[0].conv)
    put("quant_conv", vae.quant_conv)
    put("post_quant_conv", vae.post_quant_conv)
    return found


def original_uvit(unet: Any) -> dict[str, Tensor]:
    """Return the weights of diffusers' UniDiffuserModel under the names of the original U-ViT."""
    found: dict[str, Tensor] = {"pos_embed": unet.pos_embed}
    trunk = unet.transformer
    layers: dict[str, Any] = {"patch_embed.proj": unet.vae_img_in.proj, "decoder_pred": unet.vae_img_out}
    layers |= {"text_embed": unet.text_in, "text_out": unet.text_out, "norm": trunk.norm_out}
    layers |= {"clip_img_embed": unet.clip_img_in, "clip_img_out": unet.clip_img_out}
    if unet.use_data_type_embedding:
        found["pos_embed_token"] = unet.data_type_pos_embed_token
        layers["token_embedding"] = unet.data_type_token_embedding
    blocks = {f"in_blocks.{i}": block for i, block in enumerate(trunk.transformer_in_blocks)}
    blocks["mid_block"] = trunk.transformer_mid_block
    for i, pair in enumerate(trunk.transformer_out_blocks):
        blocks[f"out_blocks.{i}"] = pair["block"]
        layers |= {f"out_blocks.{i}.skip_linear": pair["skip"].skip_linear, f"out_blocks.{i}.norm1": pair["skip"].norm}
    for name, block in blocks.items():
        attention, feed = block.attn1, block.ff.net
        found[f"{name}.attn.qkv.weight"] = torch.cat(
            [x.weight for x in (attention.to_q, attention.to_k, attention.to_v)]
        )
        layers |= {f"{name}.attn.proj": attention.to_out[0], f"{name}.norm2": block.norm1, f"{name}.norm3": block.norm3}
        layers |= {f"{name}.mlp.fc1": feed[0].proj, f"{name}.mlp.fc2": feed[2]}
    for name, layer in layers.items():
        found |= {f"{name}.{kind}": tensor for kind, tensor in layer.state_dict().items()}
    return found


def save_unidiffuser(folder: Path, pipe: Any, version: str) -> None:
    """Write the three files of UniDiffuser's authors from the parts of diffusers' pipeline.

    The caption decoder was trained with DataParallel, so that its keys start with "module.".
    """
    torch.save(original_uvit(pipe.unet), folder / f"uvit_{version}.pth")
    torch.save(original_decoder(pipe.vae), folder / "autoencoder_kl.pth")
    captions = {
        f"module.{key.replace('transformer.', 'gpt.', 1)}": x for key, x in pipe.text_decoder.state_dict().items()
    }
    torch.save(captions, folder / "caption_decoder.pth")
