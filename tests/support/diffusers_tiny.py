"""Tiny random transformers of diffusers with inputs, one of each model that the adapter's table knows.

Families without a row here have the model by which they prove themselves (`seqpar.families._tiny`), with three heads.
Five heads do not divide by two, three or four ranks; token counts are odd, and batch rows differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_hunyuan_video15
from torch import Tensor, nn

from seqpar.families._find import CUTS
from seqpar.families._prove import tiny_of
from seqpar.families._tiny import arguments, scaled
from tests.support.foreign import StayDouble
from tests.support.meshes import random

HEADS = 5
BYT5 = transformer_hunyuan_video15.HunyuanVideo15ByT5TextProjection
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """A transformer class of diffusers, the config of a tiny one, and arguments for a call of it.

    splits: whether its tokens can be split. unused: how the paths of blocks begin that these arguments do not reach.
    """

    kind: str
    config: Mapping[str, Any]
    inputs: Callable[[int], Inputs]
    batch: int = 2
    splits: bool = True
    unused: str | None = None

    def build(self, seed: int = 0) -> Any:
        """Return the transformer in fp64, with the same random weights on every rank, norm weights included."""
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        kind: Any = getattr(diffusers, self.kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer_hunyuan_video15, "HunyuanVideo15ByT5TextProjection", narrow)
            patch.setattr(nn.Linear, "reset_parameters", lambda layer: None)  # all weights are drawn below
            module = kind(**self.config).eval().requires_grad_(False)
        for weight in module.parameters():
            fan = math.prod(weight.shape[1:]) if weight.dim() > 1 else 4
            most = (3 / fan) ** 0.5  # for a variance of 1 / fan
            weight.data = torch.empty_like(weight, dtype=torch.float64).uniform_(-most, most, generator=generator)
        module.double()  # buffers
        if self.kind == "MochiTransformer3DModel":  # its positions are fp32, and are multiplied with these
            module.pos_frequencies.data = module.pos_frequencies.float()
        return module

    def having(self, **config: Any) -> Tiny:
        """Return this with other entries in its config."""
        return replace(self, config={**self.config, **config})

    def arguments(self, device: torch.device | str = "cpu") -> Inputs:
        """Return the arguments of a call, the same on every rank."""
        return moved(self.inputs(self.batch), device)

    def whole(
        self, module: Any = None, arguments: Inputs | None = None, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, ...]:
        """Return the outputs of the unchanged transformer, which one process computes on a device.

        It must be the ranks' kind of device: a GPU rounds the fp32 frequencies of timesteps in another way than a CPU.
        """
        module = module or self.build().to(device)
        arguments = self.arguments(device) if arguments is None else arguments
        with StayDouble(), torch.no_grad():
            outputs = module(**arguments, return_dict=False)
            return flat((outputs,) if isinstance(outputs, Tensor) else outputs)  # Kandinsky's is alone


def of_family(kind: str) -> Tiny:
    """Return the model with which a family proves itself."""
    tiny, klass = tiny_of(kind), getattr(diffusers, kind)
    config = {**scaled(klass), **tiny.config}

    @cache
    def made() -> Inputs:
        with torch.device("meta"):
            module = klass(**config)
        return arguments(module, tiny)

    return Tiny(kind, config, lambda batch: deepcopy(made()))


def narrow(inputs: int, hidden: int, outputs: int, own: Any = BYT5) -> Any:
    """Return the projection of HunyuanVideo 1.5's glyphs with few hidden numbers; its class asks for 2048."""
    return own(inputs, min(hidden, 32), outputs)


@cache
def _kept(name: str, device: str) -> Any:
    return MODELS[name].build().to(device)


def kept(name: str, device: str) -> Any:
    """Return a transformer of `MODELS`, built once in each process, for tests that leave it as it was."""
    return as_built(_kept(name, device))


def as_built(module: Any) -> Any:
    """Return a transformer of diffusers without what its first call has made, which has the precision of that call."""
    if type(module).__name__ == "ZImageTransformer2DModel":
        module.rope_embedder.freqs_cis = None
    return module


@cache
def truth(name: str, device: str) -> tuple[Tensor, ...]:
    """Return the outputs of an unchanged transformer of `MODELS`, computed on "cpu" or "cuda", in host memory."""
    return tuple(x.cpu() for x in MODELS[name].whole(kept(name, device), device=device))


