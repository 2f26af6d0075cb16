"""Brings tensors of a checkpoint to a device through two small page-locked buffers, and converts them there.

A file is read straight into these buffers where the position of a tensor is known: a mapped file costs a page fault for
every few pages, and fetches a file that is not in the page cache in small pieces. The numbers cross to the GPU as they
lie in the file and are converted by it, since a processor's core converts less than a tenth of what the link takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO

import torch
from torch import Tensor

from seqpar.weights.checkpoint import Checkpoint

CHUNK = 1 << 23  # bytes of a buffer, a multiple of the size of every dtype


class Staging:
    """Two page-locked buffers, which take turns. For one thread.

    A copy out of pageable memory goes through one small buffer of the driver, and waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device, self._turn = device.type == "cuda", device, 0
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)] if self._cuda else []

    def fetch(self, checkpoint: Checkpoint, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of a checkpoint on the device, in its own dtype or in this one.

        Raises ValueError if the file has become shorter than its header says.
        """
        if key not in checkpoint.positions:
            return self.copy(checkpoint.read(key), dtype)
        shape, kept, position = checkpoint.shapes[key], checkpoint.dtypes[key], checkpoint.positions[key]
        placed = torch.empty(shape, dtype=dtype or kept, device=self._device)
        with open(position.path, "rb", buffering=0) as file:
            self._fill(placed, kept, lambda at, buffer: _read(file, position.offset + at, buffer))
        return placed

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of host memory on the device; a transposed one is sent as it lies in the file."""
        if tensor.dim() == 2 and not tensor.is_contiguous() and tensor.T.is_contiguous():
            return self.copy(tensor.T, dtype).T
        placed = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=self._device)
        if tensor.numel():
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            self._fill(placed, tensor.dtype, lambda at, buffer: buffer.copy_(flat[at : at + len(buffer)]))
        return placed

    def _fill(self, placed: Tensor, kept: torch.dtype, read: Callable[[int, Tensor], object]) -> None:
        """Fill a tensor of the device with numbers of the dtype `kept`, which `read` writes from a byte on."""
        numbers = placed.view(-1)
        for first in range(0, placed.numel(), CHUNK // kept.itemsize):
            part = numbers[first : first + CHUNK // kept.itemsize]
            buffer = self._buffers[self._turn][: len(part) * kept.itemsize]
            if self._cuda:
                self._free[self._turn].synchronize()  # until the copy out of it, two chunks ago, has ended
            read(first * kept.itemsize, buffer)
            if self._cuda and kept != part.dtype:
                part.copy_(buffer.view(kept).to(self._device, non_blocking=True))
            else:
                part.copy_(buffer.view(kept), non_blocking=self._cuda)
            if self._cuda:
                self._free[self._turn].record()
            self._turn = 1 - self._turn


def _read(file: FileIO, at: int, buffer: Tensor) -> None:
    """Fill a buffer with the bytes of a file from `at` on; ValueError if the file ends before."""
    left = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType] (numpy's stubs lack the protocol)
    while left:
        got = os.preadv(file.fileno(), [left], at)
        if got == 0:
            raise ValueError(f"got {file.name}, which ends at byte {at}, expected {len(left)} more; copy it again")
        left, at = left[got:], at + got
