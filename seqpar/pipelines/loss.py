"""What 8 bits and a step cache need of a pipeline of diffusers: calibrations, and the search of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from seqpar.loading.folder import PipelineParts
from seqpar.loading.names import RandomModel
from seqpar.loading.parts import transformers_of
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.calls import with_parts_of
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.transformer.budget import Budget, Lossy
from seqpar.transformer.calibration import PROMPTS, Calibration, FixedRun, fixed_run
from seqpar.transformer.step_cache import StepCache, step_cache


def check_searched(mesh: Mesh, request: GenerationRequest) -> None:
    """Raise ValueError on all ranks if no model has a search for the request's budget. Collective."""
    least, cache = request.min_psnr, step_cache(request.cache)
    if least is not None:
        Budget(least, request.steps, "", request.model, request.precision, cache).check_searched(mesh)


def fixed_run_of(
    pipe: Any, kind: Any, parts: PipelineParts, dtype: torch.dtype, device: torch.device
) -> FixedRun | None:
    """Return the run of the calibration, None if there is none; of random weights with random numbers as texts.

    It is that of the folder's class, whatever class the images of the request need. kind: the pipeline's class.
    """
    pipe = pipe if kind is parts.kind else with_parts_of(pipe, parts.kind)
    if not isinstance(parts.source, RandomModel):
        return fixed_run(pipe)[0]
    texts = parts.source.encoded(len(PROMPTS), 0)
    return fixed_run(pipe, {name: x.to(device, dtype) for name, x in texts.items()})[0]


def settled_loss(
    mesh: Mesh, pipe: Any, request: GenerationRequest, attention: bool, run: FixedRun | None, scheduler: Any
) -> tuple[Mapping[str, Calibration], StepCache | None]:
    """Return calibrations for 8 bits, and the step cache, both as the request's budget says. Collective.

    attention: whether it is in 8 bits. run: of the calibration. scheduler: of the request.
    """
    cache, budget = step_cache(request.cache), None
    if request.min_psnr is not None:
        whose: Any = {"precision": request.precision, "cache": cache, "attention": attention}
        same: Any = {"model": request.model, "scheduler": scheduler}
        budget = Budget.of(pipe, request.min_psnr, request.steps, **same, **whose)
    gemms = request.precision is not None
    return Lossy(gemms, attention, cache, run, budget).settled(mesh, pipe, transformers_of(pipe))
