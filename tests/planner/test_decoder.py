"""Tests that a decoder's memory and time are predicted without a GPU, and that what cannot be decoded is refused."""

from __future__ import annotations

import time

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from seqpar.planner.decoder import count, milliseconds
from seqpar.planner.rates import H200
from seqpar.vae.decodable import check_decodable
from seqpar.vae.dry import LEAST, Kind, counted
from tests.support import vaes

# latent rows, and GiB over weights of diffusers' decode of a square on an H200 in bf16
DIFFUSERS = ((64, 0.6), (128, 2.38), (256, 9.5), (512, 38))
# latent rows, ranks, ms and GiB of ours: docs/benchmarks/2026-11-22-h200-decoder.md
OURS = ((128, 1, 20.7, 1.38), (256, 1, 93.2, 5.50), (512, 1, 585, 22.0), (256, 2, 49.5, 2.81), (512, 2, 296, 11.0))
SD = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
KL = Kind.of(AutoencoderKL, SD, torch.bfloat16)


@pytest.mark.parametrize(("side", "gib"), DIFFUSERS)
def test_the_memory_of_diffusers_is_predicted(side: int, gib: float) -> None:
    assert counted(KL, (1, 4, side, side), plain=True).gib == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(("side", "ranks", "ms", "gib"), OURS)
def test_predictions_are_near_what_was_measured(side: int, ranks: int, ms: float, gib: float) -> None:
    found = counted(KL, (1, 4, side, side), ranks)
    assert found.gib == pytest.approx(gib, rel=0.1)
    assert milliseconds(found, H200, "peer") == pytest.approx(ms, rel=0.15)


def test_a_prediction_takes_less_than_a_second_and_no_memory() -> None:
    started = time.perf_counter()
    found = counted.__wrapped__(KL, (1, 4, 1000, 1000), 4)
    assert time.perf_counter() - started < 1
    assert 20 < found.gib < 152


def test_ranks_and_strips_in_turn_need_less() -> None:
    at_once, shape = counted(KL, (1, 4, 512, 512)), (1, 4, 512, 512)
    assert counted(KL, shape, 4).gib < 0.35 * at_once.gib
    assert counted(KL, shape, turns=LEAST).gib < 0.35 * at_once.gib
    assert counted(KL, shape, 2, turns=LEAST).gib < 0.35 * counted(KL, shape, 2).gib
    assert milliseconds(counted(KL, shape, 2), H200, "nccl") < 0.6 * milliseconds(at_once, H200)


def test_live_bytes_follow_frees_and_resizes() -> None:
    def run() -> torch.Tensor:
        a = torch.zeros(1000, dtype=torch.uint8)
        b = a + 1  # 2000 bytes live
        del a
        c = b.view(10, 100)[0] + 1  # a view costs nothing: 1100 live
        b.untyped_storage().resize_(0)
        return c + torch.zeros(1500, dtype=torch.uint8)[:100]  # 100 + 1500 + 100

    assert count(run).peak == 2000


def test_a_video_is_predicted_from_its_first_frames() -> None:
    """The frames of Wan repeat themselves; Hunyuan decodes in parts of several frames, which differ."""
    for name in ("wan", "hunyuan"):
        tiny = vaes.tiny(name)
        kind = Kind.of(type(tiny), tiny.config, torch.float32)
        z, vae = torch.empty(1, 4, 13, 4, 4, device="meta"), kind.build()
        direct, found = count(lambda z=z, vae=vae: vae.decode(z)), counted(kind, tuple(z.shape), plain=True)
        flops = [sum(x.flops for x in each.operations) for each in (found, direct)]
        assert flops[0] == pytest.approx(flops[1], rel=1e-3), name
        assert found.peak == pytest.approx(direct.peak, rel=0.1), name


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    shape = (1, 4, 512, 512)
    assert not check_decodable(KL, shape, 1, None).turns
    assert check_decodable(KL, shape, 1, 40.0).told is None
    fits = [check_decodable(KL, shape, 1, free) for free in (21.5, 16.0, 10.0)]
    assert "decodes in strips in turn, in 16.8" in (fits[0].told or "")
    assert "GiB and about 1.4 x the time: at once it needs 22.0 GiB of 21.5 GiB" in (fits[0].told or "")
    assert [fit.held_bytes >> 30 for fit in fits] == [8, 4, 2]  # the less memory, the more is computed again
    assert fits[0].slower < fits[1].slower < fits[2].slower < 1.8
    with pytest.raises(
        ValueError, match=r"got 4096x4096 pixels.*on one rank.*4.0 GiB.*use at most .*, or 2 ranks"
    ) as e:
        check_decodable(KL, shape, 1, 4.0)
    height, width = map(int, str(e.value).split("at most ")[-1].split(" pixels")[0].split("x"))
    assert check_decodable(KL, (1, 4, height // 8, width // 8), 1, 4.0).turns
    assert not check_decodable(KL, shape, 4, 8.0).turns
