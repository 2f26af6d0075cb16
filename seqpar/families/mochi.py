"""Where Mochi's tokens are split."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.families import Published, latents
from seqpar.families._cuts import IMAGE, OUT, TEXT, Boundary, Cuts, CutTokens, Joint, StepBlocks
from seqpar.families._masks import FULL, Keys, Prepared, keys_of, mask_code
from seqpar.families._tiny import Tiny


def _mochi() -> Cuts:
    places = {
        "time_embed": Boundary(outputs={1: TEXT}),
        "rope": Boundary(outputs={0: CutTokens("image", dim=0), 1: CutTokens("image", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": IMAGE}),
        "transformer_blocks.*": Boundary(inputs={"encoder_attention_mask": TEXT}),
        "proj_out": OUT,
    }
    joint = {"transformer_blocks.*.attn1": Joint(("image", "text"), masked=True, processor=MochiProcessor)}
    return Cuts(places, joint, {MASK: "text"}, prepare=_prepare, keys=_keys)


MASK = "encoder_attention_mask"
EARLY = (
    f"{MASK} has padding before tokens of the text: diffusers' MochiTransformer3DModel adds the attention outputs of "
    f"tokens to the first places of the text, seqpar to the tokens' own, so that results differ; put padding at the "
    f"end for the same results"
)


def _prepare(call: Prepared) -> None:
    """Note whether the mask leaves no key out. The forward gets it in any case."""
    code = mask_code(call, MASK, _is_early)
    call.note = code == FULL
    if code >> 2:
        call.say(EARLY)


def _is_early(mask_BL: Tensor) -> int:
    """Return whether a row of a mask has padding before a token."""
    return int((mask_BL != 0).byte().diff(dim=1).eq(1).any().item())


def _keys(arguments: dict[str, Any], is_full: Hashable) -> Keys:
    mask = arguments.get(MASK)
    return Keys() if mask is None or is_full else Keys({"text": keys_of(mask, "text")})


def rotated(x_BlHD: Tensor, cos_lHD2: Tensor, sin_lHD2: Tensor) -> Tensor:
    """Return the tokens with interleaved pairs rotated, computed in fp32; each head has its own angles."""
    even, odd = x_BlHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    first, second = even * cos_lHD2 - odd * sin_lHD2, even * sin_lHD2 + odd * cos_lHD2
    return torch.stack((first.to(x_BlHD.dtype), second.to(x_BlHD.dtype)), dim=-1).flatten(-2)


def projected_heads(x_BlE: Tensor, layers: tuple[Any, Any, Any], norms: tuple[Any, Any], heads: int) -> list[Tensor]:
    """Return q, k and v (B, l, H, D) of a stream, q and k normalised over each head where there are norms."""
    projected = [layer(x_BlE).unflatten(2, (heads, -1)) for layer in layers]
    return [x if norm is None else norm(x) for x, norm in zip(projected, (*norms, None), strict=True)]


class MochiProcessor:
    """Joint attention of video and text, video first; keys of padding are masked by the attention that it calls.

    diffusers' own one picks the valid text tokens of each batch row by their values, which waits for the device and
    gives every rank another number of keys.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (video, text), (B, l, E) each.

        attention_mask: nonzero for this rank's tokens of the text, (B, l'); attention returns 0 for padding, as
        diffusers' does. image_rotary_emb: cos and sin of the video's tokens, (l, H, D/2), or as `turned` takes them.
        """
        own, added = (attn.to_q, attn.to_k, attn.to_v), (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        q, k, v = projected_heads(hidden_states, own, (attn.norm_q, attn.norm_k), attn.heads)
        text = projected_heads(encoder_hidden_states, added, (attn.norm_added_q, attn.norm_added_k), attn.heads)
        if image_rotary_emb is not None:
            q, k = self.turned(q, *image_rotary_emb), self.turned(k, *image_rotary_emb)
        queries, keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip((q, k, v), text, strict=True))
        out = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
        video_out, text_out = out.flatten(2).split((q.shape[1], text[0].shape[1]), dim=1)
        if attention_mask is not None:
            text_out = text_out * (attention_mask != 0)[..., None]
        for layer in attn.to_out:
            video_out = layer(video_out)
        return video_out, attn.to_add_out(text_out) if hasattr(attn, "to_add_out") else text_out

    def turned(self, x_BlHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return q or k after the rotary embedding."""
        return rotated(x_BlHD, cos, sin)


CUTS = {"MochiTransformer3DModel": _mochi()}
STEPS = {"MochiTransformer3DModel": StepBlocks({"transformer_blocks": ("hidden_states", "encoder_hidden_states")})}
PUBLISHED = {
    "genmo/mochi-1-preview": Published(
        "MochiPipeline", "MochiTransformer3DModel", vae=latents(12, 8, 6), size=(480, 848)
    )
}
TINY = {
    "MochiTransformer3DModel": Tiny(
        {"max_sequence_length": 7},
        lambda config, random: {"hidden_states": random(2, config["in_channels"], 3, 6, 10)},
        fp32=("pos_frequencies",),
    )
}
