"""`verify`: runs several ranks beside one rank on the same inputs, and names the first block and step that is wrong.

It takes the first evaluations of the model in the run's own size, layout and data type. The accepted error is 1.25
times that of one rank in the same data type, both compared with one rank in a wider one (fp32 for 16 bits, fp64 for
fp32): of each head of attention, of each block, of each prediction. Guidance and scheduler start from the ranks' own
prediction and must be right to rounding; in exact mode, strategies that only move data must have one rank's bits.
Text encoders and VAEs are not verified.
When it wins: for the first run on a new machine, driver or version of torch. An evaluation costs about as much as ten
to twenty of one rank alone, because the reference computes without TF32, and one rank must have the memory for the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.arguments import MOST_STEPS, check_whole
from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity import own_loop
from seqpar.fidelity.compare import Place
from seqpar.fidelity.verdict import Measured, Verdict, VerificationError, judged
from seqpar.fidelity.widened import other_weights
from seqpar.mesh import Mesh
from seqpar.pipelines._loaded import Loaded
from seqpar.planner.plan import Plan
from seqpar.sampling.arguments import check_request
from seqpar.sampling.request import Request

__all__ = ["EVALUATIONS", "Verdict", "VerificationError", "verify"]

EVALUATIONS = 3  # on GPUs the third one is the first that replays a graph which was captured before


def verify(target: Any, *args: Any, evaluations: int = EVALUATIONS, **kwargs: Any) -> Verdict:
    """Verify a run on this machine; return the verdict, which rank 0 prints. Every rank must call this together.

    target: a `DistributedDiT` with the arguments of `seqpar.sample` after it, a pipeline of `seqpar.pipelines` with
    those of its `latents`, or a diffusers pipeline or transformer after `parallelize` with those of its call.
    evaluations: how many evaluations of the model are compared, the first ones; a pipeline that is not told its number
    of steps makes so many. Raises VerificationError with the first place at which the ranks are wrong, and ValueError
    for arguments that do not fit or a run that one rank alone cannot hold.
    """
    if isinstance(target, DistributedDiT):
        verdict = _request(target, _asked(*args, **kwargs), evaluations)
    elif isinstance(target, Loaded):
        verdict = _pipeline(target, args, kwargs, evaluations)
    else:
        verdict = _calls(target, args, kwargs, evaluations)
    return verdict


def _agreed(mesh: Mesh, evaluations: int) -> int:
    """Return rank 0's number of evaluations; the same ValueError on every rank if one passes what is no number."""
    mesh.together(lambda: check_whole("evaluations", evaluations, 1, MOST_STEPS))
    return mesh.share(evaluations, int)


def _asked(scheduler: Any, noise: Any, prompt: Any, **settings: Any) -> Request:
    for name in ("graph", "on_step"):  # arguments of `sample` that are no part of the request
        settings.pop(name, None)
    return Request(scheduler, noise, prompt, **settings)


class _Stand:
    """Takes the place of a pipeline's sampler: verifies the request that the pipeline makes, and returns its noise."""

    def __init__(self, dit: DistributedDiT, evaluations: int) -> None:
        self._dit, self._evaluations = dit, evaluations
        self._noise: dict[str, Tensor] = {}
        self.verdict: Verdict | None = None

    def __call__(self, *args: Any, **settings: Any) -> Tensor:
        request = _asked(*args, **settings)
        self._noise = request.latents(self._dit.model.STATE)
        self.verdict = _request(self._dit, request, self._evaluations)
        return next(iter(self._noise.values()))

    def streams(self) -> dict[str, Tensor]:
        return self._noise

    def release(self) -> None:
        """Do nothing: a verification keeps nothing."""


def _pipeline(pipeline: Loaded, args: tuple[Any, ...], kwargs: Mapping[str, Any], evaluations: int) -> Verdict:
    """Verify the request that a pipeline makes of the arguments of its `latents`."""
    evaluations = _agreed(pipeline.dit.mesh, evaluations)
    probe, stand = replace(pipeline), _Stand(pipeline.dit, evaluations)
    vars(probe)["sampler"] = stand
    made: Any = probe
    made.latents(*args, **{"steps": evaluations, **kwargs})
    assert stand.verdict is not None
    return stand.verdict


def _request(dit: DistributedDiT, request: Request, evaluations: int) -> Verdict:
    """Verify a request of our own loop."""
    evaluations = _agreed(dit.mesh, evaluations)
    check_request(dit, request)
    with Costing(dit.mesh) as costing:
        made = own_loop.measure(dit, request, evaluations)
        models = [dit.model, *(each.model for each in request.segments.values())]
        return costing.verdict(made, models, _what(dit.mesh, dit.plan, dit.dtype))


def _calls(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], evaluations: int) -> Verdict:
    """Verify the transformer's calls of a diffusers pipeline, or those of a transformer."""
    from seqpar.fidelity import calls  # imports the adapter, which a loop of our own does not need

    mesh = calls.mesh_of(target)
    evaluations = _agreed(mesh, evaluations)
    with Costing(mesh) as costing:
        made, ending = calls.recorded(target, args, kwargs, evaluations)
        if not made:
            raise ValueError(f"got a {type(target).__name__} that did not call its transformer, expected a call")
        measured = calls.measure(made)
        notes = calls.compare_pipelines(measured, made, ending)
        models = list({id(each.module): each.module for each in made}.values())
        return costing.verdict(measured, models, _what(mesh, calls.plan_of(made[0]), measured.dtype), notes)


def _what(mesh: Mesh, plan: Plan, dtype: torch.dtype) -> str:
    sharded = [plan.strategy.name] if mesh.sequence.size > 1 else []
    names = [str(mesh), *sharded, plan.transport.name, plan.local.name]
    return f"{mesh.world.size} ranks ({', '.join(names)}), {str(dtype).removeprefix('torch.')}"


class Costing:
    """Measures what a verification costs, and ends it: rank 0 prints the verdict, all raise if something is wrong."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._started = mesh, time.perf_counter()

    def __enter__(self) -> Costing:
        if self._mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._mesh.device)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the reference's memory back, which the run's CUDA graphs and peer memory could not take otherwise."""
        if self._mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def verdict(self, made: Measured, models: list[Any], what: str, notes: tuple[str, ...] = ()) -> Verdict:
        """Return the verdict over all ranks, or raise VerificationError with its finding."""
        mesh, memory = self._mesh, None
        for model in models:
            if (reason := other_weights(mesh, model)) is not None:
                made.find(Place(0, -1, "the weights"), reason)
        if mesh.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(mesh.device) / 2**30
        verdict = judged(mesh, made, what, (time.perf_counter() - self._started, memory), notes)
        if mesh.is_main:
            print(verdict, flush=True)
        if verdict.finding is not None:
            raise VerificationError(
                f"the ranks do not compute what one rank computes: {verdict.finding} ({verdict.what})"
            )
        return verdict
