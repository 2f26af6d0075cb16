"""Tests that a decoding which does not fit is refused from what two small decodings have shown, alike on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn

from seqpar.mesh.mesh import Axis, Mesh
from seqpar.planner.predict import GIB, USABLE
from seqpar.vae.on_mesh import CudaMeter, MeshVAE, measured, refusal
from seqpar.vae.strips import Spread
from tests.support import pipelines, vaes
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

PIXEL, FIXED = 100, 1000  # bytes of the device that tests imagine: for each number of a decoded picture, and besides


@dataclass
class Imagined:
    """A device of so many bytes, whose need follows from the picture that a call decodes. peaks: what it has told."""

    room: float
    peaks: list[int] = field(default_factory=list)

    def peak(self, run: Callable[[], Any]) -> int:
        self.peaks.append(PIXEL * run()[0].numel() + FIXED)
        return self.peaks[-1]

    def free(self) -> float:
        return self.room

    def total(self) -> float:
        return 2 * self.room


def test_two_small_decodings_tell_a_large_one() -> None:
    sides = list[int]()
    need = measured(lambda side: sides.append(side) or 7 * side * side + 30, (16, 32))
    assert (need.of(0), need.of(1000)) == (30, 7030)
    assert sides == [16, 16, 32]  # the first one also allocates what libraries keep
    assert measured(lambda side: 50).of(1000) == 50


@pytest.mark.parametrize(
    ("spread", "advice"),
    [
        (
            Spread("whole", 1, Axis("")),
            "on one rank.*use more ranks, each of which decodes a strip .some 3., or --vae tiled",
        ),
        (
            Spread("strips", 2, Axis("")),
            "on each of 2 ranks.*use more ranks, each of which decodes a strip .some 6., or",
        ),
        (Spread("pictures", 4, Axis("")), "on one rank.*use --vae strips, by which all 4 ranks share each picture, or"),
    ],
)
def test_a_refusal_says_what_would_fit(spread: Spread, advice: str) -> None:
    text = refusal((4096, 2048), 10.0 * GIB, 4.0 * GIB, spread)
    assert re.match(f"got 4096x2048 pixels, whose decoding needs 10.0 GiB {advice}", text)
    assert "at most the 4.0 GiB that are free" in text
    assert "--vae tiled (in Python vae='tiled'), diffusers' tiling, which leaves seams" in text
    assert text.endswith("or at most some 2576x1280 pixels")
    assert "or at most some 0x0 pixels" in refusal((64, 64), 1.0, 0.0, spread)


def test_one_rank_refuses_what_its_memory_and_what_the_model_keeps_do_not_hold() -> None:
    vae, latent = vaes.tiny("kl"), (4, 40, 24)
    need = PIXEL * 3 * 40 * 24 * 16 + FIXED
    weights = sum(each.nbytes for each in vae.parameters())
    meter = Imagined(need)
    on_mesh = MeshVAE(vae, Mesh.single(), "collective", kernels=True, meter=meter)
    on_mesh.check(1, latent, lambda: need - weights)
    on_mesh.check(9, latent, lambda: 0)
    assert len(meter.peaks) == 3  # they are measured once
    with pytest.raises(ValueError, match="got 160x96 pixels"):
        on_mesh.check(1, latent, lambda: need - weights + 1)
    meter.room = need - 1
    with pytest.raises(ValueError, match=r"got 160x96 pixels, whose decoding needs .* that are free; use more ranks"):
        on_mesh.check(1, latent, lambda: 0)
    on_mesh.wish = "tiled"
    on_mesh.check(1, latent, lambda: 0)


def test_calls_of_pipelines_count_rows_and_frames_and_tiles_pass() -> None:
    for name, frames in (("kl", ()), ("wan", (2,))):
        vae = vaes.tiny(name)
        meter = Imagined(0)
        on_mesh, shape = MeshVAE(vae, Mesh.single(), "collective", meter=meter), (3, 4, *frames, 40, 24)
        meter.room = 3 * (PIXEL * 3 * (3 if frames else 1) * 40 * 24 * 16 + FIXED)
        on_mesh.check_call(shape)
        on_mesh.check_call(None)
        meter.room -= 1
        with pytest.raises(ValueError, match=r"got 160x96 pixels.*; or go"):
            on_mesh.check_call(shape, "or go")
        vae.use_tiling = True
        on_mesh.check_call(shape)


def test_what_cannot_be_measured_is_not_checked_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ("the VAE's weights are not on all GPUs", "the VAE takes more than latents")
    for vae, reason in zip((vaes.tiny("kl").to("meta"), vaes.tiny("ltx 0.9.5")), reasons, strict=True):
        on_mesh = MeshVAE(vae, Mesh.single(), "collective", meter=Imagined(0))
        for _ in range(2):
            on_mesh.check(1, (4, 40, 24), lambda: 0)
        said = f"seqpar: sizes are not checked before the first step, because {reason}\n"
        assert capsys.readouterr().out == said


def on_ranks(rank: int, world: int, device: torch.device) -> list[str]:
    """Return what this rank is told, where strips fit on rank 0 only, and where they fit on both."""
    told, latent = [], (4, 33, 24)
    shared = PIXEL * 3 * 34 * 24 * 4 + FIXED  # of whole pictures of which the larger strip has 17 rows of each 33
    on_mesh = MeshVAE(pipelines.decoder(1).to(device), make_mesh(device, cfg=1), "collective", meter=Imagined(0))
    for room in (shared - rank, shared):
        on_mesh.memory.meter = meter = Imagined(room)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meter, "total", lambda: 1e12)
            try:
                on_mesh.check(1, latent, lambda: 0)
                told.append("")
            except ValueError as error:
                told.append(str(error))
    return told


def test_ranks_refuse_alike_by_the_strip_with_most_rows(ranks: Pool) -> None:
    first, second = ranks.run(2, on_ranks)
    assert first == second
    assert "got 66x48 pixels" in first[0]
    assert "on each of 2 ranks" in first[0]
    assert first[1] == ""


def test_unused_memory_of_cuda_graphs_and_of_other_devices_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int], total: float, active: float) -> dict[str, Any]:
        sizes = {"total_size": int(total * GIB), "active_size": int(active * GIB)}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [segment(1, (0, 0), 4, 1), segment(1, (0, 7), 16, 0), segment(0, (0, 0), 32, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", "cuda:1"):
        assert CudaMeter(torch.device(device)).free() == pytest.approx(USABLE * (2 + 3) * GIB)


@pytest.mark.gpu
def test_a_gpu_needs_what_was_measured() -> None:
    """A decoder of the released size, at 1024 x 1024 pixels, within a tenth."""
    device = torch.device("cuda")
    sizes: dict[str, Any] = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4}
    for name, block in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        sizes[name] = (block,) * 4
    vae = nn.Module.to(AutoencoderKL(**sizes), device, torch.bfloat16).eval()
    on_mesh, z = MeshVAE.of(vae, Mesh.single("cuda"), "collective"), torch.zeros(1, 4, 128, 128, device=device)
    need = on_mesh.memory.need(CudaMeter(device), False, (4,)).of(128 * 128)
    with torch.no_grad():
        peak = CudaMeter(device).peak(lambda: on_mesh._whole(z.bfloat16(), return_dict=False))
    assert need == pytest.approx(peak, rel=0.1)
