"""Tiny random blocks of diffusers' models, and the attention processors that a user would write to shard them.

A processor computes its block's own projections, hands QK-norm and rotary to `Prepare` and calls `attend`. Nothing
else of a block changes: it runs on one rank's tokens in the same way as on all tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from seqpar.transformer.parallelize import call_of
from seqpar.types.protocols import Attend, Given, Prepare, Projected
from tests.support.double import StayDouble as StayDouble
from tests.support.meshes import random

DIM = 8
BATCH = 2
LAYERS = 2  # a block runs twice: its second run gets the first one's results and uses the same buffers


def bound(on_cpus: float, on_gpus: float = 1e-4) -> float:
    """Return the largest error that a test allows on this machine, if a CPU has computed the truth.

    Models embed timesteps up to 1000 by sines in fp32, which a GPU rounds in another way than a CPU; 2e-5 of the
    result was seen, the same for every strategy and number of ranks.
    """
    device = os.environ.get("SEQPAR_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return on_cpus if device == "cpu" else on_gpus


def in_double(module: Any) -> Any:
    """Let a parallelized transformer, or a call, compute in fp64, and return the call."""
    call: Any = call_of(module) if isinstance(module, nn.Module) else module
    compute = call.compute

    def computed(form: Any) -> Any:
        with StayDouble():
            return compute(form)

    call.compute = computed
    return call


def assert_right_or_refused(results: list[Any], truth: Tensor, tolerance: float, refused: str | None) -> None:
    """Assert that every rank has the truth, or, where something is refused, a message with these words."""
    for result in results:
        if refused is not None:
            assert isinstance(result, str)
            assert refused in result
        else:
            assert not isinstance(result, str), result
            assert (result - truth).abs().max() < tolerance


@dataclass(frozen=True)
class Stream:
    """The tokens of text or image with the rotary angles of their positions; a slice takes the same part of both."""

    tokens_BLE: Tensor
    angles_LD2: Tensor

    def __getitem__(self, mine: slice) -> Stream:
        return Stream(self.tokens_BLE[:, mine], self.angles_LD2[mine])


Run = Callable[[nn.Module, Stream, Stream, Tensor], tuple[Tensor, Tensor]]
"""Block, text, image, condition (B, 6, E) -> (text, image)."""


@dataclass(frozen=True)
class BlockCase:
    """A block, its call, and the replacement of its attention. joint: whether text is part of the sequence."""

    block: Callable[[], nn.Module]
    run: Run
    install: Callable[[Any, Attend], None]
    heads: int
    joint: bool = True

    def build(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the block with the same random weights on every rank, norm weights included."""
        block = self.block().double().requires_grad_(False)
        for seed, weight in enumerate(block.parameters()):
            weight.copy_(random(tuple(weight.shape), seed) * weight.shape[-1] ** (-0.5 if weight.dim() > 1 else 0))
        return block.to(device)

    def inputs(self, lengths: tuple[int, int], device: torch.device | str = "cpu") -> tuple[Stream, Stream, Tensor]:
        """Return text, image and condition for these token counts, the same on every rank."""
        width = self.heads * DIM
        text, image = (
            Stream(random((BATCH, length, width), 100 + seed, device), random((length, DIM // 2), 200 + seed, device))
            for seed, length in enumerate(lengths)
        )
        return text, image, random((BATCH, 6, width), 300, device)

    def forward(self, block: nn.Module, text: Stream, image: Stream, condition_B6E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (text, image) after `LAYERS` runs on all tokens or on one rank's tokens."""
        with torch.no_grad():
            for _ in range(LAYERS):
                tokens = self.run(block, text, image, condition_B6E)
                text, image = (replace(s, tokens_BLE=x) for s, x in zip((text, image), tokens, strict=True))
        return text.tokens_BLE, image.tokens_BLE


def heads(*x_BlE: Tensor) -> tuple[Tensor, ...]:
    """Reshape each tensor from (B, l, H*D) to (B, l, H, D)."""
    return tuple(x.unflatten(-1, (-1, DIM)) for x in x_BlE)


def repeated(angles_LD2: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (L, D) in the format of FLUX and Wan: each number twice, for both of its interleaved pair."""
    angles_LD = angles_LD2.repeat_interleave(2, dim=-1)
    return angles_LD.cos(), angles_LD.sin()


def run_flux(block: nn.Module, text: Stream, image: Stream, condition_B6E: Tensor) -> tuple[Tensor, Tensor]:
    """Run a FLUX block (double or single), which puts text first."""
    rows = repeated(torch.cat((text.angles_LD2, image.angles_LD2)))
    return block(image.tokens_BLE, text.tokens_BLE, condition_B6E[:, 0], rows)


def run_wan(block: nn.Module, text: Stream, image: Stream, condition_B6E: Tensor) -> tuple[Tensor, Tensor]:
    """Run a Wan block, which reads text only in cross-attention."""
    cos, sin = (rows[None, :, None] for rows in repeated(image.angles_LD2))
    return text.tokens_BLE, block(image.tokens_BLE, text.tokens_BLE, condition_B6E, (cos, sin))


def run_lumina(block: nn.Module, text: Stream, image: Stream, condition_B6E: Tensor) -> tuple[Tensor, Tensor]:
    """Run a Lumina block on text and image in one stream; its rotary rows are complex, with one set a batch row."""
    angles = torch.cat((text.angles_LD2, image.angles_LD2)).expand(BATCH, -1, -1)
    tokens = torch.cat((text.tokens_BLE, image.tokens_BLE), dim=1)
    out = block(tokens, None, torch.polar(torch.ones_like(angles), angles), condition_B6E[:, 0])
    text_BlE, image_BlE = out.split((text.tokens_BLE.shape[1], image.tokens_BLE.shape[1]), dim=1)
    return text_BlE, image_BlE


def prepared(norms: tuple[Any, Any], cos_lD2: Tensor, sin_lD2: Tensor, per_head: bool = True) -> Prepare:
    """Return the `Prepare` of a block's RMSNorms of q and k and of its interleaved rotary rows."""
    q, k = norms
    return Prepare("rms", per_head, q.eps, q_weight=q.weight, k_weight=k.weight, cos_lD2=cos_lD2, sin_lD2=sin_lD2)


def every_other(rows: tuple[Tensor, Tensor], tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return cos and sin (l, D/2) of some tokens from rows that hold each number twice."""
    return rows[0][tokens, ::2], rows[1][tokens, ::2]


@dataclass(frozen=True)
class FluxDoubleProcessor:
    """Attention of two streams, text first, each with its own projections, norms and rotary rows."""

    attend: Attend

    def __call__(
        self, attn: Any, image_BlE: Tensor, text_BlE: Tensor, mask: None, rows: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return attention for `FluxAttention.forward`; the strategy projects the image, this method the text."""
        count = text_BlE.shape[1]
        q, k, v = heads(*(layer(text_BlE) for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)))
        text = Given(q, k, v, prepared((attn.norm_added_q, attn.norm_added_k), *every_other(rows, slice(count))))
        layers = (attn.to_q, attn.to_k, attn.to_v)
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        how = prepared((attn.norm_q, attn.norm_k), *every_other(rows, slice(count, None)))
        image = Projected(image_BlE, weight, bias, attn.heads, attn.heads, how)
        text_out, image_out = self.attend((text, image))
        return attn.to_out[0](image_out.flatten(2)), attn.to_add_out(text_out.flatten(2))


@dataclass(frozen=True)
class FluxSingleProcessor:
    """Attention of one joint stream; q, k, v are views of one fused projection; the block projects the result."""

    attend: Attend

    def __call__(self, attn: Any, x_BlE: Tensor, text: None, mask: None, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return attention for `FluxAttention.forward`."""
        how = prepared((attn.norm_q, attn.norm_k), *every_other(rows))
        q, k, v = heads(*attn.to_qkv(x_BlE).chunk(3, dim=-1))
        return self.attend((Given(q, k, v, how),))[0].flatten(2)


@dataclass(frozen=True)
class WanProcessor:
    """Self-attention whose norms go over all heads at once."""

    attend: Attend

    def __call__(self, attn: Any, x_BlE: Tensor, text: None, mask: None, rows: tuple[Tensor, Tensor]) -> Tensor:
        """Return attention for `WanAttention.forward`."""
        q, k, v = heads(attn.to_q(x_BlE), attn.to_k(x_BlE), attn.to_v(x_BlE))
        cos, sin = every_other((rows[0][0, :, 0], rows[1][0, :, 0]))
        how = prepared((attn.norm_q, attn.norm_k), cos, sin, per_head=False)
        return attn.to_out[0](self.attend((Given(q, k, v, how),))[0].flatten(2))


@dataclass(frozen=True)
class LuminaProcessor:
    """Grouped-query attention: exchanges send the key-value heads without repeating them."""

    attend: Attend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None,
        image_rotary_emb: Tensor,
    ) -> Tensor:
        """Return attention for `Attention.forward`, which uses these argument names and passes the tokens twice."""
        q, k, v = heads(attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        rows = image_rotary_emb[0]  # `Prepare` has one set of rotary rows for all batch rows; here all sets are equal
        how = prepared((attn.norm_q, attn.norm_k), rows.real, rows.imag)
        return attn.to_out[0](self.attend((Given(q, k, v, how),))[0].flatten(2))


def fused_single() -> nn.Module:
    """Return a single FLUX block with q, k and v fused into one projection, as its users run it."""
    block = FluxSingleTransformerBlock(5 * DIM, num_attention_heads=5, attention_head_dim=DIM)
    block.attn.fuse_projections()
    return block


# five heads do not divide by two or three ranks; two key-value heads leave one of three ranks without any
BLOCKS = {
    "flux_double": BlockCase(
        lambda: FluxTransformerBlock(5 * DIM, num_attention_heads=5, attention_head_dim=DIM),
        run_flux,
        lambda block, attend: block.attn.set_processor(FluxDoubleProcessor(attend)),
        heads=5,
    ),
    "flux_single": BlockCase(
        fused_single, run_flux, lambda block, attend: block.attn.set_processor(FluxSingleProcessor(attend)), heads=5
    ),
    "wan": BlockCase(
        lambda: WanTransformerBlock(5 * DIM, ffn_dim=48, num_heads=5, cross_attn_norm=True),
        run_wan,
        lambda block, attend: block.attn1.set_processor(WanProcessor(attend)),  # attn2 reads text: it stays local
        heads=5,
        joint=False,
    ),
    "lumina2": BlockCase(
        lambda: Lumina2TransformerBlock(6 * DIM, 6, num_kv_heads=2, multiple_of=8, ffn_dim_multiplier=1, norm_eps=1e-5),
        run_lumina,
        lambda block, attend: block.attn.set_processor(LuminaProcessor(attend)),
        heads=6,
    ),
}
