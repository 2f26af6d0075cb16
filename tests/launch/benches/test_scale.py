"""Tests of the scale bench: the ranks' shares add up to the whole work, and every way has a line."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch import bench as entry
from launch.benches import scale, table, ways
from launch.benches.ceiling import Share, ceiling, flops_and_weights, share
from launch.benches.scale import Found, Scale, check, look, measure, memory
from launch.benches.split import KINDS, kind_of, split
from launch.benches.steps import GUIDANCE, Layout
from launch.benches.ways import Bench, Ready, Way, data_layouts, engine, make_bench, size_of
from seqpar.distributed import DistributedDiT
from seqpar.local import sdpa
from seqpar.mesh import Axis, Mesh
from seqpar.pipelines.class_labels import DDIM_DEFAULT
from seqpar.planner.plan import work_of
from seqpar.sampling.loop import digest, draw_noise, sample
from seqpar.types.facts import AttentionCall
from tests.launch.baselines.test_engines import CONFIGS, model_of
from tests.launch.benches.test_ladder import Still
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

CPU = torch.device("cpu")
TINY = Scale("tiny", (16,), compiled=False, rounds=2, seconds=1e-3)


# Ceilings ---------------------------------------------------------------------------------------------------------


def meshes_of(layout: Layout) -> list[Mesh]:
    """Return the mesh of every rank without starting processes."""
    found = []
    for cfg in range(layout.cfg):
        for ring in range(layout.ring):
            for u in range(layout.ulysses):
                axes = {"cfg": Axis("cfg", cfg, layout.cfg), "ring": Axis("ring", ring, layout.ring)}
                axes |= {"ulysses": Axis("ulysses", u, layout.ulysses)}
                part = Axis("sequence", ring * layout.ulysses + u, layout.ring * layout.ulysses)
                found.append(replace(Mesh.single(), sequence=part, **axes))
    return found


@pytest.mark.parametrize("tokens", [16, 17])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout("ulysses", 1, 1, 4),
        Layout("ulysses", 2, 1, 2),
        Layout("ulysses", 1, 1, 1),
        Layout("kv_gather", 2, 1, 3),
        Layout("ring", 1, 3, 1),
        Layout("usp", 1, 2, 2),
    ],
    ids=str,
)
def test_shares_of_all_ranks_are_the_whole_step(layout: Layout, name: str, tokens: int) -> None:
    config = CONFIGS[name]
    shares = [share(work_of(config), tokens, layout.strategy, mesh) for mesh in meshes_of(layout)]
    assert sum(x.batch * x.tokens for x in shares) == 2 * tokens
    scores = sum(x.batch * call.queries * call.keys * call.heads for x in shares for call in x.calls)
    assert scores == 2 * tokens**2 * config.num_attention_heads


def test_the_ceiling_computes_a_ranks_shapes() -> None:
    work, seen = work_of(CONFIGS["large-dit, grouped"]), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((q.shape, k.shape, v.shape))
        return sdpa.attend(q, k, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.benches.ceiling.load_local", lambda name: attend)
        calls = (AttentionCall(9, 9, 4, 2), AttentionCall(9, 8, 4, 2))
        out: Any = ceiling(work, Share(1, 5, calls), "sdpa", torch.float32, CPU)()
        idle: Any = ceiling(work, Share(2, 4, ()), "sdpa", torch.float32, CPU)()
    one = [((1, 9, 4, 16), (1, n, 2, 16), (1, n, 2, 16)) for n in (9, 8)]
    assert seen == 2 * one
    assert out.shape[:2] == (1, 5)
    assert idle.shape[:2] == (2, 4)


def test_work_counts_products_and_attention() -> None:
    config = CONFIGS["large-dit"]
    weights = 2 * (4 * 64**2 + 3 * 64 * 48)
    assert flops_and_weights(work_of(config), 16) == (2 * 2 * 16 * weights + 2 * 2 * 4 * 16**2 * 64, 2 * weights)


# Where the time goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90", "attention"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange exposed"),
        ("flags_kernel", "exchange exposed"),
        ("push_kernel", "exchange exposed"),
        ("Memcpy PtoP (Device -> Device)", "exchange exposed"),
        ("prepare_kernel", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4>", "elementwise"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_step_is_split_into_what_runs_at_each_moment() -> None:
    """An exchange counts only while nothing is computed beside it; the kinds add up to the whole time."""
    trace = [
        ("ncclDevKernel", 12.0, 30.0),
        ("nvjet", 10.0, 20.0),
        ("flash_fwd", 18.0, 25.0),
        ("adaln", 40.0, 42.0),
        ("flags_kernel", 41.0, 45.0),
        ("nvjet", 45.0, 46.0),
    ]
    assert split(trace) == {"GEMM": 11.0, "attention": 5.0, "elementwise": 2.0, "exchange exposed": 8.0, "gaps": 10.0}
    assert split([]) == dict.fromkeys(KINDS, 0.0)


# The bench --------------------------------------------------------------------------------------------------------


def bench_of(name: str, world: int, device: torch.device) -> Bench:
    layouts = [*ways.data_layouts(world), *scale.fitting((), world)]
    return make_bench(model_of(name, device), layouts, "auto", device)


def measured(rank: int, world: int, device: torch.device, name: str) -> list[dict[str, Any]]:
    bench = bench_of(name, world, device)
    gc.freeze()  # each way ends in a garbage collection, which is faster without the objects of torch and diffusers
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scale, "SENSED_S", 0.5)  # five readings of a GPU's sensors, not fifteen
            return measure(TINY, bench, 16)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("name", ["large-dit", "dit"])
def test_every_way_has_a_line_and_they_make_tables_and_a_picture(ranks: Pool, tmp_path: Path, name: str) -> None:
    runs = [ranks.run(world, measured, name) for world in (1, 2)]
    lines = [line for run in runs for line in run[0]]
    json.dumps(lines)
    two = [line for line in lines if line["gpus"] == 2]
    ours = [line for line in two if line["case"]["kind"] == "ours"]
    assert len(ours) == 10  # ulysses, kv_gather, kv_first and ring by two transports, branches apart, two pictures
    (alone,) = (line for line in lines if line["case"]["kind"] == "ours" and line["gpus"] == 1)
    # on GPUs equal bits across row counts are promised from 1024 tokens; on CPUs they hold here too
    if ranks.device == "cpu":
        assert {line["digest"] for line in ours if "ring" not in line["case"]["way"].split()[0]} == {alone["digest"]}
        refused = [line for line in two if line["ms"] is None]
        assert [line["case"]["way"] for line in refused] == ["diffusers ring, eager"]
        assert refused[0]["refused"] == "Native attention does not support return_lse=True"
    assert len(table.tables(lines)) == 3 + any("split_ms" in line for line in lines)
    assert all(scale.row(line) for line in lines)
    pytest.importorskip("matplotlib")  # the assertions above need no matplotlib
    from launch.benches import plot

    plot.scale(lines).savefig(tmp_path / "scale.png")


def bits(rank: int, world: int, device: torch.device) -> list[str | None]:
    """Return the digests of the sampling loop, of the bench's run, and of a shorter run."""
    mesh, size = make_mesh(device, cfg=world), (8, 8)
    dit = DistributedDiT(model_of("large-dit", device), mesh)
    labels, noise = {"class_labels": torch.zeros(1, dtype=torch.int64)}, torch.Generator().manual_seed(0)
    noise = draw_noise((1, 4, *size), noise)
    scheduler = ways.DDIMScheduler.from_config(DDIM_DEFAULT)
    found: list[str | None] = [digest(sample(dit, scheduler, noise, labels, steps=25, guidance=GUIDANCE))]
    for steps in (25, 24, 0):
        with engine(dit, size, 1, steps) as ready:
            found.append(ready.bits())
    return found


