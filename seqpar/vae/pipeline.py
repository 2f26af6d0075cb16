"""A diffusers pipeline's VAE on all ranks: `vae.decode` and `vae.encode` take rank 0's input.

Every rank calls the pipeline. `MeshVAE` decodes each image once, whole, in strips or in tiles; without it each rank
decodes every image and needs memory for it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import update_wrapper, wraps
from typing import Any, Literal
from weakref import ref

from torch import nn
from torch.utils import _pytree as pytree

from seqpar.graphs.deferred import plain
from seqpar.mesh.mesh import Mesh
from seqpar.types.say import say
from seqpar.vae.known import spatial_factor, temporal_factor, why_unknown
from seqpar.vae.on_mesh import MeshVAE, tiling
from seqpar.vae.shared import Shared, User, share

VaeMode = Literal["auto", "tiled"] | bool  # how a pipeline decodes, as documented by `seqpar.parallelize`
PREPARE = "prepare_latents"  # a pipeline's method, called with the size before the first step


def check_mode(name: str, vae: Any, mode: VaeMode) -> None:
    """Raise ValueError for an unknown mode, and for strips or tiles of a VAE without them.

    name: class of the VAE's owner. The VAE may be None and needs no weights.
    """
    if not isinstance(mode, bool) and not (isinstance(mode, str) and mode in ("auto", "tiled")):
        raise ValueError(f"got vae={mode!r}, expected 'auto', 'tiled', True or False")
    if mode in (True, "tiled") and not hasattr(vae, "decode"):
        raise ValueError(f"vae={mode!r} requires a VAE, but {name} has none; use vae='auto'")
    if mode == "tiled" and not hasattr(vae, "enable_tiling"):
        raise ValueError(f"{type(vae).__name__} does not support vae='tiled'; use vae='auto'")
    reason = why_unknown(vae) if mode is True else None
    if reason is not None:
        raise ValueError(f"{type(vae).__name__} does not support vae=True: {reason}")


def share_vae(
    pipe_or_transformer: Any, mesh: Mesh, transport: str, mode: VaeMode, check: Callable[[], None]
) -> Callable[[], None]:
    """Share a pipeline's VAE, if it has one, among ranks; return a function that ends this. Collective.

    Its methods take rank 0's input. With mode "auto" or True, a tested VAE computes on all ranks, and the pipeline
    decides before the first step whether a size is decoded whole, in strips or in tiles. check: called before each of
    the VAE's calls.
    """
    vae, ends = getattr(pipe_or_transformer, "vae", None), ExitStack()
    if not hasattr(vae, "decode"):
        return ends.close
    if mode == "tiled":
        ends.enter_context(tiling(vae, True))
    reason = why_unknown(vae) if mode in ("auto", True) else None
    if mode in (False, "tiled") or reason is not None:
        if reason is not None and mesh.is_main and mesh.world.size > 1:
            say(f"every rank decodes whole images, because {reason}")
        ends.callback(share(vae, User(mesh, check)))
        return ends.close
    pipe = ref(pipe_or_transformer)

    def modules() -> list[nn.Module]:
        return [module for module in getattr(pipe(), "components", {}).values() if isinstance(module, nn.Module)]

    on_mesh = MeshVAE.of(vae, mesh, transport, modules)
    ends.callback(on_mesh.release)
    ends.callback(_check_sizes(pipe_or_transformer, on_mesh))
    ends.callback(share(vae, User(mesh, check, _of_values(on_mesh.decode), _of_values(on_mesh.encode))))
    return ends.close


def same_vae(pipe: Any) -> Callable[[], None]:
    """Return a check that raises ValueError if a pipeline has another VAE than now.

    Each rank would decode its own latents with it.
    """
    vae, pipe = pipe.vae, ref(pipe)

    def check() -> None:
        other = getattr(pipe(), "vae", None)
        if other is None or other is vae or isinstance(getattr(other, "decode", None), Shared):
            return  # None decodes nothing; a compiled one, or another pipeline's, is shared
        parts = (*vars(other).values(), *vars(other).get("_modules", {}).values())
        if vae is None or not any(part is vae for part in parts):  # a wrapper holds it
            raise ValueError(
                f"The pipeline's VAE was replaced after parallelize ({type(other).__name__}), so ranks do not share "
                f"it. Call seqpar.release, replace the VAE, and call parallelize again."
            )

    return check


def _of_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes plain tensors in place of deferred results."""

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(plain, (args, kwargs))
        return method(*args, **kwargs)

    return called


def _check_sizes(pipe: Any, vae: MeshVAE) -> Callable[[], None]:
    """Make a pipeline decide before the first step how a size is decoded; return a function that ends this."""
    original = getattr(pipe, PREPARE, None)
    if not inspect.ismethod(original):
        return lambda: None
    checked = Checked(original, vae)
    detach = attach(pipe, {PREPARE: checked})

    def end() -> None:
        checked.vae = None
        detach()

    return end


def attach(owner: object, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Set attributes of an object; return a function that puts back what was there, but for what was wrapped since."""
    held = vars(owner)
    before = {name: held[name] for name in attributes if name in held}
    held.update(attributes)

    def detach() -> None:
        for name, value in attributes.items():
            if held.get(name) is value:
                del held[name]
                held.update({name: before[name]} if name in before else {})

    return detach


class Checked:
    """A pipeline's `prepare_latents`, which first checks the size that its arguments give. vae: None checks nothing."""

    def __init__(self, original: Callable[..., Any], vae: MeshVAE | None) -> None:
        self._original, self.vae = original, vae
        self._signature = inspect.signature(original)
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        shape = None if self.vae is None else latent_shape(self.vae.vae, bound.arguments)
        if self.vae is not None and shape is not None:
            self.vae.check_call(shape)
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._original, memo)


def latent_shape(vae: Any, arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    height, width = arguments.get("height"), arguments.get("width")
    if height is None or width is None:
        return None
    channels = vae.config.get("latent_channels") or vae.config.get("z_dim")
    sides = [int(side) // spatial_factor(vae) for side in (height, width)]
    video = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    frames = [((arguments.get("num_frames") or 1) - 1) // temporal_factor(vae) + 1] if video else []
    return int(arguments.get("batch_size") or 1), channels, *frames, *sides
