"""Channels-last memory for a VAE: its input, and the weights of its convolutions until they are put back.

When it wins: in bf16 and fp16 on GPUs, whose convolutions of contiguous pictures turn input and output around them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def pixels_last(x: Tensor) -> Tensor:
    """Return x, (N, C, H, W) or (N, C, T, H, W), in channels-last memory."""
    return x.contiguous(memory_format=FORMATS[x.ndim])


def weights_pixels_last(vae: nn.Module) -> Callable[[], None]:
    """Change the memory of the weights of convolutions to channels-last; return what changes it back.

    Values stay, and so do the parameters. What was contiguous becomes contiguous again, also if it was moved to another
    device in between.
    """
    convolutions = [module for module in vae.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]
    changed = [module.weight for module in convolutions if module.weight.is_contiguous()]
    for weight in changed:
        weight.data = pixels_last(weight.data)

    def restore() -> None:
        for weight in changed:
            weight.data = weight.data.contiguous()

    return restore
