"""The devices that a plan is for: how many there are, how much memory each has, and how they exchange."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

import seqpar.transports
from seqpar.mesh import Mesh
from seqpar.planner import rates
from seqpar.protocols import plugin, plugins
from seqpar.transports._contract import Facts

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind with `memory` GiB each (None: not known).

    transport: how they exchange, as the key of its measured times in `Rates.exchange`.
    """

    device: str
    count: int
    transport: str
    memory: float | None


def transports(device_type: str) -> dict[str, Facts]:
    """Name -> facts of the transports that are chosen unasked on such devices, the preferred one first."""
    found = {name: plugin(seqpar.transports, name, "transport").FACTS for name in plugins(seqpar.transports)}
    unasked = {name: facts for name, facts in found.items() if device_type in facts.unasked}
    return dict(sorted(unasked.items(), key=lambda item: -item[1].preference))


def curve_of(transport: str, device_type: str) -> str:
    """The key of a transport's measured times; of the preferred one where "auto"."""
    if transport == "auto":
        return next(iter(transports(device_type).values())).rates[device_type]
    facts: Facts = plugin(seqpar.transports, transport, "transport").FACTS
    if device_type not in facts.rates:
        known = ", ".join(facts.rates)
        raise ValueError(f"got transport {transport!r} on {device_type}, expected a device of {known} for it")
    return facts.rates[device_type]


def here(device: torch.device, count: int, transport: str) -> Machine:
    """Devices like this one. transport: a name, or "auto" for the one that is preferred on such devices."""
    curve = curve_of(transport, device.type)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return Machine(torch.cuda.get_device_name(device), count, curve, memory)
    known = hasattr(os, "sysconf")  # not on Windows
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / count if known else None
    return Machine("CPU", count, curve, memory)


def ours(ranks: Mesh, transport: str) -> Machine:
    """The devices of these ranks; the name of a transport that works between them."""
    return here(ranks.device, ranks.world.size, transport)


def imagined(device: torch.device, count: int, transport: str) -> Machine:
    """GPUs like this one, or H200s where there is no GPU."""
    if device.type == "cuda":
        return here(device, count, transport)
    return Machine(rates.H200.device, count, curve_of(transport, "cuda"), rates.H200.memory)
