"""One model's part of a run: consecutive evaluations with their constant streams, modulation table and CUDA graph.

A table of everything that depends only on timestep and prompt is computed before the steps. A step reads its rows by a
step counter on the device, so that nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from seqpar.graphs.exchanges import Keeper
from seqpar.graphs.graphs import StepGraph
from seqpar.kernels.ddim import guide
from seqpar.loop.distributed import DistributedDiT, Share, StepInputs, rows_of
from seqpar.loop.interface import Encoded, Split, completed, distinct, rows, stacked
from seqpar.loop.request import Course
from seqpar.loop.steppers import State
from seqpar.mesh.shard import Shard
from seqpar.planner.predict import TABLE_BYTES

Branches = tuple[Tensor, Tensor | None]
"""The model's outputs with the prompt and without it (None if there is one branch), (n, l, at least C*p*p) each."""


def parted(out: Tensor, state: State, name: str, course: Course, keeper: Keeper, user: object) -> Branches:
    """Return both branches of a stream's output on this rank, from the other rank of the cfg axis where there is one.

    name: the stream's. user: what needs the exchange as long as it exists.
    """
    if not course.request.guidance.on:
        return out, None
    cfg = keeper.mesh.cfg
    if cfg.size == 1:
        cond, uncond = out.chunk(2)
        return cond, uncond
    # rank 0 of the cfg axis computes the conditional branch, rank 1 the unconditional one
    used = out[..., : state.tokens.shape[-1] * (2 if course.decision.learned else 1)].to(state.tokens.dtype)
    cond, uncond = keeper.gathered((f"branches of {name}", state.shard), cfg, used[None], user=user)
    return cond, uncond


def rescaled(
    branches: tuple[Tensor, Tensor],
    state: State,
    name: str,
    scale: Tensor,
    course: Course,
    keeper: Keeper,
    user: object,
) -> Branches:
    """Return the guided prediction of both branches, rescaled, as the only branch.

    Rescaling brings a share of it to the standard deviation of the conditional prediction over the whole latent.
    scale: guidance's at this step, a device scalar. name, user: see `parted`.
    """
    (cond, uncond), share = branches, course.request.guidance.rescale
    guided = guide(state.tokens, cond, uncond, scale, state.guided_width)
    both = torch.stack((cond[..., : guided.shape[-1]].to(guided.dtype), guided)).double()
    sums = torch.stack((both.sum(dim=(2, 3)), both.square().sum(dim=(2, 3))))
    if keeper.axis.size > 1:
        sums = keeper.gathered(f"deviations of {name}", keeper.axis, sums[None], user=user).sum(dim=0)
    total, squares = sums
    variance = squares - total.square() / (state.shard.total * guided.shape[-1])
    factor = (variance[0] / variance[1]).sqrt().to(guided.dtype)[:, None, None]
    mixed = share * (factor * guided) + (1 - share) * guided
    if course.decision.learned:  # the conditional branch's variances follow the prediction
        width = guided.shape[-1]
        mixed = torch.cat((mixed, cond[..., width : 2 * width].to(mixed.dtype)), dim=-1)
    return mixed, None


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


