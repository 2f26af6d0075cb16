"""Tests of partial pictures: the map from latents to colours, estimates in pipelines of diffusers, and real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from seqpar.pipelines.diffusers import estimated
from seqpar.serve.messages import Answer, Failed, ImageRequest, ImageResult, Partial
from seqpar.serve.ranks.preview import Estimates, evenly, fitted, tokens_of
from tests.support.driver import Driver, replica
from tests.transformer.test_pipelines import CASES

pytestmark = pytest.mark.slow


def test_estimates_are_spread_evenly_and_the_last_step_has_none() -> None:
    assert [sorted(evenly(most, 28)) for most in range(4)] == [[], [13], [8, 18], [6, 13, 20]]
    assert [sorted(evenly(3, count)) for count in (1, 2, 3, 4)] == [[], [0], [0, 1], [0, 1, 2]]


# the map -------------------------------------------------------------------------------------------------------------


def drawn(seed: int, rows: int, columns: int, channels: int, block: int) -> tuple[Tensor, Image.Image]:
    """Return random tokens (rows, columns, C), and a picture of 4 x 4 pixels a block that is linear in them."""
    generator = torch.Generator().manual_seed(seed)
    tokens_hwC = torch.rand(rows, columns, channels, generator=generator, dtype=torch.float64)
    weights = torch.rand(channels, block * block * 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    values = (tokens_hwC @ weights * 220 / channels + 20).view(rows, columns, block, block, 3)
    small = values.transpose(1, 2).reshape(rows * block, columns * block, 3).round().to(torch.uint8).numpy()
    return tokens_hwC, Image.fromarray(small).resize((columns * block * 4, rows * block * 4), Image.Resampling.NEAREST)


def shaped(tokens_hwC: Tensor, kind: str) -> Tensor:
    """Return tokens as a pipeline's loop has them."""
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


# pipelines of diffusers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "flux",
        "flux, true guidance",
        "sd3",
        "two evaluations a step",
        "pixart",
        "chroma",
        "qwen-image",
        "image to image",
    ],
)
def test_pipelines_end_at_the_last_estimate_and_keep_their_bits(name: str) -> None:
    case = replace(CASES[name], output="latent")
    pipe = case.pipe()
    case.change(pipe)
    plain, found = case.pictures(pipe), list[Tensor]()

    def kept(number: int, latents: Tensor, pixels: tuple[int, int] | None) -> None:
        assert (number, pixels) == (len(found), (20, 12))
        found.append(latents)

    estimates = Estimates(lambda count: range(count), kept)
    with estimated(pipe.scheduler, partial(estimates.watched, pixels=(20, 12))):
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


# ranks ---------------------------------------------------------------------------------------------------------------

CAT = ImageRequest("cat", "builtin", "cat", seed=3, steps=12)
FROG = ImageRequest("frog", "builtin-text", "a green frog", seed=3, steps=12)
OTHERS = {"builtin": "rainbow", "builtin-text": "a red heart"}
MANY = 900  # steps, which take many seconds


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Return two ranks with both built-in models."""
    with replica(tmp_path_factory.mktemp("preview"), 2, "builtin", "builtin-text") as made:
        yield made
        assert made.finish() == 0
        said = made.errors.with_name("output").read_text()
        assert said.count("seqpar: previews of builtin: linear map of 4 channels") == 1
        assert said.count("seqpar: previews of builtin-text: linear map of 16 channels") == 1


def changed(order: ImageRequest, **fields: object) -> ImageRequest:
    """Return an order with other fields."""
    return ImageRequest(**{**{name: getattr(order, name) for name in order.__struct_fields__}, **fields})  # pyright: ignore


def pixels(answer: Answer | Partial | None) -> np.ndarray:
    """Return the colours of a picture, enlarged if it is a partial one."""
    assert isinstance(answer, (ImageResult, Partial)), answer
    image = Image.frombytes("RGB", (answer.width, answer.height), answer.pixels)
    if isinstance(answer, Partial):
        image = image.resize((answer.size[1], answer.size[0]), Image.Resampling.BICUBIC)
    return np.asarray(image).astype(float)


def alike(one: np.ndarray, other: np.ndarray) -> float:
    """Return how the colours of two pictures correlate."""
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.whole
@pytest.mark.parametrize("order", [CAT, FROG], ids=["our loop", "a pipeline of diffusers"])
def test_partial_pictures_show_what_comes_and_change_nothing(driver: Driver, order: ImageRequest) -> None:
    plain = driver.ask(changed(order, id=f"{order.id} plain", size=(64, 48)))
    assert f"{order.id} plain" not in driver.partial
    watched_id = f"{order.id} watched"
    made = driver.ask(changed(order, id=watched_id, size=(64, 48), partial_images=3))
    assert pixels(made).shape == (64, 48, 3)
    assert np.array_equal(pixels(made), pixels(plain))
    assert driver.steps[watched_id] == driver.steps[f"{order.id} plain"] == list(range(1, 13))  # none of the fit's runs
    parts = driver.partial[watched_id]
    assert [(part.index, part.height, part.width, part.size) for part in parts] == [
        (index, 16, 12, (64, 48)) for index in range(3)
    ]
    first, _, last = (alike(pixels(part), pixels(made)) for part in parts)
    other = driver.ask(changed(order, id=f"{order.id} other", size=(64, 48), prompt=OTHERS[order.model]))
    assert last > 0.85
    assert last > first > 0.5
    assert last > alike(pixels(other), pixels(made)) + 0.1


@pytest.mark.whole
def test_a_scheduler_without_estimates_is_refused_and_the_ranks_go_on(driver: Driver) -> None:
    other = changed(CAT, id="plain", scheduler="DDIMInverseScheduler")
    assert isinstance(driver.ask(other), ImageResult)
    refused = driver.ask(changed(other, id="refused", partial_images=1))
    assert isinstance(refused, Failed)
    assert refused.why == "mistake"
    assert "previews are not supported with this scheduler, because DDIMInverseScheduler" in refused.text
    assert "refused" not in driver.steps
    assert isinstance(driver.ask(changed(CAT, id="after", partial_images=1)), ImageResult)
    assert [part.index for part in driver.partial["after"]] == [0]


@pytest.mark.whole
def test_a_cancel_ends_a_run_with_partial_pictures(driver: Driver) -> None:
    answer = driver.cancel_at(changed(CAT, id="cancelled", steps=MANY, partial_images=3), 3)
    assert isinstance(answer, Failed)
    assert answer.why == "cancelled"


@pytest.mark.whole
def test_a_cancel_while_the_map_is_fitted(tmp_path: Path) -> None:
    """The next order fits it."""
    with replica(tmp_path, 1, "builtin") as driver:
        answer = driver.ask(changed(CAT, deadline_s=0.0, partial_images=2))
        assert isinstance(answer, Failed)
        assert answer.why == "deadline"
        assert isinstance(driver.ask(changed(CAT, id="next", partial_images=2)), ImageResult)
        assert len(driver.partial["next"]) == 2
        assert driver.finish() == 0
