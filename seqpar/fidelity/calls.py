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

from seqpar.adapter.body import Inside
from seqpar.adapter.call import Call
from seqpar.adapter.estimate import dtype_of
from seqpar.adapter.parallelize import transformers_of
from seqpar.engine.promises import Promise, plain
from seqpar.engine.signature import Form, form_of
from seqpar.fidelity.blocks import TokenShare
from seqpar.fidelity.compare import BITS, Comparison, Place, digest, error, first_unequal
from seqpar.fidelity.look import AFTER, WHOLE, Look, Streams, compare_references, in_place_of
from seqpar.fidelity.one_rank import held, wide, widened
from seqpar.ranks.mesh import Mesh

ROOM = 10 * WHOLE  # positions of one call of a step
WIDE = torch.float32  # the reference's data type, also of fp32 and fp64: some of diffusers' models round to it within


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call that a pipeline made, with its results. step, turn: the step of the run, and which of its calls it was."""

    module: Any
    call: Call
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

    def __init__(self, module: nn.Module, call: Call, made: list[RecordedCall]) -> None:
        self._module, self._call, self._made = module, call, made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._call.named(args, kwargs)
        named.pop("return_dict", None)
        arguments = form_of(named).each(lambda x: plain(x).clone())
        results = self._call(*args, **kwargs)
        kept = form_of(tuple(results.values()) if isinstance(results, Mapping) else tuple(results))
        kept = kept.each(lambda x: x if isinstance(x, Promise) else x.clone())
        self._made.append(RecordedCall(self._module, self._call, arguments, kept, *self._step(arguments.tensors)))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _step(self, arguments: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return step and turn of a call: a step ends where the timestep changes."""
        if not self._made:
            return 0, 0
        last = self._made[-1]
        before, names = last.arguments.tensors, {"timestep", "t"} & arguments.keys() & last.arguments.tensors.keys()
        same = all(torch.equal(before[name].flatten()[:1], arguments[name].flatten()[:1]) for name in names)
        return (last.step, last.turn + 1) if same and last.module is self._module else (last.step + 1, 0)


def mesh_of(target: Any) -> Mesh:
    """Return the mesh of a parallelized pipeline or transformer; ValueError for any other."""
    for module in transformers_of(target).values():
        if not isinstance(vars(module).get("forward"), Call):
            raise ValueError(
                f"got a {type(module).__name__} that is not parallelized, expected seqpar.parallelize before verify"
            )
    call: Any = next(iter(transformers_of(target).values())).forward
    return call.mesh