@cache
def short_truth(name: str, device: str, tokens: int = 2) -> tuple[Tensor, ...]:
    given = few(MODELS[name].arguments(device), tokens)
    return tuple(x.cpu() for x in MODELS[name].whole(kept(name, device), given))


def moved(value: Any, device: torch.device | str) -> Any:
    """Return tensors in nested lists, tuples and dictionaries on a device, and other values unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    return type(value)(moved(one, device) for one in value) if isinstance(value, (list, tuple)) else value


def flat(outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return a transformer's outputs as tensors: Z-Image returns a list of pictures, Cosmos 3 None for no actions."""
    return tuple(x for out in outputs if out is not None for x in (out if isinstance(out, list) else [out]))


def grid(height: int, width: int, axes: int = 3) -> Tensor:
    """Return the position ids of an image of tokens, (L, axes), row and column second and third."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.zeros(height * width, axes, dtype=torch.float64)
    ids[:, 1], ids[:, 2] = rows.flatten(), columns.flatten()
    return ids


def padded(batch: int, length: int, least: int = 2) -> Tensor:
    """Return a mask (B, length) of texts with padding at their end, another length in each row."""
    return torch.arange(length) < torch.tensor([max(least, length - 1 - 2 * row) for row in range(batch)])[:, None]


def few(arguments: Inputs, tokens: int = 2) -> Inputs:
    """Return the arguments of a call with a text of so many tokens; where it is masked, the second row has one less."""
    dims = {"encoder_hidden_states": 1, "txt_ids": -2}
    short = {name: arguments[name].narrow(dim, 0, tokens) for name, dim in dims.items() if name in arguments}
    for name in ("encoder_hidden_states_mask", "encoder_attention_mask"):
        if (mask := arguments.get(name)) is not None:
            rows = torch.arange(len(mask), device=mask.device)
            short[name] = torch.arange(tokens, device=mask.device) < tokens - rows[:, None] % 2
    if (mask := arguments.get("attention_mask")) is not None:  # of text and image
        short["attention_mask"] = mask[:, arguments["encoder_hidden_states"].shape[1] - tokens :]
    return {**arguments, **short}


# Inputs --------------------------------------------------------------------------------------------------------


def given(latents: tuple[int, ...], text: int = 7, times: float = 1.0, **more: Any) -> Callable[[int], Inputs]:
    """Return what makes arguments for a batch: latents, a text, timesteps up to `times`, and more, as in `but`."""

    def usual(batch: int) -> Inputs:
        return {
            "hidden_states": random((batch, *latents), 1),
            "encoder_hidden_states": random((batch, text, 24), 2),
            "timestep": torch.linspace(0.3 * times, 0.7 * times, batch).double(),
        }

    return but(usual, **more)


def but(before: Callable[[int], Inputs], *without: str, **more: Any) -> Callable[[int], Inputs]:
    """Return what makes other arguments: without some, and with values, or functions of the batch that return them."""

    def inputs(batch: int) -> Inputs:
        kept = {name: value for name, value in before(batch).items() if name not in without}
        made = {name: value(batch) if callable(value) else value for name, value in more.items()}
        # tests write into arguments
        return kept | {name: value.clone() if isinstance(value, Tensor) else value for name, value in made.items()}

    return inputs


def drawn(seed: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda batch: random((batch, *shape), seed)


def valid(length: int, dtype: torch.dtype = torch.long) -> Callable[[int], Tensor]:
    return lambda batch: padded(batch, length).to(dtype)


def guidance(scale: float) -> Callable[[int], Tensor]:
    return lambda batch: torch.full((batch,), scale).double()


def residuals(width: int, count: int) -> Callable[[int], list[Tensor]]:
    return lambda batch: [random((batch, 15, width), 10 + i) for i in range(count)]


def with_image(batch: int) -> Tensor:
    """Return Chroma's mask, which is for text and image."""
    return torch.cat([padded(batch, 7), torch.ones(batch, 15, dtype=torch.bool)], dim=1)


def as_numbers(batch: int) -> Tensor:
    """Return it as Chroma's pipeline makes it: floating numbers, which torch adds to the scores."""
    mask = with_image(batch)
    mask[-1, -4] = False  # a token of the image, too
    return mask.double()


def z_image(batch: int) -> Inputs:
    """Return pictures of one size and captions whose padded lengths (32, 64) differ, so that keys are masked."""
    return {
        "x": [random((4, 1, 6, 10), 1 + row) for row in range(batch)],
        "t": torch.linspace(0.3, 0.7, batch).double(),
        "cap_feats": [random((5 + 30 * row, 24), 7 + row) for row in range(batch)],
    }


