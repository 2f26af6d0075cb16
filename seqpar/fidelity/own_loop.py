"""Verifies this package's own loop: the ranks' run of a request beside that of one rank, block by block.

At each step of the ranks' run, one rank alone computes the model's output from the state that the ranks have, in the
same data type and in a wider one (the reference: attention by its formula, no TF32), and makes the step from the ranks'
outputs. Then the ranks run the steps once more, as CUDA graphs where the run has them.
When it wins: it takes the memory of one layer in the wider type besides the weights, because a reference that is loaded
beside them takes twice as much as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqpar import exact
from seqpar.engine.distributed import DistributedDiT
from seqpar.fidelity.blocks import Compared, Share, watched
from seqpar.fidelity.compare import WIDER, Bound, Place, digest, error
from seqpar.fidelity.heads import Heads
from seqpar.fidelity.held import held
from seqpar.fidelity.judging import plain_engine
from seqpar.fidelity.verdict import AFTER, BITS, WHOLE, Measured, block_position
from seqpar.fidelity.widened import full_precision, widened
from seqpar.mesh import Mesh
from seqpar.planner.costs import facts_of
from seqpar.protocols import SequenceModel
from seqpar.sampling.request import Request, rank_0s
from seqpar.sampling.run import Run, begin
from seqpar.shard import Shard
from seqpar.transports.collective.point_to_point import gather

# guidance and a scheduler's step are a few operations on each number in fp32; a scale that is one percent off is more
STEP = {torch.float64: Bound(1e-12, 1e-11)}
STEP_FP32 = Bound(1e-6, 1e-5)
AGAIN = "the same step had before, or by a CUDA graph"
Streams = Mapping[str, Tensor]


def measure(dit: DistributedDiT, request: Request, evaluations: int) -> Measured:
    """Return what this rank measures of the first evaluations of a request; every rank must call this together.

    Raises ValueError if one rank cannot compute the request, or has not the memory for it.
    """
    request, made = rank_0s(dit.mesh, request), Measured(dit.dtype)
    loop = Loop(dit, request, made)
    try:
        states = [loop.step(index) for index in range(min(evaluations, loop.steps))]
    finally:
        loop.release()
    _once_more(dit, request, states, made)
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

    def step(self, index: int) -> Streams:
        """Let the ranks make the step of this number, compare it, and return the state after it."""
        mesh, made = self._dit.mesh, self._made
        inputs = _copied(self._ranks.inputs())
        compared = Compared(_share(self._dit, self._request, self._ranks))
        heads = Heads(compared.count)
        with watched(self._models, compared.keep), self._outputs(heads.watch) as mine:
            self._ranks.step()
        self._dit.check_delivered()
        after, ours = _copied(self._ranks.inputs()), self._whole(mine)
        made.bits += [digest(ours), digest(after)]
        for position, name, reason in heads.wrong(mesh.sequence, compared.names()):
            made.find(Place(index, position, name), reason)
        self._check_exact(index, inputs, ours, compared)
        truth = held(mesh, lambda: self._by_one(index, inputs, ours, after, compared))
        made.compare_references(mesh, Place(index, WHOLE), truth)
        return after

    def _by_one(self, index: int, inputs: Streams, ours: Streams, after: Streams, compared: Compared) -> Streams:
        """Compare the model's outputs with one rank's on the same inputs, and the step with that from the same outputs.

        Returns the reference's outputs. One rank's own state stays that of the ranks, but for what is wrong.
        """
        made = self._made
        with self._wide(), watched(self._models, compared.truth), self._outputs() as truth:
            self._truth.predict_on(index, inputs)
        with watched(self._models, compared.plain), self._outputs() as plain:
            self._alone.predict_on(index, inputs)
        made.add_blocks(index, compared)
        made.add(Place(index, WHOLE), error(ours, truth), error(plain, truth))
        with _in_place_of(self._models, lambda *_: dict(ours)):
            self._alone.step()
        found = error(after, self._alone.inputs())
        if (reason := STEP.get(self._dit.dtype, STEP_FP32).why_not(found)) is not None:
            made.find(Place(index, AFTER, "the state after the prediction"), f"{reason}, from the same prediction")
        return truth

    def _check_exact(self, index: int, inputs: Streams, ours: Streams, compared: Compared) -> None:
        """In exact mode, compare the bits with those of one rank with the same attention."""
        if self._exact is None:
            return
        with watched(self._models, compared.same), self._outputs() as one:
            self._exact.predict_on(index, inputs)
        names = enumerate(compared.equal.items())
        places = [Place(index, block_position(at), name) for at, (name, equal) in names if not equal]
        places += [Place(index, WHOLE)] if digest(one) != digest(ours) else []
        for place in places[:1]:
            self._made.find(place, BITS.format("one rank has, and only data moves"))

    @contextmanager
    def _outputs(self, watch: Callable[[Any], Any] = lambda attend: attend) -> Iterator[dict[str, Tensor]]:
        """Yield what the model returns on this rank, filled by its call. watch: returns the attention that it calls."""
        made = dict[str, Tensor]()

        def kept(true: Callable[..., Streams], *streams_positions_conditioning: Any) -> Streams:
            *given, attend = streams_positions_conditioning
            outputs = true(*given, watch(attend))
            made.update(_copied(outputs))
            return outputs

        with _in_place_of(self._models, kept):
            yield made

    def _whole(self, outputs: Streams) -> Streams:
        """Return the model's outputs for all tokens, and for the rows of all images with the prompt, then without."""
        mesh, request, split = self._dit.mesh, self._request, self._ranks.split
        images = Shard(len(next(iter(request.latents(self._dit.model.STATE).values()))), mesh.data.size)

        def whole(name: str, x: Tensor) -> Tensor:
            rows = x.unflatten(0, (-1, images.sizes[mesh.data.rank]))
            parts = ((mesh.sequence, split.shard(name).sizes, 2), (mesh.data, images.sizes, 1), (mesh.cfg, (1, 1), 0))
            for axis, sizes, dim in parts:
                rows = gather(rows, axis, sizes, dim) if axis.size > 1 else rows
            return rows.flatten(0, 1)

        return {name: whole(name, x) for name, x in outputs.items()}

    @contextmanager
    def _wide(self) -> Iterator[None]:
        with full_precision(), widened(self._models, WIDER.get(self._dit.dtype, torch.float32)):
            yield

    def _begin_truth(self) -> Run:
        dit, request = _plain(self._dit, self._request)
        with self._wide():
            return begin(dit, request)


@contextmanager
def _in_place_of(models: Iterable[SequenceModel], work: Callable[..., Streams]) -> Iterator[None]:
    """Call `work(forward_tokens, *its arguments)` for each call of a model's `forward_tokens`."""
    models = list({id(model): model for model in models}.values())
    try:
        for model in models:
            vars(model)["forward_tokens"] = partial(work, model.forward_tokens)
        yield
    finally:
        for model in models:
            vars(model).pop("forward_tokens", None)


def _once_more(dit: DistributedDiT, request: Request, states: list[Streams], made: Measured) -> None:
    """Compare the bits of the states with those of a second run, by CUDA graphs where the run has them.

    It has no hooks, whose reading makes ranks wait for each other.
    """
    run = begin(dit, _again(request))
    try:
        for index, first in enumerate(states):
            if run.why_no_graph is None:
                run.capture()
            run.step()
            made.bits.append(digest(run.inputs()))
            if made.bits[-1] != digest(first):
                made.find(Place(index, AFTER, "the state after the prediction"), BITS.format(AGAIN))
        dit.check_delivered()
    finally:
        run.release()


def _copied(streams: Streams) -> dict[str, Tensor]:
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
