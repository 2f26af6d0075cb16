"""Tiny random transformers of diffusers with inputs, one of each model that the adapter's table knows.

Five heads do not divide by two, three or four ranks; token counts are odd, and batch rows differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_hunyuan_video15
from torch import Tensor, nn

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
            module = kind(**self.config).double().eval().requires_grad_(False)
        for weight in module.parameters():
            fan = math.prod(weight.shape[1:]) if weight.dim() > 1 else 4
            most = (3 / fan) ** 0.5  # for a variance of 1 / fan
            weight.uniform_(-most, most, generator=generator)
        if self.kind == "MochiTransformer3DModel":  # its positions are fp32, and are multiplied with these
            module.pos_frequencies.data = module.pos_frequencies.float()
        return module

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
            return flat(module(**arguments, return_dict=False))


def narrow(inputs: int, hidden: int, outputs: int, own: Any = BYT5) -> Any:
    """Return the projection of HunyuanVideo 1.5's glyphs with few hidden numbers; its class asks for 2048."""
    return own(inputs, min(hidden, 32), outputs)


@cache
def truth(name: str, device: str) -> tuple[Tensor, ...]:
    """Return the outputs of an unchanged transformer of `MODELS`, computed on "cpu" or "cuda", in host memory."""
    return tuple(x.cpu() for x in MODELS[name].whole(device=device))


@cache
def short_truth(name: str, device: str, tokens: int = 2) -> tuple[Tensor, ...]:
    """Return the outputs of an unchanged transformer of `MODELS` for a text of few tokens, in host memory."""
    tiny = MODELS[name]
    return tuple(x.cpu() for x in tiny.whole(None, few(tiny.arguments(device), tokens), device))


def moved(value: Any, device: torch.device | str) -> Any:
    """Return tensors in nested lists, tuples and dictionaries on a device, and other values unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    return type(value)(moved(one, device) for one in value) if isinstance(value, (list, tuple)) else value


def flat(outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return a transformer's outputs as tensors; Z-Image returns a list of pictures."""
    return tuple(x for out in outputs for x in (out if isinstance(out, list) else [out]))


def grid(height: int, width: int, axes: int = 3) -> Tensor:
    """Return the position ids of an image of tokens, (L, axes), row and column last."""
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


def flux(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "pooled_projections": random((batch, 16), 3),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "img_ids": grid(3, 5),
        "txt_ids": torch.zeros(7, 3).double(),
        "guidance": torch.full((batch,), 3.5).double(),
    }


def flux_with_controlnet(batch: int) -> Inputs:
    residuals = [random((batch, 15, HEADS * 16), 10 + i) for i in range(2)]
    return {**flux(batch), "controlnet_block_samples": residuals, "controlnet_single_block_samples": residuals}


def chroma(batch: int) -> Inputs:
    """Return a call of Chroma, whose mask is for text and image."""
    left_out, image = {"pooled_projections", "guidance"}, torch.ones(batch, 15, dtype=torch.bool)
    given = {name: value for name, value in flux(batch).items() if name not in left_out}
    return {**given, "attention_mask": torch.cat([padded(batch, 7), image], dim=1)}


def chroma_numbers(batch: int) -> Inputs:
    """Return a call as Chroma's pipeline makes it: the mask has floating numbers, which torch adds to the scores."""
    given = chroma(batch)
    given["attention_mask"][-1, -4] = False  # a token of the image, too
    return {**given, "attention_mask": given["attention_mask"].double()}


def flux2(batch: int) -> Inputs:
    images, texts = torch.zeros(batch, 15, 4).double(), torch.zeros(batch, 7, 4).double()
    images[..., 1:3], texts[..., 3] = grid(3, 5)[:, 1:], torch.arange(7)
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "img_ids": images,
        "txt_ids": texts,
        "guidance": torch.full((batch,), 3.5).double(),
    }


def flux3(batch: int) -> Inputs:
    images, texts = torch.zeros(15, 4), torch.zeros(7, 4)
    images[:, 1], images[:, 2], texts[:, 3] = torch.arange(15) // 5, torch.arange(15) % 5, torch.arange(7)
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "img_ids": images,
        "txt_ids": texts,
    }


