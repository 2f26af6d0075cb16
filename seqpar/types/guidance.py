"""Settings of classifier-free guidance: its scale, and the channels that it guides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.types.arguments import MOST_SIDE, MOST_STEPS, check_kind, check_whole, is_number, shown


def check_pictures(name: str, wanted: object, steps: object, guidance: object, size: object, seed: object) -> None:
    """Raise for arguments of images of other types or out of range. name: of `wanted`, classes or prompts."""
    if isinstance(wanted, (str, Mapping)) or not isinstance(wanted, Iterable):
        raise ValueError(f"got {name}={shown(wanted)}, expected a list, one entry per image")
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            raise ValueError(f"got size={shown(size)}, expected (height, width) in pixels, or None")
        for side_name, side in zip(("height", "width"), size, strict=True):
            check_whole(side_name, side, 1, MOST_SIDE)
    check_whole("seed", seed, -(2**63), 2**64 - 1)
    check_whole("steps", steps, 1, MOST_STEPS)
    check_kind("guidance", guidance, Guidance, expected="seqpar.Guidance(scale)")


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance (arXiv 2207.12598): u + scale (c - u) on the first `channels` of the latent.

    u and c are the predictions without and with the prompt. A scale of 1 or less turns guidance off.
    channels: None guides all channels, as diffusers does; the original DiT guides 3 of 4.
    """

    scale: float = 4.0
    channels: int | None = None

    def __post_init__(self) -> None:
        if not is_number(self.scale):
            raise ValueError(f"got guidance {shown(self.scale)}, expected a finite number; 1 or less is no guidance")
        if self.channels is not None and (isinstance(self.channels, bool) or not isinstance(self.channels, int)):
            raise ValueError(f"got guidance on channels={shown(self.channels)}, expected a whole number, or None")

    @property
    def on(self) -> bool:
        return self.scale > 1

    def vector(self, evaluations: int) -> Tensor:
        """Return the scale of each evaluation, (S,) fp64, CPU."""
        return torch.full((evaluations,), float(self.scale), dtype=torch.float64)


def check_layout(data: int, cfg: int, images: int, guidance: Guidance, channels: int) -> None:
    """Raise ValueError if images or guidance do not fit the sizes of the data and cfg axes."""
    if cfg > 1 and not guidance.on:
        raise ValueError(
            f"got cfg={cfg} with guidance {guidance.scale}, expected guidance > 1; without it "
            f"there is one branch: use cfg=1"
        )
    if images < data:
        raise ValueError(f"got {images} image(s) for data={data}, expected at least one per data rank")
    if guidance.channels is not None and not 1 <= guidance.channels <= channels:
        raise ValueError(f"got guidance on {guidance.channels} channels, expected 1 to {channels} or None for all")
