"""The process mesh with axes data x cfg x ring x ulysses; built once and passed on as an argument.

Only this file and `processes.py` read rank and world size from torch.distributed. Rank = ((d*C + c)*R + r)*U + u:
neighbours on the `ulysses` axis are neighbours on the machine, because that axis moves the most bytes.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from seqpar.mesh.board import ROOM, SIZE, Board, anonymous, name_of, nbytes_for, path_of
from seqpar.mesh.errors import SMALL, SharedError, decode_all, encode, length, padded
from seqpar.mesh.processes import boards, group_timeout, join, watch
from seqpar.mesh.processes import close as close
from seqpar.mesh.processes import on_fatal as on_fatal
from seqpar.mesh.watch import Deadlines, LostRankError, Watch

T = TypeVar("T")
AXES = ("data", "cfg", "ring", "ulysses")
SHARED = "a small value of rank 0"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: the local rank on it, its size, process group (None for size 1) and watchdog."""

    name: str
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    watch: Watch | None = field(default=None, compare=False, repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the axis; empty without a process group."""
        return () if self.group is None else tuple(dist.get_process_group_ranks(self.group))


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank, and its device.

    `sequence` is ring x ulysses flattened. `replica` is cfg x ring x ulysses flattened: the ranks that share images.
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
        """Return a mesh of one rank, without a process group. "cuda" means the current GPU."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return Mesh(*(Axis(name) for name in (*AXES, "sequence", "replica", "world")), device=device)

    @staticmethod
    def joined(device: torch.device | str | None = None, *, deadlines: Deadlines | None = None) -> Mesh:
        """Return a mesh of all processes with axes of size 1, on which ranks can exchange values before axes exist."""
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
        all remaining ranks. deadlines: for all meshes of this process from now on; None keeps the current ones
        (`Deadlines()` at first). Raises ValueError if the product of the axes is not the number of processes.
        """
        device = None if device is None else Mesh.single(device).device
        _, world = join(device, deadlines)
        device = device or pick_device(world)
        sizes = fill(world, data, cfg, ring, ulysses, guidance)
        mesh = Mesh.of_first(world, dict(zip(AXES, sizes, strict=True)), device)
        assert mesh is not None
        return mesh

    @staticmethod
    def of_first(ranks: int, sizes: Mapping[str, int], device: torch.device) -> Mesh | None:
        """Return a mesh of the first `ranks` processes; None on the other processes. Collective: call on all processes.

        sizes: axis name -> size. Raises ValueError if their product is not `ranks`, or if there are fewer processes.
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
        if group not in boards():
            boards()[group] = _board_of(everyone, device)
        return Mesh(**{"replica": everyone, **axes}, world=everyone, device=device)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name).size for name in AXES}

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of this rank's waits for others."""
        return Deadlines() if self.world.watch is None else self.world.watch.deadlines

    def call(self, axis: Axis, what: str, is_first: bool) -> AbstractContextManager[None]:
        """Context in which a call is queued that exchanges data on an axis; see `Watch.call`."""
        if axis.watch is None:
            return nullcontext()
        return axis.watch.call(what, axis.ranks, is_first, self.device)

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "one rank"

    def share(self, value: T, kind: Any) -> T:
        """Return rank 0's small value on every rank. kind: its type, as for `errors.encode`.

        Raises the same ValueError on every rank if the value is not of the kind, LostRankError for a malformed message.
        """
        if self.world.size == 1:
            return value
        message = encode(value, kind) if self.is_main else b""
        device, group = host(self.world, self.device), self.world.group

        def broadcast(size: int) -> torch.Tensor:
            buffer = padded(message, size).to(device)
            finish(self.world, device, lambda wait: dist.broadcast(buffer, 0, group, not wait), SHARED)
            return buffer

        buffer = broadcast(SMALL)
        if (longer := length(buffer, 0, SHARED)) > SMALL:
            buffer = broadcast(longer)
        return decode_all([buffer], kind, SHARED)[0]

    def on_rank_0(self, work: Callable[[], T], kind: Any) -> T:
        """Run `work` on rank 0 alone and return its result on every rank, or raise its error on all. One exchange."""
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
        shared (`SharedError`): ValueError, TimeoutError, OSError. Any other exception is a bug and is raised unchanged.
        """
        result, error = None, None
        try:
            result = work()
        except LostRankError:
            raise  # other ranks have exited or are stopped: nothing can be shared with them
        except (ValueError, OSError) as raised:
            error = raised
        errors = self.collect(None if error is None else SharedError.of(error), SharedError | None)
        failed = next(((rank, shared) for rank, shared in enumerate(errors) if shared is not None), None)
        if failed is None:
            return result  # pyright: ignore[reportReturnType]
        rank, shared = failed
        everywhere = all(other is not None and other.text == shared.text for other in errors)
        raise shared.error(None if everywhere else f"rank {rank}: {shared.text}") from error

    def collect(self, value: T, kind: Any) -> list[T]:
        """Return a small value of every rank, in rank order; the same ValueError on all if one is not of the kind."""
        return collected(self.world, self.device, value, kind)


def collected(
    axis: Axis, device: torch.device, value: T, kind: Any, what: str = "small values of all ranks"
) -> list[T]:
    """Return a small value of every rank of an axis, in rank order, like `Mesh.collect`."""
    if axis.size == 1:
        return [value]
    message = encode(value, kind)
    buffers = gathered(axis, device, padded(message, SMALL), what)
    longest = max(length(buffer, rank, what) for rank, buffer in enumerate(buffers))
    if longest > SMALL:
        buffers = gathered(axis, device, padded(message, longest), what)
    return decode_all(buffers, kind, what)


def host(axis: Axis, device: torch.device) -> torch.device:
    """Return the device for exchanging small values: the CPU if the process group supports it, else the rank's."""
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(axis.group) else device


