"""Lists all layouts in which these processes can compute a request, and verifies each.

A layout fails if `verify` finds a fault, if its run raises an error, or if another transport gives it other bits:
transports only move data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Request
from seqpar.mesh.mesh import AXES, Mesh
from seqpar.pipelines.own_loop import OwnJob
from seqpar.planner.predict import Load
from seqpar.planner.search import Preferences, allowed
from seqpar.transports import _contract
from seqpar.types.arguments import MOST_STEPS
from seqpar.types.facts import Layout, Work
from seqpar.verifying.compare import NOT_FINITE, first_unequal
from seqpar.verifying.verify import Verdict, verdict_of

MeshOf = Callable[[int, int, int, int], Mesh | None]
"""Returns the mesh of the first processes for the sizes of its axes. Collective."""


@dataclass(frozen=True)
class Row:
    """A layout in a data type. verdict: None if its run raised an error. finding: why it does not hold."""

    way: Layout
    dtype: torch.dtype
    verdict: Verdict | None = None
    finding: str | None = None

    @property
    def skipped(self) -> bool:
        """Whether one rank alone cannot compute the request in the data type, which is no fault of a layout."""
        return self.way.sequence * self.way.cfg * self.way.data == 1 and NOT_FINITE in (self.finding or "")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {named(self.way)}"


def meshes(ranks: Mesh) -> MeshOf:
    """A function that makes each mesh once, because process groups take time and memory."""
    return cache(lambda *sizes: Mesh.of_first(prod(sizes), dict(zip(AXES, sizes, strict=True)), ranks.device))


def ways(
    ranks: Mesh, counts: Iterable[int], mesh_of: MeshOf, preferences: Preferences, work: Work, load: Load
) -> tuple[list[Layout], list[str]]:
    """All layouts that the preferences allow on these numbers of ranks, and the reasons why others are left out.

    One rank is always the first. Collective, because transports are tried.
    """
    listed, notes = list[Layout](), list[str]()
    for count in sorted({1, *counts}):
        allowing = preferences if count > 1 else replace(preferences, axes={}, strategy="auto")
        transports, reasons = _transports(ranks, count, mesh_of, preferences.transport)
        notes += [reason for reason in reasons if reason not in notes]
        layouts = [way for name in transports for way in allowed(count, allowing, work, load, name)]
        if not layouts:
            notes.append(f"{count} ranks: no requested layout fits")
        listed += [way for way in layouts if _exchanges(way) or way.transport == transports[0]]
    return listed, notes


def _transports(ranks: Mesh, count: int, mesh_of: MeshOf, asked: str) -> tuple[list[str], list[str]]:
    """The transports that work between the first `count` processes, and why the others do not."""
    mesh, working, reasons = mesh_of(1, 1, 1, count), list[str](), list[str]()
    names = [asked] if asked != "auto" else list(_contract.names())
    for name in names if count > 1 else _contract.unasked(ranks.device.type)[-1:]:
        local = None if mesh is None else _contract.load(name).why_not_tried(mesh.world, ranks.device)
        reason = ranks.share(local, str | None)
        if reason is None:
            working.append(name)
        elif asked != "auto":
            raise ValueError(f"transport {name!r} does not work here: {reason}")
        else:
            reasons.append(f"transport {name} is not compared: {reason}")
    return working, reasons


def loaded(job: OwnJob, dtype: torch.dtype, ranks: Mesh) -> tuple[nn.Module, Request]:
    """A job's model in a data type on this rank alone, and the request of its run. Collective."""
    alone, files = Mesh.single(ranks.device), job.source
    dit = ranks.on_all_ranks(lambda: DistributedDiT.from_pretrained(files.blueprint, alone, dtype))
    pipeline: Any = job.pipeline(dit, files, None)  # without a decoder: only latents are compared
    return dit.model, pipeline.request(**job.settings)


def judged(
    ranks: Mesh, model: nn.Module, request: Request, listed: Sequence[Layout], mesh_of: MeshOf, local: str
) -> list[Row]:
    """Verify a request with this model in each layout. Collective: call on all ranks.

    listed: the result of `ways`; only the first layout is verified if one rank alone cannot compute the request in the
    model's data type. local: the name of the local attention, or "auto".
    """
    rows = list[Row]()
    for way in listed:
        row, mesh = Row(way, next(model.parameters()).dtype), mesh_of(*way.sizes.values())
        if mesh is not None:
            try:
                dit = DistributedDiT(model, mesh, way.strategy, local, way.transport if _exchanges(way) else "auto")
                try:
                    verdict = verdict_of(dit, request, MOST_STEPS)
                finally:
                    dit.release()
                finding = verdict.finding
                for other in rows:  # another transport of the same layout
                    if finding or other.verdict is None or replace(other.way, transport=way.transport) != way:
                        continue
                    place = first_unequal(dict(verdict.bits), dict(other.verdict.bits))
                    if place is not None:
                        finding = f"{place}: other bits than {named(other.way)}, expected the same: only data moves"
                row = replace(row, verdict=verdict, finding=finding)
            except (ValueError, FloatingPointError) as error:  # raised identically on all ranks of the layout
                row = replace(row, finding=str(error))
        rows.append(ranks.share(row, Row))  # rank 0 is a rank of every layout
        if rows[0].skipped:
            break
    return rows


def named(way: Layout) -> str:
    """A layout as text, without names that have no effect in it."""
    names = [str(way), way.strategy] if way.sequence > 1 else [str(way)]
    count = prod(way.sizes.values())
    return (
        ", ".join([f"{count} ranks", *names, *([way.transport] if _exchanges(way) else [])]) if count > 1 else str(way)
    )


def _exchanges(way: Layout) -> bool:
    return way.sequence * way.cfg > 1


def table(rows: Sequence[Row]) -> str:
    """The rows as a table.

    error: the largest error of a prediction. x one: the largest error of a block or prediction, in units of one rank's
    in the same data type, and its place. bits: whether predictions and states have one rank's bits.
    """
    lines = [f"{'dtype and way':<54} {'error':>8} {'x one':>6} {'at':<34} {'bits':<10} verdict"]
    for row in rows:
        verdict, failed = row.verdict, "not judged" if row.skipped else "FAILS"
        alone = next(other.verdict for other in rows if other.dtype == row.dtype)
        if verdict is None:
            measured = f"{'-':>8} {'-':>6} {'-':<34} {'-':<10}"
        else:
            bits = "-" if verdict is alone else "one rank's" if alone and verdict.bits == alone.bits else "others"
            measured = f"{verdict.error:8.1e} {verdict.ratio:6.2f} {verdict.where:<34} {bits:<10}"
        lines.append(f"{row!s:<54} {measured} {'holds' if row.finding is None else f'{failed} at {row.finding}'}")
    return "\n".join(lines)
