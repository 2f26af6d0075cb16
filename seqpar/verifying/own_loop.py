"""Verifies this package's own loop: the ranks' run of a request beside that of one rank, block by block.

At each step of the ranks' run, one rank alone computes the model's output from the state that the ranks have, in the
same data type and in a wider one (attention by its formula, no TF32), and makes the step from the ranks' outputs. Then
the ranks run the steps once more, as CUDA graphs where the run has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import isnan

import torch
from torch import Tensor

from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.request import Request, rank_0s
from seqpar.loop.run import Run, begin
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.planner.costs import facts_of
from seqpar.transports.collective import gather
from seqpar.verifying.compare import BITS, WIDER, Comparison, Error, Place, TokenShare, digest, error
from seqpar.verifying.look import AFTER, Look, Streams, copied, in_place_of
from seqpar.verifying.one_rank import held

# guidance and a scheduler's step are a few operations on each number in fp32; a scale that is one percent off is more
STEP = {torch.float64: Error(1e-12, 1e-11)}
STEP_FP32 = Error(1e-6, 1e-5)
AGAIN = "the same step had before, or by a CUDA graph"
STATE = "the state after the prediction"


def measure(dit: DistributedDiT, request: Request, evaluations: int) -> Comparison:
    """Return what this rank measures of the first evaluations of a request; every rank must call this together.

    Raises ValueError if one rank cannot compute the request, or has not the memory for it.
    """
    request, measured = rank_0s(dit.mesh, request), Comparison(dit.dtype)
    loop = _Loop(dit, request, measured)
    evaluations = min(evaluations, len(loop.ranks.timesteps))
    try:
        for index in range(evaluations):
            loop.step(index)
    finally:
        loop.release()
    _once_more(dit, request, evaluations, measured)
    return measured


class _Loop:
    """Runs of one request: of the ranks, and of one rank alone."""

    def __init__(self, dit: DistributedDiT, request: Request, measured: Comparison) -> None:
        self._dit, self._request, self._measured = dit, request, measured
        self._models = [dit.model]
        self.ranks = begin(dit, _again(request))
        self._alone = held(dit.mesh, lambda: begin(*_by_one(dit, request)))

    def release(self) -> None:
        """Free what the runs keep."""
        self.ranks.release()
        self._alone.release()

    def step(self, index: int) -> None:
        """Let the ranks make the step of this number, and compare it."""
        dit, inputs, share = self._dit, copied(self.ranks.inputs()), _share(self._dit, self._request, self.ranks)
        place, wider = partial(Place, index), WIDER.get(dit.dtype, torch.float32)
        look = Look(self._measured, place, self._models, dit.mesh, dit.strategy.name, wider, _is_exact(dit))
        with look.ranks():
            mine = look.tokens(self.ranks.step, self.ranks.split.tokens)
        dit.check_delivered()
        ours, after = self._whole(mine), copied(self.ranks.inputs())

        def by_one() -> tuple[Streams, Streams]:
            both = look.tokens_by_one(share, lambda: self._alone.predict_on(index, inputs))
            self._compare_state(index, ours, after)
            return both

        look.compare(Place(0).name, ours, by_one)
        look.whole(place(AFTER, STATE), after)

    def _compare_state(self, index: int, ours: Streams, after: Streams) -> None:
        """Compare the ranks' step with one rank's from the same outputs, whose state stays that of the ranks."""
        with in_place_of(self._models, lambda *_: dict(ours)):
            self._alone.step()
        alone = self._alone.inputs()
        reason = error(after, alone).why_not(STEP.get(self._dit.dtype, STEP_FP32))
        if reason is not None:
            by = self._most_wrong(after, alone)
            self._measured.find(Place(index, AFTER, STATE), f"{reason}, from the same prediction", 1.0, by)

    def _most_wrong(self, states: Streams, alone: Streams) -> int:
        """Return the rank whose images and tokens of these states have the largest error, among those of this replica.

        Ranks of the cfg axis hold the same tokens, which each computes itself.
        """
        mesh, model, images = self._dit.mesh, self._dit.model, _images(self._dit, self._request)
        found = dict[int, tuple[bool, float]]()
        for data, part in product(range(mesh.data.size), range(mesh.sequence.size)):
            off = 0.0
            for name, x in states.items():
                shard, both = self.ranks.split.shard(name), (x, alone[name])
                both = [y[images.slice(data)] for y in both]
                mine, right = (y if y.dim() < 4 else model.patchify(y) for y in both)
                tokens = shard.slice(part)
                off += error({name: mine[:, tokens]}, {name: right[:, tokens]}).rms
            found[(data * mesh.cfg.size + mesh.cfg.rank) * mesh.sequence.size + part] = isnan(off), off
        return max(found, key=lambda rank: found[rank])

    def _whole(self, outputs: Streams) -> Streams:
        """Return the model's outputs for all tokens, and for the rows of all images with the prompt, then without."""
        mesh, split, images = self._dit.mesh, self.ranks.split, _images(self._dit, self._request)

        def whole(name: str, x: Tensor) -> Tensor:
            rows = x.unflatten(0, (-1, images.sizes[mesh.data.rank]))
            parts = ((mesh.sequence, split.shard(name).sizes, 2), (mesh.data, images.sizes, 1), (mesh.cfg, (1, 1), 0))
            for axis, sizes, dim in parts:
                rows = gather(rows, axis, sizes, dim) if axis.size > 1 else rows
            return rows.flatten(0, 1)

        return {name: whole(name, x) for name, x in outputs.items()}


