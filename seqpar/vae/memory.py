"""Whether a decoding fits the memory of the GPUs, from bytes a pixel that two small decodings have shown.

All that a decoder allocates grows with the pixels of a rank's strip, so the difference of two small decodings, by the
very way of the large one, tells what the large one takes. On a CPU nothing is checked: other processes and swapping
share its memory, so that neither what is needed nor what is free can be told honestly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from seqpar.mesh.mesh import Mesh
from seqpar.planner.predict import GIB, USABLE
from seqpar.vae.cut import Cut
from seqpar.vae.known import spatial_factor
from seqpar.vae.spread import Spread

SIDES, SIDES_OF_VIDEO = (32, 64), (16, 32)  # latent pixels along the sides of the two small strips
AMPLE = 8192  # bytes for a pixel, more than any decoder here needs; where they are free nothing is measured
COMMON_POOL = (0, 0)  # torch's id of the memory that is in no private pool


class Meter(Protocol):
    """Reads the memory of a rank's device, in bytes."""

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that a call holds at once, beyond what was held before it."""
        ...

    def free(self) -> float:
        """Return the bytes that new tensors may take."""
        ...

    def total(self) -> float:
        """Return the bytes of the device."""
        ...


@dataclass(frozen=True)
class CudaMeter:
    """Reads what torch's allocator and the driver say of a GPU."""

    device: torch.device

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that a call holds beyond what was held before it; all where it ran out of memory."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            run()
        except torch.OutOfMemoryError:
            return int(self.total())
        return torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> float:
        """Return the free bytes of the GPU, and those that torch keeps unused.

        Memory in the private pools of CUDA graphs counts as used: only those graphs can use it.
        """
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
        common = [each for each in segments if tuple(each["segment_pool_id"]) == COMMON_POOL]
        unused = sum(each["total_size"] - each["active_size"] for each in common)
        return USABLE * (torch.cuda.mem_get_info(self.device)[0] + unused)

    def total(self) -> float:
        """Return the bytes of the GPU that a program can use."""
        return USABLE * torch.cuda.get_device_properties(self.device).total_memory


@dataclass(frozen=True)
class Need:
    """The bytes that decoding one picture takes on a rank, beside weights: `fixed`, and `each` for a latent pixel."""

    fixed: float
    each: float

    def of(self, latent_pixels: int) -> float:
        """Return the bytes for a strip of so many latent pixels."""
        return self.fixed + self.each * latent_pixels


def measured(peak: Callable[[int], int], sides: tuple[int, int] = SIDES) -> Need:
    """Return what a decoding needs; peak(side): the bytes for a strip of side x side latent pixels."""
    peak(sides[0])  # the first call also allocates what libraries keep
    small, large = map(peak, sides)
    areas = [side * side for side in sides]
    each = max(0.0, (large - small) / (areas[1] - areas[0]))
    return Need(max(0.0, small - each * areas[0]), each)


class DecodingMemory:
    """The memory that decodings of a VAE take on the ranks of a mesh.

    meter: reads this rank's memory; with None nothing is refused. decode(latents, strips): decodes latents that are
    equal on all ranks, in strips or on this rank alone. say: prints a text once.
    """

    def __init__(
        self,
        vae: Any,
        mesh: Mesh,
        meter: Meter | None,
        decode: Callable[[Tensor, bool], object],
        say: Callable[[str], None],
    ) -> None:
        self._vae, self._mesh, self.meter, self._decode, self._say = vae, mesh, meter, decode, say
        self._needs: dict[tuple[bool, tuple[int, ...]], Need] = {}

    def refuse(
        self, spread: Spread, shape: tuple[int, ...], kept: Callable[[], int] | None = None, also: str = ""
    ) -> None:
        """Raise ValueError on every rank if one of them lacks memory to decode latents (N, C, ..., h, w) at once.

        Tiles are as small as their user wants, and are not checked. kept(): the bytes that a model will keep meanwhile,
        also those that it has not taken yet. also: what else the message says that a user may do.
        """
        strips = spread.name == "strips"
        if self.meter is None or spread.tiled or (not strips and getattr(self._vae, "use_tiling", False)):
            return
        reason = self._why_not()
        if reason is not None:
            self._say(f"sizes are not checked before the first step, because {reason}")
            return
        free = self.meter.free()
        if kept is not None:
            weights = sum(weight.nbytes for weight in self._vae.parameters())
            free = min(free, max(0.0, self.meter.total() - kept() - weights))
        free, pixels = min(self._mesh.collect(free, float)), [side * spatial_factor(self._vae) for side in shape[-2:]]
        if AMPLE * prod(pixels) * prod((shape[0], *shape[2:-2])) <= free:
            return
        cut = Cut.of(self._mesh.replica, *shape[-2:]) if strips else None
        area = shape[-2] * shape[-1] if cut is None else max(cut.sizes) * cut.other
        need = max(self._mesh.collect(shape[0] * self.need(self.meter, strips, shape[1:-2]).of(area), float))
        if need > free:
            raise ValueError("; ".join(filter(None, (refusal(pixels, need, free, spread), also))))

    def _why_not(self) -> str | None:
        """Return why small decodings cannot be made now, or None; the same on all ranks."""
        if self._vae.config.get("timestep_conditioning"):
            return "the VAE takes more than latents"
        here = all(self._mesh.collect(is_on(self._vae, self._mesh.device), bool))
        return None if here else "the VAE's weights are not on all GPUs"

    def need(self, meter: Meter, strips: bool, form: tuple[int, ...]) -> Need:
        """Return what decoding latents of (channels, frames) takes on this rank, from small decodings on all ranks."""

        def peak(side: int) -> int:
            shape = (1, *form, side * (self._mesh.replica.size if strips else 1), side)
            latents = torch.zeros(shape, dtype=self._vae.dtype, device=self._mesh.device)
            return meter.peak(lambda: self._decode(latents, strips))

        if (strips, form) not in self._needs:
            with torch.inference_mode(False), torch.no_grad():
                self._needs[strips, form] = measured(peak, SIDES if prod(form[1:]) == 1 else SIDES_OF_VIDEO)
        return self._needs[strips, form]


def is_on(vae: Any, device: torch.device) -> bool:
    """Return whether all weights of a VAE are on a device."""
    return all(weight.device == device for weight in vae.parameters())


def refusal(pixels: Sequence[int], need: float, free: float, spread: Spread) -> str:
    """Return why (height, width) pixels are refused whose decoding needs more bytes than are free, and what to do."""
    ranks, (height, width) = spread.ranks if spread.name == "strips" else 1, pixels
    more, share = ranks * ceil(need / max(free, 1.0)), max(0.0, free / need)
    advice = f"use more ranks, each of which decodes a strip (some {more})"
    if spread.name == "pictures":
        advice = f"use --vae strips, by which all {spread.ranks} ranks share each picture, or fewer pictures at once"
    smaller = "x".join(str(int(side * share**0.5) // 16 * 16) for side in pixels)
    return (
        f"got {height}x{width} pixels, whose decoding needs {need / GIB:.1f} GiB on "
        f"{f'each of {ranks} ranks' if ranks > 1 else 'one rank'}, expected at most the {free / GIB:.1f} GiB that are "
        f"free; {advice}, or --vae tiled (in Python vae='tiled'), diffusers' tiling, which leaves seams, or at most "
        f"some {smaller} pixels"
    )
