"""Reads tensors of checkpoints to a device in a thread of its own, while the caller builds models.

Where the place of a tensor in a file is known, fastsafetensors reads it: its threads copy from the page cache into
page-locked buffers so small that they stay in the processor's cache, and from there to the GPU, all without Python's
lock. The numbers cross to the GPU as they lie in the file and are converted by it, since a processor's core converts
less than a tenth of what the link takes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from fastsafetensors import cpp
from safetensors import SafetensorError
from torch import Tensor

from seqpar.types.keys import KeyMap
from seqpar.weights.checkpoint import Checkpoint, stamp

THREADS = 8  # of a rank at most; with more, page cache and link take no more bytes a second
BLOCK = 1 << 21  # bytes of a buffer, of which a thread has two: with 8 MiB they leave the cache, at half the rate
AHEAD = 1 << 28  # bytes that are asked for before the oldest must be there; an error or ctrl-C waits for them


class Reader:
    """Reads for one rank, in the order in which it is asked. A context manager, which ends its threads.

    ranks: how many read on this host at once. What is not yet read when the context ends is dropped. Callers ask for
    all tensors with `begin` and then call `start`. Before it `begin` takes the GPU's memory, of tensors that stay as
    they lie in their file: while copies run, the driver takes five times as long to give it.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self._native = device, None
        self._started, self._stopping, self._memory = threading.Event(), threading.Event(), list[Tensor]()
        self._threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // ranks))
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Reader:
        """Return this reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads, when what was asked of the files has come."""
        self._stopping.set()
        self.start()
        self._thread.shutdown(cancel_futures=True)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._native = None  # ends its threads, which sets this thread's GPU

    def begin(
        self, checkpoint: Checkpoint, keys: KeyMap, names: Sequence[str], like: Mapping[str, Tensor]
    ) -> Future[dict[str, Tensor]]:
        """Ask for the tensors of these names on the device.

        like: name -> a tensor of the meta device with the dtype and, where it is known, the shape that it gets. The
        result raises ValueError if a tensor does not load or is not finite.
        """
        if self.device.type == "cuda" and not self._started.is_set():
            # not for those that are converted or made of several, which would take this memory in pieces
            sources, dtypes = keys.sources, checkpoint.dtypes
            kept = [name for name in names if [like[name].dtype] == [*map(dtypes.get, sources[name].keys)]]
            stream = torch.cuda.default_stream(self.device)  # that of the thread that will want it
            with told(checkpoint, ["its weights"]), torch.cuda.stream(stream):
                self._memory += [torch.empty_like(like[name], device=self.device) for name in kept]
        return self._thread.submit(self._read, checkpoint, keys, names, like)

    def start(self) -> None:
        """Let come what has been asked for, and what will be."""
        self._memory.clear()  # torch does not give it back, and gives it to the tensors that come
        self._started.set()

    def _read(
        self, checkpoint: Checkpoint, keys: KeyMap, names: Sequence[str], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self._started.wait()
        found, sums = dict[str, Tensor](), dict[str, Tensor]()
        with told(checkpoint, ["its weights"]), _emptied_by_errors(found):
            if self._native is None:
                self._native = _native(self.device, self._threads)
            with _Requests(checkpoint, self.device, self._native) as requests:
                for name, parts in self._parts(requests, keys, names):
                    source, dtype = keys.sources[name], like[name].dtype
                    with told(checkpoint, source.keys):
                        found[name] = source.combine(*[part.to(dtype) for part in parts]).contiguous()
                        sums[name] = found[name].sum(dtype=torch.promote_types(dtype, torch.float32))
                    parts.clear()
            _check_finite(checkpoint, keys, sums, like)
        return found

    def _parts(self, requests: _Requests, keys: KeyMap, names: Sequence[str]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield name and tensors as they lie in the file, in the order of the names, asking for later ones before."""
        asked = deque[tuple[str, list[_Request]]]()
        for name in names:
            if self._stopping.is_set():
                raise CancelledError
            asked.append((name, [requests.ask(key) for key in keys.sources[name].keys]))
            while asked and (requests.ahead > AHEAD or all(part.number is None for part in asked[0][1])):
                yield requests.oldest(asked)
        while asked:
            yield requests.oldest(asked)


@dataclass(frozen=True)
class _Request:
    """A tensor on its way. number: of fastsafetensors' request; None if the tensor is there."""

    key: str
    tensor: Tensor
    number: int | None = None


class _Requests:
    """What is asked of the files of one checkpoint.

    A context manager, which holds all memory that fastsafetensors may still write to, and waits until none is.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, native: cpp.nogds_file_reader) -> None:
        self._checkpoint, self._device, self._native = checkpoint, device, native
        self._files, self._coming, self.ahead = dict[Path, int](), dict[int, Tensor](), 0

    def __enter__(self) -> _Requests:
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._coming:
            self._native.wait_read(number)
        self._coming.clear()
        del self._native  # the traceback of an error holds this object
        for file in self._files.values():
            os.close(file)

    def ask(self, key: str) -> _Request:
        """Ask for one tensor, in the dtype of the file."""
        with told(self._checkpoint, [key]):
            if key not in self._checkpoint.positions:
                return _Request(key, self._checkpoint.read(key).to(self._device, copy=True))
            shape, dtype = self._checkpoint.shapes[key], self._checkpoint.dtypes[key]
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            return _Request(key, tensor, self._submit(key, tensor) if tensor.numel() else None)

    def _submit(self, key: str, tensor: Tensor) -> int:
        position, size = self._checkpoint.positions[key], tensor.nbytes
        if position.path not in self._files:
            self._files[position.path] = os.open(position.path, os.O_RDONLY)
            if stamp(self._files[position.path]) != position.stamp:
                changed = "which has changed since its header was read, expected the same file; load it again"
                raise ValueError(f"got {position.path}, {changed}")
        goal = cpp.gds_device_buffer(tensor.data_ptr(), size, self._device.type == "cuda")
        number = self._native.submit_read(self._files[position.path], goal, position.offset, size, 0)
        self._coming[number] = tensor
        self.ahead += size
        return number

    def oldest(self, asked: deque[tuple[str, list[_Request]]]) -> tuple[str, list[Tensor]]:
        """Return name and tensors of the oldest that are asked for, when they have come."""
        name, requests = asked.popleft()
        return name, [self._come(request) for request in requests]

    def _come(self, request: _Request) -> Tensor:
        if request.number is not None:
            came = self._native.wait_read(request.number)
            del self._coming[request.number]
            self.ahead -= request.tensor.nbytes
            if not came:
                self._raise(request)
        return request.tensor

    def _raise(self, request: _Request) -> None:
        """Raise the error of a request that has failed, of which fastsafetensors tells nothing.

        That of a disk which fails once and then reads is lost: then the message says to copy the file again.
        """
        position, size = self._checkpoint.positions[request.key], request.tensor.nbytes
        for at in range(0, size, BLOCK):  # a disk's error is raised here
            os.pread(self._files[position.path], min(BLOCK, size - at), position.offset + at)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # and here a GPU's
        raise ValueError(
            f"got {position.path} with {request.key}, expected {size} bytes that can be read; copy it again"
        )


def _native(device: torch.device, threads: int) -> cpp.nogds_file_reader:
    """Return fastsafetensors' threads for one rank; RuntimeError if it does not find CUDA's library."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # else this thread would open a context on the first GPU
        if not cpp.is_cuda_found():
            cpp.load_library_functions(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
            if not cpp.is_cuda_found():
                raise RuntimeError("fastsafetensors does not find the CUDA runtime library that torch has loaded")
    cpp.set_gil_release(True)  # while it waits
    return cpp.nogds_file_reader(False, 2 * threads * BLOCK >> 10, threads, cuda, device.index or 0)


def _check_finite(checkpoint: Checkpoint, keys: KeyMap, sums: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise ValueError for the first parameter whose sum is not finite: NaN and infinity stay in a sum."""
    finite = torch.stack([total.double() for total in sums.values()]).isfinite().tolist() if sums else []
    bad = next((name for name, right in zip(sums, finite, strict=True) if not right), None)
    if bad is not None:
        what = f"NaN or infinity in {', '.join(keys.sources[bad].keys)}"
        expected = (
            f"finite weights in {str(like[bad].dtype).removeprefix('torch.')}; copy the file again, or name another"
        )
        raise ValueError(f"{checkpoint.name}: got {what}, expected {expected}")


@contextmanager
def _emptied_by_errors(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Drop tensors after an error, whose traceback would hold them."""
    try:
        yield
    except BaseException:
        tensors.clear()
        raise


@contextmanager
def told(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[None]:
    """Turn errors of reading and combining into ValueError, which `Mesh.together` raises on every rank."""
    try:
        yield
    except (SafetensorError, RuntimeError, IndexError) as error:
        raise ValueError(f"{checkpoint.name}: got {', '.join(keys)}, which do not load: {error}") from error
