"""Starts and destroys the process group of all ranks, and holds the watchdog over them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from seqpar.mesh.board import Board
from seqpar.mesh.watch import Deadlines, HeartbeatFiles, LostRankError, Watch

MEETING = "SEQPAR_MEETING"  # environment of a rank: the private folder in which the ranks of one machine meet


def join(device: torch.device | None = None, deadlines: Deadlines | None = None) -> tuple[int, int]:
    """Start the process group if torchrun or `seqpar` asks for one and none exists; return (rank, world size).

    deadlines: as for `Mesh.from_env`. Raises TimeoutError with the ranks that did not start in time.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 0, 1
        cuda = torch.cuda.is_available() and (device is None or device.type == "cuda")
        limits = deadlines or Deadlines()
        store, rank, world = _meet(limits)
        _wait_for_all(store, rank, world, limits.first_s)
        # gloo beside NCCL exchanges small host objects without a GPU, and without waiting for one
        backend, timeout = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=limits.host_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if deadlines is not None and dist.get_world_size() > 1:
        watch().deadlines = deadlines
    return dist.get_rank(), dist.get_world_size()


def _meet(limits: Deadlines) -> tuple[Store, int, int]:
    """Return the store in which ranks meet, the rank and the world size; ranks of `seqpar` meet in a file."""
    folder = os.environ.pop(MEETING, None)
    if folder is None:
        return next(rendezvous("env://", timeout=timedelta(seconds=limits.first_s)))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _process().folder = Path(folder)
    try:
        store = dist.FileStore(str(Path(folder, "store")), world)  # pyright: ignore[reportPrivateImportUsage]
    except dist.DistStoreError as error:
        why = f"ranks cannot meet in {folder}: {error}"
        raise dist.DistStoreError(f"{why}; free space there, or set TMPDIR to another folder") from error
    return store, rank, world


def _wait_for_all(store: Store, rank: int, world: int, limit_s: float) -> None:
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store survives a restart of the ranks
    keys = [f"seqpar/started/{run}/{other}" for other in range(world)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise LostRankError(
            f"rank {rank}: timed out after {limit_s:g} s waiting for rank {', '.join(map(str, missing))} of {world} to "
            f"start: it crashed, was not started, or starts slowly. See its output, or raise --first-deadline-s."
        ) from error


class _Process:
    """The process group of all ranks, and the watchdog over it. A process has one of each."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # in which the ranks of a job of `seqpar` meet
        self.group: dist.ProcessGroup | None = None
        self.watch: Watch | None = None
        self.boards = WeakKeyDictionary[dist.ProcessGroup, Board | None]()
        self.on_fatal: Callable[[str], NoReturn] | None = None
        atexit.register(self.leave)

    def current(self) -> Watch:
        group = dist.group.WORLD
        if self.watch is None or self.group is not group:
            self.leave()
            self.group = group
            self.watch = Watch(dist.get_rank(), Deadlines(), self._store())
            self.watch.on_fatal = self.on_fatal or self.watch.on_fatal
            if group is not None:
                self.watch.add(group)
        return self.watch

    def _store(self) -> Store | None:
        """Return a store for heartbeats; None where torch's own store is a file, which only grows."""
        if self.folder is not None:
            return HeartbeatFiles(self.folder)
        store: Any = dist.distributed_c10d._get_default_store()
        under = getattr(store, "_underlying_non_prefix_store", store)
        return store.clone() if isinstance(under, dist.TCPStore) else None  # pyright: ignore[reportPrivateImportUsage]

    def leave(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.group = self.watch = None


@cache
def _process() -> _Process:
    return _Process()


def watch() -> Watch:
    return _process().current()


def boards() -> MutableMapping[dist.ProcessGroup, Board | None]:
    """Return the boards of groups of all ranks of a mesh; None for a group that cannot have one."""
    return _process().boards


def on_fatal(end: Callable[[str], NoReturn]) -> None:
    """End this process by `end`, which gets the error, if a rank is lost and the main thread cannot be woken."""
    _process().on_fatal = end


def group_timeout() -> timedelta:
    """Return the timeout of groups whose ranks exchange in calls only."""
    # NCCL counts from when an exchange is queued, which may be long before it starts; the watchdog keeps the deadline
    limits = watch().deadlines
    on_gpus = "nccl" in dist.get_backend_config()
    return timedelta(seconds=max(limits.host_s, limits.first_s) if on_gpus else limits.first_s)


def close() -> None:
    """Destroy the process group, if there is one, and tell the other ranks."""
    _process().leave()
    if dist.is_initialized():
        dist.destroy_process_group()
