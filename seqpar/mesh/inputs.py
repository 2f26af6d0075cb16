"""Broadcasts the caller's inputs from rank 0 at every call, so that all ranks compute with the same values.

If ranks were given different noise, labels or timesteps, each would compute its tokens of another picture, and the
result would be wrong without an error. A call costs one gather of some numbers on the host, at most 40 bytes a rank,
which finds inputs of different shapes or dtypes, and one broadcast of all tensors in one buffer (by NCCL on GPUs).
When it wins: always; a comparison of the inputs would send as many bytes and also wait for the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.mesh.errors import WHO
from seqpar.mesh.mesh import Axis, Mesh, collected, finish, gathered
from seqpar.mesh.watch import LostRankError

T = TypeVar("T")


def collect_on_axis(axis: Axis, value: T, kind: Any) -> list[T]:
    """Return a small value of every rank of the axis, in order; see `collected`. No rank returns before all called."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return collected(axis, here, value, kind, f"axis {axis.name}, memory that its ranks share")


CALL = "call"  # the name in a form of what a rank does; ranks that do different things are told so
ALIGN = 16  # bytes; tensors start at multiples of it in the buffer, so that views of any dtype are possible
NUMBERS = 3  # how many numbers travel with a comparison


def agree(mesh: Mesh, form: Mapping[str, object], vote: bool = False) -> bool:
    """Return whether any rank votes, as on what only one of them may see; see `compared`."""
    return any(voted for voted, *_ in compared(mesh, form, [vote]))


def compared(mesh: Mesh, form: Mapping[str, object], numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in rank order; raise the same ValueError on every rank if `form` differs.

    Values of `form` are compared by `repr`; the value of `CALL` says what this rank does ("calls X"). numbers: at most
    `NUMBERS`, others are 0; they travel with the comparison, so that ranks can decide together without a further
    message. All comparisons are of one size, because ranks that do different things meet in one. Raises TimeoutError if
    a rank does not take part; see `from_rank_0`.
    """
    numbers = [*numbers, *[0] * (NUMBERS - len(numbers))]
    if mesh.world.size == 1:
        return [numbers]
    texts = {name: str(value) if name == CALL else repr(value) for name, value in sorted(form.items())}
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True), *numbers])
    every = gathered(mesh.world, mesh.device, mine, "the comparison of the forms of all ranks' inputs")
    if len(set(every[:, 0].tolist())) > 1:
        raise ValueError(_difference(mesh.collect(texts, dict[str, str])))
    return every[:, 1:].tolist()


def from_rank_0(
    mesh: Mesh, tensors: Mapping[str, Tensor], form: Mapping[str, object] | None = None
) -> dict[str, Tensor]:
    """Return rank 0's tensors on this rank's device, as views of one buffer; with one rank the tensors unchanged.

    form: other settings that must be equal on all ranks. Raises the same ValueError on every rank if names, shapes,
    dtypes or `form` differ between ranks. Every rank must call this at the same time: raises TimeoutError if one does
    not within the deadline of the host (`seqpar.mesh.watch`), or has ended.
    """
    agree(mesh, {**shapes(tensors), **(form or {})})
    return broadcast(mesh, tensors)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype): what must be equal on all ranks before a `broadcast`."""
    return {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}


def broadcast(mesh: Mesh, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return rank 0's tensors like `from_rank_0`, where `agree` has already found equal `shapes` on all ranks."""
    if mesh.world.size == 1:
        return dict(tensors)
    rooms, buffer = _rooms(mesh, tensors)
    if mesh.is_main:
        for name, room in rooms.items():
            room.copy_(tensors[name].detach())
    if len(buffer):
        group = mesh.world.group
        what = "the broadcast of rank 0's inputs"
        with mesh.call(mesh.world, what, True):  # by NCCL the device waits, which only the watch over calls sees
            finish(mesh.world, buffer.device, lambda wait: dist.broadcast(buffer, 0, group, not wait), what)
    return rooms


def streams_of_rank_0(mesh: Mesh, work: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Run `work` on rank 0 alone and return its tensors on every rank, on the CPU; if it fails, raise one error on all.

    Other ranks need not know names, shapes or dtypes, which come first.
    """
    tensors: dict[str, Tensor] = {}

    def forms() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tensors.update(work())
        return {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}

    kinds = mesh.on_rank_0(forms, dict[str, tuple[tuple[int, ...], torch.dtype]])
    if not mesh.is_main:
        tensors.update({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()})
    return {name: x.cpu() for name, x in broadcast(mesh, tensors).items()}


def _rooms(mesh: Mesh, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return (a view for each tensor in one buffer on this rank's device, the buffer)."""
    sizes = {name: x.numel() * x.element_size() for name, x in tensors.items()}
    buffer = torch.empty(
        sum(-(-size // ALIGN) * ALIGN for size in sizes.values()), dtype=torch.uint8, device=mesh.device
    )
    rooms, start = {}, 0
    for name in sorted(tensors):
        room = buffer[start : start + sizes[name]].view(tensors[name].dtype)
        rooms[name] = room.view(tensors[name].shape)
        start += -(-sizes[name] // ALIGN) * ALIGN
    return {name: rooms[name] for name in tensors}, buffer


def _difference(every: list[dict[str, str]]) -> str:
    """Return a message that names the first input in which a rank differs from rank 0; LostRankError if none does."""
    first = every[0]
    differing = [rank for rank, texts in enumerate(every) if texts != first]
    if not differing:
        raise LostRankError(f"got unequal digests of equal forms of inputs, expected the digest of each form; {WHO}")
    rank, other = differing[0], every[differing[0]]
    if first.get(CALL) != other.get(CALL):
        here, there = (texts.get(CALL, "makes another call") for texts in (first, other))
        return (
            f"got ranks that do different things: rank 0 {here}, rank {rank} {there}, expected the same on all ranks: "
            f"steps, output_type, callbacks and interrupts have to be the same, and none may fail on one rank alone"
        )
    name = next(name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name))
    got, wanted = other.get(name, "nothing"), first.get(name, "nothing")
    return (
        f"got {name} {got} on rank {rank}, expected {wanted} as on rank 0: only values of tensors may differ between "
        f"ranks (rank 0's are used)"
    )
