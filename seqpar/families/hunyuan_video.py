"""HunyuanVideo 1.0 and 1.5: double blocks of video and text, in 1.0 then parallel ones (`_double.py`).

Faster than diffusers' own on every GPU: norm, modulation and gates are one pass, GELU and biases are
part of the products, q, k and v are one product that attention's kernel writes to the ranks that read them, and the
padding of the text is one row of keys in place of a mask for all pairs of tokens (1.5). Between the parallel blocks the
tokens stay one stream.
The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64) and rounded once.
Source: Tencent's HunyuanVideo (arXiv 2412.03603) and HunyuanVideo 1.5, as diffusers implements them.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from seqpar.families import GUIDER, Pipelines, Published, latents
from seqpar.families._block import Block, BlockCall, Input, reads_next, rounding_for, unrounded
from seqpar.families._cuts import IMAGE, NOTE, OUT, TEXT, Boundary, Cuts, CutTokens, Joint, StepBlocks
from seqpar.families._double import (
    DOUBLE_EIGHT,
    DOUBLE_LAYERS,
    PARALLEL_EIGHT,
    PARALLEL_LAYERS,
    apart,
    branch,
    by_head,
    double_work,
    joined,
    modulations,
    pairs,
    parallel_work,
    two_streams,
)
from seqpar.families._masks import Keys, Prepared, first_keys, shorten, valid_first
from seqpar.families._tiny import Tiny
from seqpar.families.mochi import MochiProcessor
from seqpar.kernels.adaln import Norm
from seqpar.types.facts import Gemms, Work
from seqpar.types.protocols import Stream, from_patches

REFINER = ("context_embedder.token_refiner.refiner_blocks.*.attn",)  # it runs before the text is cut


def _hunyuan_video() -> Cuts:
    rows = CutTokens("image", dim=0)
    text = CutTokens("text")  # its modules take the last 0 tokens for all tokens
    places = {
        "rope": Boundary(outputs={0: rows, 1: rows}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": text}),
        "proj_out": OUT,
    }
    joint = Joint(("image", "text"), masked=True)
    both = {"transformer_blocks.*.attn": joint, "single_transformer_blocks.*.attn": joint}
    return Cuts(places, both, prepare=_prepare, keys=_keys, why_not=_replaces_tokens, local=REFINER)


def _replaces_tokens(module: Any) -> str | None:
    if module.config.image_condition_type != "token_replace":
        return None
    return (
        "image_condition_type token_replace modulates the tokens of the first frame in another way, by their number "
        "in the whole video"
    )


def _hunyuan_video15() -> Cuts:
    rows = CutTokens("image", dim=0)
    places = {
        "rope": Boundary(outputs={0: rows, 1: rows}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE, "encoder_hidden_states": TEXT}),
        "transformer_blocks.*": Boundary(inputs={"attention_mask": TEXT}),
        "proj_out": OUT,
    }
    return Cuts(
        places,
        {"transformer_blocks.*.attn": Joint(("image", "text"), masked=True, processor=HunyuanVideo15Processor)},
        prepare=_prepare_15,
        keys=_keys_15,
        forward=lambda module: forward_15,
        local=REFINER,
    )


LLM, BYT5, PICTURE = range(3)  # rows of the embedding that tells the encoders apart


def _prepare(call: Prepared) -> None:
    """Leave padding of the text out; note whether nothing is masked then. The forward gets the mask in any case."""
    call.note = shorten(call, "encoder_attention_mask", "encoder_hidden_states", max(4, call.ranks))


def _prepare_15(call: Prepared) -> None:
    """Leave padding of both texts, and a picture that is none, out; note whether nothing is masked then."""
    parts = (
        ("encoder_attention_mask", "encoder_hidden_states", 2),
        ("encoder_attention_mask_2", "encoder_hidden_states_2", 0),
        ("image_embeds", "image_embeds", 0),
    )
    full = [shorten(call, *part) for part in parts]
    call.note = all(full)


def _keys(arguments: dict[str, Any], is_full: Hashable) -> Keys:
    """Return the text's mask: diffusers takes as many first tokens as the call's mask has tokens."""
    return Keys() if is_full else Keys({"text": first_keys(arguments["encoder_attention_mask"])})


def _keys_15(arguments: dict[str, Any], is_full: Hashable) -> Keys:
    return Keys() if is_full else Keys({"text": first_keys(_masks(arguments))})


@apply_lora_scale("attention_kwargs")
def forward_15(module: Any, **arguments: Any) -> tuple[Tensor]:
    """Return the prediction (B, C, T, H, W), as `HunyuanVideo15Transformer3DModel` does with the same arguments."""
    video, config = arguments["hidden_states"], module.config
    rotary = module.rope(video)
    temb = module.time_embed(arguments["timestep"], timestep_r=arguments.get("timestep_r"))
    x, (text, mask) = module.x_embedder(video), _text(module, arguments)
    for block in module.transformer_blocks:
        x, text = block(x, text, temb, mask, rotary)
    patch = config.patch_size_t, config.patch_size, config.patch_size
    frames, height, width = (side // own * own for side, own in zip(video.shape[2:], patch, strict=True))
    return (from_patches(module.proj_out(module.norm_out(x, temb)), patch, (frames, height, width)),)


def _masks(arguments: Mapping[str, Any]) -> Tensor:
    """Return the masks of the picture, of ByT5's text and of the language model's text, joined, (B, L) bool."""
    picture = arguments["image_embeds"]
    has_picture = (picture != 0).any().expand(picture.shape[:2])
    texts = (arguments[f"encoder_attention_mask{name}"] != 0 for name in ("_2", ""))
    return torch.cat([has_picture, *texts], dim=1)


def _text(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the text (B, L, E), in each row the tokens of all encoders, then zeros, and its mask (B, L).

    There is no mask where nothing is padding.
    """
    llm, timestep = arguments["encoder_hidden_states"], arguments["timestep"]
    parts = (
        (PICTURE, module.image_embedder(arguments["image_embeds"])),
        (BYT5, module.context_embedder_2(arguments["encoder_hidden_states_2"])),
        (LLM, module.context_embedder(llm, timestep, arguments["encoder_attention_mask"])),
    )
    named = [x + module.cond_type_embed(x.new_full(x.shape[:2], kind, dtype=torch.long)) for kind, x in parts]
    text_BLE = torch.cat(named, dim=1)
    if arguments[NOTE]:  # nothing is masked
        return text_BLE, None
    masks_BL = _masks(arguments)
    mask_BL = first_keys(masks_BL)
    return text_BLE.take_along_dim(valid_first(masks_BL)[..., None], dim=1).masked_fill(~mask_BL[..., None], 0), mask_BL