def _once_more(dit: DistributedDiT, request: Request, evaluations: int, measured: Comparison) -> None:
    """Compare the bits of the states with those of a second run, by CUDA graphs where the run has them.

    It has no hooks, whose reading makes ranks wait for each other.
    """
    run = begin(dit, _again(request))
    try:
        for place in (Place(index, AFTER, STATE) for index in range(evaluations)):
            if run.why_no_graph is None:
                run.capture()
            run.step()
            if digest(run.inputs()) != measured.bits[place]:
                measured.find(place, BITS.format(AGAIN))
        dit.check_delivered()
    finally:
        run.release()


def _by_one(dit: DistributedDiT, request: Request) -> tuple[DistributedDiT, Request]:
    """Return the engine and the request of one rank alone, on the same weights."""
    return DistributedDiT(dit.model, Mesh.single(dit.device), local=dit.local.name), _again(request)


def _again(request: Request) -> Request:
    """Return the request with a generator of its own, so that every run of it adds the same noise."""
    mine = request.generator or torch.Generator().manual_seed(0)
    return replace(request, generator=torch.Generator(mine.device).set_state(mine.get_state()))


def _images(dit: DistributedDiT, request: Request) -> Shard:
    """Return which images each rank of the data axis has."""
    return Shard(len(next(iter(request.latents(dit.model.STATE).values()))), dit.mesh.data.size)


def _share(dit: DistributedDiT, request: Request, run: Run) -> TokenShare:
    """Return which rows and tokens this rank has: rows are those of all images with the prompt, then without it."""
    mesh, images, branches = dit.mesh, _images(dit, request), 2 if request.guidance.on else 1
    rows = torch.arange(branches * images.total).view(branches, -1)[:, images.slice(mesh.data.rank)]
    rows = rows if mesh.cfg.size == 1 else rows[mesh.cfg.rank : mesh.cfg.rank + 1]
    return TokenShare(
        run.split.lengths, mesh.sequence.size, mesh.sequence.rank, rows.flatten(), branches * images.total
    )


def _is_exact(dit: DistributedDiT) -> bool:
    """Return whether the ranks must have the bits of one rank."""
    return exact.is_on() and (dit.mesh.sequence.size == 1 or facts_of(dit.strategy.name).moves_only)
