"""Verifies this package's own loop: the ranks' run of a request beside that of one rank, block by block.

For each evaluation of the model the ranks, one rank alone in the same data type, and one rank alone in a wider type
(the reference: attention by its formula, no TF32) predict on the reference's inputs. Then the ranks run the steps by
themselves, as CUDA graphs where the run has them, and once more without.
When it wins: it takes the memory of one layer in the wider type besides the weights, because a reference that is loaded
beside them takes twice as much as they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from seqpar import exact
from seqpar.distributed import DistributedDiT
from seqpar.fidelity.blocks import Compared, Share, watched
from seqpar.fidelity.compare import Error, Place, digest, error
from seqpar.fidelity.held import held
from seqpar.fidelity.judging import full_precision, plain_engine
from seqpar.fidelity.verdict import AFTER, BITS, WHOLE, Measured
from seqpar.fidelity.widened import widened
from seqpar.inputs import from_rank_0
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.protocols import SequenceModel
from seqpar.sampling.request import Request, rank_0s
from seqpar.sampling.run import Run, begin
from seqpar.shard import Shard

WIDE = {torch.float32: torch.float64, torch.float64: torch.float64}  # the reference of other data types is fp32
Streams = Mapping[str, Tensor]


def measure(dit: DistributedDiT, request: Request, evaluations: int) -> Measured:
    """Return what this rank measures of the first evaluations of a request; every rank must call this together.

    Raises ValueError if one rank cannot compute the request, or has not the memory for it.
    """
    request, made = rank_0s(dit.mesh, request), Measured(dit.dtype)
    loop = Loop(dit, request, made)
    try:
        states = [loop.evaluate(index) for index in range(min(evaluations, loop.steps))]
    finally:
        loop.release()
    _own_runs(dit, request, states, made)
    return made


class Loop:
    """Runs of one request: of the ranks, of one rank alone, and of one rank alone in the wider type."""

    def __init__(self, dit: DistributedDiT, request: Request, made: Measured) -> None:
        self._dit, self._request, self._made = dit, request, made
        self._models = [dit.model, *(each.model for each in request.segments.values())]
        self._ranks = begin(dit, _again(request))
        self._alone = held(dit.mesh, lambda: begin(*_plain(dit, request)))
        self._exact = held(dit.mesh, lambda: begin(*_plain(dit, request, dit.local.name))) if _is_exact(dit) else None
        self._truth = held(dit.mesh, self._begin_truth)

    @property
    def steps(self) -> int:
        """Return the number of evaluations of the whole run."""
        return len(self._ranks.timesteps)

    def release(self) -> None:
        """Free what the runs keep."""
        for run in (self._ranks, self._alone, self._truth, self._exact):
            if run is not None:
                run.release()

    def evaluate(self, index: int) -> tuple[Streams, Error]:
        """Compare the evaluation of this number; return the reference's state after it, and one rank's error in it."""
        mesh, made, whole = self._dit.mesh, self._made, Place(index, WHOLE)
        with self._wide():
            inputs = from_rank_0(mesh, _copied(self._truth.inputs()))
        compared = Compared(_share(self._dit, self._request, self._ranks))
        with watched(self._models, compared.keep):
            ours = self._ranks.predict_on(index, inputs)
        again = self._ranks.predict_on(index, inputs)  # without the hooks, which make ranks wait for each other
        self._dit.check_delivered()
        made.bits.append(digest(ours))
        if digest(again) != made.bits[-1]:
            made.find(whole, BITS.format("the same evaluation had before"))
        self._check_exact(index, inputs, ours, compared)
        return held(mesh, lambda: self._by_one(index, inputs, ours, compared))

    def _by_one(self, index: int, inputs: Streams, ours: Streams, compared: Compared) -> tuple[Streams, Error]:
        made = self._made
        with self._wide():
            with watched(self._models, compared.truth):
                truth = self._truth.predict_on(index, inputs)
            self._truth.step()
            after = _copied(self._truth.inputs())
        with watched(self._models, compared.plain):
            plain = self._alone.predict_on(index, inputs)
        self._alone.step()
        made.add_blocks(index, compared)
        made.add(Place(index, WHOLE), error(ours, truth), error(plain, truth))
        return after, error(self._alone.inputs(), after)

    def _check_exact(self, index: int, inputs: Streams, ours: Streams, compared: Compared) -> None:
        """In exact mode, compare the bits with those of one rank with the same attention."""
        if self._exact is None:
            return
        with watched(self._models, compared.same):
            one = self._exact.predict_on(index, inputs)
        places = [Place(index, at, name) for at, (name, equal) in enumerate(compared.equal.items()) if not equal]
        places += [Place(index, WHOLE)] if digest(one) != digest(ours) else []
        for place in places[:1]:
            self._made.find(place, BITS.format("one rank has, and only data moves"))

    @contextmanager
    def _wide(self) -> Iterator[None]:
        with full_precision(), widened(self._models, WIDE.get(self._dit.dtype, torch.float32)):
            yield

    def _begin_truth(self) -> Run:
        dit, request = _plain(self._dit, self._request)
        with self._wide():
            return begin(dit, request)


def _own_runs(dit: DistributedDiT, request: Request, states: list[tuple[Streams, Error]], made: Measured) -> None:
    """Compare the states of two runs of the ranks with the reference's, and their bits with each other."""
    runs = [_states(dit, request, len(states), graph) for graph in (True, False)]
    for index, (truth, alone) in enumerate(states):
        place = Place(index, AFTER, "the state after the prediction")
        made.add(place, error(runs[0][index], truth), alone)
        made.bits.append(digest(runs[0][index]))
        if digest(runs[1][index]) != made.bits[-1]:
            made.find(place, BITS.format("the same run without CUDA graphs, or a second time"))


