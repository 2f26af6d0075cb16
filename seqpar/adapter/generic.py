"""The generic body: a diffusers transformer's own forward and modules, with its tokens split over ranks.

Its plan (`cuts.py`) says where tokens are cut and gathered; attention joins the ranks by the planned strategy.
When it wins: for every transformer that this package has no model of its own for, and for weights or options that the
model of its own does not take. Where there is such a model, its fused kernels are faster.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.adapter import cuts as plans
from seqpar.adapter.cuts import Cuts, Place
from seqpar.adapter.forward import Ranks
from seqpar.adapter.hooks import Installed, cutter
from seqpar.adapter.masks import key_rows
from seqpar.mesh import Mesh
from seqpar.planner.plan import Plan


def build(module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts | Mapping[str, Any] | None = None) -> Generic:
    """Return the body of a diffusers transformer, which runs on the sequence axis of a mesh as the plan says.

    cuts: the transformer's plan for its tokens, in our form or diffusers'; None takes that of our table or the
    transformer's own. Raises ValueError, the same on every rank, if there is none or if it does not fit.
    """
    return Generic(module, mesh, plan, plans.of(module, cuts))


class Generic:
    """A `seqpar.adapter.body.Body`; the module stays the owner of its weights and is changed by hooks only."""

    def __init__(self, module: nn.Module, mesh: Mesh, plan: Plan, cuts: Cuts) -> None:
        self._module, self._cuts = module, cuts
        self._forward = module.forward  # taken now, because the caller may put its own in this place
        self._ranks = Ranks(mesh, plan)
        self._cutter = cutter(self._ranks, self._root)
        self._installed: Installed | None = Installed(module, cuts, self._ranks)

    @property
    def _root(self) -> Place:
        return self._cuts.places.get("", Place())

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """See `seqpar.adapter.body.Body`."""
        self._refuse(arguments)
        if self._installed is None:
            self._installed = Installed(self._module, self._cuts, self._ranks)
        self._installed.refresh()
        self._ranks.abandon()
        now = self._ranks.begin()
        try:
            given = dict(arguments)
            for name, stream in self._cuts.masks.items():
                if (mask := given.get(name)) is not None:
                    now.masks[stream], given[name] = key_rows(mask), None
            for name, how in self._root.inputs.items():
                if name in given:
                    given[name] = self._cutter.cut_value(given[name], how)
            return tuple(self._forward(**given, return_dict=False))
        finally:
            self._ranks.now = None

    def state(self) -> Hashable:
        """See `seqpar.adapter.body.Body`."""
        weights = tuple(weight.data_ptr() for weight in self._module.parameters())
        adapters = tuple(found for one in self._module.modules() if (found := _adapter(one)) is not None)
        return self._ranks.releases, self._module.training, weights, adapters

    def check_delivered(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        self._ranks.check()

    def release(self) -> None:
        """See `seqpar.adapter.body.Body`."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None
        self._ranks.release()

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        name = type(self._module).__name__
        for key, reason in self._cuts.refused.items():
            if arguments.get(key) is not None:
                raise ValueError(f"got {key} for {name} on several ranks, expected None: {reason}")
        if getattr(self._module, "is_cache_enabled", False):
            raise ValueError(
                f"got a {name} with a cache between steps, expected none: each rank would decide by its own tokens "
                f"what to compute again; call disable_cache() first"
            )


def _adapter(module: Any) -> Hashable | None:
    """Return the state of an adapter layer of peft (which are active, merged, and their scales); None for others."""
    if not hasattr(module, "active_adapters") or not hasattr(module, "scaling"):
        return None
    scales = tuple(sorted((name, float(scale)) for name, scale in module.scaling.items()))
    return tuple(module.active_adapters), tuple(module.merged_adapters), module.disable_adapters, scales
