"""The forward of Qwen-Image's edit models without a copy from the host, so that a call can be a CUDA graph.

Tokens of reference images have a timestep of 0. diffusers makes a list of which these are and copies it to the device
in each call; here it is made on the device, as runs of equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any

import torch
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

Shape = tuple[int, int, int]


def forward_of(module: Any) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return the forward of edit models whose reference images have a timestep of their own; None for others."""
    return _forward if module.config.zero_cond_t else None


@apply_lora_scale("attention_kwargs")
def _forward(module: Any, **given: Any) -> tuple[Tensor, ...]:
    """Return the prediction (B, L, C), as `QwenImageTransformer2DModel` does with the same arguments."""
    x, shapes = module.img_in(given["hidden_states"]), given["img_shapes"]
    timestep = given["timestep"].to(x.dtype)
    timesteps, more = torch.cat([timestep, timestep * 0]), given.get("additional_t_cond")
    guidance = [] if given.get("guidance") is None else [given["guidance"].to(x.dtype) * 1000]
    text = module.txt_in(module.txt_norm(given["encoder_hidden_states"]))
    temb = module.time_text_embed(timesteps, *guidance, x, more)
    same = {
        "temb": temb,
        "image_rotary_emb": module.pos_embed(shapes, max_txt_seq_len=text.shape[1], device=x.device),
        "encoder_hidden_states_mask": None,  # attention has that of the call
        "joint_attention_kwargs": given.get("attention_kwargs"),
        "modulate_index": torch.stack([_of_references(images, x.device) for images in shapes]),
    }
    control = given.get("controlnet_block_samples")
    for index, block in enumerate(module.transformer_blocks):
        text, x = block(hidden_states=x, encoder_hidden_states=text, **same)
        if control is not None:
            x = x + control[index // ceil(len(module.transformer_blocks) / len(control))]
    return (module.proj_out(module.norm_out(x, temb.chunk(2)[0])),)


def _of_references(images: Sequence[Shape], device: torch.device) -> Tensor:
    """Return 0 for each token of a picture's first image and 1 for those of its reference images, (L,) int32."""
    counts = prod(images[0]), sum(map(prod, images[1:]))
    return torch.cat([torch.full((n,), which, dtype=torch.int, device=device) for which, n in enumerate(counts)])
