"""Tests of the decoding bench: strips make diffusers' picture, every row has a line, and differences show seams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from launch.baselines.decoders import DECODERS
from launch.benches import decode_table
from launch.benches.decode import LATE, Decode, check, measure
from launch.benches.decode_table import EAGER, TILING, shown
from launch.benches.decode_times import KINDS, NAMES
from launch.benches.decode_ways import Case
from launch.benches.difference import draw, far
from launch.benches.split import kind_of, split
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

CPU = torch.device("cpu")


def case_of(name: str, size: tuple[int, int], frames: int, device: torch.device = CPU, world: int = 1) -> Case:
    """Return a case of a tiny decoder."""
    decoder = DECODERS[name]
    vae = decoder.build(torch.float32, device, tiny=True)
    return Case(name, decoder, vae, size, frames, make_mesh(device, ulysses=world), "collective")


def measured(rank: int, world: int, device: torch.device, name: str, folder: Path) -> list[dict[str, Any]]:
    args = Decode(
        rounds=1,
        only=("tiling", "ours"),
        truth_megapixels=0.1 if name == "kl" else 0.002,
        out=folder / "lines.jsonl",
        picture=folder,
    )
    size, frames = ((104, 72), 1) if name == "kl" else ((40, 24), 5)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return measure(args, case_of(name, size, frames, device, world), float("inf"))


@pytest.mark.parametrize(("name", "world"), [("kl", 2), ("wan", 1)])
def test_every_way_makes_the_picture_of_diffusers(ranks: Pool, tmp_path: Path, name: str, world: int) -> None:
    lines, *_ = ranks.run(world, measured, name, tmp_path)
    assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == lines
    assert all(shown(line) for line in lines)
    ways = {line["case"]["way"]: line for line in lines}
    assert list(ways)[:2] == [EAGER, TILING]
    ours = [line for way, line in ways.items() if way.startswith("ours")]
    assert len(ours) == 2 + 3 * (ranks.device == "cuda")
    if name == "kl":  # tiles are far from the picture: negative control
        assert ways[TILING]["error"]["relative"] > 1e-2
    else:  # a latent that is smaller than a tile is not tiled
        assert "one tile" in ways[TILING]["refused"]
    for line in ours:
        assert (line["gpus"], line["ranks"]) == (world, world)
        assert line["times"][EAGER] > 0
        if "error" in line:  # of the first frame; a graph makes all of them
            assert line["error"]["relative"] < 3 * ways[EAGER]["error"]["relative"] < 1e-5
        assert line["difference"]["max"] < 1e-4
    (picture,) = tmp_path.glob("*.png")
    with Image.open(picture) as drawn:
        assert drawn.width == 3 * 72 if name == "kl" else 2 * 24


def test_tables_are_written_into_their_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"what": "kl 64 x 64", "way": EAGER}
    theirs = {"bench": "decode", "case": about, "ranks": 2, "ms": {"median": 8.0, "min": 7.0, "max": 9.0}}
    ours = theirs | {"case": about | {"way": "ours, 2 GPUs"}, "ms": {"median": 4.0, "min": 4.0, "max": 4.0}}
    ours |= {"split_ms": {"convolution": 3.0, "halo": 1.0}, "gib": 1.0, "outside_gib": 0.5, "memory": 0.6}
    late = theirs | {"case": about | {"way": TILING}, "ms": None, "refused": LATE}
    path, page = tmp_path / "lines.jsonl", tmp_path / "lines.md"
    path.write_text("".join(json.dumps(line) + "\n" for line in (theirs, ours, late)))
    page.write_text(f"before\n{decode_table.BEGIN}old\n{decode_table.END}\nafter\n")
    decode_table.main(path)
    text = page.read_text()
    assert capsys.readouterr().out.strip() in text
    assert "| kl 64 x 64 | 2 | 4.0 | 2.00 |  |  | 1.50 | 0.60 |" in text
    assert "| kl 64 x 64 | ours, 2 GPUs | 4.0 | 75.0 | 25.0 |" in text
    assert f"| kl 64 x 64 | 2 | {TILING} | {LATE} |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_nothing_is_decoded_after_its_time() -> None:
    lines = measure(Decode(), case_of("kl", (64, 64), 1), 0.0)
    assert {line["refused"] for line in lines} == {LATE}
    assert all(LATE in shown(line) for line in lines)


def test_a_seam_is_seen_in_numbers_and_in_the_picture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    truth = torch.rand(1, 3, 800, 64) * 2 - 1
    noisy = truth + 1e-3 * torch.randn(truth.shape)
    seam = noisy.clone()
    seam[..., 399:401, :] += 0.1
    assert far(truth, truth, (400,)) == {"relative": 0.0, "max": 0.0}
    assert 0.8 < far(noisy, truth, (400,))["near_cuts"] < 1.2
    assert far(seam, truth, (400,))["near_cuts"] > 5
    assert far(seam, truth, (200,))["near_cuts"] < 0.5
    draw(truth, {"ours": noisy, "tiling": seam}, tmp_path / "it.png")
    with Image.open(tmp_path / "it.png") as drawn:
        pixels = np.asarray(drawn.convert("L"), dtype=float)
    width = pixels.shape[1] // 3
    ours, tiled = pixels[40:, width : 2 * width].mean(1), pixels[40:, 2 * width :].mean(1)
    assert tiled.max() > 3 * np.median(tiled)
    assert ours.max() < 2 * np.median(ours)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"vae": ("sd",)}, "got the decoder sd, expected one of kl"),
        ({"size": ("sd:64",)}, "got the decoder sd, expected one of kl"),
        ({"size": ("12by4",)}, "got --size 12by4"),
        ({"size": ("1x2x3",)}, "got --size 1x2x3"),
        ({"frames": 0}, "got --frames 0"),
    ],
)
def test_flags_that_mean_nothing_are_errors(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(Decode(**flags))


def test_sizes_are_height_and_width() -> None:
    flags = Decode(("kl", "wan"), size=("1024", "wan:720x1280"))
    assert check(flags) == {"kl": [(1024, 1024)], "wan": [(1024, 1024), (720, 1280)]}
    shapes = {name: decoder.shape((720, 1280), 81) for name, decoder in DECODERS.items()}
    assert shapes["kl"] == (1, 16, 90, 160)
    assert shapes["qwen"] == (1, 16, 1, 90, 160)
    assert shapes["wan"] == shapes["hunyuan"] == (1, 16, 21, 90, 160)
    assert shapes["ltx"] == (1, 128, 11, 22, 40)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, float>", "layout"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::BFloat16, float>", "norm"),
        ("pixel_moments_kernel", "norm"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("take_kernel", "halo"),
        ("flags_kernel", "statistics"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel>", "elementwise"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel, NAMES) == kind


def test_an_exchange_counts_only_while_nothing_is_computed() -> None:
    took = split([("fprop", 0.0, 4.0), ("send_kernel", 3.0, 6.0), ("silu", 8.0, 9.0)], KINDS, NAMES)
    assert {kind: us for kind, us in took.items() if us} == {
        "convolution": 4.0,
        "halo": 2.0,
        "gaps": 2.0,
        "elementwise": 1.0,
    }
