"""diffusers' own engine around its own transformers: compiled blocks, and its context parallelism by Ulysses.

Every engine is a copy of the module that shares the weights, so that one does not change another.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seqpar.mesh.mesh import Mesh


def device_mesh(mesh: Mesh) -> DeviceMesh | None:
    """diffusers' mesh of all ranks, None on one; make it once, because it creates communicators."""
    world = mesh.world.size
    return init_device_mesh(mesh.device.type, (1, world), mesh_dim_names=("ring", "ulysses")) if world > 1 else None


def engine_name(world: int, counts: tuple[int, ...]) -> str:
    """The name of diffusers' engine: Ulysses, which won over its ring in every run.

    counts: tokens of each stream, and heads; what does not divide by the ranks needs its "anything" mode.
    """
    if world == 1:
        return "diffusers"
    return "diffusers Ulysses" + (" anything" if any(count % world for count in counts) else "")


def shared_copy(module: nn.Module) -> Any:
    return copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})


def backend_for(device: torch.device, dtype: torch.dtype) -> str:
    """diffusers' attention backend for its engine: the fastest that its context parallelism takes.

    That is cuDNN's for 16-bit numbers on GPUs, and torch's own choice elsewhere: diffusers' context parallelism hands
    cuDNN any dtype unchecked, which reads fp32 as something else.
    """
    return "_native_cudnn" if device.type == "cuda" and dtype.itemsize == 2 else "native"


@contextmanager
def backends_kept() -> Iterator[None]:
    """Restore diffusers' attention backends, which cache-dit replaces, and the default one.

    Choosing a model's backend also makes it the default of all models that name none. Added backends stay.
    """
    known = _AttentionBackendRegistry
    default, tables = known.get_active_backend()[0], (known._backends, known._constraints, known._supported_arg_names)
    before, split = [dict(table) for table in tables], set(known._supports_context_parallel)
    names = {backend.value for backend in known._backends}
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.update(kept)
        known._supports_context_parallel -= names - split
        known._supports_context_parallel |= split
        known.set_active_backend(default)


@contextmanager
def classes_kept() -> Iterator[None]:
    """Restore methods and attributes of diffusers' modules and attention processors, which cache-dit replaces."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("diffusers.models") and module]
    classes = {x for module in loaded for x in vars(module).values() if isinstance(x, type)}
    computing = [x for x in classes if x.__module__.startswith("diffusers.") and {"forward", "__call__"} & {*vars(x)}]
    before = {kind: dict(vars(kind)) for kind in computing}
    try:
        yield
    finally:
        for kind, kept in before.items():
            for name in vars(kind).keys() - kept.keys():
                delattr(kind, name)
            for name in [name for name, value in kept.items() if vars(kind)[name] is not value]:
                setattr(kind, name, kept[name])


def engine(module: nn.Module, name: str, ranks: DeviceMesh | None, device: torch.device, dtype: torch.dtype) -> Any:
    """The module with the attention of `backend_for`, split over the ranks; name: of `engine_name`."""
    twin = shared_copy(module)
    with backends_kept():
        twin.set_attention_backend(backend_for(device, dtype))
    if ranks is not None:
        if device.type != "cuda":
            raise ValueError("got a CPU, expected GPUs: diffusers' context parallelism counts accelerators")
        config = ContextParallelConfig(
            ulysses_degree=ranks.size(), mesh=ranks, ulysses_anything=name.endswith("anything")
        )
        twin.enable_parallelism(config=config)
    return twin


def cached(module: nn.Module, world: int) -> Any:
    """The module with cache-dit's Ulysses over all ranks, cuDNN's attention, compiled blocks, and no cache.

    It replaces methods and attention backends of diffusers: wrap its use in `classes_kept` and `backends_kept`.
    Raises ImportError without the package.
    """
    import cache_dit  # pyright: ignore[reportMissingImports] # optional: no other bench needs it

    twin = shared_copy(module)
    config = cache_dit.ParallelismConfig(ulysses_size=world, attention_backend="_sdpa_cudnn")
    cache_dit.enable_cache(twin, parallelism_config=config)
    compile_blocks(twin)
    return twin


def in_8_bits(module: nn.Module) -> Any:
    """A copy of the module whose linear layers are torchao's in e4m3, with a scale a token and one an output channel.

    Sums are fast, and it also sets inductor's options, both torchao's defaults. Raises ImportError without the package.
    """
    import torchao.quantization as ao  # pyright: ignore[reportMissingImports] # optional: no other bench needs it

    twin = copy.deepcopy(module)
    ao.quantize_(twin, ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()))
    return twin


def compile_blocks(module: Any) -> None:
    """Compile the repeated blocks for fixed sizes, without inductor's own CUDA graphs.

    They are those that diffusers names, or else, as for SD3, all modules in the transformer's own lists of modules.
    """
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    names = set(module._repeated_blocks or {type(block).__name__ for blocks in lists for block in blocks})
    for one in module.modules():
        if type(one).__name__ in names:
            one.compile(dynamic=False, options={"triton.cudagraphs": False})
