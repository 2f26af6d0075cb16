"""Previews: the map from latents to colours, and estimates in pipelines of diffusers. test_ranks.py has real ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from seqpar.pipelines.calls import estimated
from seqpar.serve.ranks.preview import evenly, fitted, tokens_of, watching
from tests.transformer.test_pipelines import CASES

pytestmark = pytest.mark.slow


def test_estimates_are_spread_evenly_and_the_last_step_has_none() -> None:
    assert [sorted(evenly(most, 28)) for most in range(4)] == [[], [13], [8, 18], [6, 13, 20]]
    assert [sorted(evenly(3, count)) for count in (1, 2, 3, 4)] == [[], [0], [0, 1], [0, 1, 2]]


def drawn(seed: int, rows: int, columns: int, channels: int, block: int) -> tuple[Tensor, Image.Image]:
    """Random tokens (rows, columns, C), and an image of 4 x 4 pixels per block that is linear in them."""
    generator = torch.Generator().manual_seed(seed)
    tokens_hwC = torch.rand(rows, columns, channels, generator=generator, dtype=torch.float64)
    weights = torch.rand(channels, block * block * 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    values = (tokens_hwC @ weights * 220 / channels + 20).view(rows, columns, block, block, 3)
    small = values.transpose(1, 2).reshape(rows * block, columns * block, 3).round().to(torch.uint8).numpy()
    return tokens_hwC, Image.fromarray(small).resize((columns * block * 4, rows * block * 4), Image.Resampling.NEAREST)


def shaped(tokens_hwC: Tensor, kind: str) -> Tensor:
    """Tokens as a pipeline's loop has them."""
    latents = tokens_hwC.permute(2, 0, 1)[None]
    return {"packed": tokens_hwC.flatten(0, 1)[None], "a frame": latents[:, :, None]}.get(kind, latents)


@pytest.mark.parametrize(("kind", "block"), [("", 1), ("a frame", 1), ("packed", 2)])
def test_the_map_is_the_one_of_the_decoder(kind: str, block: int) -> None:
    pairs = [(shaped(tokens, kind), picture) for tokens, picture in (drawn(seed, 6, 10, 8, block) for seed in range(3))]
    colours = fitted(pairs)
    assert (colours.block, colours.side) == (block, 4 * block)
    assert colours.error < 0.4  # what rounding to bytes leaves
    tokens, picture = drawn(7, 10, 6, 8, block)  # of another size
    got = np.asarray(colours.image(shaped(tokens, kind), (picture.height, picture.width))).astype(int)
    truth = np.asarray(picture).astype(int)[::4, ::4]
    assert got.shape == truth.shape == (10 * block, 6 * block, 3)
    assert abs(got - truth).max() <= 1
    turned = shaped(tokens.flip(0), kind)
    assert abs(np.asarray(colours.image(turned, (picture.height, picture.width))).astype(int) - truth).max() > 20


def test_latents_of_another_form_are_refused() -> None:
    for shape, pixels in (((1, 7, 8), (16, 16)), ((1, 16, 8), None), ((1, 2, 3, 4, 4), (16, 16)), ((1, 8), (16, 16))):
        with pytest.raises(ValueError, match=r"do not support latents of shape .*; leave them out"):
            tokens_of(torch.zeros(shape), pixels)
    with pytest.raises(ValueError, match="require square tokens"):
        fitted([(torch.zeros(1, 4, 4, 4), Image.new("RGB", (16, 32)))])


PIPELINES = ("flux, true guidance", "sd3", "two evaluations a step", "pixart", "image to image")


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_end_at_the_last_estimate_and_keep_their_bits(name: str) -> None:
    case = replace(CASES[name], output="latent")
    pipe = case.pipe()
    case.change(pipe)
    plain, found = case.pictures(pipe), list[Tensor]()

    def kept(number: int, latents: Tensor, pixels: tuple[int, int] | None) -> None:
        assert (number, pixels) == (len(found), (20, 12))
        found.append(latents)

    with estimated(pipe.scheduler, watching(range, kept)((20, 12))):
        assert torch.equal(case.pictures(pipe), plain)
    assert "step" not in vars(pipe.scheduler)
    assert len(found) == len(pipe.scheduler.timesteps) - (pipe.scheduler.begin_index or 0) > 1
    assert torch.allclose(found[-1].double(), plain.double(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0].double(), plain.double(), rtol=1e-2, atol=1e-2)
    height, width = (24, 16) if name == "pixart" else (20, 12)
    grid = tokens_of(found[0], (height, width))
    assert grid.shape[0] * width == grid.shape[1] * height
    with estimated(pipe.scheduler, None):
        assert "step" not in vars(pipe.scheduler)
