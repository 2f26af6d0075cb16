"""Tests of UniDiffuser's ladder: every rung makes the same picture, and every part is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.baselines.flux_pipeline import VAE
from launch.baselines.unidiffuser_pipeline import STABLE, UVIT, Sizes
from launch.benches.ladder_unidiffuser import OURS, PARTS, Case, LadderUniDiffuser, measure, shown
from tests.launch.benches.test_pipeline import SIZES
from tests.support.pool import Pool

pytest.importorskip("transformers")
TINY = Sizes(
    {**UVIT, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "text_dim": 4},
    SIZES.clip,
    {**VAE, **STABLE, "block_out_channels": (4, 4, 4, 4), "norm_num_groups": 2, "sample_size": 64},
)


def measured(rank: int, world: int, device: torch.device, out: Path) -> list[dict[str, Any]]:
    args = LadderUniDiffuser(steps=3, rounds=2, repeat=1, out=out)
    return measure(Case(args, device, torch.float32, TINY))


@pytest.mark.parametrize("world", [1, 2])
def test_every_rung_makes_the_picture_of_diffusers(ranks: Pool, tmp_path: Path, world: int) -> None:
    out = tmp_path / "lines.jsonl"
    lines, *_ = ranks.run(world, measured, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == json.loads(json.dumps(lines))
    assert all(shown(line) for line in lines)
    steps, pictures = ([line for line in lines if line["case"]["what"] == what] for what in ("step", "picture"))
    assert all(line["ceiling_ms"] > 0 for line in steps if line["case"]["way"].startswith("ours"))
    for line in pictures:
        assert set(line["parts_ms"]) == set(PARTS)
        assert line["difference"] < 1e-3
    ways = [line["case"]["way"] for line in pictures]
    if world == 1:
        theirs = [way for way in ways if "graph" not in way or way == OURS]  # one more on GPUs
        assert theirs == ["diffusers, fp32", "diffusers, half precision", "diffusers, branches merged", OURS]
    else:
        assert ways == [f"{OURS}, cfg=2", f"{OURS}, ulysses=2"]
