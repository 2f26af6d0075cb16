"""`seqpar sample --verify`: a few steps of the run that is asked for, compared with one rank before it is made."""

from __future__ import annotations

from typing import Any

import torch

from seqpar.fidelity.verify import EVALUATIONS, verify
from seqpar.pipelines._family import Job
from seqpar.pipelines.adapted import Adapted


def of_job(pipeline: Any, job: Job) -> None:
    """Verify a loop of our own, in the run's own size; raises VerificationError if a step is wrong."""
    settings = dict(job.settings)
    verify(pipeline, **{**settings, "steps": min(EVALUATIONS, settings["steps"])})


def of_pipe(pipe: Any, job: Adapted) -> None:
    """Verify diffusers' own loop; see `of_job`. The text encoders must still be there."""
    arguments = {name: value for name, value in job.arguments.items() if name != "output_type"}
    arguments["num_inference_steps"] = min(EVALUATIONS, job.steps)
    verify(pipe, **arguments, generator=torch.Generator().manual_seed(job.seed))
