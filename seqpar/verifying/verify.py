"""`verify`: compares a run of several ranks with one rank on the same inputs; reports the first wrong block and step.

It compares the first evaluations of the model in the run's size, layout and data type. Heads of attention, blocks and
predictions may have 1.25 times the error of one rank in the same data type, both relative to one rank in a wider one
(fp32 for 16 bits, fp64 for fp32). Guidance and scheduler start from the ranks' prediction and must match to rounding.
In exact mode, strategies that only move data must have one rank's bits. Tensors that ranks copy or compute identically
(positions, masks, modulation, weights) must have the same bits in every data type. Anything that is not compared is a
failure. Text encoders and VAEs are not verified.
Cost: an evaluation takes as long as 10 to 20 of one rank alone, because the reference computes without TF32, and one
rank needs the memory for the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Request, check_request, check_settings
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.own_loop import Loaded
from seqpar.planner.plan import Plan
from seqpar.types.arguments import MOST_STEPS, check_whole
from seqpar.verifying import own_loop
from seqpar.verifying.compare import OTHER_WEIGHTS, RESULT, Comparison, Finding, Place
from seqpar.verifying.copies import unequal, weights_of

__all__ = ["EVALUATIONS", "Verdict", "VerificationError", "verify"]

EVALUATIONS = 3  # on GPUs the third is the first that replays a graph captured before


class VerificationError(FloatingPointError):
    """Raised if the ranks do not compute what one rank computes; the message names the first place."""


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`; `finding` is None if all ranks compute what one rank computes.

    what: ranks, layout and data type. steps, blocks: number of evaluations, and of block outputs in each. error: the
    largest error of an evaluation's result, relative to the reference. ratio: the largest error in units of one rank's,
    at `where`. notes: what was not compared, and why. bits: digests of rank 0's full tensors, with their places.
    """

    what: str
    steps: int
    blocks: int
    error: float
    ratio: float
    where: str
    finding: str | None
    seconds: float
    notes: tuple[str, ...] = ()
    bits: tuple[tuple[Place, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [
            f"{self.what}: {self.steps} evaluation{'s' * (self.steps != 1)} of {self.blocks} block outputs "
            f"({self.seconds:.1f} s)",
            f"largest error {self.ratio:.2f} times that of one rank in the same data type, at {self.where}",
            *self.notes,
            "every step holds" if self.finding is None else f"FAILS at {self.finding}",
        ]
        return "\n".join(f"verify    {line}" for line in lines)


def verify(target: Any, *args: Any, evaluations: int = EVALUATIONS, **kwargs: Any) -> Verdict:
    """Verify a run on this machine; rank 0 prints the verdict. Collective: call on all ranks.

    target: a `DistributedDiT` with the arguments of `seqpar.sample` after it, a pipeline of `seqpar.pipelines` with
    those of its `latents`, or a diffusers pipeline or transformer after `parallelize` with those of its call.
    evaluations: how many of the first evaluations of the model are compared; also the default number of steps of a
    pipeline. A step cache (`cache=`) is off meanwhile. Raises VerificationError with the first place at which the ranks
    are wrong, and ValueError for arguments that do not fit or a run that does not fit into one rank's memory.
    """
    if isinstance(target, DistributedDiT):
        mesh = target.mesh
        settings = {name: x for name, x in kwargs.items() if name not in ("graph", "on_step")}  # arguments of `sample`
        check_settings(target, settings)
        verdict = verdict_of(target, Request(*args, **settings), _agreed(mesh, evaluations))
    elif isinstance(target, Loaded):
        mesh = target.dit.mesh
        evaluations = _agreed(mesh, evaluations)
        kwargs.pop("on_step", None)
        verdict = verdict_of(target.dit, target.request(*args, **{"steps": evaluations, **kwargs}), evaluations)
    else:
        mesh, verdict = _of_calls(target, args, kwargs, evaluations)
    if mesh.is_main:
        print(verdict, flush=True)
    if verdict.finding is not None:
        raise VerificationError(f"the ranks do not compute what one rank computes: {verdict.finding} ({verdict.what})")
    return verdict


def verdict_of(dit: DistributedDiT, request: Request, evaluations: int) -> Verdict:
    """The verdict on the first evaluations of a request, the same on all ranks. Collective: call on all ranks."""
    started = time.perf_counter()
    if dit.matrices8 is not None:
        raise ValueError("the model computes in 8 bits, but verify compares with the dtype of its weights")
    check_request(dit, request)
    measured = own_loop.measure(dit, request, evaluations)
    return _judged(dit.mesh, measured, [dit.model], dit.plan, started)


def _of_calls(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], evaluations: int) -> tuple[Mesh, Verdict]:
    from seqpar.verifying import calls

    mesh, started = calls.mesh_of(target), time.perf_counter()
    recorded, ending = calls.recorded(target, args, kwargs, _agreed(mesh, evaluations))
    measured = calls.measure(recorded)
    notes = calls.compare_pipelines(measured, recorded, ending)
    models = list({id(call.module): call.module for call in recorded}.values())
    plan = recorded[0].call.state.plan
    return mesh, replace(_judged(mesh, measured, models, plan, started), notes=notes)


def _agreed(mesh: Mesh, evaluations: int) -> int:
    """Rank 0's number of evaluations; the same ValueError on every rank if one passes an invalid number."""
    mesh.on_all_ranks(lambda: check_whole("evaluations", evaluations, 1, MOST_STEPS))
    return mesh.share(evaluations, int)


def _judged(mesh: Mesh, measured: Comparison, models: Sequence[nn.Module], plan: Plan, started: float) -> Verdict:
    """The verdict over all ranks, the same on each but for its seconds."""
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # graphs and peer memory cannot take what the reference leaves there
    for model in models:
        if (found := unequal(mesh, weights_of(model))) is not None:
            measured.find(Place(0, index=-1, name="the weights"), OTHER_WEIGHTS.format(*found), by=found[0])
    worst = max(measured.errors, key=lambda place: _size(measured.ratio(place)))
    results = [ranks.rms for place, (ranks, _) in measured.errors.items() if place.part == RESULT]
    local = measured.ratio(worst), worst, max(results, key=_size), measured.blocks
    ratios, places, errors, blocks = zip(*mesh.collect(local, tuple[float, Place, float, int]), strict=True)
    ratio, where = max(zip(ratios, places, strict=True), key=lambda pair: _size(pair[0]))
    finding = _finding(mesh, measured)
    if finding is None and not max(blocks):  # a rank without tokens of a stream has fewer than others
        finding = "the blocks: none was compared, because no hook of a block was called"
    strategy = [plan.strategy.name] if mesh.sequence.size > 1 else []
    layout = ", ".join([str(mesh), *strategy, plan.transport.name, plan.local.name])
    return Verdict(
        f"{mesh.world.size} ranks ({layout}), {str(measured.dtype).removeprefix('torch.')}",
        steps=len({(place.step, place.call) for place in measured.errors}),
        blocks=max(blocks),
        error=max(errors, key=_size),
        ratio=ratio,
        where=str(where),
        finding=finding,
        seconds=time.perf_counter() - started,
        bits=tuple(measured.bits.items()),
    )


def _finding(mesh: Mesh, measured: Comparison) -> str | None:
    """The first fault on any rank, with the rank that computed it and the ranks that saw it; the worst of several."""
    ranks = enumerate(mesh.collect(measured.first(), Finding | None))
    findings = {rank: finding for rank, finding in ranks if finding is not None}
    if not findings:
        return None
    place = min(finding.place for finding in findings.values())
    there = {rank: finding for rank, finding in findings.items() if finding.place == place}
    worst, finding = max(there.items(), key=lambda pair: _size(pair[1].ratio))
    by = worst if finding.by is None else finding.by
    computed = f"computed by rank {by}, " if finding.ratio else ""
    seen = f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))}"
    return f"{place} on rank {by}: {finding.reason}; {computed}seen on {seen}"


def _size(number: float) -> tuple[bool, float]:
    """A key that sorts NaN after all other numbers."""
    return math.isnan(number), number
