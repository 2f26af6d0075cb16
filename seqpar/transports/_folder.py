"""Finds the transports in this folder and their facts; no other module lists them."""

from __future__ import annotations

from types import ModuleType

import seqpar.transports
from seqpar.transports._contract import Facts
from seqpar.types.plugins import plugin, plugins


def names() -> tuple[str, ...]:
    """Return the names of all transports."""
    return tuple(plugins(seqpar.transports))


def load(name: str) -> ModuleType:
    """Return the transport's module; raises ValueError with all names if there is none of this name."""
    return plugin(seqpar.transports, name, "transport")


def facts(name: str) -> Facts:
    """Return the facts that the transport's module exports."""
    return load(name).FACTS


def unasked(device_type: str) -> list[str]:
    """Return the transports that "auto" may choose for devices of this type, best first.

    A device type that no transport mentions is treated like a CPU.
    """
    facts_of = {name: facts(name) for name in names()}
    listed = any(device_type in candidate.unasked for candidate in facts_of.values())
    chosen = [name for name, each in facts_of.items() if (device_type if listed else "cpu") in each.unasked]
    return sorted(chosen, key=lambda name: -facts_of[name].preference)
