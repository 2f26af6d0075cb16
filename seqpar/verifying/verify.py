"""`verify`: runs several ranks beside one rank on the same inputs, and names the first block and step that is wrong.

It takes the first evaluations of the model in the run's own size, layout and data type. The accepted error is 1.25
times that of one rank in the same data type, both compared with one rank in a wider one (fp32 for 16 bits, fp64 for
fp32): of each head of attention, of each block, of each prediction. Guidance and scheduler start from the ranks' own
prediction and must be right to rounding; in exact mode, strategies that only move data must have one rank's bits.
What ranks copy or compute alike (positions, masks, modulation, weights) must have the same bits in every data type.
It fails closed: what is not compared does not hold. Text encoders and VAEs are not verified.
When it wins: for the first run on a new machine, driver or version of torch. An evaluation costs about as much as ten
to twenty of one rank alone, because the reference computes without TF32, and one rank must have the memory for the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Request, check_request, check_settings
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.own_loop import Loaded
from seqpar.planner.plan import Plan
from seqpar.types.arguments import MOST_STEPS, check_whole
from seqpar.verifying import own_loop
from seqpar.verifying.compare import OTHER_WEIGHTS, Comparison, Finding, Place
from seqpar.verifying.copies import unequal, weights_of
from seqpar.verifying.look import evaluation_of, is_result

__all__ = ["EVALUATIONS", "Verdict", "VerificationError", "verify"]

NOT_ASKED = ("graph", "on_step")  # arguments of `sample` that are no part of the request
EVALUATIONS = 3  # on GPUs the third one is the first that replays a graph which was captured before


class VerificationError(FloatingPointError):
    """Raised if several ranks do not compute what one rank computes; the message names the first place."""


@dataclass(frozen=True)
class Verdict:
    """What was verified, and what it showed; `finding` is None if all ranks compute what one rank computes.

    what: ranks, layout and data type. steps, blocks: how many evaluations of the model, and outputs of blocks in each.
    error: the largest error of an evaluation's result, relative to the reference. ratio: the largest error of all in
    units of one rank's, at `where`. seconds: the time that the verification took. notes: what was not compared, and
    why. bits: digests of what rank 0 has whole, with their places.
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
    """Verify a run on this machine; return the verdict, which rank 0 prints. Every rank must call this together.

    target: a `DistributedDiT` with the arguments of `seqpar.sample` after it, a pipeline of `seqpar.pipelines` with
    those of its `latents`, or a diffusers pipeline or transformer after `parallelize` with those of its call.
    evaluations: how many evaluations of the model are compared, the first ones; a pipeline that is not told its number
    of steps makes so many. Raises VerificationError with the first place at which the ranks are wrong, and ValueError
    for arguments that do not fit or a run that one rank alone cannot hold.
    """
    if isinstance(target, DistributedDiT):
        mesh = target.mesh
        check_settings(target, {name: x for name, x in kwargs.items() if name not in NOT_ASKED})
        verdict = verdict_of(target, _asked(*args, **kwargs), _agreed(mesh, evaluations))
    elif isinstance(target, Loaded):
        mesh = target.dit.mesh
        evaluations = _agreed(mesh, evaluations)
        probe, stand_in = replace(target), _StandIn(target.dit.model.STATE)
        vars(probe)["sampler"] = stand_in
        pipeline: Any = probe
        pipeline.latents(*args, **{"steps": evaluations, **kwargs})
        verdict = verdict_of(target.dit, stand_in.request, evaluations)
    else:
        mesh, verdict = _of_calls(target, args, kwargs, evaluations)
    if mesh.is_main:
        print(verdict, flush=True)
    if verdict.finding is not None:
        raise VerificationError(f"the ranks do not compute what one rank computes: {verdict.finding} ({verdict.what})")
    return verdict


def verdict_of(dit: DistributedDiT, request: Request, evaluations: int) -> Verdict:
    """Return the verdict on the first evaluations of a request, the same on all ranks, which call this together."""
    started = time.perf_counter()
    check_request(dit, request)
    measured = own_loop.measure(dit, request, evaluations)
    return _judged(dit.mesh, measured, [dit.model], dit.plan, started)


