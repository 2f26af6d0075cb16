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
from collections.abc import Iterator, Mapping, Sequence
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
from seqpar.fidelity.blocks import Compared, Share, watched
from seqpar.fidelity.compare import Error, Place, digest, error, first_unequal
from seqpar.fidelity.conditioning import Conditioning
from seqpar.fidelity.heads import Heads
from seqpar.fidelity.held import held
from seqpar.fidelity.verdict import AFTER, BITS, WHOLE, Measured
from seqpar.fidelity.widened import full_precision, wide, widened
from seqpar.mesh import Mesh
from seqpar.planner.plan import Plan

Results = dict[str, Tensor]
ROOM = 10 * WHOLE  # positions of one call of a step


@dataclass(frozen=True, eq=False)
class Made:
    """A call that a pipeline made, with its results. step, turn: the step of the run, and which of its calls it was."""

    module: Any
    call: Call
    arguments: Form
    results: Any
    step: int
    turn: int

    def place(self, position: int, name: str) -> Place:
        """Return a place of this call."""
        return Place(
            self.step, self.turn * ROOM + position, name if self.turn == 0 else f"{name}, call {self.turn + 1},"
        )


class _Recorder:
    """Takes the place of a transformer's call, and keeps arguments and results."""

    def __init__(self, module: nn.Module, call: Call, made: list[Made]) -> None:
        self._module, self._call, self._made = module, call, made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._call.named(args, kwargs)
        named.pop("return_dict", None)
        given = form_of(named).each(lambda x: plain(x).clone())
        results = self._call(*args, **kwargs)
        kept = form_of(tuple(results.values()) if isinstance(results, Mapping) else tuple(results))
        kept = kept.each(lambda x: x if isinstance(x, Promise) else x.clone())
        self._made.append(Made(self._module, self._call, given, kept, *self._step(given)))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _step(self, given: Form) -> tuple[int, int]:
        """Return step and turn of a call: a step ends where the timestep changes."""
        if not self._made:
            return 0, 0
        last = self._made[-1]
        same = all(torch.equal(x.flatten()[:1], y.flatten()[:1]) for x, y in _timesteps(last.arguments, given))
        return (last.step, last.turn + 1) if same and last.module is self._module else (last.step + 1, 0)


def _timesteps(first: Form, second: Form) -> list[tuple[Tensor, Tensor]]:
    names = [name for name in ("timestep", "t") if name in first.tensors and name in second.tensors]
    return [(first.tensors[name], second.tensors[name]) for name in names]


def mesh_of(target: Any) -> Mesh:
    """Return the mesh of a parallelized pipeline or transformer; ValueError for any other."""
    found = list(transformers_of(target).values())
    for module in found:
        if not isinstance(vars(module).get("forward"), Call):
            raise ValueError(
                f"got a {type(module).__name__} that is not parallelized, expected seqpar.parallelize before verify"
            )
    call: Any = found[0].forward
    return call.mesh


def plan_of(made: Made) -> Plan:
    """Return the plan by which a call was computed."""
    return made.call.body.inside(made.arguments.whole).ranks.plan


