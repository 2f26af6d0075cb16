"""Shares the VAE of a diffusers pipeline among ranks: `vae.decode` and `vae.encode` compute on all of them.

When it wins: every rank calls the pipeline, so without it each decodes the whole picture and needs memory for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Literal
from weakref import ref

from torch.utils import _pytree as pytree

from seqpar.graphs.deferred import plain
from seqpar.mesh.mesh import Mesh
from seqpar.vae.known import why_unknown
from seqpar.vae.on_mesh import MeshVAE, tiling
from seqpar.vae.refusal import refuse_sizes
from seqpar.vae.shared import Shared, User, share

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
