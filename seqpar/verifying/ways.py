"""Lists the ways in which these processes can compute a request, and judges each as `verify` judges a run.

A way is a layout of the first of all processes. It fails if `verify` finds something in it, if its run ends in an
error, or if another transport gives the same layout other bits: transports only move data.
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
from seqpar.transports import _folder
from seqpar.types.arguments import MOST_STEPS
from seqpar.types.facts import Layout, Work
from seqpar.verifying.compare import NOT_FINITE, first_unequal
from seqpar.verifying.verify import Verdict, verdict_of

MeshOf = Callable[[int, int, int, int], Mesh | None]
"""Returns the mesh of the first processes for the sizes of its axes, on every process at the same time."""


@dataclass(frozen=True)
class Row:
    """One way in one data type: its verdict, or None if its run ended in an error; finding: why it does not hold."""

    way: Layout
    dtype: torch.dtype
    verdict: Verdict | None = None
    finding: str | None = None

    @property
    def skipped(self) -> bool:
        """Return whether one rank alone cannot compute the request in the data type, which is no fault of a way."""
        return self.way.sequence * self.way.cfg * self.way.data == 1 and NOT_FINITE in (self.finding or "")

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {named(self.way)}"


def meshes(ranks: Mesh) -> MeshOf:
    """Return what makes the mesh of each layout once, because process groups take time and memory."""
    return cache(lambda *sizes: Mesh.of_first(prod(sizes), dict(zip(AXES, sizes, strict=True)), ranks.device))


def ways(
    ranks: Mesh, counts: Iterable[int], mesh_of: MeshOf, preferences: Preferences, work: Work, load: Load
) -> tuple[list[Layout], list[str]]:
    """Return all ways that the preferences allow on these numbers of ranks, and the reasons why others are left out.

    One rank is always the first. Every process must call this at the same time, because a transport is tried.
    """
    listed, notes = list[Layout](), list[str]()
    for count in sorted({1, *counts}):
        wanted = preferences if count > 1 else replace(preferences, axes={}, strategy="auto")
        transports, reasons = _transports(ranks, count, mesh_of, preferences.transport)
        notes += [reason for reason in reasons if reason not in notes]
        ours = [way for name in transports for way in allowed(count, wanted, work, load, name)]
        if not ours:
            notes.append(f"{count} ranks: no layout that is asked for fits them")
        listed += [way for way in ours if _exchanges(way) or way.transport == transports[0]]
    return listed, notes


def _transports(ranks: Mesh, count: int, mesh_of: MeshOf, asked: str) -> tuple[list[str], list[str]]:
    """Return the transports that work between the first `count` processes, and why the others do not."""
    mesh, working, reasons = mesh_of(1, 1, 1, count), list[str](), list[str]()
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


def loaded(job: OwnJob, dtype: torch.dtype, ranks: Mesh) -> tuple[nn.Module, Request]:
    """Return a job's model in a data type on this rank alone, and the request of its run. Collective."""
    alone, files = Mesh.single(ranks.device), job.source
    dit = ranks.on_all_ranks(lambda: DistributedDiT.from_pretrained(files.blueprint, alone, dtype))
    pipeline: Any = job.pipeline(dit, files, None)  # without a decoder: only latents are compared
    return dit.model, pipeline.request(**job.settings)


def judged(
    ranks: Mesh, model: nn.Module, request: Request, listed: Sequence[Layout], mesh_of: MeshOf, local: str
) -> list[Row]:
    """Return a row for each way of computing a request with this model; every process must call this together.

    listed: as `ways` returns them; only the first is judged where one rank alone cannot compute the request in the
    model's data type. local: the name of the local attention, or "auto".
    """
    rows = list[Row]()
    for way in listed:
        row, mesh = Row(way, next(model.parameters()).dtype), mesh_of(*way.sizes.values())
        if mesh is not None:
            try:
                verdict = _verdict(model, request, way, mesh, local)
                row = replace(row, verdict=verdict, finding=verdict.finding or _unequal(way, verdict, rows))
            except (ValueError, FloatingPointError) as error:  # raised alike on all ranks of the way
                row = replace(row, finding=str(error))
        rows.append(ranks.share(row, Row))  # rank 0 is a rank of every way
        if rows[0].skipped:
            break
    return rows


def _verdict(model: nn.Module, request: Request, way: Layout, mesh: Mesh, local: str) -> Verdict:
    dit = DistributedDiT(model, mesh, way.strategy, local, way.transport if _exchanges(way) else "auto")
    try:
        return verdict_of(dit, request, MOST_STEPS)
    finally:
        dit.release()


def _unequal(way: Layout, verdict: Verdict, others: Sequence[Row]) -> str | None:
    """Return in words where a way has other bits than the same layout by another transport, or None."""
    for other in others:
        if other.verdict is not None and replace(other.way, transport=way.transport) == way:
            place = first_unequal(dict(verdict.bits), dict(other.verdict.bits))
            if place is not None:
                return f"{place}: other bits than {named(other.way)}, expected the same: only data moves"
    return None


def named(way: Layout) -> str:
    """Return a way in words, without the names that change nothing in it."""
    names = [str(way), way.strategy] if way.sequence > 1 else [str(way)]
    count = prod(way.sizes.values())
    return (
        ", ".join([f"{count} ranks", *names, *([way.transport] if _exchanges(way) else [])]) if count > 1 else str(way)
    )


def _exchanges(way: Layout) -> bool:
    """Return whether the ranks of a way exchange data within a step."""
    return way.sequence * way.cfg > 1


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table.

    error: the largest error of a prediction. x one: the largest error of a block or prediction, in units of that of one
    rank in the same data type, and where it is. bits: whether predictions and states have the bits of one rank.
    """
    lines = [f"{'dtype and way':<54} {'error':>8} {'x one':>6} {'at':<34} {'bits':<10} verdict"]
    for row in rows:
        verdict, failed = row.verdict, "not judged" if row.skipped else "FAILS"
        alone = next(each.verdict for each in rows if each.dtype == row.dtype)
        if verdict is None:
            measured = f"{'-':>8} {'-':>6} {'-':<34} {'-':<10}"
        else:
            bits = "-" if verdict is alone else "one rank's" if alone and verdict.bits == alone.bits else "others"
            measured = f"{verdict.error:8.1e} {verdict.ratio:6.2f} {verdict.where:<34} {bits:<10}"
        lines.append(f"{row!s:<54} {measured} {'holds' if row.finding is None else f'{failed} at {row.finding}'}")
    return "\n".join(lines)
