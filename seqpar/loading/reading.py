"""Reads tensors of checkpoints to a device in its own thread, while the caller builds models.

Where the place of a tensor in a file is known, fastsafetensors reads it: its threads copy from the page cache into
page-locked buffers so small that they stay in the processor's cache, and from there to the GPU, all without Python's
lock. The numbers cross to the GPU as they lie in the file and are converted by it, since a processor's core converts
less than a tenth of what the link takes.
"""

from __future__ import annotations

import os
import threading
import traceback
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

from seqpar.kernels.weight8 import Weight8, in_memory
from seqpar.loading.checkpoint import WEIGHTS, Checkpoint, check_stamp
from seqpar.types.keys import KeyMap

THREADS = 8  # of a rank at most; with more, page cache and link take no more bytes a second
BLOCK = 1 << 21  # bytes of a buffer, of which a thread has two: with 8 MiB they leave the cache, at half the rate
AHEAD = 1 << 30  # bytes that are asked for before the oldest must be there, which come while another thread has
# Python's lock; an error or ctrl-C waits for them, and those that are converted take so much memory besides, of which a
# load in 8 bits spares three quarters
ALIGNED = 16  # bytes, of the largest dtype
SMALL = 1 << 18  # bytes of a tensor that comes with others: each request waits for all copies that are on their way


