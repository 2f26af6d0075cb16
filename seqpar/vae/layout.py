"""Channels-last memory for a VAE: its input, and the weights of its convolutions until their last user puts them back.

When it wins: in bf16 and fp16 on GPUs, whose convolutions of contiguous pictures turn input and output around them;
`wins` names the exception.
AutoencoderKL on two H200s, 2048 x 2048 pixels: 49.5 ms instead of 51.6 as a CUDA graph. Wan's decoder on one, 81 frames
of 720 x 1280: 2400 ms instead of 3120, in 8.8 GiB instead of 10.1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VIDEOS = ("AutoencoderKLWan", "AutoencoderKLQwenImage")  # convolve over frames, and are faster in channels-last memory
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_NAME = "_pixels_last_of_seqpar"  # attribute of a VAE: its `ChannelsLastWeights`


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
    """Change the memory of the weights of convolutions to channels-last; return what ends this use of the VAE.

    Values stay, and so do the parameters. When the last use of a VAE ends, what was contiguous becomes contiguous
    again, also if it was moved to another device in between.
    """
    weights = vars(vae).get(_NAME)
    if not isinstance(weights, ChannelsLastWeights):
        weights = vars(vae)[_NAME] = ChannelsLastWeights([])
    return weights.join(vae)


class ChannelsLastWeights:
    """The users of a VAE's channels-last weights, and the convolutions whose weights the first of them changed."""

    def __init__(self, changed: list[nn.Module]) -> None:
        self._changed, self._users = changed, set[object]()

    def join(self, vae: nn.Module) -> Callable[[], None]:
        """Add a user; return what takes it away again."""
        key = object()
        if not self._users:
            self._changed += [module for module in _convolutions(vae) if module.weight.is_contiguous()]
            self._write(pixels_last)
        self._users.add(key)

        def end() -> None:
            self._users.discard(key)
            if not self._users and vars(vae).get(_NAME) is self:
                self._write(Tensor.contiguous)
                del vars(vae)[_NAME]

        return end

    def _write(self, change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False):  # weights outlive the caller's mode
            for module in self._changed:
                weight: Any = module.weight
                weight.data = change(weight.data)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelsLastWeights:
        """Return that of the VAE's copy, which nobody uses yet."""
        return ChannelsLastWeights(copy.deepcopy(self._changed, memo))


def _convolutions(vae: nn.Module) -> Iterator[nn.Conv2d | nn.Conv3d]:
    return (module for module in vae.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))
