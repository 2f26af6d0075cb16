"""Original files of Large-DiT: config from shapes and the arguments of training, and the folder that seqpar loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from seqpar.convert._sizes import confirm_heads, heads_of
from seqpar.loop.models import _large_dit_files, large_dit
from seqpar.loop.models._label_dit import confirm


def is_original(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether these are keys of Large-DiT; its text-to-image variant (cap_embedder) is another model."""
    return "cap_embedder.1.weight" not in shapes and any(key.startswith("layers.0.feed") for key in shapes)


def config_of(
    shapes: Mapping[str, tuple[int, ...]], args: Mapping[str, Any], heads: int | None, parts: int
) -> large_dit.Config:
    """Return the config from the tensors' shapes, confirmed by the arguments of training where they are stored.

    parts: the number of model-parallel files; QK-norm is over the heads of one part.
    """
    sizes = _large_dit_files.from_shapes(shapes)
    width, layers = sizes["width"], sizes["num_layers"]
    match = re.fullmatch(r"DiT_Llama2?_(\w+)_patch\d", str(args.get("model")))
    released = large_dit.PRESETS.get(f"large-dit-{match[1].lower()}") if match else None
    if released is not None:
        stated = {"width": released.width, "layers": released.num_layers}
        confirm("Large-DiT", stated, {"width": width, "layers": layers})
        confirm_heads("Large-DiT", args, heads, released)
    confirm("Large-DiT", args, {name: sizes[name] for name in ("num_classes", "qk_norm")})
    count = heads_of("Large-DiT", width, layers, args, heads, large_dit.PRESETS.values())
    trained = {"sample_size": args["image_size"] // 8} if isinstance(args.get("image_size"), int) else {}
    return large_dit.Config(**_large_dit_files.with_heads(sizes, count) | trained, qk_norm_groups=parts)


def folder_config(config: large_dit.Config) -> dict[str, Any]:
    """Return the config.json of the folder that holds this model, which seqpar alone loads."""
    same = ("sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "num_attention_heads")
    grouped = config.num_key_value_heads != config.num_attention_heads
    return {
        "_class_name": _large_dit_files.CLASS,
        **{name: getattr(config, name) for name in (*same, "attention_head_dim", "norm_eps", "num_classes", "qk_norm")},
        "n_kv_heads": config.num_key_value_heads if grouped else None,
        "learn_sigma": config.out_channels == 2 * config.in_channels,
        **({} if config.qk_norm_groups == 1 else {"qk_norm_groups": config.qk_norm_groups}),
    }
