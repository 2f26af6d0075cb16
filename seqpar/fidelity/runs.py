"""Records what a run computes step by step: the model's inputs, and its predictions on a reference run's inputs.

Predictions on the same inputs show the error of one evaluation alone, which a wrong or imprecise operation raises at
once. A run of its own shows what becomes of these errors in the picture; it also covers the CUDA graph and the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity.compare import Error, Place, digest, error
from seqpar.sampling.loop import check_finite
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin

Errors = dict[Place, Error]


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
