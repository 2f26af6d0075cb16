"""Z-Image: blocks with a norm before and after attention, and before and after SwiGLU, on one stream of tokens.

Faster than diffusers' own on every GPU: the norm of a branch, its gate, the sum and the next norm with
its modulation are one pass, SwiGLU is one, and q, k and v are one product that attention's kernel writes to the ranks
that read them. The modulation of all blocks is read once per call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Z-Image, as diffusers implements it. Of the preset: inference.py of github.com/Tongyi-MAI/Z-Image at c7ec1357
(8 steps, guidance 0), with the model's own schedule.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from torch import Tensor

from seqpar.families import Pipelines, Preset, Published
from seqpar.families._block import EIGHT, Block, BlockCall, DeclinedError, reads_next
from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts, CutTokens, GatherTokens, Joint, StepBlocks
from seqpar.families._double import by_head, modulations
from seqpar.families._tiny import Tiny
from seqpar.kernels.adaln import BranchNorm, Norm, added, gate_norm_modulate, norm_modulate
from seqpar.types.facts import Blocks, Work


def _z_image() -> Cuts:
    joint = CutTokens("text and image")
    places = {
        "": Boundary(inputs={"controlnet_block_samples": joint}),
        "noise_refiner.*": Boundary(inputs={"freqs_cis": IMAGE, "noise_mask": IMAGE}),
        "noise_refiner.0": Boundary(inputs={"x": IMAGE}),
        "noise_refiner.-1": OUT,
        "layers.*": Boundary(inputs={"freqs_cis": joint, "noise_mask": joint}),
        "layers.0": Boundary(inputs={"x": joint}),
        "all_final_layer.*": Boundary(inputs={"noise_mask": joint}, gathers={0: GatherTokens(joint.stream)}),
    }
    both = {"noise_refiner.*.attention": ALONE, "layers.*.attention": Joint((joint.stream,))}
    local = ("context_refiner.*.attention",)
    return Cuts(places, both, local=local)


CUTS = {"ZImageTransformer2DModel": _z_image()}
STEPS = {"ZImageTransformer2DModel": StepBlocks({"layers": ("x",)}, text="cap_feats", time="t")}
ROW_LISTS = ("x", "cap_feats")
PIPELINES = Pipelines(
    several_images=("ZImageOmni",),
    # off is 0 here, not 1
    presets=(Preset("turbo-8", "ZImage(Img2Img|Modular)?Pipeline", 8, {"guidance_scale": 0.0}),),
)
TEXT = 128  # tokens of a text: a usual prompt's
LAYERS = {
    "modulation": ("adaLN_modulation.0",),
    "qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "out": ("attention.to_out.0",),
    "up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}


def why_not(block: Any) -> str | None:
    if not block.modulation:
        return "those that refine the text alone, without a modulation, are short and whole on every rank"
    return "q and k have no norms" if block.attention.norm_q is None else None


class ScalesAndGates(NamedTuple):
    """The scales of a block's two norms and the gates of its two branches, (B, E) each, and a shift of zeros (1, E)."""

    scale: Tensor
    gate: Tensor
    scale_mlp: Tensor
    gate_mlp: Tensor
    shift: Tensor


