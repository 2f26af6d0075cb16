"""Tests every preset against its published numbers, which are repeated here so that a wrong default is noticed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from seqpar import DistributedDiT
from seqpar.loop.blueprint import locate
from seqpar.loop.models import dit, large_dit
from seqpar.mesh.mesh import Mesh
from tests.loop.models.test_large_dit import ours, plain
from tests.support.meshes import random
from tests.support.plain_large_dit import PlainLargeDiT

# depth, width, heads (a head's width follows): arXiv 2212.09748, table 1, and facebookresearch/DiT
DIT = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}
DIT_COMMON = {
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 32,
    "num_classes": 1000,
    "attention_bias": True,
    "freq_shift": 0.0,  # the original divides the sinusoid's exponent by half its width, diffusers by half - 1
    "mlp_norm_eps": 1e-6,  # diffusers has 1e-5
    "pos_scaling": "none",
    "pos_stored": False,
}

# depth, width, feed-forward width (all have 32 heads): Alpha-VLLM/LLaMA2-Accessory, Large-DiT-ImageNet
LARGE_DIT = {"600m": (16, 1536, 4096), "3b": (32, 3072, 8192), "7b": (32, 4096, 11008)}
LARGE_DIT_COMMON = {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 32,
    "num_classes": 1000,
    "qk_norm": True,
    "norm_eps": 1e-5,
    "qk_norm_groups": 1,
}


def published() -> dict[str, dict[str, Any]]:
    """Return every field of every preset."""
    presets: dict[str, dict[str, Any]] = {}
    for size, (layers, width, heads) in DIT.items():
        sizes = {"num_attention_heads": heads, "attention_head_dim": width // heads, "num_layers": layers}
        presets |= {f"dit-{size}/{patch}": {**sizes, "patch_size": patch, **DIT_COMMON} for patch in (2, 4, 8)}
    for size, (layers, width, feed_forward) in LARGE_DIT.items():
        sizes = {"width": width, "num_layers": layers, "feed_forward": feed_forward}
        presets[f"large-dit-{size}"] = {**sizes, **LARGE_DIT_COMMON}
    return presets


def test_every_preset_has_the_published_numbers() -> None:
    assert {name: asdict(config) for name, config in (dit.PRESETS | large_dit.PRESETS).items()} == published()


@pytest.mark.parametrize("name", [f"dit-{size}/2" for size in DIT])
def test_a_dit_has_layers_of_the_published_widths(name: str) -> None:
    layers, width, _ = DIT[name.removeprefix("dit-").removesuffix("/2")]
    shapes = {key: tuple(x.shape) for key, x in locate(name).meta().named_parameters()}
    assert shapes["x_embedder.weight"] == (width, 4 * 2 * 2)
    assert shapes["y_embedder.weight"] == (1001, width)
    assert shapes["t_embedder.0.weight"] == (width, 256)
    assert shapes[f"blocks.{layers - 1}.fc1.weight"] == (4 * width, width)
    assert shapes["blocks.0.modulation.weight"] == (6 * width, width)
    assert shapes["final.weight"] == (2 * 2 * 8, width)
    assert f"blocks.{layers}.fc1.weight" not in shapes


@pytest.mark.parametrize("name", [f"large-dit-{size}" for size in LARGE_DIT])
def test_a_large_dit_has_layers_of_the_published_widths(name: str) -> None:
    layers, width, feed_forward = LARGE_DIT[name.removeprefix("large-dit-")]
    shapes = {key: tuple(x.shape) for key, x in locate(name).meta().named_parameters()}
    assert shapes["y_embedder.weight"] == (1001, 1024)  # the condition has width 1024 in all presets
    assert shapes["blocks.0.modulation.weight"] == (6 * width, 1024)
    assert shapes[f"blocks.{layers - 1}.w13.weight"] == (2 * feed_forward, width)
    assert shapes["blocks.0.qkv.weight"] == (3 * width, width)
    assert shapes["blocks.0.q_norm.weight"] == (width,)  # the norm goes over all heads together
    assert f"blocks.{layers}.w2.weight" not in shapes


def published_arithmetic(config: large_dit.Config) -> PlainLargeDiT:
    """Return the plain model; all settings but sizes are written here, not taken from the config under test."""
    model = plain(replace(config, norm_eps=1e-5, qk_norm=True))
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = 1e-5  # pyright: ignore
        layer.attention.q_norm.eps = layer.attention.k_norm.eps = 1e-5  # pyright: ignore
    model.final_layer.norm_final.eps = 1e-6
    return model


def differences(eps: float) -> float:
    """Return the largest difference between the engine with its defaults and the plain model with this eps."""
    config = large_dit.Config(64, 3, 32, 32, 48, num_classes=10)  # only sizes are given
    truth = published_arithmetic(config)
    for layer in truth.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = eps  # pyright: ignore
    x, t, y = random((2, 4, 8, 8), 1), torch.tensor([960, 3]), torch.tensor([2, 10])
    want = truth(x, t, y)
    got = DistributedDiT(ours(config, torch.device("cpu")), Mesh.single())(x, timestep=t, class_labels=y).sample
    return float((got - want).abs().max() / want.abs().max())


def test_large_dit_with_its_defaults_is_the_published_arithmetic() -> None:
    assert differences(1e-5) < 1e-10
    assert differences(1e-6) > 1e-8  # negative control: the comparison depends on eps


@pytest.mark.parametrize("size", [(8, 8), (6, 10)], ids=str)
def test_rotary_rows_are_the_published_ones(size: tuple[int, int]) -> None:
    """Attention depends only on differences of positions, so a table that counts from 1 would give the same picture."""
    model = large_dit.Model(large_dit.Config(256, 1, 32, 32, 48, num_classes=10))  # the head width is 8
    index, frequencies = torch.arange(size[0] // 2 * (size[1] // 2)), 10000.0 ** -torch.tensor([0, 0.25, 0.5, 0.75])
    angles = index[:, None] * frequencies
    assert torch.allclose(model.positions(*size), torch.cat((angles.cos(), angles.sin()), dim=1), atol=1e-6)
