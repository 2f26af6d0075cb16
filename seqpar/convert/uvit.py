"""Original files of UniDiffuser's U-ViT: config, key map and diffusers' config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqpar.loading.keys import KeyMap, count_layers, shape_of
from seqpar.loop.models import _layers, uvit
from seqpar.loop.models._uvit_files import COPIED, UNUSED, Fields, ends, pairs, tokens

HEAD_DIM = 64  # of every published UniDiffuser; shapes do not state it
TEXT_TOKENS = 77  # CLIP's; shapes state only the number of all tokens

Shapes = Mapping[str, tuple[int, ...]]


def is_original(shapes: Shapes) -> bool:
    """Return whether keys are those of an original UniDiffuser; other U-ViTs have no CLIP-image token."""
    return "in_blocks.0.attn.qkv.weight" in shapes and "clip_img_embed.weight" in shapes


def config_of(shapes: Shapes) -> uvit.Config:
    """Return the config from the tensors' shapes."""
    width, channels, patch, _ = shape_of(shapes, "patch_embed.proj.weight", 4)
    final = "decoder_pred.weight"
    image_tokens = shape_of(shapes, "pos_embed", 3)[1] - TEXT_TOKENS - 3
    side = round(max(image_tokens, 0) ** 0.5)
    if width % HEAD_DIM or side**2 != image_tokens or not image_tokens:
        raise ValueError(
            f"a UniDiffuser of width {width} with {image_tokens} image tokens; expected a multiple of the head dim "
            f"{HEAD_DIM}, and a square image next to {TEXT_TOKENS} text tokens"
        )
    return uvit.Config(
        num_attention_heads=width // HEAD_DIM,
        attention_head_dim=HEAD_DIM,
        num_layers=2 * count_layers(shapes, "in_blocks"),
        sample_size=side * patch,
        patch_size=patch,
        in_channels=channels,
        out_channels=_layers.output_channels(final, shape_of(shapes, final, 2)[0], patch),
        text_tokens=TEXT_TOKENS,
        text_width=shape_of(shapes, "text_embed.weight", 2)[1],
        clip_width=shape_of(shapes, "clip_img_embed.weight", 2)[1],
        data_type="token_embedding.weight" in shapes,
    )


def key_map(config: uvit.Config) -> KeyMap:
    """Return the key map of the original files, which have q, k and v in one matrix."""
    half = config.num_layers // 2  # blocks before and after the middle one
    names = {"into.image": "patch_embed.proj", "final.image": "decoder_pred", "final_norm": "norm"}
    for ours, theirs in (("text", "text"), ("clip", "clip_img")):
        names |= {f"into.{ours}": f"{theirs}_embed", f"final.{ours}": f"{theirs}_out"}
    sources = ends(names, config.out_channels, config.patch_size)
    sources |= tokens(("pos_embed_token", "token_embedding") if config.data_type else None)
    blocks = [(f"first.{i}", f"in_blocks.{i}") for i in range(half)] + [("middle", "mid_block")]
    blocks += [(f"second.{i}", f"out_blocks.{i}") for i in range(half)]
    for ours, theirs in blocks:
        sources |= pairs(f"{ours}.qkv", f"{theirs}.attn.qkv", kinds=("weight",))
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
            sources |= pairs(f"{ours}.{layer}", f"{theirs}.{its}")
    return KeyMap(sources)


def folder_config(config: uvit.Config) -> dict[str, Any]:
    """Return diffusers' config.json of the folder that holds this model."""
    fixed = Fields(in_channels=1, sample_size=1, patch_size=1, activation_fn="gelu")
    return {
        "_class_name": "UniDiffuserModel",
        **{theirs: getattr(config, ours) for theirs, ours in COPIED.items()},
        "out_channels": config.out_channels,
        **{name: getattr(fixed, name) for name in Fields.__struct_fields__ if name not in (*COPIED, *UNUSED)},
    }
