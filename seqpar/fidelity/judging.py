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

Predictions on the same inputs show the error of one evaluation alone, which a wrong or imprecise operation raises at
once. A run of its own shows what becomes of these errors in the picture; it also covers the CUDA graph and the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seqpar import exact
from seqpar.adapter.signature import form_of
from seqpar.distributed import DistributedDiT
from seqpar.fidelity.compare import FACTOR, FLOORS, Comparison, Error, Place, digest, error, first_unequal, worst
from seqpar.fidelity.one_rank import full_precision, plain_engine
from seqpar.fidelity.pictures import Likeness, likeness
from seqpar.fidelity.ways import Meshes, Way
from seqpar.inputs import broadcast
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.planner.search import Wish
from seqpar.sampling.loop import check_finite
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin

T = TypeVar("T")
OWN_FACTOR = 2.0  # of the error of a run of its own
OUTLIER = 8.0  # a power of two, so that planted outliers are the same numbers in every data type
OUTLIERS = 128  # one channel of this many is an outlier, and at least one
Errors = dict[Place, Error]


@dataclass(frozen=True)
class Subject:
    """Weights with a request: what is computed in every way.

    pipeline: a family's pipeline in the reference's data type on this rank alone. It is a dataclass with the fields
    `dit` and `vae`, and has `decode`. name: what the weights are.
    """

    name: str
    pipeline: Any
    request: Request


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A run of S evaluations of the model, as whole tensors of the streams of the state by their names.

    inputs: what the model was given at each evaluation, then the latents, S + 1. predictions: guided predictions, S.
    """

    inputs: tuple[dict[str, Tensor], ...]
    predictions: tuple[dict[str, Tensor], ...]

    @property
    def bits(self) -> tuple[str, ...]:
        """Return the digest of each evaluation's prediction, then that of the latents."""
        return *map(digest, self.predictions), digest(self.inputs[-1])

    def errors(self, truth: Trajectory) -> tuple[Errors, Errors]:
        """Return the error of each prediction, made on the inputs of `truth`, and of the state after each step."""
        predicted = enumerate(zip(self.predictions, truth.predictions, strict=True))
        stepped = enumerate(zip(self.inputs[1:], truth.inputs[1:], strict=True))
        same = {Place(step): error(*pair) for step, pair in predicted}
        return same, {Place(step, 1, "latents"): error(*pair) for step, pair in stepped}


@dataclass(frozen=True)
class Measured:
    """What one rank measured of a way (see `Row`), or the message with which its run ended."""

    same: Errors = field(default_factory=dict)
    own: Errors = field(default_factory=dict)
    bits: tuple[str, ...] = ()
    local: str = ""
    failed: str | None = None


@dataclass(frozen=True)
class Row:
    """The result of one way in one data type; `way` is None for the plain run.

    same, own: errors of the predictions on the reference's inputs, and of the states of the way's own run, the worst of
    all ranks. ratio: the largest error of a prediction in units of the plain run's. bits: digests of rank 0. like: of
    rank 0's pictures. findings: why the way does not hold; none if it does.
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


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures (N, 3, H, W) of the reference and of the way whose pictures differ most in one data type."""

    row: Row
    truth: Tensor
    got: Tensor


@dataclass(frozen=True, eq=False)
class Judged:
    """The rows of a subject, pictures of each data type on rank 0, and notes on what was left out."""

    rows: list[Row]
    pictures: list[Pictures]
    notes: list[str]


@dataclass(frozen=True, eq=False)
class Bench:
    """One data type of a subject: its pipeline cast to that type, the reference, and the plain run, which sets bounds.

    picture: of the reference. lpips: see `judge`.
    """

    subject: Subject
    pipeline: Any
    truth: Trajectory
    picture: Tensor
    plain: Row
    lpips: Any


def judge(
    subject: Subject, ways: Sequence[Way], dtypes: Sequence[torch.dtype], meshes: Meshes, wish: Wish, lpips: Any = None
) -> Judged:
    """Return the judged rows of a subject. Every process must call this at the same time.

    ways: as `seqpar.fidelity.ways.ways` returns them, with its meshes. wish: names the local attention. lpips: a
    network of `load_lpips`, or None.
    """
    ranks, judged = meshes.ranks, Judged([], [], [])
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
            reason = f"{_name(dtype)} is not judged, because one rank alone fails in it: {error}"
            judged.notes.append(f"{subject.name}: {reason}")
            continue
        judged.rows.append(bench.plain)
        _judge_ways(bench, ways, meshes, wish, judged)
    return judged


