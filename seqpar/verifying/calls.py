"""Verifies a diffusers pipeline or transformer after `parallelize`: each call of the transformer, against one rank.

The pipeline runs as usual (with CUDA graphs, and both branches of guidance at a time), and the arguments and results of
its transformer's calls are recorded. Then the ranks compute each call again without a graph, where heads and blocks are
read, and one rank computes it by the transformer's original forward, in its data type and in fp32. Guidance and
schedulers, which every rank computes, are compared by the bits that ranks pass to the next call. This needs no
knowledge of the pipeline, and also covers layers around the blocks. Text encoders and the VAE are not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.families._modular import is_modular, parameters_of
from seqpar.graphs.deferred import DeferredResult, plain
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import Tokens
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.estimate import dtype_of
from seqpar.transformer.lossy import computed_by
from seqpar.transformer.parallelize import call_of, transformers_of
from seqpar.types.protocols import Attend
from seqpar.verifying.compare import AFTER, BITS, OTHER_WEIGHTS, Comparison, Place, TokenShare, digest, first_unequal
from seqpar.verifying.copies import seen_of, unequal
from seqpar.verifying.evaluation import Evaluation, Observed, Streams
from seqpar.verifying.one_rank import wide

WIDE = torch.float32  # the reference's data type, also for fp32 and fp64: some diffusers models round to it inside


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call that a pipeline made, with its results. place: the step of the run, and the call within it."""

    module: Any
    call: ShardedCall
    arguments: Form
    results: Form
    place: Place


class _Recorder:
    def __init__(self, module: nn.Module, call: Any, calls: list[RecordedCall]) -> None:
        self._module, self._call, self._calls = module, call, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._call.named(args, kwargs)
        named.pop("return_dict", None)
        arguments = form_of(named).each(lambda x: plain(x).clone())
        results = self._call(*args, **kwargs)
        copies = form_of(tuple(results.values()) if isinstance(results, Mapping) else tuple(results))
        copies = copies.each(lambda x: x if isinstance(x, DeferredResult) else x.clone())
        self._calls.append(RecordedCall(self._module, self._call, arguments, copies, self._place(arguments.tensors)))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _place(self, arguments: Mapping[str, Tensor]) -> Place:
        """Step and call; a step ends where the timestep changes."""
        if not self._calls:
            return Place(0)
        last = self._calls[-1]
        before, names = last.arguments.tensors, {"timestep", "t"} & arguments.keys() & last.arguments.tensors.keys()
        same = all(torch.equal(before[name].flatten()[:1], arguments[name].flatten()[:1]) for name in names)
        step, call = last.place.step, last.place.call
        return Place(step, call + 1) if same and last.module is self._module else Place(step + 1)


def mesh_of(target: Any) -> Mesh:
    """The mesh of a parallelized pipeline or transformer; ValueError for any other."""
    calls = [(module, call_of(module)) for module in transformers_of(target).values()]
    for module, call in calls:
        if call is None:
            raise ValueError(
                f"got a {type(module).__name__} that is not parallelized, expected seqpar.parallelize before verify"
            )
        if call.sharded.is_eight:
            raise ValueError(
                f"{type(module).__name__} computes in 8 bits, but verify compares with the dtype of the weights; "
                f"seqpar.measure_precision says what 8 bits change"
            )
    return next(call.mesh for _, call in calls if call is not None)


def recorded(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> tuple[list[RecordedCall], str]:
    """Record the calls that a pipeline makes, or several calls of a transformer; also the digest of the latents.

    steps: of a pipeline's run, unless its arguments say so; its images are not decoded. A transformer is called `steps`
    times with the same arguments. A step cache is off meanwhile. Raises ValueError if the pipeline did not call its
    transformer.
    """
    calls, ending = list[RecordedCall](), ""
    with computed_by(target, cache=False), _recording(transformers_of(target).values(), calls):
        if isinstance(target, nn.Module):
            for _ in range(steps):
                target(*args, **kwargs)
        else:
            parameters, modular = parameters_of(target, "image" in kwargs), is_modular(target)
            asked = {"num_inference_steps": steps, "output_type": "pt" if modular else "latent"}
            settings = {**{name: value for name, value in asked.items() if name in parameters}, **kwargs}
            returned = target(*args, **settings, **({"output": ["latents", "audio_latents"]} if modular else {}))
            if modular or settings.get("output_type") == "latent":
                tensors = (x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor))
                ending = digest({str(number): plain(x) for number, x in enumerate(tensors)})
    if not calls:
        raise ValueError(f"{type(target).__name__} did not call its transformer; pass arguments of a whole call")
    return calls, ending


