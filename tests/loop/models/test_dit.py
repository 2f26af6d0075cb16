"""Tests that DiT equals diffusers, with the published sizes, and refuses other configs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar import DistributedDiT
from seqpar.kernels import linear
from seqpar.loop.blueprint import from_diffusers, locate
from seqpar.loop.models import _layers, dit, large_dit, uvit
from seqpar.mesh.mesh import Mesh
from tests.support.meshes import random
from tests.support.tiny import diffusers_dit

CLOSE = 1e-11  # of fp64; both models have sinusoids in fp32


def call(model: nn.Module, x: Tensor) -> Tensor:
    """Two rows with different timesteps and labels; the second label is the null class."""
    return model(x, timestep=torch.tensor([960, 3]), class_labels=torch.tensor([2, 10])).sample


DIFFUSERS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    **{
        f"patch {patch}, {size[0]}, {8 if sigma else 4} channels": ({"learned_sigma": sigma, "patch": patch}, size)
        for patch, size in ((2, (8, 8)), (2, (12, 12)), (2, (4, 4)), (4, (8, 8)), (8, (16, 16)))
        for sigma in (True, False)
    },
    "no attention bias": ({"attention_bias": False}, (8, 8)),
}


@pytest.mark.parametrize("variant", DIFFUSERS)
def test_dit_equals_diffusers(variant: str) -> None:
    """Other sizes than the trained one have interpolated positions."""
    config, size = DIFFUSERS[variant]
    theirs, x = diffusers_dit(**config), random((2, 4, *size), 1)
    assert (call(DistributedDiT(theirs, Mesh.single()), x) - call(theirs, x)).abs().max() < CLOSE


@pytest.mark.parametrize("change", ["freq_shift", "mlp_norm_eps"])
def test_dit_negative_control_the_two_arithmetics_differ(change: str) -> None:
    theirs: Any = diffusers_dit()
    for block in theirs.transformer_blocks:
        if change == "freq_shift":
            block.norm1.emb.time_proj.downscale_freq_shift = 0
        else:
            block.norm3.eps = 1e-6
    x = random((2, 4, 8, 8), 1)
    assert (call(DistributedDiT(theirs, Mesh.single()), x) - call(theirs, x)).abs().max() > 100 * CLOSE


def test_dit_takes_non_square_latents_and_both_position_rules() -> None:
    base = from_diffusers(diffusers_dit())
    model = base.build(torch.float64, torch.device("cpu"))
    x = random((2, 4, 6, 10), 1)
    out = call(DistributedDiT(model, Mesh.single()), x)
    assert out.shape == (2, 8, 6, 10)
    rows = model.positions(6, 10).view(3, 5, -1)  # pyright: ignore
    width = rows.shape[-1] // 2
    assert torch.equal(rows[0, :, :width], rows[2, :, :width])  # the column's half: equal in all rows
    assert torch.equal(rows[:, 0, width:], rows[:, 4, width:])
    whole = dit.Model(dit.Config(3, 8, 1, sample_size=8, pos_scaling="none")).positions(6, 10).view(3, 5, -1)
    native = dit.Model(dit.Config(3, 8, 1, sample_size=8)).positions(8, 8).view(4, 4, -1)
    assert torch.equal(whole[:3, :4], native[:3, :4])  # "none" extends the positions and keeps the known part


def test_patchify_is_the_order_of_a_convolution_and_inverts() -> None:
    model = dit.Model(dit.Config(3, 8, 1, patch_size=2))
    x = random((2, 4, 6, 8), 3)
    weight = random((5, 4, 2, 2), 4)
    convolved = torch.nn.functional.conv2d(x, weight, stride=2).flatten(2).transpose(1, 2)
    assert (model.patchify(x) @ weight.flatten(1).T - convolved).abs().max() < 1e-12
    assert torch.equal(model.unpatchify(model.patchify(x), 6, 8), x)


# depth, width, heads (a head's width follows) and parameters: arXiv 2212.09748, table 1, and facebookresearch/DiT
PUBLISHED = {
    "s": (12, 384, 6, 32.87e6),
    "b": (12, 768, 12, 130.3e6),
    "l": (24, 1024, 16, 457.8e6),
    "xl": (28, 1152, 16, 674.83e6),
}
COMMON = {
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


def test_every_size_has_the_published_numbers() -> None:
    assert dit.SIZES.keys() == {f"dit-{size}/{patch}" for size in PUBLISHED for patch in (2, 4, 8)}
    for name, config in dit.SIZES.items():
        layers, width, heads, _ = PUBLISHED[name[4:-2]]
        sizes = {"num_attention_heads": heads, "attention_head_dim": width // heads, "num_layers": layers}
        assert asdict(config) == {**sizes, "patch_size": int(name[-1]), **COMMON}


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_dit_has_layers_of_the_published_widths(size: str) -> None:
    layers, width, _, parameters = PUBLISHED[size]
    shapes = {key: tuple(x.shape) for key, x in locate(f"dit-{size}/2").meta().named_parameters()}
    assert sum(map(math.prod, shapes.values())) == pytest.approx(parameters, rel=2e-4)
    assert shapes["x_embedder.weight"] == (width, 4 * 2 * 2)
    assert shapes["y_embedder.weight"] == (1001, width)
    assert shapes["t_embedder.0.weight"] == (width, 256)
    assert shapes[f"blocks.{layers - 1}.fc1.weight"] == (4 * width, width)
    assert shapes["blocks.0.modulation.weight"] == (6 * width, width)
    assert shapes["final.weight"] == (2 * 2 * 8, width)
    assert f"blocks.{layers}.fc1.weight" not in shapes


def test_names_of_sizes_are_unique_and_in_small_letters() -> None:
    names = [name for module in (dit, large_dit, uvit) for name in module.SIZES]
    assert sorted({name.lower() for name in names}) == sorted(names)


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_type", "ada_norm"), ("activation_fn", "gelu"), ("upcast_attention", True), ("caption_channels", 4096)],
)
def test_a_config_that_is_not_implemented_is_refused_by_name(field: str, value: object) -> None:
    config = {**diffusers_dit().config, "_class_name": "DiTTransformer2DModel", field: value}  # pyright: ignore
    with pytest.raises(ValueError, match=field):
        dit.recognise({}, config)


def test_a_model_that_does_not_fit_is_refused() -> None:
    theirs: Any = diffusers_dit()
    theirs.transformer_blocks[1].norm1.emb.timestep_embedder.linear_1.bias += 1
    with pytest.raises(ValueError, match=r"blocks\.1\.norm1.* differs from transformer_blocks\.0"):
        DistributedDiT(theirs, Mesh.single())
    with pytest.raises(ValueError, match="got a Linear, expected a seqpar model or a diffusers transformer"):
        DistributedDiT(nn.Linear(2, 2), Mesh.single())
    with pytest.raises(ValueError, match=r"no such path; did you mean dit-xl/\d\?"):
        locate("dit-xxl")


def wide_layer(device: str) -> tuple[Tensor, nn.Linear, Tensor]:
    """Return fp32 rows of many magnitudes, a bf16 layer, and its result in fp64."""
    torch.manual_seed(0)
    x = random((5, 96), 0, device, torch.float32) * 10.0 ** random((5, 96), 1, device, torch.float32)
    layer = nn.Linear(96, 40).to(device, torch.bfloat16).requires_grad_(False)
    return x, layer, F.linear(x.double(), layer.weight.double(), layer.bias.double())


def test_a_wide_product_with_narrow_weights_is_as_good_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer, truth = wide_layer("cpu")
    high, middle, low = linear.bf16_parts(x).float().chunk(3)
    assert torch.equal(low + middle + high, x)
    assert not torch.equal(middle + high, x)
    usual = (_layers.through(x, torch.float32)(layer) - truth).norm()
    monkeypatch.setattr(_layers, "in_parts", lambda *_: True)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))  # missing on CPUs
    assert (_layers.through(x, torch.float32)(layer) - truth).norm() < 2 * usual
    monkeypatch.setattr(
        _layers, "bf16_parts", lambda x: torch.cat((x.bfloat16(), *2 * [torch.zeros_like(x).bfloat16()]))
    )
    assert (_layers.through(x, torch.float32)(layer) - truth).norm() > 1e3 * usual


@pytest.mark.gpu
def test_gpu_a_wide_product_with_narrow_weights_is_as_good_in_parts() -> None:
    x, layer, truth = wide_layer("cuda")
    usual = F.linear(x, layer.weight.float(), layer.bias.float())
    made = _layers.through(x, torch.float32)(layer)
    assert made.dtype == torch.float32
    assert not torch.equal(made, usual)  # the product was computed in parts
    # tensor cores truncate where they accumulate: 2.3 x was seen; without the lowest part it would be over 1000 x
    assert (made - truth).norm() < 4 * (usual - truth).norm()
