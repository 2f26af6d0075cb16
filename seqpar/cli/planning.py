"""The launcher's side of the planner: the user's flags and a description of the machine, handed to `seqpar.planner`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

import seqpar.attention
from seqpar.planner.machine import Machine, here, imagined
from seqpar.planner.plan import Plan, make, parse_mesh, rank, transport_between, work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.search import Ranking, Wish
from seqpar.ranks.mesh import Mesh
from seqpar.types.facts import Layout
from seqpar.types.protocols import SequenceModel, plugin
from seqpar.weights.find import Blueprint

__all__ = ["Machine", "asked", "here", "imagined", "ours", "pick", "planned", "shared_plan", "tables"]


def ours(ranks: Mesh, transport: str) -> Machine:
    """Describe the machine of these processes. Every rank must call this at the same time."""
    if transport == "auto":
        transport = transport_between(ranks.world, ranks.device).name
    return here(ranks.device, ranks.world.size, transport)


def asked(mesh: str, strategy: str, exact: bool, local: str = "auto", transport: str = "auto") -> Wish:
    """Parse the flags into what the planner may choose; `ValueError` for an unknown --mesh or --strategy."""
    if strategy != "auto":
        plugin(seqpar.attention, strategy, "strategy")
    aim, axes = parse_mesh(mesh)
    return Wish(aim, axes, strategy, exact, local, transport)


def planned(load: Load, model: Blueprint, machine: Machine, wish: Wish, dtype: torch.dtype) -> Ranking:
    """Rank the layouts of this machine; `ValueError` if there are none."""
    return rank(work_of(model.config), load, machine, wish, dtype)


def shared_plan(load: Load, model: Blueprint, ranks: Mesh, wish: Wish, dtype: torch.dtype) -> Plan:
    """Make the plan for the running processes; it is the same on all ranks."""
    return make(work_of(model.config), load, dtype, ranks, wish)


def tables(
    load: Load,
    model: Blueprint,
    machines: Sequence[Machine],
    wish: Wish,
    dtype: torch.dtype,
    after: Callable[[Ranking, Machine], str | None] = lambda ranking, machine: None,
) -> str:
    """Return what a dry run prints for each machine: the plan, all layouts and a step's costs, or why none fits.

    after: returns a further line for a machine, or None.
    """
    parts = []
    for machine in machines:
        try:
            ranking = planned(load, model, machine, wish, dtype)
            more = after(ranking, machine)
            head = f"{machine.count} x {machine.device}: {ranking}"
            parts.append("\n".join([head, ranking.table(), *([more] if more else [])]))
        except ValueError as error:
            if len(machines) == 1:
                raise
            parts.append(f"{machine.count} x {machine.device}: {error}")
    return "\n\n".join(parts)


def pick(model: SequenceModel, tokens: int, steps: int, ranks: Mesh, transport: str) -> Layout:
    """Return the layout that the launcher would choose for one guided picture; it is the same on every rank."""
    config, parameters = model.config, list(model.parameters())
    dtype, latent = parameters[0].dtype, config.in_channels * config.patch_size**2
    load = Load(1, tokens, True, steps, dtype.itemsize, sum(x.numel() for x in parameters), latent, 2, TABLE_BYTES)
    blueprint = Blueprint("", sys.modules[type(model).__module__], config)
    return shared_plan(load, blueprint, ranks, Wish(transport=transport), dtype).layout
