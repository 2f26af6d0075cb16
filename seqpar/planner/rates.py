"""A machine: its devices, its rates of matrix products, attention, copies and exchanges, and the cache file of these.

`launch/bench.py rates` measures them once per machine and writes them to the user's cache. Where nothing was measured,
the planner uses committed defaults; a printed plan names the source of its rates (`Rates.source`).
"""

from __future__ import annotations

import os
import re
import socket
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import groupby, pairwise
from math import exp, log
from pathlib import Path
from uuid import uuid4

import msgspec
import torch

from seqpar.mesh.mesh import Mesh
from seqpar.transports import _contract

GIB = 1 << 30
Curve = tuple[tuple[float, float], ...]
"""Measured points (x, y) in ascending order of x."""


@dataclass(frozen=True)
class Rates:
    """The measured rates of a machine with one dtype.

    gemm: elements of the product's output -> TFLOP/s. weights: TB/s at which a product of few rows reads its matrix.
    attention: head dim -> (FLOPs of a call -> TFLOP/s). copy: TB/s, counting bytes read and written. kernel_us: the
    fixed us of an elementwise kernel, without its bytes. exchange: transport -> (bytes that the busiest rank sends ->
    us); `BETWEEN` is that of ranks on several hosts. memory: GiB of one device (None if unknown). host: number of ranks
    on each of several hosts, None on one.
    """

    device: str
    dtype: str
    source: str
    gemm: Curve
    weights: float
    attention: Mapping[int, Curve]
    copy: float
    kernel_us: float
    exchange: Mapping[str, Curve]
    memory: float | None = None
    host: int | None = None

    @property
    def ridge(self) -> float:
        """The FLOPs per byte above which arithmetic, not memory, bounds a GEMM."""
        return self.gemm[-1][1] / self.weights

    def links(self, transport: str) -> float:
        sent, us = self.exchange[transport][-1]
        return sent / us / 1e3

    def crosses(self, ranks: int) -> bool:
        """Whether a group of so many neighbouring ranks is on several hosts."""
        return self.host is not None and self.host % ranks != 0


def rate_at(curve: Curve, x: float) -> float:
    """The rate at x, interpolated linearly in the logarithms of both coordinates.

    Below the first point the time is constant; above the last point the rate is constant.
    """
    if x <= curve[0][0]:
        return curve[0][1] * x / curve[0][0]
    if x >= curve[-1][0]:
        return curve[-1][1]
    above = bisect_left(curve, (x,))
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    return exp(log(y0) + (log(y1) - log(y0)) * log(x / x0) / log(x1 / x0))


