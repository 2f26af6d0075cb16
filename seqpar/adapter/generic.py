"""The generic body: a diffusers transformer's own forward and modules, with its tokens split over ranks.

Its plan (`cuts.py`) says where tokens are cut and gathered; attention joins the ranks by the planned strategy.
When it wins: for every transformer that this package has no model of its own for, and for weights or options that the
model of its own does not take. Where there is such a model, its fused kernels are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.adapter.body import Inside
from seqpar.adapter.changes import Changes
from seqpar.adapter.cuts import Boundary, Cuts
from seqpar.adapter.exact import Exactly
from seqpar.adapter.foreign import Foreign, refuse_split
from seqpar.adapter.forward import Ranks
from seqpar.adapter.hooks import Cutter
from seqpar.adapter.installed import Installed
from seqpar.adapter.masks import FULL, key_rows
from seqpar.adapter.table import cuts_of
from seqpar.planner.plan import Plan
from seqpar.ranks.mesh import Mesh


def build(
    module: nn.Module,
    mesh: Mesh,
    plan: Plan,
    cuts: Cuts | Mapping[str, Any] | None = None,
    forward: Callable[..., Any] | None = None,
    fused: bool = False,
) -> Generic:
    """Return the body of a diffusers transformer, which runs on the sequence axis of a mesh as the plan says.

    cuts: the transformer's plan for its tokens, in our form or diffusers'; None takes that of our table or the
    transformer's own. forward: the transformer's own forward, if another is in its place. fused: whether functions of
    `seqpar.blocks` may compute its blocks. Raises ValueError, the same
    on every rank, if there is no plan, if it does not fit, or if the tokens cannot be split.
    """
    return Generic(module, mesh, plan, cuts_of(module, cuts), forward, fused)


class Generic:
    """A `seqpar.adapter.body.Body`; the module stays the owner of its weights and is changed by hooks only."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        plan: Plan,
        cuts: Cuts,
        forward: Callable[..., Any] | None = None,
        fused: bool = False,
    ) -> None:
        self._module, self._cuts, self._fused = module, cuts, fused
        self._forward = forward or module.forward  # taken now, because the caller may put its own in this place
        self._ranks, self._watch = Ranks(mesh, plan), Changes(module)
        self._looked, self._named = 0, {""}
        self._look()
        self._root = Cutter(self._ranks, cuts.places.get("", Boundary()), "its inputs")
        self._installed: Installed | None = Installed(module, cuts, self._ranks, self._watch, fused)

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """See `seqpar.adapter.body.Body`."""
        self._refuse(arguments)
        self._follow()
        self._rescale(arguments)
        if self.lacks_memory and self._ranks.axis.size > 1:  # found in the middle of a call; others compute it already
            raise torch.OutOfMemoryError(
                "got copies of weights with merged adapters that do not fit into the memory of this rank, expected "
                "room for them; from the next call on, adapters are computed by their own layers on all ranks"
            )
        now = self._ranks.begin()
        try:
            given = dict(arguments)
            full = given.pop(FULL, ())
            for name, stream in self._cuts.masks.items():
                if (mask := given.get(name)) is not None and name not in full:
                    now.masks[stream] = key_rows(mask, len(mask)) != 0
                    given[name] = mask if name in self._cuts.kept else None
            for name, which in self._root.inputs:
                if name in given:
                    given[name] = self._root.value(given[name], which)
            with Exactly(self._ranks) if self._ranks.plan.exact else nullcontext():
                return tuple(self._forward(**given, return_dict=False))
        finally:
            self._ranks.now = None

    def why_eager(self) -> str | None:
        """See `seqpar.adapter.body.Body`."""
        return self._cuts.why_eager(self._module)

    def state(self) -> Hashable:
        """See `seqpar.adapter.body.Body`; this also follows processors and layers that were replaced."""
        self._follow()
        count = self._watch.counted
        if count != self._looked:
            self._look()
            self._looked = count
        return self._ranks.keeper.state, self._module.training, count, self._scale()

    def told(self) -> Mapping[str, str]:
        """See `seqpar.adapter.body.Body`."""
        computation = "by its own modules" if self._installed is None else self._installed.fused.text()
        return {"computation": computation, **self._watch.texts()}

    def version(self) -> Hashable:
        """See `seqpar.adapter.body.Body`."""
        return self._module.training, self._watch.count(), self._watch.values()

    def foreign(self) -> Foreign:
        """See `seqpar.adapter.body.Body`."""
        return self._watch.foreign()

    def inside(self, arguments: Mapping[str, Any]) -> Inside:
        """See `seqpar.adapter.body.Body`."""
        return Inside(self._module, self._ranks)

    @property
    def lacks_memory(self) -> bool:
        """See `seqpar.adapter.body.Body`."""
        return self._installed is not None and self._installed.fused.lacks_memory

    def end_copies(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        assert self._installed is not None
        self._installed.fused.end_copies()
        self._watch.accept()  # weights of other blocks may have become views of one matrix

    def check_delivered(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        self._ranks.keeper.check()

    def release(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
        self._ranks.keeper.release()

    def _follow(self) -> None:
        """Put hooks and attention on the module, also where it changed; ValueError if an attention backend was set."""
        if self._installed is None:
            self._installed = Installed(self._module, self._cuts, self._ranks, self._watch, self._fused)
        self._installed.refresh()

    def _rescale(self, arguments: Mapping[str, Any]) -> None:
        """Bring merged adapters to the scale of a call, by which diffusers multiplies those of all adapters."""
        assert self._installed is not None
        options = (arguments.get(name) or {} for name in ("joint_attention_kwargs", "attention_kwargs"))
        scale = next((one["scale"] for one in options if one.get("scale") is not None), 1.0)
        self._installed.fused.rescale(scale)

    def _scale(self) -> float | None:
        """Return the scale at which adapters are merged, or None."""
        fused = None if self._installed is None else self._installed.fused
        return fused.scale if fused is not None and fused.merged else None

    def _look(self) -> None:
        """Look, on several ranks, for what does not compute each token by itself: refuse it, or say that it may not."""
        parts, reason = self._ranks.axis.size, self._cuts.why_not(self._module)
        if self._ranks.plan.exact and any(one._compiled_call_impl is not None for one in self._module.modules()):
            raise ValueError(
                f"got {type(self._module).__name__} with compiled blocks in exact mode, expected plain ones: compilers "
                f"choose the arithmetic of a row by the number of rows; leave compile_repeated_blocks() out"
            )
        if parts == 1:
            return
        if reason is not None:
            raise ValueError(
                f"got {type(self._module).__name__} on {parts} ranks that split its tokens, expected one: {reason}; "
                f"use cfg= or data= ranks instead"
            )
        refuse_split(self._module, self._watch.foreign())
        named = self._watch.foreign().named
        if named not in self._named and self._ranks.mesh.is_main:
            print(
                f"seqpar: each rank's tokens alone pass {named}; where that needs all tokens results are wrong: "
                f"seqpar.verify tells",
                flush=True,
            )
        self._named.add(named)

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        name = type(self._module).__name__
        for key, reason in self._cuts.refused.items():
            if arguments.get(key) is not None:
                raise ValueError(f"got {key} for {name} on several ranks, expected None: {reason}")
