"""How a latent is cut into strips, and what the rules of functions know about this rank's strip.

A strip keeps its share at every resolution of the decoder, so its bounds follow from the latent's by proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.vae.exchanges import Exchanges

ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class Cut:
    """The strips of one latent. `dim` is counted from the end: -2 cuts rows, -1 cuts columns.

    axis: the ranks that share the latent. sizes: latent rows (or columns) of each rank. other: the latent's size along
    the dim that is not cut, which is the measure of resolution.
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
    def mine(self) -> int:
        """Return the latent rows (or columns) of this rank."""
        return self.sizes[self.axis.rank]

    @property
    def first(self) -> bool:
        """Return whether this rank's strip begins at the outer edge."""
        return self.axis.rank == 0

    @property
    def last(self) -> bool:
        """Return whether this rank's strip ends at the outer edge."""
        return self.axis.rank == self.axis.size - 1

    @property
    def across(self) -> int:
        """Return the dim of the two that is not cut."""
        return ROWS + COLUMNS - self.dim

    def take(self, whole: Tensor, factor: int = 1) -> Tensor:
        """Return this rank's strip of a whole tensor with `factor` pixels for each latent pixel, as a view."""
        start = sum(self.sizes[: self.axis.rank])
        return whole.narrow(self.dim, start * factor, self.mine * factor)

    def fits(self, strip_NCHW: Tensor) -> bool:
        """Return whether the last two dims of a tensor are this rank's strip at some resolution.

        Then rows of the strip / latent rows of the strip = columns / latent columns.
        """
        rows, columns = strip_NCHW.shape[self.dim], strip_NCHW.shape[self.across]
        return rows > 0 and rows * self.other == columns * self.mine

    def shares(self, count: int) -> tuple[int, ...]:
        """Return what every rank has of something of which this rank has `count`, such as tokens or rows."""
        return tuple(count * size // self.mine for size in self.sizes)


class Strip:
    """The strip of this rank during one call of a VAE.

    channels_last: whether edges travel with the channels of a pixel together, which is fastest where tensors lie so.
    Ranks must agree, and the memory format of one strip does not tell: strips of one pixel lie both ways. side: the
    stream on which edges travel while a convolution runs.
    """

    def __init__(
        self, cut: Cut, exchanges: Exchanges, channels_last: bool = False, side: torch.cuda.Stream | None = None
    ) -> None:
        self.cut, self.exchanges, self.channels_last, self.side = cut, exchanges, channels_last, side
        self._halos = WeakTensorKeyDictionary()

    def has_halo(self, padded: Tensor) -> None:
        """Say that a tensor is a strip with rows of its neighbours, or of the outer padding."""
        self._halos[padded] = True

    def is_padded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a strip that has rows of its neighbours already."""
        return tensor in self._halos

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless the last two dims are this rank's strip at some resolution."""
        if not self.cut.fits(tensor):
            self.refuse(
                f"got a tensor {tuple(tensor.shape)} that is no strip of {self.cut.mine} of the latent's "
                f"{sum(self.cut.sizes)} rows or columns (dim {self.cut.dim}, {self.cut.other} along the other)"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise ValueError with a reason; the traceback shows the line of diffusers that is running."""
        raise ValueError(f"{reason}; decode whole pictures, or add a rule to seqpar/vae/rules.py")
