"""Gives the pictures of an order, which rank 0 has from the front, to all ranks."""

from __future__ import annotations

from PIL import Image

from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.images import shared
from seqpar.serve.messages import ImageRequest


def pictures_of(order: ImageRequest, mesh: Mesh) -> tuple[Picture, ...]:
    """Return the pictures of an order on every rank; rank 0 reads the file with their pixels.

    Raises the same ValueError on all ranks for a file that is shorter than the pictures' sizes say.
    """

    def read() -> list[Picture]:
        if order.pixels is None:
            raise ValueError("the order has pictures, but no file with their pixels")
        try:
            with open(order.pixels, "rb") as file:
                sizes = [((each.width, each.height), file.read(each.nbytes)) for each in order.images]
        except OSError as error:  # its text has a path of the server
            raise ValueError("the server cannot read the images of the request; retry later") from error
        pictures = (Image.frombytes("RGB", size, pixels) for size, pixels in sizes)
        return [Picture(f"picture {number}", picture) for number, picture in enumerate(pictures, 1)]

    return shared(read, mesh) if order.images else ()
