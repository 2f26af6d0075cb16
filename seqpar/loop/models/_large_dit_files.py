"""Folders of Large-DiT that `seqpar convert` writes: the sizes in config.json and shapes, and the key map.

The keys are those of the authors' files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from seqpar.loading import schemas
from seqpar.loading.keys import KeyMap, TensorSource, count_layers, shape_of
from seqpar.loop.models import _layers
from seqpar.loop.models._label_dit import check_outputs, confirm, count_classes

CHANNELS = 4  # of the latent; the patch size follows
CLASS = "DiTLLaMA2DModel"  # in config.json; diffusers has no such model


class Fields(schemas.Schema, frozen=True, forbid_unknown_fields=True):
    """The fields of config.json."""

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
    qk_norm_groups: schemas.Heads | None = None


def sizes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `large_dit.Config`; ValueError if config.json and tensors contradict each other."""
    found = from_shapes(shapes)
    read = schemas.checked("a Large-DiT config", config, Fields)
    heads, dim = read.num_attention_heads, read.attention_head_dim
    if heads * dim != found["width"]:
        raise ValueError(
            f"a Large-DiT config has {heads} heads of width {dim}, but the tensors are {found['width']} wide"
        )
    confirm("Large-DiT", config, {key: value for key, value in found.items() if key != "num_key_value_heads"})
    complete = with_heads(found, heads)
    confirm("Large-DiT", {"n_kv_heads": config.get("n_kv_heads")}, {"n_kv_heads": complete["num_key_value_heads"]})
    kept = ("sample_size", "norm_eps", "qk_norm_groups")
    return complete | {name: config[name] for name in kept if config.get(name) is not None}


def from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the sizes that shapes state; num_key_value_heads is a width until `with_heads`."""
    width, inputs = shape_of(shapes, "x_embedder.weight", 2)
    patch, final = round((inputs / CHANNELS) ** 0.5), "final_layer.linear.weight"
    if CHANNELS * patch**2 != inputs:
        expected = f"{CHANNELS} x patch x patch columns"
        raise ValueError(f"got a Large-DiT with x_embedder.weight of shape {(width, inputs)}, expected {expected}")
    outputs = _layers.output_channels(final, shape_of(shapes, final, 2)[0], patch)
    check_outputs("Large-DiT", CHANNELS, outputs)
    return {
        "width": width,
        "num_layers": count_layers(shapes, "layers"),
        "num_key_value_heads": shape_of(shapes, "layers.0.attention.wk.weight", 2)[0],
        "feed_forward": shape_of(shapes, "layers.0.feed_forward.w1.weight", 2)[0],
        "patch_size": patch,
        "in_channels": CHANNELS,
        "out_channels": outputs,
        "num_classes": count_classes(shapes),
        "qk_norm": any(".attention.q_norm." in key or ".attention.k_norm." in key for key in shapes),
    }


def with_heads(found: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Return sizes with the numbers of heads; ValueError if keys and values have no whole number of them."""
    width, kv_width = found["width"], found["num_key_value_heads"]
    kv_heads = kv_width * heads // width
    if width % heads or width // heads % 2 or kv_heads * (width // heads) != kv_width or heads % max(kv_heads, 1):
        raise ValueError(f"got {heads} heads for a Large-DiT whose queries are {width} and keys {kv_width} wide")
    return {**found, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def key_map(layers: int, qk_norm: bool, out_channels: int, patch_size: int) -> KeyMap:
    """Return the key map; rows of the final layer are put in the order of our patches."""
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
    sources = {ours: TensorSource((theirs,)) for ours, theirs in both}
    sources["y_embedder.weight"] = TensorSource(("y_embedder.embedding_table.weight",))
    for kind in ("weight", "bias"):
        sources[f"final.{kind}"] = TensorSource(
            (f"final_layer.linear.{kind}",), lambda rows: _layers.reordered(rows, out_channels, patch_size)
        )
    for i in range(layers):
        sources |= _block_keys(f"blocks.{i}", f"layers.{i}")
    return KeyMap(sources)


def _block_keys(ours: str, theirs: str) -> dict[str, TensorSource]:
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
        f"{ours}.{name}.weight": TensorSource(_keys(theirs, keys), lambda *rows: torch.cat(rows))
        for name, keys in joined.items()
    }


def _keys(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}.weight" for name in names)
