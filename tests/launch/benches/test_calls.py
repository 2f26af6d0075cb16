"""Tests of the bench of calls: the operations of released models, their ceilings, and a line for every row."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from launch.benches import calls, released
from launch.benches.adapters import adapters
from launch.benches.calls import Case, Limits, measure
from launch.benches.ceiling import ceiling, share
from launch.benches.natives import natives
from launch.benches.peers import peers, with_cache_dit
from launch.benches.released import RELEASED, Released
from launch.benches.works import cogvideo_work, qwen_work, sd3_work, wan_work
from seqpar.mesh import Mesh
from seqpar.models import flux
from seqpar.planner.plan import work_of
from seqpar.weights.find import Blueprint
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_attention_heads": 5, "attention_head_dim": 8, "num_layers": 2}
JOINT: dict[str, Any] = {**SMALL, "axes_dims_rope": (2, 2, 4), "joint_attention_dim": 12}
FLUX: dict[str, Any] = {**released.FLUX, **JOINT, "num_single_layers": 3, "in_channels": 16, "pooled_projection_dim": 6}
QWEN: dict[str, Any] = {**released.QWEN, **JOINT, "in_channels": 16, "out_channels": 4}
WAN: dict[str, Any] = {**released.WAN, **SMALL, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 16, "ffn_dim": 40}
SD3: dict[str, Any] = {**released.SD3, **SMALL, "joint_attention_dim": 12, "caption_projection_dim": 40}
SD3 |= {"sample_size": 8, "pos_embed_max_size": 6, "pooled_projection_dim": 6}
COGVIDEO: dict[str, Any] = {**released.COGVIDEO, **SMALL, "attention_head_dim": 16, "text_embed_dim": 8}
COGVIDEO |= {"time_embed_dim": 8}
OURS = flux.Config(
    num_layers=2,
    num_single_layers=3,
    num_attention_heads=5,
    attention_head_dim=8,
    joint_attention_dim=12,
    pooled_projection_dim=6,
    guidance_embeds=True,
    axes_dims_rope=(2, 2, 4),
    in_channels=4,
    out_channels=4,
)


def native(dtype: torch.dtype, device: torch.device) -> Any:
    return Blueprint("tiny", flux, OURS).build(dtype, device)


TINY = {
    "flux": replace(
        RELEASED["flux.1-dev"], name="flux", config=FLUX, work=work_of(OURS), size=(3, 5), text=4, native=native
    ),
    "qwen": replace(RELEASED["qwen-image"], name="qwen", config=QWEN, work=qwen_work(QWEN), size=(3, 4), text=4),
    "sd3": replace(RELEASED["sd3.5-large"], name="sd3", config=SD3, work=sd3_work(SD3), size=(3, 4), text=4),
    "cogvideo": replace(
        RELEASED["cogvideox-5b"], name="cog", config=COGVIDEO, work=cogvideo_work(COGVIDEO), size=(2, 2, 3), text=4
    ),
    "wan": replace(RELEASED["wan2.1-14b"], name="wan", config=WAN, work=wan_work(WAN, 4), size=(2, 2, 3), text=4),
}


# Operations -------------------------------------------------------------------------------------------------------


def counted(model: Released) -> int:
    """Return the FLOPs that torch counts in a call of diffusers' model."""
    theirs, given = model.build(torch.float32, CPU), model.arguments(torch.float32, CPU)
    # the counter knows matrix products, but not the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(**given, return_dict=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", TINY)
def test_a_call_has_the_flops_that_torch_counts(name: str) -> None:
    """Modulation and the text's embedding are in a call, and `Work` counts them apart from a step."""
    model = TINY[name]
    work = model.work
    rows = sum(2 * inputs * outputs for inputs, outputs in work.modulation())
    text = sum(2 * model.text * inputs * outputs for inputs, outputs in work.text)
    assert counted(model) == work.step(1, model.tokens, model.others).flops + rows + text
    assert counted(model) != work.step(1, model.tokens + 1, model.others).flops + rows + text


@pytest.mark.parametrize(
    ("name", "tflop", "parameters"),
    [
        ("flux.1-dev", 74.4, 11.9),
        ("qwen-image", 70.6, 20.4),
        ("wan2.1-14b", 1678, 14.3),
        ("sd3.5-large", 31.1, 8.06),
        ("cogvideox-5b", 332.2, 5.57),
    ],
)
def test_released_models_by_hand(name: str, tflop: float, parameters: float) -> None:
    model = RELEASED[name]
    assert model.work.step(1, model.tokens, model.others).flops / 1e12 == pytest.approx(tflop, rel=1e-3)
    shapes = [shape for kind in model.work.blocks for _, *shape in kind.products(1, model.others) * kind.count]
    matrices = [*shapes, *model.work.modulation(), *model.work.once, *model.work.text]
    assert sum(inputs * outputs for inputs, outputs in matrices) / 1e9 == pytest.approx(parameters, rel=5e-3)
    if name == "flux.1-dev":
        assert sum(inputs * outputs for inputs, outputs in model.work.modulation()) / 1e9 == pytest.approx(
            3.25, rel=0.01
        )


