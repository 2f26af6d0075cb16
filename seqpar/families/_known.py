"""The files of this folder, by the classes of blocks and transformers that they describe."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import seqpar.families
from seqpar.types.plugins import plugin, plugins


@cache
def families() -> dict[str, ModuleType]:
    """Return class of a block -> the file of `seqpar.families` that computes it."""
    files = [plugin(seqpar.families, name, "family of blocks") for name in plugins(seqpar.families)]
    return {kind: file for file in files for kind in file.BLOCKS}


@cache
def described() -> dict[str, ModuleType]:
    """Return name of a transformer's class -> the file whose `work` describes it to the planner."""
    return {kind: file for file in dict.fromkeys(families().values()) for kind in file.TRANSFORMERS}
