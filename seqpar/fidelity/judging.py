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

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seqpar.engine.distributed import DistributedDiT
from seqpar.engine.signature import form_of
from seqpar.fidelity.compare import FACTOR, FLOORS, Comparison, Error, first_unequal, worst
from seqpar.fidelity.one_rank import full_precision, plain_engine
from seqpar.fidelity.pictures import Likeness, likeness
from seqpar.fidelity.runs import Errors, Trajectory, record
from seqpar.fidelity.ways import Meshes, Way
from seqpar.planner.costs import facts_of
from seqpar.planner.search import Wish
from seqpar.ranks import exact
from seqpar.ranks.inputs import broadcast
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.request import Request

T = TypeVar("T")
OWN_FACTOR = 2.0  # of the error of a run of its own
OUTLIER = 8.0  # a power of two, so that planted outliers are the same numbers in every data type
OUTLIERS = 128  # one channel of this many is an outlier, and at least one


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
class Measured:
    """What one rank measured of a way (see `Row`), or the message with which its run ended."""

    same: Errors = field(default_factory=dict)
    own: Errors = field(default_factory=dict)
    bits: tuple[str, ...] = ()
    local: str = ""
    failed: str | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """The result of one way in one data type; `way` is None for the plain run.

    same, own: errors of the predictions on the reference's inputs, and of the states of the way's own run, the worst of
    all ranks. ratio: the largest error of a prediction in units of the plain run's. bits: digests of rank 0. like: of
    rank 0's pictures. findings: why the way does not hold; none if it does. picture: on rank 0, pictures
    (N, 3, H, W) of the reference in the plain run's row, and in that of the way whose pictures differ most.
    """

    subject: str
    dtype: torch.dtype
    way: Way | None
    local: str
    same: Errors = field(default_factory=dict)
    own: Errors = field(default_factory=dict)
    ratio: float = float("nan")
    bits: tuple[str, ...] = ()
    like: Likeness | None = None
    findings: tuple[str, ...] = ()
    picture: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Bench:
    """One data type of a subject: its pipeline cast to that type, the reference, and the plain run, which sets bounds.

    lpips: see `judge`.
    """

    subject: Subject
    pipeline: Any
    truth: Trajectory
    plain: Row
    lpips: Any


def judge(
    subject: Subject, ways: Sequence[Way], dtypes: Sequence[torch.dtype], meshes: Meshes, wish: Wish, lpips: Any = None
) -> tuple[list[Row], list[str]]:
    """Return the judged rows of a subject, and notes on what was left out. Every process must call this together.

    ways: as `seqpar.fidelity.ways.ways` returns them, with its meshes. wish: names the local attention. lpips: a
    network of `load_lpips`, or None.
    """
    ranks, rows, notes = meshes.ranks, list[Row](), list[str]()
    with full_precision():
        dit = plain_engine(subject.pipeline.dit.model, Mesh.single(ranks.device))
        mine = record(dit, subject.request, graph=False)
        form = form_of((mine.inputs, mine.predictions))
        truth = Trajectory(*form.holding(broadcast(ranks, form.tensors)).whole)
        picture = replace(subject.pipeline, dit=dit).decode(_latents(dit, truth))
    for dtype in dtypes:
        try:
            bench = _bench(subject, dtype, truth, picture, lpips, ranks)
        except ValueError as error:  # overflow in this data type, which is no error of a way of computing
            reason = "is not judged, because one rank alone fails in it"
            notes.append(f"{subject.name}: {str(dtype).removeprefix('torch.')} {reason}: {error}")
            continue
        rows += [bench.plain, *_judged(bench, ways, meshes, wish)]
    return rows, notes


def _bench(subject: Subject, dtype: torch.dtype, truth: Trajectory, picture: Tensor, lpips: Any, ranks: Mesh) -> Bench:
    """Return the bench of one data type; ValueError on all ranks where one alone cannot compute the request in it."""
    dit = plain_engine(_cast(subject.pipeline.dit.model, dtype), Mesh.single(ranks.device))
    pipeline = replace(subject.pipeline, dit=dit, vae=_cast(subject.pipeline.vae, dtype))
    made = ranks.together(lambda: _refused(lambda: record(dit, subject.request, truth, graph=False)))
    like = ranks.of_rank_0(
        lambda: _refused(lambda: likeness(pipeline.decode(_latents(dit, made)), picture, lpips)), Likeness
    )
    errors = ranks.share(made.errors(truth), tuple[Errors, Errors])
    shown = picture.cpu() if ranks.is_main else None
    plain = Row(subject.name, dtype, None, dit.local.name, *errors, 1.0, made.bits, like, picture=shown)
    return Bench(subject, pipeline, truth, plain, lpips)


