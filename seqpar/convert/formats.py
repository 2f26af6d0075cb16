"""Original files of transformers: how to recognise them, their config and keys, and config.json of the new folder.

DiT is facebookresearch/DiT, Large-DiT is Alpha-VLLM/LLaMA2-Accessory, U-ViT is UniDiffuser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from seqpar.loading.checkpoint import Checkpoint
from seqpar.loop.models import _layers, dit, large_dit, uvit
from seqpar.loop.models._label_dit import check_outputs, confirm, count_classes
from seqpar.types.keys import KeyMap, count_layers, shape_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Original:
    """A checkpoint and what was stored with it.

    args: arguments of the training script. heads: the user's --heads. parts: number of model-parallel files.
    """

    checkpoint: Checkpoint
    args: Mapping[str, Any]
    heads: int | None
    parts: int

    @property
    def shapes(self) -> Shapes:
        return self.checkpoint.shapes


@dataclass(frozen=True)
class PublishedFormat:
    """A published format. config_of: from shapes, confirmed by the arguments of training where they are stored."""

    model: ModuleType
    is_original: Callable[[Shapes], bool]
    config_of: Callable[[Original], Any]
    key_map: Callable[[Any], KeyMap]
    folder_config: Callable[[Any], dict[str, Any]]


# Attention heads, which shapes do not state ------------------------------------------------------------------------


def _heads_of(kind: str, width: int, layers: int, original: Original, released: Iterable[Any], named: Any) -> int:
    """The number of attention heads, never guessed. released: models, known by width and depth.

    named: the released model that args.model names, or None. Raises ValueError if nothing states the number, or if what
    states it differs.
    """
    heads, trained = original.heads, original.args.get("num_heads")
    if named is not None:
        confirm(kind, {"width": named.width, "layers": named.num_layers}, {"width": width, "layers": layers})
        for what, count in {"--heads": heads, "args.num_heads": trained}.items():
            if count not in (None, named.num_attention_heads):
                model = f"{original.args['model']}, a {kind} of {named.num_attention_heads} heads"
                raise ValueError(f"{what} is {count}, but args.model is {model}")
    if isinstance(trained, int):
        confirm(kind, {"heads": heads}, {"heads": trained})
    by_size = {(config.width, config.num_layers): config.num_attention_heads for config in released}
    count = heads or (trained if isinstance(trained, int) else by_size.get((width, layers)))
    if count is None:
        raise ValueError(
            f"the file does not state the attention heads of this {kind} (width {width}, {layers} layers), and no "
            f"released model has this size; add --heads"
        )
    if count < 1 or width % count or width // count % 2:
        raise ValueError(f"{count} heads do not divide a {kind} of width {width} into heads of equal, even width")
    return count


# DiT ---------------------------------------------------------------------------------------------------------------

# largest distances of a table of positions from the sine-cosine one: by rounding to fp32, and by averaging over a whole
# training (3e-4 at a decay of 0.9999) or bfloat16 (2e-3)
ROUNDED, MOVED = 2**-22, 4e-3


def _dit_config(original: Original) -> dit.Config:
    shapes, args = original.shapes, original.args
    width, channels, patch, _ = shape_of(shapes, "x_embedder.proj.weight", 4)
    layers, final = count_layers(shapes, "blocks"), "final_layer.linear.weight"
    named = dit.SIZES.get(str(args.get("model")).lower())
    if named is not None:
        confirm("DiT", {"patch_size": named.patch_size}, {"patch_size": patch})
    heads = _heads_of("DiT", width, layers, original, dit.SIZES.values(), named)
    side = _table_side(shapes, width) if "pos_embed" in shapes else 32 // patch
    config = dit.Config(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
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
    if "pos_embed" not in shapes:
        return config

    # The sine-cosine table is computed at run time. A table that only rounding has moved from it is stored, and other
    # sizes continue the sine-cosine one. Any other table was learned and has positions for its own size alone.
    table_1LE = original.checkpoint.tensor("pos_embed")
    index = torch.arange(side, dtype=torch.float32, device=table_1LE.device)
    distance = float((table_1LE[0].double() - _layers.sincos_2d(index, index, width)).abs().max())
    if distance <= ROUNDED:
        return config
    return replace(config, pos_stored=True, pos_scaling="none" if distance <= MOVED else "refuse")


def _table_side(shapes: Shapes, width: int) -> int:
    batch, tokens, columns = shape_of(shapes, "pos_embed", 3)
    side = math.isqrt(tokens)
    if (batch, side**2, columns) != (1, tokens, width) or not side:
        shape = (batch, tokens, columns)
        raise ValueError(f"pos_embed has shape {shape}, expected (1, side x side, {width}): positions of a square")
    return side


def _dit_keys(config: dit.Config) -> KeyMap:
    ends = {
        "x_embedder": "x_embedder.proj",
        "t_embedder.0": "t_embedder.mlp.0",
        "t_embedder.2": "t_embedder.mlp.2",
        "y_embedder": "y_embedder.embedding_table",
        "final_modulation": "final_layer.adaLN_modulation.1",
        "final": "final_layer.linear",
    }
    block: dict[str, str | tuple[str, ...]] = {"modulation": "adaLN_modulation.1", "qkv": "attn.qkv"}
    block |= {"proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    ignored = frozenset() if config.pos_stored else frozenset({"pos_embed"})
    return KeyMap(dit.sources_of(config, ends, "blocks", block), ignored)


def _dit_folder(config: dit.Config) -> dict[str, Any]:
    # `freq_shift` and `pos_scaling` keep the original's arithmetic when seqpar loads the folder; diffusers ignores
    # them. A learned table has a class name that diffusers does not know, because it would compute other positions.
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


# Large-DiT ---------------------------------------------------------------------------------------------------------


def _large_dit_config(original: Original) -> large_dit.Config:
    sizes, args = large_dit.from_shapes(original.shapes), original.args
    match = re.fullmatch(r"DiT_Llama2?_(\w+)_patch\d", str(args.get("model")))
    named = large_dit.SIZES.get(f"large-dit-{match[1].lower()}") if match else None
    confirm("Large-DiT", args, {name: sizes[name] for name in ("num_classes", "qk_norm")})
    released = large_dit.SIZES.values()
    heads = _heads_of("Large-DiT", sizes["width"], sizes["num_layers"], original, released, named)
    trained = {"sample_size": args["image_size"] // 8} if isinstance(args.get("image_size"), int) else {}
    # QK-norm is over the heads of one part
    return large_dit.Config(**large_dit.with_heads(sizes, heads) | trained, qk_norm_groups=original.parts)


def _large_dit_folder(config: large_dit.Config) -> dict[str, Any]:
    same = ("sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "num_attention_heads")
    grouped = config.num_key_value_heads != config.num_attention_heads
    return {
        "_class_name": large_dit.CLASS,
        **{name: getattr(config, name) for name in (*same, "attention_head_dim", "norm_eps", "num_classes", "qk_norm")},
        "n_kv_heads": config.num_key_value_heads if grouped else None,
        "learn_sigma": config.out_channels == 2 * config.in_channels,
        **({} if config.qk_norm_groups == 1 else {"qk_norm_groups": config.qk_norm_groups}),
    }


# U-ViT -------------------------------------------------------------------------------------------------------------

HEAD_DIM = 64  # of every published UniDiffuser; shapes do not state it
TEXT_TOKENS = 77  # CLIP's; shapes state only the number of all tokens


def _uvit_config(original: Original) -> uvit.Config:
    shapes, final = original.shapes, "decoder_pred.weight"
    width, channels, patch, _ = shape_of(shapes, "patch_embed.proj.weight", 4)
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


def _uvit_keys(config: uvit.Config) -> KeyMap:
    ends = {"into.image": "patch_embed.proj", "final.image": "decoder_pred", "final_norm": "norm"}
    ends |= {"into.text": "text_embed", "final.text": "text_out"}
    ends |= {"into.clip": "clip_img_embed", "final.clip": "clip_img_out"}
    sources = uvit.ends_of(config, ends, ("pos_embed_token", "token_embedding"))
    block = {"proj": "attn.proj", "attention_norm": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "mlp_norm": "norm3"}
    prefixes = {"middle.": "mid_block."}
    for i in range(config.num_layers // 2):
        prefixes |= {f"first.{i}.": f"in_blocks.{i}.", f"second.{i}.": f"out_blocks.{i}."}
        sources |= _layers.layers({"skip": "skip_linear", "skip_norm": "norm1"}, f"second.{i}.", f"out_blocks.{i}.")
    for ours, theirs in prefixes.items():
        sources |= _layers.layers({"qkv": "attn.qkv"}, ours, theirs, ("weight",)) | _layers.layers(block, ours, theirs)
    return KeyMap(sources)


def _uvit_folder(config: uvit.Config) -> dict[str, Any]:
    fixed = uvit.Fields(in_channels=1, sample_size=1, patch_size=1, activation_fn="gelu")
    others = (name for name in uvit.Fields.__struct_fields__ if name not in (*uvit.COPIED, *uvit.UNUSED))
    return {
        "_class_name": "UniDiffuserModel",
        **{theirs: getattr(config, ours) for theirs, ours in uvit.COPIED.items()},
        "out_channels": config.out_channels,
        **{name: getattr(fixed, name) for name in others},
    }


def is_uvit(shapes: Shapes) -> bool:
    """Whether keys are those of an original UniDiffuser; other U-ViTs have no CLIP-image token."""
    return "in_blocks.0.attn.qkv.weight" in shapes and "clip_img_embed.weight" in shapes


def _is_dit(shapes: Shapes) -> bool:
    return any(key.startswith("blocks.0.attn.") for key in shapes)


def _is_large_dit(shapes: Shapes) -> bool:  # the text-to-image variant (cap_embedder) is another model
    return "cap_embedder.1.weight" not in shapes and any(key.startswith("layers.0.feed") for key in shapes)


FORMATS = (
    PublishedFormat(dit, _is_dit, _dit_config, _dit_keys, _dit_folder),
    PublishedFormat(large_dit, _is_large_dit, _large_dit_config, large_dit.key_map, _large_dit_folder),
    PublishedFormat(uvit, is_uvit, _uvit_config, _uvit_keys, _uvit_folder),
)