@torch.inference_mode(False)
@torch.no_grad()
def record(dit: DistributedDiT, request: Request, on: Trajectory | None = None, graph: bool = True) -> Trajectory:
    """Return the run of a request, complete on every rank of the model's mesh.

    on: the run on whose inputs the model predicts; None means its own. graph: replay steps as CUDA graphs if possible;
    predictions never are. The request's generator is left as it is, so that every run of a request adds the same noise.
    Raises FloatingPointError if the latents stop being finite. Every rank must call this at the same time.
    """
    noise = request.generator
    noise = None if noise is None else torch.Generator(noise.device).set_state(noise.get_state())
    run = begin(dit, replace(request, generator=noise))
    try:
        inputs, predictions = [run.inputs()], list[dict[str, Tensor]]()
        for index in range(len(run.timesteps)):
            predictions.append(run.predict_on(index, (inputs if on is None else on.inputs)[index]))
            if graph and run.why_no_graph is None:
                run.capture()
            run.step()
            inputs.append(run.inputs())
        dit.check_delivered()
        check_finite(run.first_bad(), run.timesteps)
        return Trajectory(tuple(inputs), tuple(predictions))
    finally:
        run.release()


def _bench(subject: Subject, dtype: torch.dtype, truth: Trajectory, picture: Tensor, lpips: Any, ranks: Mesh) -> Bench:
    """Return the bench of one data type; ValueError on all ranks where one alone cannot compute the request in it."""
    dit = plain_engine(_cast(subject.pipeline.dit.model, dtype), Mesh.single(ranks.device))
    pipeline = replace(subject.pipeline, dit=dit, vae=_cast(subject.pipeline.vae, dtype))
    made = ranks.together(lambda: _refused(lambda: record(dit, subject.request, truth, graph=False)))
    like = ranks.of_rank_0(
        lambda: _refused(lambda: likeness(pipeline.decode(_latents(dit, made)), picture, lpips)), Likeness
    )
    same, own = ranks.share(made.errors(truth), tuple[Errors, Errors])
    plain = Row(subject.name, dtype, None, dit.local.name, same, own, 1.0, made.bits, like)
    return Bench(subject, pipeline, truth, picture, plain, lpips)


def _refused(work: Callable[[], T]) -> T:
    """Return the result of `work`; ValueError, which ranks share, where its numbers stop being finite."""
    try:
        return work()
    except FloatingPointError as error:
        raise ValueError(str(error)) from error


def _judge_ways(bench: Bench, ways: Sequence[Way], meshes: Meshes, wish: Wish, judged: Judged) -> None:
    """Add a row for each way, and the pictures of the way that differs most (on rank 0)."""
    rows, most = list[Row](), list[Pictures]()
    for way in ways:
        row, got = _row(bench, way, meshes, wish)
        rows.append(replace(row, findings=(*row.findings, *_unequal(row, rows))))
        if got is not None and (not most or _psnr(rows[-1]) < _psnr(most[0].row)):
            most = [Pictures(rows[-1], bench.picture.cpu(), got.cpu())]
    judged.rows.extend(rows)
    judged.pictures.extend(most)


def _row(bench: Bench, way: Way, meshes: Meshes, wish: Wish) -> tuple[Row, Tensor | None]:
    """Compute a way on its ranks; return its row on every process, and its pictures on rank 0."""
    ranks, mesh, mine, got = meshes.ranks, meshes.of(*way.layout.sizes.values()), None, None
    if mesh is not None:
        try:
            mine, got = _computed(bench, way, mesh, wish)
        except (ValueError, FloatingPointError) as error:  # raised alike on all ranks of the way
            mine = Measured(failed=str(error))
    every = [each for each in ranks.collect(mine, Measured | None) if each is not None]
    row = Row(bench.subject.name, bench.plain.dtype, way, every[0].local, bits=every[0].bits)
    if failed := [f"rank {rank}: {each.failed}" for rank, each in enumerate(every) if each.failed is not None]:
        return replace(row, findings=tuple(failed)), None
    same = {place: worst(each.same[place] for each in every) for place in every[0].same}
    own = {place: worst(each.own[place] for each in every) for place in every[0].own}
    compared = (
        Comparison(row.dtype, FACTOR, same, bench.plain.same),
        Comparison(row.dtype, OWN_FACTOR, own, bench.plain.own),
    )
    findings = [str(finding) for finding in (each.first() for each in compared) if finding is not None]
    if len({each.bits for each in every}) > 1:
        findings.append("ranks have different bits of what all of them should have whole")
    ratio = max(_ratio(error, bench.plain.same[place], row.dtype) for place, error in same.items())
    got = got if ranks.is_main else None
    like = None if got is None else likeness(got, bench.picture, bench.lpips)
    return replace(row, same=same, own=own, ratio=ratio, like=like, findings=tuple(findings)), got


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
        alone = exact.is_on() and other.way.ranks == 1 and facts_of(row.way.layout.strategy).moves_only
        index = first_unequal(row.bits, other.bits) if twins or alone else None
        if index is not None:
            what = f"prediction of step {index + 1}" if index < len(row.same) else "latents"
            findings.append(f"{what}: other bits than {other.way}, expected the same: only data moves")
    return findings


def _psnr(row: Row) -> float:
    """Return a row's PSNR; a row that does not hold comes before all others."""
    return (row.like.psnr if row.like is not None else 0.0) - (1e6 if row.findings else 0.0)


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
