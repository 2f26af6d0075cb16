"""Transformers that people run, as they were released: their configs and the inputs of one call, with random weights.

A call has one batch row: one picture or video, one guidance branch. Only torch and diffusers are used, so that a bench
can build the same model beside any version of the project.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isqrt, prod
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from torch import Tensor, nn

Inputs = Callable[..., dict[str, Any]]
INIT_STD = 0.02
LAYERS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
SMALL_SIZE = (2, 4, 4)
GLYPHS, PICTURE = 256, 729  # tokens of HunyuanVideo 1.5 for what a prompt quotes, and for a picture


def randomise(model: nn.Module, seed: int) -> None:
    """Set normally distributed matrices, norm weights of one and zero biases, reproducibly on one device type."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


@dataclass(frozen=True)
class Released:
    """A transformer as it was released.

    theirs: the name of its class in diffusers. config: the arguments of that class. size: the tokens of the state as
    (frames,) rows and columns. text: the number of text tokens. inputs: makes the arguments of a call of diffusers'
    transformer. narrow: what makes the config tiny, for a CPU. joined: whether attention joins text and state;
    otherwise text is cross-attended. cheap: what makes the config that of a model with few weights and the same
    buffers, but of another width; if it is not given, one block of each kind. state: the argument that is the state.
    padded: the number of tokens to which the pipeline pads a text, and masks them; 0 for none. sound: the number of
    tokens of sound that attention joins, too.
    """

    theirs: str
    inputs: Inputs
    narrow: Mapping[str, Any]
    joined: bool = True
    cheap: Mapping[str, Any] | None = None
    state: str = "hidden_states"
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, ...] = ()
    text: int = 0
    padded: int = 0
    sound: int = 0

    def model(self, name: str, size: tuple[int, ...], text: int, padded: int = 0, **changes: Any) -> Released:
        """A model of this class. changes: arguments that differ from the class's defaults."""
        parameters = inspect.signature(getattr(diffusers, self.theirs).__init__).parameters.values()
        config = {each.name: each.default for each in parameters if each.default is not each.empty} | changes
        return replace(self, name=name, config=config, size=size, text=text, padded=padded)

    @property
    def tokens(self) -> int:
        tokens = 1
        for side in self.size:
            tokens *= side
        return tokens

    @property
    def others(self) -> tuple[int, ...]:
        return (self.text, *[self.sound] * (self.sound > 0)) if self.joined else ()

    def sized(self, tokens: int | None, text: int | None) -> Released:
        """The model with other numbers of tokens; one of None stays. A picture becomes as square as it can."""
        if tokens is not None and len(self.size) != 2:
            raise ValueError(f"got {tokens} tokens for {self.name}, but its call has one size")
        size = self.size if tokens is None else squarest(tokens)
        return replace(self, size=size, text=self.text if text is None else text)

    def shortened(self, layers: int | None) -> Released:
        """The model with at most this number of blocks of each kind; None: all."""
        fewer = {} if layers is None else {name: layers for name in LAYERS if self.config.get(name, 0) > layers}
        return replace(self, config={**self.config, **fewer})

    def small(self) -> Released:
        size, sound = SMALL_SIZE[-len(self.size) :], min(self.sound, 6)
        return replace(self, config={**self.config, **self.narrow}, size=size, text=8, padded=0, sound=sound)

    def build(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        theirs = getattr(diffusers, self.theirs)
        with torch.device("meta"):
            model = theirs(**self.config)
        cheap = {name: 1 for name in LAYERS if name in self.config} if self.cheap is None else self.cheap
        with torch.device(device):  # tables of positions are no parameters: they are taken from a model of few weights
            small = theirs(**{**self.config, **cheap})
        model = nn.Module.to(model, dtype).to_empty(device=device)
        for name, module in list(small.named_children()):
            if not list(module.parameters()) and (self.cheap is None or list(module.buffers())):
                model.set_submodule(name, module)
        for name, buffer in small.named_buffers():
            model.get_buffer(name).copy_(buffer)
        kept = set(theirs._keep_in_fp32_modules or ())  # as `from_pretrained` keeps them
        for key, parameter in model.named_parameters():
            if kept & set(key.split(".")):
                parameter.data = parameter.data.float()
        randomise(model, 0)
        return model.requires_grad_(False).eval()

    def arguments(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=drawn).to(device, dtype)

        return self.inputs(self, random)


def squarest(tokens: int) -> tuple[int, int]:
    rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
    return rows, tokens // rows


# Inputs of diffusers' transformers --------------------------------------------------------------------------------


def flux_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    rows, columns = model.size
    image = random(1, rows * columns, model.config["in_channels"])
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    made = {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "pooled_projections": random(1, model.config["pooled_projection_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "img_ids": ids.flatten(0, 1).to(image),
        "txt_ids": torch.zeros(model.text, 3).to(image),
    }
    guidance = {"guidance": torch.full((1,), 3.5, device=image.device)} if model.config["guidance_embeds"] else {}
    return made | guidance


def chroma_inputs(model: Released, random: Callable[..., Tensor], words: int | None = None) -> dict[str, Any]:
    """Packed latents, text with its mask, timestep and ids as `ChromaPipeline` passes them.

    words: the tokens of the text that are no padding, but for one after them; None: all. The mask's numbers are added
    to the scores of two tokens, so that padding is attended to, too.
    """
    made = flux_inputs(
        replace(model, config={**model.config, "guidance_embeds": False, "pooled_projection_dim": 0}), random
    )
    image, kept = made["hidden_states"], model.text if words is None else min(words, model.text // 2)
    places = torch.arange(model.text + image.shape[1], device=image.device)[None]
    mask = {"attention_mask": ((places <= kept) | (places >= model.text)).to(image.dtype)}
    return {name: value for name, value in made.items() if name != "pooled_projections"} | mask


def cogvideox_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    (frames, rows, columns), side, dim = model.size, model.config["patch_size"], model.config["attention_head_dim"]
    latents = random(1, frames, model.config["in_channels"], side * rows, side * columns)
    whole = ((0, 0), (rows, columns))
    return {
        "hidden_states": latents,
        "encoder_hidden_states": random(1, model.text, model.config["text_embed_dim"]),
        "timestep": torch.full((1,), 500.0, device=latents.device),
        "image_rotary_emb": get_3d_rotary_pos_embed(dim, whole, (rows, columns), frames, device=latents.device),
    }


def flux2_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    rows, columns = model.size
    image = random(1, rows * columns, model.config["in_channels"])
    images, texts = torch.zeros(1, rows, columns, 4), torch.zeros(1, model.text, 4)
    images[..., 1], images[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    texts[..., 3] = torch.arange(model.text)
    return {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "img_ids": images.flatten(1, 2).to(image.device),
        "txt_ids": texts.to(image.device),
        "guidance": torch.full((1,), 4.0, device=image.device),
    }


def flux3_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    made = flux2_inputs(model, random)
    ids = {name: made[name][0] for name in ("img_ids", "txt_ids")}  # without batch rows
    return {name: x for name, x in made.items() if name != "guidance"} | ids


def krea2_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Packed latents, layers of a text, its mask, timestep and ids as `Krea2Pipeline` passes them.

    Padding comes before the last five tokens of the text, which the template appends. Any text has a mask.
    """
    (rows, columns), length = model.size, max(model.padded, model.text)
    image = random(1, rows * columns, model.config["in_channels"])
    ids, places = torch.zeros(rows, columns, 3), torch.arange(length, device=image.device)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    return {
        "encoder_attention_mask": ((places < model.text - 5) | (places >= length - 5))[None],
        "hidden_states": image,
        "encoder_hidden_states": random(1, length, model.config["num_text_layers"], model.config["text_hidden_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "position_ids": torch.cat([torch.zeros(length, 3), ids.flatten(0, 1)]).to(image.device),
    }


def qwen_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Packed latents, text without padding, timestep and shapes as Qwen-Image's pipelines pass them.

    A size of three sides is that of a picture and of the reference images after it.
    """
    image = random(1, model.tokens, model.config["in_channels"])
    *images, rows, columns = model.size
    return {
        "hidden_states": image,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "timestep": torch.full((1,), 0.5).to(image),
        "img_shapes": [[(1, rows, columns)] * (images[0] if images else 1)],
    }


def sd3_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    latents = random(1, model.config["in_channels"], *(side * model.config["patch_size"] for side in model.size))
    return {
        "hidden_states": latents,
        "encoder_hidden_states": random(1, model.text, model.config["joint_attention_dim"]),
        "pooled_projections": random(1, model.config["pooled_projection_dim"]),
        "timestep": torch.full((1,), 500.0, device=latents.device),
    }


def hunyuan_video_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    patch, length = model.config["patch_size"], max(model.padded, model.text)
    frames, rows, columns = model.size
    video = random(1, model.config["in_channels"], frames, rows * patch, columns * patch)
    return {
        "hidden_states": video,
        "timestep": torch.full((1,), 500.0).to(video),
        "encoder_hidden_states": random(1, length, model.config["text_embed_dim"]),
        "encoder_attention_mask": (torch.arange(length, device=video.device) < model.text).long()[None],
        "pooled_projections": random(1, model.config["pooled_projection_dim"]),
        "guidance": torch.full((1,), 6000.0).to(video),
    }


def hunyuan_video15_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Latents of a video and its texts as `HunyuanVideo15Pipeline` passes them: no glyphs, and no picture.

    Their places are all padding; without padding there are none.
    """
    video, length = random(1, model.config["in_channels"], *model.size), max(model.padded, model.text)
    glyphs, picture = (GLYPHS, PICTURE) if model.padded else (0, 0)
    return {
        "hidden_states": video,
        "timestep": torch.full((1,), 500.0).to(video),
        "encoder_hidden_states": random(1, length, model.config["text_embed_dim"]),
        "encoder_attention_mask": (torch.arange(length, device=video.device) < model.text).to(video)[None],
        "encoder_hidden_states_2": video.new_zeros(1, glyphs, model.config["text_embed_2_dim"]),
        "encoder_attention_mask_2": video.new_zeros(1, glyphs),
        "image_embeds": video.new_zeros(1, picture, model.config["image_embed_dim"]),
    }


def wan_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    sides = (side * own for side, own in zip(model.size, model.config["patch_size"], strict=True))
    video = random(1, model.config["in_channels"], *sides)
    return {
        "hidden_states": video,
        "encoder_hidden_states": random(1, model.text, model.config["text_dim"]),
        "timestep": torch.full((1,), 500.0, device=video.device),
    }


def wan_by_token(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """`wan_inputs` with a timestep for each token, as `WanImageToVideoPipeline` passes to Wan 2.2's 5B model.

    That of the first frame, which is given, is 0.
    """
    made = wan_inputs(model, random)
    timestep_BL = made["timestep"][:, None].repeat(1, model.tokens)
    timestep_BL[:, : model.size[1] * model.size[2]] = 0
    return made | {"timestep": timestep_BL}


def z_image_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    latents = random(model.config["in_channels"], 1, *(2 * side for side in model.size))
    return {
        "x": [latents],
        "t": torch.full((1,), 0.5, device=latents.device),
        "cap_feats": [random(model.text, model.config["cap_feat_dim"])],
    }


def ltx_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Packed latents of a video, a text of which a quarter is padding, and timestep as `LTXPipeline` does."""
    frames, rows, columns = model.size
    video = random(1, model.tokens, model.config["in_channels"])
    padding = torch.arange(model.text, device=video.device)[None] < model.text - model.text // 4
    return {
        "hidden_states": video,
        "encoder_hidden_states": random(1, model.text, model.config["caption_channels"]),
        "timestep": torch.full((1,), 500.0, device=video.device),
        "encoder_attention_mask": padding.long(),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),  # of the VAE; 25 frames a second
    }


def ltx2_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Packed latents of a video and of its sound, texts and timestep as `LTX2Pipeline` passes them.

    Texts have no padding: learned tokens take the place of that. The video has 24 frames a second, the sound 25 tokens.
    Positions are given: a forward that makes them copies from the host, which no CUDA graph can hold.
    """
    (frames, rows, columns), channels = model.size, model.config["caption_channels"]
    seconds = (8 * frames - 7) / 24
    sound, video = round(25 * seconds), random(1, model.tokens, model.config["in_channels"])
    texts = {name: random(1, model.text, channels) for name in ("encoder", "audio_encoder")}
    timestep = torch.full((1,), 500.0, device=video.device)
    of_video = LTX2AudioVideoRotaryPosEmbed(dim=1)
    of_sound = LTX2AudioVideoRotaryPosEmbed(dim=1, scale_factors=(4,), modality="audio")
    return {
        "hidden_states": video,
        "audio_hidden_states": random(1, sound, model.config["audio_in_channels"]),
        **{f"{name}_hidden_states": text for name, text in texts.items()},
        **{f"{name}_attention_mask": torch.ones(1, model.text, device=video.device).long() for name in texts},
        "timestep": timestep,
        "sigma": timestep,
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "fps": 24.0,
        "audio_num_frames": sound,
        "video_coords": of_video.prepare_video_coords(1, frames, rows, columns, video.device, fps=24.0),
        "audio_coords": of_sound.prepare_audio_coords(1, sound, video.device),
    }


def minimax_h3_inputs(model: Released, random: Callable[..., Tensor]) -> dict[str, Any]:
    """Packed rows of a text, its sound and its video, in this order, as MiniMax-H3's modular pipeline packs them.

    Text and video have one timestep, the sound another. The time of a position goes on from the text; a frame of
    latents takes 17 / 3 of it, and the sides of a video about 32.
    """
    frames, rows, columns = model.size
    patch = prod(model.config["patch_size"])
    video = random(1, model.tokens, model.config["in_channels"] * patch)
    counts, device = (model.text, model.sound, model.tokens), video.device
    tags = torch.repeat_interleave(torch.tensor([1, 2, 0]), torch.tensor(counts)).to(device)
    text, sound, pixels = torch.arange(sum(counts), device=device).split(counts)
    axes = [torch.arange(count, dtype=torch.float64) for count in (frames, rows, columns)]
    grid = torch.cartesian_prod(axes[0] * 17 / 3 + model.text, *(axis * 32 / len(axis) for axis in axes[1:]))
    places = torch.zeros(sum(counts), 3, dtype=torch.float64)
    places[: model.text, 0] = torch.arange(model.text)
    places[model.text : -model.tokens, 0] = model.text + torch.arange(model.sound) % (model.sound // 2)  # in stereo
    places[-model.tokens :] = grid
    return {
        "hidden_states": video,
        "audio_hidden_states": random(1, model.sound, model.config["audio_in_channels"]),
        "encoder_hidden_states": random(1, model.text, model.config["text_dim"]),
        "timestep": torch.tensor([0.3, 0.6], device=device),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": places.to(device),
        "video_indices": pixels,
        "audio_indices": sound,
        "text_indices": text,
    }


# Models -----------------------------------------------------------------------------------------------------------

FEW: Mapping[str, Any] = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16}
NARROW: Mapping[str, Any] = {**FEW, "axes_dims_rope": (4, 6, 6), "joint_attention_dim": 12, "in_channels": 16}
FOUR_AXES: Mapping[str, Any] = {**NARROW, "num_single_layers": 2, "axes_dims_rope": (4, 4, 4, 4)}
NARROW_KREA2: Mapping[str, Any] = {
    **FEW,
    "num_key_value_heads": 2,
    "axes_dims_rope": (4, 6, 6),
    "in_channels": 16,
    "intermediate_size": 48,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 20,
}
NARROW_HUNYUAN: Mapping[str, Any] = {**FEW, "rope_axes_dim": (4, 6, 6), "text_embed_dim": 12}
NARROW_WAN: Mapping[str, Any] = {**FEW, "text_dim": 8, "freq_dim": 16, "ffn_dim": 40}
NARROW_LTX: Mapping[str, Any] = {**FEW, "cross_attention_dim": 64, "caption_channels": 12}
NARROW_LTX2: Mapping[str, Any] = {
    **NARROW_LTX,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32,
}
NARROW_H3: Mapping[str, Any] = {
    **{**FEW, "num_refiner_layers": 1, "hidden_size": 40, "ffn_dim": 48, "audio_in_channels": 8, "text_dim": 12},
    **{"freq_dim": 16, "time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2},
}
NARROW_Z_IMAGE: Mapping[str, Any] = {
    **{"dim": 64, "n_layers": 2, "n_refiner_layers": 1},
    **{"n_heads": 4, "n_kv_heads": 4, "axes_dims": (4, 6, 6)},
}
COGVIDEOX: Mapping[str, Any] = {
    **{"num_attention_heads": 48, "num_layers": 42},
    "use_rotary_positional_embeddings": True,
}
SD35: Mapping[str, Any] = {
    **{"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432},
    **{"pos_embed_max_size": 192, "qk_norm": "rms_norm"},
}
WAN_5B: Mapping[str, Any] = {
    **{"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336},
    **{"in_channels": 48, "out_channels": 48},
}
LTX_13B: Mapping[str, Any] = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
SQUARE = squarest(4096)
# of Chroma, whose approximator has buffers of another width
CHEAP: Mapping[str, Any] = {"num_attention_heads": 1, "joint_attention_dim": 1, "approximator_hidden_dim": 1}
FLUX: Mapping[str, Any] = {**NARROW, "num_single_layers": 2, "pooled_projection_dim": 8}
CHROMA: Mapping[str, Any] = {**NARROW, "num_single_layers": 2, "approximator_hidden_dim": 16}
SD3: Mapping[str, Any] = {**FEW, "joint_attention_dim": 12, "caption_projection_dim": 64, "pooled_projection_dim": 8}
HUNYUAN: Mapping[str, Any] = {**NARROW_HUNYUAN, "num_single_layers": 2, "pooled_projection_dim": 8}
HUNYUAN15: Mapping[str, Any] = {**NARROW_HUNYUAN, "text_embed_2_dim": 8, "image_embed_dim": 8}
VIDEO: Mapping[str, Any] = {**FEW, "text_embed_dim": 12, "time_embed_dim": 8}
QWEN: Mapping[str, Any] = {**NARROW, "out_channels": 4}


FLUX_1 = Released("FluxTransformer2DModel", flux_inputs, FLUX)
CHROMA_1 = Released("ChromaTransformer2DModel", chroma_inputs, CHROMA, cheap=CHEAP)
CHROMA_PROMPT = replace(CHROMA_1, inputs=partial(chroma_inputs, words=64))
COGVIDEOX_1 = Released("CogVideoXTransformer3DModel", cogvideox_inputs, VIDEO)
FLUX_2 = Released("Flux2Transformer2DModel", flux2_inputs, FOUR_AXES)
KREA_2 = Released("Krea2Transformer2DModel", krea2_inputs, NARROW_KREA2)
FLUX_3 = Released("Flux3Transformer2DModel", flux3_inputs, {**FOUR_AXES, "cond_in_channels": 16})
QWEN_IMAGE = Released("QwenImageTransformer2DModel", qwen_inputs, QWEN)
SD_3 = Released("SD3Transformer2DModel", sd3_inputs, SD3)
HUNYUAN_1 = Released("HunyuanVideoTransformer3DModel", hunyuan_video_inputs, HUNYUAN)
HUNYUAN_15 = Released("HunyuanVideo15Transformer3DModel", hunyuan_video15_inputs, HUNYUAN15)
WAN = Released("WanTransformer3DModel", wan_inputs, NARROW_WAN, joined=False)
Z_IMAGE = Released("ZImageTransformer2DModel", z_image_inputs, NARROW_Z_IMAGE, state="x")
LTX_2 = Released("LTX2VideoTransformer3DModel", ltx2_inputs, NARROW_LTX2, joined=False)
MINIMAX_H3 = Released(
    "MiniMaxH3Transformer3DModel",
    minimax_h3_inputs,
    NARROW_H3,
    cheap={"num_layers": 1, "num_refiner_layers": 1, "hidden_size": 8, "ffn_dim": 8, "time_embed_dim": 8},
    sound=414,
)
LTX = Released("LTXVideoTransformer3DModel", ltx_inputs, NARROW_LTX, joined=False)

MODELS = (
    FLUX_1.model("flux.1-dev", SQUARE, 512, guidance_embeds=True),
    CHROMA_1.model("chroma1-hd", SQUARE, 512),
    CHROMA_PROMPT.model("chroma1-hd-prompt", SQUARE, 512),
    COGVIDEOX_1.model("cogvideox-5b", (13, 30, 45), 226, **COGVIDEOX),
    FLUX_2.model("flux.2-dev", SQUARE, 512),
    KREA_2.model("krea-2", SQUARE, 512),
    KREA_2.model("krea-2-prompt", SQUARE, 64, padded=512),
    FLUX_3.model("flux.3", SQUARE, 512),  # no weights were published beside the class
    QWEN_IMAGE.model("qwen-image", SQUARE, 128),
    QWEN_IMAGE.model("qwen-image-edit", (2, 64, 64), 128, zero_cond_t=True),
    SD_3.model("sd3.5-large", SQUARE, 333, **SD35),
    HUNYUAN_1.model("hunyuan-video", (33, 34, 60), 64, padded=256),
    HUNYUAN_15.model("hunyuan-video-1.5", (31, 30, 53), 64, padded=1000, task_type="t2v"),
    WAN.model("wan2.1-14b", (21, 30, 52), 512),
    WAN.model("wan2.2-14b", (21, 45, 80), 512),
    replace(WAN, inputs=wan_by_token).model("wan2.2-ti2v-5b", (31, 22, 40), 512, **WAN_5B),
    Z_IMAGE.model("z-image", SQUARE, 128),
    LTX_2.model("ltx-2", (16, 16, 24), 1024, rope_type="split"),
    MINIMAX_H3.model("minimax-h3", (37, 24, 42), 256),  # 124 frames of 768 x 1344, by 16 x 16 and 2 x 2
    LTX.model("ltx-video-2b", (21, 16, 22), 128),
    LTX.model("ltx-video-13b", (16, 22, 38), 128, **LTX_13B),
)
RELEASED: Mapping[str, Released] = {model.name: model for model in MODELS}
