"""Broadcasts rank 0's inputs at every call, so that all ranks compute with the same values.

If ranks got different noise, labels or timesteps, each would compute its tokens of another image, and the result would
be wrong without an error. Cost per call: one gather on the host (at most 40 bytes per rank), which finds inputs whose
shapes or dtypes differ, and one broadcast of all tensors in one buffer (by NCCL on GPUs).
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
Form = tuple[tuple[int, ...], torch.dtype]


CALL = "call"  # the name of a rank's action in a form: ranks whose actions differ get a separate message
ALIGN = 16  # bytes; tensors start at multiples of it in the buffer, so that views of any dtype are possible
NUMBERS = 4  # numbers that are sent with a comparison


def collect_on_axis(axis: Axis, value: T, kind: Any) -> list[T]:
    """Return a small value of every rank of an axis, in rank order. A barrier: none returns before all have called."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return collected(axis, device, value, kind, f"axis {axis.name}, memory that its ranks share")


def agree(mesh: Mesh, form: Mapping[str, object], vote: bool = False) -> bool:
    """Compare `form` across ranks like `compared`, and return whether any rank votes."""
    return any(voted for voted, *_ in compared(mesh, form, [vote]))


class Described:
    """What ranks compare: values by their names, compared by `repr`. `CALL` says what this rank does ("calls X")."""

    def __init__(self, form: Mapping[str, object]) -> None:
        self.texts = {name: str(value) if name == CALL else repr(value) for name, value in sorted(form.items())}
        digest = hashlib.blake2b(repr(self.texts).encode(), digest_size=8).digest()
        self.digest = int.from_bytes(digest, "big", signed=True)


def compared(mesh: Mesh, form: Mapping[str, object] | Described, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in rank order; raise the same ValueError on every rank if `form` differs.

    numbers: at most
    `NUMBERS`, sent with the comparison, so that ranks can decide together without another message. All comparisons have
    one size, because ranks that do different things meet in one. Raises TimeoutError if a rank does not take part.
    """
    numbers = [*numbers, *[0] * (NUMBERS - len(numbers))]
    if mesh.world.size == 1:
        return [numbers]
    described = form if isinstance(form, Described) else Described(form)
    local = torch.tensor([described.digest, *numbers])
    per_rank = gathered(mesh.world, mesh.device, local, "the comparison of the forms of all ranks' inputs")
    if len(set(per_rank[:, 0].tolist())) > 1:
        raise ValueError(_difference(mesh.collect(described.texts, dict[str, str])))
    return per_rank[:, 1:].tolist()


def from_rank_0(
    mesh: Mesh, tensors: Mapping[str, Tensor], form: Mapping[str, object] | None = None
) -> dict[str, Tensor]:
    """Return rank 0's tensors on the local device, as views of one buffer; one rank keeps its tensors. Collective.

    form: other settings that must be equal on all ranks. Raises the same ValueError on every rank if names, shapes,
    dtypes or `form` differ between ranks, TimeoutError if a rank is late by the deadline of the host or has exited.
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
    views, buffer = _views(mesh, tensors)
    if mesh.is_main:
        for name, view in views.items():
            view.copy_(tensors[name].detach())
    if len(buffer):
        group = mesh.world.group
        what = "the broadcast of rank 0's inputs"
        with mesh.call(mesh.world, what, True):  # by NCCL the device waits, which only the watchdog over calls sees
            finish(mesh.world, buffer.device, lambda wait: dist.broadcast(buffer, 0, group, not wait), what)
    return views


def streams_of_rank_0(mesh: Mesh, work: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Run `work` on rank 0 alone and return its tensors on every rank, on the CPU; if it fails, raise one error on all.

    Other ranks need not know names, shapes or dtypes, which are sent first.
    """
    tensors: dict[str, Tensor] = {}

    def forms() -> dict[str, Form]:
        tensors.update(work())
        return {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}

    kinds = mesh.on_rank_0(forms, dict[str, Form])
    if not mesh.is_main:
        tensors.update({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()})
    return {name: x.cpu() for name, x in broadcast(mesh, tensors).items()}


def _views(mesh: Mesh, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    sizes = {name: x.numel() * x.element_size() for name, x in tensors.items()}
    spans = {name: -(-size // ALIGN) * ALIGN for name, size in sizes.items()}
    buffer = torch.empty(sum(spans.values()), dtype=torch.uint8, device=mesh.device)
    views, start = {}, 0
    for name in sorted(tensors):
        views[name] = buffer[start : start + sizes[name]].view(tensors[name].dtype).view(tensors[name].shape)
        start += spans[name]
    return {name: views[name] for name in tensors}, buffer


def _difference(per_rank: list[dict[str, str]]) -> str:
    """Return a message with the first input in which a rank differs from rank 0; raises LostRankError if none does."""
    first = per_rank[0]
    differing = [rank for rank, texts in enumerate(per_rank) if texts != first]
    if not differing:
        raise LostRankError(f"digests of inputs differ between ranks, but the inputs are equal; {WHO}")
    rank, other = differing[0], per_rank[differing[0]]
    if first.get(CALL) != other.get(CALL):
        here, there = (texts.get(CALL, "makes another call") for texts in (first, other))
        return (
            f"ranks do different things: rank 0 {here}, rank {rank} {there}. All ranks must make the same calls: "
            f"steps, output_type, callbacks and interrupts have to be equal, and none may fail on one rank alone."
        )
    name = next(name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name))
    got, expected = other.get(name, "nothing"), first.get(name, "nothing")
    return (
        f"got {name} {got} on rank {rank}, expected {expected} as on rank 0: only values of tensors may differ between "
        f"ranks (rank 0's are used)"
    )