def time_at(curve: Curve, x: float) -> float:
    """The time at x, interpolated linearly; constant below the first point, with the last slope above."""
    if x <= curve[0][0]:
        return curve[0][1]
    if len(curve) == 1:
        return curve[0][1] * x / curve[0][0]
    above = min(max(1, bisect_left(curve, (x,))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    if x > x1:  # a noisy last point must not make more bytes take less time
        return y1 + max(0.0, y1 - y0) * (x - x1) / (x1 - x0)
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# Defaults ------------------------------------------------------------------------------------------------------

_MIB = 1 << 20
BETWEEN = "between hosts"
# Between hosts nothing is measured: a network of 400 Gb/s for each GPU is assumed, of which 40 GB/s arrive.
# 4 x H200, torch 2.11.0+cu130, NCCL 2.28.9, 2026-11-20, under sustained load where there is a choice. Products:
# 4096 -> 4096 at 128 to 8192 rows, 4096 -> 12288 at 8192. Weights: 4096 -> 12288 and -> 22016 at 128 rows. Attention:
# flash-attn-4 at head dims 64 and 128, cuDNN at 72; its two largest points are what the steps of
# docs/benchmarks/2026-11-20-h200-engine.md leave to attention, and small calls of 64 and 72 are those of 128.
# Exchanges: four ranks in a CUDA graph; each holds 0.25 to 256 MiB and sends three quarters of it.
H200 = Rates(
    device="NVIDIA H200",
    dtype="bfloat16",
    source="defaults of an H200",
    gemm=((0.524e6, 306), (2.10e6, 597), (8.39e6, 660), (33.6e6, 663), (100.7e6, 670)),
    weights=3.4,
    attention={
        64: ((0.537e9, 66), (2.15e9, 243), (206e9, 547)),
        72: ((0.537e9, 66), (2.15e9, 243), (9.66e9, 282), (155e9, 328), (2470e9, 347)),
        128: ((0.537e9, 66), (2.15e9, 243), (137e9, 695), (2200e9, 697)),
    },
    copy=4.28,
    kernel_us=3.0,
    exchange={
        "nccl": (
            (0.1875 * _MIB, 12.8),
            (0.75 * _MIB, 16.1),
            (3 * _MIB, 24.4),
            (12 * _MIB, 64.7),
            (48 * _MIB, 188),
            (192 * _MIB, 676),
        ),
        "peer": ((0.1875 * _MIB, 6.0), (0.75 * _MIB, 8.2), (3 * _MIB, 13.8), (12 * _MIB, 40), (48 * _MIB, 144)),
        BETWEEN: ((0.1875 * _MIB, 35), (192 * _MIB, 30 + 192 * _MIB / 40e3)),
    },
    memory=139,
)
# Rounded values for one server core a process and gloo between two processes: precise enough to rank layouts
CPU = Rates(
    device="CPU",
    dtype="float32",
    source="coarse defaults of a CPU",
    gemm=((4.1e3, 0.09), (2.6e5, 0.11)),
    weights=0.06,
    attention={64: ((1.0e6, 0.05), (3.4e7, 0.09), (5.4e8, 0.05))},
    copy=0.02,
    kernel_us=0.6,
    exchange={
        "gloo": ((1.6e4, 190), (2.6e5, 220), (4.2e6, 3400)),
        "peer": ((1.6e4, 70), (2.6e5, 70), (4.2e6, 500)),
        BETWEEN: ((1.6e4, 190), (2.6e5, 260), (4.2e6, 4000)),
    },
)


# Cards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A GPU by its maker's datasheet, without sparsity.

    products: TFLOP/s in bf16. copy: TB/s of its memory. links: GB/s to other GPUs, each way. memory: GiB that torch
    sees. peers: whether GPUs may access each other's memory. eight: whether it has products in 8 bits.
    """

    device: str
    products: float
    copy: float
    links: float
    memory: float
    peers: bool = True
    eight: bool = True


CARDS = {
    "h100": Card("NVIDIA H100", 989, 3.35, 450, 79),
    "h200": Card(H200.device, 989, 4.8, 450, 139),
    "a100": Card("NVIDIA A100", 312, 2.04, 300, 79, eight=False),
    "4090": Card("NVIDIA GeForce RTX 4090", 165, 1.01, 32, 23.5, peers=False),
    "b200": Card("NVIDIA B200", 2250, 8, 900, 178),
}


def card_of(name: str) -> Card:
    """The card of a name; ValueError, with a near name, if it is none."""
    if (card := CARDS.get(name.lower())) is None:
        near = get_close_matches(name.lower(), CARDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"got --card {name}, expected one of {', '.join(CARDS)}{hint}")
    return card


def default_of(device: str) -> Rates:
    """The rates of a device that was not measured: those of an H200, for a known card by the ratio of datasheets."""
    if device == "CPU":
        return CPU
    card, base = next((card for name, card in CARDS.items() if name.upper() in device), None), CARDS["h200"]
    if card is None or card is base:
        return H200
    speed, memory, links = card.products / base.products, card.copy / base.copy, card.links / base.links

    def sent(points: Curve) -> Curve:
        least = points[0][1]  # of an exchange of nearly nothing
        return tuple((nbytes, least + (us - least) / links) for nbytes, us in points)

    exchange = {name: points if name == BETWEEN else sent(points) for name, points in H200.exchange.items()}
    return replace(
        H200,
        device=card.device,
        source=f"an H200's, by datasheet ({card.products:g} TFLOP/s, {card.copy:g} TB/s, {card.links:g} GB/s)",
        gemm=_faster(H200.gemm, speed),
        weights=H200.weights * memory,
        attention={dim: _faster(points, speed) for dim, points in H200.attention.items()},
        copy=H200.copy * memory,
        exchange={name: points for name, points in exchange.items() if card.peers or name != "peer"},
        memory=card.memory,
    )


def _faster(points: Curve, speed: float) -> Curve:
    return tuple((x, speed * y) for x, y in points)


# The machine ---------------------------------------------------------------------------------------------------


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
    """The key of a transport's measured times; "auto" stands for the preferred transport."""
    known = _contract.facts(_contract.unasked(device_type)[0] if transport == "auto" else transport).rates
    return known.get(device_type, known["cpu"])


def ranks_of_a_host(mesh: Mesh) -> int | None:
    """The number of ranks on each of several hosts, None for one; every rank must call this at the same time.

    1 if hosts have different numbers of ranks, or ranks that are no neighbours: every exchange then crosses hosts.
    """
    names = mesh.collect(socket.gethostname(), str)
    runs = [len(list(run)) for _, run in groupby(names)]
    if len(runs) == 1:
        return None
    return runs[0] if len(runs) == len(set(names)) and len(set(runs)) == 1 else 1


def here(device: torch.device, count: int, transport: str, host: int | None = None) -> Machine:
    """A machine of `count` devices like this one.

    transport: a name, or "auto" for the transport that is preferred on such devices. host: see `Rates`.
    """
    curve = curve_of(transport, device.type)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return Machine(torch.cuda.get_device_name(device), count, curve, memory, host)
    known = hasattr(os, "sysconf")  # not on Windows
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB / (host or count) if known else None
    return Machine("CPU", count, curve, memory, host)


def imagined(device: torch.device, count: int, transport: str, hosts: int = 1, card: Card | None = None) -> Machine:
    """Machines with `count` of these cards, GPUs like this one's, or H200s if there is no GPU, on so many hosts.

    Raises ValueError for a number of GPUs that hosts cannot share evenly.
    """
    if hosts < 1 or count % hosts:
        raise ValueError(f"got --hosts {hosts} for {count} GPUs, expected hosts with equally many")
    host = None if hosts == 1 else count // hosts
    if transport == "auto" and (host is not None or (card is not None and not card.peers)):  # no memory is shared
        transport = _contract.unasked("cuda")[-1]
    if device.type == "cuda" and card is None:
        return here(device, count, transport, host)
    card = card or CARDS["h200"]
    return Machine(card.device, count, curve_of(transport, "cuda"), card.memory, host)


# The cache -----------------------------------------------------------------------------------------------------


def load(device: str, count: int, dtype: str, host: int | None = None) -> Rates:
    """The rates measured for `count` processes on this kind of device with this torch, else the defaults.

    host: see `Rates`. A measurement with one process has no exchanges; these are taken from the defaults.
    """
    default = replace(default_of(device), host=host)
    path = _path(device, count, dtype, host)
    if not path.exists():
        other = "" if default.device in device else f", not of a {device}"
        wide = "" if dtype == default.dtype else f", in {default.dtype}"
        return replace(default, source=f"{default.source}{other}{wide}; nothing was measured here")
    measured = _read(path)
    note = "" if measured.exchange else f"; exchanges: {default.source}"
    exchange = {**default.exchange, **measured.exchange}
    return replace(measured, exchange=exchange, source=measured.source + note, host=host)


def save(rates: Rates, count: int) -> Path:
    """Write measured rates to the cache, and return the path of the file."""
    path = _path(rates.device, count, rates.dtype, rates.host)
    keep(path, msgspec.json.format(msgspec.json.encode(rates), indent=1))
    return path


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache in one atomic step; OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # containers that share the folder may have equal process ids; a temporary file of Python is its user's alone
    part = path.with_suffix(f".{uuid4().hex}.part")
    part.write_bytes(content)
    os.replace(part, path)


def cache_folder() -> Path:
    """Return the folder of what is measured once and kept: $SEQPAR_CACHE, or seqpar in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SEQPAR_CACHE") or Path(base) / "seqpar")


def _path(device: str, count: int, dtype: str, host: int | None) -> Path:
    hosts = "" if host is None else f" by {host}"
    key = f"{device} x {count}{hosts} {dtype} torch {torch.__version__}"
    return cache_folder() / f"rates-{re.sub(r'[^a-z0-9.]+', '-', key.lower())}.json"


def _read(path: Path) -> Rates:
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=Rates)
        for curve in (measured.gemm, *measured.attention.values(), *measured.exchange.values()):
            if not curve or any(y <= 0 for _, y in curve) or any(a >= b for (a, _), (b, _) in pairwise(curve)):
                raise ValueError(f"expected points of rising x and positive y, got {curve}")
    except ValueError as error:
        raise ValueError(
            f"got {path}, which holds no rates ({error!r}); delete it, or measure again: launch/bench.py rates"
        ) from error
    return measured
