"""Loads checkpoints: one rank of a host reads, converts and places each tensor, and gives it to the others.

Each rank reads its share of the parameters and places them on its own device. When all ranks have done so without an
error, the main thread of each broadcasts the parameters in one order, each from its reader, GPU to GPU. A host so
reads and converts every byte once, whatever the number of its ranks, and no rank ever holds the model in host memory.
The reading itself, and the conversion on the GPU, is in `seqpar/weights/staging.py`. Broadcasts between GPUs are
faster than the host's memory.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from seqpar.ranks.mesh import Axis, Mesh, finish
from seqpar.types.keys import KeyMap
from seqpar.weights.checkpoint import Checkpoint, check
from seqpar.weights.staging import Staging

READERS = 8  # threads a rank at most: one copies less from the page cache, or asks less of a disk, than a GPU takes


@dataclass(frozen=True)
class Team:
    """The ranks of one host, which read a checkpoint together. ranks: their numbers among all; axis: None if alone."""

    rank: int = 0
    ranks: Sequence[int] = (0,)
    axis: Axis | None = None

    @staticmethod
    def of(mesh: Mesh | None) -> Team:
        """Return the team of this rank; every rank of the mesh calls it, because hosts make their groups together."""
        if mesh is None or mesh.world.size == 1:
            return Team()
        hosts = mesh.collect(socket.gethostname(), str)
        teams = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        mine = next(team for team in teams if mesh.world.rank in team)
        group = mesh.world.group if len(teams) == 1 else dist.new_subgroups_by_enumeration(teams)[0]
        assert group is None or isinstance(group, dist.ProcessGroup)
        rank = mine.index(mesh.world.rank)
        return Team(rank, mine, Axis("host", rank, len(mine), group, mesh.world.watch))

    @property
    def size(self) -> int:
        """Return the number of ranks of this host."""
        return len(self.ranks)


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    keys: KeyMap,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh | None = None,
) -> None:
    """Check all keys and shapes, then give `model`, which is on the meta device, its parameters.

    Raises the same ValueError on all ranks before anything is broadcast.
    """
    like = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    place(model, like, checkpoint, keys, device, mesh, lambda: check(model, checkpoint, keys))


def place(
    model: nn.Module,
    like: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    keys: KeyMap,
    device: torch.device,
    mesh: Mesh | None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Give parameters and buffers of `model` their values; each tensor is read by one rank of this host.

    like: name -> a tensor of the meta device with the shape and dtype that it gets, for each name of `keys`. before: a
    check on every rank, whose ValueError is raised on all ranks before a weight is read.
    """
    team = Team.of(mesh)
    readers = shares(checkpoint, keys, team.size)
    share = [name for name in keys.sources if readers[name] == team.rank]

    def mine() -> dict[str, Tensor]:
        before()
        return _read(share, checkpoint, keys, like, device, team)

    placed = mine() if mesh is None else mesh.together(mine)
    for name, meta in like.items():
        tensor = placed.pop(name) if name in placed else torch.empty_like(meta, device=device)
        _give(tensor, team, readers[name])
        put(model, name, tensor)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    own = getattr(module, last)
    setattr(module, last, nn.Parameter(tensor, own.requires_grad) if isinstance(own, nn.Parameter) else tensor)


def _read(
    names: Sequence[str],
    checkpoint: Checkpoint,
    keys: KeyMap,
    like: Mapping[str, Tensor],
    device: torch.device,
    team: Team,
) -> dict[str, Tensor]:
    """Return this rank's share of the tensors, after comparing its share of the keys that must be equal."""
    with Pool(checkpoint, device, team.size) as pool:
        pool.check_repeats(list(keys.repeats.items())[team.rank :: team.size])
        return dict(zip(names, pool.placed(names, keys, like), strict=True))


def _give(tensor: Tensor, team: Team, reader: int) -> None:
    """Broadcast a parameter from the rank of this host that has read it."""
    if team.size > 1 and team.axis is not None:
        group, source = team.axis.group, team.ranks[reader]
        what = "weights that a rank has read"
        finish(team.axis, tensor.device, lambda wait: dist.broadcast(tensor, source, group, not wait), what)