def _states(dit: DistributedDiT, request: Request, steps: int, graph: bool) -> list[Streams]:
    """Return the state after each of the first steps of a run of the ranks."""
    run, found = begin(dit, _again(request)), list[Streams]()
    try:
        for _ in range(steps):
            if graph and run.why_no_graph is None:
                run.capture()
            run.step()
            found.append(_copied(run.inputs()))
        dit.check_delivered()
        return found
    finally:
        run.release()


def _copied(streams: Streams) -> Streams:
    """Return copies, because a stream of tokens on one rank is the buffer that the next step writes to."""
    return {name: x.clone() for name, x in streams.items()}


def _plain(dit: DistributedDiT, request: Request, local: str = "reference") -> tuple[DistributedDiT, Request]:
    """Return the engine and the request of one rank alone, on the same weights."""
    alone = Mesh.single(dit.device)

    def engine(model: SequenceModel) -> DistributedDiT:
        return plain_engine(model, alone) if local == "reference" else DistributedDiT(model, alone, local=local)

    segments = {first: engine(each.model) for first, each in request.segments.items()}
    return engine(dit.model), replace(_again(request), segments=segments)


def _again(request: Request) -> Request:
    """Return the request with a generator of its own, so that every run of it adds the same noise."""
    mine = request.generator or torch.Generator().manual_seed(0)
    return replace(request, generator=torch.Generator(mine.device).set_state(mine.get_state()))


def _share(dit: DistributedDiT, request: Request, run: Run) -> Share:
    """Return which rows and tokens this rank has: rows are those of all images with the prompt, then without it."""
    mesh, images = dit.mesh, len(next(iter(request.latents(dit.model.STATE).values())))
    branches = 2 if request.guidance.on else 1
    rows = torch.arange(branches * images).view(branches, images)[
        :, Shard(images, mesh.data.size).slice(mesh.data.rank)
    ]
    rows = rows if mesh.cfg.size == 1 else rows[mesh.cfg.rank : mesh.cfg.rank + 1]
    return Share(run.split.lengths, mesh.sequence.size, mesh.sequence.rank, rows.flatten(), branches * images)


def _is_exact(dit: DistributedDiT) -> bool:
    """Return whether the ranks must have the bits of one rank."""
    return exact.is_on() and (dit.mesh.sequence.size == 1 or facts_of(dit.strategy.name).moves_only)
