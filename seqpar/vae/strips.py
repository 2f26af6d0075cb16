"""The cut of a latent into strips, the exchanges between them, and how images are spread over ranks.

A strip keeps its share at every resolution of the decoder, so its bounds follow from the latent's by proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.mesh import exact
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports._contract import Gather, Halo, Transport
from seqpar.transports.collective import CollectiveGather
from seqpar.vae.known import CHANNELS_LAST_VIDEOS


class Exchanges:
    """Exchanges between the ranks of an axis, all of which make the same calls in the same order."""

    def __init__(self, axis: Axis, transport: Transport) -> None:
        self._axis, self._transport = axis, transport
        self._gathers: dict[tuple[object, ...], Gather] = {}
        self._halos: dict[tuple[object, ...], Halo] = {}

    def swap(self, first: Tensor | None, last: Tensor | None, before: Tensor | None, after: Tensor | None) -> None:
        blocks = [block for block in (first, last, before, after) if block is not None]
        if self._axis.size == 1 or not blocks:
            return
        # one exchange for all sizes between two powers of two: their buffers are small, and a CUDA graph keeps them
        capacity = 1 << (max(block.numel() for block in blocks) - 1).bit_length()
        key = (capacity, blocks[0].dtype, blocks[0].device)
        if key not in self._halos:
            self._halos[key] = self._transport.halo(self._axis, capacity, blocks[0])
        self._halos[key].swap(first, last, before, after)

    def gathered(self, block: Tensor) -> Tensor:
        """Stack the blocks of all ranks in a new first dim; valid until the next call with this shape."""
        key = (block.shape, block.dtype, block.device)
        if key not in self._gathers:
            sizes = (1,) * self._axis.size
            with torch.inference_mode(False):  # buffers outlive the caller's mode
                self._gathers[key] = self._transport.gather(self._axis, sizes, tuple(block.shape), block)
        gather = self._gathers[key]
        gather.outbox()[0].copy_(block)
        return gather.deliver()

    def tokens(self, sizes: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Gather:
        """Return a gather of blocks (sizes[r], *shape) for one use; it is not kept, as it can exceed a layer."""
        return CollectiveGather(self._axis, sizes, shape, like)

    def release(self) -> None:
        """Free the buffers of all exchanges. Collective."""
        self._gathers.clear()
        self._halos.clear()
        self._transport.release()


DecodeMode = Literal["auto", "strips", "pictures", "tiled"]
MODES: tuple[str, ...] = get_args(DecodeMode)
SEAMS = "in diffusers' tiles, which leave seams"


@dataclass(frozen=True)
class Spread:
    """How images are decoded: "pictures" (whole, some on each rank), "strips" (each on `ranks`) or "whole".

    axis: divides the images. why: the reason against strips, or for tiles. tiled: whether diffusers' tiling decodes
    whole images.
    """

    name: str
    ranks: int
    axis: Axis
    why: str | None = None
    tiled: bool = False

    def shard(self, count: int) -> Shard:
        return Shard(count, self.axis.size)

    @property
    def explained(self) -> str | None:
        """Return the line that rank 0 prints if there is a reason."""
        return None if self.why is None else f"the VAE computes {self}"

    def __str__(self) -> str:
        groups = f", in each of {self.axis.size} groups" if self.axis.size > 1 else ""
        shown = {
            "pictures": f"whole images, some on each of {self.ranks} ranks",
            "strips": f"strips on {self.ranks} ranks{groups}",
            "whole": "whole images on every rank" if self.ranks > 1 else "whole images",
        }[self.name]
        shown += f", {SEAMS}" if self.tiled else ""
        return shown if self.why is None else f"{shown}, because {self.why}"


def spread_of(count: int, mode: str, world: Axis, groups: Axis, why_whole: Callable[[], str | None]) -> Spread:
    """Return how `count` images are decoded on all ranks.

    mode: a `DecodeMode`; "auto" gives each rank whole images where there are enough, and in exact mode, because these
    have the bits of one rank; otherwise strips. groups: the axis of the groups of ranks that share an image. why_whole:
    returns why an image cannot be cut into strips, or None.
    """
    tiled = mode == "tiled"
    if world.size == 1:
        return Spread("whole", 1, world, tiled=tiled)
    if tiled or mode == "pictures" or (mode == "auto" and (count >= world.size or exact.is_on())):
        return Spread("pictures", world.size, world, tiled=tiled)
    reason = why_whole()
    if reason is None:
        return Spread("strips", world.size // groups.size, groups)
    return Spread("pictures", world.size, world, reason)


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def pixels_last(x: Tensor) -> Tensor:
    """Return x, (N, C, H, W) or (N, C, T, H, W), in channels-last memory."""
    return x.contiguous(memory_format=FORMATS[x.ndim])


def memory_format(x: Tensor) -> torch.memory_format:
    """Return channels-last if a tensor lies so and not contiguously as well, else contiguous."""
    last = FORMATS.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def wins(vae: nn.Module, device: torch.device) -> bool:
    """Return whether channels-last memory is faster: on GPUs, for VAEs of images and the `CHANNELS_LAST_VIDEOS`.

    On an H200 HunyuanVideo's decoder took 967 ms for 81 frames of 256 x 448, and 666 ms contiguously; LTX-Video's 159
    ms for 81 frames of 480 x 704, and 102 ms.
    """
    video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    return device.type == "cuda" and (not video or type(vae).__name__ in CHANNELS_LAST_VIDEOS)


def channels_last(vae: nn.Module) -> bool:
    """Return whether the weights of a VAE's convolutions are channels-last, so that its activations will be."""
    return any(memory_format(module.weight) is not torch.contiguous_format for module in _convolutions(vae))


