"""Tests that memory stays bounded over many sizes of pictures, by both transports, and that results stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler, sample
from seqpar.attention.ulysses import Ulysses
from seqpar.graphs import exchanges as keeper
from seqpar.loop.loop import draw_noise
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import scheduler
from tests.support.meshes import existing, mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

ATTENDS, GATHERS = 6, 12  # exchanges that are kept here, where the engine keeps more
SIZES = [(2 * rows, 2 * columns) for rows in range(2, 9) for columns in range(rows, 9) if rows * columns > 4]


def mapped() -> int:
    """Return the number of other ranks' and own buffers that this process has mapped, on CPUs."""
    maps = Path("/proc/self/maps")
    return len([line for line in maps.read_text().splitlines() if "seqpar-" in line]) if maps.exists() else 0


def inputs(size: tuple[int, int], images: int = 1) -> tuple[Any, Tensor, dict[str, Tensor]]:
    noise = draw_noise((images, 4, *size), torch.Generator().manual_seed(3))
    return scheduler(), noise, {"class_labels": torch.arange(images)}


def kinds(dit: DistributedDiT) -> tuple[int, int]:
    return len(dit.keeper._attends), sum(map(len, dit.keeper._gathers.values()))


def many(rank: int, world: int, device: torch.device, transport: str, cfg: int, count: int) -> tuple[Any, ...]:
    existed = existing(Ulysses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "ATTENDS", ATTENDS)
        patch.setattr(keeper, "GATHERS", GATHERS)
        mesh = mesh_for("ulysses", world, device, cfg)
        dit = DistributedDiT(diffusers_dit().to(device), mesh, "ulysses", local(device), transport)
        return *after_many(dit, count), existing(Ulysses) - existed


def after_many(dit: DistributedDiT, count: int) -> tuple[Any, ...]:
    """Sample sizes in one process, with a run of another sampler kept all the while; call the model between them.

    Returns the most attentions that were kept and the most gathers, the most buffers that were mapped, and whether the
    other's run was kept and both samplers give the bits of their first pictures.
    """
    settings: Any = {"steps": 1, "guidance": Guidance(3.0)}
    most, existed = [0, 0, 0], mapped()  # the mesh's board
    with Sampler(dit, graph=False) as other, Sampler(dit, graph=False) as sampler:
        before = other(*inputs((4, 4)), **settings), sampler(*inputs(SIZES[0]), **settings)
        held = other._run
        for size in SIZES[1:count]:
            sampler(*inputs(size), **settings)
            if size[1] == 8:  # three rows, which the cfg axis does not divide
                x = inputs(size, 3)[1].to(dit.device, dit.dtype)
                dit(x, torch.ones(3), class_labels=torch.arange(3))
            most = [*map(max, most, (*kinds(dit), mapped() - existed))]
        after = other(*inputs((4, 4)), **settings), sampler(*inputs(SIZES[0]), **settings)
        same = other._run is held, *(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        return *most, same


@pytest.mark.parametrize(
    ("transport", "cfg", "count"), [("collective", 1, ATTENDS + 6), ("peer", 1, ATTENDS + 6), ("peer", 2, GATHERS + 8)]
)
def test_many_sizes_do_not_fill_the_memory(ranks: Pool, transport: str, cfg: int, count: int) -> None:
    for attends, gathers, buffers, same, alive in ranks.run(2, many, transport, cfg, count):
        assert attends == ATTENDS
        # on GPUs 29 kinds of gathers were made
        assert gathers in (range(GATHERS - 4, GATHERS + 1) if cfg == 2 else (0,))
        assert buffers <= 2 * (gathers if cfg == 2 else attends)
        if ranks.device == "cpu" and Path("/proc/self/maps").exists():
            assert (buffers > 0) == (transport == "peer")
        assert ATTENDS // 2 < alive <= ATTENDS
        assert same == (True, True, True)


def uneven(rank: int, world: int, device: torch.device) -> list[int]:
    """Sample sizes whose shares of tokens have fewer shapes on one rank than on another; return the gathers kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "GATHERS", 3)
        dit = DistributedDiT(diffusers_dit().to(device), mesh_for("ulysses", world, device, cfg=2), "ulysses")
        kept = []
        for columns in (9, 10, 11, 12, 9):  # shares of 9 to 12 tokens have 2 shapes on one rank and 3 on another
            sample(dit, *inputs((2, 2 * columns)), steps=1, guidance=Guidance(3.0), graph=False)
            kept.append(kinds(dit)[1])
        dit.release()
        return kept


def test_ranks_with_shares_of_other_shapes_free_the_same_gathers(ranks: Pool) -> None:
    assert ranks.run(4, uneven) == [[1, 2, 3, 3, 3]] * 4