def recorded(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> tuple[list[Made], str]:
    """Return the calls that a pipeline makes, or several calls of a transformer, and the digest of the latents.

    steps: of a pipeline's run, unless its arguments say so; its pictures are not decoded. A transformer is called as
    often with the same arguments.
    """
    made, ending = list[Made](), ""
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
    return made, ending


def compare_pipelines(measured: Measured, made: Sequence[Made], ending: str) -> tuple[str, ...]:
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


@contextmanager
def _recording(modules: Any, made: list[Made]) -> Iterator[None]:
    before = [(vars(module), module.forward) for module in modules]
    try:
        for (named, call), module in zip(before, modules, strict=True):
            named["forward"] = _Recorder(module, call, made)
        yield
    finally:
        for named, call in before:
            named["forward"] = call


def measure(made: Sequence[Made]) -> Measured:
    """Return what this rank measures of the calls; every rank must call this at the same time."""
    dtype = dtype_of(made[0].module)
    # some of diffusers' transformers round to fp32 within, also in fp64
    measured = Measured(torch.float32 if dtype == torch.float64 else dtype)
    with torch.inference_mode(False), torch.no_grad():
        looks = [_Look(each) for each in made]
        for each in made:
            each.call.check_delivered()
        for call in {id(each.call): each.call for each in made}.values():
            call.release()  # the transformer's own forward must be free of hooks; the next call makes all again
        for look in looks:
            mesh, place = look.made.call.mesh, look.made.place(WHOLE, "the result")
            measured.compare_references(mesh, place, held(mesh, lambda look=look: look.by_one(measured)))
    return measured


class _Look:
    """A look into one call: blocks of the ranks now, those of one rank by `by_one`, after all looks were made."""

    def __init__(self, made: Made) -> None:
        self.made, mesh = made, made.call.mesh
        self._given = made.call.rank_0s(dict(made.arguments.whole))
        self._inside: Inside = made.call.body.inside(self._given.whole)
        self._ours = made.results.each(plain)  # a promise is computed now, on all ranks
        self._compared = Compared(Share({}, mesh.sequence.size, mesh.sequence.rank))
        ranks, own, heads = self._inside.ranks, self._inside.alone is None, Heads(self._compared.count)
        attend = ranks.attend
        try:
            vars(ranks)["attend"] = lambda *kind, **masked: heads.watch(attend(*kind, **masked))
            with watched([self._inside.module], self._compared.keep):
                made.call.body(self._given.whole)
        finally:
            del vars(ranks)["attend"]
        self._wrong = [*heads.wrong(mesh.sequence, self._compared.names())]
        self._compared.share = Share(dict(ranks.last.lengths), ranks.axis.size, ranks.axis.rank, ordered=not own)

    def by_one(self, measured: Measured) -> Results:
        """Compute the call on this rank alone, in fp32 (fp64 for fp64) and in the model's data type, and compare.

        Returns the results in the wider type.
        """
        made, dtype = self.made, torch.promote_types(measured.dtype, torch.float32)
        given, ours = self._given.each(lambda x: wide(x, dtype)), dict(self._ours.tensors)
        truth, alone = self._by_own(given, dtype) if self._inside.alone is None else self._by_native(given, dtype)
        self._add_blocks(measured)
        measured.add(made.place(WHOLE, "the result"), *_errors(ours, alone, truth))
        measured.bits.append(digest(ours))
        if self._inside.alone is not None:  # the native model is right, too: with diffusers' own conditioning
            with self._wide(dtype):
                truth = self._forward(given)
            alone = self._forward(self._given)
            measured.add(made.place(WHOLE + 1, "the result, by diffusers' own forward"), *_errors(ours, alone, truth))
        return truth

    def _by_own(self, given: Form, dtype: torch.dtype) -> tuple[Results, Results]:
        """Return the results of the transformer's own forward in the wider type, and in its own."""
        conditioning, module = Conditioning(self.made.module), self._inside.module
        with watched([module], lambda name, x: None), conditioning.recorded():
            self._forward(self._given)
        with watched([module], self._compared.truth), self._wide(dtype), conditioning.replayed(dtype):
            truth = self._forward(given)
        with watched([module], self._compared.plain):
            return truth, self._forward(self._given)

    def _by_native(self, given: Form, dtype: torch.dtype) -> tuple[Results, Results]:
        """Return the results of the native model on one rank in the wider type, and in its own."""
        module, alone = self._inside.module, self._inside.alone
        assert alone is not None
        with watched([module], self._compared.truth), self._wide(dtype):
            truth = dict(form_of(alone(given.whole)).tensors)
        with watched([module], self._compared.plain):
            return truth, dict(form_of(alone(self._given.whole)).tensors)

    @contextmanager
    def _wide(self, dtype: torch.dtype) -> Iterator[None]:
        with full_precision(), widened([self.made.module, self._inside.module], dtype):
            yield

    def _forward(self, given: Form) -> Results:
        forward: Any = self.made.call.__wrapped__
        return dict(form_of(tuple(forward(**given.whole, return_dict=False))).tensors)

    def _add_blocks(self, measured: Measured) -> None:
        single = Measured(measured.dtype)
        single.add_blocks(self.made.step, self._compared)
        for place, mine in single.mine.items():
            measured.add(self.made.place(place.position, place.name), mine, single.alone[place])
        measured.found += single.found
        for position, name, reason in self._wrong:
            measured.find(self.made.place(position, name), reason)
        measured.blocks = max(measured.blocks, single.blocks)


def _errors(ours: Results, alone: Results, truth: Results) -> tuple[Error, Error]:
    return error(ours, truth), error(alone, truth)
