"""`verify`: runs several ranks beside one rank on the same inputs, and names the first block and step that is wrong.

It takes the first evaluations of the model in the run's own size, layout and data type. The accepted error is 1.25
times that of one rank in the same data type, both compared with one rank in a wider one (fp32 for 16 bits, fp64 for
fp32): of each head of attention, of each block, of each prediction. Guidance and scheduler start from the ranks' own
prediction and must be right to rounding; in exact mode, strategies that only move data must have one rank's bits.
It fails closed: what is not compared does not hold. Text encoders and VAEs are not verified.
When it wins: for the first run on a new machine, driver or version of torch. An evaluation costs about as much as ten
to twenty of one rank alone, because the reference computes without TF32, and one rank must have the memory for the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity import own_loop
from seqpar.fidelity.compare import BITS, Comparison, Finding, Place
from seqpar.pipelines._loaded import Loaded
from seqpar.planner.plan import Plan
from seqpar.ranks.inputs import broadcast, shapes
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.arguments import check_request
from seqpar.sampling.request import Request
from seqpar.types.arguments import MOST_STEPS, check_whole

__all__ = ["EVALUATIONS", "Verdict", "VerificationError", "verify"]

EVALUATIONS = 3  # on GPUs the third one is the first that replays a graph which was captured before


class VerificationError(FloatingPointError):
    """Raised if several ranks do not compute what one rank computes; the message names the first place."""


@dataclass(frozen=True)
class Verdict:
    """What was verified, and what it showed; `finding` is None if all ranks compute what one rank computes.

    what: ranks, layout and data type. steps, blocks: how many evaluations of the model, and outputs of blocks in each.
    ratio: the largest error in units of one rank's, at `where`. seconds: the time that the verification took. gib: the
    GPU memory at its peak, on the rank that used most; None on CPUs. notes: what was not compared, and why.
    """

    what: str
    steps: int
    blocks: int
    ratio: float
    where: str
    finding: str | None
    seconds: float
    gib: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = "" if self.gib is None else f", {self.gib:.1f} GiB at most"
        compared = f"{self.steps} evaluations of {self.blocks} block outputs"
        lines = [
            f"verify    {self.what}: {compared} ({self.seconds:.1f} s{memory})",
            f"verify    largest error {self.ratio:.2f} times that of one rank in the same data type, at {self.where}",
            *(f"verify    {note}" for note in self.notes),
            f"verify    {'every step holds' if self.finding is None else f'FAILS at {self.finding}'}",
        ]
        return "\n".join(lines)


def verify(target: Any, *args: Any, evaluations: int = EVALUATIONS, **kwargs: Any) -> Verdict:
    """Verify a run on this machine; return the verdict, which rank 0 prints. Every rank must call this together.

    target: a `DistributedDiT` with the arguments of `seqpar.sample` after it, a pipeline of `seqpar.pipelines` with
    those of its `latents`, or a diffusers pipeline or transformer after `parallelize` with those of its call.
    evaluations: how many evaluations of the model are compared, the first ones; a pipeline that is not told its number
    of steps makes so many. Raises VerificationError with the first place at which the ranks are wrong, and ValueError
    for arguments that do not fit or a run that one rank alone cannot hold.
    """
    if isinstance(target, DistributedDiT):
        return _request(target, _asked(*args, **kwargs), evaluations)
    if not isinstance(target, Loaded):
        return _calls(target, args, kwargs, evaluations)
    evaluations = _agreed(target.dit.mesh, evaluations)
    probe, stand_in = replace(target), _StandIn(target.dit, evaluations)
    vars(probe)["sampler"] = stand_in
    pipeline: Any = probe
    pipeline.latents(*args, **{"steps": evaluations, **kwargs})
    return stand_in.verdicts[0]


def _agreed(mesh: Mesh, evaluations: int) -> int:
    """Return rank 0's number of evaluations; the same ValueError on every rank if one passes what is no number."""
    mesh.together(lambda: check_whole("evaluations", evaluations, 1, MOST_STEPS))
    return mesh.share(evaluations, int)


def _asked(scheduler: Any, noise: Any, prompt: Any, **settings: Any) -> Request:
    for name in ("graph", "on_step"):  # arguments of `sample` that are no part of the request
        settings.pop(name, None)
    return Request(scheduler, noise, prompt, **settings)


class _StandIn:
    """Takes the place of a pipeline's sampler: verifies the request that the pipeline makes, and returns its noise."""

    def __init__(self, dit: DistributedDiT, evaluations: int) -> None:
        self._dit, self._evaluations = dit, evaluations
        self._noise: dict[str, Tensor] = {}
        self.verdicts: list[Verdict] = []

    def __call__(self, *args: Any, **settings: Any) -> Tensor:
        request = _asked(*args, **settings)
        self._noise = request.latents(self._dit.model.STATE)
        self.verdicts.append(_request(self._dit, request, self._evaluations))
        return next(iter(self._noise.values()))

    def streams(self) -> dict[str, Tensor]:
        return self._noise

    def release(self) -> None:
        """Do nothing: a verification keeps nothing."""


