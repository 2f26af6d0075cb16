"""The one "auto": mesh, strategy, transport and local attention of a run, decided once for launcher and library alike.

The mesh, the strategy and the transport are those of the layout that is predicted to be the fastest
(`seqpar.planner.search`), among those that the caller's words and his mesh allow. The local attention is a table keyed
by (major compute capability, head dim), of which those remain that support the dtype; never by row counts: the same
kernel on any number of ranks makes results comparable bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

import seqpar.attention
import seqpar.local
from seqpar import exact
from seqpar.mesh import AXES, Axis, Mesh
from seqpar.planner import rates
from seqpar.planner.facts import Layout, Work
from seqpar.planner.machine import Machine, here
from seqpar.planner.predict import Load
from seqpar.planner.search import Aim, Ranking, Wish, search
from seqpar.protocols import plugin, plugins
from seqpar.transports import _folder
from seqpar.transports._contract import Transport

# (major capability, head dim) -> first choices in order, where installed; those that do not take the dtype drop out
_LOCAL: dict[tuple[int, int], tuple[str, ...]] = {(9, 64): ("flash", "sdpa"), (9, 128): ("flash", "sdpa")}
_ELSEWHERE = ("sdpa", "flash", "reference")
STEPS = 25  # of a run whose number of steps is not known yet


@dataclass(frozen=True)
class Choice:
    """A name and the reason for it, for people to read."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True)
class Plan:
    """What runs: the layout with its mesh sizes, and strategy, transport and local attention with the reason for each.

    ranking: all layouts that were predicted; its first one is the layout.
    """

    layout: Layout
    strategy: Choice
    transport: Choice
    local: Choice
    ranking: Ranking

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, as `Mesh.from_env` takes them."""
        return self.layout.sizes

    @property
    def best(self) -> Layout:
        """The layout."""
        return self.layout

    @property
    def ms(self) -> float:
        """The predicted ms of a step."""
        return self.ranking.ranked[0].ms

    def check(self, mesh: Mesh) -> None:
        """Raise `ValueError` for a mesh of other sizes, or one whose ranks cannot use the transport.

        Every rank asks at the same time.
        """
        if mesh.sizes != self.sizes:
            raise ValueError(f"got a plan for {self.layout} and a mesh of {mesh}, expected the same sizes; give one")
        check_transport(self.transport.name, mesh)

    def table(self) -> str:
        """A row for each layout that was predicted."""
        return self.ranking.table()

    def __str__(self) -> str:
        return str(self.ranking)


def make(work: Work, load: Load, dtype: torch.dtype, ranks: Mesh, wish: Wish, mesh: Mesh | None = None) -> Plan:
    """The plan for these processes, or within the caller's mesh; the same on every rank, because rank 0's rates decide.

    Raises `ValueError`, on every rank, for names that are none and where nothing is what was asked for.
    """
    wish = replace(wish, exact=wish.exact or exact.is_on())
    if mesh is not None:
        wish = replace(wish, axes=mesh.sizes)
        tokens, images = max(load.tokens, mesh.sequence.size), max(load.images, mesh.data.size)
        load = replace(load, tokens=tokens, images=images)
    # every rank tries the exchanges together
    moved = ranks.together(lambda: _reached(wish.transport, ranks, mesh))
    machine = here(ranks.device, ranks.world.size, moved.name)
    if mesh is not None:  # the caller has decided that it fits
        machine = replace(machine, memory=None)
    return ranks.share(ranks.together(lambda: _decided(work, load, dtype, ranks.device, machine, wish, moved)))


def for_library(config: Any, parameters: int, dtype: torch.dtype, mesh: Mesh | None, wish: Wish, table: int) -> Plan:
    """The plan of a model that is called for pictures of unknown number and size: one guided picture of its own size.

    config: of a model whose file exports `work`. table: as of `Load`.
    """
    tokens, latent = (config.sample_size // config.patch_size) ** 2, config.in_channels * config.patch_size**2
    load = Load(1, tokens, True, STEPS, dtype.itemsize, parameters, latent, 2, table)
    return make(work_of(config), load, dtype, mesh or Mesh.joined(), wish, mesh)


def work_of(config: Any) -> Work:
    """What a model does with a token, as the file says in which its config's class is written."""
    file = sys.modules[type(config).__module__]
    if not hasattr(file, "work"):
        raise ValueError(f"got a model whose file {file.__name__} has no `work(config)`, expected one for the planner")
    return file.work(config)


