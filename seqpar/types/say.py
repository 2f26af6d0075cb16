"""Lines about a run, for its user."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from seqpar.mesh.mesh import Mesh  # imports torch


def say(text: str, mesh: Mesh | None = None) -> None:
    """Print a line of this package on stdout, above the progress bars that this process shows; of a mesh, on rank 0."""
    if mesh is not None and not mesh.is_main:
        return
    tqdm.write(f"seqpar: {text}")
    sys.stdout.flush()
