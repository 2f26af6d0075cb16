"""Previews: the clean latents that a step estimates, as RGB by a linear map with one pixel per latent pixel.

A decoder takes as long as some steps; a linear map takes no time and is enough to see what is coming. It is fitted once
per model, for the first preview, by least squares against the model's own decoder on images of short runs of the model
itself (decoded noise would need no run, but its latents are unlike those of images, and so are its colours). The fit
has a bias and takes latents as the model's loop has them, so that their scale, shift and packing need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.protocol import Estimates
from seqpar.serve.messages import ImageRequest, Partial, ServedModel

OnEstimate = Callable[[int, Tensor, tuple[int, int] | None], None]
Watch = Callable[[tuple[int, int] | None], Callable[[int], Estimates]]  # by the size of the image
STEPS = 8  # of a run for the fit: images are as good as finished then
# many colours
PROMPTS = ("a red apple and a green leaf", "a blue whale in the sea", "a yellow sun and a purple flower")


def watching(after: Callable[[int], Collection[int]], on_estimate: OnEstimate) -> Watch:
    """Which estimates of the clean latents a run makes, and what is done with them.

    after(count): the indices of the evaluations to estimate, of all `count`. on_estimate(number, latents, pixels):
    called on every rank with the number of the estimate, from 0; pixels: (height, width) of the image, None where only
    the pipeline knows it. Estimates change no result.
    """

    def estimates(pixels: tuple[int, int] | None, evaluations: int) -> Estimates:
        shown = sorted(after(evaluations))
        return shown, lambda index, latents: on_estimate(shown.index(index), latents, pixels)

    return lambda pixels: partial(estimates, pixels)


def evenly(most: int, count: int) -> Collection[int]:
    """At most `most` of the indices 0 to count - 2, evenly spread."""
    after = {round(count * number / (most + 1)) for number in range(1, most + 1)}
    return {number - 1 for number in after if 0 < number < count}


# the map -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreviewMap:
    """A linear map from latents to RGB. weights_KR: of a token's channels and 1, to block x block pixels of 0 to 255.

    side: pixels of the full image along each side of a token. error: root mean square over the fit, of 255.
    """

    weights_KR: Tensor
    block: int
    side: int
    error: float

    def image(self, latents: Tensor, pixels: tuple[int, int] | None) -> Image.Image:
        """The small image of latents (see `tokens_of`)."""
        values_hwR = _with_bias(tokens_of(latents, pixels)) @ self.weights_KR
        height, width = values_hwR.shape[:2]
        shape = height, width, self.block, self.block, 3
        rows_HW3 = values_hwR.view(shape).transpose(1, 2).reshape(height * self.block, width * self.block, 3)
        return Image.fromarray(rows_HW3.round().clamp(0, 255).to(torch.uint8).numpy())


def fitted(pairs: list[tuple[Tensor, Image.Image]]) -> PreviewMap:
    """The map closest to the decoder for pairs of latents and images, all of one size."""
    width, height = pairs[0][1].size
    grids = [tokens_of(latents, (height, width)) for latents, _ in pairs]
    rows, columns, channels = grids[0].shape
    side = height // rows
    if side * rows != height or side * columns != width:
        raise ValueError(
            f"partial_images require square tokens, but latents of {rows} x {columns} tokens make {height} x {width} "
            "pixels; leave them out"
        )
    packed = pairs[0][0].dim() == 3  # into tokens of 2 x 2 latent pixels, as in all diffusers models
    block = 2 if packed and side % 2 == 0 else 1
    expected = torch.cat([_block_colours(image, rows, columns, block) for _, image in pairs])
    inputs = torch.cat([_with_bias(grid).reshape(-1, channels + 1) for grid in grids])
    solution = torch.linalg.lstsq(inputs, expected, driver="gelsd").solution  # also if channels are dependent
    error = float((inputs @ solution - expected).square().mean().sqrt())
    return PreviewMap(solution, block, side, error)


def tokens_of(latents: Tensor, pixels: tuple[int, int] | None) -> Tensor:
    """The first image's latents as a grid of tokens (h, w, C), fp64 on the CPU.

    latents: (N, C, h, w), the same with one frame, or tokens (N, L, C) in rows of an image of (height, width) pixels.
    ValueError for other shapes.
    """
    first = latents[0].double().cpu()
    if first.dim() == 4 and 1 in first.shape[:2]:
        first = first.squeeze(1 if first.shape[1] == 1 else 0)
    if first.dim() == 3:
        return first.permute(1, 2, 0)
    if first.dim() == 2 and pixels is not None:
        height, width = pixels
        side = round((height * width / len(first)) ** 0.5)
        if side and height % side == width % side == 0 and height * width == side * side * len(first):
            return first.reshape(height // side, width // side, -1)
    raise ValueError(
        f"partial_images do not support latents of shape {tuple(latents.shape)}, which are no grid of the image's "
        "shape; leave them out"
    )


def _with_bias(grid: Tensor) -> Tensor:
    return torch.cat((grid, torch.ones_like(grid[..., :1])), dim=-1)


def _block_colours(image: Image.Image, rows: int, columns: int, block: int) -> Tensor:
    """Mean colours of each token's block x block parts, (rows * columns, R)."""
    small = image.convert("RGB").resize((columns * block, rows * block), Image.Resampling.BOX)
    values_HW3 = torch.from_numpy(np.array(small)).double()
    return values_HW3.view(rows, block, columns, block, 3).transpose(1, 2).reshape(rows * columns, -1)


