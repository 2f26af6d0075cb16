"""How pictures are spread over ranks: each in strips on several of them, or whole pictures, some on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from seqpar.mesh import exact
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard

WISHES = ("auto", "strips", "pictures", "tiled")  # how a caller may ask for pictures to be decoded
SEAMS = "in diffusers' tiles, which leave seams"


@dataclass(frozen=True)
class Spread:
    """How pictures are decoded: "pictures" (whole, some on each rank), "strips" (each on `ranks`) or "whole".

    axis: the one that divides the pictures. why: why there are no strips, where there would be. tiled: whether whole
    pictures are decoded by diffusers' tiling.
    """

    name: str
    ranks: int
    axis: Axis
    why: str | None = None
    tiled: bool = False

    def shard(self, count: int) -> Shard:
        """Return the pictures of each rank of the axis."""
        return Shard(count, self.axis.size)

    @property
    def explained(self) -> str | None:
        """Return the sentence that says why there are no strips, or None."""
        return None if self.why is None else f"the VAE computes {self}"

    def __str__(self) -> str:
        groups = f", in each of {self.axis.size} groups" if self.axis.size > 1 else ""
        shown = {
            "pictures": f"whole pictures, some on each of {self.ranks} ranks",
            "strips": f"strips on {self.ranks} ranks{groups}",
            "whole": "whole pictures on every rank" if self.ranks > 1 else "whole pictures",
        }[self.name]
        shown += f", {SEAMS}" if self.tiled else ""
        return shown if self.why is None else f"{shown}, because {self.why}"


def spread_of(count: int, wish: str, world: Axis, groups: Axis, why_whole: Callable[[], str | None]) -> Spread:
    """Return how `count` pictures are decoded on all ranks.

    wish: one of `WISHES`; "auto" decodes by pictures where each rank gets one, and in exact mode, because that has the
    bits of one rank, and otherwise by strips. groups: the axis of the groups of ranks that share a picture.
    why_whole: returns why a picture cannot be cut into strips, or None.
    """
    tiled = wish == "tiled"
    if world.size == 1:
        return Spread("whole", 1, world, tiled=tiled)
    if tiled or wish == "pictures" or (wish == "auto" and (count >= world.size or exact.is_on())):
        return Spread("pictures", world.size, world, tiled=tiled)
    reason = why_whole()
    if reason is None:
        return Spread("strips", world.size // groups.size, groups)
    return Spread("pictures", world.size, world, reason)
