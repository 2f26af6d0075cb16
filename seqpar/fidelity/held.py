"""Runs what one rank computes alone, so that all ranks end alike where it fails or where its memory is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from seqpar.mesh import Mesh

T = TypeVar("T")


def held(mesh: Mesh, work: Callable[[], T]) -> T:
    """Return the result of this rank's work; the same ValueError on every rank if it fails on one, or lacks memory."""

    def tried() -> T:
        try:
            return work()
        except torch.OutOfMemoryError as failed:
            raise ValueError(
                "got a run that does not fit one rank alone, expected one that does; verify a smaller size, which "
                "takes the same path"
            ) from failed

    return mesh.together(tried)
