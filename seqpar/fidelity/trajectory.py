"""Records what a run computes step by step: the model's inputs, and its predictions on a reference run's inputs.

Predictions on the same inputs show the error of one evaluation alone, which a wrong or imprecise operation raises at
once. A run of its own shows what becomes of these errors in the picture; it also covers the CUDA graph and the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity.compare import Error, Place, digest, error
from seqpar.inputs import from_rank_0
from seqpar.mesh import Mesh
from seqpar.sampling.loop import check_finite
from seqpar.sampling.request import Request
from seqpar.sampling.run import Run, begin

Streams = Mapping[str, Tensor]
"""Whole tensors of the streams of the state, by name."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A run of S evaluations of the model.

    inputs: what the model was given at each evaluation, then the latents, S + 1. predictions: guided predictions, S.
    """

    inputs: tuple[Streams, ...]
    predictions: tuple[Streams, ...]

    @property
    def bits(self) -> tuple[str, ...]:
        """Return the digest of each evaluation's prediction, then that of the latents."""
        return *map(digest, self.predictions), digest(self.inputs[-1])


@torch.inference_mode(False)
@torch.no_grad()
def record(dit: DistributedDiT, request: Request, on: Trajectory | None = None, graph: bool = True) -> Trajectory:
    """Return the run of a request, complete on every rank of the model's mesh.

    on: the run on whose inputs the model predicts; None means its own. graph: replay steps as CUDA graphs if possible;
    predictions never are. The request's generator is left as it is, so that every run of a request adds the same noise.
    Raises FloatingPointError if the latents stop being finite. Every rank must call this at the same time.
    """
    run = begin(dit, replace(request, generator=_copied(request.generator)))
    try:
        inputs, predictions = [run.inputs()], list[Streams]()
        for index in range(len(run.timesteps)):
            predictions.append(run.predict_on(index, (inputs if on is None else on.inputs)[index]))
            _step(run, graph)
            inputs.append(run.inputs())
        dit.check_delivered()
        check_finite(run.first_bad(), run.timesteps)
        return Trajectory(tuple(inputs), tuple(predictions))
    finally:
        run.release()


def _copied(generator: torch.Generator | None) -> torch.Generator | None:
    return None if generator is None else torch.Generator(generator.device).set_state(generator.get_state())


def _step(run: Run, graph: bool) -> None:
    if graph and run.why_no_graph is None:
        run.capture()
    run.step()


def shared(mesh: Mesh, made: Trajectory) -> Trajectory:
    """Return rank 0's trajectory on every rank."""
    kinds = {"input": made.inputs, "prediction": made.predictions}
    named = {
        f"{kind} {index} {name}": x
        for kind, every in kinds.items()
        for index, streams in enumerate(every)
        for name, x in streams.items()
    }
    given = from_rank_0(mesh, named)
    parts = {
        kind: tuple({name: given[f"{kind} {index} {name}"] for name in streams} for index, streams in enumerate(every))
        for kind, every in kinds.items()
    }
    return Trajectory(parts["input"], parts["prediction"])


def on_same_inputs(made: Trajectory, reference: Trajectory) -> dict[Place, Error]:
    """Return the error of each prediction; `made` must have been recorded on the reference's inputs."""
    pairs = zip(made.predictions, reference.predictions, strict=True)
    return {Place(step): error(ours, truth) for step, (ours, truth) in enumerate(pairs)}


def on_own_inputs(made: Trajectory, reference: Trajectory) -> dict[Place, Error]:
    """Return the error of the state after each step of the run."""
    pairs = zip(made.inputs[1:], reference.inputs[1:], strict=True)
    return {Place(step, 1, "latents"): error(ours, truth) for step, (ours, truth) in enumerate(pairs)}
