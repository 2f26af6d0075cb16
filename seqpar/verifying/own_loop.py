"""Verifies our own denoising loop: at each step of the ranks' run, one rank computes the same from the ranks' state.

It computes the model's output in the same data type and in a wider one (attention by its formula, no TF32), and makes
the step from the ranks' outputs. Then the ranks run the steps once more, as CUDA graphs where the run has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from math import isnan
from typing import Any

import torch
from torch import Tensor

from seqpar.attention._streams import split_out
from seqpar.local.reference import attend as by_formula
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.interface import SequenceModel
from seqpar.loop.request import Request, rank_0s
from seqpar.loop.run import Run, begin
from seqpar.mesh import exact
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Shard
from seqpar.planner.costs import facts_of
from seqpar.transports.collective import gather
from seqpar.types.protocols import Stream
from seqpar.verifying.compare import AFTER, BITS, WIDER, Comparison, Error, Place, TokenShare, digest, error
from seqpar.verifying.copies import Copies
from seqpar.verifying.evaluation import Evaluation, Observed, Streams, dtype_of, joined
from seqpar.verifying.one_rank import held, wide

# guidance and a scheduler's step are a few operations per number in fp32; a scale that is one percent off is more
STEP = {torch.float64: Error(1e-12, 1e-11)}
STEP_FP32 = Error(1e-6, 1e-5)
AGAIN = "the same step had before, or by a CUDA graph"


def state_of(step: int) -> Place:
    return Place(step, part=AFTER, name="the state after the prediction")


def measure(dit: DistributedDiT, request: Request, evaluations: int) -> Comparison:
    """Measure the first evaluations of a request. Collective: call on all ranks.

    Raises ValueError if one rank cannot compute the request, or lacks the memory for it.
    """
    request, measured = rank_0s(dit.mesh, request), Comparison(dit.dtype)
    ranks = begin(dit, _again(request))
    alone = held(dit.mesh, lambda: begin(_engine_of_one(dit), _again(request)))
    evaluations = min(evaluations, len(ranks.timesteps))
    try:
        for index in range(evaluations):
            _compare_step(dit, request, measured, ranks, alone, index)
    finally:
        ranks.release()
        alone.release()

    # once more, by CUDA graphs where the run has them, and without hooks, whose reading makes ranks wait for each other
    run = begin(dit, _again(request))
    try:
        for index in range(evaluations):
            if run.why_no_graph is None:
                run.capture()
            run.step()
            if digest(run.inputs()) != measured.bits[state_of(index)]:
                measured.find(state_of(index), BITS.format(AGAIN))
        dit.check_delivered()
    finally:
        run.release()
    return measured


def _compare_step(
    dit: DistributedDiT, request: Request, measured: Comparison, ranks: Run, alone: Run, index: int
) -> None:
    model, images = dit.model, Shard(len(next(iter(request.latents(dit.model.STATE).values()))), dit.mesh.data.size)
    wider, same_bits = WIDER.get(dit.dtype, torch.float32), _is_exact(dit)
    evaluation = Evaluation(measured, Place(index), [model], dit.mesh, dit.strategy.name, wider, same_bits)
    inputs, share, outputs = _copied(ranks.inputs()), _share(dit, request, ranks, images), dict[str, Tensor]()

    # 1. the ranks make the step
    def by_ranks(true: Callable[..., Streams], *arguments: Any) -> Streams:
        *streams, attend = arguments
        _show(evaluation.copies, *streams)
        returned = true(*streams, evaluation.observed(attend, ranks.split.tokens))
        outputs.update(_copied(returned))
        return returned

    with evaluation.ranks(), _in_place_of(model, by_ranks):
        ranks.step()
    dit.check_delivered()
    ours, after = _whole(dit, images, ranks, outputs), _copied(ranks.inputs())

    # 2. one rank computes the model's output from the same inputs, and the step from the ranks' outputs
    def by_one() -> tuple[Streams, Streams]:
        both = list[Streams]()

        def compute(true: Callable[..., Streams], *arguments: Any) -> Streams:
            *streams, attend = arguments
            formula = ByFormula(attend.tokens)  # kernels take 16 bits only
            shown = Observed(attend if same_bits else formula, evaluation.copies, None)
            evaluation.copies.alone(share)
            _show(evaluation.copies, *streams)
            both[:] = evaluation.by_one(
                share, lambda: _copied(true(*streams, shown)), lambda: _copied(true(*wide(streams, wider), formula))
            )
            return both[0]

        with _in_place_of(model, compute):
            alone.predict_on(index, inputs)
        with _in_place_of(model, lambda *_: dict(ours)):  # its state stays that of the ranks
            alone.step()
        state = alone.inputs()
        reason = error(after, state).why_not(STEP.get(dit.dtype, STEP_FP32))
        if reason is not None:
            by = _most_wrong(dit, images, ranks, after, state)
            measured.find(state_of(index), f"{reason}, from the same prediction", 1.0, by)
        return both[0], both[1]

    evaluation.compare(Place(0).name, ours, by_one)
    evaluation.whole(state_of(index), after)


class ByFormula:
    """Attention of one rank by its formula, in the data type of its streams."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(
        self,
        streams: Sequence[Stream],
        mask_BL: Tensor | None = None,
        /,
        *,
        beside: Callable[[], None] | None = None,
        only: int | None = None,
    ) -> tuple[Tensor, ...]:
        if beside is not None:
            beside()
        return split_out(by_formula(*joined(streams, dtype_of(streams)), mask_BL)[0], streams)