def gathered(axis: Axis, device: torch.device, local: torch.Tensor, what: str) -> torch.Tensor:
    """Return a small tensor of one dim from every rank of an axis, in rank order: (ranks, length).

    device: of the ranks. what: the gathered values, for the error of a rank that times out.
    """
    board = None if axis.group is None or local.is_cuda else boards().get(axis.group)
    if axis.watch is not None and board is not None:
        fits = 0 < local.nbytes <= ROOM
        size = SIZE.pack(local.nbytes)  # also of what gloo gathers: a rank that failed alone is at another exchange
        axis.watch.host(posting := board.post(size + (local.numpy().tobytes() if fits else b"")), what, axis.ranks)
        apart = [rank for rank, value in zip(axis.ranks, posting.values, strict=True) if not value.startswith(size)]
        if apart:
            raise LostRankError(
                f"ranks do different things: rank {axis.watch.rank} is at {what}, rank {apart[0]} at another exchange. "
                f"All ranks must make the same calls, and none may fail on one rank alone: see the output of the others"
            )
        if fits:
            values = b"".join(value[SIZE.size :][: local.nbytes] for value in posting.values)
            return torch.frombuffer(bytearray(values), dtype=local.dtype).view(axis.size, -1)
    local = local.to(host(axis, device))
    output = local.new_empty(axis.size * len(local))
    # torch 2.13 renames this function and warns about the older name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    finish(axis, local.device, lambda wait: gather(output, local, group=axis.group, async_op=not wait), what)
    return output.view(axis.size, -1)


