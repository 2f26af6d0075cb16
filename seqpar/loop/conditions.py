"""The inputs of a run's evaluations besides the state: timesteps, prompts and streams that change at every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Course
from seqpar.loop.streams import completed, distinct, stacked
from seqpar.mesh.shard import Shard


@dataclass(frozen=True)
class Conditions:
    """The inputs of a segment's evaluations besides the state.

    timesteps_S: the timestep of all evaluations of the run, on the device. prompt: the distinct prompts, P rows. row_B:
    the index of the prompt of each row of this rank's batch. drawn: this rank's rows of streams whose tokens change at
    every evaluation, (S, B, L, C).
    """

    timesteps_S: Tensor
    prompt: Mapping[str, Tensor]
    row_B: Tensor
    drawn: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        """Return how many distinct prompts there are; 1 for a model without a prompt."""
        return max(1, len(next(iter(self.prompt.values())))) if self.prompt else 1

    @staticmethod
    def of(dit: DistributedDiT, course: Course, images: int) -> Conditions:
        """Return the conditions of this rank's rows of both branches. images: those of the run."""
        request, mesh, device, model = course.request, dit.mesh, dit.device, dit.model
        mine, branches = Shard(images, mesh.data.size).slice(mesh.data.rank), 2 if request.guidance.on else 1
        prompt = {name: x.to(device) for name, x in completed(model, request.prompt).items()}
        rows = torch.zeros(branches * images, dtype=torch.int64, device=device)
        if prompt:
            if request.guidance.on:
                other = model.null_prompt(prompt) if request.negative is None else completed(model, request.negative)
                prompt = stacked(prompt, other)
            prompt, rows = distinct(prompt)
        rows = rows.view(branches, images)[:, mine]
        both = [request.drawn, {**request.drawn, **request.negative_drawn}][:branches]
        if mesh.cfg.size > 1:  # each rank of this axis computes one branch
            rows, both = rows[mesh.cfg.rank : mesh.cfg.rank + 1], both[mesh.cfg.rank : mesh.cfg.rank + 1]
        drawn = {name: torch.cat([each[name][:, mine].to(device) for each in both], dim=1) for name in request.drawn}
        return Conditions(course.timesteps_S.to(device), prompt, rows.flatten(), drawn)
