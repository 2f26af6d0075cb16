"""The process mesh with the axes data x cfg x ring x ulysses; it is built once and passed on as an argument.

Only this file and `processes.py` read rank and world size from torch.distributed. Rank = ((d*C + c)*R + r)*U + u, so
that neighbours on the `ulysses` axis are neighbours on the machine, because that axis moves the most bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from seqpar.mesh import errors as messages
from seqpar.mesh.errors import SharedError
from seqpar.mesh.processes import close as close
from seqpar.mesh.processes import group_timeout, join, watch
from seqpar.mesh.processes import on_fatal as on_fatal
from seqpar.mesh.watch import Deadlines, LostRankError, Watch

T = TypeVar("T")
AXES = ("data", "cfg", "ring", "ulysses")
SHARED = "a small value of rank 0"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: this rank's place on it, its size and its process group (None for size 1).

    watch: ends waits in vain for the other ranks; None where nobody watches.
    """

    name: str
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    watch: Watch | None = field(default=None, compare=False, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the numbers of the axis's ranks among all processes; empty without a process group."""
        return () if self.group is None else tuple(dist.get_process_group_ranks(self.group))


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank, and the device it computes on.

    `sequence` is ring x ulysses flattened; `replica` is cfg x ring x ulysses flattened: the ranks that share pictures.
    """

    data: Axis
    cfg: Axis
    ring: Axis
    ulysses: Axis
    sequence: Axis
    replica: Axis
    world: Axis
    device: torch.device

    @staticmethod
    def single(device: torch.device | str = "cpu") -> Mesh:
        """Return a mesh of one rank, which needs no process group. A GPU without a number is the current one."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return Mesh(*(Axis(name) for name in (*AXES, "sequence", "replica", "world")), device=device)

    @staticmethod
    def joined(device: torch.device | str | None = None, *, deadlines: Deadlines | None = None) -> Mesh:
        """Return a mesh of all processes whose axes have size 1; ranks can exchange objects on it to agree on axes.

        deadlines: see `from_env`.
        """
        device = None if device is None else Mesh.single(device).device
        rank, world = join(device, deadlines)
        mesh = Mesh.single(device or pick_device(world))
        return mesh if world == 1 else replace(mesh, world=Axis("world", rank, world, dist.group.WORLD, watch()))

    @staticmethod
    def from_env(
        data: int = 1,
        cfg: int | None = None,
        ring: int = 1,
        ulysses: int | None = None,
        *,
        guidance: bool = False,
        device: torch.device | str | None = None,
        deadlines: Deadlines | None = None,
    ) -> Mesh:
        """Return the mesh of all processes that torchrun started (or of the existing group), else of one process.

        cfg: None means 2 if there is guidance and the number of remaining ranks is even, else 1. ulysses: None means
        all remaining ranks. deadlines: how long ranks wait for each other, for all meshes of this process from now on;
        None leaves them as they are (`Deadlines()` at first). Raises ValueError if the product of the axes is not the
        number of processes.
        """
        device = None if device is None else Mesh.single(device).device
        rank, world = join(device, deadlines)
        device = device or pick_device(world)
        sizes = fill(world, data, cfg, ring, ulysses, guidance)
        if world == 1:
            return Mesh.single(device)
        everyone = Axis("world", rank, world, dist.group.WORLD, watch())
        axes = {"replica": everyone, **_groups(rank, torch.arange(world).view(sizes))}
        return Mesh(**axes, world=everyone, device=device)

    @staticmethod
    def of_first(ranks: int, sizes: Mapping[str, int], device: torch.device) -> Mesh | None:
        """Return a mesh of the first `ranks` processes, or None on every other process.

        sizes: axis name -> size. Every process must call this at the same time, because torch makes process groups
        together. Raises ValueError if the product of the sizes is not `ranks`, or if there are fewer processes.
        """
        rank, world = join(device)
        if not 1 <= ranks <= world:
            raise ValueError(f"got a mesh of {ranks} ranks for {world} process(es), expected 1 to {world}")
        counts = fill(ranks, *(sizes[name] for name in AXES), guidance=False)
        if ranks == 1:
            return Mesh.single(device) if rank == 0 else None
        axes = _groups(rank, torch.arange(ranks).view(counts))
        group = dist.group.WORLD if ranks == world else dist.new_group(list(range(ranks)))
        if rank >= ranks:
            return None
        assert isinstance(group, dist.ProcessGroup)
        everyone = Axis("world", rank, ranks, group, watch())
        return Mesh(**{"replica": everyone, **axes}, world=everyone, device=device)

    @property
    def sizes(self) -> dict[str, int]:
        """Return axis name -> size."""
        return {name: getattr(self, name).size for name in AXES}

    @property
    def deadlines(self) -> Deadlines:
        """Return how long this rank waits for others."""
        return Deadlines() if self.world.watch is None else self.world.watch.deadlines

    def call(self, axis: Axis, what: str, is_first: bool) -> AbstractContextManager[None]:
        """Return a context in which a call is queued that exchanges data on an axis; the watch looks whether it ends.

        what: the call, for the error. is_first: whether the longer deadline holds (`seqpar.mesh.watch.Calls`).
        """
        if axis.watch is None:
            return nullcontext()
        return axis.watch.call(what, axis.ranks, is_first, self.device)

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes for all."""
        return self.world.rank == 0

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "one rank"

    def share(self, value: T, kind: Any) -> T:
        """Return rank 0's value on every rank. kind: its type, see `messages`; tensors go by `inputs.broadcast`.

        Raises the same ValueError on every rank if the value is not of the kind, and LostRankError for what no rank
        can have sent.
        """
        if self.world.size == 1:
            return value
        message = messages.encode(value, kind) if self.is_main else b""
        sealed = self._broadcast(messages.padded(message, messages.SMALL))
        if (longer := messages.length(sealed, 0, SHARED)) > messages.SMALL:
            sealed = self._broadcast(messages.padded(message, longer))
        return messages.decode_all([sealed], kind, SHARED)[0]

    def _broadcast(self, sealed: torch.Tensor) -> torch.Tensor:
        device, group = host(self.world, self.device), self.world.group
        sealed = sealed.to(device)
        finish(self.world, device, lambda wait: dist.broadcast(sealed, 0, group, not wait), SHARED)
        return sealed

    def on_rank_0(self, work: Callable[[], T], kind: Any) -> T:
        """Run `work` on rank 0 alone and return its result on every rank; if it fails, raise one error on all.

        It is `on_all_ranks` and `share` in one exchange. kind: the type of the result, see `share`.
        """
        result, error, shared = None, None, None
        if self.is_main:
            try:
                result = work()
            except LostRankError:
                raise
            except (ValueError, OSError) as raised:
                error, shared = raised, SharedError.of(raised)
        if self.world.size > 1:
            result, shared = self.share((result, shared), tuple[kind | None, SharedError | None])
        if shared is not None:
            raise shared.error(f"rank 0: {shared.text}" if self.world.size > 1 else None) from error
        return result  # pyright: ignore[reportReturnType]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; if it fails on any, raise the same error on all.

        Without this, the other ranks would wait for the failed one. Only errors that a user or the system can cause are
        shared, as a ValueError, TimeoutError or OSError (`shared_errors`); any other exception is a bug and is
        raised unchanged.
        """
        result, error = None, None
        try:
            result = work()
        except LostRankError:
            raise  # other ranks have ended or are stopped, so nothing can be shared with them
        except (ValueError, OSError) as raised:
            error = raised
        errors = self.collect(None if error is None else SharedError.of(error), SharedError | None)
        failed = next(((rank, shared) for rank, shared in enumerate(errors) if shared is not None), None)
        if failed is None:
            return result  # pyright: ignore[reportReturnType]
        rank, shared = failed
        everywhere = all(each is not None and each.text == shared.text for each in errors)
        raise shared.error(None if everywhere else f"rank {rank}: {shared.text}") from error

    def collect(self, value: T, kind: Any) -> list[T]:
        """Return a small value of every rank, in rank order, on every rank. kind: its type, see `share`."""
        return collected(self.world, self.device, value, kind)


def collected(
    axis: Axis, device: torch.device, value: T, kind: Any, what: str = "small values of all ranks"
) -> list[T]:
    """Return a small value of every rank of an axis, in rank order, on every rank of it; see `gathered`, `Mesh.share`.

    Raises the same ValueError on every rank if the value of one is not of the kind.
    """
    if axis.size == 1:
        return [value]
    message = messages.encode(value, kind)
    every = gathered(axis, device, messages.padded(message, messages.SMALL), what)
    longest = max(messages.length(each, rank, what) for rank, each in enumerate(every))
    if longest > messages.SMALL:
        every = gathered(axis, device, messages.padded(message, longest), what)
    return messages.decode_all(every, kind, what)


def host(axis: Axis, device: torch.device) -> torch.device:
    """Return the device for exchanging small objects: the CPU if the process group supports it, else this rank's."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(axis.group) else device


def gathered(axis: Axis, device: torch.device, mine: torch.Tensor, what: str) -> torch.Tensor:
    """Return a small tensor of one dimension from every rank of an axis, in rank order: (ranks, its length).

    device: on which the ranks compute. what: is gathered, for the error of a rank that waits in vain.
    """
    mine = mine.to(host(axis, device))
    every = mine.new_empty(axis.size * len(mine))
    # torch 2.13 renames this function and warns about the older name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    finish(axis, mine.device, lambda wait: gather(every, mine, group=axis.group, async_op=not wait), what)
    return every.view(axis.size, -1)


def finish(axis: Axis, device: torch.device, start: Callable[[bool], dist.Work | None], what: str) -> None:
    """Start an exchange of tensors on a device, and wait for it as long as ranks may work on their hosts.

    start(wait): starts it; with `wait` it waits itself, as by NCCL, for which the device waits and not the host.
    Raises TimeoutError, which names what was waited for, if a rank does not come or has ended.
    """
    if axis.watch is None or device.type == "cuda":
        start(True)
    elif (work := start(False)) is not None:
        axis.watch.host(work, what, axis.ranks)


def pick_device(world: int) -> torch.device:
    """Return this process's GPU, or the CPU if there is no GPU; `ValueError` if there are fewer GPUs than processes.

    torchrun's LOCAL_RANK selects the GPU; a process without it uses its current one (torch.cuda.set_device).
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    local = int(os.environ["LOCAL_RANK"])
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    if here > gpus:
        raise ValueError(
            f"got {here} processes on a machine with {gpus} GPU(s), expected at most one process a GPU; start "
            f"{gpus} with --nproc_per_node={gpus}, or hide the GPUs (CUDA_VISIBLE_DEVICES='') to run on the CPU"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype of weights and activations: bf16 on GPUs, fp32 on CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fill(
    world: int, data: int, cfg: int | None, ring: int, ulysses: int | None, guidance: bool
) -> tuple[int, int, int, int]:
    """Return the four axis sizes, choosing those that are None; `ValueError` if their product is not `world`."""
    sizes_by_name = {"data": data, "cfg": cfg, "ring": ring, "ulysses": ulysses}
    for name, size in sizes_by_name.items():
        if size is not None and type(size) is not int:
            raise ValueError(f"got {name}={size!r}, expected a whole number")
        if size is not None and size < 1:
            raise ValueError(f"got {name}={size}, expected at least 1")
    if cfg is not None and cfg > 2:
        raise ValueError(f"got cfg={cfg}, expected 1 or 2: guidance has two branches")
    rest = world // prod(size for size in sizes_by_name.values() if size is not None)
    if cfg is None:
        cfg = 2 if guidance and rest > 0 and rest % 2 == 0 else 1
    if ulysses is None:
        ulysses = max(1, world // (data * cfg * ring))
    sizes = (data, cfg, ring, ulysses)
    if prod(sizes) != world:
        shown = " x ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(
            f"got a mesh of {shown} = {prod(sizes)} ranks for {world} process(es), expected the product to be "
            f"{world}; change --mesh or start {prod(sizes)} processes"
        )
    return sizes


def _groups(rank: int, ranks_DCRU: torch.Tensor) -> dict[str, Axis]:
    """Return this rank's axes by name, none if the rank is not among `ranks_DCRU`.

    There is no `replica` among them where it is the world and not also `sequence`, which has a communicator already.
    Every process creates every group in the same order, because torch requires it.
    """
    axes, groups, timeout = {}, {}, group_timeout()
    joined: list[tuple[str, tuple[int, ...]]] = [("sequence", (2, 3))]
    if len(ranks_DCRU) > 1 or ranks_DCRU.shape[1] == 1:
        joined.append(("replica", (1, 2, 3)))
    for name, dims in [*((name, (dim,)) for dim, name in enumerate(AXES)), *joined]:
        others = [dim for dim in range(4) if dim not in dims]
        lines = ranks_DCRU.permute(*others, *dims).flatten(0, len(others) - 1).flatten(1).tolist()
        key = tuple(map(tuple, lines))
        if key not in groups:  # sequence often has the same ranks as ulysses, and then shares its communicator
            several = len(lines[0]) > 1
            groups[key] = dist.new_subgroups_by_enumeration(lines, timeout)[0] if several else None
        group, mine = groups[key], next((line for line in lines if rank in line), None)
        if mine is None:
            continue
        assert group is None or isinstance(group, dist.ProcessGroup)
        axes[name] = Axis(name, mine.index(rank), len(mine), group, None if group is None else watch())
        if group is not None:
            watch().add(group)
    return axes