def flux3_with_reference(batch: int) -> Inputs:
    """Return inputs with a reference image, of a model that is told the time of its next step."""
    ids = torch.zeros(6, 4)
    ids[:, 0], ids[:, 1], ids[:, 2] = 1, torch.arange(6) // 3, torch.arange(6) % 3
    reference = {"image_cond_hidden_states": random((batch, 6, 8), 3), "image_cond_ids": ids}
    return {**flux3(batch), **reference, "target_timestep": torch.linspace(0.2, 0.6, batch).double()}


def qwen(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 15, 16), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "img_shapes": [[(1, 3, 5)]] * batch,
    }


def qwen_masked(batch: int) -> Inputs:
    return {**qwen(batch), "encoder_hidden_states_mask": padded(batch, 7)}


def qwen_edit(batch: int) -> Inputs:
    """Return an image and a reference image, whose tokens have another timestep."""
    return {
        **qwen_masked(batch),
        "hidden_states": random((batch, 21, 16), 1),
        "img_shapes": [[(1, 3, 5), (1, 2, 3)]] * batch,
    }


def qwen_layered(batch: int) -> Inputs:
    """Return two layers and the picture that they are made of, and a number that says what kind of picture it is."""
    return {
        **qwen_masked(batch),
        "hidden_states": random((batch, 45, 16), 1),
        "img_shapes": [[(1, 3, 5)] * 3] * batch,
        "additional_t_cond": torch.tensor([0, 1, 1][:batch]),
    }


def qwen21(batch: int) -> Inputs:
    """Return inputs whose last four slots stand for the picture, each for four tokens."""
    slots = torch.zeros(batch, 11, dtype=torch.bool)
    slots[:, 7:] = True
    return {
        "hidden_states": random((batch, 16, 8), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "img_shapes": [[(1, 4, 4)]] * batch,
        "img_mask": slots,
        "encoder_hidden_states_mask": padded(batch, 7),
    }


def wan(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 3, 6, 10), 1),
        "timestep": torch.linspace(300, 700, batch).double(),
        "encoder_hidden_states": random((batch, 9, 24), 2),
    }


def wan22(batch: int) -> Inputs:
    return {**wan(batch), "timestep": random((batch, 45), 5).abs() * 500}


def wan_vace(batch: int) -> Inputs:
    """Return a video, and the frames that control it, which weigh differently in each block that reads them."""
    return {
        **wan(batch),
        "control_hidden_states": random((batch, 6, 3, 6, 10), 6),
        "control_hidden_states_scale": torch.tensor([0.7, 1.2, 0.4]).double(),
    }


def wan_like_lengths(batch: int) -> Inputs:
    """Return a video of 45 tokens and 15 text tokens: as many as each of three ranks has of the video."""
    return {**wan(batch), "encoder_hidden_states": random((batch, 15, 24), 2)}


def wan_with_picture(batch: int) -> Inputs:
    """Return a video, the features of a picture, and the 512 text tokens that the attention to both counts on."""
    features = random((batch, 5, 16), 3)
    text = random((batch, 512, 24), 2)
    return {**wan(batch), "encoder_hidden_states": text, "encoder_hidden_states_image": features}


def sd3(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 6, 10), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "pooled_projections": random((batch, 16), 3),
        "timestep": torch.linspace(300, 700, batch).double(),
    }


def sd3_with_controlnet(batch: int) -> Inputs:
    return {**sd3(batch), "block_controlnet_hidden_states": [random((batch, 15, HEADS * 8), 10)]}


def cogvideox(batch: int) -> Inputs:
    cos, sin = (random((45, 8), seed).repeat_interleave(2, dim=1) for seed in (8, 9))
    return {
        "hidden_states": random((batch, 3, 4, 6, 10), 1),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "timestep": torch.linspace(300, 700, batch).double(),
        "image_rotary_emb": (cos, sin),
    }


def cogvideox_2b(batch: int) -> Inputs:
    """Return a video without rotary rows: its positions are added to the tokens."""
    return {name: value for name, value in cogvideox(batch).items() if name != "image_rotary_emb"}


def hunyuan(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 3, 6, 10), 1),
        "timestep": torch.linspace(300, 700, batch).double(),
        "encoder_hidden_states": random((batch, 9, 24), 2),
        "encoder_attention_mask": padded(batch, 9).long(),
        "pooled_projections": random((batch, 16), 3),
        "guidance": torch.full((batch,), 6000.0).double(),
    }