def _of_calls(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], evaluations: int) -> tuple[Mesh, Verdict]:
    """Return the verdict on the transformer's calls of a diffusers pipeline, or on those of a transformer."""
    from seqpar.verifying import calls

    mesh, started = calls.mesh_of(target), time.perf_counter()
    recorded, ending = calls.recorded(target, args, kwargs, _agreed(mesh, evaluations))
    measured = calls.measure(recorded)
    notes = calls.compare_pipelines(measured, recorded, ending)
    models = list({id(each.module): each.module for each in recorded}.values())
    plan = recorded[0].call.state.plan
    return mesh, replace(_judged(mesh, measured, models, plan, started), notes=notes)


def _agreed(mesh: Mesh, evaluations: int) -> int:
    """Return rank 0's number of evaluations; the same ValueError on every rank if one passes what is no number."""
    mesh.on_all_ranks(lambda: check_whole("evaluations", evaluations, 1, MOST_STEPS))
    return mesh.share(evaluations, int)


def _asked(scheduler: Any, noise: Any, prompt: Any, **settings: Any) -> Request:
    for name in NOT_ASKED:
        settings.pop(name, None)
    return Request(scheduler, noise, prompt, **settings)


class _StandIn:
    """Takes the place of a pipeline's sampler: keeps the request that the pipeline makes, and returns its noise."""

    request: Request

    def __init__(self, streams: Sequence[str]) -> None:
        self._names = streams

    def __call__(self, *args: Any, **settings: Any) -> Tensor:
        self.request = _asked(*args, **settings)
        return self.streams()[self._names[0]]

    def streams(self) -> dict[str, Tensor]:
        return self.request.latents(self._names)


def _judged(mesh: Mesh, measured: Comparison, models: Sequence[nn.Module], plan: Plan, started: float) -> Verdict:
    """Return the verdict over all ranks, the same on each but for its seconds."""
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # graphs and peer memory could not take what the reference leaves there
    for model in models:
        if (found := unequal(mesh, weights_of(model))) is not None:
            measured.find(Place(0, -1, "the weights"), OTHER_WEIGHTS.format(*found), by=found[0])
    worst = max(measured.errors, key=lambda place: _size(measured.ratio(place)))
    results = [mine.rms for place, (mine, _) in measured.errors.items() if is_result(place)]
    mine = measured.ratio(worst), worst, max(results, key=_size), measured.blocks
    ratios, places, errors, blocks = zip(*mesh.collect(mine, tuple[float, Place, float, int]), strict=True)
    ratio, where = max(zip(ratios, places, strict=True), key=lambda each: _size(each[0]))
    finding = _finding(mesh, measured)
    if finding is None and not max(blocks):  # a rank without tokens of a stream has fewer than others
        finding = "the blocks: none was compared, because no hook of a block was called"
    strategy = [plan.strategy.name] if mesh.sequence.size > 1 else []
    layout = ", ".join([str(mesh), *strategy, plan.transport.name, plan.local.name])
    return Verdict(
        f"{mesh.world.size} ranks ({layout}), {str(measured.dtype).removeprefix('torch.')}",
        steps=len({evaluation_of(place) for place in measured.errors}),
        blocks=max(blocks),
        error=max(errors, key=_size),
        ratio=ratio,
        where=str(where),
        finding=finding,
        seconds=time.perf_counter() - started,
        bits=tuple(measured.bits.items()),
    )


def _finding(mesh: Mesh, measured: Comparison) -> str | None:
    """Return in words what is wrong first on any rank: which rank computed it, and which ranks saw it.

    Of what several ranks saw there, the most wrong is reported.
    """
    every = enumerate(mesh.collect(measured.first(), Finding | None))
    findings = {rank: each for rank, each in every if each is not None}
    if not findings:
        return None
    place = min(each.place for each in findings.values())
    there = {rank: each for rank, each in findings.items() if each.place == place}
    worst, finding = max(there.items(), key=lambda pair: _size(pair[1].ratio))
    by = worst if finding.by is None else finding.by
    computed = f"computed by rank {by}, " if finding.ratio else ""
    return f"{place} on rank {by}: {finding.reason}; {computed}seen on {_ranks(there)}"


def _ranks(ranks: Iterable[int]) -> str:
    names = [*map(str, ranks)]
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"


def _size(number: float) -> tuple[bool, float]:
    """Return a key that sorts numbers by their size, and NaN after all others."""
    return math.isnan(number), number


def other_weights(mesh: Mesh, model: nn.Module) -> str | None:
    """Return in words which weight of which rank has other bits than rank 0's, or None; all ranks call it together.

    Raises ValueError on all ranks if names, shapes or data types differ.
    """
    found = unequal(mesh, weights_of(model))
    return None if found is None else OTHER_WEIGHTS.format(*found)
