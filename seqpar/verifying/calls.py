"""Verifies a diffusers pipeline or transformer after `parallelize`: every call of the transformer beside one rank's.

The pipeline runs as it always does (with its CUDA graphs, and both branches of guidance at a time), and the arguments
and results of its transformer's calls are kept. Then each call is computed again by the ranks without a graph, where
its heads and blocks are read, and by one rank alone: by the transformer's own forward in its data type and in fp32.
Guidance and schedulers, which every rank computes, are compared by the bits that ranks pass to the next call.
When it wins: it needs no knowledge of the pipeline, and shows errors of everything that surrounds the transformer's
blocks as well. Text encoders and the VAE are not verified.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.graphs.deferred import DeferredResult, plain
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.estimate import dtype_of
from seqpar.transformer.parallelize import call_of, transformers_of
from seqpar.types.protocols import Attend
from seqpar.verifying.compare import BITS, OTHER_WEIGHTS, Comparison, Place, TokenShare, digest, first_unequal
from seqpar.verifying.copies import Seen, seen_of, unequal
from seqpar.verifying.look import AFTER, ROOM, Look, Streams
from seqpar.verifying.one_rank import wide

WIDE = torch.float32  # the reference's data type, also of fp32 and fp64: some of diffusers' models round to it within


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call that a pipeline made, with its results. step, turn: the step of the run, and which of its calls it was."""

    module: Any
    call: ShardedCall
    arguments: Form
    results: Form
    step: int
    turn: int

    def place(self, position: int, name: str) -> Place:
        """Return a place of this call."""
        turn = f", call {self.turn + 1}," if self.turn else ""
        return Place(self.step, self.turn * ROOM + position, f"{name}{turn}")


