"""Where LTX-2's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens, Joint
from seqpar.families._shared import IMAGE, OUT


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
    return Cuts(places, attention, masks, passed=tuple(masks), local=tuple(local))
