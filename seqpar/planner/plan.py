"""The plan of a run, made once for launcher and library: mesh, strategy, transport and local attention.

The planner takes the mesh, strategy and transport of the layout with the shortest predicted step
(`seqpar.planner.search`), among the layouts that the caller's settings and mesh allow. Among the local attentions that
support the dtype it takes the one whose file states the highest preference for the GPU's generation and the head dim.
This choice never depends on row counts: the same kernel on any number of ranks makes results comparable bit by bit.
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
import seqpar.transports
from seqpar.mesh import exact
from seqpar.mesh.mesh import AXES, Axis, Mesh
from seqpar.planner import rates
from seqpar.planner.predict import Load
from seqpar.planner.rates import Machine, here, ranks_of_a_host
from seqpar.planner.search import Aim, Preferences, Ranking, search
from seqpar.transports import _contract
from seqpar.transports._contract import Transport
from seqpar.types.arguments import check_kind
from seqpar.types.facts import Layout, Work
from seqpar.types.plugins import plugin, plugins

STEPS = 25  # assumed where the number of steps of a run is not known yet


@dataclass(frozen=True)
class Choice:
    """A chosen name and the reason for the choice, as text for people."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True)
class Plan:
    """The layout with its mesh sizes, and the strategy, transport and local attention with the reason for each.

    ranking: all layouts that were predicted; `layout` is the first of them.
    """

    layout: Layout
    strategy: Choice
    transport: Choice
    local: Choice
    ranking: Ranking

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, in the form that `Mesh.from_env` accepts."""
        return self.layout.sizes

    @property
    def exact(self) -> bool:
        """Whether results must have one rank's bits: keys are then held in the order of the streams."""
        return self.ranking.preferences.exact

    @property
    def ms(self) -> float:
        return self.ranking.ranked[0].ms

    def check(self, mesh: Mesh) -> None:
        """Raise ValueError if the mesh has other sizes, or if its ranks cannot use the transport. Collective."""
        if mesh.sizes != self.sizes:
            raise ValueError(f"got a plan for {self.layout} and a mesh of {mesh}, expected the same sizes; give one")
        check_transport(self.transport.name, mesh)

    def __str__(self) -> str:
        return str(self.ranking)


def make(
    work: Work, load: Load, dtype: torch.dtype, ranks: Mesh, preferences: Preferences, mesh: Mesh | None = None
) -> Plan:
    """The plan for these processes, or for the caller's mesh, from rank 0's rates. Collective.

    Raises the same ValueError on every rank for unknown names and where no layout satisfies the preferences.
    """
    preferences = replace(preferences, exact=preferences.exact or exact.is_on())
    if mesh is not None:
        preferences = replace(preferences, axes=mesh.sizes)
        tokens, images = max(load.tokens, mesh.sequence.size), max(load.images, mesh.data.size)
        load = replace(load, tokens=tokens, images=images)
    transport = ranks.on_all_ranks(lambda: choose_transport(preferences.transport, mesh or ranks, mesh is not None))
    machine = here(ranks.device, ranks.world.size, transport.name, ranks_of_a_host(ranks))
    if mesh is not None:  # the caller has decided that it fits
        machine = replace(machine, memory=None)

    def decide() -> Plan:
        ranking = rank(work, load, machine, preferences, dtype)
        layout, asked = ranking.best, preferences.strategy != "auto"
        why = "as asked" if asked else "planned" if layout.sequence > 1 else "one rank a sequence"
        alone = preferences.transport == "auto" and layout.sequence * layout.cfg == 1
        moves = _nothing_to_exchange(ranks.device) if alone else transport
        local = choose_local(preferences.local, ranks.device, dtype, work.head_dim, work.masked)
        return Plan(layout, Choice(layout.strategy, why), moves, local, ranking)

    return ranks.share(ranks.on_all_ranks(decide), Plan)


