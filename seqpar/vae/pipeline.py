"""Shares the VAE of a diffusers pipeline among ranks: `vae.decode` and `vae.encode` compute on all of them.

When it wins: every rank calls the pipeline, so without it each decodes the whole picture and needs memory for it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import update_wrapper, wraps
from typing import Any, Literal
from weakref import ref

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seqpar.graphs.deferred import plain
from seqpar.mesh.mesh import Mesh
from seqpar.vae.known import spatial_factor, why_unknown
from seqpar.vae.on_mesh import MeshVAE, tiling
from seqpar.vae.shared import Shared, User, share

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


Wished = Literal["auto", "tiled"] | bool  # how a pipeline's VAE decodes; see `seqpar.parallelize`


def check_wish(name: str, vae: Any, wish: Wished) -> None:
    """Raise ValueError for a wish that is none, and for strips or tiles of a VAE that has none.

    name: of the class that owns the VAE, which may be None, and needs no weights.
    """
    if not isinstance(wish, bool) and not (isinstance(wish, str) and wish in ("auto", "tiled")):
        raise ValueError(f"got vae={wish!r}, expected 'auto', 'tiled', True or False")
    if wish in (True, "tiled") and not _is_vae(vae):
        raise ValueError(f"got vae={wish!r} for a {name} without a VAE, expected 'auto'")
    if wish == "tiled" and not hasattr(vae, "enable_tiling"):
        raise ValueError(f"got vae='tiled' for a {type(vae).__name__}, which has no tiling, expected 'auto'")
    reason = why_unknown(vae) if wish is True else None
    if reason is not None:
        raise ValueError(f"got vae=True for a {type(vae).__name__} that is not cut into strips: {reason}")


def share_vae(
    pipe_or_transformer: Any, mesh: Mesh, transport: str, wish: Wished, check: Callable[[], None]
) -> Callable[[], None]:
    """Let a pipeline's VAE, if it has one, take rank 0's input and, if wished and known, compute on all ranks.

    A pipeline whose VAE does so also refuses, before it samples, sizes that cannot be decoded (`refuse_sizes`).
    check: called before each of its calls. Returns what ends this, on all ranks at the same time.
    """
    vae, ends = getattr(pipe_or_transformer, "vae", None), ExitStack()
    if not _is_vae(vae):
        return ends.close
    if wish == "tiled":
        ends.enter_context(tiling(vae, "tiled"))
    reason = why_unknown(vae) if wish in ("auto", True) else None
    if wish in (False, "tiled") or reason is not None:
        if reason is not None and mesh.is_main and mesh.world.size > 1:
            print(f"seqpar: every rank decodes whole pictures, because {reason}", flush=True)
        ends.callback(share(vae, User(mesh, check)))
        return ends.close
    on_mesh = MeshVAE.of(vae, mesh, transport)
    ends.callback(on_mesh.release)
    ends.callback(refuse_sizes(pipe_or_transformer, on_mesh))
    ends.callback(share(vae, User(mesh, check, _of_values(on_mesh.decode), _of_values(on_mesh.encode))))
    return ends.close


def same_vae(pipe: Any) -> Callable[[], None]:
    """Return what raises ValueError if a pipeline, as long as it exists, has another VAE than now.

    Ranks would decode different latents with it, each its own.
    """
    vae, pipe = pipe.vae, ref(pipe)

    def check() -> None:
        other = getattr(pipe(), "vae", None)
        if other is None or other is vae or isinstance(getattr(other, "decode", None), Shared):
            return  # none decodes nothing; a compiled one, or another pipeline's, is shared
        parts = (*vars(other).values(), *vars(other).get("_modules", {}).values())
        if vae is None or not any(part is vae for part in parts):  # as a wrapper has it
            raise ValueError(
                f"got another VAE ({type(other).__name__}) in a pipeline since parallelize, which ranks do not share; "
                f"call seqpar.release, replace the VAE and call parallelize again"
            )

    return check


def _of_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gets plain tensors in place of promises (`seqpar.graphs.deferred`)."""

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return method(*args, **kwargs)

    return called


def _is_vae(vae: Any) -> bool:
    return hasattr(vae, "decode")
