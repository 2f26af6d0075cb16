"""A denoising step of other engines: the plain models with tokens split over ranks, and attention by plain Ulysses or
by the context parallel attention of diffusers (Ulysses, ring, unified).

Only the attention core exchanges. Embedding, blocks, guidance and the update of a rank's tokens are plain torch, and
nothing is gathered at the end of a step, although the pipelines of these engines do that. Tokens are split as diffusers
splits them, larger parts first. If an engine cannot run a case, its row has the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launch.baselines.plain import moved
from launch.baselines.plain_large_dit import PlainAttention, PlainLargeDiT, attend
from launch.baselines.plain_ulysses import ulysses
from launch.baselines.transformers import backend_for
from seqpar.mesh import Mesh
from seqpar.protocols import Core
from seqpar.shard import Shard

Attention3 = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, l, H, D) of this rank's tokens -> (B, l, H, D)."""
DeviceMeshes = Mapping[tuple[int, int], DeviceMesh]


@dataclass(frozen=True)
class OtherEngine:
    """Another engine's attention. refusal: why it cannot run this case. compiles: whether its users compile blocks."""

    name: str
    core: Attention3
    compiles: bool
    refusal: str | None = None


@dataclass(frozen=True)
class CoreProcessor:
    """Attention processor of a diffusers block that computes self-attention by `core`."""

    core: Attention3

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: None = None, attention_mask: None = None
    ) -> Tensor:
        q, k, v = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out[0](self.core(q, k, v).flatten(2))


def device_meshes(mesh: Mesh) -> DeviceMeshes:
    """Return diffusers' mesh for each (ring, ulysses); make them once, because each creates communicators."""
    world = mesh.world.size
    shapes = (
        [] if world == 1 else [(1, world), (world, 1), *([(2, world // 2)] if world % 2 == 0 and world > 2 else [])]
    )
    return {shape: init_device_mesh(mesh.device.type, shape, mesh_dim_names=("ring", "ulysses")) for shape in shapes}


def other_engines(mesh: Mesh, meshes: DeviceMeshes, tokens: int, heads: int, local: Core) -> list[OtherEngine]:
    """Return all other engines on this number of ranks. local: our attention on one device; plain Ulysses uses it."""

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local(q, k, v)[0]

    world = mesh.world.size
    if world == 1:
        return [OtherEngine("plain, one GPU", attend, True)]
    uneven = [
        f"{count} {what} do not divide by {world} ranks"
        for what, count in (("tokens", tokens), ("heads", heads))
        if count % world
    ]
    found = [OtherEngine("plain Ulysses", ulysses(alone, mesh.sequence), False, next(iter(uneven), None))]
    return found + [_diffusers(mesh, shape, device_mesh, tokens, heads) for shape, device_mesh in meshes.items()]


def _diffusers(mesh: Mesh, shape: tuple[int, int], device_mesh: DeviceMesh, tokens: int, heads: int) -> OtherEngine:
    """Return diffusers' context parallel attention; uneven cases use its "anything" modes, which unified lacks."""
    (ring, ulysses_), world = shape, mesh.world.size
    uneven, unified = tokens % world > 0 or heads % ulysses_ > 0, ring > 1 and ulysses_ > 1
    name = "diffusers " + ("unified" if unified else "Ulysses" if ulysses_ > 1 else "ring")
    refusal = f"{tokens} tokens and {heads} heads do not divide by ring {ring} x ulysses {ulysses_}"
    anything = uneven and not unified
    config = ContextParallelConfig(
        ring, ulysses_, ulysses_anything=anything and ring == 1, ring_anything=anything and ulysses_ == 1
    )
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(mesh.world.rank, world, mesh.device, mesh=device_mesh)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backend = backend_for(q.device, q.dtype)
        return dispatch_attention_fn(q, k, v, backend=backend, parallel_config=parallel)  # pyright: ignore[reportArgumentType]

    name += " anything" if anything else ""
    return OtherEngine(name, core, True, refusal if uneven and unified else None)


def with_core(plain: nn.Module, core: Attention3, compiled: bool) -> nn.Module:
    """Return a copy of the model with another attention core and shared weights, with each block compiled if asked."""
    twin = copy.deepcopy(plain, {id(x): x for x in (*plain.parameters(), *plain.buffers())})
    for module in twin.modules():
        if isinstance(module, PlainAttention):
            module.core = core
        elif isinstance(module, Attention):
            module.processor = CoreProcessor(core)  # pyright: ignore[reportAttributeAccessIssue]
    if compiled:
        for block in list[nn.Module](_blocks(twin)):
            block.compile(dynamic=False, options={"triton.cudagraphs": False})
    return twin


def other_step(plain: nn.Module, model: Any, size: tuple[int, int], mesh: Mesh, scale: float) -> Callable[[], Tensor]:
    """Return a step on this rank's tokens of one picture with both guidance branches in a batch; it returns new tokens.

    plain: a model with its core (see `with_core`). model: ours with the same config; it provides the positions.
    """
    positions, config = model.positions(*size), model.config
    mine = Shard(len(positions), mesh.world.size).slice(mesh.world.rank)
    noise = torch.randn(1, config.in_channels, *size, generator=torch.Generator().manual_seed(0))
    x = model.patchify(noise.to(mesh.device))[:, mine]
    t, y = torch.full((2,), 480, device=mesh.device), torch.tensor([1, config.num_classes], device=mesh.device)
    dtype = next(plain.parameters()).dtype

    @torch.no_grad()
    def step() -> Tensor:
        out = predict_tokens(plain, torch.cat((x, x)).to(dtype), positions[mine], t, y)
        out = out.unflatten(-1, (-1, config.out_channels))[..., : config.in_channels]
        return moved(x, out.transpose(-1, -2).flatten(-2), scale)

    return step


def predict_tokens(plain: nn.Module, tokens_BlC: Tensor, positions: Tensor, t_B: Tensor, y_B: Tensor) -> Tensor:
    """Return predictions (B, l, C_out*p*p), ordered (ph, pw, C_out); `positions` have the format of our models."""
    if isinstance(plain, PlainLargeDiT):
        return plain.forward_tokens(tokens_BlC, torch.stack(positions.chunk(2, dim=-1), dim=-1), t_B, y_B)
    made: Any = plain  # the rest is diffusers' forward, on tokens
    patch = made.pos_embed.proj
    h = F.linear(tokens_BlC, patch.weight.flatten(1), patch.bias) + positions.to(tokens_BlC.dtype)
    for block in made.transformer_blocks:
        h = block(h, timestep=t_B, class_labels=y_B)
    c = made.transformer_blocks[0].norm1.emb(t_B, y_B, hidden_dtype=h.dtype)
    shift, scale = made.proj_out_1(F.silu(c))[:, None].chunk(2, dim=-1)
    return made.proj_out_2(made.norm_out(h) * (1 + scale) + shift)


def _blocks(plain: Any) -> Any:
    return plain.layers if isinstance(plain, PlainLargeDiT) else plain.transformer_blocks
