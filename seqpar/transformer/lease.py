"""What a call of `parallelize` makes for its transformers: a mesh, process groups, and what release puts back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.watch import Watch
from seqpar.planner.plan import Plan
from seqpar.planner.settled import settled
from seqpar.transformer.call import Call
from seqpar.transformer.foreign import BEFORE

BACKENDS = "cpu:gloo,cuda:nccl"  # of the process group that is made where torch's default one has only NCCL


class Lease:
    """What was made for the transformers of a call, which the release of the last one frees.

    mesh: the mesh of the calls. groups: the process groups that were made for it; not those of a caller's mesh.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[dist.ProcessGroup]) -> None:
        self.mesh, self._groups = mesh, groups
        self.ends = ExitStack()  # what is closed when the last transformer is released
        self._users = 0
        self._collected = finalize(self, _drop, groups, mesh.device.type, mesh.world.watch)
        self._collected.atexit = False

    def join(self, module: nn.Module, names: Sequence[str], call: Call) -> Before:
        """Count a transformer, and return its call and what its release puts back of the attributes of these names."""
        self._users += 1
        return Before({name: x for name, x in vars(module).items() if name in names}, self, call)

    def leave(self) -> None:
        """Count a transformer's release; every rank must call this at the same time."""
        self._users = max(0, self._users - 1)  # it is 0 before anyone has joined
        if self._users:
            return
        self.ends.close()
        if self._groups and self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)  # nothing of a group may run when it ends
        self._collected.detach()
        for group in self._groups:
            _destroy(group)


@dataclass(frozen=True)
class Before:
    """A transformer before `parallelize`: the attributes that were set on the object itself, its call and lease.

    The call is read here and not as `module.forward`, because users wrap that. ends: what takes ours off the module.
    """

    attributes: Mapping[str, Any]
    lease: Lease
    call: Call
    ends: ExitStack = field(default_factory=ExitStack)


def call_of(module: nn.Module) -> Call | None:
    """Return the call of a transformer, or None if it is not parallelized."""
    before: Before | None = vars(module).get(BEFORE)
    return None if before is None else before.call


def leased(plan: Plan, mesh: Mesh | None) -> Lease:
    """Make the mesh of a plan, or take the caller's, and return what is made for it; see `settled` for its error."""
    _destroy_dropped(mesh or Mesh.joined())
    made = _with_host_group(mesh or Mesh.from_env(*plan.sizes.values()))
    lease = Lease(made, _new_groups(made, mesh))
    try:
        settled(plan, made)
    except ValueError:
        lease.leave()
        raise
    return lease


def _drop(groups: Sequence[dist.ProcessGroup], device: str, watch: Watch | None) -> None:
    """Destroy the groups of transformers that were collected without a release, at different times on the ranks.

    Destroying a group of NCCL waits for its other ranks, which may be waiting for this one, so it is left to the next
    `parallelize`. So is any group that another thread collects: the watch's thread must not wait.
    """
    at_once = device == "cpu" and threading.current_thread() is threading.main_thread()
    for group in groups:
        if at_once:
            _destroy(group)
        elif watch is not None:
            watch.dropped[group.group_name] = group


def _destroy_dropped(mesh: Mesh) -> None:
    """Destroy the groups that all of their ranks have dropped; every rank must call this at the same time."""
    if mesh.world.size == 1 or mesh.world.watch is None:
        return
    dropped, ranks = mesh.world.watch.dropped, mesh.world.ranks
    every = dict(zip(ranks, mesh.collect(sorted(dropped), list[str]), strict=True))
    for name, group in sorted(dropped.items()):  # in one order on all ranks
        if all(name in every.get(rank, ()) for rank in dist.get_process_group_ranks(group)):
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            _destroy(dropped.pop(name))


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # torch has destroyed it with all others
        dist.destroy_process_group(group)


def _with_host_group(mesh: Mesh) -> Mesh:
    """Return a mesh whose ranks can compare small numbers on the host, where the process group has only NCCL.

    Without it, the comparison that each call begins with would wait for the GPU.
    """
    if not _lacks_host(mesh):
        return mesh
    group: Any = dist.new_group(backend=BACKENDS)
    return replace(mesh, world=replace(mesh.world, group=group))


def _lacks_host(mesh: Mesh) -> bool:
    if mesh.world.size == 1 or mesh.device.type == "cpu":
        return False
    return "cpu:" not in dist.get_backend_config(mesh.world.group)


def _new_groups(mesh: Mesh, callers: Mesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of a mesh that were made for it: not torch's default one, nor those of a caller."""
    kept = [dist.group.WORLD, *((axis.group for axis in _axes(callers)) if callers else ())]
    every = {id(axis.group): axis.group for axis in _axes(mesh) if axis.group is not None}
    return [group for group in every.values() if not any(group is other for other in kept)]


def _axes(mesh: Mesh) -> tuple[Axis, ...]:
    return mesh.data, mesh.cfg, mesh.ring, mesh.ulysses, mesh.sequence, mesh.replica, mesh.world
