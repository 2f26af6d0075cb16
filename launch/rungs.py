"""The rungs between plain Large-DiT and the engine: the same weights, one more fusion each, eager.

The ladder of the PaddleMIX notes on Large-DiT, rebuilt: modulation hoisted out of the loop, then norm + modulate,
gate + residual + norm, the feed-forward, qkv and QK-norm + rotary as one pass each. Local attention is the same on all
rungs, so a rung's gain is its fusion's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.plain_large_dit import rotary, rotate
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.swiglu import swiglu
from seqpar.models import _layers
from seqpar.models._label_dit import FREQUENCIES
from seqpar.models.large_dit import FINAL_NORM, Model
from seqpar.protocols import Condition, Core

Step = tuple[Tensor, Tensor, Norm]


@dataclass(frozen=True)
class Rung:
    """What is fused; every rung has what the one below it has."""

    name: str
    hoisted: bool = True
    adaln: bool = True
    gate: bool = True
    feed_forward: bool = True


RUNGS = (
    Rung("plain blocks, our attention", hoisted=False, adaln=False, gate=False, feed_forward=False),
    Rung("+ hoisted modulation", adaln=False, gate=False, feed_forward=False),
    Rung("+ fused adaLN", gate=False, feed_forward=False),
    Rung("+ gate and residual", feed_forward=False),
    Rung("+ fused feed-forward"),
)  # the next one, fused qkv and QK-norm + rotary, is the engine's own block


def forward(
    model: Model, rung: Rung, tokens_BLC: Tensor, t_B: Tensor, y_B: Tensor, table: Condition, core: Core
) -> Tensor:
    """One prediction; `table` is `model.condition(t_B, class_labels=y_B)`, made before the loop, for hoisted rungs."""
    made = table if rung.hoisted else _condition(model, t_B, y_B)
    x = model.x_embedder(tokens_BLC.to(model.x_embedder.weight.dtype))
    freqs_LD2 = rotary(x.shape[1], model.config.attention_head_dim, x.device)
    modulations, final_B2E, blocks = made["blocks"].unbind(1), made["final"], list[Any](model.blocks)
    starts: list[Step] = [
        (modulation[:, 0], modulation[:, 1], _norm(block, block.attention_norm))
        for block, modulation in zip(blocks, modulations, strict=True)
    ]
    ends = [*starts[1:], (final_B2E[:, 0], final_B2E[:, 1], FINAL_NORM)]
    h = _normed(rung, x, starts[0])
    for block, modulation, after in zip(blocks, modulations, ends, strict=True):
        x, h = _block(rung, block, x, h, modulation, freqs_LD2, after, core)
    return model.final(h)


def _norm(block: Any, layer: Any) -> Norm:
    kind, eps = block.norm
    return Norm(kind, eps, layer.weight)


def _condition(model: Model, t_B: Tensor, y_B: Tensor) -> Condition:
    """The modulation of this step as the published model makes it: in the model's dtype, in every step."""
    dtype = model.x_embedder.weight.dtype
    c = F.silu(model.t_embedder(_layers.sinusoid(t_B, FREQUENCIES).to(dtype)) + model.y_embedder(y_B))
    blocks = [block.modulation(c).unflatten(-1, (6, -1)) for block in list[Any](model.blocks)]
    return {"blocks": torch.stack(blocks, dim=1), "final": model.final_modulation(c).unflatten(-1, (2, -1))}


def _block(
    rung: Rung, block: Any, x: Tensor, h: Tensor, modulation_B6E: Tensor, freqs_LD2: Tensor, after: Any, core: Core
) -> tuple[Tensor, Tensor]:
    """One block with separate projections: the weights are rows of the fused ones."""
    gate, shift, scale, gate_mlp = (modulation_B6E[:, i] for i in (2, 3, 4, 5))
    branch = block.wo(_attention(block, h, freqs_LD2, core).flatten(2))
    middle: Step = (shift, scale, _norm(block, block.ffn_norm))
    x, h = _gated(rung, x, gate, branch, middle)
    if rung.feed_forward:
        branch = block.w2(swiglu(block.w13(h)))
    else:
        w1, w3 = block.w13.weight.chunk(2)
        branch = block.w2(F.silu(F.linear(h, w1)) * F.linear(h, w3))
    return _gated(rung, x, gate_mlp, branch, after)


def _attention(block: Any, h: Tensor, freqs_LD2: Tensor, core: Core) -> Tensor:
    q, k, v = (F.linear(h, weight) for weight in block.qkv.weight.split([n * block.head_dim for n in block.heads]))
    if block.q_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    q, k, v = (z.unflatten(-1, (-1, block.head_dim)) for z in (q, k, v))
    return core(rotate(q, freqs_LD2), rotate(k, freqs_LD2), v)[0]


def _gated(rung: Rung, x: Tensor, gate_BE: Tensor, branch: Tensor, after: Step) -> tuple[Tensor, Tensor]:
    if rung.gate:
        return gate_norm_modulate(x, gate_BE, branch, *after)
    x = x + gate_BE[:, None].to(x.dtype) * branch
    return x, _normed(rung, x, after)


def _normed(rung: Rung, x: Tensor, after: Step) -> Tensor:
    shift_BE, scale_BE, norm = after
    if rung.adaln:
        return norm_modulate(x, shift_BE, scale_BE, norm)
    shape = x.shape[-1:]
    if norm.kind == "layer":
        normed = F.layer_norm(x, shape, norm.weight, eps=norm.eps)
    else:
        normed = F.rms_norm(x, shape, norm.weight, norm.eps)
    return normed * (1 + scale_BE[:, None].to(x.dtype)) + shift_BE[:, None].to(x.dtype)