def settled(plan: Plan, mesh: Mesh | None) -> Mesh:
    """The caller's mesh, or that of the plan; `ValueError` on every rank if they do not fit together."""
    joined = mesh or Mesh.from_env(*plan.sizes.values())
    joined.on_all_ranks(lambda: plan.check(joined))
    return joined


def for_library(
    config: Any,
    parameters: int,
    dtype: torch.dtype,
    mesh: Mesh | None,
    preferences: Preferences,
    table: int,
    eight: bool = False,
) -> Plan:
    """The plan for a library call, which is assumed to make one picture of the model's own size.

    config: the config of a model whose file exports `work`. table, eight: see `Load`.
    """
    tokens, latent = (config.sample_size // config.patch_size) ** 2, config.in_channels * config.patch_size**2
    work = work_of(config)
    ranks = mesh or Mesh.joined()
    guided = work.guided or (mesh.cfg.size if mesh is not None else preferences.axes.get("cfg", 1)) > 1
    images = preferred_images(preferences, ranks)
    load = Load(
        images, tokens, guided, STEPS, dtype.itemsize, parameters, latent, 1 + guided, table, work.joined, eight
    )
    return make(work, load, dtype, ranks, preferences, mesh)


def work_of(config: Any) -> Work:
    """The `Work` of a model, from the `work(config)` of the file that defines the config's class."""
    return sys.modules[type(config).__module__].work(config)


def rank(work: Work, load: Load, machine: Machine, preferences: Preferences, dtype: torch.dtype) -> Ranking:
    """All layouts of a machine, which need not be present, best first; `ValueError` if none is possible."""
    if is_lossy(preferences.local) and not work.rounds:
        raise ValueError(
            f"local attention {preferences.local} is for transformers of diffusers, which a calibration centres"
        )
    measured = rates.load(machine.device, machine.count, str(dtype).removeprefix("torch."), machine.host)
    if machine.count > 1 and machine.transport not in measured.exchange:
        known = ", ".join(measured.exchange)
        raise ValueError(
            f"got transport {machine.transport}, which is not in the rates ({measured.source}: {known}); measure it "
            f"with launch/bench.py rates, or use another transport"
        )
    return search(work, load, machine.count, preferences, measured, machine.transport, machine.memory)


# Transports ----------------------------------------------------------------------------------------------------


def choose_transport(name: str, mesh: Mesh, axes: bool = True) -> Choice:
    """The transport of a mesh; ValueError if the named one does not work here. Collective.

    axes: whether the mesh has the axes of the run; else a named transport is not tried yet.
    """
    if name != "auto":
        _contract.load(name)
        if axes:
            check_transport(name, mesh)
        return Choice(name, "as asked")
    if axes and mesh.sequence.size * mesh.cfg.size == 1:
        return _nothing_to_exchange(mesh.device)
    return transport_between(mesh.world, mesh.device)


def transport_between(axis: Axis, device: torch.device) -> Choice:
    """The best transport that "auto" may take and that works between these ranks. Collective on the axis."""
    refused = ""
    for name in _contract.unasked(device.type):
        module = _contract.load(name)
        reason = module.why_not_tried(axis, device)
        if reason is None:
            return Choice(name, f"{module.FACTS.unasked.get(device.type, 'on any device')}{refused}")
        refused += f"; not {name}: {reason}"
    raise ValueError(f"got ranks between which no transport works{refused}; name one with transport=")


def check_transport(name: str, mesh: Mesh) -> None:
    """Raise ValueError if a transport does not work between these ranks. Collective."""
    reason = _contract.load(name).why_not(mesh)
    if reason is not None:
        simplest = _contract.unasked(mesh.device.type)[-1]
        raise ValueError(f"got transport {name!r}, which does not work here: {reason}; use transport {simplest}")


def _nothing_to_exchange(device: torch.device) -> Choice:
    return Choice(_contract.unasked(device.type)[-1], "nothing to exchange")


# Local attention -----------------------------------------------------------------------------------------------


def choose_local(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool = False) -> Choice:
    """The local attention for a device, dtype, head dim and key masks; ValueError if the named one does not fit."""
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
        why = "; ".join(f"{other}: {reason}" for other, reason in reasons.items())
        raise ValueError(f"got {dtype} and head dim {head_dim} in exact mode, expected an attention for it ({why})")
    refused = "".join(f"; {other}: {reason}" for other, reason in reasons.items())
    return Choice(
        order[0], f"first choice for {device.type}, head dim {head_dim}, {dtype}{refused}".replace("torch.", "")
    )


def is_lossy(name: str) -> bool:
    """Whether a local attention rounds to fewer bits than the model's, and so is never chosen by "auto"."""
    return name != "auto" and plugin(seqpar.local, name, "local attention").preference(0, 64) is None


def _fitting(
    device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool
) -> tuple[list[str], Mapping[str, str]]:
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    preferred = {
        name: plugin(seqpar.local, name, "local attention").preference(major, head_dim)
        for name in plugins(seqpar.local)
        if not is_lossy(name)
    }
    working, reasons = [], {}
    for name in sorted(preferred, key=lambda name: -preferred[name]):
        reason = _why_not(name, device, dtype, head_dim, mask)
        if reason is None:
            working.append(name)
        elif not working:
            reasons[name] = reason
    return working, reasons


def _why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, mask: bool) -> str | None:
    # in exact mode its rows must also not depend on the number of rows
    module = plugin(seqpar.local, name, "local attention")
    reason = module.why_not(device, dtype, head_dim, mask)
    if reason is None and exact.is_on():
        reason = module.invariant(device, dtype, head_dim, mask)
    return reason


