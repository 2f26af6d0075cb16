"""Tests of what 8 bits change in images: the error stands above the floor, and the pipeline is left as it was."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import seqpar
from seqpar.verifying import precision
from seqpar.verifying.precision import PrecisionError
from tests.support.pool import Pool
from tests.support.sharded import CPU, raised
from tests.transformer.test_pipelines import CASES

SIZE: Any = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}


def eight(name: str) -> Any:
    pipe = CASES[name].pipe()
    return seqpar.parallelize(pipe, precision="fp8", calibrate=lambda: pipe("a house", output_type="latent", **SIZE))


def measured(rank: int, world: int, device: torch.device) -> tuple[PrecisionError, bool]:
    """Return the error of two prompts, and whether the same images come before and after it."""
    pipe = eight("flux")

    def drawn() -> torch.Tensor:
        made = pipe("a cat", output_type="latent", generator=torch.Generator().manual_seed(3), **SIZE)[0]
        return made.clone()

    before = drawn()
    result = seqpar.measure_precision(pipe, ("a cat", "two dogs"), seed=3, **SIZE)
    same = torch.equal(drawn(), before)
    seqpar.release(pipe)
    return result, same


@pytest.mark.parametrize("world", [1, 2])
def test_the_error_stands_above_the_floor_and_nothing_is_changed(cpu_ranks: Pool, world: int) -> None:
    results = cpu_ranks.run(world, measured) if world > 1 else [measured(0, 1, CPU)]
    for result, same in results:
        assert same
        assert str(result) == str(results[0][0])
        for error, floor in zip(result.errors, result.floor, strict=True):
            assert error.latents is not None
            assert floor.latents is not None
            assert floor.latents < 1e-4 < error.latents < 0.5
            assert error.psnr < floor.psnr
            assert error.frames is None
            assert math.isclose(error.psnr, result.worst_psnr) or error.psnr > result.worst_psnr
        assert "worst prompt: " in str(result)
        assert [*result.gemms] == sorted(result.gemms, key=lambda gemm: -gemm[1])
        assert len(result.gemms) == 5
        assert f"worst GEMMs:  transformer.{result.gemms[0][0].partition('.')[2]} " in str(result)


@pytest.mark.parametrize("there", ["nothing", "packages", "weights"])
def test_lpips_is_that_of_the_package_where_all_weights_are_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    def made(net: str, verbose: bool) -> torch.nn.Module:
        return Distance()

    class Distance(torch.nn.Module):
        def forward(self, got: torch.Tensor, wanted: torch.Tensor, normalize: bool) -> torch.Tensor:
            assert got.shape == wanted.shape == (1, 3, 4, 6)
            return (got - wanted).mean().reshape(1, 1, 1, 1)

    monkeypatch.setattr(precision, "find_spec", lambda name: None if there == "nothing" else name)
    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=made))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    if there == "weights":
        (tmp_path / "checkpoints" / precision.BACKBONE).touch()
    of, why = precision.lpips_on(CPU)
    says = {"nothing": "the extra `quality`", "packages": f"there is no {tmp_path}", "weights": "None"}[there]
    assert says in str(why)
    assert (of is None) == (there != "weights")
    if of is not None:
        black = np.zeros((1, 2, 4, 6, 3))
        assert of(black + 0.25, black) == 0.25


def test_videos_have_the_error_of_their_frames_differences() -> None:
    pipe = eight("wan")
    result = seqpar.measure_precision(pipe, ("a cat",), num_frames=5, **SIZE)
    seqpar.release(pipe)
    (error,) = result.errors
    assert error.frames is not None
    assert error.frames > 0
    assert "of frames" in str(result)


def test_what_cannot_be_compared_is_refused() -> None:
    pipe = seqpar.parallelize(CASES["flux"].pipe())
    assert 'precision="fp8"' in raised(lambda: seqpar.measure_precision(pipe))
    seqpar.release(pipe)
    pipe = eight("flux")
    assert "needs at least one prompt" in raised(lambda: seqpar.measure_precision(pipe, ()))
    assert "seqpar.measure_precision says" in raised(lambda: seqpar.verify(pipe, "a cat", **SIZE))
    seqpar.release(pipe)
