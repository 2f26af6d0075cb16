"""Loads checkpoints: one rank of a host reads, converts and places each tensor, and gives it to the others.

Each rank reads its share of the parameters from the mapped file and places them on its own device. When all ranks have
done so without an error, each parameter is broadcast from its reader, GPU to GPU. A host so reads, converts and maps
every byte once, whatever the number of its ranks, and no rank ever holds the model in host memory.
When it wins: always for GPUs, where broadcasts are faster than the host's memory.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqpar.mesh import Mesh
from seqpar.weights.checkpoint import Checkpoint, KeyMap, check

READERS = 4  # threads a rank: one thread copies less from the page cache than a GPU's link takes
CHUNK = 1 << 24  # bytes of a page-locked buffer; each reader has two


@dataclass(frozen=True)
class Team:
    """The ranks of one host, which read a checkpoint together. ranks: their numbers among all; group: None if alone."""

    rank: int = 0
    ranks: Sequence[int] = (0,)
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(mesh: Mesh | None) -> Team:
        """Return the team of this rank; every rank of the mesh calls it, because hosts make their groups together."""
        if mesh is None or mesh.world.size == 1:
            return Team()
        hosts = mesh.collect(socket.gethostname())
        teams = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        mine = next(team for team in teams if mesh.world.rank in team)
        group = mesh.world.group if len(teams) == 1 else dist.new_subgroups_by_enumeration(teams)[0]
        assert group is None or isinstance(group, dist.ProcessGroup)
        return Team(mine.index(mesh.world.rank), mine, group)

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

    mesh: the ranks that load the same model at the same time; None for one rank alone. Raises the same ValueError on
    all of them before anything is broadcast.
    """
    team = Team.of(mesh)
    readers = shares(checkpoint, keys, team.size)

    def mine() -> dict[str, Tensor]:
        check(model, checkpoint, keys)
        _check_repeats(checkpoint, list(keys.repeats.items())[team.rank :: team.size])
        names = [name for name in keys.sources if readers[name] == team.rank]
        return dict(zip(names, _placed(names, checkpoint, keys, dtype, device), strict=True))

    placed = mine() if mesh is None else mesh.together(mine)
    for name, parameter in list(model.named_parameters()):
        tensor = placed.pop(name, None)
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device) if tensor is None else tensor
        if team.size > 1 and team.group is not None:
            dist.broadcast(tensor, src=team.ranks[readers[name]], group=team.group)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def shares(checkpoint: Checkpoint, keys: KeyMap, parts: int) -> dict[str, int]:
    """Return parameter -> the part that reads it: runs of about equally many numbers, in the order of the key map."""
    sizes = {
        name: sum(prod(checkpoint.shapes.get(key, ())) for key in source.keys) for name, source in keys.sources.items()
    }
    total, before, found = max(sum(sizes.values()), 1), 0, {}
    for name, size in sizes.items():
        found[name] = min(parts - 1, (before + size // 2) * parts // total)
        before += size
    return found


def _check_repeats(checkpoint: Checkpoint, repeats: Iterable[tuple[str, str]]) -> None:
    """Raise ValueError if a key differs from the one whose values it must have; several threads compare."""

    def same(pair: tuple[str, str]) -> bool:
        return torch.equal(checkpoint.read(pair[0]), checkpoint.read(pair[1]))

    pairs = list(repeats)
    with ThreadPoolExecutor(READERS) as pool:
        for (key, twin), equal in zip(pairs, pool.map(same, pairs), strict=True):
            if not equal:
                raise ValueError(
                    f"{checkpoint.name}: {key} differs from {twin}, expected equal tensors; such a model "
                    f"conditions each block differently, which is not implemented"
                )


def _placed(
    names: Sequence[str], checkpoint: Checkpoint, keys: KeyMap, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return the parameters of these names on the device, in their order; several threads read at the same time."""
    local = threading.local()

    def made(name: str) -> Tensor:
        source = keys.sources[name]
        read = [checkpoint.read(key) for key in source.keys]
        if device.type != "cuda":
            return source.combine(*read).to(device=device, dtype=dtype, copy=True).contiguous()
        if not hasattr(local, "staging"):
            local.staging = Staging(device)
        return source.combine(*(local.staging.copy(tensor).to(dtype) for tensor in read)).contiguous()

    with ThreadPoolExecutor(READERS if device.type == "cuda" else 1) as pool:
        return list(pool.map(made, names))


class Staging:
    """Copies tensors from the mapped file to a GPU through two page-locked buffers, which take turns.

    A copy out of pageable memory goes through one small buffer of the driver, and waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the GPU, in its dtype; a transposed one is sent as it lies in the file."""
        if tensor.dim() == 2 and not tensor.is_contiguous() and tensor.T.is_contiguous():
            return self.copy(tensor.T).T
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.numel() == 0:
            return made
        there, here = (x.view(-1).view(torch.uint8) for x in (made, tensor.contiguous()))
        with torch.cuda.device(self._device):
            for to, piece in zip(there.split(CHUNK), here.split(CHUNK), strict=True):
                buffer, free = self._buffers[self._turn], self._free[self._turn]
                free.synchronize()  # until the copy out of it, two chunks ago, has ended
                buffer[: len(piece)].copy_(piece)
                to.copy_(buffer[: len(piece)], non_blocking=True)
                free.record()
                self._turn = 1 - self._turn
        return made