def recorded(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> tuple[list[RecordedCall], str]:
    """Return the calls that a pipeline makes, or several calls of a transformer, and the digest of the latents.

    steps: of a pipeline's run, unless its arguments say so; its pictures are not decoded. A transformer is called as
    often with the same arguments. Raises ValueError if the pipeline did not call its transformer.
    """
    made, ending = list[RecordedCall](), ""
    with _recording(transformers_of(target).values(), made):
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
    if not made:
        raise ValueError(f"got a {type(target).__name__} that did not call its transformer, expected a call")
    return made, ending


@contextmanager
def _recording(modules: Iterable[nn.Module], made: list[RecordedCall]) -> Iterator[None]:
    before = [(module, vars(module)["forward"]) for module in modules]
    try:
        for module, call in before:
            vars(module)["forward"] = _Recorder(module, call, made)
        yield
    finally:
        for module, call in before:
            vars(module)["forward"] = call


def compare_pipelines(measured: Comparison, made: Sequence[RecordedCall], ending: str) -> tuple[str, ...]:
    """Compare the bits that the ranks' pipelines pass to the transformer: guidance and schedulers make them of results.

    ending: digest of what the pipeline returned. Returns a note where the ranks were given different inputs from the
    first call on, of which rank 0's are used. All ranks must call this together.
    """
    mine = [*(digest(each.arguments.tensors) for each in made), ending]
    every = made[0].call.mesh.collect(mine, list[str])
    if len({each[0] for each in every}) > 1:
        return ("guidance and scheduler are not compared, because ranks pass other tensors from the first call on",)
    if (index := first_unequal(mine, every[0])) is not None:
        place = made[index].place(-1, "the call") if index < len(made) else made[-1].place(AFTER, "the pipeline's end")
        measured.find(place, BITS.format("rank 0's pipeline passes, which comes from its guidance or scheduler"))
    return ()


def measure(made: Sequence[RecordedCall]) -> Comparison:
    """Return what this rank measures of the calls; every rank must call this at the same time."""
    dtype = dtype_of(made[0].module)
    measured = Comparison(WIDE if dtype == torch.float64 else dtype)
    with torch.inference_mode(False), torch.no_grad():
        again = [_Again(each) for each in made]
        for each in made:
            each.call.check_delivered()
        for call in {id(each.call): each.call for each in made}.values():
            call.release()  # the transformer's own forward must be free of hooks; the next call makes all again
        for each in again:
            mesh, place = each.made.call.mesh, each.made.place(WHOLE, "the result")
            compare_references(measured, mesh, place, held(mesh, lambda each=each: each.by_one(measured)))
    return measured


class _Again:
    """A call again: by the ranks now, and by one rank alone with `by_one`, after all calls were made by the ranks."""

    def __init__(self, made: RecordedCall) -> None:
        self.made, mesh = made, made.call.mesh
        self._given = made.call.rank_0s(dict(made.arguments.whole))
        self._inside: Inside = made.call.body.inside(self._given.whole)
        self._ours = dict(made.results.each(plain).tensors)  # a promise is computed now, on all ranks
        self._look, ranks = Look([self._inside.module], mesh.sequence), self._inside.ranks
        keeper, attend = ranks.keeper, ranks.keeper.attend
        try:
            vars(keeper)["attend"] = lambda *kind, **masked: self._look.attention(attend(*kind, **masked))
            with self._look.ranks():
                made.call.body(self._given.whole)
        finally:
            del vars(keeper)["attend"]
        self._look.share = TokenShare(dict(ranks.last.lengths), ranks.axis.size, ranks.axis.rank)

    def by_one(self, measured: Comparison) -> Streams:
        """Compute the call on this rank alone, in the model's data type and in a wider one, and compare.

        Returns the results in the wider type.
        """
        made, ours = self.made, self._ours
        if self._inside.alone is None:
            alone, truth = self._look.by_one(self._forward, self._given.whole, WIDE)
        else:
            alone, truth = self._by_native(self._inside.alone)
        self._look.report(measured, made.place)
        measured.add(made.place(WHOLE, "the result"), error(ours, truth), error(alone, truth))
        measured.bits.append(digest(ours))
        if self._inside.alone is not None:  # the native model is right, too: with diffusers' own conditioning
            with widened([made.module], WIDE):
                theirs = self._forward(wide(self._given.whole, WIDE))
            errors = error(ours, theirs), error(self._forward(self._given.whole), theirs)
            measured.add(made.place(WHOLE + 1, "the result, by diffusers' own forward"), *errors)
        return truth

    def _by_native(self, native: Callable[[Mapping[str, Any]], tuple[Tensor, ...]]) -> tuple[Streams, Streams]:
        """Return the results of the native model on one rank in its own type and in the wider one."""
        given, module = self._given.whole, self._inside.module

        def results(outputs: Streams) -> Streams:
            with in_place_of([module], lambda *_: outputs):
                return form_of(native(given)).tensors

        alone, truth = self._look.tokens_by_one(lambda: native(given), WIDE)
        return results(alone), results(truth)

    def _forward(self, arguments: Mapping[str, Any]) -> Streams:
        forward: Any = self.made.call.__wrapped__
        return form_of(tuple(forward(**arguments, return_dict=False))).tensors
