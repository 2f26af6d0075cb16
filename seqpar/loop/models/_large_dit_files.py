"""Files of Large-DiT: the sizes that shapes, training arguments and ppdiffusers' config.json tell, and the key map.

The original files and ppdiffusers' `DiTLLaMA2DModel` have the same keys. They differ in the norm of the blocks, under
the same keys: the authors trained with RMSNorm, ppdiffusers' inference computes LayerNorm. The authors' is taken for
both; `"block_norm": "layer"` in config.json asks for ppdiffusers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from seqpar.loading import parts as schemas
from seqpar.loading.keys import KeyMap, Source, count_layers, shape_of
from seqpar.loop.models import _layers
from seqpar.loop.models._label_dit import (
    check_outputs,
    confirm,
    confirm_heads,
    count_classes,
    is_diffusers,
    original_heads,
)

CHANNELS = 4  # of the latent; the patch size follows
CLASS = "DiTLLaMA2DModel"  # ppdiffusers' name; diffusers has no such model


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True):
    """The fields of ppdiffusers' config.json, and two of ours: block_norm and qk_norm_groups."""

    num_attention_heads: schemas.Heads
    attention_head_dim: schemas.HeadDim
    num_layers: schemas.Layers | None = None
    patch_size: schemas.Patch | None = None
    in_channels: schemas.Channels | None = None
    out_channels: schemas.Channels | None = None
    sample_size: schemas.Side | None = None
    n_kv_heads: schemas.Heads | None = None
    num_classes: schemas.Classes | None = None
    norm_eps: schemas.Epsilon | None = None
    qk_norm: bool | None = None
    learn_sigma: bool | None = None
    block_norm: Literal["rms", "layer"] | None = None
    qk_norm_groups: schemas.Heads | None = None
    # the sizes that these make are in the shapes
    mlp_ratio: schemas.Number | None = None
    multiple_of: schemas.Width | None = None
    ffn_dim_multiplier: schemas.Number | None = None
    class_dropout_prob: schemas.Part | None = None


