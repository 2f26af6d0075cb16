"""Tests that Large-DiT equals an independent plain implementation in fp64: all norms and variants, any sharding."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT
from seqpar.loading.checkpoint import from_state_dict
from seqpar.loop.blueprint import Blueprint, locate
from seqpar.loop.models import large_dit
from seqpar.mesh.mesh import Mesh
from tests.graphs.test_distributed import local
from tests.support.meshes import LAYOUTS, mesh_for, random
from tests.support.pairs import covering
from tests.support.plain_large_dit import PlainLargeDiT
from tests.support.pool import Pool

CLOSE = 1e-10
TINY = large_dit.Config(64, 3, 32, 32, 48, num_classes=10)  # 32 heads of width 2
VARIANTS = {
    "released": TINY,
    "no qk norm": replace(TINY, qk_norm=False),
    "grouped": replace(TINY, num_key_value_heads=8),
}


def plain(config: large_dit.Config) -> PlainLargeDiT:
    model, generator = PlainLargeDiT(config).double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.requires_grad_(False)


def ours(config: large_dit.Config, device: torch.device) -> large_dit.Model:
    keys = large_dit.key_map(config)
    blueprint = Blueprint("plain", large_dit, config, from_state_dict("plain", plain(config).state_dict()), keys)
    model = blueprint.build(torch.float64, device)
    assert isinstance(model, large_dit.Model)
    return model


def inputs(size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    return random((2, 4, *size), 1), torch.tensor([960, 3]), torch.tensor([2, 10])


@pytest.mark.parametrize(
    ("variant", "size"), [("released", (8, 8)), ("released", (4, 2)), ("no qk norm", (6, 10)), ("grouped", (6, 10))]
)
def test_large_dit_equals_the_plain_one(variant: str, size: tuple[int, int]) -> None:
    config = VARIANTS[variant]
    x, t, y = inputs(size)
    truth = plain(config)(x, t, y)
    dit = DistributedDiT(ours(config, torch.device("cpu")), Mesh.single())
    assert (dit(x, timestep=t, class_labels=y).sample - truth).abs().max() < CLOSE * truth.abs().max()


@cache
def shared(variant: str, device: torch.device) -> large_dit.Model:
    return ours(VARIANTS[variant], device)


@cache
def truth(variant: str, device: str) -> Tensor:
    # a device's own, because sines in fp32 differ between CPUs and GPUs
    return plain(VARIANTS[variant]).to(device)(*(z.to(device) for z in inputs((6, 10)))).cpu()


ROWS: list[Any] = [case.values for case in covering(LAYOUTS, ("released", "grouped"), turns=(2, 3, 4))]


def sharded(rank: int, world: int, device: torch.device) -> list[Tensor]:
    x, t, y = (z.to(device) for z in inputs((6, 10)))
    found = []
    for strategy, variant, size in ROWS:
        if size == world:
            dit = DistributedDiT(shared(variant, device), mesh_for(strategy, world, device), strategy, local(device))
            found.append(dit(x, timestep=t, class_labels=y).sample)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharded_large_dit_equals_the_plain_one(ranks: Pool, world: int) -> None:
    """15 tokens and 32 heads (or 8 key-value heads) are uneven on 2, 3 or 4 ranks."""
    rows = [row for row in ROWS if row[2] == world]
    for found in ranks.run(world, sharded):
        for row, got in zip(rows, found, strict=True):
            want = truth(row[1], ranks.device)
            assert (got - want).abs().max() < CLOSE * want.abs().max(), row


def published_arithmetic(eps: float = 1e-5, qk_norm: bool = True) -> Tensor:
    """The plain model's output; all settings but sizes are written here, not taken from the config under test."""
    model: Any = plain(replace(TINY, norm_eps=1e-5, qk_norm=True))
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = eps
        layer.attention.q_norm.eps = layer.attention.k_norm.eps = 1e-5
        if not qk_norm:
            layer.attention.q_norm = layer.attention.k_norm = torch.nn.Identity()
    model.final_layer.norm_final.eps = 1e-6
    return model(*inputs((8, 8)))


def test_large_dit_with_its_defaults_is_the_published_arithmetic() -> None:
    x, t, y = inputs((8, 8))  # of `TINY` only sizes are given
    got = DistributedDiT(ours(TINY, torch.device("cpu")), Mesh.single())(x, timestep=t, class_labels=y).sample

    def error(want: Tensor) -> float:
        return float((got - want).abs().max() / want.abs().max())

    assert error(published_arithmetic()) < CLOSE
    assert error(published_arithmetic(eps=1e-6)) > 1e-8  # negative controls: the comparison depends on both norms
    assert error(published_arithmetic(qk_norm=False)) > 1e-4


@pytest.mark.parametrize("heads", [32, 8, 4])
def test_rotary_has_the_bits_of_the_originals_complex_table(heads: int) -> None:
    """LLaMA2-Accessory makes it in fp32 by torch.polar; cosines and sines by themselves have others."""
    model, dim = large_dit.Model(replace(TINY, num_attention_heads=heads)), 64 // heads
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    angles = torch.outer(torch.arange(1024), frequencies).float()
    table = torch.polar(torch.ones_like(angles), angles)
    cos, sin = model.positions(64, 64).chunk(2, dim=-1)
    assert torch.equal(cos, table.real)
    assert torch.equal(sin, table.imag)
    assert not (torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin()))  # negative control
    assert torch.equal(model.positions(6, 10)[:, : dim // 2], cos[:15])  # by the raster index, for any length
    assert model.positions(256, 256).shape == (16384, dim)


# depth, width, feed-forward width (all have 32 heads), parameters: Alpha-VLLM/LLaMA2-Accessory, Large-DiT-ImageNet
PUBLISHED = {
    "large-dit-600m": (16, 1536, 4096, 609_836_576),
    "large-dit-3b": (32, 3072, 8192, 4_237_824_032),
    "large-dit-7b": (32, 4096, 11008, 7_293_819_936),
}
COMMON = {
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_size_has_the_published_numbers_and_widths(name: str) -> None:
    layers, width, feed_forward, parameters = PUBLISHED[name]
    sizes = {"width": width, "num_layers": layers, "feed_forward": feed_forward}
    assert large_dit.SIZES.keys() == PUBLISHED.keys()
    assert asdict(large_dit.SIZES[name]) == {**sizes, **COMMON}
    shapes = {key: tuple(x.shape) for key, x in locate(name).meta().named_parameters()}
    assert sum(map(math.prod, shapes.values())) == parameters
    assert shapes["y_embedder.weight"] == (1001, 1024)  # the condition has width 1024 in all sizes
    assert shapes["blocks.0.modulation.weight"] == (6 * width, 1024)
    assert shapes[f"blocks.{layers - 1}.w13.weight"] == (2 * feed_forward, width)
    assert shapes["blocks.0.qkv.weight"] == (3 * width, width)
    assert shapes["blocks.0.q_norm.weight"] == (width,)  # the norm goes over all heads together
    assert f"blocks.{layers}.w2.weight" not in shapes