# Ceilings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("strategy", ["ulysses", "kv_gather"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ceilings_of_all_ranks_have_the_flops_of_the_model(name: str, strategy: str, world: int) -> None:
    """Text of cross-attention is on every rank; the first product of a step, which is not among the blocks', is not."""
    model, counted = TINY[name], 0
    work = model.work
    for rank in range(world):
        mesh = Mesh.single()
        mesh = replace(mesh, sequence=replace(mesh.sequence, rank=rank, size=world))
        mesh = replace(mesh, ulysses=replace(mesh.ulysses, rank=rank, size=world))
        mine = share(work, model.tokens, strategy, mesh, 1, model.others)
        step = ceiling(work, mine, "reference", torch.float32, CPU)
        with FlopCounterMode(display=False) as counter:
            step()
        counted += counter.get_total_flops()
    again = sum(
        (world - 1) * kind.count * 2 * kind.cross.keys * inputs * outputs
        for kind in work.blocks
        if kind.cross is not None
        for inputs, outputs in kind.cross.gemms
    )
    (inputs, outputs) = work.once[0]
    assert counted - again == work.step(1, model.tokens, model.others).flops - 2 * model.tokens * inputs * outputs


# The bench --------------------------------------------------------------------------------------------------------

LIMITS = Limits(2, 1e-3, time.monotonic() + 1e6)


def measured(rank: int, world: int, device: torch.device, name: str, out: Path) -> list[dict[str, Any]]:
    case = Case(TINY[name], make_mesh(device, ulysses=world), torch.float32)
    strategies = ("kv_first", "ulysses", "kv_gather")
    rows = [*calls.ceilings(case, strategies), *natives(case, strategies, "auto"), *peers(case)]
    rows += adapters(case, strategies[:1], "auto")
    gc.freeze()  # each row ends in a garbage collection, which is faster without the objects of torch and diffusers
    try:
        return measure(case, [row for row in rows if "compiled" not in row.name], LIMITS, out)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("world", "name"), [(1, "flux"), *((2, name) for name in TINY)])
