"""How a latent is cut into strips: the rows (or columns) of each rank, and whether a tensor still is this rank's strip.

A strip keeps its share at every resolution of the decoder, so its bounds follow from the latent's by proportion.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from seqpar.ranks.mesh import Axis
from seqpar.ranks.shard import Shard

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
