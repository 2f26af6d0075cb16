"""`Body`: what computes the calls of a parallelized transformer: its own forward and modules, with split tokens.

Its `Cuts` say where tokens are cut and gathered; attention joins the ranks by the planned strategy, and the blocks of
some families are computed by functions of `seqpar.families` (`blocks.py`).
When it wins: it is how every transformer of diffusers runs on several ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.families._cuts import Boundary, Cuts
from seqpar.families._home import HOME
from seqpar.families._names import FULL, PADDING
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan
from seqpar.transformer.changes import Changes
from seqpar.transformer.exact import Exactly
from seqpar.transformer.foreign import Foreign, own_forward, refuse, refuse_late
from seqpar.transformer.forward import Forward, Ranks
from seqpar.transformer.hooks import Cutter
from seqpar.transformer.installed import Installed
from seqpar.transformer.masks import keys_of
from seqpar.transformer.rows import as_dtype


class Body:
    """Computes a diffusers transformer's forward on all ranks of a mesh's sequence axis, as the plan says.

    The module stays the owner of its weights and is changed by hooks only. cuts: where its tokens are split. fused:
    whether functions of `families` may compute its blocks. ranks: its exchanges, and the tokens of the last
    call. returns_fp32: whether outputs are converted. Raises ValueError, the same on every rank, if the tokens cannot
    be split.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts, fused: bool = False) -> None:
        self.module, self._cuts, self._fused, self.returns_fp32 = module, cuts, fused, False
        self.ranks, self._watch = Ranks(mesh, plan), Changes(module)
        self._looked, self._named, self._theirs = 0, {""}, None
        self._look()
        self._root = Cutter(self.ranks, cuts.places.get("", Boundary()), "its inputs")
        self._installed: Installed | None = Installed(module, cuts, self.ranks, self._watch, fused)

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """Return the transformer's outputs, complete on every rank of the sequence axis.

        arguments: those of the transformer's own forward by their names, without `return_dict`; tensors are complete
        and on the mesh's device, and all values are equal on all ranks of the sequence axis. An argument that is left
        out has its default; there may be `FULL` and `PADDING` (`families._names`), too. The outputs are those
        of `forward(..., return_dict=False)`; the next call may overwrite them. The first call of a kind builds
        exchanges; a later call with tensors of the same shapes and dtypes, the same other values and the same `state()`
        can be captured as a CUDA graph. Raises ValueError, the same on every rank, for arguments that cannot be
        computed.
        """
        self._refuse(arguments)
        self._follow()
        self._rescale(arguments)
        self._refuse_memory()
        now = self.ranks.begin()
        try:
            given = self._unmasked(now, arguments)
            for name, how in self._root.inputs:
                if name in given:
                    given[name] = self._root.value(given[name], how)
            assert self._installed is not None
            with Exactly(self.ranks) if self.ranks.plan.exact else nullcontext(), self._installed.watch.during():
                outputs = tuple(self._forward(**given, return_dict=False))
            return as_dtype(outputs, torch.float32) if self.returns_fp32 else outputs
        finally:
            self.ranks.now = None

    def why_eager(self) -> str | None:
        """Return the reason why no call can be captured as a CUDA graph (it copies from or to the host), or None."""
        return self._cuts.why_eager(self.module)

    def state(self) -> Hashable:
        """Return a key that stays equal while a captured call is valid, after following what was replaced.

        Weights, adapters, attention processors and exchanges are then unchanged. Raises ValueError if the module as it
        is now cannot be computed; another rank may find nothing wrong.
        """
        refuse_late(self.module)
        self._follow()
        count = self._watch.counted
        if count != self._looked:
            self._look()
            self._looked = count
        return self.ranks.keeper.state, self.module.training, count, self._scale()

    def told(self) -> Mapping[str, str]:
        """Return what must be equal on all ranks, as it was at the last `state`, as texts by their names.

        It says what computes, and has the texts of `seqpar.transformer.lora.texts`.
        """
        computation = "by its own modules" if self._installed is None else self._installed.fused.text()
        return {"computation": computation, **self._watch.texts()}

    def version(self) -> Hashable:
        """Return a key that stays equal while the module would compute the same, also by weights written in place."""
        return self.module.training, self._watch.count(), self._watch.values()

    def merged(self) -> Mapping[str, Tensor]:
        """Return the copies of weights with merged adapters that compute blocks, by names that all ranks have."""
        return {} if self._installed is None else self._installed.fused.copies

    def foreign(self) -> Foreign:
        """Return what others have put onto the module, as it was at the last `state`."""
        return self._watch.foreign()

    @property
    def lacks_memory(self) -> bool:
        """Return whether weights with merged adapters did not fit at the last `state`; other ranks may have room."""
        return self._installed is not None and self._installed.fused.lacks_memory

    def end_copies(self) -> None:
        """Compute adapters by their own layers from now on; every rank must call this if one of them lacks memory."""
        assert self._installed is not None
        self._installed.fused.end_copies()
        self._watch.accept()  # weights of other blocks may have become views of one matrix

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        self.ranks.keeper.check()

    def release(self) -> None:
        """Undo what was put onto the module and free the exchanges, on all ranks at the same time.

        The next call builds everything again.
        """
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
        self.ranks.keeper.release()

    def _unmasked(self, now: Forward, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Note the key masks of a call, and return its arguments as the forward takes them."""
        given = dict(arguments)
        full = given.pop(FULL, ())
        now.padding = given.pop(PADDING, 0) if self._cuts.weighed else 0
        for name, stream in self._cuts.masks.items():
            if (mask := given.get(name)) is not None and name not in (*full, *self._cuts.passed):
                now.masks[stream] = keys_of(mask, stream)
                given[name] = mask if name in self._cuts.kept else None
        if set(self._cuts.padding) - set(full):
            now.masks |= self._cuts.key_masks(arguments)
        return {**given, FULL: full} if self._ours else given

    def _follow(self) -> None:
        """Put hooks and attention on the module, also where it changed; ValueError if an attention backend was set."""
        if self._installed is None:
            self._installed = Installed(self.module, self._cuts, self.ranks, self._watch, self._fused)
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

    def _is_diffusers_own(self) -> bool:
        """Return whether the transformer's forward is as diffusers wrote it, so that another one may take its place."""
        changed = any(one.path == "" for one in self._watch.foreign().hooks)
        return not changed and type(self.module).__module__.startswith(HOME)

    def _look(self) -> None:
        """Follow the transformer's own forward, which may be replaced on its class at any time.

        Look, on several ranks, for what does not compute each token by itself: refuse it, or say that it may not.
        """
        if (theirs := own_forward(self.module)) != self._theirs:
            forward = self._cuts.forward(self.module) if self._is_diffusers_own() else None
            self._ours, self._forward = forward is not None, partial(forward, self.module) if forward else theirs
            self._theirs = theirs
        refuse(self.module, self.ranks.mesh, self._cuts.why_not(self.module), self._watch.foreign())
        if self.ranks.axis.size == 1:
            return
        named = self._watch.foreign().named
        if named not in self._named and self.ranks.mesh.is_main:
            print(
                f"seqpar: each rank's tokens alone pass {named}; where that needs all tokens results are wrong: "
                f"seqpar.verify tells",
                flush=True,
            )
        self._named.add(named)

    def _refuse_memory(self) -> None:
        """Raise OutOfMemoryError if copies do not fit, found in the middle of a call, which others compute already."""
        if self.lacks_memory and self.ranks.axis.size > 1:
            raise torch.OutOfMemoryError(
                "got copies of weights with merged adapters that do not fit into the memory of this rank, expected "
                "room for them; from the next call on, adapters are computed by their own layers on all ranks"
            )

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        name = type(self.module).__name__
        for key in self._cuts.bools:
            if (mask := arguments.get(key)) is not None and mask.is_floating_point():
                raise ValueError(
                    f"got a floating {key} for {name}, expected bool: attention adds its numbers to scores"
                )
        for key, reason in self._cuts.refused.items():
            if arguments.get(key) is not None:
                raise ValueError(f"got {key} for {name} on several ranks, expected None: {reason}")