class Reader:
    """Reads for one rank, in the order in which it is asked. A context manager, which ends its threads.

    ranks: how many read on this host at once. What is not yet read when the context ends is dropped. Callers ask with
    `begin`, which takes memory, and then call `start`.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self._native = device, None
        self._started, self._stopping = threading.Event(), threading.Event()
        self._threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) // ranks))
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        """Join the threads after the last requested tensor has arrived."""
        self._stopping.set()
        self.start()
        self._thread.shutdown(cancel_futures=True)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._native = None  # ends its threads, which sets this thread's GPU

    def begin(
        self, checkpoint: Checkpoint, keys: KeyMap, names: Sequence[str], like: Mapping[str, Tensor]
    ) -> Future[dict[str, Tensor]]:
        """Ask for the tensors of these names on the device.

        like: name -> a tensor of the meta device with the dtype that it gets, or of the device, which it is written to;
        a `Weight8` is rounded as it arrives, and its memory as it lies in the file serves the next tensor. The result
        raises ValueError if a tensor does not load or is not finite.
        """
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.stream(torch.cuda.default_stream(self.device)) if on_gpu else nullcontext()  # the thread's
        with (
            tensor_context(checkpoint, ["its weights"]),
            torch.inference_mode(False),
            stream,
        ):  # weights outlive the mode
            memory = {
                key: _memory(checkpoint, key, self.device) if like[name].is_meta else like[name]
                for key, name in _kept(checkpoint, keys, names, like)
            }
        return self._thread.submit(self._read, checkpoint, keys, names, like, memory)

    def start(self) -> None:
        """Begin to read; while copies run, the driver takes five times as long to give memory."""
        self._started.set()

    def _read(
        self,
        checkpoint: Checkpoint,
        keys: KeyMap,
        names: Sequence[str],
        like: Mapping[str, Tensor],
        memory: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        self._started.wait()
        if self._stopping.is_set():
            raise CancelledError
        found, extremes = dict[str, Tensor](), dict[str, tuple[Tensor, Tensor]]()
        with tensor_context(checkpoint, ["its weights"]), _emptied_by_errors(found, memory):
            if self._native is None:
                self._native = _native(self.device, self._threads)
            with _Requests(checkpoint, self.device, self._native, memory) as requests:
                requests.read_small([key for name in names for key in keys.sources[name].keys])
                ahead = AHEAD // 4 if any(isinstance(like[name], Weight8) for name in names) else AHEAD
                for name, parts in self._parts(requests, keys, names, ahead):
                    source = keys.sources[name]
                    with tensor_context(checkpoint, source.keys):
                        lying = parts if source.raw else (part.to(like[name].dtype) for part in parts)
                        found[name] = source.combine(*lying).contiguous()
                    # whether the result has the memory that was written
                    stays = isinstance(found[name], Weight8) or (
                        found[name] is parts[0] and not isinstance(like[name], Weight8)
                    )
                    parts.clear()
                    if found[name].is_floating_point() and found[name].numel():
                        extremes[name] = found[name].aminmax()
                    found[name] = _placed(found[name], like[name])
                    if not stays and self.device.type == "cuda":
                        # fastsafetensors writes the next tensor into this one's memory on a stream of its own
                        torch.cuda.default_stream(self.device).synchronize()
            checkpoint.check_unchanged()  # first: bytes that are half old and half new may be any number
            _check_finite(checkpoint.name, {name: keys.sources[name].keys for name in extremes}, extremes)
        return found

    def _parts(
        self, requests: _Requests, keys: KeyMap, names: Sequence[str], ahead: int
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield name and tensors as they lie in the file, in the order of the names, asking for later ones before."""
        asked = deque[tuple[str, list[_Request]]]()
        for name in names:
            if self._stopping.is_set():
                raise CancelledError
            asked.append((name, [requests.ask(key) for key in keys.sources[name].keys]))
            while asked and (requests.ahead > ahead or all(part.number is None for part in asked[0][1])):
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

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, native: cpp.nogds_file_reader, memory: dict[str, Tensor]
    ) -> None:
        self._checkpoint, self._device, self._native, self._memory = checkpoint, device, native, memory
        self._files, self._coming, self.ahead = dict[Path, int](), dict[int, Tensor](), 0
        self._small = dict[str, Tensor]()

    def __enter__(self) -> _Requests:
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._coming:
            self._native.wait_read(number)
        self._coming.clear()
        self._small.clear()
        del self._native  # the traceback of an error holds this object
        for file in self._files.values():
            os.close(file)

    def read_small(self, keys: Sequence[str]) -> None:
        """Read the small ones of these tensors, which cross to the device together."""
        sizes = {key: self._checkpoint.nbytes(key) for key in keys if key in self._checkpoint.positions}
        small = [key for key, size in sizes.items() if 0 < size < SMALL]
        for key in small:  # where a file is not in memory, all are fetched at once
            offset = self._checkpoint.positions[key].offset
            os.posix_fadvise(self._file(key), offset, sizes[key], os.POSIX_FADV_WILLNEED)
        rooms = [-(-sizes[key] // ALIGNED) * ALIGNED for key in small]
        host = torch.empty(sum(rooms), dtype=torch.uint8)
        for key, room in zip(small, host.split(rooms), strict=True):
            self._read_into(room.numpy().data[: sizes[key]], key)
        for key, room in zip(small, host.to(self._device).split(rooms), strict=True):
            dtype, shape = self._checkpoint.dtypes[key], self._checkpoint.shapes[key]
            self._small[key] = room[: sizes[key]].view(dtype).view(shape).clone()

    def _read_into(self, room: memoryview, key: str) -> None:
        if os.preadv(self._file(key), [room], self._checkpoint.positions[key].offset) < len(room):
            self._raise(key)

    def ask(self, key: str) -> _Request:
        with tensor_context(self._checkpoint, [key]):
            small = self._small.pop(key, None)  # whoever asks for it again gets another one
            if small is not None:
                return _Request(key, small)
            if key not in self._checkpoint.positions:
                return _Request(key, self._checkpoint.read(key).to(self._device, copy=True))
            tensor = self._memory.pop(key, None)
            tensor = _memory(self._checkpoint, key, self._device) if tensor is None else tensor
            return _Request(key, tensor, self._submit(key, tensor) if tensor.numel() else None)

    def _file(self, key: str) -> int:
        """Return the open file of a tensor; ValueError if it is not the one whose header was read."""
        position = self._checkpoint.positions[key]
        if position.path not in self._files:
            self._files[position.path] = os.open(position.path, os.O_RDONLY)
            check_stamp(position.path, position.stamp, self._files[position.path])
        return self._files[position.path]

    def _submit(self, key: str, tensor: Tensor) -> int:
        position, size = self._checkpoint.positions[key], tensor.nbytes
        goal = cpp.gds_device_buffer(tensor.data_ptr(), size, self._device.type == "cuda")
        number = self._native.submit_read(self._file(key), goal, position.offset, size, 0)
        self._coming[number] = tensor
        self.ahead += size
        return number

    def oldest(self, asked: deque[tuple[str, list[_Request]]]) -> tuple[str, list[Tensor]]:
        name, requests = asked.popleft()
        return name, [self._come(request) for request in requests]

    def _come(self, request: _Request) -> Tensor:
        if request.number is not None:
            came = self._native.wait_read(request.number)
            del self._coming[request.number]
            self.ahead -= request.tensor.nbytes
            if not came:
                self._raise(request.key)
        return request.tensor

    def _raise(self, key: str) -> None:
        """Raise the error of a tensor that was not read, of which fastsafetensors tells nothing.

        A disk that fails once and then reads leaves none: then the message says to copy the file again.
        """
        position, size = self._checkpoint.positions[key], self._checkpoint.nbytes(key)
        for at in range(0, size, BLOCK):  # a disk's error is raised here
            os.pread(self._files[position.path], min(BLOCK, size - at), position.offset + at)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # and here a GPU's
        raise ValueError(f"got {position.path} with {key}, expected {size} bytes that can be read; copy it again")


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


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    # a tensor that was read, in its final form, and in the memory that is ready for it, if there is any
    if like.is_meta or tensor is like:
        rounds = isinstance(like, Weight8) and not isinstance(tensor, Weight8)
        return Weight8.of(tensor) if rounds else tensor
    if isinstance(like, Weight8) and not isinstance(tensor, Weight8):
        like.write(tensor)
        return like
    for place, x in zip(in_memory(like), in_memory(tensor), strict=True):
        place.copy_(x)
    return like


def _kept(
    checkpoint: Checkpoint, keys: KeyMap, names: Sequence[str], like: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield key and name of the large tensors that stay as they lie in their file."""
    for name in names:
        if isinstance(like[name], Weight8):
            continue
        key, *others = keys.sources[name].keys
        as_it_lies = not others and key in checkpoint.positions and checkpoint.dtypes[key] == like[name].dtype
        if as_it_lies and checkpoint.nbytes(key) >= SMALL:
            yield key, name


def _memory(checkpoint: Checkpoint, key: str, device: torch.device) -> Tensor:
    return torch.empty(checkpoint.shapes[key], dtype=checkpoint.dtypes[key], device=device)


def check_finite(what: str, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight that another library has read is not finite. what: its file, for the message."""
    weights = {name: x for name, x in state.items() if x.dtype in WEIGHTS and x.numel() and not x.is_meta}
    _check_finite(what, {name: (name,) for name in weights}, {name: x.aminmax() for name, x in weights.items()})


def _check_finite(what: str, keys: Mapping[str, Sequence[str]], extremes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    values = torch.stack([x for pair in extremes.values() for x in pair]) if extremes else torch.empty(0)
    finite = values.isfinite().view(-1, 2).all(dim=1).tolist()  # in the widest of their dtypes
    name = next((name for name, right in zip(extremes, finite, strict=True) if not right), None)
    if name is not None:
        dtype = str(extremes[name][0].dtype).removeprefix("torch.")
        expected = f"finite weights in {dtype}; copy the file again, or name another"
        raise ValueError(f"{what}: got NaN or infinity in {', '.join(keys[name])}, expected {expected}")


@contextmanager
def _emptied_by_errors(*tensors: dict[str, Tensor]) -> Iterator[None]:
    """Drop tensors after an error, which its traceback would hold, in these and in the functions that it names."""
    try:
        yield
    except BaseException as error:
        for each in tensors:
            each.clear()
        one: BaseException | None = error
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__context__
        raise


@contextmanager
def tensor_context(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[None]:
    """Turn errors of reading and combining into ValueError, which `Mesh.on_all_ranks` raises on every rank."""
    try:
        yield
    except (SafetensorError, RuntimeError, IndexError) as error:
        raise ValueError(f"{checkpoint.name}: got {', '.join(keys)}, which do not load: {error}") from error
