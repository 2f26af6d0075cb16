"""Tests that memory stays bounded over many sizes of pictures, by both transports, and that results stay right."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.attention.ulysses import Ulysses
from seqpar.distributed import GATHERS, KINDS
from seqpar.sampling.loop import draw_noise
from tests.sampling.test_sampling import scheduler
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit
from tests.test_distributed import local

SIZES = [(2 * rows, 2 * columns) for rows in range(2, 9) for columns in range(rows, 9) if rows * columns > 4]


def mapped() -> int:
    """Return the number of other ranks' and own buffers that this process has mapped, on CPUs."""
    maps = Path("/proc/self/maps")
    return len([line for line in maps.read_text().splitlines() if "seqpar-" in line]) if maps.exists() else 0


def inputs(size: tuple[int, int], images: int = 1) -> tuple[Any, Tensor, dict[str, Tensor]]:
    noise = draw_noise((images, 4, *size), torch.Generator().manual_seed(3))
    return scheduler(), noise, {"class_labels": torch.arange(images)}


def many(rank: int, world: int, device: torch.device, transport: str, cfg: int, count: int) -> tuple[Any, ...]:
    """Sample sizes in one process, with a run of another sampler kept all the while; call the model between them.

    Returns the most attentions that were kept and the most gathers, the most buffers that were mapped, the attentions
    that exist in the end, and whether the other's run was kept and both samplers give the bits of their first pictures.
    """
    mesh = mesh_for("ulysses", world, device, cfg)
    dit = DistributedDiT(diffusers_dit().to(device), mesh, "ulysses", local(device), transport)
    settings: Any = {"steps": 1, "guidance": Guidance(3.0)}
    most = [0, 0, 0]
    with Sampler(dit, graph=False) as other, Sampler(dit, graph=False) as sampler:
        before = other(*inputs((4, 4)), **settings), sampler(*inputs(SIZES[0]), **settings)
        held = other._run
        for size in [*SIZES, *((2, 2 * columns) for columns in range(9, 30))][1:count]:
            sampler(*inputs(size), **settings)
            if size[1] == 8:  # three rows, which the cfg axis does not divide
                x = inputs(size, 3)[1].to(device, dit.dtype)
                dit(x, torch.ones(3), class_labels=torch.arange(3))
            most = [*map(max, most, (len(dit._attends), len(dit._gathers), mapped()))]
        after = other(*inputs((4, 4)), **settings), sampler(*inputs(SIZES[0]), **settings)
        same = other._run is held, *(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        alive = sum(type(x) is Ulysses for x in gc.get_objects())
        return *most, alive, same


@pytest.mark.parametrize(
    ("transport", "cfg", "count"), [("collective", 1, 30), ("peer", 1, 30), ("peer", 2, GATHERS + 8)]
)
def test_many_sizes_do_not_fill_the_memory(ranks: Pool, transport: str, cfg: int, count: int) -> None:
    for attends, gathers, buffers, alive, same in ranks.run(2, many, transport, cfg, count):
        assert attends == KINDS
        # on GPUs 29 kinds of gathers were made
        assert gathers in (range(GATHERS - 4, GATHERS + 1) if cfg == 2 else (0,))
        assert buffers <= 2 * (gathers if cfg == 2 else attends)
        assert alive <= 2 * KINDS  # those of other tests' models may still exist
        assert same == (True, True, True)
