"""The launcher's side of the planner: a model, the user's words and the devices there are -> a plan, or tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import seqpar.attention
from seqpar.mesh import Mesh
from seqpar.planner import rates
from seqpar.planner.choose import parse_mesh, transport_between
from seqpar.planner.costs import Layout
from seqpar.planner.predict import GIB, Load
from seqpar.planner.search import Plan, Wish, plan
from seqpar.protocols import SequenceModel, plugin
from seqpar.sampling.segment import TABLE_BYTES
from seqpar.transports import _folder
from seqpar.weights.find import Blueprint


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind with `memory` GiB each (None: not known), and how they exchange."""

    device: str
    count: int
    transport: str
    memory: float | None


def here(device: torch.device, count: int, transport: str) -> Machine:
    """Devices like this one; transport as the launcher takes it: "auto" is the best for such devices."""
    moved = _rates_of(transport, device.type)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return Machine(torch.cuda.get_device_name(device), count, moved, memory)
    known = hasattr(os, "sysconf")  # not on Windows
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / count if known else None
    return Machine("CPU", count, moved, memory)


def ours(ranks: Mesh, transport: str) -> Machine:
    """The devices there are. Every rank asks at the same time."""
    if transport == "auto":
        transport = transport_between(ranks.world, ranks.device).name
    return here(ranks.device, ranks.world.size, transport)


def imagined(device: torch.device, count: int, transport: str) -> Machine:
    """GPUs like this one, or H200s where there is no GPU."""
    h200 = Machine(rates.H200.device, count, _rates_of(transport, "cuda"), rates.H200.memory)
    return here(device, count, transport) if device.type == "cuda" else h200


def _rates_of(transport: str, device_type: str) -> str:
    """The key of a transport's measured times between such devices."""
    name = _folder.unasked(device_type)[0] if transport == "auto" else transport
    known = _folder.facts(name).rates
    return known.get(device_type, known["cpu"])


def make_plan(
    load: Load, model: Blueprint, machine: Machine, mesh: str, strategy: str, dtype: torch.dtype, exact: bool = False
) -> Plan:
    """The plan; `ValueError` for a --mesh or --strategy that is none, and where nothing fits."""
    return planned(load, model, machine, *asked(machine, mesh, strategy, dtype, exact))


def asked(machine: Machine, mesh: str, strategy: str, dtype: torch.dtype, exact: bool) -> tuple[Wish, rates.Rates]:
    """What the user's words come to, and what the machine reaches; `ValueError` for what would be wrong anywhere."""
    if strategy != "auto":
        plugin(seqpar.attention, strategy, "strategy")
    wish = Wish(*parse_mesh(mesh), strategy, exact)
    return wish, rates.load(machine.device, machine.count, str(dtype).removeprefix("torch."))


def planned(load: Load, model: Blueprint, machine: Machine, wish: Wish, found: rates.Rates) -> Plan:
    """The plan of this machine; `ValueError` where there is none."""
    if machine.count > 1 and machine.transport not in found.exchange:
        known = ", ".join(found.exchange)
        raise ValueError(
            f"got transport {machine.transport}, of which {found.source} know nothing ({known} only); measure it "
            f"with launch/bench.py rates, or use another transport"
        )
    work = model.module.work(model.config)
    return plan(work, load, machine.count, wish, found, machine.transport, machine.memory)


def shared_plan(
    load: Load, model: Blueprint, ranks: Mesh, mesh: str, strategy: str, transport: str, dtype: torch.dtype,
    exact: bool = False,
) -> Plan:  # fmt: skip
    """The plan for the processes there are. Rank 0's rates decide, so that all ranks have the same."""
    machine = ours(ranks, transport)
    return ranks.share(ranks.together(lambda: make_plan(load, model, machine, mesh, strategy, dtype, exact)))


def tables(load: Load, model: Blueprint, machines: Sequence[Machine], mesh: str, strategy: str,
           dtype: torch.dtype, exact: bool) -> str:  # fmt: skip
    """What --dry-run prints: for each machine the plan and all layouts; why not, where there is none."""
    parts = []
    # first for all: what is wrong for all of them is an error, not a row
    words = [asked(machine, mesh, strategy, dtype, exact) for machine in machines]
    for machine, (wish, found) in zip(machines, words, strict=True):
        try:
            made = planned(load, model, machine, wish, found)
            parts.append(f"{machine.count} x {machine.device}: {made}\n{made.table()}")
        except ValueError as error:
            if len(machines) == 1:
                raise
            parts.append(f"{machine.count} x {machine.device}: {error}")
    return "\n\n".join(parts)


def pick(model: SequenceModel, tokens: int, steps: int, ranks: Mesh, transport: str) -> Layout:
    """What the launcher would take for one guided picture of so many tokens; the same on every rank."""
    config, parameters = model.config, list(model.parameters())
    dtype, latent = parameters[0].dtype, config.in_channels * config.patch_size**2
    load = Load(1, tokens, True, steps, dtype.itemsize, sum(x.numel() for x in parameters), latent, 2, TABLE_BYTES)
    blueprint = Blueprint("", sys.modules[type(model).__module__], config)
    return shared_plan(load, blueprint, ranks, "auto", "auto", transport, dtype).best