def _board_of(axis: Axis, device: torch.device) -> Board | None:
    """Return a new board of an axis; None for ranks of several machines or without shared memory. Collective."""
    named = collected(axis, device, (socket.gethostname(), os.getpid()), tuple[str, int])
    if len({name for name, _ in named}) > 1:
        return None
    size, path, memory = nbytes_for(axis.size), "", None
    with ExitStack() as opened:
        if axis.rank == 0:
            with suppress(OSError):
                file = opened.enter_context(anonymous())
                os.posix_fallocate(file.fileno(), 0, size)
                path = name_of(file)
        path = collected(axis, device, path, str)[0]
        with suppress(OSError, LostRankError), open(path_of(path), "r+b") as shared:  # or a container hides rank 0
            memory = memoryview(mmap.mmap(shared.fileno(), size))
        everywhere = all(collected(axis, device, memory is not None, bool))
    return Board(axis.rank, memory, [pid for _, pid in named]) if everywhere and memory is not None else None


def finish(axis: Axis, device: torch.device, start: Callable[[bool], dist.Work | None], what: str) -> None:
    """Start an exchange of tensors on a device, and wait for it as long as ranks may work on their hosts.

    start(wait): starts it. With `wait` it returns when the exchange is done, or by NCCL when it is queued.
    Raises TimeoutError if a rank is late or has exited. what: the exchange, for the error.
    """
    if axis.watch is None or device.type == "cuda":
        start(True)
    elif (work := start(False)) is not None:
        axis.watch.host(work, what, axis.ranks)


def pick_device(world: int) -> torch.device:
    """Return this process's GPU, or the CPU without GPUs; raises ValueError if there are fewer GPUs than processes.

    torchrun's LOCAL_RANK selects the GPU. A process without it uses the current one (torch.cuda.set_device).
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    local = int(os.environ["LOCAL_RANK"])
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    if processes > gpus:
        raise ValueError(
            f"{processes} processes for {gpus} GPU(s); at most one per GPU. Use --nproc_per_node={gpus}, or "
            f"CUDA_VISIBLE_DEVICES='' for CPU."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype of weights and activations: bf16 on GPUs, fp32 on CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fill(
    world: int, data: int, cfg: int | None, ring: int, ulysses: int | None, guidance: bool
) -> tuple[int, int, int, int]:
    """Return the four axis sizes, choosing those that are None; raises ValueError if their product is not `world`."""
    requested = {"data": data, "cfg": cfg, "ring": ring, "ulysses": ulysses}
    for name, size in requested.items():
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"got {name}={size!r}, expected a whole number of at least 1")
    if cfg is not None and cfg > 2:
        raise ValueError(f"got cfg={cfg}, expected 1 or 2: guidance has two branches")
    rest = world // prod(size for size in requested.values() if size is not None)
    if cfg is None:
        cfg = 2 if guidance and rest > 0 and rest % 2 == 0 else 1
    if ulysses is None:
        ulysses = max(1, world // (data * cfg * ring))
    sizes = (data, cfg, ring, ulysses)
    if prod(sizes) != world:
        shown = " x ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(
            f"got a mesh of {shown}, {prod(sizes)} ranks, for {world} process(es); change --mesh or start "
            f"{prod(sizes)} processes"
        )
    return sizes


def _groups(rank: int, ranks_DCRU: torch.Tensor) -> dict[str, Axis]:
    """Return this rank's axes by name; none if the rank is not in `ranks_DCRU`. All processes create all groups."""
    axes, groups, timeout = {}, {}, group_timeout()
    dims_by_name: dict[str, tuple[int, ...]] = {name: (dim,) for dim, name in enumerate(AXES)}
    dims_by_name["sequence"] = (2, 3)
    if len(ranks_DCRU) > 1 or ranks_DCRU.shape[1] == 1:  # else it is the world, which has a communicator
        dims_by_name["replica"] = (1, 2, 3)
    for name, dims in dims_by_name.items():
        others = [dim for dim in range(4) if dim not in dims]
        lines = ranks_DCRU.permute(*others, *dims).flatten(0, len(others) - 1).flatten(1).tolist()
        key = tuple(map(tuple, lines))
        if key not in groups:  # sequence often has the ranks of ulysses, and then shares its communicator
            several = len(lines[0]) > 1
            groups[key] = dist.new_subgroups_by_enumeration(lines, timeout)[0] if several else None
        group, line = groups[key], next((line for line in lines if rank in line), None)
        if line is None:
            continue
        assert group is None or isinstance(group, dist.ProcessGroup)
        axes[name] = Axis(name, line.index(rank), len(line), group, None if group is None else watch())
        if group is not None:
            watch().add(group)
    return axes