def of_pairs(batch: int) -> dict[int, Tensor]:
    """Return residuals that are added to pictures and captions after the second block."""
    return {1: random((batch, 96, 60), 11)}


def minimax_h3(batch: int) -> Inputs:
    """Return a call of MiniMax-H3: one packed sequence of 7 tokens of text, 5 of sound and 15 of video, in turn."""
    order, places = torch.randperm(27, generator=torch.Generator().manual_seed(5)), torch.arange(27)
    text, sound, video = (part.sort().values for part in order.split([7, 5, 15]))
    tags = torch.zeros(27, dtype=torch.int64).index_fill(0, text, 1).index_fill(0, sound, 2)
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "audio_hidden_states": random((batch, 5, 6), 2),
        "encoder_hidden_states": random((batch, 7, 16), 3),
        "timestep": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "timestep_indices": (tags == 0).long(),
        "token_tags": tags,
        "position_ids": torch.stack((places // 9, places // 3 % 3, places % 3), 1).double(),
        "video_indices": video,
        "audio_indices": sound,
        "text_indices": text,
    }


def krea2_mask(batch: int) -> Tensor:
    """Return a mask with padding before the last token of a text, as its template has it."""
    return padded(batch, 7) | (torch.arange(7) == 6)


COUNTED = torch.zeros(7, 4).double()
COUNTED[:, 3] = torch.arange(7)
FRAMES = {"num_frames": 3, "height": 3, "width": 5}
PER_TOKEN = {"timestep": lambda batch: random((batch, 45), 5).abs() * 500}
ROTARY = tuple(random((45, 8), seed).repeat_interleave(2, dim=1) for seed in (8, 9))
REFERENCE = grid(2, 3, 4).float() + torch.tensor([1.0, 0, 0, 0])

FLUX_CALL = given(
    (15, 8),
    pooled_projections=drawn(3, 16),
    img_ids=grid(3, 5),
    txt_ids=torch.zeros(7, 3).double(),
    guidance=guidance(3.5),
)
CHROMA_CALL = but(FLUX_CALL, "pooled_projections", "guidance", attention_mask=with_image)
FLUX2_CALL = given(
    (15, 8),
    img_ids=lambda batch: grid(3, 5, 4).expand(batch, -1, -1),
    txt_ids=lambda batch: COUNTED.expand(batch, -1, -1),
    guidance=guidance(3.5),
)
FLUX3_CALL = given((15, 8), img_ids=grid(3, 5, 4).float(), txt_ids=COUNTED.float())
FLUX3_REFERENCE = but(
    FLUX3_CALL,
    image_cond_hidden_states=drawn(3, 6, 8),
    image_cond_ids=REFERENCE,
    target_timestep=lambda batch: torch.linspace(0.2, 0.6, batch).double(),
)
QWEN_CALL = given((15, 16), img_shapes=lambda batch: [[(1, 3, 5)]] * batch)
QWEN_MASKED = but(QWEN_CALL, encoder_hidden_states_mask=valid(7, torch.bool))
# an image and a reference image, whose tokens have another timestep
QWEN_EDIT = but(QWEN_MASKED, hidden_states=drawn(1, 21, 16), img_shapes=lambda batch: [[(1, 3, 5), (1, 2, 3)]] * batch)
# two layers and the picture that they are made of, and a number that says what kind of picture it is
QWEN_LAYERED = but(
    QWEN_MASKED,
    hidden_states=drawn(1, 45, 16),
    img_shapes=lambda batch: [[(1, 3, 5)] * 3] * batch,
    additional_t_cond=lambda batch: torch.tensor([0, 1, 1][:batch]),
)
WAN_CALL = given((4, 3, 6, 10), 9, 1000)
# frames that control the video, which weigh differently in each block that reads them
VACE_CALL = but(
    WAN_CALL,
    control_hidden_states=drawn(6, 6, 3, 6, 10),
    control_hidden_states_scale=torch.tensor([0.7, 1.2, 0.4]).double(),
)
# the features of a picture, and the 512 text tokens that the attention to both counts on
WAN_PICTURE = but(WAN_CALL, encoder_hidden_states=drawn(2, 512, 24), encoder_hidden_states_image=drawn(3, 5, 16))
SD3_CALL = given((4, 6, 10), times=1000, pooled_projections=drawn(3, 16))
COGVIDEOX_CALL = given((3, 4, 6, 10), times=1000, image_rotary_emb=ROTARY)
HUNYUAN_CALL = but(
    WAN_CALL, encoder_attention_mask=valid(9), pooled_projections=drawn(3, 16), guidance=guidance(6000.0)
)
# two texts, of which the second has no valid token in some rows, and no picture
HUNYUAN15_CALL = given(
    (9, 3, 3, 5),
    9,
    1000,
    encoder_attention_mask=valid(9, torch.float64),
    encoder_hidden_states_2=drawn(3, 5, 12),
    encoder_attention_mask_2=lambda batch: (torch.arange(5) < 2 * torch.arange(batch)[:, None]).double(),
    image_embeds=lambda batch: torch.zeros(batch, 3, 16).double(),
)
LTX_CALL = given((45, 8), 9, 1000, encoder_attention_mask=valid(9), **FRAMES)
LTX2_CALL = but(
    LTX_CALL,
    audio_hidden_states=drawn(4, 7, 8),
    audio_encoder_hidden_states=drawn(3, 9, 24),
    audio_encoder_attention_mask=valid(9),
    audio_num_frames=7,
)
# a timestep for each token; the attention of the second block is left out
LTX2_3_CALL = but(
    LTX2_CALL,
    **PER_TOKEN,
    encoder_hidden_states=drawn(2, 9, 60),
    audio_encoder_hidden_states=drawn(3, 9, 40),
    audio_timestep=lambda batch: torch.linspace(200, 800, batch).double(),
    sigma=lambda batch: torch.linspace(300, 700, batch).double(),
    use_cross_timestep=True,
    spatio_temporal_guidance_blocks=[1],
)
PIXART_CALL = given(
    (4, 6, 10),
    9,
    1000,
    encoder_attention_mask=valid(9, torch.float64),
    added_cond_kwargs={"resolution": None, "aspect_ratio": None},
)
DIT_CALL = but(given((4, 6, 6), times=1000), "encoder_hidden_states", class_labels=torch.arange)
LUMINA2_CALL = given((4, 6, 10), encoder_attention_mask=valid(7))
MOCHI_CALL = but(WAN_CALL, encoder_attention_mask=valid(9, torch.bool))
KREA2_CALL = given(
    (15, 8),
    encoder_hidden_states=drawn(2, 7, 3, 24),
    position_ids=torch.cat([torch.zeros(7, 3).double(), grid(3, 5)]),
    encoder_attention_mask=krea2_mask,
)


# Models --------------------------------------------------------------------------------------------------------


def sizes(head_dim: int, channels: int, **more: Any) -> dict[str, Any]:
    """Return a config of two layers."""
    heads = {"num_attention_heads": HEADS, "attention_head_dim": head_dim}
    return {**heads, "in_channels": channels, "num_layers": 2, **more}


FLUX2 = sizes(16, 8, num_single_layers=2, joint_attention_dim=24, axes_dims_rope=(4, 4, 4, 4))
CHROMA = sizes(16, 8, num_single_layers=2, joint_attention_dim=24, axes_dims_rope=(4, 6, 6))
FLUX = {**CHROMA, "pooled_projection_dim": 16, "guidance_embeds": True}
CHROMA |= {"approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2}
FLUX3 = {**FLUX2, "cond_in_channels": 8, "timestep_channels": 16}
QWEN = sizes(16, 16, out_channels=4, joint_attention_dim=24, axes_dims_rope=(4, 6, 6))
WAN = sizes(12, 4, out_channels=4, text_dim=24, freq_dim=16, ffn_dim=48, rope_max_seq_len=32)
VIDEO = sizes(12, 4, out_channels=4, num_refiner_layers=1, text_embed_dim=24, rope_axes_dim=(4, 4, 4))
HUNYUAN15 = {**VIDEO, "in_channels": 9, "text_embed_2_dim": 12, "image_embed_dim": 16}
HUNYUAN = {**VIDEO, "num_single_layers": 2, "pooled_projection_dim": 16}
SD3 = sizes(
    8,
    4,
    sample_size=16,
    out_channels=4,
    joint_attention_dim=24,
    caption_projection_dim=40,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
COGVIDEOX = sizes(
    16,
    4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=24,
    sample_width=10,
    sample_height=6,
    sample_frames=9,
    max_text_seq_length=7,
    use_rotary_positional_embeddings=True,
)
LTX = sizes(12, 8, out_channels=8, cross_attention_dim=60, caption_channels=24)
LTX2 = {**LTX, **{f"audio_{key}": value for key, value in LTX.items() if key not in ("num_layers", "caption_channels")}}
LTX2_3 = {
    **LTX2,
    **{f"{name}{option}": True for name in ("", "audio_") for option in ("gated_attn", "cross_attn_mod")},
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 40,
    "num_layers": 3,
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
PIXART = sizes(8, 4, out_channels=8, cross_attention_dim=40, sample_size=16, caption_channels=24)
LUMINA2 = {
    **{"sample_size": 16, "in_channels": 4, "hidden_size": 72, "num_layers": 2, "num_refiner_layers": 2},
    **{"num_attention_heads": 6, "num_kv_heads": 2, "multiple_of": 8, "ffn_dim_multiplier": 1.0},
    **{"axes_dim_rope": (4, 4, 4), "axes_lens": (32, 16, 16), "cap_feat_dim": 24},
}
Z_IMAGE = {
    **{"in_channels": 4, "dim": 60, "n_layers": 2, "n_refiner_layers": 2, "n_heads": HEADS, "n_kv_heads": HEADS},
    **{"cap_feat_dim": 24, "axes_dims": [4, 4, 4], "axes_lens": [128, 32, 32]},
}
KREA2 = sizes(
    12,
    8,
    num_attention_heads=6,
    num_key_value_heads=3,
    intermediate_size=40,
    timestep_embed_dim=16,
    text_hidden_dim=24,
    num_text_layers=3,
    text_num_attention_heads=2,
    text_num_key_value_heads=1,
    text_intermediate_size=20,
    num_layerwise_text_blocks=1,
    num_refiner_text_blocks=2,
    axes_dims_rope=(4, 4, 4),
)
MINIMAX_H3 = sizes(
    8,
    2,
    num_attention_heads=7,  # fewer divide them than 56
    hidden_size=24,
    num_refiner_layers=2,
    ffn_dim=32,
    audio_in_channels=6,
    text_dim=16,
    freq_dim=16,
    time_embed_hidden_dim=24,
    time_embed_dim=12,
    rope_freq_dim=1,
)


MODELS = {
    "flux": Tiny("FluxTransformer2DModel", FLUX, FLUX_CALL),
    "flux_controlnet": Tiny(
        "FluxTransformer2DModel",
        FLUX,
        but(FLUX_CALL, controlnet_block_samples=residuals(80, 2), controlnet_single_block_samples=residuals(80, 2)),
    ),
    "chroma": Tiny("ChromaTransformer2DModel", CHROMA, CHROMA_CALL),
    "chroma_numbers": Tiny("ChromaTransformer2DModel", CHROMA, but(CHROMA_CALL, attention_mask=as_numbers), batch=3),
    "flux2": Tiny("Flux2Transformer2DModel", {**FLUX2, "timestep_guidance_channels": 16}, FLUX2_CALL),
    "flux3": Tiny("Flux3Transformer2DModel", FLUX3, FLUX3_CALL, unused="mode_blocks.image_cond"),
    "flux3_reference": Tiny("Flux3Transformer2DModel", {**FLUX3, "flow_map": True}, FLUX3_REFERENCE, batch=3),
    "qwen": Tiny("QwenImageTransformer2DModel", QWEN, QWEN_CALL, batch=1),
    "qwen_masked": Tiny("QwenImageTransformer2DModel", QWEN, QWEN_MASKED),
    "qwen_controlnet": Tiny(
        "QwenImageTransformer2DModel", QWEN, but(QWEN_CALL, controlnet_block_samples=residuals(80, 1))
    ),
    "qwen_edit": Tiny("QwenImageTransformer2DModel", {**QWEN, "zero_cond_t": True}, QWEN_EDIT),
    "qwen_layered": Tiny(
        "QwenImageTransformer2DModel",
        {**QWEN, "use_layer3d_rope": True, "use_additional_t_cond": True},
        QWEN_LAYERED,
        batch=3,
    ),
    "wan": Tiny("WanTransformer3DModel", WAN, WAN_CALL),
    # as many text tokens as each of three ranks has of the video's 45
    "wan_like_lengths": Tiny("WanTransformer3DModel", WAN, given((4, 3, 6, 10), 15, 1000)),
    "wan_i2v": Tiny(
        "WanTransformer3DModel",
        {**WAN, "image_dim": 16, "added_kv_proj_dim": 60, "cross_attn_norm": False},
        WAN_PICTURE,
    ),
    "wan2.2": Tiny("WanTransformer3DModel", WAN, but(WAN_CALL, **PER_TOKEN)),
    "wan_vace": Tiny(
        "WanVACETransformer3DModel",
        {**WAN, "num_layers": 4, "vace_layers": [0, 1, 3], "vace_in_channels": 6},
        VACE_CALL,
    ),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", WAN, WAN_CALL),
    "sd3": Tiny("SD3Transformer2DModel", {**SD3, "dual_attention_layers": (), "qk_norm": None}, SD3_CALL, batch=3),
    "sd3_dual": Tiny("SD3Transformer2DModel", SD3, SD3_CALL),
    "sd3_controlnet": Tiny(
        "SD3Transformer2DModel", SD3, but(SD3_CALL, block_controlnet_hidden_states=residuals(40, 1))
    ),
    "cogvideox": Tiny("CogVideoXTransformer3DModel", COGVIDEOX, COGVIDEOX_CALL),
    # positions are added to the tokens
    "cogvideox_2b": Tiny(
        "CogVideoXTransformer3DModel",
        {**COGVIDEOX, "use_rotary_positional_embeddings": False},
        but(COGVIDEOX_CALL, "image_rotary_emb"),
        batch=1,
    ),
    "hunyuan": Tiny("HunyuanVideoTransformer3DModel", HUNYUAN, HUNYUAN_CALL),
    "hunyuan_replaced": Tiny(
        "HunyuanVideoTransformer3DModel",
        {**HUNYUAN, "image_condition_type": "token_replace"},
        HUNYUAN_CALL,
        splits=False,
    ),
    "hunyuan15": Tiny("HunyuanVideo15Transformer3DModel", HUNYUAN15, HUNYUAN15_CALL),
    "hunyuan15_i2v": Tiny(
        "HunyuanVideo15Transformer3DModel", HUNYUAN15, but(HUNYUAN15_CALL, image_embeds=drawn(4, 3, 16)), batch=3
    ),
    "ltx": Tiny("LTXVideoTransformer3DModel", LTX, LTX_CALL),
    "ltx_per_token": Tiny("LTXVideoTransformer3DModel", LTX, but(LTX_CALL, **PER_TOKEN)),
    "ltx2": Tiny("LTX2VideoTransformer3DModel", LTX2, LTX2_CALL),
    "ltx2_3": Tiny("LTX2VideoTransformer3DModel", LTX2_3, LTX2_3_CALL),
    "pixart": Tiny("PixArtTransformer2DModel", PIXART, PIXART_CALL),
    "dit": Tiny("DiTTransformer2DModel", sizes(8, 4, sample_size=6, num_embeds_ada_norm=10), DIT_CALL),
    "lumina2": Tiny("Lumina2Transformer2DModel", LUMINA2, LUMINA2_CALL),
    "z_image": Tiny("ZImageTransformer2DModel", Z_IMAGE, z_image),
    "z_image_controlnet": Tiny("ZImageTransformer2DModel", Z_IMAGE, but(z_image, controlnet_block_samples=of_pairs)),
    "mochi": Tiny(
        "MochiTransformer3DModel",
        sizes(8, 4, pooled_projection_dim=16, text_embed_dim=24, time_embed_dim=16, max_sequence_length=9),
        MOCHI_CALL,
    ),
    "krea2": Tiny("Krea2Transformer2DModel", KREA2, KREA2_CALL, batch=3),
    "minimax_h3": Tiny("MiniMaxH3Transformer3DModel", MINIMAX_H3, minimax_h3),
    # more channels in than out, as in fill pipelines, and no guidance, as in schnell
    "flux_fill": Tiny(
        "FluxTransformer2DModel",
        {**FLUX, "in_channels": 16, "out_channels": 8, "guidance_embeds": False},
        but(FLUX_CALL, "guidance", hidden_states=drawn(1, 15, 16)),
        batch=3,
    ),
}
# named by their classes: without "Transformer2DModel" and the like
OTHERS = [kind for kind in CUTS if kind not in {tiny.kind for tiny in MODELS.values()}]
MODELS |= {re.split("Transformer|DiT", kind)[0].lower(): of_family(kind) for kind in OTHERS}
SPLIT = [name for name, tiny in MODELS.items() if tiny.splits]
