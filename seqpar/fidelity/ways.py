"""Lists the ways in which these processes can compute a run: layouts, strategies, transports and numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from seqpar.mesh import AXES, Mesh
from seqpar.planner.predict import Load
from seqpar.planner.search import Wish, allowed
from seqpar.transports import _folder
from seqpar.types.facts import Layout, Work


@dataclass(frozen=True)
class Way:
    """A number of ranks (the first of all processes), and the layout, strategy and transport that they use."""

    ranks: int
    layout: Layout

    @property
    def strategy(self) -> str:
        """Return the strategy's name, or "-" if one rank has the whole sequence."""
        return self.layout.strategy if self.layout.sequence > 1 else "-"

    @property
    def exchanges(self) -> bool:
        """Return whether ranks exchange data within a step."""
        return self.layout.sequence * self.layout.cfg > 1

    @property
    def transport(self) -> str:
        """Return the transport's name, or "-" if nothing is exchanged."""
        return self.layout.transport if self.exchanges else "-"

    def __str__(self) -> str:
        if self.ranks == 1:
            return "one rank"
        names = (name for name in (str(self.layout), self.strategy, self.transport) if name != "-")
        return f"{self.ranks} ranks, {', '.join(names)}"


class Meshes:
    """Makes the mesh of each layout once, because process groups take time and memory.

    ranks: the mesh of all processes (`Mesh.joined`).
    """

    def __init__(self, ranks: Mesh) -> None:
        self.ranks = ranks
        self._made: dict[tuple[int, ...], Mesh | None] = {}

    def of(self, count: int, sizes: Mapping[str, int]) -> Mesh | None:
        """Return the mesh of the first `count` processes; see `Mesh.of_first`."""
        key = (count, *(sizes[name] for name in AXES))
        if key not in self._made:
            self._made[key] = Mesh.of_first(count, sizes, self.ranks.device)
        return self._made[key]


def ways(
    counts: Sequence[int], meshes: Meshes, wish: Wish, work: Work, load: Load
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """Return all ways that the wish allows, fewest ranks first, and the reasons why others are left out.

    One rank is always the first. Every process must call this at the same time, because a transport is tried.
    """
    found, notes = list[Way](), list[str]()
    for count in sorted({1, *counts}):
        wanted = wish if count > 1 else replace(wish, axes={}, strategy="auto")
        names, reasons = _transports(count, meshes, wish.transport)
        notes += [reason for reason in reasons if reason not in notes]
        mine = [Way(count, layout) for name in names for layout in allowed(count, wanted, work, load, name)]
        if not mine:
            notes.append(f"{count} ranks: no layout that is asked for fits them")
        found += [way for way in mine if way.exchanges or way.layout.transport == names[0]]
    return tuple(found), tuple(notes)


def _transports(count: int, meshes: Meshes, asked: str) -> tuple[list[str], list[str]]:
    """Return the transports that work between the first `count` processes, and why the others do not."""
    names, reasons = [asked] if asked != "auto" else list(_folder.names()), list[str]()
    ranks, mesh = meshes.ranks, meshes.of(count, {"data": 1, "cfg": 1, "ring": 1, "ulysses": count})
    working = list[str]()
    for name in names if count > 1 else _folder.unasked(ranks.device.type)[-1:]:
        reason = ranks.share(
            None if mesh is None else _folder.load(name).why_not_tried(mesh.world, ranks.device), str | None
        )
        if reason is None:
            working.append(name)
        elif asked != "auto":
            raise ValueError(f"got transport {name!r}, which does not work here: {reason}")
        else:
            reasons.append(f"transport {name} is not compared: {reason}")
    return working, reasons