def sizes(
    shapes: Mapping[str, tuple[int, ...]], said: Mapping[str, Any], presets: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the fields of Large-DiT's `Config`, or None if these are not its files.

    said: a config.json, or what is known beside an original file. Raises ValueError for files that contradict it.
    """
    theirs = is_diffusers(said)
    if theirs and said["_class_name"] != CLASS:
        return None
    if not theirs and ("cap_embedder.1.weight" in shapes or not any(key.startswith("layers.0.feed") for key in shapes)):
        return None  # a caption embedder belongs to the text-to-image variant, which is another model
    found = _from_shapes(shapes)
    check_outputs("Large-DiT", CHANNELS, found["out_channels"])
    return found | (_from_config(found, said) if theirs else _from_training(found, said, presets))


def _from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the sizes that shapes tell; num_key_value_heads is their width until the heads are known."""
    width, inputs = shape_of(shapes, "x_embedder.weight", 2)
    patch, final = round((inputs / CHANNELS) ** 0.5), "final_layer.linear.weight"
    if CHANNELS * patch**2 != inputs:
        expected = f"{CHANNELS} x patch x patch columns"
        raise ValueError(f"got a Large-DiT with x_embedder.weight of shape {(width, inputs)}, expected {expected}")
    return {
        "width": width,
        "num_layers": count_layers(shapes, "layers"),
        "num_key_value_heads": shape_of(shapes, "layers.0.attention.wk.weight", 2)[0],
        "feed_forward": shape_of(shapes, "layers.0.feed_forward.w1.weight", 2)[0],
        "patch_size": patch,
        "in_channels": CHANNELS,
        "out_channels": _layers.output_channels(final, shape_of(shapes, final, 2)[0], patch),
        "num_classes": count_classes(shapes),
        "qk_norm": any(".attention.q_norm." in key or ".attention.k_norm." in key for key in shapes),
    }


def _from_training(found: Mapping[str, Any], said: Mapping[str, Any], presets: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads and trained size of an original file, confirmed by the arguments of training if they are there."""
    args, width, layers = said.get("args", {}), found["width"], found["num_layers"]
    match = re.fullmatch(r"DiT_Llama2?_(\w+)_patch\d", str(args.get("model")))
    named = presets.get(f"large-dit-{match[1].lower()}") if match else None
    if named is not None:
        confirm("Large-DiT", {"width": named.width, "layers": named.num_layers}, {"width": width, "layers": layers})
        confirm_heads("Large-DiT", said, named)
    confirm("Large-DiT", args, {name: found[name] for name in ("num_classes", "qk_norm")})
    heads = original_heads("Large-DiT", width, layers, said, presets.values())
    size = {"sample_size": args["image_size"] // 8} if isinstance(args.get("image_size"), int) else {}
    return _heads(found, heads) | size | {"qk_norm_groups": said.get("shards", 1)}


def _from_config(found: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads and variants of ppdiffusers' config.json, which must state the sizes of the tensors."""
    read = schemas.checked("a Large-DiT config", config, Fields)
    heads, dim = read.num_attention_heads, read.attention_head_dim
    if heads * dim != found["width"]:
        expected = f"a product of {found['width']}, the width of the tensors"
        raise ValueError(f"got a Large-DiT config with {heads} heads of width {dim}, expected {expected}")
    confirm("Large-DiT", config, {key: value for key, value in found.items() if key != "num_key_value_heads"})
    made = _heads(found, heads)
    confirm("Large-DiT", {"n_kv_heads": config.get("n_kv_heads")}, {"n_kv_heads": made["num_key_value_heads"]})
    kept = ("sample_size", "norm_eps", "block_norm", "qk_norm_groups")
    return made | {name: config[name] for name in kept if config.get(name) is not None}


def _heads(found: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return the numbers of heads; `ValueError` if keys and values have no whole number of them."""
    width, kv_width = found["width"], found["num_key_value_heads"]
    kv_heads = kv_width * heads // width
    if width % heads or width // heads % 2 or kv_heads * (width // heads) != kv_width or heads % max(kv_heads, 1):
        raise ValueError(f"got {heads} heads for a Large-DiT whose queries are {width} and keys {kv_width} wide")
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


def config_of(config: Any) -> dict[str, Any]:
    """Return the config.json, as ppdiffusers has it, of a Large-DiT with this `Config`."""
    same = ("sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "num_attention_heads")
    more = ("attention_head_dim", "norm_eps", "num_classes", "qk_norm")
    variants = {"block_norm": config.block_norm, "qk_norm_groups": config.qk_norm_groups}
    return {
        "_class_name": CLASS,
        **{name: getattr(config, name) for name in (*same, *more)},
        "n_kv_heads": None if config.num_key_value_heads == config.num_attention_heads else config.num_key_value_heads,
        "learn_sigma": config.out_channels == 2 * config.in_channels,
        **{name: value for name, value in variants.items() if value not in ("rms", 1)},
    }


def key_map(layers: int, qk_norm: bool, out_channels: int, patch_size: int) -> KeyMap:
    """Return the key map of the original files; rows of the final layer are put in the order of our patches."""
    pairs = {
        "x_embedder": "x_embedder",
        "t_embedder.0": "t_embedder.mlp.0",
        "t_embedder.2": "t_embedder.mlp.2",
        "final_modulation": "final_layer.adaLN_modulation.1",
    }
    for i in range(layers):
        pairs[f"blocks.{i}.modulation"] = f"layers.{i}.adaLN_modulation.1"
        norms = ("q_norm", "k_norm") if qk_norm else ()
        pairs |= {f"blocks.{i}.{norm}": f"layers.{i}.attention.{norm}" for norm in norms}
    both = [(f"{a}.{kind}", f"{b}.{kind}") for a, b in pairs.items() for kind in ("weight", "bias")]
    sources = {ours: Source((theirs,)) for ours, theirs in both}
    sources["y_embedder.weight"] = Source(("y_embedder.embedding_table.weight",))
    for kind in ("weight", "bias"):
        sources[f"final.{kind}"] = Source(
            (f"final_layer.linear.{kind}",), lambda rows: _layers.reordered(rows, out_channels, patch_size)
        )
    for i in range(layers):
        sources |= _block_keys(f"blocks.{i}", f"layers.{i}")
    return KeyMap(sources)


def _block_keys(ours: str, theirs: str) -> dict[str, Source]:
    """Return the sources of a block's matrices; q, k and v become one matrix, and so do w1 and w3."""
    joined = {
        "qkv": ("attention.wq", "attention.wk", "attention.wv"),
        "wo": ("attention.wo",),
        "w13": ("feed_forward.w1", "feed_forward.w3"),
        "w2": ("feed_forward.w2",),
        "attention_norm": ("attention_norm",),
        "ffn_norm": ("ffn_norm",),
    }
    return {
        f"{ours}.{name}.weight": Source(_keys(theirs, keys), lambda *rows: torch.cat(rows))
        for name, keys in joined.items()
    }


def _keys(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}.weight" for name in names)
