"""What the transports in this folder say of themselves; nothing else names one."""

from __future__ import annotations

from types import ModuleType

import seqpar.transports
from seqpar.protocols import plugin, plugins
from seqpar.transports._contract import Facts


def names() -> tuple[str, ...]:
    """The transports there are."""
    return tuple(plugins(seqpar.transports))


def load(name: str) -> ModuleType:
    """The transport's module; ValueError lists the names there are."""
    return plugin(seqpar.transports, name, "transport")


def facts(name: str) -> Facts:
    """What it says of itself."""
    return load(name).FACTS


def unasked(device_type: str) -> list[str]:
    """The transports that "auto" may take between devices of this type, best first.

    Types that no transport mentions are served like CPUs.
    """
    told = {name: facts(name) for name in names()}
    known = any(device_type in one.unasked for one in told.values())
    taken = [name for name, one in told.items() if (device_type if known else "cpu") in one.unasked]
    return sorted(taken, key=lambda name: -told[name].preference)