def test_bits_are_those_of_the_loop(ranks: Pool) -> None:
    for whole, same, shorter, none in ranks.run(2, bits):
        assert whole == same
        assert shorter not in (whole, None)
        assert none is None


class Traced:
    """Stands for a GPU's counters on a machine without GPUs."""

    def __init__(self) -> None:
        self.peak, self.left = 3 << 30, 10 << 30

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found = {"max_memory_allocated": self.peak, "mem_get_info": (self.left, 16 << 30), "memory_reserved": 4 << 30}
        return lambda: found.get(name)


def test_memory_is_torchs_peak_and_what_is_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Traced())
    assert memory(torch.device("cuda", 0)) == {"gib": 3 << 30, "outside_gib": 2 << 30}
    assert memory(CPU) == {}


def test_the_fastest_of_ours_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readings of the sensors and the profiler, here of a fake GPU, go into the line."""
    calls: list[int] = []
    monkeypatch.setattr(scale, "Sensors", lambda gpu: Still())
    monkeypatch.setattr(scale, "timed", lambda step, repeat: calls.append(repeat))
    monkeypatch.setattr(scale, "split_of", lambda step, steps: {"GEMM": 1.0})
    monkeypatch.setattr(scale, "free", lambda device: None)

    @contextmanager
    def ready() -> Iterator[Ready]:
        yield Ready(lambda: None)

    bench = make_bench(model_of("dit", CPU), [Layout("ulysses", 1, 1, 1)], "auto", CPU)
    bench = replace(bench, mesh=replace(bench.mesh, device=torch.device("cuda", 0)))
    for kind, more in (("ours", {"split_ms": {"GEMM": 1.0}}), ("peer", {})):
        found = Found(calls=1000)
        look(bench, Way(kind, "way", ready), found, 10.0)
        assert found.look == {"sm_mhz": 1500.0, "joules": 7.0, **more}
    assert calls == [100, 100]  # 1.5 s of 100 steps of 10 ms, each time


def line_of(gpus: int, kind: str, way: str, ms: float, **more: Any) -> dict[str, Any]:
    case = {"model": "m", "tokens": 256, "kind": kind, "way": way, "images": 1, "local": "x", "dtype": "y"}
    case |= {"layout": way.split(",")[0].removeprefix("ceiling of "), "transport": way.split(", ")[-1]}
    found = {"median": ms, "min": ms, "max": ms}
    return {
        "bench": "scale",
        "case": case,
        "gpus": gpus,
        "ms": found,
        "tflops": 5.0,
        "roofline_ms": 1.0,
        "pictures_per_s": 40.0 / ms,
        **more,
    }


def test_the_table_compares_within_a_run_and_with_one_gpu() -> None:
    one, same = {"digest": "a", "digest_steps": 25}, {"digest": "a", "digest_steps": 25, "gib": 15.0, "outside_gib": 1}
    lines = [
        line_of(1, "ours", "u1, collective", 12.0, **one),
        line_of(1, "ceiling", "ceiling of u1", 10.0),
        line_of(4, "ours", "u4, peer", 5.0, **same, picked=True),
        line_of(4, "ours", "k4, peer", 4.0, **same | {"digest": "b"}),
        line_of(4, "ceiling", "ceiling of k4", 3.2),
        line_of(4, "peer", "other, graph", 10.0),
        line_of(4, "peer", "another, eager", 30.0),
    ]
    assert table.scale(lines).splitlines()[2:] == [
        "| m | 256 | 1 | u1, collective | 12.00 (12.00 - 12.00) | 1.200 | - | - | 1.00 | 5 | 8 % | - | - | yes |",
        "| m | 256 | 4 | k4, peer | 4.00 (4.00 - 4.00) | 1.250 | 2.50 | other, graph | 3.00 | 5 | 25 % | 16.0 | 1.250 "
        "| no |",
    ]
    assert table._bits(lines, lines[2]) == "yes"
    assert table._bits(lines, lines[2] | {"digest_steps": 2}) == "-"
    refused = line_of(4, "peer", "third, graph", 1.0) | {"ms": None, "refused": "no graph here"}
    assert table.scale([*lines, refused]) == table.scale(lines)
    assert "| third, graph | no graph here | - | - |" in table.ways([*lines, refused])


def test_other_engines_may_be_named() -> None:
    ways = [
        Way(kind, name, never) for kind, name in (("ours", "a"), ("ceiling", "b"), ("peer", "c"), ("peer", "d, graph"))
    ]
    for named, left in (((), "a b c d, graph"), (("graph", "x"), "a b d, graph"), (("x",), "a b")):
        assert " ".join(way.name for way in scale.wanted(replace(TINY, named=named), ways)) == left


@contextmanager
def never() -> Iterator[Ready]:
    raise AssertionError("set up")
    yield


@pytest.mark.parametrize(
    ("tokens", "patch", "size"), [(4096, 2, (128, 128)), (4097, 2, (34, 482)), (12, 1, (3, 4)), (7, 2, (2, 14))]
)
def test_a_picture_is_as_square_as_its_tokens_allow(tokens: int, patch: int, size: tuple[int, int]) -> None:
    assert size_of(tokens, patch) == size


def test_pictures_are_spread_over_the_ranks() -> None:
    shown = {world: [str(layout) for layout in data_layouts(world)] for world in (1, 3, 4)}
    assert shown == {
        1: [],
        3: ["ulysses data3 cfg1 ring1 ulysses1"],
        4: ["ulysses data2 cfg2 ring1 ulysses1", "ulysses data4 cfg1 ring1 ulysses1"],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (Scale(tokens=()), "got --tokens"),
        (Scale(tokens=(16, 0)), r"got --tokens \(16, 0\), expected counts of at least 1"),
        (Scale(rounds=0), "got --rounds 0"),
        (Scale(seconds=0.0), "--seconds 0, expected"),
        (Scale(digest_steps=26), "got --digest-steps 26, expected 0 to 25"),
        (Scale(layouts=("ring:1:3",)), "got --layouts ring:1:3, expected some of"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(args: Scale, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(args, 4)


def test_the_bench_runs_by_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It runs in this process; `test_bench.py` tests the command line in processes of their own."""
    out = tmp_path / "lines.jsonl"
    flags = "scale --model dit-s/8 --tokens 4 9 --rounds 1 --seconds 0.001 --digest-steps 1 --no-compiled --out"
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags.split(), str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entry.run(0)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line["case"]["tokens"] for line in lines] == [4, 4, 4, 9, 9, 9]
    assert "9 tokens  1 x  plain, one GPU, eager" in capsys.readouterr().out