def hunyuan15(batch: int) -> Inputs:
    """Return a video to draw from two texts, of which the second has no valid token in some rows, and no picture."""
    rows = torch.arange(batch)[:, None]
    return {
        "hidden_states": random((batch, 9, 3, 3, 5), 1),
        "timestep": torch.linspace(300, 700, batch).double(),
        "encoder_hidden_states": random((batch, 9, 24), 2),
        "encoder_attention_mask": padded(batch, 9).double(),
        "encoder_hidden_states_2": random((batch, 5, 12), 3),
        "encoder_attention_mask_2": (torch.arange(5) < 2 * rows).double(),
        "image_embeds": torch.zeros(batch, 3, 16).double(),
    }


def hunyuan15_with_picture(batch: int) -> Inputs:
    return {**hunyuan15(batch), "image_embeds": random((batch, 3, 16), 4)}


def ltx(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 45, 8), 1),
        "encoder_hidden_states": random((batch, 9, 24), 2),
        "timestep": torch.linspace(300, 700, batch).double(),
        "encoder_attention_mask": padded(batch, 9).long(),
        "num_frames": 3,
        "height": 3,
        "width": 5,
    }


def ltx_per_token(batch: int) -> Inputs:
    return {**ltx(batch), "timestep": random((batch, 45), 5).abs() * 500}


def ltx2(batch: int) -> Inputs:
    """Return a video with its sound, and a text for each."""
    texts = {name: random((batch, 9, 24), seed) for name, seed in (("encoder", 2), ("audio_encoder", 3))}
    return {
        "hidden_states": random((batch, 45, 8), 1),
        "audio_hidden_states": random((batch, 7, 8), 4),
        **{f"{name}_hidden_states": text for name, text in texts.items()},
        **{f"{name}_attention_mask": padded(batch, 9).long() for name in texts},
        "timestep": torch.linspace(300, 700, batch).double(),
        "num_frames": 3,
        "height": 3,
        "width": 5,
        "audio_num_frames": 7,
    }


def ltx2_3(batch: int) -> Inputs:
    """Return a video with a timestep for each token, whose second block's attention is left out, and its sound."""
    return {
        **ltx2(batch),
        "encoder_hidden_states": random((batch, 9, HEADS * 12), 2),
        "audio_encoder_hidden_states": random((batch, 9, HEADS * 8), 3),
        "timestep": random((batch, 45), 5).abs() * 500,
        "audio_timestep": torch.linspace(200, 800, batch).double(),
        "sigma": torch.linspace(300, 700, batch).double(),
        "use_cross_timestep": True,
        "spatio_temporal_guidance_blocks": [1],
    }


def pixart(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 6, 10), 1),
        "encoder_hidden_states": random((batch, 9, 24), 2),
        "encoder_attention_mask": padded(batch, 9).double(),
        "timestep": torch.linspace(300, 700, batch).double(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def dit(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 6, 6), 1),
        "timestep": torch.linspace(300, 700, batch).double(),
        "class_labels": torch.arange(batch),
    }


def lumina2(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 6, 10), 1),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "encoder_hidden_states": random((batch, 7, 24), 2),
        "encoder_attention_mask": padded(batch, 7).long(),
    }


def z_image(batch: int) -> Inputs:
    """Return pictures of one size and captions whose padded lengths (32, 64) differ, so that keys are masked."""
    return {
        "x": [random((4, 1, 6, 10), 1 + row) for row in range(batch)],
        "t": torch.linspace(0.3, 0.7, batch).double(),
        "cap_feats": [random((5 + 30 * row, 24), 7 + row) for row in range(batch)],
    }


def h3(batch: int) -> Inputs:
    """Return a call of MiniMax-H3: one packed sequence of 7 tokens of text, 5 of sound and 15 of video, in turn."""
    order = torch.randperm(27, generator=torch.Generator().manual_seed(5))
    text, sound, video = (part.sort().values for part in order.split([7, 5, 15]))
    tags = torch.zeros(27, dtype=torch.int64).index_fill(0, text, 1).index_fill(0, sound, 2)
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "audio_hidden_states": random((batch, 5, 6), 2),
        "encoder_hidden_states": random((batch, 7, 16), 3),
        "timestep": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "timestep_indices": (tags == 0).long(),
        "token_tags": tags,
        "position_ids": torch.stack(
            (torch.arange(27) // 9, torch.arange(27) // 3 % 3, torch.arange(27) % 3), 1
        ).double(),
        "video_indices": video,
        "audio_indices": sound,
        "text_indices": text,
    }


