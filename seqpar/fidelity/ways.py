"""Lists the ways in which these processes can compute a run: layouts, strategies, transports and numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from seqpar.planner.predict import Load
from seqpar.planner.search import Wish, allowed
from seqpar.ranks.mesh import AXES, Mesh
from seqpar.transports import _folder
from seqpar.types.facts import Layout, Work


@dataclass(frozen=True)
class Way:
    """The layout, strategy and transport of a run on the first of all processes."""

    layout: Layout

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return prod(self.layout.sizes.values())

    @property
    def strategy(self) -> str:
        """Return the strategy's name, or "-" if one rank has the whole sequence."""
        return self.layout.strategy if self.layout.sequence > 1 else "-"

    @property
    def transport(self) -> str:
        """Return the transport's name, or "-" if ranks exchange nothing within a step."""
        return self.layout.transport if self.layout.sequence * self.layout.cfg > 1 else "-"

    def __str__(self) -> str:
        if self.ranks == 1:
            return "one rank"
        names = (name for name in (str(self.layout), self.strategy, self.transport) if name != "-")
        return f"{self.ranks} ranks, {', '.join(names)}"


class Meshes:
    """Makes the mesh of each layout once, because process groups take time and memory.

    ranks: the mesh of all processes (`Mesh.joined`). of(data, cfg, ring, ulysses): see `Mesh.of_first`.
    """

    def __init__(self, ranks: Mesh) -> None:
        self.ranks = ranks
        self.of = cache(lambda *sizes: Mesh.of_first(prod(sizes), dict(zip(AXES, sizes, strict=True)), ranks.device))


def ways(
    counts: Sequence[int], meshes: Meshes, wish: Wish, work: Work, load: Load
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """Return all ways that the wish allows, fewest ranks first, and the reasons why others are left out.

    One rank is always the first. Every process must call this at the same time, because a transport is tried.
    """
    listed, notes = list[Way](), list[str]()
    for count in sorted({1, *counts}):
        wanted = wish if count > 1 else replace(wish, axes={}, strategy="auto")
        names, reasons = _transports(count, meshes, wish.transport)
        notes += [reason for reason in reasons if reason not in notes]
        mine = [Way(layout) for name in names for layout in allowed(count, wanted, work, load, name)]
        if not mine:
            notes.append(f"{count} ranks: no layout that is asked for fits them")
        listed += [way for way in mine if way.transport != "-" or way.layout.transport == names[0]]
    return tuple(listed), tuple(notes)


def _transports(count: int, meshes: Meshes, asked: str) -> tuple[list[str], list[str]]:
    """Return the transports that work between the first `count` processes, and why the others do not."""
    ranks, mesh, working, reasons = meshes.ranks, meshes.of(1, 1, 1, count), list[str](), list[str]()
    names = [asked] if asked != "auto" else list(_folder.names())
    for name in names if count > 1 else _folder.unasked(ranks.device.type)[-1:]:
        mine = None if mesh is None else _folder.load(name).why_not_tried(mesh.world, ranks.device)
        reason = ranks.share(mine, str | None)
        if reason is None:
            working.append(name)
        elif asked != "auto":
            raise ValueError(f"got transport {name!r}, which does not work here: {reason}")
        else:
            reasons.append(f"transport {name} is not compared: {reason}")
    return working, reasons
