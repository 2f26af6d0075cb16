"""Parking: parts of a pipeline that take turns in one buffer of the device, while the others wait in host memory.

A denoising run of Wan 2.2 computes its early steps with one transformer and its late steps with the other, and encodes
texts before both. Transformers of one layout have the same places in the buffer, so that CUDA graphs stay valid and no
memory is allocated when parts change; encoders lie over a transformer's first bytes. What waits is in page-locked
memory, once. A change exchanges the bytes of buffer and memory, so that writes to weights stay with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from seqpar.kernels.weight8 import Weight8, in_memory
from seqpar.loading.originals import ALIGNED, lock

CHUNK = 1 << 25  # bytes that are exchanged at once
SEAT = "_seqpar_seat"  # the attribute of a parked module that holds its `Seat`
ENCODERS = "the encoders"


def bring(module: nn.Module) -> None:
    """Have a module's weights in memory of its device; nothing for a module that is not parked."""
    if (seat := seat_of(module)) is not None:
        seat.bring()


def seat_of(module: nn.Module) -> Seat | None:
    """Return a parked module's seat, or None."""
    return vars(module).get(SEAT)


def bytes_on(device: torch.device, modules: Iterable[nn.Module]) -> int:
    """Return the bytes of modules' weights and buffers on a device, whichever of the parked ones are there now."""
    modules = list(modules)
    parkings = {id(seat.parking): seat.parking for module in modules if (seat := seat_of(module)) is not None}
    held = {
        (x.data_ptr(), x.nbytes)
        for module in modules
        for weight in (*module.parameters(), *module.buffers())
        if weight.device == device and not isinstance(weight.data, Absent)
        for x in in_memory(weight)
        if not any(parking.holds(x) for parking in parkings.values())
    }
    return sum(nbytes for _, nbytes in held) + sum(parking.nbytes for parking in parkings.values())


