# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""A tiny FLUX.1 with random weights, arguments of its calls, and what computes them on ranks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor, nn

from seqpar.families._find import cuts_of
from seqpar.graphs.signature import form_of
from seqpar.mesh.mesh import Mesh
from seqpar.planner.plan import Plan, make
from seqpar.planner.search import Preferences
from seqpar.transformer import estimate
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.hooks import ShardedModule
from tests.support.double import StayDouble
from tests.support.meshes import random

TOLERANCE = 1e-12
SMALL = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 5,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 6,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 2, 4),
    "in_channels": 8,
}
# (batch, text tokens, image tokens, rows of the picture, config): a text shorter than four ranks, and more channels in
# than out with a second picture's ids, as in fill and Kontext pipelines
CASES = {
    "dev": (2, 7, 13, {}),
    "schnell": (1, 3, 11, {"guidance_embeds": False}),
    "fill": (3, 5, 9, {"in_channels": 16, "out_channels": 8}),
}


def tiny(dtype: torch.dtype = torch.float64, **config: Any) -> FluxTransformer2DModel:
    """Return diffusers' transformer with random weights, the same on every rank."""
    module = FluxTransformer2DModel(**{**SMALL, **config}).double().eval().requires_grad_(False)
    for seed, weight in enumerate(module.parameters()):
        weight.copy_(random(tuple(weight.shape), seed) * weight.shape[-1] ** (-0.5 if weight.dim() > 1 else 0))
    return module.to(dtype)


def arguments(case: str, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the arguments of a call as a pipeline passes them; the second half of the image tokens has axis 0 set."""
    batch, text, image, config = CASES[case]
    ids = torch.stack((torch.arange(image) // 8, torch.arange(image) % 3, torch.arange(image) // 3), dim=1)
    made = {
        "hidden_states": random((batch, image, config.get("in_channels", 8)), 1, device, dtype),
        "encoder_hidden_states": random((batch, text, 12), 2, device, dtype),
        "pooled_projections": random((batch, 6), 3, device, dtype),
        "timestep": torch.tensor([0.96, 0.5, 0.003])[:batch].to(device, dtype),
        "img_ids": ids.to(device, dtype),
        "txt_ids": torch.zeros(text, 3, device=device, dtype=dtype),
        "joint_attention_kwargs": None,
    }
    guided = config.get("guidance_embeds", True)
    return made | ({"guidance": torch.tensor([3.5, 2.0, 1.0])[:batch].to(device)} if guided else {})


def plan_for(mesh: Mesh, strategy: str, module: nn.Module) -> Plan:
    """Return a plan of this strategy."""
    dtype = next(module.parameters()).dtype
    wish = Preferences(strategy=strategy, local="auto" if mesh.device.type == "cpu" else "reference")
    work = estimate.planned_work(module)
    return make(work, estimate.load_of(module, dtype, False, work.joined), dtype, mesh, wish, mesh)


def body_of(module: nn.Module, strategy: str = "ulysses", mesh: Mesh | None = None, fused: bool = True) -> ShardedCall:
    """Return the call of a transformer whose own forward stays in its place."""
    mesh = mesh or Mesh.single()
    return ShardedCall(ShardedModule(module, mesh, plan_for(mesh, strategy, module), cuts_of(module), fused))


def theirs(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return what a module's forward computes; for fp64 it keeps fp64."""
    with torch.no_grad(), StayDouble():
        return module(**given).sample


def ours(call: ShardedCall, given: dict[str, Any]) -> Tensor:
    """Return what a call computes; for fp64 it keeps fp64."""
    with torch.no_grad(), StayDouble():
        return call.compute(form_of(given))[0]


def error(got: Tensor, truth: Tensor) -> float:
    """Return the largest difference."""
    return (got - truth).abs().max().item()
