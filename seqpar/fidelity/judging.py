"""Runs every way of computing a request beside one rank in full precision, and judges the errors.

The reference is this package's model on one rank in fp32 (or fp64) without TF32, with attention by its formula and no
CUDA graph. The same in a narrower data type is the "plain" run of that type. A way holds if

- its predictions on the reference's inputs are at most 1.25 times as wrong as the plain run's, over all steps (and no
  single step by more than errors scatter, see `compare.first_over`);
- the states of its own run are at most twice as wrong as the plain run's (rounding grows by chance in a run, so that
  two equally precise runs differ: 0.8 to 1.3 times were seen);
- every rank finds so, and all ranks have the same bits;
- its bits are those of the same layout by another transport, and in exact mode, if its strategy only moves data, those
  of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqpar import exact
from seqpar.distributed import DistributedDiT
from seqpar.fidelity.compare import FLOORS, Error, Place, bound, first_over, first_unequal, worst
from seqpar.fidelity.one_rank import full_precision, plain_engine
from seqpar.fidelity.pictures import Likeness, likeness
from seqpar.fidelity.trajectory import Trajectory, on_own_inputs, on_same_inputs, record, shared
from seqpar.fidelity.ways import Meshes, Way
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.planner.search import Wish
from seqpar.sampling.request import Request

T = TypeVar("T")
OWN_FACTOR = 2.0  # of the error of a run of its own
Errors = Mapping[Place, Error]


@dataclass(frozen=True)
class Subject:
    """Weights with a request: what is computed in every way.

    pipeline: a family's pipeline in the reference's data type on this rank alone. It is a dataclass with the fields
    `dit` and `vae`, and has `decode`. name: what the weights are.
    """

    name: str
    pipeline: Any
    request: Request


@dataclass(frozen=True)
class Row:
    """The result of one way in one data type; `way` is None for the plain run.

    same, own: errors of the predictions on the reference's inputs, and of the states of the way's own run, the worst of
    all ranks. bits: digests of rank 0. findings: why the way does not hold; none if it does.
    """

    subject: str
    dtype: torch.dtype
    way: Way | None
    local: str
    same: Errors
    own: Errors
    ratio: float
    bits: tuple[str, ...]
    like: Likeness | None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures (N, 3, H, W) of the reference and of the way whose pictures differ most in one data type."""

    row: Row
    truth: Tensor
    got: Tensor


