"""Says before sampling whether a size can be decoded on these ranks: at once, in strips in turn, or not at all.

When it wins: a picture that cannot be decoded is refused before minutes of sampling, with what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from seqpar.planner.decoder import milliseconds
from seqpar.planner.predict import GIB, USABLE
from seqpar.planner.rates import H200, Rates
from seqpar.vae.dry import LEAST, Kind, counted, held_bytes, shares
from seqpar.vae.known import spatial_factor

NCCL = "nccl"  # whose times a comparison of two ways of decoding takes
STRIPS = 1.35  # measured time of strips in turn over that of the rates: 1.2 to 1.5 at 2048 to 4096 pixels a side
MOST_RANKS = 64  # that a refusal proposes
COMMON_POOL = (0, 0)  # torch's id of the memory that is in no private pool


@dataclass(frozen=True)
class Fit:
    """How a decoding fits a device: the GiB over weights of the rank with most rows, at once and in strips in turn.

    turns: whether it must run in strips in turn. free: the GiB that there are, None if that is unknown. held_bytes: of
    strips in turn, see `seqpar.vae.turns`. slower: their predicted time over that at once, on an H200.
    """

    turns: bool
    at_once: float
    in_turns: float | None
    free: float | None
    held_bytes: int = 0
    slower: float = 1.0

    @property
    def told(self) -> str | None:
        """Return the line that says why strips run in turn, or None where they do not."""
        if not self.turns:
            return None
        return (
            f"the VAE decodes in strips in turn, in {self.in_turns:.1f} GiB and about {self.slower:.1f} x the time: at "
            f"once it needs {self.at_once:.1f} GiB of {self.free:.1f} GiB that are free"
        )


def kind_of(vae: Any) -> Kind:
    """Return what predictions need to know about a VAE of diffusers."""
    return Kind.of(type(vae), vae.config, vae.dtype)


def check_decodable(kind: Kind, shape: tuple[int, ...], ranks: int, free: float | None) -> Fit:
    """Return how decoding fits; raise ValueError, with what would fit, if it does not.

    shape: of the latents (N, C, ..., h, w) that are decoded at once. ranks: that share each picture. free: GiB that
    the rank with the least has left, None if that is unknown. Call it on every rank with the same numbers.
    """
    fit = fit_of(kind, shape, ranks, free)
    if fit.turns and fit.free is not None and fit.in_turns is not None and fit.in_turns > fit.free:
        raise ValueError(_refusal(kind, shape, ranks, fit))
    return fit


def fit_of(kind: Kind, shape: tuple[int, ...], ranks: int, free: float | None) -> Fit:
    """Return how decoding fits, in turns also where not even this fits; see `check_decodable`."""
    at_once = counted(kind, shape, ranks)
    if free is None or at_once.gib <= free:
        return Fit(False, at_once.gib, None, free)
    tried = ((share, counted(kind, shape, ranks, turns=share)) for share in shares(len(shape)))
    share, found = next((each for each in tried if each[1].gib <= free), (LEAST, counted(kind, shape, ranks, LEAST)))
    slower = STRIPS * milliseconds(found, H200, NCCL) / milliseconds(at_once, H200, NCCL)
    return Fit(True, at_once.gib, found.gib, free, held_bytes(kind, shape, ranks, share), slower)


def total_gib(device: torch.device) -> float | None:
    """Return the GiB of a device; None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None


def free_gib(device: torch.device) -> float | None:
    """Return the GiB that are free on this rank's device, and those that torch keeps unused; None on a CPU.

    Memory in the private pools of CUDA graphs counts as used: only those graphs can use it.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
    common = [each for each in segments if tuple(each["segment_pool_id"]) == COMMON_POOL]
    unused = sum(each["total_size"] - each["active_size"] for each in common)
    return USABLE * (torch.cuda.mem_get_info(device)[0] + unused) / GIB


def left_gib(device_gib: float, model: int, kind: Kind) -> float:
    """Return the GiB that a model, with all that it keeps between steps, and the decoder's weights leave on a device.

    device_gib: the device's memory. model: bytes of the model.
    """
    weights = sum(x.numel() for x in kind.build().parameters()) * kind.dtype.itemsize
    return max(0.0, USABLE * device_gib - (model + weights) / GIB)


def told(kind: Kind, shape: tuple[int, ...], ranks: int, pictures: int, rates: Rates, transport: str) -> str:
    """Return the line of a dry run: seconds and GiB of decoding.

    pictures: that each group of `ranks` decodes, one after the other. transport: the key of its measured times.
    """
    found = counted(kind, shape, ranks)
    seconds = pictures * milliseconds(found, rates, transport) / 1e3
    where = f"each in strips on {ranks} ranks" if ranks > 1 else "whole pictures"
    return f"decoding: {seconds:.3g} s predicted, {found.gib:.1f} GiB a rank over weights ({where})"


def _refusal(kind: Kind, shape: tuple[int, ...], ranks: int, fit: Fit) -> str:
    factor = spatial_factor(kind.build())
    height, width = (side * factor for side in shape[-2:])
    where = f"on each of {ranks} ranks" if ranks > 1 else "on one rank"
    return (
        f"got {height}x{width} pixels, whose decoding needs {fit.at_once:.1f} GiB {where}, and {fit.in_turns:.1f} GiB "
        f"in strips in turn, expected at most the {fit.free:.1f} GiB that are free; "
        f"{_what_fits(kind, shape, ranks, fit, factor)}"
    )


def _what_fits(kind: Kind, shape: tuple[int, ...], ranks: int, fit: Fit, factor: int) -> str:
    """Return the largest size of these proportions that fits, and the number of ranks on which the size would."""
    free = fit.free or 0.0
    smaller, step = _scaled(shape, free / (fit.in_turns or 1.0)), 0.97
    while min(smaller[-2:]) > 1 and counted(kind, smaller, ranks, LEAST).gib > free:
        smaller = _scaled(smaller, step)
    fits = f"use at most {smaller[-2] * factor}x{smaller[-1] * factor} pixels"
    if min(smaller[-2:]) <= 1:
        fits = "free memory on the devices"
    more = 2 * ranks
    while more <= min(MOST_RANKS, max(shape[-2:])):
        if counted(kind, shape, more, LEAST).gib <= free:
            return f"{fits}, or {more} ranks"
        more *= 2
    return fits


def _scaled(shape: tuple[int, ...], area: float) -> tuple[int, ...]:
    """Return a shape with this share of the pixels, in even latent rows and columns."""
    share = isqrt(max(1, round(area * 1e8))) / 1e4
    return *shape[:-2], *(max(1, int(side * share) // 2 * 2) for side in shape[-2:])