class Previews:
    """The maps of a server's models, each fitted for the first preview."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._maps: dict[str, PreviewMap] = {}

    def watch(
        self,
        request: ImageRequest,
        facts: ServedModel,
        make: Callable[[ImageRequest, Watch], Image.Image],
        on_preview: Callable[[Partial], None],
    ) -> Watch | None:
        """The estimates that a request needs. Collective.

        make: runs a request for the fit. on_preview: called on rank 0 with each preview.
        """
        if not request.partial_images:
            return None
        if facts.name not in self._maps:
            self._maps[facts.name] = self._fit(facts, make)
        colours = self._maps[facts.name]

        def on_estimate(number: int, latents: Tensor, pixels: tuple[int, int] | None) -> None:
            tokens_of(torch.empty(latents.shape), pixels)  # raises on every rank, and not on rank 0 alone, as below
            if self._mesh.is_main:
                small = colours.image(latents, pixels)
                scale = colours.side // colours.block
                size = pixels or (small.height * scale, small.width * scale)
                on_preview(Partial(request.id, number, small.height, small.width, small.tobytes(), size))

        return watching(partial(evenly, request.partial_images), on_estimate)

    def _fit(self, facts: ServedModel, make: Callable[[ImageRequest, Watch], Image.Image]) -> PreviewMap:
        if facts.kind == "texts":
            prompts = PROMPTS
        else:
            names = facts.classes or ("0",)
            prompts = tuple(names[len(names) * number // len(PROMPTS)] for number in range(len(PROMPTS)))
        pairs, last = list[tuple[Tensor, Image.Image]](), list[Tensor]()
        watch = watching(lambda count: {count - 1}, lambda number, latents, pixels: last.append(latents))
        for seed, prompt in enumerate(prompts):
            image = make(ImageRequest("", facts.name, prompt, seed, steps=STEPS), watch)
            pairs.append((last.pop(), image))
        colours = self._mesh.on_all_ranks(lambda: fitted(pairs))
        if self._mesh.is_main:
            channels, error = len(colours.weights_KR) - 1, colours.error
            text = f"linear map of {channels} channels, {error:.1f} of 255 from the decoder (root mean square)"
            print(f"seqpar: previews of {facts.name}: {text}", flush=True)
        return colours
