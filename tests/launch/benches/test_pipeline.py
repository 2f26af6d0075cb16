"""Tests of the pipeline bench: every row makes the same picture, and every part is timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.baselines.flux_pipeline import VAE, Sizes
from launch.benches import pipeline
from launch.benches.pictures import Case, Pipeline, adapters, own, theirs
from launch.benches.pipeline import PARTS, measure
from tests.launch.benches.test_calls import TINY
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

pytest.importorskip("transformers")
SIZES = Sizes(
    {
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 77,
        "vocab_size": 110,
    },
    {"d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 110},
    {**VAE, "block_out_channels": (4, 4, 4, 4), "latent_channels": 4, "norm_num_groups": 2},
)
ARGS = Pipeline(steps=2, size=64, rounds=2)


def measured(rank: int, world: int, device: torch.device, out: Path) -> list[dict[str, Any]]:
    """Measure all rows; diffusers' are not compiled, because that takes a minute on GPUs and nothing here needs it."""
    released = replace(TINY["flux"], size=(4, 4), text=8)
    case = Case(replace(ARGS, out=out), released, make_mesh(device, ulysses=world), torch.float32, SIZES)
    return measure(case, [*own(case), *adapters(case), *theirs(case, ("graph", "eager") if world == 1 else ("eager",))])


@pytest.mark.parametrize("world", [1, 2])
def test_every_row_makes_the_picture_of_diffusers(ranks: Pool, tmp_path: Path, world: int) -> None:
    out = tmp_path / "lines.jsonl"
    lines, *_ = ranks.run(world, measured, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == json.loads(json.dumps(lines))
    assert all(pipeline.shown(line) for line in lines)
    done = [line for line in lines if line["ms"]]
    if (world, ranks.device) != (2, "cpu"):  # diffusers' context parallelism needs GPUs
        assert done == lines
        assert all(line["difference"] < 1e-4 for line in done)
    assert {line["case"]["way"] for line in done} >= {"own loop", "adapter, native", "adapter, generic"}
    for line in done:
        assert set(line["parts_ms"]) == set(PARTS)
        # medians and slowest ranks do not add up, but no part is longer than the whole, nor the whole than all parts
        parts = line["parts_ms"].values()
        assert all(part[kind] <= line["ms"][kind] for part in parts for kind in ("min", "median", "max"))
        assert line["ms"]["max"] <= sum(part["max"] for part in parts) * (1 + 1e-9)


def test_nothing_is_started_after_its_time() -> None:
    released = replace(TINY["flux"], size=(4, 4), text=8)
    case = Case(replace(ARGS, minutes=0.0), released, make_mesh(torch.device("cpu")), torch.float32, SIZES)
    assert {line["refused"] for line in measure(case, [*own(case), *theirs(case)])} == {"left out: --minutes are over"}
