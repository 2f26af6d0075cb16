"""Where the tokens of Stable Audio are split: one for the conditions of the whole, then those of the sound."""

from __future__ import annotations

from seqpar.families import Published
from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._tiny import TEXT, Tiny


def _stable_audio() -> Cuts:
    sound = CutTokens("sound")
    places = {
        "": Boundary(inputs={"rotary_embedding": CutTokens("sound", dim=0)}),
        "transformer_blocks.0": Boundary(inputs={"hidden_states": sound}),
        "proj_out": Boundary(gathers={0: GatherTokens(sound.stream)}),
    }
    local = ("transformer_blocks.*.attn2",)
    joint = {"transformer_blocks.*.attn1": Joint((sound.stream,))}
    return Cuts(places, joint, local=local)


CUTS = {"StableAudioDiTModel": _stable_audio()}
TOKENS = {"StableAudioDiTModel": lambda config, latents: (latents[-1] + 1,)}
PROMPT_TOKENS = {"StableAudioDiTModel": 130}
PUBLISHED = {"stabilityai/stable-audio-open-1.0": Published("StableAudioPipeline", "StableAudioDiTModel", vae={})}
TINY = {
    "StableAudioDiTModel": Tiny(
        {"global_states_input_dim": 16, "cross_attention_input_dim": 24, "num_key_value_attention_heads": 1},
        lambda config, random: {
            "hidden_states": random(2, config["in_channels"], 14),
            "encoder_hidden_states": random(2, TEXT, 24),
            "encoder_attention_mask": None,
            "global_hidden_states": random(2, 1, 16),
            "rotary_embedding": (random(15, 32), random(15, 32)),
        },
    )
}