class _Recorder:
    """Takes the place of a transformer's call, and keeps arguments and results."""

    def __init__(self, module: nn.Module, call: ShardedCall, calls: list[RecordedCall]) -> None:
        self._module, self._call, self._calls = module, call, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._call.named(args, kwargs)
        named.pop("return_dict", None)
        arguments = form_of(named).each(lambda x: plain(x).clone())
        results = self._call(*args, **kwargs)
        kept = form_of(tuple(results.values()) if isinstance(results, Mapping) else tuple(results))
        kept = kept.each(lambda x: x if isinstance(x, DeferredResult) else x.clone())
        self._calls.append(RecordedCall(self._module, self._call, arguments, kept, *self._step(arguments.tensors)))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _step(self, arguments: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return step and turn of a call: a step ends where the timestep changes."""
        if not self._calls:
            return 0, 0
        last = self._calls[-1]
        before, names = last.arguments.tensors, {"timestep", "t"} & arguments.keys() & last.arguments.tensors.keys()
        same = all(torch.equal(before[name].flatten()[:1], arguments[name].flatten()[:1]) for name in names)
        return (last.step, last.turn + 1) if same and last.module is self._module else (last.step + 1, 0)


def mesh_of(target: Any) -> Mesh:
    """Return the mesh of a parallelized pipeline or transformer; ValueError for any other."""
    calls = [(module, call_of(module)) for module in transformers_of(target).values()]
    for module, call in calls:
        if call is None:
            raise ValueError(
                f"got a {type(module).__name__} that is not parallelized, expected seqpar.parallelize before verify"
            )
    return next(call.mesh for _, call in calls if call is not None)


def recorded(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> tuple[list[RecordedCall], str]:
    """Return the calls that a pipeline makes, or several calls of a transformer, and the digest of the latents.

    steps: of a pipeline's run, unless its arguments say so; its pictures are not decoded. A transformer is called as
    often with the same arguments. Raises ValueError if the pipeline did not call its transformer.
    """
    calls, ending = list[RecordedCall](), ""
    with _recording(transformers_of(target).values(), calls):
        if isinstance(target, nn.Module):
            for _ in range(steps):
                target(*args, **kwargs)
        else:
            parameters = inspect.signature(type(target).__call__).parameters
            asked = {"num_inference_steps": steps, "output_type": "latent"}
            settings = {**{name: value for name, value in asked.items() if name in parameters}, **kwargs}
            returned = target(*args, **settings)
            if settings.get("output_type") == "latent":
                tensors = (x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor))
                ending = digest({str(number): plain(x) for number, x in enumerate(tensors)})
    if not calls:
        raise ValueError(f"got a {type(target).__name__} that did not call its transformer, expected a call")
    return calls, ending


@contextmanager
def _recording(modules: Iterable[nn.Module], calls: list[RecordedCall]) -> Iterator[None]:
    before = [(module, vars(module)["forward"]) for module in modules]
    try:
        for module, _ in before:  # wrappers that users have put around the call are left out
            vars(module)["forward"] = _Recorder(module, call_of(module), calls)
        yield
    finally:
        for module, forward in before:
            vars(module)["forward"] = forward


def compare_pipelines(measured: Comparison, calls: Sequence[RecordedCall], ending: str) -> tuple[str, ...]:
    """Compare the bits that the ranks' pipelines pass to the transformer: guidance and schedulers make them of results.

    ending: digest of what the pipeline returned. Returns a note where the ranks were given different inputs from the
    first call on, of which rank 0's are used. All ranks must call this together.
    """
    mine = {each.place(-1, "the call"): digest(each.arguments.tensors) for each in calls}
    mine[calls[-1].place(AFTER, "the pipeline's end")] = ending
    every = [dict(each) for each in calls[0].call.mesh.collect([*mine.items()], list[tuple[Place, str]])]
    if any(first_unequal(each, every[0]) == min(mine) for each in every):
        return ("guidance and scheduler are not compared, because ranks pass other tensors from the first call on",)
    if (place := first_unequal(mine, every[0])) is not None:
        measured.find(place, BITS.format("rank 0's pipeline passes, which comes from its guidance or scheduler"))
    return ()


def measure(calls: Sequence[RecordedCall]) -> Comparison:
    """Return what this rank measures of the calls; every rank must call this at the same time."""
    dtype = dtype_of(calls[0].module)
    measured = Comparison(WIDE if dtype == torch.float64 else dtype)
    with torch.inference_mode(False), torch.no_grad():
        again = [_Again(each, measured) for each in calls]
        for each in calls:
            each.call.check_delivered()
        for call in {id(each.call): each.call for each in calls}.values():
            if (found := unequal(call.mesh, call.sharded.fused.copies)) is not None:
                measured.find(Place(0, -1, "the merged adapters"), OTHER_WEIGHTS.format(*found), by=found[0])
            call.release()  # the transformer's own forward must be free of hooks; the next call makes all again
        for each in again:
            each.compare()
    return measured


class _Again:
    """A call again: by the ranks now, and by one rank alone with `compare`, after all calls were made by the ranks.

    One rank computes it three times: as the ranks do, to compare what they copy, and by the transformer's own forward.
    """

    def __init__(self, recorded_call: RecordedCall, measured: Comparison) -> None:
        self._call = call = recorded_call.call
        rank_0s, self._forward = call.rank_0s(dict(recorded_call.arguments.whole)), call.__wrapped__
        self._arguments: Mapping[str, Any] = rank_0s.whole
        self._computed = call.computed(rank_0s)
        self._ours = dict(recorded_call.results.each(plain).tensors)  # a deferred result is computed now, on all ranks
        state, strategy = call.state, call.state.plan.strategy.name
        self._look = look = Look(measured, recorded_call.place, [call.sharded.module], call.mesh, strategy, WIDE)
        with look.ranks(), self._seen(look.attention):
            call.compute(self._computed)
        self._share = TokenShare(dict(state.lengths), state.axis.size, state.axis.rank)

    def compare(self) -> None:
        """Compare the call with one rank alone, in the model's data type and in a wider one."""
        self._look.compare("the result", self._ours, self._by_one)

    @contextmanager
    def _seen(self, observe: Callable[[Attend, Tokens], Attend]) -> Iterator[None]:
        """Let `Copies` see the forward that is computed inside. observe: returns what takes an attention's place."""
        state, copies = self._call.state, self._look.copies
        exchanges, attend = state.exchanges, state.exchanges.attend
        try:
            vars(exchanges)["attend"] = lambda *kind, **masked: observe(
                Seen(attend(*kind, **masked), copies, kind[1]), kind[1]
            )
            with seen_of(state, self._call.sharded.module, copies):
                yield
        finally:
            del vars(exchanges)["attend"]

    def _body_of_one(self) -> None:
        """Compute the call on this rank alone, whose positions, masks and modulation are compared."""
        call, state = self._call, self._call.state
        before = state.mesh, state.exchanges
        state.mesh = Mesh.single(state.mesh.device)
        state.exchanges = ExchangeCache(state.mesh, state.plan)
        try:
            self._look.copies.alone(self._share)
            with self._seen(lambda attend, tokens: attend):
                call.compute(self._computed)
        finally:
            call.sharded.release()
            state.mesh, state.exchanges = before

    def _by_one(self) -> tuple[Streams, Streams]:
        arguments = self._arguments
        self._body_of_one()
        return self._look.by_one(
            self._share, lambda: self._results(arguments), lambda: self._results(wide(arguments, WIDE))
        )

    def _results(self, arguments: Mapping[str, Any]) -> Streams:
        return form_of(tuple(self._forward(**arguments, return_dict=False))).tensors
