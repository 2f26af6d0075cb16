"""Channels-last memory for a VAE: its input, and the weights of its convolutions until a release puts them back.

When it wins: in bf16 and fp16 on GPUs, whose convolutions of contiguous pictures turn input and output around them;
`wins` names the exception.
AutoencoderKL on two H200s, 2048 x 2048 pixels: 49.5 ms instead of 51.6 as a CUDA graph. Wan's decoder on one, 81 frames
of 720 x 1280: 2400 ms instead of 3120, in 8.8 GiB instead of 10.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

VIDEOS = ("AutoencoderKLWan", "AutoencoderKLQwenImage")  # convolve over frames, and are faster in channels-last memory
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def pixels_last(x: Tensor) -> Tensor:
    """Return x, (N, C, H, W) or (N, C, T, H, W), in channels-last memory."""
    return x.contiguous(memory_format=FORMATS[x.ndim])


def memory_format(x: Tensor) -> torch.memory_format:
    """Return channels-last if a tensor lies so and not contiguously as well, else contiguous."""
    last = FORMATS.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def wins(vae: nn.Module, device: torch.device) -> bool:
    """Return whether a VAE should compute in channels-last memory: on GPUs, if it makes pictures or is known to win.

    On an H200 HunyuanVideo's decoder took 967 ms for 81 frames of 256 x 448, and 666 ms contiguously; LTX-Video's 159
    ms for 81 frames of 480 x 704, and 102 ms.
    """
    video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    return device.type == "cuda" and (not video or type(vae).__name__ in VIDEOS)


def channels_last(vae: nn.Module) -> bool:
    """Return whether the weights of a VAE's convolutions are channels-last, so that its activations will be."""
    return any(memory_format(module.weight) is not torch.contiguous_format for module in _convolutions(vae))


def weights_pixels_last(vae: nn.Module) -> Callable[[], None]:
    """Change the memory of the weights of convolutions to channels-last; return what makes them contiguous again.

    Values stay, and so do the parameters, also if they are moved to another device in between. Weights that lie so
    already, as for another user of the VAE, are left to whom changed them.
    """
    changed = [module for module in _convolutions(vae) if module.weight.is_contiguous()]

    def write(change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False):  # weights outlive the caller's mode
            for module in changed:
                module.weight.data = change(module.weight.data)

    write(pixels_last)
    return lambda: write(Tensor.contiguous)


def _convolutions(vae: nn.Module) -> Iterator[nn.Conv2d | nn.Conv3d]:
    return (module for module in vae.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))