def check_names(strategy: str, local: str, transport: str) -> None:
    """Raise ValueError for the name of a strategy, local attention or transport that does not exist."""
    for package, name, what in (
        (seqpar.attention, strategy, "strategy"),
        (seqpar.local, local, "local attention"),
        (seqpar.transports, transport, "transport"),
    ):
        if not isinstance(name, str) or name != "auto":
            plugin(package, name, what)


def named_mesh(mesh: Mesh | str | None, preferences: Preferences) -> tuple[Mesh | None, Preferences]:
    """The caller's mesh, or None with preferences for what a text names, as `--mesh` does; else ValueError."""
    check_kind("mesh", mesh, Mesh, str, type(None), expected="a seqpar.Mesh, axes like 'cfg=2,ulysses=2', or 'auto'")
    if not isinstance(mesh, str):
        return mesh, preferences
    aim, axes = parse_mesh(mesh, "mesh=")
    return None, replace(preferences, aim=aim, axes=axes)


def preferred_images(preferences: Preferences, ranks: Mesh) -> int:
    """For how many pictures a call of the library is planned: one, or as many as ranks may have their own."""
    return ranks.world.size if preferences.aim == "throughput" else preferences.axes.get("data", 1)


def parse_mesh(text: str, argument: str = "--mesh ") -> tuple[Aim, dict[str, int]]:
    """The aim and the axis sizes that a text names: "cfg=2,ulysses=2", "auto" or "throughput"; else ValueError.

    argument: how the caller names it, for the message.
    """
    axes: dict[str, int] = {}
    for part in text.split(",") if text not in ("auto", "throughput") else ():
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal():
            raise ValueError(
                f"got {argument}{text}, expected axes like cfg=2,ulysses=2 of {', '.join(AXES)}, or auto, or throughput"
            )
        if name in axes:
            raise ValueError(f"got {argument}{text}, expected each axis once: {name} is there twice")
        axes[name] = int(size)
    return "throughput" if text == "throughput" else "latency", axes


def load_strategy(name: str) -> ModuleType:
    return plugin(seqpar.attention, name, "strategy")


def load_transport(name: str) -> Transport:
    return _contract.load(name).Transport()


def load_local(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return plugin(seqpar.local, name, "local attention").attend
