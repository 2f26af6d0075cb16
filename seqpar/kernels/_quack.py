"""Whether quack (CuTe DSL) can be called here: matrix products with an activation in their epilogue.

quack-kernels 0.6.5 compiles for Hopper with nvidia-cutlass-dsl 4.8.1, in seconds for each tile.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

import torch

QUACK = "0.6.5"  # other versions have other functions or need another CuTe DSL; pyproject.toml names it, too

Shape = tuple[tuple[int, int], int, int]
"""A GPU's compute capability, the number F of values after the activation of a product, and the number K of inputs."""


class Tile(NamedTuple):
    """Rows and columns of the product before SwiGLU, cluster of programs, whether two tiles alternate (pingpong)."""

    rows: int
    columns: int
    cluster_rows: int = 1
    cluster_columns: int = 1
    pingpong: bool = True


def why_not() -> str | None:
    """Return None if quack can be called, otherwise the reason why not."""
    quack = load()
    return quack if isinstance(quack, str) else None


@cache
def load() -> ModuleType | str:
    """Return the module of epilogues, or the reason why quack cannot be used."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper GPU"
    try:
        if (installed := version("quack-kernels")) != QUACK:
            return f"needs quack-kernels {QUACK}, {installed} is here"
        from seqpar.kernels import _epilogues
    except ImportError as error:
        return f"needs quack-kernels {QUACK}: {error}"
    except TypeError as error:  # quack raises it if it finds no version of CuTe DSL, as outside of site-packages
        return f"quack refuses: {str(error).splitlines()[0]}"
    return _epilogues
