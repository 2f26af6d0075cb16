"""How far a decoded picture is from another one: numbers, and a picture of the differences, in which seams show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

NEAR = 8  # rows on each side of a cut that count as near it
SIDE = 640  # the largest side of a panel, in pixels
HEAD = 30  # rows of a panel's caption
WHITE = 4.0  # what is shown white, in medians of the differences: a seam stands out, and rounding stays grey
Measures = dict[str, float]


def far(x: Tensor, truth: Tensor, cuts: tuple[int, ...] = ()) -> Measures:
    """Return the relative distance of a picture (1, C, [T,] H, W) to another one, and the largest difference.

    cuts: rows at which strips begin; near: the root mean square of the differences near them over that of all rows.
    """
    wide = torch.promote_types(torch.float32, truth.dtype)
    difference = x.to(wide) - truth.to(wide)
    squares = difference.square().flatten(0, -3).mean(dim=(0, 2), dtype=torch.float64)  # of each row
    whole = float(squares.mean())
    size = float(truth.to(wide).square().mean(dtype=torch.float64))
    found = {"relative": (whole / size) ** 0.5, "max": float(difference.abs().max())}
    if cuts and whole > 0:
        rows = torch.cat([squares[max(0, cut - NEAR) : cut + NEAR] for cut in cuts])
        found["near_cuts"] = float(rows.mean() / whole) ** 0.5
    return found


def draw(picture: Tensor, pictures: Mapping[str, Tensor], path: Path) -> None:
    """Write a PNG: a picture (1, 3, [T,] H, W) in [-1, 1], and beside it the amplified differences of others to it.

    Each difference has its own gain, which its caption names. Larger pictures are made smaller by the largest
    difference of each square, which keeps thin lines. Of a video the middle frame is drawn.
    """
    base = _frame(picture)
    panels = [_panel("one GPU", F.adaptive_avg_pool2d(base, _shrunk(base)) / 2 + 0.5)]
    for name, other in pictures.items():
        apart = (_frame(other) - base).abs().amax(dim=0, keepdim=True)
        small = F.adaptive_max_pool2d(apart, _shrunk(apart))
        white = WHITE * float(small.median()) or float(small.max())
        caption = f"|{name} - one GPU| x {1 / white:.3g}, at most {float(apart.max()):.1e}" if white else f"{name}: 0"
        panels.append(_panel(caption, (small / white if white else small).expand(3, -1, -1)))
    whole = Image.new("RGB", (sum(each.width for each in panels), panels[0].height))
    left = 0
    for each in panels:
        whole.paste(each, (left, 0))
        left += each.width
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.save(path)


def _frame(x: Tensor) -> Tensor:
    """Return a picture, or the middle frame of a video, as (C, H, W) in fp32."""
    return (x[0] if x.dim() == 4 else x[0, :, x.shape[2] // 2]).float()


def _shrunk(x: Tensor) -> tuple[int, int]:
    """Return the (height, width) of a panel."""
    height, width = x.shape[-2:]
    scale = min(1.0, SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _panel(caption: str, x: Tensor) -> Image.Image:
    """Return a picture (3, H, W) in [0, 1] below its caption."""
    pixels = (x.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    panel = Image.new("RGB", (pixels.shape[1], pixels.shape[0] + HEAD), "white")
    panel.paste(Image.fromarray(pixels), (0, HEAD))
    ImageDraw.Draw(panel).text((6, 8), caption, fill="black")
    return panel