def weights_pixels_last(vae: nn.Module) -> Callable[[], None]:
    """Make the weights of convolutions channels-last, in place; return a function that makes them contiguous again.

    Weights that are channels-last already, as for another user of the VAE, are left alone.
    """
    changed = [module for module in _convolutions(vae) if module.weight.is_contiguous()]

    def write(change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False):  # weights outlive the caller's mode
            for module in changed:
                module.weight.data = change(module.weight.data)

    write(pixels_last)
    return lambda: write(Tensor.contiguous)


def _convolutions(vae: nn.Module) -> Iterator[nn.Conv2d | nn.Conv3d]:
    return (module for module in vae.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))


ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class Cut:
    """The strips of one latent. dim: -2 cuts rows, -1 cuts columns.

    axis: the ranks that share the latent. sizes: latent rows (or columns) of each rank. other: the latent's size along
    the dim that is not cut.
    """

    axis: Axis
    sizes: tuple[int, ...]
    dim: int
    other: int

    @staticmethod
    def of(axis: Axis, rows: int, columns: int) -> Cut | None:
        """Return the cut of a latent of rows x columns: rows if every rank gets one, else columns, else None."""
        if rows >= axis.size:
            return Cut(axis, Shard(rows, axis.size).sizes, ROWS, columns)
        if columns >= axis.size:
            return Cut(axis, Shard(columns, axis.size).sizes, COLUMNS, rows)
        return None

    @property
    def local(self) -> int:
        return self.sizes[self.axis.rank]

    @property
    def first(self) -> bool:
        return self.axis.rank == 0

    @property
    def last(self) -> bool:
        return self.axis.rank == self.axis.size - 1

    def take(self, whole: Tensor, factor: int = 1) -> Tensor:
        """Return this rank's strip of a full tensor with `factor` pixels for each latent pixel, as a view."""
        start = sum(self.sizes[: self.axis.rank])
        return whole.narrow(self.dim, start * factor, self.local * factor)

    def fits(self, strip_NCHW: Tensor) -> bool:
        """Return whether the last two dims of a tensor are this rank's strip at some resolution."""
        rows, columns = strip_NCHW.shape[self.dim], strip_NCHW.shape[ROWS + COLUMNS - self.dim]
        return rows > 0 and rows * self.other == columns * self.local

    def shares(self, count: int) -> tuple[int, ...]:
        """Return every rank's number of tokens or rows where this rank has `count`."""
        return tuple(count * size // self.local for size in self.sizes)


class Strip:
    """The strip of this rank during one call of a VAE.

    channels_last: whether edges are sent with the channels of a pixel together. Ranks must agree, and a strip of one
    pixel has both memory formats. side: the stream on which edges are sent while a convolution runs.
    """

    def __init__(
        self, cut: Cut, exchanges: Exchanges, channels_last: bool = False, side: torch.cuda.Stream | None = None
    ) -> None:
        self.cut, self.exchanges, self.channels_last, self.side = cut, exchanges, channels_last, side
        self._halos = WeakTensorKeyDictionary()

    def has_halo(self, padded: Tensor) -> None:
        """Mark a strip that includes rows of its neighbours, or of the outer padding."""
        self._halos[padded] = True

    def is_padded(self, tensor: Tensor) -> bool:
        return tensor in self._halos

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless the last two dims are this rank's strip at some resolution."""
        if not self.cut.fits(tensor):
            self.refuse(
                f"got a tensor {tuple(tensor.shape)} that is no strip of {self.cut.local} of the latent's "
                f"{sum(self.cut.sizes)} rows or columns (dim {self.cut.dim}, {self.cut.other} along the other)"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise ValueError with a reason; the traceback shows the line of diffusers."""
        raise ValueError(f"{reason}; decode whole images, or add a rule to seqpar/vae/rules.py")
