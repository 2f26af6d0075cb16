"""Loads checkpoints: one rank of a host reads, converts and places each tensor, and gives it to the others.

Each rank reads its share of the parameters to its own device. When all ranks have done so without an error, the main
thread of each broadcasts the parameters in one order, each from its reader, GPU to GPU. A host so reads and converts
every byte once, for any number of ranks, and no rank ever holds the model in host memory. The reading itself
is in `seqpar/loading/reading.py`. Broadcasts between GPUs are faster than the host's memory.
"""

from __future__ import annotations

import socket
from bisect import bisect
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqpar.kernels.weight8 import Weight8
from seqpar.loading.checkpoint import Checkpoint, check
from seqpar.loading.reading import SMALL, Reader, tensor_context
from seqpar.mesh.mesh import Axis, Mesh, finish
from seqpar.types.keys import KeyMap, TensorSource


@dataclass(frozen=True)
class Team:
    """The ranks of one host, which read a checkpoint together. ranks: their numbers among all; axis: None if alone."""

    rank: int = 0
    ranks: Sequence[int] = (0,)
    axis: Axis | None = None

    @staticmethod
    def of(mesh: Mesh | None) -> Team:
        """Return the team of this rank. Collective: call on all ranks."""
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

    Raises the same ValueError on all ranks, before anything is broadcast.
    """
    team, like = Team.of(mesh), {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    with Reader(device, team.size) as reader:

        def begun() -> Placing:
            check(model, checkpoint, keys)
            return begin(like, checkpoint, keys, reader, team)

        placing = begun() if mesh is None else mesh.on_all_ranks(begun)
        reader.start()
        placing.finish(model, mesh)


@dataclass(frozen=True)
class Placing:
    """Parameters and buffers on their way to a model.

    name: of their checkpoint. team: the ranks that read them. readers: name -> the rank of the team that reads it.
    mine: local tensors, once they have arrived. others: memory for the others. equal: key -> whether it has the
    values that it must have, of this rank's share. repeats: key -> the key whose values those are. taken: what
    each rank of the team does, with these, as in `begin`.
    """

    name: str
    team: Team
    readers: Mapping[str, int]
    mine: Future[dict[str, Tensor]]
    others: Mapping[str, Tensor]
    equal: Future[dict[str, Tensor]]
    repeats: Mapping[str, str]
    taken: Sequence[int]

    def finish(self, model: nn.Module, mesh: Mesh | None) -> None:
        """Give all of them to the model of each rank. Collective: call on all ranks.

        Raises the same ValueError on all ranks, before anything is broadcast, if a tensor of one does not load.
        """
        for name, tensor in self.others.items():
            put(model, name, tensor)
        mine = self._read() if mesh is None else mesh.on_all_ranks(self._read)
        every = {**mine, **self.others}
        for reader in range(self.team.size):
            theirs = (every[name] for name, rank in self.readers.items() if rank == reader)
            _give([memory for tensor in theirs for memory in _memories(tensor)], self.team, reader)
        for name, tensor in mine.items():
            put(model, name, tensor)

    def _read(self) -> dict[str, Tensor]:
        for key, equal in self.equal.result().items():
            if not equal:
                raise ValueError(
                    f"{self.name}: {key} differs from {self.repeats[key]}, expected equal tensors; such a model "
                    f"conditions each block differently, which is not implemented"
                )
        return self.mine.result()


def begin(
    like: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    keys: KeyMap,
    reader: Reader,
    team: Team,
    taken: Sequence[int] = (),
) -> Placing:
    """Begin to read the parameters and buffers of a model, so that each rank of this host reads about as many bytes.

    like: name -> a tensor of the meta device with the shape and dtype that it gets, or of the device, which it is
    written to, for each name of `keys`. taken: the bytes that each rank of the team reads besides, or what else it
    does, in the bytes that it could read meanwhile.
    """
    sizes = {name: sum(map(checkpoint.nbytes, source.keys)) for name, source in keys.sources.items()}
    taken = taken or [0] * team.size
    readers = shares(sizes, taken)
    mine = [name for name, rank in readers.items() if rank == team.rank]
    twins = list(keys.repeats.items())[team.rank :: team.size]
    pairs = {key: TensorSource((key, twin), lambda a, b: torch.tensor(torch.equal(a, b))) for key, twin in twins}
    dtypes = {key: checkpoint.dtypes.get(key, torch.float32) for pair in twins for key in pair}
    wider = {key: torch.promote_types(dtypes[key], dtypes[twin]) for key, twin in twins}  # holds the values of both
    own = {key: torch.empty(0, dtype=wider[key], device="meta") for key in pairs}
    equal = reader.begin(checkpoint, KeyMap(pairs), list(pairs), own)
    found = reader.begin(checkpoint, keys, mine, like)
    with tensor_context(checkpoint, ["its weights"]), torch.inference_mode(False):  # weights outlive the caller's mode
        rest = [name for name, rank in readers.items() if rank != team.rank]
        others = {name: x for name in rest if not (x := like[name]).is_meta}
        others |= {name: torch.empty_like(like[name], device=reader.device) for name in rest if name not in others}
    total = [
        before + sum(size for name, size in sizes.items() if readers[name] == rank) for rank, before in enumerate(taken)
    ]
    return Placing(checkpoint.name, team, readers, found, others, equal, keys.repeats, total)


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    own = getattr(module, last)
    setattr(module, last, nn.Parameter(tensor, own.requires_grad) if isinstance(own, nn.Parameter) else tensor)


def _memories(tensor: Tensor) -> tuple[Tensor, ...]:
    # NCCL and gloo send bytes of e4m3 under the name of another type
    return (tensor.e4m3.view(torch.uint8), tensor.scales) if isinstance(tensor, Weight8) else (tensor,)


def _give(tensors: Sequence[Tensor], team: Team, reader: int) -> None:
    # small tensors together: a broadcast takes a tenth of a ms
    if team.axis is None or not tensors:
        return

    def broadcast(axis: Axis, tensor: Tensor) -> None:
        what, source = "weights that a rank has read", team.ranks[reader]
        finish(axis, tensor.device, lambda wait: dist.broadcast(tensor, source, axis.group, not wait), what)

    small = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.nbytes < SMALL]
    if small:
        together = torch.cat(small)
        broadcast(team.axis, together)
        for mine, sent in zip(small, together.split([len(each) for each in small]), strict=True):
            mine.copy_(sent)
        if (
            together.is_cuda
        ):  # its memory may go to the thread that reads files, whose copies do not wait for this stream
            torch.cuda.current_stream(together.device).synchronize()
    for tensor in tensors:
        if tensor.nbytes >= SMALL:
            broadcast(team.axis, tensor)


def shares(sizes: Mapping[str, int], taken: Sequence[int]) -> dict[str, int]:
    """Return parameter -> the rank that reads it: runs in their order, after which all ranks have about equal bytes.

    taken: the bytes that each rank reads already.
    """
    total, level = sum(sizes.values()), 0.0
    for count, most in enumerate([*sorted(taken)[1:], float("inf")], 1):
        level = (total + sum(sorted(taken)[:count])) / count
        if level <= most:
            break
    ends = list(accumulate(max(level - before, 0) for before in taken))
    before, readers = 0.0, {}
    for name, size in sizes.items():
        readers[name] = min(bisect(ends, before + size / 2), len(taken) - 1)
        before += size
    return readers