# Groups that are made for one use and destroyed after it ----------------------------------------------------------


BACKENDS = "cpu:gloo,cuda:nccl"  # of the process group that is made where torch's default one has only NCCL


class OwnedMesh:
    """A mesh with the process groups that were made for it, which `end` destroys. Collective.

    callers: a caller's mesh, whose groups stay; None makes one of these sizes. Ranks can compare small numbers on the
    host, also where the group of a caller's mesh has NCCL alone.
    """

    def __init__(self, callers: Mesh | None, sizes: Mapping[str, int]) -> None:
        _destroy_dropped(callers or Mesh.joined())
        mesh = callers or Mesh.from_env(*(sizes[name] for name in AXES))
        if not _has_host(mesh):
            group: Any = dist.new_group(backend=BACKENDS)
            mesh = replace(mesh, world=replace(mesh.world, group=group))
        self._groups = _groups_beside(mesh, callers)
        self.mesh = mesh
        self._collected = finalize(self, _drop, self._groups, mesh.device.type, mesh.world.watch)
        self._collected.atexit = False

    def end(self) -> None:
        """Destroy the groups that were made."""
        self._collected.detach()
        _end(self._groups, self.mesh)


def end_groups(mesh: Mesh, retained: Mesh) -> None:
    """Destroy the groups that were made for a mesh, and not those that another mesh has. Collective."""
    _end(_groups_beside(mesh, retained), mesh)


def _end(groups: Sequence[dist.ProcessGroup], mesh: Mesh) -> None:
    if groups and mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # nothing of a group may run when it ends
    for group in groups:
        _destroy(group)


def _groups_beside(mesh: Mesh, callers: Mesh | None) -> list[dist.ProcessGroup]:
    # groups that were made for a mesh: not torch's default one, nor those of the caller
    retained = [dist.group.WORLD, *_groups_of(callers)]
    return [group for group in _groups_of(mesh) if not any(group is other for other in retained)]


def _drop(groups: Sequence[dist.ProcessGroup], device: str, watch: Watch | None) -> None:
    # The mesh was collected without an end, at different times on the ranks. Destroying a group of NCCL waits for its
    # other ranks, which may wait for this one, so it is left to the next mesh; so is any group that another thread
    # collects, because the watchdog's thread must not wait.
    at_once = device == "cpu" and threading.current_thread() is threading.main_thread()
    for group in groups:
        if at_once:
            _destroy(group)
        elif watch is not None:
            watch.dropped[group.group_name] = group


def _destroy_dropped(mesh: Mesh) -> None:
    # the groups that all of their ranks have dropped; collective
    if mesh.world.size == 1 or mesh.world.watch is None:
        return
    dropped, ranks = mesh.world.watch.dropped, mesh.world.ranks
    per_rank = dict(zip(ranks, mesh.collect(sorted(dropped), list[str]), strict=True))
    for name, group in sorted(dropped.items()):  # in one order on all ranks
        if all(name in per_rank.get(rank, ()) for rank in dist.get_process_group_ranks(group)):
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            _destroy(dropped.pop(name))


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError):  # torch has destroyed it with all others
        dist.destroy_process_group(group)


def _has_host(mesh: Mesh) -> bool:
    return mesh.world.size == 1 or mesh.device.type == "cpu" or "cpu:" in dist.get_backend_config(mesh.world.group)


def _groups_of(mesh: Mesh | None) -> list[dist.ProcessGroup]:
    axes = [] if mesh is None else [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
    return list({id(axis.group): axis.group for axis in axes if axis.group is not None}.values())
