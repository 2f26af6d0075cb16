"""Refuses, before a diffusers pipeline samples, a size that its VAE cannot decode on these ranks.

A pipeline calls its `prepare_latents` once before the first step. What it returns, and the height and width that it is
given, say what will be decoded. A pipeline without that method, and latents whose size cannot be told for sure, are not
checked. When it wins: on GPUs, where the error would otherwise come after minutes of sampling.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn

from seqpar.adapter.decoding import Decoding
from seqpar.vae.known import spatial_factor

NAME = "prepare_latents"


def refuse_sizes(pipe: Any, decoding: Decoding) -> Callable[[], None]:
    """Make a pipeline refuse sizes that its VAE cannot decode, in place; return what ends that."""
    theirs = getattr(pipe, NAME, None)
    if not inspect.ismethod(theirs):
        return lambda: None
    before = {name: x for name, x in vars(pipe).items() if name == NAME}
    checked = vars(pipe)[NAME] = Checked(theirs, decoding)

    def end() -> None:
        checked.decoding = None
        if vars(pipe).get(NAME) is checked:  # otherwise someone has wrapped it since
            del vars(pipe)[NAME]
            vars(pipe).update(before)

    return end


class Checked:
    """A pipeline's `prepare_latents`, with a ValueError, the same on every rank, for what cannot be decoded.

    It checks calls that the pipeline's own call makes, if that call decodes: with output_type="latent" it does not.
    decoding: None lets all sizes pass.
    """

    def __init__(self, theirs: Callable[..., Any], decoding: Decoding | None) -> None:
        self._theirs, self.decoding = theirs, decoding
        self._signature = inspect.signature(theirs)
        update_wrapper(self, theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the pipeline prepares."""
        made = self._theirs(*args, **kwargs)
        kind = _output_type(getattr(self._theirs, "__self__", None))
        if self.decoding is not None and kind is not None:
            given = self._signature.bind(*args, **kwargs).arguments
            shape = shape_of(self.decoding.vae, made[0] if isinstance(made, tuple) else made, given)
            self.decoding.check_call(shape, kind != "latent")
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the own method of the pipeline's copy."""
        return copy.deepcopy(self._theirs, memo)


def shape_of(vae: Any, latents: object, given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape (N, C, h, w), or (N, C, F, h, w), that a VAE decodes of latents; None if it is not sure.

    latents: of that shape, or packed as (N, tokens, values). given: height and width in pixels, and num_frames of
    videos, of which packed latents must have the elements.
    """
    channels, video = vae.config.get("latent_channels") or vae.config.get("z_dim"), _takes_frames(vae)
    if not isinstance(latents, Tensor) or not channels:
        return None
    if latents.dim() != 3:
        fits = latents.dim() == 4 + video and latents.shape[1] == channels
        return tuple(latents.shape) if fits else None
    sides = [given.get(name) for name in ("height", "width")]
    for patch in (1, 2):  # pipelines that pack 2 x 2 latent pixels round down to these
        rows, columns = (int(side or 0) // (spatial_factor(vae) * patch) * patch for side in sides)
        frames, rest = divmod(latents[0].numel(), max(1, channels * rows * columns))
        if rows and columns and not rest and (frames == 1 or (video and given.get("num_frames") is not None)):
            return (len(latents), channels, *([frames] if video else ()), rows, columns)
    return None


def _takes_frames(vae: nn.Module) -> bool:
    """Return whether latents of a VAE have a dim of frames, which is 1 for pictures."""
    return any(isinstance(module, nn.Conv3d) for module in vae.modules())


def _output_type(pipe: object) -> str | None:
    """Return the output_type of the pipeline's call that is running; None outside of such a call.

    Only the call itself has it, so it is read from the calling frames. Locals of other frames are not touched, because
    to read them keeps them alive.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if {"self", "output_type"} <= {*frame.f_code.co_varnames} and frame.f_locals.get("self") is pipe:
            return str(frame.f_locals.get("output_type"))
        frame = frame.f_back
    return None