@dataclass(frozen=True, eq=False)
class Judged:
    """The rows of a subject, pictures of each data type on rank 0, and notes on what was left out."""

    rows: tuple[Row, ...]
    pictures: tuple[Pictures, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Measured:
    """What one rank found of a way: errors and bits, or the message with which the run ended."""

    same: Errors = field(default_factory=dict)
    own: Errors = field(default_factory=dict)
    bits: tuple[str, ...] = ()
    local: str = ""
    failed: str | None = None


@dataclass(frozen=True, eq=False)
class Bench:
    """One data type of a subject: its pipeline cast to that type, the reference, and what errors may be."""

    subject: Subject
    dtype: torch.dtype
    pipeline: Any
    truth: Trajectory
    picture: Tensor
    same: Mapping[Place, Error]
    own: Mapping[Place, Error]
    plain: Row
    lpips: Any


def judge(
    subject: Subject, ways: Sequence[Way], dtypes: Sequence[torch.dtype], meshes: Meshes, wish: Wish, lpips: Any = None
) -> Judged:
    """Return the judged rows of a subject. Every process must call this at the same time.

    ways: as `seqpar.fidelity.ways.ways` returns them, with its meshes. wish: names the local attention. lpips: a
    network of `load_lpips`, or None.
    """
    ranks, alone = meshes.ranks, Mesh.single(meshes.ranks.device)
    with full_precision():
        dit = plain_engine(subject.pipeline.dit.model, alone)
        truth = shared(ranks, record(dit, subject.request, graph=False))
        picture = replace(subject.pipeline, dit=dit).decode(_latents(dit, truth))
    rows, pictures, notes = list[Row](), list[Pictures](), list[str]()
    for dtype in dtypes:
        made = _bench(subject, dtype, truth, picture, lpips, ranks)
        if isinstance(made, str):
            notes.append(made)
            continue
        mine, worst_pictures = _rows(made, ways, meshes, wish)
        rows += [made.plain, *mine]
        pictures += worst_pictures
    return Judged(tuple(rows), tuple(pictures), tuple(notes))


def _bench(
    subject: Subject, dtype: torch.dtype, truth: Trajectory, picture: Tensor, lpips: Any, ranks: Mesh
) -> Bench | str:
    """Return the bench of one data type; the reason, where one rank alone cannot compute the request in it."""
    dit = plain_engine(_cast(subject.pipeline.dit.model, dtype), Mesh.single(ranks.device))
    pipeline = replace(subject.pipeline, dit=dit, vae=_cast(subject.pipeline.vae, dtype))
    name = _name(dtype)
    try:
        made = ranks.together(lambda: _refused(lambda: record(dit, subject.request, truth, graph=False)))
        like = ranks.of_rank_0(
            lambda: _refused(lambda: likeness(pipeline.decode(_latents(dit, made)), picture, lpips)), Likeness
        )
    except ValueError as error:  # overflow in this data type, which is no error of a way of computing
        return f"{subject.name}: {name} is not judged, because one rank alone fails in it: {error}"
    same, own = ranks.share((on_same_inputs(made, truth), on_own_inputs(made, truth)), tuple[Errors, Errors])
    row = Row(subject.name, dtype, None, dit.local.name, same, own, 1.0, made.bits, like)
    bounds = {place: bound(error, dtype) for place, error in same.items()}
    loose = {place: bound(error, dtype, OWN_FACTOR) for place, error in own.items()}
    return Bench(subject, dtype, pipeline, truth, picture, bounds, loose, row, lpips)


def _refused(work: Callable[[], T]) -> T:
    """Return the result of `work`; ValueError, which ranks share, where its numbers stop being finite."""
    try:
        return work()
    except FloatingPointError as error:
        raise ValueError(str(error)) from error


def _rows(bench: Bench, ways: Sequence[Way], meshes: Meshes, wish: Wish) -> tuple[list[Row], list[Pictures]]:
    """Return a row for each way, and the pictures of the way that differs most (on rank 0)."""
    rows, most = list[Row](), list[Pictures]()
    for way in ways:
        measured, got = _measured(bench, way, meshes, wish)
        row = _row(bench, way, measured, got)
        row = replace(row, findings=(*row.findings, *_unequal(row, rows)))
        rows.append(row)
        if got is not None and (not most or _psnr(row) < _psnr(most[0].row)):
            most = [Pictures(row, bench.picture.cpu(), got.cpu())]
    return rows, [replace(each, row=row) for each in most for row in rows if row.way == each.row.way]


def _measured(bench: Bench, way: Way, meshes: Meshes, wish: Wish) -> tuple[list[Measured], Tensor | None]:
    """Compute a way on its ranks; return what each of them measured on every process, and rank 0's pictures."""
    ranks, mesh, mine, got = meshes.ranks, meshes.of(way.ranks, way.layout.sizes), None, None
    if mesh is not None:
        try:
            mine, got = _computed(bench, way, mesh, wish)
        except (ValueError, FloatingPointError) as error:  # raised alike on all ranks of the way
            mine = Measured(failed=str(error))
    return [each for each in ranks.collect(mine, Measured | None) if each is not None], got if ranks.is_main else None


def _computed(bench: Bench, way: Way, mesh: Mesh, wish: Wish) -> tuple[Measured, Tensor]:
    layout, transport = way.layout, way.layout.transport if way.exchanges else "auto"
    dit = DistributedDiT(bench.pipeline.dit.model, mesh, layout.strategy, wish.local, transport)
    try:
        made = record(dit, bench.subject.request, bench.truth)
        with replace(bench.pipeline, dit=dit) as pipeline:  # decoded as one rank decodes: only the latents are judged
            got = pipeline.decode(_latents(dit, made), wish="pictures")
    finally:
        dit.release()
    truth = bench.truth
    return Measured(on_same_inputs(made, truth), on_own_inputs(made, truth), made.bits, dit.local.name), got


def _row(bench: Bench, way: Way, measured: Sequence[Measured], got: Tensor | None) -> Row:
    """Return the row of a way from what its ranks measured."""
    first = measured[0]
    row = Row(bench.subject.name, bench.dtype, way, first.local, {}, {}, float("nan"), first.bits, None)
    failed = [f"rank {rank}: {each.failed}" for rank, each in enumerate(measured) if each.failed is not None]
    if failed:
        return replace(row, findings=tuple(failed))
    same, own = (
        {place: worst(getattr(each, kind)[place] for each in measured) for place in getattr(first, kind)}
        for kind in ("same", "own")
    )
    found = [first_over(same, bench.same), first_over(own, bench.own)]
    findings = [str(finding) for finding in found if finding is not None]
    if len({each.bits for each in measured}) > 1:
        findings.append("ranks have different bits of what all of them should have whole")
    ratio = max((_ratio(error, bench.plain.same[place], bench.dtype) for place, error in same.items()), default=0.0)
    like = None if got is None else likeness(got, bench.picture, bench.lpips)
    return replace(row, same=same, own=own, ratio=ratio, like=like, findings=tuple(findings))


def _ratio(error: Error, plain: Error, dtype: torch.dtype) -> float:
    """Return an error in units of one rank's; where one rank has none, in units of the smallest that counts."""
    return error.rms / (plain.rms or FLOORS.get(dtype, 1.0)) if error.rms else 0.0


def _unequal(row: Row, others: Sequence[Row]) -> list[str]:
    """Return a finding for each other row whose bits a row should have and has not."""
    findings = list[str]()
    for other in others:
        if row.way is None or other.way is None or not row.bits or not other.bits:
            continue
        twins = replace(row.way.layout, transport="") == replace(other.way.layout, transport="")
        moves = facts_of(row.way.layout.strategy).moves_only
        alone = exact.is_on() and other.way.ranks == 1 and moves
        index = first_unequal(row.bits, other.bits) if twins or alone else None
        if index is not None:
            what = f"prediction of step {index + 1}" if index < len(row.same) else "latents"
            findings.append(f"{what}: other bits than {other.way}, expected the same: only data moves")
    return findings


def _latents(dit: DistributedDiT, made: Trajectory) -> Tensor:
    return made.inputs[-1][dit.model.STATE[0]]


def _cast(module: Any, dtype: torch.dtype) -> Any:
    """Return a copy with all floating-point tensors in this data type, None for None.

    Tensor by tensor, because diffusers warns about parts of some models that `to` should not cast.
    """
    made = deepcopy(module)
    for x in (*made.parameters(), *made.buffers()) if made is not None else ():
        x.data = x.data.to(dtype) if x.is_floating_point() else x.data
    return made


def _psnr(row: Row) -> float:
    """Return a row's PSNR; a row that does not hold comes before all others."""
    return (row.like.psnr if row.like is not None else 0.0) - (1e6 if row.findings else 0.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