def block(
    call: BlockCall,
    block: Any,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    """Return the tokens x (B, l, E) after a block.

    attn_mask: (B, L) bool, of the keys of all ranks. freqs_cis: complex rotary rows (B, l, D/2). adaln_input: (B, C).
    """
    if noise_mask is not None:
        raise DeclinedError("its tokens have one of two timesteps (noise_mask)")
    every = call.once("modulation", adaln_input, lambda: _modulations(call, adaln_input))
    rows = call.once("rotary", freqs_cis, lambda: (freqs_cis.real.contiguous(), freqs_cis.imag.contiguous()))
    h, attn, of, mine = call.handed(x), block.attention, call.matrices, every[call.index]
    if h is None:
        norm = _norm(block.attention_norm1)
        h = norm_modulate(x, mine.shift, mine.scale, norm, rounding=of["qkv"].rounding)
    how = by_head(attn.norm_q, attn.norm_k, *rows)
    (out,) = call.attend([of["qkv"].projected(h, attn.heads, how)], mask=attn_mask)
    return _finished(call, block, x, of["out"](out), every)


def _finished(call: BlockCall, block: Any, x_BlE: Tensor, branch_BlE: Tensor, every: list[ScalesAndGates]) -> Tensor:
    """Return the tokens after attention, the branch, and after SwiGLU; the next block's input is left for it."""
    mine, of = every[call.index], call.matrices
    inner, behind = _norm(block.ffn_norm1), _branch_norm(block.attention_norm2)
    up, down = of["up"], of["down"]
    x, h = gate_norm_modulate(
        *(x_BlE, mine.gate, branch_BlE, mine.shift, mine.scale_mlp, inner), branch_norm=behind, rounding=up.rounding
    )
    branch, behind = down(up.swiglu(h, down)), _branch_norm(block.ffn_norm2)
    if call.index + 1 == len(every):
        return added(x, mine.gate_mlp, branch, branch_norm=behind)
    scale, first = every[call.index + 1].scale, _norm(call.blocks[call.index + 1].attention_norm1)
    rounding = reads_next(call, "qkv")
    x, h = gate_norm_modulate(x, mine.gate_mlp, branch, mine.shift, scale, first, branch_norm=behind, rounding=rounding)
    call.hand_over(x, h)
    return x


def _norm(norm: Any) -> Norm:
    return Norm("rms", norm.eps, norm.weight)


def _branch_norm(norm: Any) -> BranchNorm:
    return BranchNorm(norm.weight, norm.eps)


def _modulations(call: BlockCall, adaln_input: Tensor) -> list[ScalesAndGates]:
    """Return the modulation of all blocks, in fp32 (or fp64); the gates of all blocks take one tanh."""
    width = call.matrices["modulation"].outputs // 4
    every = [rows for (rows,) in modulations(call, adaln_input, ["modulation"], width, activate=False)]
    gates = torch.cat([gate for _, gate, _, gate_mlp in every for gate in (gate, gate_mlp)], dim=1).tanh()
    pairs = gates.unflatten(1, (len(every), 2, -1)).unbind(1)
    shift = gates.new_zeros(1, gates.shape[1] // (2 * len(every)))
    return [
        ScalesAndGates(scale, gate_B2E[:, 0], scale_mlp, gate_B2E[:, 1], shift)
        for (scale, _, scale_mlp, _), gate_B2E in zip(every, pairs, strict=True)
    ]


# the stream of the refiners is the image, that of the other blocks has the text behind it
BLOCKS = {"ZImageTransformerBlock": Block(block, ("image",), LAYERS, why_not, EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    Blocks that refine the image alone are counted as if they had the text with them, and those that refine the text are
    not counted: of 4096 and 128 tokens, either is a fifth of a percent.
    """
    heads, width, channels = config["n_heads"], config["dim"], config["in_channels"]
    hidden, layers = int(width / 3 * 8), config["n_layers"] + config["n_refiner_layers"]
    gemms = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    area, condition = 4 * channels, min(width, 256)
    passes, modulation = (4 * width, 4 * width, 3 * hidden), ((condition, 4 * width),)
    return Work(
        width=width,
        heads=heads,
        kv_heads=config["n_kv_heads"],
        head_dim=width // heads,
        blocks=(Blocks(layers, gemms, passes, modulation=modulation),),
        prepares=True,
        once=((area, width), (width, area)),
        table=4 * width * layers + width,
        live=4 * width + 3 * hidden,
        text=((config["cap_feat_dim"], width),),
        conditioning=((256, 1024), (1024, condition), (condition, width)),
        joined=(text,),
    )


def _tokens(config: Mapping[str, Any], latents: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the tokens of a picture with their padding, to a multiple of 32."""
    return (-(-latents[1] * latents[2] // (4 * SEQ_MULTI_OF)) * SEQ_MULTI_OF,)


WORK, TOKENS = {"ZImageTransformer2DModel": work}, {"ZImageTransformer2DModel": _tokens}
PUBLISHED = {"Tongyi-MAI/Z-Image-Turbo": Published("ZImagePipeline", "ZImageTransformer2DModel")}
TINY = {
    "ZImageTransformer2DModel": Tiny(
        {"dim": 96, "axes_dims": [8, 12, 12]},
        lambda config, random: {
            "x": [random(config["in_channels"], 1, 6, 10) for _ in range(2)],
            "t": torch.tensor([0.3, 0.7], dtype=torch.float64),
            "cap_feats": [random(tokens, config["cap_feat_dim"]) for tokens in (5, 35)],
        },
    )
}
