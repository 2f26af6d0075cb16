"""Tests that Large-DiT equals an independent plain implementation in fp64: all norms and variants, any sharding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT
from seqpar.convert.originals import open_transformer
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
    """Return the plain model in fp64 with random parameters."""
    model, generator = PlainLargeDiT(config).double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.requires_grad_(False)


def ours(config: large_dit.Config, device: torch.device) -> large_dit.Model:
    """Return our model with the same weights, loaded through the key map."""
    keys = large_dit.key_map(config)
    blueprint = Blueprint("plain", large_dit, config, from_state_dict("plain", plain(config).state_dict()), keys)
    model = blueprint.build(torch.float64, device)
    assert isinstance(model, large_dit.Model)
    return model


def inputs(size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    return random((2, 4, *size), 1), torch.tensor([960, 3]), torch.tensor([2, 10])


@pytest.mark.parametrize("size", [(8, 8), (6, 10), (4, 2)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_dit_equals_the_plain_one(variant: str, size: tuple[int, int]) -> None:
    config = VARIANTS[variant]
    x, t, y = inputs(size)
    truth = plain(config)(x, t, y)
    dit = DistributedDiT(ours(config, torch.device("cpu")), Mesh.single())
    assert (dit(x, timestep=t, class_labels=y).sample - truth).abs().max() < CLOSE * truth.abs().max()


@cache
def shared(variant: str, device: torch.device) -> large_dit.Model:
    """Return our model of a variant, made once in a process; nobody may change it."""
    return ours(VARIANTS[variant], device)


@cache
def truth(variant: str, device: str) -> Tensor:
    """Return the plain model's output; a device's own, because sines in fp32 differ between CPUs and GPUs."""
    return plain(VARIANTS[variant]).to(device)(*(z.to(device) for z in inputs((6, 10)))).cpu()


def sharded(rank: int, world: int, device: torch.device, strategy: str, variant: str) -> Tensor:
    dit = DistributedDiT(shared(variant, device), mesh_for(strategy, world, device), strategy, local(device))
    x, t, y = (z.to(device) for z in inputs((6, 10)))
    return dit(x, timestep=t, class_labels=y).sample


@pytest.mark.parametrize(("strategy", "variant", "world"), covering(LAYOUTS, VARIANTS, turns=(2, 3, 4)))
def test_sharded_large_dit_equals_the_plain_one(ranks: Pool, world: int, strategy: str, variant: str) -> None:
    """15 tokens and 32 heads (or 8 key-value heads) are uneven on 2, 3 or 4 ranks."""
    want = truth(variant, ranks.device)
    for got in ranks.run(world, sharded, strategy, variant):
        assert (got - want).abs().max() < CLOSE * want.abs().max()


@pytest.mark.parametrize("change", [{"norm_eps": 1e-2}, {"qk_norm": False}], ids=str)
def test_negative_control_another_variant_is_noticed(change: dict) -> None:
    x, t, y = inputs((8, 8))
    truth = plain(TINY)(x, t, y)
    model = ours(TINY, torch.device("cpu"))
    for block in model.blocks:
        if "qk_norm" in change:
            block.q_norm = block.k_norm = None  # pyright: ignore
        else:
            block.norm = ("rms", change["norm_eps"])  # pyright: ignore
    got = DistributedDiT(model, Mesh.single())(x, timestep=t, class_labels=y).sample
    assert (got - truth).abs().max() > 1e-4 * truth.abs().max()


def test_the_original_file_is_recognised_by_its_shapes(tmp_path: Path) -> None:
    torch.save(plain(TINY).state_dict(), tmp_path / "consolidated_ema.00-of-01.pth")
    blueprint, _ = open_transformer(tmp_path / "consolidated_ema.00-of-01.pth", heads=32)
    assert blueprint.config == TINY
    assert blueprint.module is large_dit


def test_rotary_has_rows_for_any_length() -> None:
    model = large_dit.Model(TINY)
    long, short = model.positions(256, 256), model.positions(8, 8)
    assert long.shape == (16384, 2)
    assert torch.equal(long[:16], short)


@pytest.mark.parametrize("heads", [32, 4])
def test_rotary_has_the_bits_of_the_originals_complex_table(heads: int) -> None:
    """LLaMA2-Accessory makes it in fp32 by torch.polar; cosines and sines by themselves have others."""
    dim = 64 // heads
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    angles = torch.outer(torch.arange(1024), frequencies).float()
    table = torch.polar(torch.ones_like(angles), angles)
    cos, sin = large_dit.Model(replace(TINY, num_attention_heads=heads)).positions(64, 64).chunk(2, dim=-1)
    assert torch.equal(cos, table.real)
    assert torch.equal(sin, table.imag)
    assert not (torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin()))  # negative control


@pytest.mark.parametrize(
    ("name", "count"),
    [("large-dit-600m", 609_836_576), ("large-dit-3b", 4_237_824_032), ("large-dit-7b", 7_293_819_936)],
)
def test_presets_have_the_released_number_of_parameters(name: str, count: int) -> None:
    assert sum(p.numel() for p in locate(name).meta().parameters()) == count
