"""Reads the pictures that a run begins with (`--image`) on rank 0, and gives their pixels to all ranks.

A file may differ between the hosts of a run, or be missing on one: all ranks use rank 0's pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture, read

MOST_PICTURES = 16
NUMBER = 5  # digits of a picture's number, which stand before its name while it travels


def pictures_of_rank_0(names: Sequence[str], mesh: Mesh) -> tuple[Picture, ...]:
    """Return the pictures in rank 0's files on every rank; the same ValueError on all if one cannot be read."""
    if len(names) > MOST_PICTURES:
        raise ValueError(f"got --image with {len(names)} pictures, expected at most {MOST_PICTURES}")
    return shared(lambda: [read(name) for name in names], mesh)


def shared(pictures: Callable[[], Sequence[Picture]], mesh: Mesh) -> tuple[Picture, ...]:
    """Call a function on rank 0 alone, and return its pictures on every rank; if it fails, raise one error on all."""

    def pixels() -> dict[str, Tensor]:
        return {f"{number:0{NUMBER}}{each.name}": _pixels(each) for number, each in enumerate(pictures())}

    tensors = streams_of_rank_0(mesh, pixels)
    return tuple(Picture(name[NUMBER:], Image.fromarray(x_HW3.numpy())) for name, x_HW3 in tensors.items())


def _pixels(picture: Picture) -> Tensor:
    """Return pixels as bytes (height, width, 3)."""
    return torch.from_numpy(np.array(picture.image))
