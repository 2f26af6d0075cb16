"""MiniMax-H3: text, sound and video are one packed sequence, whose blocks have attention and SwiGLU after adaLN.

Rows enter and leave the sequence by their places, so that it is whole before the first block and after the last layers.
Each token has the modulation of its timestep and of what it is: text, sound or video.

Blocks are faster than diffusers' own: the gate of a branch, the sum, the next norm and its modulation are one pass, and
so is SwiGLU; q, k and v are one product that attention's kernel writes to the ranks that read them. The modulation of
all blocks, two fifths of the weights, is read once per call, an Nth on each of N ranks.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: MiniMax-H3, as diffusers implements it.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_minimax_h3 import MINIMAX_H3_MODALITY_NUM, MiniMaxH3TransformerOutput
from torch import Tensor

from seqpar.families import Pipelines, Published, latents
from seqpar.families._block import EIGHT, Block, BlockCall, DeclinedError, reads_next
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint, StepBlocks
from seqpar.families._double import Rows, entered, following, modulations
from seqpar.families._masks import Prepared
from seqpar.families._tiny import Tiny
from seqpar.kernels.adaln import Norm, gate_norm_modulate
from seqpar.types.facts import Blocks, Work
from seqpar.types.protocols import Prepare, state_dtype

PACKED = CutTokens("text, sound and video")
TEXT, SOUND = 256, 414  # tokens of a usual prompt's text, and of the sound of 124 frames


def _minimax_h3() -> Cuts:
    row, out = replace(PACKED, dim=0), Boundary(gathers={0: GatherTokens(PACKED.stream)})
    places = {
        "rope": Boundary(outputs={0: row, 1: row}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": PACKED}),
        "transformer_blocks.*": Boundary(inputs={"adaln_indices": row}),
        "norm_out": Boundary(inputs={"timestep_indices": row}),
        "proj_out": out,
        "audio_proj_out": out,
    }
    joint, text = {"transformer_blocks.*.attn": Joint((PACKED.stream,))}, ("token_refiner.refiner_blocks.*.attn",)
    return Cuts(places, joint, local=text, prepare=_prepare, output=MiniMaxH3TransformerOutput)


def _prepare(call: Prepared) -> None:
    """Add timesteps that no token has, until there are two, and not as many as batch rows.

    Sound and video have one timestep in the first step of a run and two in the others, which are so one kind of call.
    As many as rows would be split with them.
    """
    timesteps, rows = call.arguments["timestep"], len(call.arguments["hidden_states"])
    count = max(2, len(timesteps))
    count += count == rows
    if count > len(timesteps):
        call.cut(timestep=torch.cat([timesteps, timesteps[-1:].expand(count - len(timesteps))]))


def _inputs(config: Mapping[str, Any], random: Callable[..., Tensor]) -> dict[str, Any]:
    """Return a call of 5 tokens of text, 3 of sound and 9 of video."""
    tags, places = torch.tensor([1, 2, 0, 0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 2, 0, 1, 0]), torch.arange(17)
    return {
        "hidden_states": random(2, 9, 4 * config["in_channels"]),
        "audio_hidden_states": random(2, 3, config["audio_in_channels"]),
        "encoder_hidden_states": random(2, 5, config["text_dim"]),
        "timestep_indices": (tags == 0).long(),
        "token_tags": tags,
        "position_ids": torch.stack((places // 6, places // 3 % 2, places % 3), dim=1),
        **{f"{name}_indices": places[tags == tag] for tag, name in enumerate(("video", "text", "audio"))},
    }


CUTS = {"MiniMaxH3Transformer3DModel": _minimax_h3()}
STEPS = {"MiniMaxH3Transformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states",)})}
PIPELINES = Pipelines(one_prompt=("MiniMaxH3",))
UNGUIDED = ("MiniMaxH3Transformer3DModel",)  # guidance is distilled
LAYERS = {
    "modulation": ("adaln_proj.linear",),
    "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "out": ("attn.to_out.0",),
    "up": ("ff.net.0.proj",),
    "down": ("ff.net.2",),
}


def block(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    temb: Tensor,
    adaln_indices: Tensor,
    rotary_emb: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the tokens (B, l, E) after a block.

    temb: (T, C), of all timesteps. adaln_indices: (l,), 3 times a token's timestep, plus its kind. rotary_emb: cosines
    and sines (l, 2 R) of the first channels of each head, each number twice.
    """
    if attention_mask is not None:
        raise DeclinedError("attention has a mask")
    x, of, attn = hidden_states, call.matrices, block.attn
    every = call.once("modulation", temb, lambda: _modulation(call, temb, x))
    index = call.once("index", adaln_indices, lambda: adaln_indices.int().expand(len(x), -1).contiguous())
    h = entered(call, x, every[call.index], _norm(block.norm1), index, of["qkv"].rounding)
    cos, sin = (part[:, : part.shape[1] // 2].to(state_dtype(x.dtype)) for part in rotary_emb)
    q, k = attn.norm_q, attn.norm_k
    how = Prepare("rms", True, q.eps, q.weight, None, k.weight, None, cos, sin, interleaved=False)
    (out,) = call.attend([of["qkv"].projected(h, attn.heads, how)])

    _, _, gate, shift_mlp, scale_mlp, gate_mlp = every[call.index]
    up, down, branch = of["up"], of["down"], of["out"](out)
    norm, rounding = _norm(block.norm2), up.rounding
    x, h = gate_norm_modulate(x, gate, branch, shift_mlp, scale_mlp, norm, index_Bl=index, rounding=rounding)
    branch = down(up.swiglu(h, down, gate_last=True))
    after, rounding = every[call.index + 1 :], reads_next(call, "qkv")
    norm = _norm(call.blocks[call.index + 1].norm1) if after else norm
    x, h = following(x, gate_mlp, branch, after, norm, index, rounding)
    if h is not None:
        call.hand_over(x, h)
    return x


def _norm(norm: Any) -> Norm:
    return Norm("rms", norm.eps, norm.weight)


def _modulation(call: BlockCall, temb: Tensor, x: Tensor) -> list[Rows]:
    """Return the rows of all blocks, (3 T, E) each: of every timestep that of each kind of token, in fp32 (or fp64).

    temb is rounded to the dtype of x after its activation.
    """
    c_TC, vectors = F.silu(temb).to(x.dtype), 6 * MINIMAX_H3_MODALITY_NUM
    every = modulations(call, c_TC, ["modulation"], vectors * x.shape[-1], activate=False)
    rows = torch.stack([row_TE for ((row_TE,),) in every]).unflatten(2, (MINIMAX_H3_MODALITY_NUM, 6, -1))
    return [of_block.unbind(1) for of_block in rows.flatten(1, 2).unbind(0)]


BLOCKS = {"MiniMaxH3TransformerBlock": Block(block, (PACKED.stream,), LAYERS, eight=EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens.

    A modulation row is that of one timestep. Left out is the attention of the layers of the text alone.
    """
    width, hidden, layers = config["hidden_size"], config["ffn_dim"], config["num_layers"]
    heads, dim, time = config["num_attention_heads"], config["attention_head_dim"], config["time_embed_dim"]
    inner, rows = heads * dim, 6 * MINIMAX_H3_MODALITY_NUM * width
    gemms = ((width, 3 * inner), (inner, width), (width, 2 * hidden), (hidden, width))
    video = config["in_channels"] * prod(config["patch_size"])
    sines, middle = config["freq_dim"], config["time_embed_hidden_dim"]
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=(Blocks(layers, gemms, (4 * width, 4 * width, 3 * hidden), modulation=((time, rows),)),),
        prepares=True,
        once=((video, width), (width, video + config["audio_in_channels"])),
        table=rows * layers + 2 * width,
        live=4 * width + 3 * hidden,
        text=((config["text_dim"], width), *gemms * config["num_refiner_layers"]),
        conditioning=((sines, middle), (middle, time), (time, 2 * width)),
        guided=False,
        joined=(text, SOUND),
    )


def _tokens(config: Mapping[str, Any], latents: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the tokens of a video, and of its sound in stereo: 40 a second of each side, of 24 frames."""
    frames = (latents[0] - 2) // 5 * 17 + 5
    return prod(latents) // prod(config["patch_size"]), 2 * round(frames / 24 * 40)


WORK, TOKENS = {"MiniMaxH3Transformer3DModel": work}, {"MiniMaxH3Transformer3DModel": _tokens}
PUBLISHED = {
    "MiniMaxAI/MiniMax-H3": Published(
        "MiniMaxH3ModularPipeline",
        "MiniMaxH3Transformer3DModel",
        vae=latents(24, 16, 4, clip_length=17, token_drop=3),
        size=(768, 1344),
        frames=124,
    )
}
TINY = {"MiniMaxH3Transformer3DModel": Tiny({"rope_freq_dim": 4}, _inputs)}
