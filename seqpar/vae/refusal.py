"""Refuses, before a diffusers pipeline samples, a size that its VAE cannot decode on these ranks.

A pipeline calls its `prepare_latents` once before the first step. What it returns, and the height and width that it is
given, say what will be decoded. A pipeline without that method, and latents whose size cannot be told for sure, are not
checked.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from torch import Tensor, nn

from seqpar.vae.known import spatial_factor
from seqpar.vae.on_mesh import MeshVAE

NAME = "prepare_latents"
NOT_DECODED = "for output_type='latent' parallelize the pipeline with vae=False"


def refuse_sizes(pipe: Any, vae: MeshVAE) -> Callable[[], None]:
    """Make a pipeline refuse sizes that its VAE cannot decode, in place; return what ends that."""
    theirs = getattr(pipe, NAME, None)
    if not inspect.ismethod(theirs):
        return lambda: None
    before = {name: x for name, x in vars(pipe).items() if name == NAME}
    checked = vars(pipe)[NAME] = Checked(theirs, vae)

    def end() -> None:
        checked.vae = None
        if vars(pipe).get(NAME) is checked:  # otherwise someone has wrapped it since
            del vars(pipe)[NAME]
            vars(pipe).update(before)

    return end


class Checked:
    """A pipeline's `prepare_latents`, with a ValueError, the same on every rank, for what cannot be decoded.

    It cannot know whether the pipeline will decode at all (output_type="latent"), so its error says what to do then.
    vae: None lets all sizes pass.
    """

    def __init__(self, theirs: Callable[..., Any], vae: MeshVAE | None) -> None:
        self._theirs, self.vae = theirs, vae
        self._signature = inspect.signature(theirs)
        update_wrapper(self, theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the pipeline prepares."""
        prepared = self._theirs(*args, **kwargs)
        if self.vae is not None:
            arguments = self._signature.bind(*args, **kwargs).arguments
            latents = prepared[0] if isinstance(prepared, tuple) else prepared
            self.vae.check_call(shape_of(self.vae.vae, latents, arguments), NOT_DECODED)
        return prepared

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the own method of the pipeline's copy."""
        return copy.deepcopy(self._theirs, memo)


def shape_of(vae: Any, latents: object, arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape (N, C, h, w), or (N, C, F, h, w), that a VAE decodes of latents; None if it is not sure.

    latents: of that shape, or packed as (N, tokens, values). arguments: height and width in pixels, and num_frames
    of videos, of which packed latents must have the elements.
    """
    channels, video = vae.config.get("latent_channels") or vae.config.get("z_dim"), _takes_frames(vae)
    if not isinstance(latents, Tensor) or not channels:
        return None
    if latents.dim() != 3:
        fits = latents.dim() == 4 + video and latents.shape[1] == channels
        return tuple(latents.shape) if fits else None
    sides = [arguments.get(name) for name in ("height", "width")]
    for patch in (1, 2):  # pipelines that pack 2 x 2 latent pixels round down to these
        rows, columns = (int(side or 0) // (spatial_factor(vae) * patch) * patch for side in sides)
        frames, rest = divmod(latents[0].numel(), max(1, channels * rows * columns))
        if rows and columns and not rest and (frames == 1 or (video and arguments.get("num_frames") is not None)):
            return (len(latents), channels, *([frames] if video else ()), rows, columns)
    return None


def _takes_frames(vae: nn.Module) -> bool:
    """Return whether latents of a VAE have a dim of frames, which is 1 for pictures."""
    return any(isinstance(module, nn.Conv3d) for module in vae.modules())