def krea2(batch: int) -> Inputs:
    """Return a call of Krea 2; padding lies before the last token of a text, as its template has it."""
    mask = padded(batch, 7)
    mask[:, -1] = True
    return {
        "hidden_states": random((batch, 15, 8), 1),
        "encoder_hidden_states": random((batch, 7, 3, 24), 2),
        "timestep": torch.linspace(0.3, 0.7, batch).double(),
        "position_ids": torch.cat([torch.zeros(7, 3).double(), grid(3, 5)]),
        "encoder_attention_mask": mask,
    }


def mochi(batch: int) -> Inputs:
    return {
        "hidden_states": random((batch, 4, 3, 6, 10), 1),
        "encoder_hidden_states": random((batch, 9, 24), 2),
        "timestep": torch.linspace(300, 700, batch).double(),
        "encoder_attention_mask": padded(batch, 9),
    }


# Models --------------------------------------------------------------------------------------------------------

FLUX = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": HEADS,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
CHROMA = {
    **{name: value for name, value in FLUX.items() if name not in ("pooled_projection_dim", "guidance_embeds")},
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 24,
    "approximator_layers": 2,
}
FLUX2 = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": HEADS,
    "joint_attention_dim": 24,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
FLUX3 = {
    "in_channels": 8,
    "cond_in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": HEADS,
    "joint_attention_dim": 24,
    "timestep_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": HEADS,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
QWEN21 = {
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": HEADS,
    "context_in_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
WAN = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_VACE = {**WAN, "num_layers": 4, "vace_layers": [0, 1, 3], "vace_in_channels": 6}
WAN_I2V = {**WAN, "image_dim": 16, "added_kv_proj_dim": 60, "cross_attn_norm": False}
SD3 = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": HEADS,
    "joint_attention_dim": 24,
    "caption_projection_dim": HEADS * 8,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
COGVIDEOX = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 24,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
}
COGVIDEOX_2B = {**COGVIDEOX, "use_rotary_positional_embeddings": False}
HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "pooled_projection_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
HUNYUAN15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 24,
    "text_embed_2_dim": 12,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
LTX = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": HEADS,
    "attention_head_dim": 12,
    "cross_attention_dim": HEADS * 12,
    "num_layers": 2,
    "caption_channels": 24,
}
LTX2 = {
    **{f"{name}in_channels": 8 for name in ("", "audio_")},
    **{f"{name}out_channels": 8 for name in ("", "audio_")},
    **{f"{name}num_attention_heads": HEADS for name in ("", "audio_")},
    **{f"{name}attention_head_dim": 12 for name in ("", "audio_")},
    **{f"{name}cross_attention_dim": HEADS * 12 for name in ("", "audio_")},
    "num_layers": 2,
    "caption_channels": 24,
}
LTX2_3 = {
    **LTX2,
    **{f"{name}{option}": True for name in ("", "audio_") for option in ("gated_attn", "cross_attn_mod")},
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": HEADS * 8,
    "num_layers": 3,
    "rope_type": "split",
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
PIXART = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": HEADS * 8,
    "sample_size": 16,
    "caption_channels": 24,
}
DIT = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 6,
    "num_embeds_ada_norm": 10,
}
LUMINA2 = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 6 * 12,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "multiple_of": 8,
    "ffn_dim_multiplier": 1.0,
    "axes_dim_rope": (4, 4, 4),
    "axes_lens": (32, 16, 16),
    "cap_feat_dim": 24,
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": HEADS * 12,
    "n_layers": 2,
    "n_refiner_layers": 2,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "cap_feat_dim": 24,
    "axes_dims": [4, 4, 4],
    "axes_lens": [128, 32, 32],
}
KREA2 = {
    "in_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 1,
    "text_intermediate_size": 20,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": (4, 4, 4),
}
MOCHI = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 8,
    "num_layers": 2,
    "pooled_projection_dim": 16,
    "in_channels": 4,
    "text_embed_dim": 24,
    "time_embed_dim": 16,
    "max_sequence_length": 9,
}

