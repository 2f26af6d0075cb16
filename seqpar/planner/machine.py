"""Describes the devices that a plan is for: their number, the memory of each and the transport between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from seqpar.planner import rates
from seqpar.planner.predict import GIB
from seqpar.transports import _folder


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind with `memory` GiB each (None if unknown).

    transport: the key of the transport's measured times in `Rates.exchange`.
    """

    device: str
    count: int
    transport: str
    memory: float | None


def curve_of(transport: str, device_type: str) -> str:
    """Return the key of a transport's measured times; "auto" stands for the preferred transport."""
    known = _folder.facts(_folder.unasked(device_type)[0] if transport == "auto" else transport).rates
    return known.get(device_type, known["cpu"])


def here(device: torch.device, count: int, transport: str) -> Machine:
    """Return a machine of `count` devices like this one.

    transport: a name, or "auto" for the transport that is preferred on such devices.
    """
    curve = curve_of(transport, device.type)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return Machine(torch.cuda.get_device_name(device), count, curve, memory)
    known = hasattr(os, "sysconf")  # not on Windows
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / count if known else None
    return Machine("CPU", count, curve, memory)


def imagined(device: torch.device, count: int, transport: str) -> Machine:
    """Return a machine of `count` GPUs like this one, or of H200s if there is no GPU."""
    if device.type == "cuda":
        return here(device, count, transport)
    return Machine(rates.H200.device, count, curve_of(transport, "cuda"), rates.H200.memory)