@contextmanager
def _in_place_of(model: SequenceModel, work: Callable[..., Streams]) -> Iterator[None]:
    """Call `work(forward_tokens, *its arguments)` for each call of the model's `forward_tokens`."""
    try:
        vars(model)["forward_tokens"] = partial(work, model.forward_tokens)
        yield
    finally:
        vars(model).pop("forward_tokens", None)


def _show(copies: Copies, streams: Streams, positions: Streams, conditioning: Streams) -> None:
    for name, x in positions.items():
        copies.part(f"positions of {name}", x, rows=False)
    for name, x in (*streams.items(), *conditioning.items()):
        copies.part(f"the input {name}", x.clone())  # tokens are a buffer that the step writes to


def _copied(streams: Streams) -> dict[str, Tensor]:
    """Copies, because a stream of tokens on one rank is the buffer that the next step writes to."""
    return {name: x.clone() for name, x in streams.items()}


def _most_wrong(dit: DistributedDiT, images: Shard, run: Run, states: Streams, alone: Streams) -> int:
    """The rank whose images and tokens have the largest error. Ranks of the cfg axis hold the same tokens, which each
    computes itself, so it is one of this replica.
    """
    mesh, errors = dit.mesh, dict[int, tuple[bool, float]]()
    for data, part in product(range(mesh.data.size), range(mesh.sequence.size)):
        total = 0.0
        for name, x in states.items():
            both = [y[images.slice(data)] for y in (x, alone[name])]
            got, right = (y if y.dim() < 4 else dit.model.patchify(y) for y in both)
            tokens = run.split.shard(name).slice(part)
            total += error({name: got[:, tokens]}, {name: right[:, tokens]}).rms
        errors[(data * mesh.cfg.size + mesh.cfg.rank) * mesh.sequence.size + part] = isnan(total), total
    return max(errors, key=lambda rank: errors[rank])


def _whole(dit: DistributedDiT, images: Shard, run: Run, outputs: Streams) -> Streams:
    """The model's outputs for all tokens, and for the rows of all images with the prompt, then without."""
    mesh = dit.mesh

    def whole(name: str, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (-1, images.sizes[mesh.data.rank]))
        tokens = run.split.shard(name).sizes
        for axis, sizes, dim in ((mesh.sequence, tokens, 2), (mesh.data, images.sizes, 1), (mesh.cfg, (1, 1), 0)):
            rows = gather(rows, axis, sizes, dim) if axis.size > 1 else rows
        return rows.flatten(0, 1)

    return {name: whole(name, x) for name, x in outputs.items()}


def _share(dit: DistributedDiT, request: Request, run: Run, images: Shard) -> TokenShare:
    """This rank's rows and tokens; rows are those of all images with the prompt, then without it."""
    mesh, branches = dit.mesh, 2 if request.guidance.on else 1
    rows = torch.arange(branches * images.total).view(branches, -1)[:, images.slice(mesh.data.rank)]
    rows = rows if mesh.cfg.size == 1 else rows[mesh.cfg.rank : mesh.cfg.rank + 1]
    axis = mesh.sequence
    return TokenShare(run.split.lengths, axis.size, axis.rank, rows.flatten(), branches * images.total)


def _engine_of_one(dit: DistributedDiT) -> DistributedDiT:
    return DistributedDiT(dit.model, Mesh.single(dit.device), local=dit.local.name)


def _again(request: Request) -> Request:
    """The request with a copy of its generator, so that every run of it adds the same noise."""
    generator = request.generator or torch.Generator().manual_seed(0)
    return replace(request, generator=torch.Generator(generator.device).set_state(generator.get_state()))


def _is_exact(dit: DistributedDiT) -> bool:
    return exact.is_on() and (dit.mesh.sequence.size == 1 or facts_of(dit.strategy.name).moves_only)
