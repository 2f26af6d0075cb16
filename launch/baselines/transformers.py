"""diffusers' own engine around its own transformers: compiled blocks, and its context parallelism (Ulysses, ring).

Every engine is a copy of the module that shares the weights, so that one does not change another.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seqpar.mesh import Mesh


@dataclass(frozen=True)
class Parallel:
    """A way in which diffusers splits a call over ranks: sizes of its two axes. One rank has none."""

    name: str
    ring: int
    ulysses: int
    anything: bool = False


def parallels(world: int, counts: tuple[int, ...], heads: int) -> list[Parallel]:
    """Return diffusers' ways for this many ranks. counts: tokens of each stream; uneven ones need "anything" modes."""
    if world == 1:
        return [Parallel("diffusers", 1, 1)]
    uneven = any(count % world for count in counts)
    extra = " anything" if uneven else ""
    ulysses_extra = " anything" if uneven or heads % world else ""
    return [
        Parallel(f"diffusers Ulysses{ulysses_extra}", 1, world, bool(ulysses_extra)),
        Parallel(f"diffusers ring{extra}", world, 1, uneven),
    ]


def device_mesh(parallel: Parallel, mesh: Mesh) -> DeviceMesh | None:
    """Return diffusers' mesh of ranks; make it once, because it creates communicators."""
    if mesh.world.size == 1:
        return None
    shape = (parallel.ring, parallel.ulysses)
    return init_device_mesh(mesh.device.type, shape, mesh_dim_names=("ring", "ulysses"))


def shared_copy(module: nn.Module) -> Any:
    """Return a copy of a module with the same weights."""
    return copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})


def engine(module: nn.Module, parallel: Parallel, ranks: DeviceMesh | None, device: torch.device) -> Any:
    """Return the module with cuDNN's attention (on GPUs), split over the ranks.

    cuDNN's is the fastest backend that diffusers' context parallelism takes.
    """
    twin = shared_copy(module)
    twin.set_attention_backend("_native_cudnn" if device.type == "cuda" else "native")
    if ranks is not None:
        if device.type != "cuda":
            raise ValueError("got a CPU, expected GPUs: diffusers' context parallelism counts accelerators")
        ulysses = parallel.anything and parallel.ring == 1
        config = ContextParallelConfig(
            ring_degree=parallel.ring,
            ulysses_degree=parallel.ulysses,
            mesh=ranks,
            ulysses_anything=ulysses,
            ring_anything=parallel.anything and not ulysses,
        )
        twin.enable_parallelism(config=config)
    return twin


def compile_blocks(module: Any) -> None:
    """Compile the repeated blocks for fixed sizes, without inductor's own CUDA graphs."""
    module.compile_repeated_blocks(dynamic=False, options={"triton.cudagraphs": False})