H3 = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 8,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 32,
    "in_channels": 2,
    "audio_in_channels": 6,
    "text_dim": 16,
    "freq_dim": 16,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 12,
    "rope_freq_dim": 1,
}
MODELS = {
    "flux": Tiny("FluxTransformer2DModel", FLUX, flux),
    "flux_controlnet": Tiny("FluxTransformer2DModel", FLUX, flux_with_controlnet),
    "chroma": Tiny("ChromaTransformer2DModel", CHROMA, chroma),
    "chroma_numbers": Tiny("ChromaTransformer2DModel", CHROMA, chroma_numbers, batch=3),
    "flux2": Tiny("Flux2Transformer2DModel", FLUX2, flux2),
    "flux3": Tiny("Flux3Transformer2DModel", FLUX3, flux3, unused="mode_blocks.image_cond"),
    "flux3_reference": Tiny("Flux3Transformer2DModel", {**FLUX3, "flow_map": True}, flux3_with_reference, batch=3),
    "qwen": Tiny("QwenImageTransformer2DModel", QWEN, qwen, batch=1),
    "qwen_masked": Tiny("QwenImageTransformer2DModel", QWEN, qwen_masked),
    "qwen_edit": Tiny("QwenImageTransformer2DModel", {**QWEN, "zero_cond_t": True}, qwen_edit),
    "qwen_layered": Tiny(
        "QwenImageTransformer2DModel",
        {**QWEN, "use_layer3d_rope": True, "use_additional_t_cond": True},
        qwen_layered,
        batch=3,
    ),
    "qwen21": Tiny("QwenImage21Transformer2DModel", QWEN21, qwen21, splits=False),
    "wan": Tiny("WanTransformer3DModel", WAN, wan),
    "wan_like_lengths": Tiny("WanTransformer3DModel", WAN, wan_like_lengths),
    "wan_i2v": Tiny("WanTransformer3DModel", WAN_I2V, wan_with_picture),
    "wan2.2": Tiny("WanTransformer3DModel", WAN, wan22),
    "wan_vace": Tiny("WanVACETransformer3DModel", WAN_VACE, wan_vace),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", WAN, wan),
    "sd3": Tiny("SD3Transformer2DModel", {**SD3, "dual_attention_layers": (), "qk_norm": None}, sd3, batch=3),
    "sd3_dual": Tiny("SD3Transformer2DModel", SD3, sd3),
    "sd3_controlnet": Tiny("SD3Transformer2DModel", SD3, sd3_with_controlnet),
    "cogvideox": Tiny("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox),
    "cogvideox_2b": Tiny("CogVideoXTransformer3DModel", COGVIDEOX_2B, cogvideox_2b, batch=1),
    "hunyuan": Tiny("HunyuanVideoTransformer3DModel", HUNYUAN, hunyuan),
    "hunyuan15": Tiny("HunyuanVideo15Transformer3DModel", HUNYUAN15, hunyuan15),
    "hunyuan15_i2v": Tiny("HunyuanVideo15Transformer3DModel", HUNYUAN15, hunyuan15_with_picture, batch=3),
    "ltx": Tiny("LTXVideoTransformer3DModel", LTX, ltx),
    "ltx_per_token": Tiny("LTXVideoTransformer3DModel", LTX, ltx_per_token),
    "ltx2": Tiny("LTX2VideoTransformer3DModel", LTX2, ltx2),
    "ltx2_3": Tiny("LTX2VideoTransformer3DModel", LTX2_3, ltx2_3),
    "hunyuan_replaced": Tiny(
        "HunyuanVideoTransformer3DModel", {**HUNYUAN, "image_condition_type": "token_replace"}, hunyuan, splits=False
    ),
    "pixart": Tiny("PixArtTransformer2DModel", PIXART, pixart),
    "dit": Tiny("DiTTransformer2DModel", DIT, dit),
    "lumina2": Tiny("Lumina2Transformer2DModel", LUMINA2, lumina2),
    "z_image": Tiny("ZImageTransformer2DModel", Z_IMAGE, z_image),
    "mochi": Tiny("MochiTransformer3DModel", MOCHI, mochi),
    "krea2": Tiny("Krea2Transformer2DModel", KREA2, krea2, batch=3),
    "h3": Tiny("MiniMaxH3Transformer3DModel", H3, h3),  # by diffusers' own plan
}
SPLIT = [name for name, tiny in MODELS.items() if tiny.splits]