def shares(checkpoint: Checkpoint, keys: KeyMap, parts: int) -> dict[str, int]:
    """Return parameter -> the part that reads it: runs of about equally many numbers, in the order of the key map."""
    sizes = {
        name: sum(prod(checkpoint.shapes.get(key, ())) for key in source.keys) for name, source in keys.sources.items()
    }
    total, before, readers = max(sum(sizes.values()), 1), 0, {}
    for name, size in sizes.items():
        readers[name] = min(parts - 1, (before + size // 2) * parts // total)
        before += size
    return readers


class Pool:
    """The threads of one rank that read a checkpoint, each with its own staging buffers.

    A context manager, which ends the threads. They copy and convert on the device and never call a collective.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, ranks: int) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._checkpoint, self._device = checkpoint, device
        self._local = threading.local()
        # a thread without a core of its own only takes turns; on the CPU an operation has its own threads
        cores = len(os.sched_getaffinity(0)) // ranks
        count = max(1, min(READERS, cores)) if device.type == "cuda" else 1
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Pool:
        """Return this pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads; what was not begun is dropped."""
        self._threads.shutdown(cancel_futures=True)

    def check_repeats(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Raise ValueError if a key differs from the one whose values it must have."""

        def equal_values(pair: tuple[str, str]) -> bool:
            with self._told(pair):
                one, other = (self._staging().fetch(self._checkpoint, key) for key in pair)
                return torch.equal(one, other)

        same = self._threads.map(equal_values, pairs)
        for (key, twin), equal in zip(pairs, same, strict=True):
            if not equal:
                raise ValueError(
                    f"{self._checkpoint.name}: {key} differs from {twin}, expected equal tensors; such a model "
                    f"conditions each block differently, which is not implemented"
                )

    def placed(self, names: Sequence[str], keys: KeyMap, like: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors of these names on the device, in their order; ValueError if one is not finite.

        like: name -> a tensor of the dtype that it gets.
        """

        def made(name: str) -> tuple[Tensor, Tensor]:
            source, dtype = keys.sources[name], like[name].dtype
            with self._told(source.keys):
                parts = (self._staging().fetch(self._checkpoint, key, dtype) for key in source.keys)
                parameter = source.combine(*parts).contiguous()
                return parameter, parameter.sum(dtype=torch.promote_types(dtype, torch.float32))

        results = list(self._threads.map(made, names))
        if self._device.type == "cuda":
            with self._told(["its weights"]):
                torch.cuda.synchronize(self._device)  # an error of a copy is raised here, not by a broadcast
        self._check_finite(names, keys, [total for _, total in results], like)
        return [parameter for parameter, _ in results]

    def _check_finite(
        self, names: Sequence[str], keys: KeyMap, totals: Sequence[Tensor], like: Mapping[str, Tensor]
    ) -> None:
        """Raise ValueError for the first parameter whose sum is not finite: NaN and infinity stay in a sum."""
        finite = torch.stack([total.double() for total in totals]).isfinite().tolist() if totals else []
        bad = next((name for name, right in zip(names, finite, strict=True) if not right), None)
        if bad is not None:
            what = f"NaN or infinity in {', '.join(keys.sources[bad].keys)}"
            expected = (
                f"finite weights in {str(like[bad].dtype).removeprefix('torch.')}; copy the file again, or name another"
            )
            raise ValueError(f"{self._checkpoint.name}: got {what}, expected {expected}")

    @contextmanager
    def _told(self, keys: Sequence[str]) -> Iterator[None]:
        """Turn errors of reading and combining into ValueError, which `Mesh.together` raises on every rank."""
        try:
            yield
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self._checkpoint.name}: got {', '.join(keys)}, which do not load: {error}") from error

    def _staging(self) -> Staging:
        """Return the buffers of this thread, made when it first reads: no initializer of threads can tell its error.

        Without its device, a thread would open a context on the first GPU.
        """
        if not hasattr(self._local, "staging"):
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._local.staging = Staging(self._device)
        return self._local.staging
