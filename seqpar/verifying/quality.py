"""LPIPS of images (https://arxiv.org/abs/1801.03924), with the extra `quality`. Nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BACKBONE = "alexnet-owt-7be5be79.pth"  # torchvision's; the package `lpips` has the weights of its own layers
EXTRA = ("lpips", "torchvision")


def distance(device: torch.device) -> tuple[Callable[[np.ndarray, np.ndarray], float] | None, str | None]:
    """Return the mean LPIPS of images (..., height, width, 3) with values from 0 to 1, or why it is left out."""
    if not all(map(find_spec, EXTRA)):
        return None, "LPIPS is left out: it needs lpips and torchvision (the extra `quality`)"
    file = Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE
    if not file.exists():
        return (
            None,
            f"LPIPS is left out: there is no {file}; torchvision.models.alexnet(weights='DEFAULT') downloads it",
        )
    import lpips  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names torchvision's weights as older versions do
        net: Any = lpips.LPIPS(net="alex", verbose=False).to(device)

    def image(pixels_HWC: np.ndarray) -> Tensor:
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].to(device, torch.float32)

    @torch.no_grad()
    def of(got: np.ndarray, wanted: np.ndarray) -> float:
        pairs = zip(*(pixels.reshape(-1, *pixels.shape[-3:]) for pixels in (got, wanted)), strict=True)
        values = [float(net(image(one), image(other), normalize=True)) for one, other in pairs]
        return sum(values) / len(values)

    return of, None
