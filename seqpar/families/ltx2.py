"""LTX-2: a video and its sound, each of which attends to itself, to a text, to the other one, and then passes an MLP.

Faster than diffusers' own block, whose norms, modulation and gates are separate passes, and
whose rotary embedding reads and writes q and k in fp32. The video is split over the ranks. Its sound is some hundred
tokens, which every rank computes whole, so that attention to it exchanges nothing; what it reads of the video is merged
(`BlockCall.attend_whole`). The arithmetic is diffusers' with fewer roundings: it is computed in fp32 (fp64 for fp64)
and rounded once.
Source: LTX-2 (arXiv 2601.03233), as diffusers implements it; 2.3 has gates for the heads of attention and a modulation
of the text, too. Of the preset: DISTILLED_SIGMA_VALUES in packages/ltx-pipelines of github.com/Lightricks/LTX-2 at
400fd310, and its DistilledPipeline, without guidance of any kind.
Letters: see `seqpar.types.protocols`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_ltx2 import AudioVisualModelOutput
from torch import Tensor

from seqpar.families import Pipelines, Preset, Published, latents, ltx
from seqpar.families._block import Block, BlockCall, DeclinedError, Input, rounding_for, unrounded
from seqpar.families._cross import Modulation, constant, finished, tabled, to_whole
from seqpar.families._cuts import IMAGE, OUT, Boundary, Cuts, CutTokens, Joint, StepBlocks
from seqpar.families._tiny import Tiny
from seqpar.families.ltx import by_head, by_vector, key_bias, no_keys, prepare_whole, why_not_of
from seqpar.kernels.adaln import Norm, Vectors, by_token, gate_norm_modulate, norm_modulate
from seqpar.kernels.prepare import prepare, prepare_one
from seqpar.types.facts import Work
from seqpar.types.protocols import Prepare


def _ltx2() -> Cuts:
    """Return the cuts of the video; its sound is some hundred tokens, which every rank computes whole.

    Their products take the time of reading the weights, which a split would not shorten.
    """
    coords = Boundary(inputs={"coords": CutTokens("image", dim=2)})
    root = {"hidden_states": IMAGE, "timestep": CutTokens("image", dims=2), "video_keyframes_mask": IMAGE}
    places = {"": Boundary(inputs=root), "rope": coords, "cross_attn_rope": coords, "proj_out": OUT}
    own = Joint(("image",), skipped_by="all_perturbed")
    sound = Joint(("image",), whole_queries=True)
    attention = {"transformer_blocks.*.attn1": own, "transformer_blocks.*.video_to_audio_attn": sound}
    masks = {"encoder_attention_mask": "text", "audio_encoder_attention_mask": "text of the sound"}
    local = [f"transformer_blocks.*.{name}" for name in ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn")]
    output = AudioVisualModelOutput
    return Cuts(places, attention, masks, prepare=prepare_whole, keys=no_keys, local=tuple(local), output=output)


Rotary = tuple[Tensor, Tensor]


def _attention(name: str, path: str, *, of_itself: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the matrices of an attention; of_itself: whether q, k and v are one product."""
    q, kv = (f"{path}.to_q",), (f"{path}.to_k", f"{path}.to_v")
    made = {f"{name} qkv": q + kv} if of_itself else {f"{name} q": q, f"{name} kv": kv}
    return {**made, f"{name} out": (f"{path}.to_out.0",), f"{name} gates": (f"{path}.to_gate_logits",)}


