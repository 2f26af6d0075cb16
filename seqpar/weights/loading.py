"""Loads checkpoints: one rank of a host reads, converts and places each tensor, and gives it to the others.

The threads of each rank (`seqpar.weights.pool`) read its share of the parameters onto its own device. When all ranks
have read the next ones without an error, the main thread of each broadcasts them in one order, each from its reader,
GPU to GPU, while the threads go on. A host so reads and converts every byte once, whatever the number of its ranks, and
no rank ever holds the model in host memory. Broadcasts between GPUs are faster than the host's memory.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqpar.ranks.mesh import Axis, Mesh, finish
from seqpar.types.keys import KeyMap
from seqpar.weights.checkpoint import Checkpoint, check
from seqpar.weights.pool import Pool, Reading

TURN = 1 << 29  # numbers of a rank: a gigabyte of 16 bits each


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
    ahead: int = 0,
) -> None:
    """Give parameters and buffers of `model` their values; each tensor is read by one rank of this host.

    like: name -> a tensor of the meta device with the shape and dtype that it gets, for each name of `keys`. before: a
    check on every rank, whose ValueError is raised on all ranks before a weight is read. ahead: how many other numbers
    rank 0 reads at the same time, in place of which the other ranks of its host read more of these.
    """
    team = Team.of(mesh)
    readers = shares(checkpoint, keys, team.size, ahead if team.ranks[0] == 0 else 0)
    share = [name for name, reader in readers.items() if reader == team.rank]
    together = (Mesh.single() if mesh is None else mesh).together

    def begin() -> Reading:
        before()
        pool.check_repeats(list(keys.repeats.items())[team.rank :: team.size])
        return pool.begin(share, keys, like)

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with Pool(checkpoint, device, team.size) as pool:
        reading = together(begin)
        for turn in turns(checkpoint, keys, readers):
            own = [name for name in turn if readers[name] == team.rank]
            read = together(lambda own=own: reading.tensors(own))
            given = {name: read.get(name, torch.empty_like(like[name], device=device)) for name in turn}
            with _beside(stream):
                for name, tensor in given.items():
                    _give(tensor, team, readers[name])
                    put(model, name, tensor)
    if stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)


@contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queue work on a stream of its own: after what is queued now, and beside what threads queue from now on."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    own = getattr(module, last)
    setattr(module, last, nn.Parameter(tensor, own.requires_grad) if isinstance(own, nn.Parameter) else tensor)


def _give(tensor: Tensor, team: Team, reader: int) -> None:
    """Broadcast a parameter from the rank of this host that has read it."""
    if team.size > 1 and team.axis is not None:
        group, source = team.axis.group, team.ranks[reader]
        what = "weights that a rank has read"
        finish(team.axis, tensor.device, lambda wait: dist.broadcast(tensor, source, group, not wait), what)


def shares(checkpoint: Checkpoint, keys: KeyMap, parts: int, ahead: int = 0) -> dict[str, int]:
    """Return parameter -> the part that reads it: runs of about equally many numbers, in the order of the key map.

    ahead: how many numbers the first part reads besides.
    """
    sizes = _sizes(checkpoint, keys)
    total, before, readers = sum(sizes.values()), 0, dict[str, int]()
    first = total if parts == 1 else max(0, (total + ahead) // parts - ahead)
    each = max(1, (total - first) // max(1, parts - 1))  # of the numbers that another part reads
    for name, size in sizes.items():
        middle = before + size // 2
        readers[name] = 0 if middle < first or parts == 1 else min(parts - 1, 1 + (middle - first) // each)
        before += size
    return readers


def turns(checkpoint: Checkpoint, keys: KeyMap, readers: Mapping[str, int]) -> list[list[str]]:
    """Return the names by the turns in which ranks give them to each other: in each, `TURN` numbers of every share.

    While tensors of a turn are given, those of later ones are read.
    """
    before, found = Counter[int](), defaultdict[int, list[str]](list)
    for name, size in _sizes(checkpoint, keys).items():
        found[before[readers[name]] // TURN].append(name)
        before[readers[name]] += size
    return [found[turn] for turn in sorted(found)]


def _sizes(checkpoint: Checkpoint, keys: KeyMap) -> dict[str, int]:
    """Return parameter -> how many numbers are read for it."""
    return {
        name: sum(prod(checkpoint.shapes.get(key, ())) for key in source.keys) for name, source in keys.sources.items()
    }
