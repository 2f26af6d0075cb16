"""A denoising step of other engines: plain Large-DiT with tokens split over ranks, and attention by plain Ulysses or by
the context parallel attention of diffusers (Ulysses, which won over its ring in every run).

Only the attention core exchanges; plain Ulysses permutes, exchanges and permutes each of q, k, v and the output, as
DeepSpeed does (arXiv 2309.14509). Embedding, blocks, guidance and the update of a rank's tokens are plain torch, and
nothing is gathered at the end of a step, although the pipelines of these engines do that. Tokens are split as diffusers
splits them, larger parts first. If an engine cannot run a case, its row has the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from launch.baselines.plain_large_dit import PlainAttention, PlainLargeDiT, attend
from launch.baselines.released import randomise
from launch.baselines.transformers import backend_for, engine_name, shared_copy
from seqpar.loop.models.large_dit import Config
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.types.protocols import Core

KEEP, DIRECTION = 0.99, -0.01  # coefficients of a typical DDIM step
Attention3 = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, l, H, D) of this rank's tokens -> (B, l, H, D)."""


@dataclass(frozen=True)
class OtherEngine:
    """Another engine's attention. refusal: why it cannot run this case. compiles: whether its users compile blocks."""

    name: str
    core: Attention3
    compiles: bool
    refusal: str | None = None


def plain_model(config: Config, dtype: torch.dtype, device: torch.device) -> PlainLargeDiT:
    """Return Large-DiT as published, with random weights."""
    with torch.device("meta"):
        made = PlainLargeDiT(config)
    made = made.to(dtype).to_empty(device=device)
    randomise(made, 0)
    return made.requires_grad_(False).eval()


def other_engines(mesh: Mesh, ranks: DeviceMesh | None, tokens: int, heads: int, local: Core) -> list[OtherEngine]:
    """Return all other engines on this number of ranks. local: our attention on one device; plain Ulysses uses it."""

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local(q, k, v)[0]

    world = mesh.world.size
    if ranks is None:
        return [OtherEngine("plain, one GPU", attend, True)]
    uneven = [
        f"{count} {what} do not divide by {world} ranks"
        for what, count in (("tokens", tokens), ("heads", heads))
        if count % world
    ]
    plain = OtherEngine("plain Ulysses", ulysses(alone, mesh.sequence), False, next(iter(uneven), None))
    return [plain, _diffusers(mesh, ranks, engine_name(world, (tokens, heads)))]


def _diffusers(mesh: Mesh, ranks: DeviceMesh, name: str) -> OtherEngine:
    """Return diffusers' context parallel attention."""
    config = ContextParallelConfig(1, mesh.world.size, ulysses_anything=name.endswith("anything"))
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(mesh.world.rank, mesh.world.size, mesh.device, mesh=ranks)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backend = backend_for(q.device, q.dtype)
        return dispatch_attention_fn(q, k, v, backend=backend, parallel_config=parallel)  # pyright: ignore[reportArgumentType]

    return OtherEngine(name, core, True)


def to_heads(x_BlHD: Tensor, axis: Axis) -> Tensor:
    """Return all tokens with this rank's heads (B, L, h, D) from this rank's tokens with all heads; contiguous."""
    sent = x_BlHD.unflatten(2, (axis.size, -1)).permute(2, 1, 0, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.flatten(0, 1).transpose(0, 1).contiguous()


def to_tokens(x_BLhD: Tensor, axis: Axis) -> Tensor:
    """Return this rank's tokens with all heads (B, l, H, D) from all tokens with this rank's heads; contiguous."""
    sent = x_BLhD.unflatten(1, (axis.size, -1)).permute(1, 2, 0, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received.permute(2, 1, 0, 3, 4).flatten(2, 3)


def ulysses(attend: Attention3, axis: Axis) -> Attention3:
    """Return attention of this rank's tokens to all tokens, by four all-to-alls and the permutes around them."""

    def core(q_BlHD: Tensor, k_BlHD: Tensor, v_BlHD: Tensor) -> Tensor:
        q, k, v = (to_heads(x, axis) for x in (q_BlHD, k_BlHD, v_BlHD))
        return to_tokens(attend(q, k, v), axis)

    return core


def with_core(plain: PlainLargeDiT, core: Attention3, compiled: bool) -> PlainLargeDiT:
    """Return a copy of the model with another attention core and shared weights, with each block compiled if asked."""
    twin = shared_copy(plain)
    for module in twin.modules():
        if isinstance(module, PlainAttention):
            module.core = core
    for block in twin.layers if compiled else ():
        block.compile(dynamic=False, options={"triton.cudagraphs": False})
    return twin


def other_step(
    plain: PlainLargeDiT, model: Any, size: tuple[int, int], mesh: Mesh, scale: float
) -> Callable[[], Tensor]:
    """Return a step on this rank's tokens of one picture with both guidance branches in a batch; it returns new tokens.

    plain: a model with its core (see `with_core`). model: ours with the same config; it provides the positions.
    """
    positions, config = model.positions(*size), model.config
    mine = Shard(len(positions), mesh.world.size).slice(mesh.world.rank)
    noise = torch.randn(1, config.in_channels, *size, generator=torch.Generator().manual_seed(0))
    x = model.patchify(noise.to(mesh.device))[:, mine]
    t, y = torch.full((2,), 480, device=mesh.device), torch.tensor([1, config.num_classes], device=mesh.device)
    angles = torch.stack(positions[mine].chunk(2, dim=-1), dim=-1)
    dtype = next(plain.parameters()).dtype

    @torch.no_grad()
    def step() -> Tensor:
        out = plain.forward_tokens(torch.cat((x, x)).to(dtype), angles, t, y)
        cond, uncond = out.unflatten(-1, (-1, config.out_channels))[..., : config.in_channels].chunk(2)
        guided = uncond + scale * (cond - uncond)
        return KEEP * x + DIRECTION * guided.transpose(-1, -2).flatten(-2)

    return step