def rank(work: Work, load: Load, machine: Machine, wish: Wish, dtype: torch.dtype) -> Ranking:
    """All layouts of a machine, also of one that is only imagined; `ValueError` where there is none."""
    found = rates.load(machine.device, machine.count, str(dtype).removeprefix("torch."))
    if machine.count > 1 and machine.transport not in found.exchange:
        known = ", ".join(found.exchange)
        raise ValueError(
            f"got transport {machine.transport}, of which {found.source} know nothing ({known} only); measure it "
            f"with launch/bench.py rates, or use another transport"
        )
    return search(work, load, machine.count, wish, found, machine.transport, machine.memory)


def _decided(work: Work, load: Load, dtype: torch.dtype, device: torch.device, machine: Machine, wish: Wish,
             moved: Choice) -> Plan:  # fmt: skip
    ranking = rank(work, load, machine, wish, dtype)
    layout = ranking.best
    why = "as asked" if wish.strategy != "auto" else "planned" if layout.sequence > 1 else "one rank a sequence"
    if wish.transport == "auto" and layout.sequence * layout.cfg == 1:
        moved = _nothing_to_exchange(device)
    local = choose_local(wish.local, device, dtype, work.head_dim, work.masked)
    return Plan(layout, Choice(layout.strategy, why), moved, local, ranking)


# Transports ----------------------------------------------------------------------------------------------------


def choose_transport(name: str, mesh: Mesh) -> Choice:
    """How blocks travel; `ValueError` where the named way does not work here. Every rank asks at the same time."""
    if name != "auto":
        check_transport(name, mesh)
        return Choice(name, "as asked")
    if mesh.sequence.size * mesh.cfg.size == 1:
        return _nothing_to_exchange(mesh.device)
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


def check_transport(name: str, mesh: Mesh) -> None:
    """Raise `ValueError` where a transport does not work between these ranks. Every rank asks at the same time."""
    reason = _folder.load(name).why_not(mesh)
    if reason is not None:
        simplest = _folder.unasked(mesh.device.type)[-1]
        raise ValueError(f"got transport {name!r}, which does not work here: {reason}; use transport {simplest}")


def _reached(name: str, ranks: Mesh, mesh: Mesh | None) -> Choice:
    """The transport between these ranks, before or after they have a mesh. A named one is tried on the mesh."""
    if mesh is not None:
        return choose_transport(name, mesh)
    if name == "auto":
        return transport_between(ranks.world, ranks.device)
    _folder.load(name)
    return Choice(name, "as asked")


def _nothing_to_exchange(device: torch.device) -> Choice:
    """The transport that needs least: the one that is preferred last."""
    return Choice(_folder.unasked(device.type)[-1], "nothing to exchange")


# Local attention -----------------------------------------------------------------------------------------------


def choose_local(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> Choice:
    """The local attention for this device, dtype and head dim, with key masks or not; `ValueError` where the named one
    does not fit."""
    if name != "auto":
        reason = _why_not(name, device, dtype, head_dim, mask)
        if reason is not None:
            raise ValueError(
                f"got local attention {name!r}, which does not work here: {reason}; expected one of "
                f"{', '.join(_fitting(device, dtype, head_dim, mask)[0]) or 'another dtype'}"
            )
        return Choice(name, "as asked")
    order, reasons = _fitting(device, dtype, head_dim, mask)
    if not order:
        told = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        raise ValueError(f"got {dtype} and head dim {head_dim} in exact mode, expected an attention for it ({told})")
    refused = "".join(f"; {other}: {reason}" for other, reason in reasons.items())
    return Choice(
        order[0], f"first choice for {device.type}, head dim {head_dim}, {dtype}{refused}".replace("torch.", "")
    )


def _fitting(
    device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool
) -> tuple[list[str], Mapping[str, str]]:
    """Those that work here, best first; the reason for each that would have come before the best."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    order = [*_LOCAL.get((major, head_dim), ()), *_ELSEWHERE, *plugins(seqpar.local)]
    working, reasons = [], {}
    for name in dict.fromkeys(order):
        reason = _why_not(name, device, dtype, head_dim, mask)
        if reason is None:
            working.append(name)
        elif not working:
            reasons[name] = reason
    return working, reasons


def _why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool) -> str | None:
    """Why a local attention is not for this, None where it is; in exact mode also where rows may differ."""
    module = plugin(seqpar.local, name, "local attention")
    reason = module.why_not(device, dtype, head_dim, mask)
    if reason is None and exact.is_on():
        reason = module.invariant(device, dtype, head_dim, mask)
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