def _refused(work: Callable[[], T]) -> T:
    """Return the result of `work`; ValueError, which ranks share, where its numbers stop being finite."""
    try:
        return work()
    except FloatingPointError as error:
        raise ValueError(str(error)) from error


def _judged(bench: Bench, ways: Sequence[Way], meshes: Meshes, wish: Wish) -> list[Row]:
    """Return a row for each way; only the one whose pictures differ most keeps them."""
    rows = list[Row]()
    for way in ways:
        row = _row(bench, way, meshes, wish)
        rows.append(replace(row, findings=(*row.findings, *_unequal(row, rows))))
        shown = [row for row in rows if row.picture is not None and row.like is not None]
        most = min(shown, key=lambda row: (not row.findings, row.like.psnr if row.like else math.inf), default=None)
        rows = [row if row is most else replace(row, picture=None) for row in rows]
    return rows


def _row(bench: Bench, way: Way, meshes: Meshes, wish: Wish) -> Row:
    """Compute a way on its ranks; return its row on every process."""
    ranks, plain, mesh, mine, got = meshes.ranks, bench.plain, meshes.of(*way.layout.sizes.values()), None, None
    if mesh is not None:
        try:
            mine, got = _computed(bench, way, mesh, wish)
        except (ValueError, FloatingPointError) as error:  # raised alike on all ranks of the way
            mine = Measured(failed=str(error))
    every = [each for each in ranks.collect(mine, Measured | None) if each is not None]
    row = Row(plain.subject, plain.dtype, way, every[0].local, bits=every[0].bits)
    if failed := [f"rank {rank}: {each.failed}" for rank, each in enumerate(every) if each.failed is not None]:
        return replace(row, findings=tuple(failed))
    same = {place: worst(each.same[place] for each in every) for place in every[0].same}
    own = {place: worst(each.own[place] for each in every) for place in every[0].own}
    compared = Comparison(row.dtype, FACTOR, same, plain.same), Comparison(row.dtype, OWN_FACTOR, own, plain.own)
    findings = [str(finding) for finding in (each.first() for each in compared) if finding is not None]
    if len({each.bits for each in every}) > 1:
        findings.append("ranks have different bits of what all of them should have whole")
    row = replace(row, same=same, own=own, ratio=_ratio(same, plain), findings=tuple(findings))
    if got is None or plain.picture is None:
        return row
    return replace(row, like=likeness(got, plain.picture, bench.lpips), picture=got.cpu())


def _computed(bench: Bench, way: Way, mesh: Mesh, wish: Wish) -> tuple[Measured, Tensor]:
    """Return what this rank measures of a way, and its pictures."""
    transport = "auto" if way.transport == "-" else way.transport
    dit = DistributedDiT(bench.pipeline.dit.model, mesh, way.layout.strategy, wish.local, transport)
    try:
        made = record(dit, bench.subject.request, bench.truth)
        with replace(bench.pipeline, dit=dit) as pipeline:  # decoded as one rank decodes: only the latents are judged
            got = pipeline.decode(_latents(dit, made), wish="pictures")
    finally:
        dit.release()
    return Measured(*made.errors(bench.truth), made.bits, dit.local.name), got


def _ratio(same: Errors, plain: Row) -> float:
    """Return the largest error in units of one rank's; where that has none, in units of the smallest that counts."""
    least = FLOORS.get(plain.dtype, 1.0)
    return max(error.share(Error(plain.same[place].rms or least, math.inf)) for place, error in same.items())


def _unequal(row: Row, others: Sequence[Row]) -> list[str]:
    """Return a finding for each other row whose bits a row should have and has not."""
    findings = list[str]()
    for other in others:
        if row.way is None or other.way is None or not row.bits or not other.bits:
            continue
        twins = replace(row.way.layout, transport="") == replace(other.way.layout, transport="")
        alone = exact.is_on() and other.way.ranks == 1 and facts_of(row.way.layout.strategy).moves_only
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


@torch.no_grad()
def plant_outliers(model: nn.Module) -> None:
    """Multiply a few rows of every linear layer but the last, in place: each makes one channel of a layer's output.

    Trained transformers have such channels, random weights have none. With them sums cancel, scores of attention grow,
    and one channel decides the statistics of a norm, so that arithmetic which is too narrow shows.
    """
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not getattr(model, "final", None):
            rows = torch.randperm(layer.out_features, generator=generator)[: max(1, layer.out_features // OUTLIERS)]
            for x in (layer.weight, layer.bias):
                if x is not None:
                    x[rows.to(x.device)] *= OUTLIER