def test_every_row_has_a_line(ranks: Pool, tmp_path: Path, name: str, world: int) -> None:
    out = tmp_path / "lines.jsonl"
    lines, *_ = ranks.run(world, measured, name, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == json.loads(json.dumps(lines))
    ours = [line for line in lines if line["case"]["kind"] == "ours"]
    launches = 2 if ranks.device == "cuda" else 1  # of diffusers' modules: eager, and in a graph
    natives = {1: 2, 2: 8}[world] if name == "flux" else 0
    assert len(ours) == natives + (2 if name == "flux" else 1) * launches
    # a branch on each rank: no strategy exchanges anything
    both = [line["case"] for line in ours if "both branches" in line["case"]["way"]]
    assert len(both) == (2 if (name, world) == ("flux", 2) else 0)
    assert not any("strategy" in about or "kv_first" in about["way"] for about in both)
    refused = {line["case"]["way"]: line["refused"] for line in lines if line["ms"] is None}
    assert all(world > 1 and ("Ulysses" in way or "ring" in way) for way in refused), refused
    assert all(line["ms"]["median"] > 0 and line["over_ceiling"] > 0 for line in lines if line["ms"])
    close = 1e-5 if ranks.device == "cpu" else 1e-4  # fp32; other rows and sums of products in another order
    # diffusers' engine may be wrong for a model whose heads do not divide; that of FLUX is not
    checked = lines if name == "flux" else ours
    assert all(line["error"] < close for line in checked if "error" in line)
    assert "TFLOP a call" in calls.table(Case(TINY[name], Mesh.single(), torch.float32), lines)


def test_what_cache_dit_replaces_in_diffusers_is_restored_when_its_row_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cache-dit replaces what the package replaces; its added backend stays for its next row."""
    case, registry = Case(TINY["wan"], Mesh.single(), torch.float32), attention_dispatch._AttentionBackendRegistry
    native, added = attention_dispatch.AttentionBackendName.NATIVE, attention_dispatch.AttentionBackendName.FLEX
    monkeypatch.setattr(registry, "_backends", {k: v for k, v in registry._backends.items() if k != added})
    before, call = dict(registry._backends), WanAttnProcessor.__call__
    other = partial(before[native])

    def replaced(self: Any, *given: Any, **named: Any) -> Tensor:
        return call(self, *given, **named) * self._cp_config.scale

    def enable_cache(twin: nn.Module, parallelism_config: Any) -> None:
        registry.set_active_backend(added)
        registry._backends |= {native: other, added: other}
        registry._supports_context_parallel.discard(native.value)
        WanAttnProcessor.__call__, WanAttnProcessor._new = replaced, None  # pyright: ignore
        for module in twin.modules():
            if isinstance(getattr(module, "processor", None), WanAttnProcessor):
                module.processor._cp_config = SimpleNamespace(scale=1.0)  # pyright: ignore

    fake = SimpleNamespace(ParallelismConfig=SimpleNamespace, enable_cache=enable_cache)
    monkeypatch.setitem(sys.modules, "cache_dit", fake)
    monkeypatch.setattr("launch.baselines.transformers.compile_blocks", lambda twin: None)
    for _ in range(2):
        row = calls.Row("peer", "cache-dit", "ulysses", partial(with_cache_dit, case, "eager"))
        (line,) = measure(case, [row], LIMITS, None)
        assert line["error"] == 0
        assert WanAttnProcessor.__call__ is call
        assert not hasattr(WanAttnProcessor, "_new")
        assert registry._backends == {**before, added: other}
        assert (registry._active_backend, native.value in registry._supports_context_parallel) == (native, True)
    assert case.theirs(**case.arguments, return_dict=False)[0].equal(case.truth)


def test_rows_are_left_out_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(TINY["flux"], Mesh.single(), torch.float32)
    rows = [*calls.ceilings(case, ("ulysses",)), *natives(case, ("ulysses",), "auto")]
    chosen = calls.asked(rows, ("native", "ceiling without", "step"))
    assert [row.kind for row in chosen] == ["ours", "ours", "ceiling"]
    lines = measure(case, chosen, replace(LIMITS, until=0.0), None)
    assert {line["refused"] for line in lines} == {"left out: --minutes are over"}
    assert "3 of 3 rows left out, because --minutes were over" in capsys.readouterr().out


def test_theirs_is_a_module_without_anything_left_on_the_meta_device() -> None:
    for model in TINY.values():
        theirs = model.build(torch.float32, CPU)
        assert isinstance(theirs, nn.Module)
        (out,) = theirs(**model.arguments(torch.float32, CPU), return_dict=False)
        assert out.isfinite().all()


# a row of README's first table -> (model, GPUs, run, diffusers' row, ours); the runs of the committed file, in order
README_ROWS = (
    ("flux.1-dev", 1, 0, "diffusers, compiled blocks + graph", "native, step"),
    ("flux.1-dev", 2, 3, "cache-dit Ulysses, compiled blocks + graph", "native, kv_first, step"),
    ("flux.1-dev", 2, 1, "cache-dit Ulysses, compiled blocks + graph", "adapter, native, kv_first, graph"),
    ("flux.1-dev", 2, 0, "diffusers Ulysses, both branches", "native, both branches on a cfg axis, step"),
    ("qwen-image", 2, 0, "diffusers Ulysses, compiled blocks + graph", "generic, ulysses, compiled blocks + graph"),
    ("wan2.1-14b", 2, 0, "cache-dit Ulysses, compiled blocks + graph", "generic, ulysses, compiled blocks + graph"),
    ("sd3.5-large", 2, 0, "diffusers, graph", "generic, ulysses, graph"),
)


def test_the_first_table_of_the_readme_is_made_of_committed_lines() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/benchmarks/2026-11-22-h200-flux.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["bench"] == "calls"]

    def ms(model: str, gpus: int, run: int, way: str) -> tuple[float, float]:
        found = [
            x for x in lines if (x["case"]["model"], x["gpus"]) == (model, gpus) and x["case"]["way"].startswith(way)
        ]
        return found[run]["ms"]["median"], found[run]["over_ceiling"]

    (shown,) = [b for b in (root / "README.md").read_text().split("\n\n") if b.startswith("| work | H200s ")]
    for row, (model, gpus, run, theirs, ours) in zip(shown.splitlines()[2:], README_ROWS, strict=True):
        _, count, peer, mine, ratio, ceiling = (cell.strip() for cell in row.strip("|").split("|"))
        runs = [line for line in lines if line["case"]["way"].startswith(theirs) and line["case"]["model"] == model]
        best = [x["ms"]["median"] for x in runs if x["gpus"] == (1 if "one GPU" in peer else gpus)]
        got, over = ms(model, gpus, run, ours)
        assert int(count) == gpus
        assert (float(mine), float(ceiling)) == (round(got, 1), round(over, 2))
        assert float(peer.split()[0]) in [round(x, 1) for x in best]
        assert ratio == f"{float(peer.split()[0]) / got:.2f} x"