@contextmanager
def _recording(modules: Iterable[nn.Module], calls: list[RecordedCall]) -> Iterator[None]:
    before = [(module, call, vars(module)["forward"]) for module in modules if (call := call_of(module)) is not None]
    try:
        for module, call, _ in before:  # inside the wrappers that users have put around the call
            vars(module)["forward"] = _Recorder(module, call, calls)
        yield
    finally:
        for module, _, forward in before:
            vars(module)["forward"] = forward


def compare_pipelines(measured: Comparison, calls: Sequence[RecordedCall], ending: str) -> tuple[str, ...]:
    """Compare the bits that the ranks' pipelines pass to the transformer, which come from guidance and schedulers.

    ending: digest of what the pipeline returned. Returns a note if the ranks got different inputs from the first call
    on, of which rank 0's are used. Collective: call on all ranks.
    """
    local = {replace(call.place, index=-1, name="the call"): digest(call.arguments.tensors) for call in calls}
    local[replace(calls[-1].place, part=AFTER, name="the pipeline's end")] = ending
    ranks = [dict(items) for items in calls[0].call.mesh.collect([*local.items()], list[tuple[Place, str]])]
    if any(first_unequal(digests, ranks[0]) == min(local) for digests in ranks):
        return ("guidance and scheduler are not compared, because ranks pass other tensors from the first call on",)
    if (place := first_unequal(local, ranks[0])) is not None:
        measured.find(place, BITS.format("rank 0's pipeline passes, which comes from its guidance or scheduler"))
    return ()


def measure(calls: Sequence[RecordedCall]) -> Comparison:
    """Measure the calls. Collective: call on all ranks."""
    dtype = dtype_of(calls[0].module)
    measured = Comparison(WIDE if dtype == torch.float64 else dtype)
    with torch.inference_mode(False), torch.no_grad():
        again = [_Again(call, measured) for call in calls]
        for recorded_call in calls:
            recorded_call.call.check_delivered()
        for call in {id(recorded_call.call): recorded_call.call for recorded_call in calls}.values():
            if (found := unequal(call.mesh, call.sharded.fused.copies)) is not None:
                measured.find(Place(0, index=-1, name="the merged adapters"), OTHER_WEIGHTS.format(*found), by=found[0])
            call.release()  # the transformer's original forward must be free of hooks; the next call makes all again
        for call_again in again:
            call_again.compare()
    return measured


class _Again:
    """A call again: by the ranks now, and by one rank with `compare`, after the ranks have made all calls.

    One rank computes it three times: as the ranks do, to compare what they copy, and twice by the original forward.
    """

    def __init__(self, recorded_call: RecordedCall, measured: Comparison) -> None:
        self._call = call = recorded_call.call
        rank_0s, self._forward = call.rank_0s(dict(recorded_call.arguments.whole)), call.__wrapped__
        self._arguments: Mapping[str, Any] = rank_0s.whole
        self._computed = call.computed(rank_0s)
        self._ours = dict(recorded_call.results.each(plain).tensors)  # a deferred result is computed now, on all ranks
        state, strategy = call.state, call.state.plan.strategy.name
        place, module = recorded_call.place, call.sharded.module
        self._evaluation = Evaluation(measured, place, [module], call.mesh, strategy, WIDE)
        with self._evaluation.ranks(), self._seen(self._evaluation.observed):
            call.compute(self._computed)
        self._share = TokenShare(dict(state.lengths), state.axis.size, state.axis.rank)

    def compare(self) -> None:
        self._evaluation.compare("the result", self._ours, self._by_one)

    @contextmanager
    def _seen(self, observe: Callable[[Attend, Tokens], Attend]) -> Iterator[None]:
        """Show the forward made inside to `Copies`. observe: wraps an attention, built for a split of tokens."""
        state, copies = self._call.state, self._evaluation.copies
        exchanges, attend = state.exchanges, state.exchanges.attend
        try:
            vars(exchanges)["attend"] = lambda *kind, **masked: observe(attend(*kind, **masked), kind[1])
            with seen_of(state, self._call.sharded.module, copies):
                yield
        finally:
            del vars(exchanges)["attend"]

    def _body_of_one(self) -> None:
        call, state = self._call, self._call.state
        before = state.mesh, state.exchanges
        state.mesh = Mesh.single(state.mesh.device)
        state.exchanges = ExchangeCache(state.mesh, state.plan)
        try:
            copies = self._evaluation.copies
            copies.alone(self._share)
            with self._seen(lambda attend, tokens: Observed(attend, copies, tokens)):
                call.compute(self._computed)
        finally:
            call.sharded.release()
            state.mesh, state.exchanges = before

    def _by_one(self) -> tuple[Streams, Streams]:
        arguments = self._arguments
        self._body_of_one()
        return self._evaluation.by_one(
            self._share, lambda: self._results(arguments), lambda: self._results(wide(arguments, WIDE))
        )

    def _results(self, arguments: Mapping[str, Any]) -> Streams:
        return form_of(tuple(self._forward(**arguments, return_dict=False))).tensors
