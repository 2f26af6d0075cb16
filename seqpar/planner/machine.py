"""Describes the devices that a plan is for: their number, the memory of each and the transport between them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from itertools import groupby

import torch

from seqpar.mesh.mesh import Mesh
from seqpar.planner import rates
from seqpar.planner.predict import GIB
from seqpar.transports import _contract


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind with `memory` GiB each (None if unknown).

    transport: the key of the transport's measured times in `Rates.exchange`. host: see `Rates`.
    """

    device: str
    count: int
    transport: str
    memory: float | None
    host: int | None = None

    def __str__(self) -> str:
        hosts = "" if self.host is None else f", {self.host} on each host"
        return f"{self.count} x {self.device}{hosts}"


def curve_of(transport: str, device_type: str) -> str:
    """Return the key of a transport's measured times; "auto" stands for the preferred transport."""
    known = _contract.facts(_contract.unasked(device_type)[0] if transport == "auto" else transport).rates
    return known.get(device_type, known["cpu"])


def ranks_of_a_host(mesh: Mesh) -> int | None:
    """Return the number of ranks on each of several hosts, None for one; every rank must call this at the same time.

    1 if hosts have different numbers of ranks, or ranks that are no neighbours: every exchange then crosses hosts.
    """
    names = mesh.collect(socket.gethostname(), str)
    runs = [len(list(run)) for _, run in groupby(names)]
    if len(runs) == 1:
        return None
    return runs[0] if len(runs) == len(set(names)) and len(set(runs)) == 1 else 1


def here(device: torch.device, count: int, transport: str, host: int | None = None) -> Machine:
    """Return a machine of `count` devices like this one.

    transport: a name, or "auto" for the transport that is preferred on such devices. host: see `Rates`.
    """
    curve = curve_of(transport, device.type)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return Machine(torch.cuda.get_device_name(device), count, curve, memory, host)
    known = hasattr(os, "sysconf")  # not on Windows
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / (host or count) if known else None
    return Machine("CPU", count, curve, memory, host)


def imagined(device: torch.device, count: int, transport: str, hosts: int = 1) -> Machine:
    """Return machines with `count` GPUs like this one's, or of H200s if there is no GPU, on so many hosts.

    Raises ValueError for a number of GPUs that hosts cannot share evenly.
    """
    if hosts < 1 or count % hosts:
        raise ValueError(f"got --hosts {hosts} for {count} GPUs, expected hosts with equally many")
    host = None if hosts == 1 else count // hosts
    if transport == "auto" and host is not None:  # what hosts share no memory for
        transport = _contract.unasked("cuda")[-1]
    if device.type == "cuda":
        return here(device, count, transport, host)
    return Machine(rates.H200.device, count, curve_of(transport, "cuda"), rates.H200.memory, host)