class HunyuanVideo15Processor(MochiProcessor):
    """The same with HunyuanVideo 1.5's rotary embedding, whose cos and sin (l, D) hold each number twice."""

    def turned(self, x_BlHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return q or k after the rotary embedding."""
        rows: Any = cos, sin
        rotated_BlHD: Any = apply_rotary_emb(x_BlHD, rows, sequence_dim=1)
        return rotated_BlHD


ORDER = ("image", "text")  # in which attention joins them
CUTS = {"HunyuanVideoTransformer3DModel": _hunyuan_video(), "HunyuanVideo15Transformer3DModel": _hunyuan_video15()}
STEPS = {
    "HunyuanVideoTransformer3DModel": StepBlocks(
        dict.fromkeys(("transformer_blocks", "single_transformer_blocks"), ("hidden_states", "encoder_hidden_states"))
    ),
    "HunyuanVideo15Transformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states", "encoder_hidden_states")}),
}
PIPELINES = Pipelines(one_result=("HunyuanVideoImageToVideo", "HunyuanVideo15ImageToVideo"))
TEXT_TOKENS = 64  # tokens of a text: a usual prompt's, without padding


def why_not(block: Any) -> str | None:
    norm = type(block.attn.norm_q).__name__
    return None if norm == "RMSNorm" else f"q and k have a {norm}"


class _Masked:
    """A block's call with the mask that its attention is given, and with 0 for padding of the text."""

    def __init__(self, call: BlockCall, mask: Tensor | None, kept_Bl: Tensor | None = None) -> None:
        self._call, self._mask, self._kept_Bl = call, mask, kept_Bl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def attend(self, streams: Sequence[Stream]) -> tuple[Input, Input]:
        """See `BlockCall`."""
        image_out, text_out = self._call.attend(streams, mask=self._mask)
        return image_out, text_out if self._kept_Bl is None else unrounded(text_out) * self._kept_Bl[..., None]


def double(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None,
    freqs_cis: tuple[Tensor, Tensor],
    token_replace_emb: Tensor | None = None,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return video (B, l, E) and text (B, l', E) after a block.

    temb: (B, E). attention_mask: of the keys of all ranks. freqs_cis: cosines and sines of the video, (l, D), each
    number twice. The last two arguments are for models that replace tokens.
    """
    return _double(_Masked(call, attention_mask), block, hidden_states, encoder_hidden_states, temb, freqs_cis)


def double15(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None,
    freqs_cis: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return video and text after a block of 1.5; see `double`. attention_mask: (B, l') bool, this rank's text.

    As diffusers' does, attention returns 0 for padding, although no token reads what becomes of it.
    """
    inner = _Masked(call, attention_mask, attention_mask)
    return _double(inner, block, hidden_states, encoder_hidden_states, temb, freqs_cis)


def _double(
    call: Any, block: Any, image_BlE: Tensor, text_BlE: Tensor, temb: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return video and text after a double block. call: a `BlockCall` that knows the mask."""
    names = [f"{name} modulation" for name in ORDER]
    every = call.once("modulation", temb, lambda: modulations(call, temb, names))
    attn, rows = block.attn, pairs(call, rotary, image_BlE)
    prepares = {
        "image": by_head(attn.norm_q, attn.norm_k, *rows),
        "text": by_head(attn.norm_added_q, attn.norm_added_k),
    }
    # the embedder leaves the channels apart, which only the first block sees
    streams = image_BlE.contiguous(), text_BlE
    image, text = two_streams(call, streams, every, prepares, attn.heads, Norm("layer", block.norm2.eps))
    return image, text


def single(
    call: BlockCall,
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None,
    image_rotary_emb: tuple[Tensor, Tensor],
    token_replace_emb: Tensor | None = None,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return video and text after a block; see `double`. They are views of one stream, which is left for the next."""
    every = [rows for (rows,) in call.once("modulation", temb, lambda: modulations(call, temb, ["modulation"]))]
    attn, norm, of = block.attn, Norm("layer", block.norm.norm.eps), call.matrices
    x, h = joined(call, hidden_states, encoder_hidden_states, every, norm, rounding_for(of, "qkv", "up"))
    rows, text = pairs(call, image_rotary_emb, x), encoder_hidden_states.shape[1]
    rows = call.once("rotary of both", image_rotary_emb, lambda: _with_text(rows, text))
    how = by_head(attn.norm_q, attn.norm_k, *rows)
    inputs = h, how, attn.heads, of["qkv"], of["up"].gelu, of["out"].split_inputs(attn.inner_dim)
    of_block = branch(call, *inputs, mask=attention_mask)
    return apart(call, x, of_block, every, norm, hidden_states.shape[1], reads_next(call, "qkv", "up"))


def _with_text(rows: tuple[Tensor, Tensor], text: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (l + l', D/2) of the video and of the text behind it, which is not rotated."""
    cos, sin = rows
    return F.pad(cos, (0, 0, 0, text), value=1.0), F.pad(sin, (0, 0, 0, text))


BLOCKS = {
    "HunyuanVideoTransformerBlock": Block(double, ORDER, DOUBLE_LAYERS, why_not, DOUBLE_EIGHT),
    "HunyuanVideoSingleTransformerBlock": Block(single, ORDER, PARALLEL_LAYERS, why_not, PARALLEL_EIGHT),
    "HunyuanVideo15TransformerBlock": Block(double15, ORDER, DOUBLE_LAYERS, why_not, DOUBLE_EIGHT),
}


def work(config: Mapping[str, Any], text: int = TEXT_TOKENS) -> Work:
    """Return the planner's `Work` for diffusers' config; text: the number of text tokens, which two blocks refine."""
    heads, dim = config["num_attention_heads"], config["attention_head_dim"]
    width, hidden = heads * dim, int(heads * dim * config["mlp_ratio"])
    doubles, singles = config["num_layers"], config.get("num_single_layers", 0)
    area, channels = config["patch_size_t"] * config["patch_size"] ** 2, config["in_channels"]
    kinds = (double_work(doubles, width, hidden), parallel_work(singles, width, hidden))
    return Work(
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        blocks=kinds if singles else kinds[:1],
        prepares=True,
        once=((channels * area, width), (width, (config.get("out_channels") or channels) * area)),
        table=(12 * doubles + 3 * singles + 2) * width,
        live=12 * width,
        text=_of_text(config, width, text),
        conditioning=_of_condition(config, width),
        guided=not config.get("guidance_embeds"),
        joined=(text,),
    )


def _of_text(config: Mapping[str, Any], width: int, text: int) -> Gemms:
    """Return the products of a text token: its embedding, and in each refiner q, k, v, attention, output and MLP."""
    attention = (*((width, width),) * 4, *((text, width),) * 2)
    refiner = (*attention, (width, 4 * width), (4 * width, width))
    return (config["text_embed_dim"], width), *refiner * config["num_refiner_layers"]


def _of_condition(config: Mapping[str, Any], width: int) -> Gemms:
    """Return the products on one row: of timesteps (the refiner's, and guidance), pooled texts, and modulation."""
    sines = ((256, width), (width, width)) * (3 if config.get("guidance_embeds") else 2)
    pooled = (config[name] for name in ("text_embed_dim", "pooled_projection_dim") if name in config)
    texts = (gemm for wide in pooled for gemm in ((wide, width), (width, width)))
    return *sines, *texts, *((width, 2 * width),) * (config["num_refiner_layers"] + 1)


WORK = dict.fromkeys(CUTS, work)


def _of_15(pipeline: str, task: str) -> Published:
    kind = "HunyuanVideo15Transformer3DModel"
    return Published(pipeline, kind, {"task_type": task}, latents(32, 16, 4), (480, 848), index=GUIDER)


PUBLISHED = {
    "hunyuanvideo-community/HunyuanVideo": Published(
        "HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", vae=latents(frames=4)
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v": _of_15("HunyuanVideo15Pipeline", "t2v"),
    "hunyuanvideo-community/HunyuanVideo-1.5-480p_i2v": _of_15("HunyuanVideo15ImageToVideoPipeline", "i2v"),
}
TINY = {
    "HunyuanVideo15Transformer3DModel": Tiny(
        inputs=lambda config, random: {
            "encoder_hidden_states_2": random(2, 5, config["text_embed_2_dim"]),
            "encoder_attention_mask_2": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
            "image_embeds": random(2, 3, config["image_embed_dim"]),
        }
    )
}
