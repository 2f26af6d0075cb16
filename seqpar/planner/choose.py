"""What is chosen when the caller says "auto", and why: strategy, transport, local attention, for a mesh that is there.

The launcher chooses the mesh before, by predictions (`seqpar.planner.search`), and names the strategy.
The choice of local attention is a table keyed by (major compute capability, head dim), of which those remain that
support the dtype; never by row counts: the same kernel on any number of ranks makes results comparable bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

import seqpar.attention
import seqpar.local
from seqpar import exact
from seqpar.mesh import AXES, Axis, Mesh
from seqpar.planner.search import EXACT, Aim
from seqpar.protocols import plugin, plugins
from seqpar.transports import _folder
from seqpar.transports._contract import Transport

# (major capability, head dim) -> first choices in order, where installed; those that do not take the dtype drop out
_LOCAL: dict[tuple[int, int], tuple[str, ...]] = {(9, 64): ("flash", "sdpa"), (9, 128): ("flash", "sdpa")}
_ELSEWHERE = ("sdpa", "flash", "reference")


@dataclass(frozen=True)
class Choice:
    """A name and the reason for it, for people to read."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


def choose_strategy(name: str, mesh: Mesh, kv_heads: int) -> Choice:
    """The strategy for this mesh; `ValueError` where the named one does not fit it, or is not exact and should be."""
    chosen = _strategy(name, mesh, kv_heads)
    if exact.is_on() and mesh.sequence.size > 1 and chosen.name not in EXACT:
        raise ValueError(
            f"got strategy {chosen} in exact mode, expected {' or '.join(EXACT)}: a ring merges partial "
            f"results and rounds otherwise than one rank; name one of these, or no ring"
        )
    return chosen


def _strategy(name: str, mesh: Mesh, kv_heads: int) -> Choice:
    if name != "auto":
        plugin(seqpar.attention, name, "strategy").check(mesh)
        return Choice(name, "as asked")
    ring, ulysses = mesh.ring.size, mesh.ulysses.size
    if ring > 1:
        return Choice("usp", "ring and ulysses axes") if ulysses > 1 else Choice("ring", "a ring axis")
    if ulysses > kv_heads:
        return Choice("kv_gather", f"{kv_heads} key-value heads are too few for ulysses on {ulysses} ranks")
    return Choice("ulysses", f"{kv_heads} heads on {ulysses} ranks" if ulysses > 1 else "one rank on the sequence")


def choose_local(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The local attention for this device, dtype and head dim; `ValueError` where the named one does not fit."""
    if name != "auto":
        reason = _why_not(name, device, dtype, head_dim)
        if reason is not None:
            raise ValueError(
                f"got local attention {name!r}, which does not work here: {reason}; expected one of "
                f"{', '.join(_fitting(device, dtype, head_dim)[0]) or 'another dtype'}"
            )
        return Choice(name, "as asked")
    order, reasons = _fitting(device, dtype, head_dim)
    if not order:
        told = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        raise ValueError(f"got {dtype} and head dim {head_dim} in exact mode, expected an attention for it ({told})")
    refused = "".join(f"; {other}: {reason}" for other, reason in reasons.items())
    return Choice(
        order[0], f"first choice for {device.type}, head dim {head_dim}, {dtype}{refused}".replace("torch.", "")
    )


def choose_transport(name: str, mesh: Mesh) -> Choice:
    """How blocks travel; `ValueError` where the named way does not work here. Every rank asks at the same time."""
    if name == "auto":
        return _transport(mesh)
    reason = _folder.load(name).why_not(mesh)
    if reason is not None:
        simplest = _folder.unasked(mesh.device.type)[-1]
        raise ValueError(f"got transport {name!r}, which does not work here: {reason}; use transport {simplest}")
    return Choice(name, "as asked")


def _transport(mesh: Mesh) -> Choice:
    """The transport that a mesh gets unasked: the same on all ranks."""
    if mesh.sequence.size * mesh.cfg.size == 1:
        return Choice(_folder.unasked(mesh.device.type)[-1], "nothing to exchange")
    return transport_between(mesh.world, mesh.device)


def transport_between(axis: Axis, device: torch.device) -> Choice:
    """The best transport that "auto" may take and that works between these ranks; they ask at the same time."""
    refused = ""
    for name in _folder.unasked(device.type):
        module = _folder.load(name)
        reason = module.why_not_tried(axis, device)
        if reason is None:
            return Choice(name, f"{module.FACTS.unasked.get(device.type, 'on any device')}{refused}")
        refused += f"; not {name}: {reason}"
    raise ValueError(f"got ranks between which no transport works{refused}; name one with transport=")


def _fitting(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[list[str], Mapping[str, str]]:
    """Those that work here, best first; the reason for each that would have come before the best."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    order = [*_LOCAL.get((major, head_dim), ()), *_ELSEWHERE, *plugins(seqpar.local)]
    working, reasons = [], {}
    for name in dict.fromkeys(order):
        reason = _why_not(name, device, dtype, head_dim)
        if reason is None:
            working.append(name)
        elif not working:
            reasons[name] = reason
    return working, reasons


def _why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a local attention is not for this, None where it is; in exact mode also where rows may differ."""
    module = plugin(seqpar.local, name, "local attention")
    reason = module.why_not(device, dtype, head_dim)
    if reason is None and exact.is_on():
        reason = module.invariant(device, dtype, head_dim)
    return reason


def parse_mesh(text: str) -> tuple[Aim, dict[str, int]]:
    """What a text like "cfg=2,ulysses=2" names; only an aim for "auto" and "throughput"; ValueError for other texts."""
    axes: dict[str, int] = {}
    for part in text.split(",") if text not in ("auto", "throughput") else ():
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal():
            raise ValueError(
                f"got --mesh {text}, expected axes like cfg=2,ulysses=2 of {', '.join(AXES)}, or auto, or throughput"
            )
        if name in axes:
            raise ValueError(f"got --mesh {text}, expected each axis once: {name} is there twice")
        axes[name] = int(size)
    return "throughput" if text == "throughput" else "latency", axes


def load_strategy(name: str) -> ModuleType:
    """The strategy's file."""
    return plugin(seqpar.attention, name, "strategy")


def load_transport(name: str) -> Transport:
    """A transport of that name, with nothing made yet."""
    return _folder.load(name).Transport()


def load_local(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The local attention's function, a Core."""
    return plugin(seqpar.local, name, "local attention").attend
