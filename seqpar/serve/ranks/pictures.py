"""Gives the pictures of an order, which rank 0 has from the front, to all ranks."""

from __future__ import annotations

from PIL import Image

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.images import shared
from seqpar.serve.messages import PictureOrder


def pictures_of(order: PictureOrder, mesh: Mesh) -> tuple[Picture, ...]:
    """Return the pictures of an order on every rank; only rank 0's order has their pixels.

    Raises the same ValueError on all ranks for a picture with another number of bytes than its size says.
    """

    def read() -> list[Picture]:
        sizes = ((each.width, each.height) for each in order.images)
        pictures = (Image.frombytes("RGB", size, each.pixels) for size, each in zip(sizes, order.images, strict=True))
        return [Picture(f"picture {number}", picture) for number, picture in enumerate(pictures, 1)]

    return shared(read, mesh) if order.images else ()
