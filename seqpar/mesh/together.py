"""A small host value of every rank of an axis, exchanged."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from seqpar.mesh.mesh import Axis, collected

T = TypeVar("T")


def together(axis: Axis, value: T, kind: Any) -> list[T]:
    """Return a small value of every rank of the axis, in order; see `collected`. No rank returns before all called."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return collected(axis, here, value, kind, f"axis {axis.name}, memory that its ranks share")
