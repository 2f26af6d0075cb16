"""Partial pictures: the clean latents that a step estimates, made RGB by a linear map, one pixel a latent's.

A decoder takes as long as some steps; a map of a few numbers a pixel takes nothing and is enough to see what comes. It
is fitted once for each model, when the first partial picture is asked for, by least squares against the model's own
decoder: on pictures of short runs of the model itself. Decoded noise would need no run, but its latents are unlike
those that the model makes, and so are its colours. The fit has a bias, and takes latents as the model's loop has them,
so that scale, shift and packing of latents need not be known.
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
from seqpar.serve.messages import ImageRequest, Partial, ServedModel

Look = Callable[[int, Tensor, tuple[int, int] | None], None]
STEPS = 8  # of a run for the fit: pictures are as good as finished then
TEXTS = ("a red apple and a green leaf", "a blue whale in the sea", "a yellow sun and a purple flower")  # many colours


@dataclass(frozen=True)
class Estimates:
    """Which estimates of the clean latents a run is asked for, and who looks at them.

    after(count): the indices of those of the run's evaluations that are to be estimated. look(number, latents, pixels):
    called on every rank with the number of the estimate, from 0; pixels: (height, width) of the picture, None where
    only the pipeline knows it.
    """

    after: Callable[[int], Collection[int]]
    look: Look

    def looked(
        self, evaluations: int, pixels: tuple[int, int] | None
    ) -> tuple[list[int], Callable[[int, Tensor], None]]:
        """Return the evaluations, and a function of an evaluation's index and its latents."""
        shown = sorted(self.after(evaluations))
        return shown, lambda index, latents: self.look(shown.index(index), latents, pixels)


NO_ESTIMATES = Estimates(lambda count: (), lambda number, latents, pixels: None)


def evenly(most: int, count: int) -> Collection[int]:
    """Return the indices of at most `most` of a run's evaluations, evenly spread, without the last."""
    after = {round(count * number / (most + 1)) for number in range(1, most + 1)}
    return {number - 1 for number in after if 0 < number < count}


@dataclass(frozen=True)
class PreviewMap:
    """A linear map from latents to RGB. weights_KR: of a token's channels and 1, to block x block pixels of 0 to 255.

    side: pixels of the whole picture along each side of a token. error: root mean square over the fit, of 255.
    """

    weights_KR: Tensor
    block: int
    side: int
    error: float

    def picture(self, latents: Tensor, pixels: tuple[int, int] | None) -> Image.Image:
        """Return the small picture of latents (see `tokens_of`)."""
        values_hwR = _with_bias(tokens_of(latents, pixels)) @ self.weights_KR
        height, width = values_hwR.shape[:2]
        shape = height, width, self.block, self.block, 3
        rows_HW3 = values_hwR.view(shape).transpose(1, 2).reshape(height * self.block, width * self.block, 3)
        return Image.fromarray(rows_HW3.round().clamp(0, 255).to(torch.uint8).numpy())


def fitted(pairs: list[tuple[Tensor, Image.Image]]) -> PreviewMap:
    """Return the map that is closest to the decoder for these latents and pictures of one size."""
    width, height = pairs[0][1].size
    grids = [tokens_of(latents, (height, width)) for latents, _ in pairs]
    rows, columns, channels = grids[0].shape
    side = height // rows
    if side * rows != height or side * columns != width:
        raise ValueError(
            f"got partial pictures with latents of {rows} x {columns} tokens for {height} x {width} pixels, expected "
            f"square tokens; leave them out"
        )
    packed = pairs[0][0].dim() == 3  # into tokens of 2 x 2 latent pixels, as all of diffusers' models do
    block = 2 if packed and side % 2 == 0 else 1
    wanted = torch.cat([_blocks(picture, rows, columns, block) for _, picture in pairs])
    given = torch.cat([_with_bias(grid).reshape(-1, channels + 1) for grid in grids])
    solved = torch.linalg.lstsq(given, wanted, driver="gelsd").solution  # also where channels depend on each other
    error = float((given @ solved - wanted).square().mean().sqrt())
    return PreviewMap(solved, block, side, error)