def _request(dit: DistributedDiT, request: Request, evaluations: int) -> Verdict:
    """Verify a request of our own loop."""
    evaluations, started = _agreed(dit.mesh, evaluations), time.perf_counter()
    check_request(dit, request)
    with _memory(dit.mesh):
        made = own_loop.measure(dit, request, evaluations)
        models = [dit.model, *(each.model for each in request.segments.values())]
        return _ended(dit.mesh, made, models, dit.plan, started)


def _calls(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], evaluations: int) -> Verdict:
    """Verify the transformer's calls of a diffusers pipeline, or those of a transformer."""
    from seqpar.fidelity import calls  # imports the adapter, which a loop of our own does not need

    mesh, started = calls.mesh_of(target), time.perf_counter()
    evaluations = _agreed(mesh, evaluations)
    with _memory(mesh):
        made, ending = calls.recorded(target, args, kwargs, evaluations)
        measured = calls.measure(made)
        notes = calls.compare_pipelines(measured, made, ending)
        models = list({id(each.module): each.module for each in made}.values())
        plan = made[0].call.body.inside(made[0].arguments.whole).ranks.plan
        return _ended(mesh, measured, models, plan, started, notes)


@contextmanager
def _memory(mesh: Mesh) -> Iterator[None]:
    """Count the memory at its peak, and give the reference's back, which graphs and peer memory could not take."""
    if mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(mesh.device)
    try:
        yield
    finally:
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()


def _ended(
    mesh: Mesh, made: Comparison, models: Sequence[nn.Module], plan: Plan, started: float, notes: tuple[str, ...] = ()
) -> Verdict:
    """Return the verdict over all ranks, which rank 0 prints, or raise VerificationError with its finding."""
    for model in models:
        if (reason := other_weights(mesh, model)) is not None:
            made.find(Place(0, -1, "the weights"), reason)
    sharded = [plan.strategy.name] if mesh.sequence.size > 1 else []
    layout = ", ".join([str(mesh), *sharded, plan.transport.name, plan.local.name])
    what = f"{mesh.world.size} ranks ({layout}), {str(made.dtype).removeprefix('torch.')}"
    verdict = replace(_judged(mesh, made, what), seconds=time.perf_counter() - started, notes=notes)
    if mesh.is_main:
        print(verdict, flush=True)
    if verdict.finding is not None:
        raise VerificationError(f"the ranks do not compute what one rank computes: {verdict.finding} ({what})")
    return verdict


def _judged(mesh: Mesh, made: Comparison, what: str) -> Verdict:
    """Return the verdict over all ranks, the same on each but for its seconds."""
    first, gib = made.first(), None
    if mesh.device.type == "cuda":
        gib = torch.cuda.max_memory_allocated(mesh.device) / 2**30
    size = 0.0 if first is None else made.ratio(first.place)
    kind = tuple[Finding | None, float, tuple[float, Place], list[str], float | None, int]
    every = mesh.collect((first, size, made.worst(), made.bits, gib, made.blocks), kind)
    firsts, sizes, worsts, bits, gibs, counts = zip(*every, strict=True)
    blocks = max(counts)  # a rank without tokens of a stream has fewer than others
    wrong, finding = [rank for rank, found in enumerate(firsts) if found is not None], None
    if wrong:  # of several ranks, the one that is most wrong there
        rank = min(wrong, key=lambda rank: (firsts[rank].place, not math.isnan(sizes[rank]), -sizes[rank]))
        finding = f"{firsts[rank].place} on rank {rank}: {firsts[rank].reason}"
    elif different := next((rank for rank, each in enumerate(bits) if each != bits[0]), None):
        finding = f"the end of the run: rank {different} has {BITS.format('rank 0')}"
    elif not blocks:
        finding = "the blocks: none was compared, because no hook of a block was called"
    ratio, place = max(worsts, key=lambda each: (math.isnan(each[0]), each[0]))
    steps = len({place.step for place in made.mine})
    memory = max((each for each in gibs if each is not None), default=None)
    return Verdict(what, steps, blocks, ratio, str(place), finding, 0.0, memory)


def other_weights(mesh: Mesh, model: nn.Module) -> str | None:
    """Return in words which weight of which rank has other bits than rank 0's, or None; all ranks call it together."""
    mine, different = {name: x.detach() for name, x in model.named_parameters()}, None
    every = mesh.collect(str(shapes(mine)), str)
    if (other := next((rank for rank, form in enumerate(every) if form != every[0]), None)) is not None:
        return f"rank {other} has other weights than rank 0: other names, shapes or data types"
    for name, x in mine.items():
        theirs = broadcast(mesh, {name: x})[name]
        if different is None and not torch.equal(*(y.flatten().view(torch.uint8) for y in (x, theirs))):
            different = name
    names = enumerate(mesh.collect(different, str | None))
    return next((f"rank {rank} has other weights than rank 0: {name}" for rank, name in names if name), None)
