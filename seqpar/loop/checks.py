"""Checks of a run before its first step: can mesh and model run the request, and can its steps be CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seqpar.loading.variances import check_variances
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Course, Request
from seqpar.loop.steppers import Decision
from seqpar.loop.streams import check_lengths, completed
from seqpar.types.guidance import check_layout


def why_not_captured(dit: DistributedDiT, decision: Decision) -> str | None:
    """Return why steps of this decision cannot be a CUDA graph, or None if they can."""
    if dit.device.type != "cuda":
        return "no GPU"
    if not decision.local:
        return f"the scheduler steps on the host ({decision.whole})"
    if dit.dtype == torch.float64:
        return "fp64 is for checking"
    return None


def check_course(dit: DistributedDiT, course: Course, whole: Mapping[str, Tensor]) -> None:
    """Raise ValueError if this mesh or model cannot run the request."""
    model, mesh, config, request = dit.model, dit.mesh, dit.config, course.request
    noise = whole[model.STATE[0]]
    if noise.dim() > 3 or model.STATE[0] == "image":  # other streams are tokens, which `stream_positions` checks
        if noise.dim() not in (4, 5) or noise.shape[1] != config.in_channels:
            raise ValueError(f"got noise of shape {tuple(noise.shape)}, expected (N, {config.in_channels}, H, W)")
        dit.check_size(*noise.shape[2:])
    if course.decision.learned:
        check_variances(config)
        if len(whole) > 1:
            raise ValueError(f"got variance_type 'learned_range' with {len(whole)} streams of the state, expected one")
    check_layout(mesh.data.size, mesh.cfg.size, len(noise), request.guidance, config.in_channels)
    prompt, negative = completed(model, request.prompt), completed(model, request.negative or request.prompt)
    check_lengths(model, prompt, negative)
    for name, x in (*prompt.items(), *negative.items(), *whole.items()):
        if len(x) != len(noise):
            raise ValueError(f"got {name} of shape {tuple(x.shape)}, expected ({len(noise)},), one an image")
    _check_drawn(request, len(course.timesteps_S), len(noise))


def _check_drawn(request: Request, evaluations: int, images: int) -> None:
    """Raise ValueError if streams that change at every evaluation have other shapes than the run."""
    for name, x in request.drawn.items():
        if x.dim() != 4 or x.shape[:2] != (evaluations, images):
            wanted = f"({evaluations}, {images}, tokens, width)"
            raise ValueError(f"got drawn {name} of shape {tuple(x.shape)}, expected {wanted}")
    for name, x in request.negative_drawn.items():
        like = request.drawn.get(name)
        if like is None or x.shape != like.shape:
            wanted = f"{tuple(like.shape)} as drawn" if like is not None else f"one of drawn: {sorted(request.drawn)}"
            raise ValueError(f"got negative_drawn {name} of shape {tuple(x.shape)}, expected {wanted}")
