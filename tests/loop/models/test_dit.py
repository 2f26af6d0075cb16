"""Tests that DiT equals diffusers and the original arithmetic, and that other configs and checkpoints are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar import DistributedDiT
from seqpar.convert.originals import open_transformer
from seqpar.kernels import linear
from seqpar.loop.blueprint import from_diffusers, locate
from seqpar.loop.models import _layers, dit
from seqpar.mesh.mesh import Mesh
from tests.support.meshes import random
from tests.support.tiny import diffusers_dit, original_state_dict, with_original_arithmetic

CLOSE = 1e-11  # of fp64; both models have sinusoids in fp32


def call(model: nn.Module, x: Tensor) -> Tensor:
    """Return a prediction of two rows with different timesteps and labels; the second label is the null class."""
    return model(x, timestep=torch.tensor([960, 3]), class_labels=torch.tensor([2, 10])).sample


@pytest.mark.parametrize("learned_sigma", [True, False])
@pytest.mark.parametrize(("patch", "size"), [(2, (8, 8)), (2, (12, 12)), (2, (4, 4)), (4, (8, 8)), (8, (16, 16))])
def test_dit_equals_diffusers(learned_sigma: bool, patch: int, size: tuple[int, int]) -> None:
    """Other sizes than the trained one have interpolated positions."""
    theirs = diffusers_dit(learned_sigma, patch=patch)
    ours = DistributedDiT(theirs, Mesh.single())
    x = random((2, 4, *size), 1)
    assert (call(ours, x) - call(theirs, x)).abs().max() < CLOSE


def test_dit_without_attention_bias_equals_diffusers() -> None:
    theirs = diffusers_dit(attention_bias=False)
    x = random((2, 4, 8, 8), 1)
    assert (call(DistributedDiT(theirs, Mesh.single()), x) - call(theirs, x)).abs().max() < CLOSE


def test_dit_loads_the_original_format_with_its_arithmetic(tmp_path: Path) -> None:
    theirs = with_original_arithmetic(diffusers_dit(num_attention_heads=1, attention_head_dim=64))
    torch.save({"ema": original_state_dict(theirs)}, tmp_path / "dit.pt")
    ours = DistributedDiT.from_pretrained(open_transformer(tmp_path / "dit.pt", 1)[0], Mesh.single(), torch.float64)
    x = random((2, 4, 8, 8), 1)
    assert (call(ours, x) - call(theirs, x)).abs().max() < CLOSE
    assert ours.config.num_classes == 10
    assert ours.config.sample_size == 8


@pytest.mark.parametrize("change", ["freq_shift", "mlp_norm_eps"])
def test_dit_negative_control_the_two_arithmetics_differ(change: str) -> None:
    theirs = diffusers_dit()
    if change == "freq_shift":
        for block in theirs.transformer_blocks:  # pyright: ignore
            block.norm1.emb.time_proj.downscale_freq_shift = 0
    else:
        for block in theirs.transformer_blocks:  # pyright: ignore
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


@pytest.mark.parametrize(
    ("name", "parameters"), [("dit-s/2", 32.87e6), ("dit-b/2", 130.3e6), ("dit-l/2", 457.8e6), ("dit-xl/2", 674.83e6)]
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: float) -> None:
    count = sum(p.numel() for p in locate(name).meta().parameters())
    assert count == pytest.approx(parameters, rel=2e-4)


@pytest.mark.parametrize("name", dit.PRESETS)
def test_presets_have_published_head_widths(name: str) -> None:
    assert dit.PRESETS[name].attention_head_dim == (72 if "xl" in name else 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm_type", "ada_norm"), ("activation_fn", "gelu"), ("upcast_attention", True), ("caption_channels", 4096)],
)
def test_a_config_that_is_not_implemented_is_refused_by_name(field: str, value: object) -> None:
    config = {**diffusers_dit().config, "_class_name": "DiTTransformer2DModel", field: value}  # pyright: ignore
    with pytest.raises(ValueError, match=field):
        dit.recognise({}, config)


def test_embedders_that_differ_between_blocks_are_refused() -> None:
    theirs = diffusers_dit()
    theirs.transformer_blocks[1].norm1.emb.timestep_embedder.linear_1.bias += 1  # pyright: ignore
    with pytest.raises(ValueError, match=r"blocks\.1\.norm1.* differs from transformer_blocks\.0"):
        DistributedDiT(theirs, Mesh.single())


def test_a_model_of_another_kind_is_refused() -> None:
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


def test_three_bf16_parts_are_all_of_an_fp32_number() -> None:
    x = wide_layer("cpu")[0]
    high, middle, low = linear.bf16_parts(x).float().chunk(3)
    assert torch.equal(low + middle + high, x)
    assert not torch.equal(middle + high, x)


def test_a_wide_product_with_narrow_weights_is_as_good_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer, truth = wide_layer("cpu")
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
