"""The rungs between a plain model and the engine: the same weights in eager mode, with one more fusion on each rung.

They rebuild the ladder of the PaddleMIX notes on Large-DiT for both models: first the modulation is hoisted out of the
loop, then norm + modulate, gate + residual + norm, and the feed-forward become one kernel each. The next rung, fused
qkv and QK-norm + rotary, is the engine's own block. Local attention is the same on all rungs, so the difference between
two rungs is due to the fusion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from launch.baselines.plain_large_dit import rotate
from seqpar.kernels.adaln import Norm, gate_norm_modulate, norm_modulate
from seqpar.kernels.gelu import bias_gelu
from seqpar.kernels.swiglu import swiglu
from seqpar.models import _layers, dit, large_dit
from seqpar.models._label_dit import FREQUENCIES, LabelDiT
from seqpar.protocols import Condition, Core

Step = tuple[Tensor, Tensor, Norm]


@dataclass(frozen=True)
class Rung:
    """The fusions of one rung; each rung adds one to the rung before it."""

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
)


@dataclass(frozen=True)
class Inputs:
    """Inputs of one prediction. table: the result of `model.modulate(t_B, class_labels=y_B)`, made before the step."""

    tokens_BLC: Tensor
    positions: Tensor
    t_B: Tensor
    y_B: Tensor
    table: Condition


@dataclass(frozen=True)
class Kind:
    """The parts that differ between models: norms (attention, feed-forward, final), embedding, and the two branches."""

    norms: Callable[[Any], tuple[Norm, Norm]]
    final: Norm
    embed: Callable[[Any, Inputs], tuple[Tensor, Tensor | None]]
    attention: Callable[[Any, Tensor, Tensor | None, Core], Tensor]
    feed_forward: Callable[[Any, Tensor, bool], Tensor]


def forward(model: LabelDiT, rung: Rung, given: Inputs, core: Core) -> Tensor:
    """Return the model's prediction for tokens (B, L, C), as tokens."""
    kind = LARGE_DIT if isinstance(model, large_dit.Model) else DIT
    made = given.table if rung.hoisted else _condition(model, given.t_B, given.y_B)
    x, rotary = kind.embed(model, given)
    modulations, final_B2E, blocks = made["blocks"].unbind(1), made["final"], list[Any](model.blocks)
    starts: list[Step] = [
        (m[:, 0], m[:, 1], kind.norms(block)[0]) for block, m in zip(blocks, modulations, strict=True)
    ]
    ends = [*starts[1:], (final_B2E[:, 0], final_B2E[:, 1], kind.final)]
    h = _normed(rung, x, starts[0])
    for block, modulation_B6E, after in zip(blocks, modulations, ends, strict=True):
        gate, shift, scale, gate_mlp = (modulation_B6E[:, i] for i in (2, 3, 4, 5))
        branch = kind.attention(block, h, rotary, core)
        x, h = _gated(rung, x, gate, branch, (shift, scale, kind.norms(block)[1]))
        x, h = _gated(rung, x, gate_mlp, kind.feed_forward(block, h, rung.feed_forward), after)
    return model.final(h)


def _condition(model: LabelDiT, t_B: Tensor, y_B: Tensor) -> Condition:
    """Return this step's modulation as the published model computes it: in the model's dtype, in every step."""
    dtype = model.x_embedder.weight.dtype
    sines = _layers.sinusoid(t_B, FREQUENCIES, getattr(model.config, "freq_shift", 0.0))
    c = F.silu(model.t_embedder(sines.to(dtype)) + model.y_embedder(y_B))
    blocks = [block.modulation(c).unflatten(-1, (6, -1)) for block in list[Any](model.blocks)]
    return {"blocks": torch.stack(blocks, dim=1), "final": model.final_modulation(c).unflatten(-1, (2, -1))}


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


# Large-DiT: the separate projections are rows of the fused ones; QK-norm and rotary are the published ones ---------


def _large_norms(block: Any) -> tuple[Norm, Norm]:
    kind, eps = block.norm
    return Norm(kind, eps, block.attention_norm.weight), Norm(kind, eps, block.ffn_norm.weight)


def _large_embed(model: Any, given: Inputs) -> tuple[Tensor, Tensor | None]:
    x = model.x_embedder(given.tokens_BLC.to(model.x_embedder.weight.dtype))
    return x, torch.stack(given.positions.chunk(2, dim=-1), dim=-1)


def _large_attention(block: Any, h: Tensor, rotary: Tensor | None, core: Core) -> Tensor:
    assert rotary is not None
    q, k, v = (F.linear(h, weight) for weight in block.qkv.weight.split([n * block.head_dim for n in block.heads]))
    if block.q_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    q, k, v = (z.unflatten(-1, (-1, block.head_dim)) for z in (q, k, v))
    return block.wo(core(rotate(q, rotary), rotate(k, rotary), v)[0].flatten(2))


def _large_feed_forward(block: Any, h: Tensor, fused: bool) -> Tensor:
    if fused:
        return block.w2(swiglu(block.w13(h)))
    w1, w3 = block.w13.weight.chunk(2)
    return block.w2(F.silu(F.linear(h, w1)) * F.linear(h, w3))


LARGE_DIT = Kind(_large_norms, large_dit.FINAL_NORM, _large_embed, _large_attention, _large_feed_forward)

# DiT: projections have biases, and positions are added once -------------------------------------------------------


def _dit_norms(block: Any) -> tuple[Norm, Norm]:
    return dit.NORM, block.mlp_norm


def _dit_embed(model: Any, given: Inputs) -> tuple[Tensor, Tensor | None]:
    dtype = model.x_embedder.weight.dtype
    return model.x_embedder(given.tokens_BLC.to(dtype)) + given.positions.to(dtype), None


def _dit_attention(block: Any, h: Tensor, rotary: Tensor | None, core: Core) -> Tensor:
    biases = (None,) * 3 if block.qkv.bias is None else block.qkv.bias.chunk(3)
    layers = zip(block.qkv.weight.chunk(3), biases, strict=True)
    q, k, v = (F.linear(h, weight, bias).unflatten(-1, (-1, block.head_dim)) for weight, bias in layers)
    return block.proj(core(q, k, v)[0].flatten(2))


def _dit_feed_forward(block: Any, h: Tensor, fused: bool) -> Tensor:
    if fused:
        return block.fc2(bias_gelu(F.linear(h, block.fc1.weight), block.fc1.bias))
    return block.fc2(F.gelu(block.fc1(h), approximate="tanh"))


DIT = Kind(_dit_norms, dit.NORM, _dit_embed, _dit_attention, _dit_feed_forward)