@dataclass(frozen=True)
class Seat:
    """How a parked module gets its weights. original: returns a weight by its name as it is in its file."""

    parking: Parking
    name: str
    original: Callable[[str], Tensor]

    def bring(self, *_: object) -> None:
        self.parking.bring(self.name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ValueError("A parked module cannot be copied: load the pipeline without park")


@dataclass(frozen=True)
class WeightLayout:
    """Where the tensors of weights lie: by weight, the first byte of each of its `in_memory` tensors. size: of all."""

    starts: Mapping[str, tuple[int, ...]]
    size: int

    @staticmethod
    def of(like: Mapping[str, Tensor], joined: Iterable[Sequence[str]] = ()) -> WeightLayout:
        """Lay out tensors like these. joined: names of weights that are read as one matrix, and so must be adjacent."""
        starts, end = dict[str, list[int]]({name: [] for name in like}), 0
        for names in (*joined, *((name,) for name in like)):
            names = [name for name in names if name in like and not starts[name]]
            alike = len({(type(like[name]), like[name].dtype) for name in names}) == 1
            for run in (names,) if alike else [(name,) for name in names]:
                for tensors in zip(*(in_memory(like[name]) for name in run), strict=True):
                    end = -(-end // ALIGNED) * ALIGNED
                    for name, tensor in zip(run, tensors, strict=True):
                        starts[name].append(end)
                        end += tensor.nbytes
        return WeightLayout({name: tuple(of) for name, of in starts.items()}, end)

    def of_weight(self, name: str, like: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of a weight in memory, a tensor of bytes. Writes to this do not change their versions."""
        tensors = zip(self.starts[name], in_memory(like), strict=True)
        return tuple(memory[at : at + x.nbytes].view(x.dtype).view(x.shape).data for at, x in tensors)


class Absent(Tensor):
    """A weight that is parked: all that a tensor says of itself without its numbers, and an error for these."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Absent:
        make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        return make(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Absent(args[0]) if func is torch.ops.aten.detach.default else _refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse()

    def data_ptr(self) -> NoReturn:
        _refuse()

    def untyped_storage(self) -> NoReturn:
        _refuse()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Absent({tuple(self.shape)}, {self.dtype}, {self.device})"


def _refuse() -> NoReturn:
    raise ValueError(
        "A weight was read that is parked in memory of the host. Call its model, or load the pipeline without park"
    )


@dataclass(frozen=True)
class _Place:
    """A parameter's place in a module, and what is there while the part is not in the buffer."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    absent: nn.Parameter

    def put(self, inside: bool) -> None:
        # not where something else has replaced it
        before, after = (self.absent, self.parameter) if inside else (self.parameter, self.absent)
        if self.owner._parameters.get(self.name) is before:
            self.owner._parameters[self.name] = after


def _places(modules: Iterable[nn.Module]) -> list[_Place]:
    owners = (owner for module in modules for owner in module.modules())
    held = ((owner, name, x) for owner in owners for name, x in owner._parameters.items() if x is not None)
    return [_Place(*at, nn.Parameter(Absent(at[-1]), at[-1].requires_grad)) for at in held if at[-1].numel()]


class Parking:
    """The parts of a pipeline that take turns on one device. swaps: how often the buffer's bytes were exchanged."""

    @torch.inference_mode(False)  # weights outlive the caller's mode
    @torch.no_grad()
    def __init__(self, device: torch.device, size: int, encoders: Sequence[nn.Module] = ()) -> None:
        """size: the bytes of the largest transformer. encoders: are parked at once; one of them brings all."""
        self.device, self.size, self.swaps = device, size, 0
        self._inside: str | None = None  # the part in the buffer
        self._under: str | None = None  # the transformer over which the encoders lie
        self._parts, self._waiting = dict[str, list[_Place]](), dict[str, Tensor]()

        # encoders to host memory, before the buffer takes the memory that this leaves
        places = self._parts[ENCODERS] = _places(encoders)
        weights = {f"{id(place.parameter)}": place.parameter for place in places}  # once where places share one
        like = {name: torch.empty_like(x, device="meta") for name, x in weights.items()}
        layout = WeightLayout.of(like)
        waiting = self._waiting[ENCODERS] = self._of_host(layout.size)
        for name, x in weights.items():
            layout.of_weight(name, like[name], waiting)[0].copy_(x)
            x.data = x.new_empty(0)
        torch.cuda.empty_cache()

        self._buffer = torch.empty(max(size, layout.size), dtype=torch.uint8, device=device)
        self._between = torch.empty(2, CHUNK, dtype=torch.uint8, device=device).unbind()
        for name, x in weights.items():
            x.data = layout.of_weight(name, like[name], self._buffer)[0]
        self._put(ENCODERS, False)
        for part in (part for encoder in encoders for part in encoder.modules()):  # pipelines may call layers, too
            part.register_forward_pre_hook(lambda *_: self.bring(ENCODERS))

    @property
    def nbytes(self) -> int:
        """The bytes on the device: the buffer, and what an exchange needs."""
        return self._buffer.nbytes + sum(x.nbytes for x in self._between)

    def holds(self, x: Tensor) -> bool:
        return 0 <= x.data_ptr() - self._buffer.data_ptr() < self._buffer.nbytes

    # Loading ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def room(self, layout: WeightLayout, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a transformer that is to be loaded, in the buffer, which another one leaves."""
        if self._inside is not None:
            waiting = self._waiting[self._inside] = self._of_host(layout.size)
            waiting.copy_(self._buffer[: layout.size])
            self._put(self._inside, False)
        self._inside = None
        tensors = {name: layout.of_weight(name, like[name], self._buffer) for name in layout.starts}
        return {
            name: Weight8(of[0], of[1], like[name].dtype) if isinstance(like[name], Weight8) else of[0]
            for name, of in tensors.items()
        }

    def enter(self, name: str, module: nn.Module, original: Callable[[str], Tensor]) -> None:
        """Park a transformer whose weights are in their room. original: as in `Seat`."""
        self._parts[name], self._inside = _places([module]), name
        seat = vars(module)[SEAT] = Seat(self, name, original)
        module.register_forward_pre_hook(seat.bring)

    def _of_host(self, size: int) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda" and size:
            lock(memory, self.device, "in which parts wait")
        return memory

    # Running ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def bring(self, name: str) -> None:
        """Have a part in the buffer. The device exchanges bytes after what was queued before."""
        if name == self._inside or not self._parts[name]:  # other ranks than 0 have no weights of encoders
            return
        if self._inside == ENCODERS:  # a transformer is under them
            assert self._under is not None
            self._turn(self._under, self._waiting[ENCODERS])
        if name == ENCODERS:
            self._under = self._inside
            self._turn(name, self._waiting[name])
        elif name != self._inside:
            waiting, before = self._waiting.pop(name), self._inside
            assert before is not None
            self._turn(name, waiting)
            self._waiting[before] = waiting

    def _turn(self, name: str, waiting: Tensor) -> None:
        # put a part in the place of that in the buffer, whose bytes then wait
        assert self._inside is not None
        _exchange(self._buffer[: len(waiting)], waiting, self._between)
        self._put(self._inside, False)
        self._put(name, True)
        self._inside = name
        self.swaps += 1

    def _put(self, name: str, inside: bool) -> None:
        for place in self._parts[name]:
            place.put(inside)


def _exchange(buffer: Tensor, waiting: Tensor, between: Sequence[Tensor]) -> None:
    """Exchange the bytes of a buffer on a device with those of host memory, in both directions at the same time."""
    chunks = enumerate(zip(buffer.split(CHUNK), waiting.split(CHUNK), strict=True))
    if buffer.device.type != "cuda":
        for _, (inner, outer) in chunks:
            left = between[0][: len(inner)].copy_(inner)
            inner.copy_(outer)
            outer.copy_(left)
        return
    now = torch.cuda.current_stream(buffer.device)
    up, down = (torch.cuda.Stream(buffer.device) for _ in range(2))
    up.wait_stream(now)
    down.wait_stream(now)
    free = [torch.cuda.Event(), torch.cuda.Event()]  # never recorded: nothing to wait for
    for number, (inner, outer) in chunks:
        left = between[number % 2][: len(inner)]
        with torch.cuda.stream(up):
            up.wait_event(free[number % 2])
            left.copy_(inner)
            inner.copy_(outer, non_blocking=True)
            came = up.record_event()
        with torch.cuda.stream(down):
            down.wait_event(came)
            outer.copy_(left, non_blocking=True)
            free[number % 2].record(down)
    now.wait_stream(up)
    now.wait_stream(down)
