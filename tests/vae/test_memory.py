"""Tests that a size is decoded whole, in strips or in tiles by what the weights leave, identically on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from seqpar.kernels.weight8 import Weight8
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.vae import on_mesh as module
from seqpar.vae.known import BYTES, decoding_bytes
from seqpar.vae.on_mesh import MeshVAE, bytes_left
from tests.support import pipelines, vaes
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool

LATENT = (4, 33, 24)  # two ranks have 17 and 16 rows of it
CLOSE, VISIBLE = 1e-11, 1e-3


def needs(vae: Any, rows: int = LATENT[1]) -> float:
    return decoding_bytes(vae, (LATENT[0], rows, LATENT[2]))


@pytest.mark.parametrize("name", sorted(name for name, case in vaes.CASES.items() if not case.timestep))
def test_bytes_follow_from_the_pixels_and_frames_of_every_known_vae(name: str) -> None:
    vae, z = vaes.tiny(name), vaes.latents(name, 1, 3, 5)
    decoded = vaes.decoded(vae, z)
    frames = decoded.shape[2] if decoded.ndim == 5 else 1
    each, each_frame = BYTES[type(vae).__name__]
    pixels = decoded.shape[-2] * decoded.shape[-1]
    assert decoding_bytes(vae, z.shape[1:]) == 4 * pixels * (each + each_frame * frames)  # fp64 has 4 x 16 bits


def on_ranks(rank: int, world: int, device: torch.device, axes: dict[str, int]) -> list[str]:
    """Return how one image is decoded where rank 0 has memory for all of it, for a strip, and for less."""
    vae = pipelines.decoder(1).to(device)
    ways = list[str]()
    for left, count in ((needs(vae), 1), (needs(vae, 17), 1), (needs(vae, 17) - 1, 1), (needs(vae, 17), world)):
        made = MeshVAE(vae, make_mesh(device, **axes), "collective", left=lambda left=left: left + 1e9 * rank)
        ways.append(str(made.spread(count, LATENT)))
    return ways


def test_ranks_decide_by_the_smallest_of_them_and_the_largest_strip(ranks: Pool) -> None:
    first, second = ranks.run(2, on_ranks, {"cfg": 1})
    assert first == second
    assert first[:2] == ["strips on 2 ranks"] * 2
    assert first[2].startswith("whole images, some on each of 2 ranks, in diffusers' tiles, which leave seams, because")
    assert first[3] == "strips on 2 ranks"  # whole images do not fit


def test_one_rank_counts_rows_and_prints_tiles_once(capsys: pytest.CaptureFixture[str]) -> None:
    vae, left = pipelines.decoder(1), dict[str, float]()
    vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 8
    z = random((3, *LATENT), 1)

    def made() -> MeshVAE:
        return MeshVAE(vae, Mesh.single(), "collective", left=lambda: left["bytes"])

    truth, left["bytes"] = vae.decode(z).sample, 3 * needs(vae)
    assert torch.equal(made().decode(z).sample, truth)
    assert torch.equal(made().pictures(z), made().pictures(z))
    assert capsys.readouterr().out == ""
    left["bytes"] -= 1
    tiled = made()
    tiled.check_call(z.shape)
    assert "because decoding 66x48 pixels needs 0.1 GiB on one rank, and the weights leave" in capsys.readouterr().out
    for _ in range(2):
        assert (tiled.decode(z).sample - truth).abs().max() > VISIBLE
    assert not vae.use_tiling
    vae.use_slicing = True  # one row after the other
    assert (made().decode(z).sample - truth).abs().max() < CLOSE
    left["bytes"] = 0.0
    vae.use_tiling = True  # a user's tiles need no decision
    assert str(made().spread(1, LATENT)) == "whole images"
    assert capsys.readouterr().out == ""


def test_exact_mode_and_a_vae_without_tiling_refuse_what_would_need_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = pipelines.decoder(1)
    made = MeshVAE(vae, Mesh.single(), "collective", left=lambda: 1.0)
    monkeypatch.setattr(exact, "is_on", lambda: True)
    with pytest.raises(
        ValueError, match=r"decoding 66x48 pixels needs .* Exact mode decodes whole images: use a small"
    ):
        made.check(1, LATENT)
    assert made.spread(1, LATENT, "tiled").tiled
    monkeypatch.undo()
    made.vae = SimpleNamespace(config=vae.config, dtype=vae.dtype)
    monkeypatch.setattr(module, "decoding_bytes", lambda vae, shape: 2.0)
    with pytest.raises(ValueError, match="SimpleNamespace has no tiling"):
        made.check(1, LATENT)


def test_weights_on_the_device_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    cpu, layer = torch.device("cpu"), nn.Linear(4, 4)
    assert bytes_left(cpu, [layer, layer, nn.Linear(4, 4, device="meta")]) == pytest.approx(850 - 80)
    layer.weight = nn.Parameter(Weight8.of(layer.weight.detach()))
    assert bytes_left(cpu, [layer]) == pytest.approx(850 - (16 + 16 + 16))  # values, scales, and the bias


@pytest.mark.gpu
def test_a_gpu_needs_at_most_what_is_known_of_the_family() -> None:
    device = torch.device("cuda")
    sizes: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}
    for name, block in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        sizes[name] = (block,) * 4
    vae = nn.Module.to(AutoencoderKL(**sizes), device, torch.bfloat16).eval()
    made, z = MeshVAE.of(vae, Mesh.single("cuda"), "collective", lambda: [vae]), torch.zeros(1, 4, 128, 128).bfloat16()
    with torch.no_grad():
        made._whole(z.to(device), return_dict=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made._whole(z.to(device), return_dict=False)
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.75 < peak / decoding_bytes(vae, (4, 128, 128)) <= 1