CUTS = {"LTX2VideoTransformer3DModel": _ltx2()}
STEPS = {"LTX2VideoTransformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states", "audio_hidden_states")})}
# one call of the transformer a step: none for a negative text, without some blocks, or for video and sound alone
NO_GUIDANCE = {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
PIPELINES = Pipelines(
    sigmas="LTX2(Condition|HDR|ImageToVideo|InContext)?Pipeline",
    presets=(
        Preset(
            "distilled",
            "LTX2(Condition|ImageToVideo)?Pipeline",
            8,
            {**NO_GUIDANCE, **{f"audio_{name}": scale for name, scale in NO_GUIDANCE.items()}},
            (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875),
            loras=r"ltx-?2[^/]*distilled",
            needs=("duration_head", False),  # LTX-2.5, whose authors add noise in each step
        ),
    ),
)
TEXT = 1024  # tokens to which the pipeline pads a text
LAYERS = {
    **_attention("video", "attn1", of_itself=True),
    **_attention("audio", "audio_attn1", of_itself=True),
    **_attention("video text", "attn2"),
    **_attention("audio text", "audio_attn2"),
    **_attention("video reads audio", "audio_to_video_attn"),
    **_attention("audio reads video", "video_to_audio_attn"),
    "video up": ("ff.net.0.proj",),
    "video down": ("ff.net.2",),
    "audio up": ("audio_ff.net.0.proj",),
    "audio down": ("audio_ff.net.2",),
}
# the sound is few tokens
EIGHT = ("video qkv", "video out", "video text q", "video text out", "video up", "video down")


def why_not(block: Any) -> str | None:
    if len({block.attn1.heads, block.audio_attn1.heads, block.audio_to_video_attn.heads}) > 1:
        return "video and sound have other numbers of heads"
    return why_not_of(block.norm1, block.ff, block.audio_ff)


class Names(NamedTuple):
    """What a block and its arguments call the parts of one side: its tables, attentions and what these read."""

    table: str
    temb: str
    prompt_table: str
    temb_prompt: str
    crossing_table: str
    temb_crossing: tuple[str, str]
    attn: str
    text_attn: str
    rotary: str
    crossing_rotary: str
    text: str
    mask: str


NAMES = {
    "video": Names(
        table="scale_shift_table",
        temb="temb",
        prompt_table="prompt_scale_shift_table",
        temb_prompt="temb_prompt",
        crossing_table="video_a2v_cross_attn_scale_shift_table",
        temb_crossing=("temb_ca_scale_shift", "temb_ca_gate"),
        attn="attn1",
        text_attn="attn2",
        rotary="video_rotary_emb",
        crossing_rotary="ca_video_rotary_emb",
        text="encoder_hidden_states",
        mask="encoder_attention_mask",
    ),
    "audio": Names(
        table="audio_scale_shift_table",
        temb="temb_audio",
        prompt_table="audio_prompt_scale_shift_table",
        temb_prompt="temb_prompt_audio",
        crossing_table="audio_a2v_cross_attn_scale_shift_table",
        temb_crossing=("temb_ca_audio_scale_shift", "temb_ca_audio_gate"),
        attn="audio_attn1",
        text_attn="audio_attn2",
        rotary="audio_rotary_emb",
        crossing_rotary="ca_audio_rotary_emb",
        text="audio_encoder_hidden_states",
        mask="audio_encoder_attention_mask",
    ),
}
OFF = ("self_attention_mask", "audio_self_attention_mask", "a2v_cross_attention_mask", "v2a_cross_attention_mask")


class Side(NamedTuple):
    """The video or its sound ("audio") in one block.

    own: its modulation; where it has a modulation of what it asks the text, that and a gate follow the six vectors.
    crossing: scale and shift where the video reads the sound, then where the sound reads the video, and the gate of
    what this side reads. of_token: the row of a token in both. rows, crossing_rows: of rotary embedding in attention to
    itself, and to the other side. text: (B, L', E). bias: of its keys.
    """

    name: str
    own: Sequence[Vectors]
    crossing: Sequence[Vectors]
    of_token: Tensor | None
    attn: Any
    text_attn: Any
    rows: Rotary
    crossing_rows: Rotary
    text: Tensor
    bias: Tensor | None


def block(
    call: BlockCall, block: Any, hidden_states: Tensor, audio_hidden_states: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """Return video (B, l, E) and sound (B, L, E') after a block. given: the other arguments of diffusers' block."""
    skips, norm = _skips(block, given), Norm("rms", block.norm1.eps)
    own = {name: _own(call, name, given) for name in NAMES}
    video, audio = (_side(call, block, name, own[name], given) for name in NAMES)
    x, x_branch, x_gate = _read_text(call, video, hidden_states, norm, skips)
    y, y_branch, y_gate = _read_text(call, audio, audio_hidden_states, norm, skips)
    if given.get("use_a2v_cross_attention", True):
        x, x_asks, x_tells = _modulated(call, video, x, x_gate, x_branch, norm)
        y, y_tells, y_asks = _modulated(call, audio, y, y_gate, y_branch, norm)
        x_branch = _read(call, "video reads audio", block.audio_to_video_attn, (video, x_asks), (audio, y_tells))
        y_branch = _read(call, "audio reads video", block.video_to_audio_attn, (audio, y_asks), (video, x_tells))
        x_gate, y_gate = video.crossing[4], audio.crossing[4]
    video_layers, audio_layers = ((f"{name} up", f"{name} down") for name in NAMES)
    x = finished(call, x, x_branch, own["video"], norm, x_gate, video_layers, _readers("video"))
    return x, finished(call, y, y_branch, own["audio"], norm, y_gate, audio_layers, _readers("audio"))


def _readers(name: str) -> tuple[str, str]:
    """Return the matrices that read the input of a side's attention to itself; gates of heads are in 2.3 alone."""
    return f"{name} qkv", f"{name} gates"


def _skips(block: Any, given: Mapping[str, Any]) -> bool:
    """Return whether attention of each side to itself returns its values; decline what functions do not take."""
    if masks := [name for name in OFF if given.get(name) is not None]:
        raise DeclinedError(f"it has the mask {masks[0]}")
    if given.get("use_a2v_cross_attention", True) != given.get("use_v2a_cross_attention", True):
        raise DeclinedError("one of video and sound reads the other one, which does not read it")
    if not block.perturbed_attn or given.get("perturbation_mask") is None:
        return False
    skips = given.get("all_perturbed")
    if isinstance(skips, Tensor) and skips.device.type != "cpu":
        raise DeclinedError("which pictures are perturbed is known on the device alone")
    if not skips:
        raise DeclinedError("some pictures are perturbed, others are not")
    return True


def _own(call: BlockCall, name: str, given: Mapping[str, Any]) -> Modulation:
    """Return the modulation of one side in all blocks by the timestep of its tokens."""
    names = NAMES[name]
    tables, temb = [getattr(one, names.table) for one in call.blocks], given[names.temb]
    return call.once(name, temb, lambda: tabled(tables, by_vector(temb, len(tables[0]))))


def _crossing(call: BlockCall, name: str, index: Tensor | None, given: Mapping[str, Any]) -> Sequence[Vectors]:
    """Return the modulation of one side in this block where the two read each other; index: of the side's tokens."""
    names = NAMES[name]
    tables, parts = [getattr(one, names.crossing_table) for one in call.blocks], [given[x] for x in names.temb_crossing]
    tokens = 1 if index is None else index.shape[1]
    if parts[0].shape[1] not in (1, tokens):
        raise DeclinedError("video and sound read each other by a timestep for each token, and no other layer does")

    def made() -> Modulation:
        return tabled(tables, by_vector(torch.cat(parts, dim=-1).expand(-1, tokens, -1), len(tables[0])))

    return call.once(f"{name} crossing", parts[0], made).every[call.index]


def _side(call: BlockCall, block: Any, name: str, own: Modulation, given: Mapping[str, Any]) -> Side:
    """Return what one side reads in this block."""
    names, crossing = NAMES[name], _crossing(call, name, own.of_token, given)
    attn, reads = getattr(block, names.attn), block.audio_to_video_attn
    rotary, crossing_rotary = given[names.rotary], given[names.crossing_rotary]
    rows = call.once(names.rotary, rotary, lambda: by_head(rotary, attn.heads))
    crossing_rows = call.once(names.crossing_rotary, crossing_rotary, lambda: by_head(crossing_rotary, reads.heads))
    text, text_attn = _text(call, block, name, given), getattr(block, names.text_attn)
    bias = key_bias(call, given.get(names.mask), name)
    return Side(name, own.every[call.index], crossing, own.of_token, attn, text_attn, rows, crossing_rows, text, bias)


def _text(call: BlockCall, block: Any, name: str, given: Mapping[str, Any]) -> Tensor:
    """Return the text (B, L', E) that one side reads, modulated where the model does that."""
    names = NAMES[name]
    text, temb = given[names.text], given.get(names.temb_prompt)
    if not block.cross_attn_adaln:
        return text
    tables = [getattr(one, names.prompt_table) for one in call.blocks]
    if temb is None:
        temb = text.new_zeros(1, 1, tables[0].numel())
    modulation = call.once(f"{name} prompt", given.get(names.temb_prompt), lambda: tabled(tables, by_vector(temb, 2)))
    shift, scale = (by_token(vector, modulation.of_token) for vector in modulation.every[call.index])
    return torch.addcmul(shift, text, 1 + scale).to(text.dtype)


def _read_text(
    call: BlockCall, side: Side, x_BlE: Tensor, norm: Norm, skips: bool
) -> tuple[Tensor, Tensor, Vectors | None]:
    """Return one side after attention to itself, what it reads of its text, and the gate of that, if there is one."""
    shift, scale, gate, *_ = side.own
    zero, h = constant(call, 0.0, x_BlE), call.handed(x_BlE)
    if h is None:
        rounding = rounding_for(call.matrices, *_readers(side.name))
        h = norm_modulate(x_BlE, shift, scale, norm, index_Bl=side.of_token, rounding=rounding)
    branch = _output(call, side.name, h, _to_itself(call, side, h, skips))
    shift, scale, text_gate = side.own[6:] or (zero, zero, None)
    name, attn = f"{side.name} text", side.text_attn
    rounding = rounding_for(call.matrices, f"{name} q", f"{name} gates")
    x, h = gate_norm_modulate(x_BlE, gate, branch, shift, scale, norm, index_Bl=side.of_token, rounding=rounding)
    q = attn.norm_q(call.matrices[f"{name} q"](h)).unflatten(2, (attn.heads, -1))
    out = to_whole(call, q, side.text, call.matrices[f"{name} kv"], attn.norm_k, side.bias)
    return x, _output(call, name, h, out.flatten(2)), text_gate


def _to_itself(call: BlockCall, side: Side, h_BlE: Input, skips: bool) -> Input:
    """Return attention (B, l, E) of one side to itself, or its values alone."""
    qkv, attn, heads = call.matrices[f"{side.name} qkv"], side.attn, side.attn.heads
    if skips:
        return qkv.split_outputs(*[qkv.outputs // 3] * 3)[2](h_BlE)
    how = _prepare(attn, attn.norm_q, side.rows, attn.norm_k)
    if side.name == "video":
        return call.attend([qkv.projected(h_BlE, heads, how)])[0]
    q, k, v = qkv(h_BlE).unflatten(-1, (3, heads, -1)).unbind(2)
    return call.local(*prepare(q, k, how), v).flatten(2)


def _modulated(
    call: BlockCall, side: Side, x_BlE: Tensor, gate: Vectors | None, branch_BlE: Tensor, norm: Norm
) -> tuple[Tensor, Input, Input]:
    """Return one side after the branch, and its input where the video reads the sound, and the other way."""
    scale, shift, other_scale, other_shift, _ = side.crossing
    gate = constant(call, 1.0, x_BlE) if gate is None else gate
    x, h = gate_norm_modulate(x_BlE, gate, branch_BlE, shift, scale, norm, index_Bl=side.of_token)
    return x, h, norm_modulate(x, other_shift, other_scale, norm, index_Bl=side.of_token)


def _read(call: BlockCall, name: str, attn: Any, asks: tuple[Side, Input], tells: tuple[Side, Input]) -> Tensor:
    """Return what one side reads of the other one. asks, tells: a side and its modulated norm."""
    (asking, h), (telling, told), heads = asks, tells, attn.heads
    q = call.matrices[f"{name} q"](h).unflatten(2, (heads, -1))
    k, v = call.matrices[f"{name} kv"](told).unflatten(-1, (2, heads, -1)).unbind(2)
    q = prepare_one(q, _prepare(attn, attn.norm_q, asking.crossing_rows))
    k = prepare_one(k, _prepare(attn, attn.norm_k, telling.crossing_rows))
    out = call.attend_whole(q, k, v) if telling.name == "video" else call.local(q, k, v)
    return _output(call, name, h, out.flatten(2))


def _prepare(attn: Any, norm: Any, rows: Rotary, k_norm: Any = None) -> Prepare:
    """Return RMSNorm over the whole width, then rotary embedding; without a norm of k, that of q alone."""
    k_weight = None if k_norm is None else k_norm.weight
    return Prepare("rms", False, norm.eps, norm.weight, None, k_weight, None, *rows, attn.rope_type == "interleaved")


def _output(call: BlockCall, name: str, h_BlE: Input, out_BlE: Input) -> Tensor:
    """Return the product of attention's output, whose heads have gates in 2.3. h: attention's input."""
    if (gates := call.matrices.get(f"{name} gates")) is not None:
        out_BlHD = unrounded(out_BlE).unflatten(2, (gates.outputs, -1))
        out_BlE = (out_BlHD * (2 * torch.sigmoid(gates(h_BlE)))[..., None]).flatten(2)
    return call.matrices[f"{name} out"](out_BlE)


BLOCKS = {"LTX2VideoTransformerBlock": Block(block, ("image",), LAYERS, why_not, EIGHT)}


def work(config: Mapping[str, Any], text: int = TEXT) -> Work:
    """Return the planner's `Work` of the video's tokens, with those where it reads its sound and is read by it.

    Left out is what the sound's own tokens cost, which every rank computes: some hundred tokens in 5 of 19 billion
    weights.
    """
    alike = ltx.work(config, text)
    width, sound = alike.width, config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
    crossing = ((width, sound), (sound, width), (width, 2 * sound))
    (blocks,) = alike.blocks
    return replace(alike, blocks=(replace(blocks, gemms=(*blocks.gemms, *crossing)),))


WORK = {"LTX2VideoTransformer3DModel": work}
PUBLISHED = {
    "Lightricks/LTX-2": Published(
        "LTX2Pipeline", "LTX2VideoTransformer3DModel", {"rope_type": "split"}, latents(128, 32, 8), frames=121
    )
}
TINY = {
    "LTX2VideoTransformer3DModel": Tiny(
        inputs=lambda config, random: {
            "audio_hidden_states": random(2, 7, config["audio_in_channels"]),
            "audio_encoder_hidden_states": random(2, 7, config["caption_channels"]),
            "audio_num_frames": 7,
        }
    )
}