def tokens_of(latents: Tensor, pixels: tuple[int, int] | None) -> Tensor:
    """Return the first picture's latents as a grid of tokens (h, w, C), fp64 on the CPU.

    latents: (N, C, h, w), the same with one frame, or tokens (N, L, C), which have the shape of the picture of (height,
    width) pixels. Raises ValueError for others.
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
        f"got partial pictures with latents of shape {tuple(latents.shape)}, expected (N, C, h, w), or tokens in rows "
        f"as the picture; leave partial pictures out"
    )


def _with_bias(grid: Tensor) -> Tensor:
    return torch.cat((grid, torch.ones_like(grid[..., :1])), dim=-1)


def _blocks(picture: Image.Image, rows: int, columns: int, block: int) -> Tensor:
    """Return the mean colours of each token's block x block parts, (rows * columns, R)."""
    small = picture.convert("RGB").resize((columns * block, rows * block), Image.Resampling.BOX)
    values_HW3 = torch.from_numpy(np.array(small)).double()
    return values_HW3.view(rows, block, columns, block, 3).transpose(1, 2).reshape(rows * columns, -1)


class Previews:
    """The maps of a server's models, each fitted when it is first needed."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._maps: dict[str, PreviewMap] = {}

    def estimates(
        self,
        order: ImageRequest,
        facts: ServedModel,
        make: Callable[[ImageRequest, Estimates], Image.Image],
        tell: Callable[[Partial], None],
    ) -> Estimates:
        """Return which estimates an order needs; every rank must call this at the same time.

        make: makes the picture of an order for the fit. tell: called on every rank with each partial picture.
        """
        if not order.partial_images:
            return NO_ESTIMATES
        if facts.name not in self._maps:
            self._maps[facts.name] = self._fit(facts, make)
        return Estimates(
            partial(evenly, order.partial_images), partial(self._look, order.id, self._maps[facts.name], tell)
        )

    def _look(
        self,
        id: str,
        colours: PreviewMap,
        tell: Callable[[Partial], None],
        number: int,
        latents: Tensor,
        pixels: tuple[int, int] | None,
    ) -> None:
        tokens_of(torch.empty(latents.shape), pixels)  # raises on every rank, and not on rank 0 alone, as below
        if self._mesh.is_main:
            small = colours.picture(latents, pixels)
            scale = colours.side // colours.block
            size = pixels or (small.height * scale, small.width * scale)
            tell(Partial(id, number, small.height, small.width, small.tobytes(), size))

    def _fit(self, facts: ServedModel, make: Callable[[ImageRequest, Estimates], Image.Image]) -> PreviewMap:
        """Return the map of a model, by short runs of it."""
        pairs, last = list[tuple[Tensor, Image.Image]](), list[Tensor]()
        asked = Estimates(lambda count: {count - 1}, lambda number, latents, pixels: last.append(latents))
        for seed, prompt in enumerate(_prompts(facts)):
            picture = make(ImageRequest("", facts.name, prompt, seed, steps=STEPS), asked)
            pairs.append((last.pop(), picture))
        colours = self._mesh.on_all_ranks(lambda: fitted(pairs))
        if self._mesh.is_main:
            text = (
                f"a linear map of {len(colours.weights_KR) - 1} channels, {colours.error:.1f} of 255 from the decoder"
            )
            print(f"seqpar: partial pictures of {facts.name}: {text} (root mean square)", flush=True)
        return colours


def _prompts(facts: ServedModel) -> tuple[str, ...]:
    """Return what is shown in the runs for the fit."""
    if facts.kind == "texts":
        return TEXTS
    names = facts.classes or ("0",)
    return tuple(names[len(names) * number // len(TEXTS)] for number in range(len(TEXTS)))