class Segment:
    """The evaluations `steps` of a run, computed by one model.

    branches: the outputs of the last step for each stream of the state; those of a replay are where the capture's are.
    """

    def __init__(
        self, dit: DistributedDiT, steps: range, lengths: Mapping[str, int], size: tuple[int, ...], given: Conditions
    ) -> None:
        """Set up the segment. lengths: tokens of each stream of the state; size: size of the first stream's latent."""
        self.steps = steps
        self.graph: StepGraph | None = None
        self.branches: dict[str, Branches] = {}
        self.model, self._given, self._keeper, self._releases = dit.model, given, dit.keeper, dit.keeper.releases
        encoded = self._encode(given)
        self._whole = _whole(given, encoded)
        others = {name: x.shape[2] for name, x in given.drawn.items()}
        counts, where = {**lengths, **others}, partial(dit.positions, size)
        # indexing copies, so that a captured step reads rows of its own, which the next run's are written into
        self._share = Share.of(dit.model, dit.keeper, encoded, counts, where, len(given.row_B), given.row_B, self)
        self._drawn = self._rows_of_drawn(given)
        self._first = torch.zeros((), dtype=torch.int64, device=dit.device)
        self._row_B = given.row_B.clone()
        self._table: dict[str, Tensor] = {}
        self._count = given.count
        self._pooled = encoded.pooled
        self._chunk = max(1, min(len(steps), TABLE_BYTES // max(1, self._count * self._row_bytes())))
        self._loaded = -1

    @property
    def split(self) -> Split:
        """Return which tokens of each stream this rank has."""
        return self._share.split

    def restart(self, given: Conditions) -> bool:
        """Copy another run's conditions into the buffers that a captured step reads; False if they do not fit."""
        encoded = self._encode(given)
        if self._whole != _whole(given, encoded):
            return False
        constant, mask = rows_of(encoded, self.split, given.row_B)
        for mine, new in ((self._share.constant, constant), (self._drawn, self._rows_of_drawn(given))):
            for name, x in mine.items():
                x.copy_(new[name])
        if self._share.mask is not None and mask is not None:
            self._share.mask.copy_(mask)
        self._row_B.copy_(given.row_B)
        self._given, self._pooled, self._loaded = given, encoded.pooled, -1
        return True

    def load(self, step: int) -> None:
        """Compute the part of the modulation table that holds this evaluation, unless it is loaded already."""
        start = self.steps.start + (step - self.steps.start) // self._chunk * self._chunk
        if start == self._loaded:
            return
        end = min(start + self._chunk, self.steps.stop)
        # all rows on every rank, whatever the mesh, because a matrix product of another shape may round differently
        every = {name: x.repeat(end - start, *[1] * (x.dim() - 1)) for name, x in self._pooled.items()}
        chunk = self._modulate(slice(start, end), self._count, every)
        if not self._table:
            self._table = dict(chunk)
        for name, table in self._table.items():  # in place, because a captured step reads there
            table[: len(chunk[name])].copy_(chunk[name])
        self._first.fill_(start)
        self._loaded = start

    def inputs(self, state: Mapping[str, Tensor], step: Tensor) -> StepInputs:
        """Return the arguments of the model for this rank's tokens of the state at a step (a device scalar)."""
        conditioning = rows(self._table, (step - self._first) * self._count + self._row_B)
        drawn = {name: x.index_select(0, step.view(1))[0] for name, x in self._drawn.items()}
        return self._share.inputs({**state, **drawn}, conditioning)

    def replay(self) -> None:
        """Replay the captured step; ValueError if the buffers that it reads were freed in the meantime."""
        if self._keeper.releases != self._releases:
            raise ValueError("got a step after DistributedDiT.release, expected a new run, which makes new buffers")
        assert self.graph is not None
        self.graph.replay()

    def release(self) -> None:
        """Free the CUDA graph and its memory, if there is one."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.branches = {}
            self.graph.release()
            self.graph = None
            torch.cuda.empty_cache()  # neither a capture nor peer memory could take what a graph's pool leaves there

    def _encode(self, given: Conditions) -> Encoded:
        with torch.no_grad():
            return self.model.encode(**given.prompt)

    def _rows_of_drawn(self, given: Conditions) -> dict[str, Tensor]:
        """Return this rank's tokens of the streams that change at every evaluation."""
        return {name: self.split.mine(name, x, dim=2).contiguous() for name, x in given.drawn.items()}

    def _modulate(self, steps: slice, count: int, pooled: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return self.model.modulate(self._given.timesteps_S[steps].repeat_interleave(count), **pooled)

    def _row_bytes(self) -> int:
        one = self._modulate(slice(0, 1), 1, {name: x[:1] for name, x in self._pooled.items()})
        return sum(tensor.numel() * tensor.element_size() for tensor in one.values())


def _whole(given: Conditions, encoded: Encoded) -> object:
    """Equal for conditions that fit the same buffers. The same on every rank: it is of all tokens, not of a share."""
    tensors = encoded.streams, encoded.masks, encoded.pooled, given.drawn
    return given.count, [{name: (x.shape, x.dtype) for name, x in each.items()} for each in tensors]
