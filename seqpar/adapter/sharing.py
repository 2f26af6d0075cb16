"""Shares the VAE of a diffusers pipeline among ranks: `vae.decode` and `vae.encode` compute on all of them.

When it wins: every rank calls the pipeline, so without it each decodes the whole picture and needs memory for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from seqpar.adapter import decoding
from seqpar.adapter.refusal import refuse_sizes
from seqpar.mesh import Mesh
from seqpar.vae.shared import User, share

Wished = Literal["auto"] | bool  # whether a pipeline's VAE computes by strips; see `seqpar.parallelize`


def check_wish(pipe_or_transformer: Any, wish: Wished) -> None:
    """Raise ValueError for a wish that is none, and for strips of a VAE that is not there or not known."""
    if wish not in ("auto", True, False):
        raise ValueError(f"got vae={wish!r}, expected 'auto', True or False")
    vae = getattr(pipe_or_transformer, "vae", None)
    if wish is True and not _is_vae(vae):
        raise ValueError(f"got vae=True for a {type(pipe_or_transformer).__name__} without a VAE, expected 'auto'")
    reason = decoding.why_unknown(vae) if wish is True else None
    if reason is not None:
        raise ValueError(f"got vae=True for a {type(vae).__name__} that is not cut into strips: {reason}")


def share_vae(
    pipe_or_transformer: Any, mesh: Mesh, transport: str, wish: Wished, check: Callable[[], None]
) -> Callable[[], None]:
    """Let a pipeline's VAE, if it has one, take rank 0's input and, if wished and known, compute on all ranks.

    A pipeline whose VAE does so also refuses, before it samples, sizes that cannot be decoded (`refuse_sizes`).
    check: called before each of its calls. Returns what ends this, on all ranks at the same time.
    """
    vae = getattr(pipe_or_transformer, "vae", None)
    if not _is_vae(vae):
        return lambda: None
    reason = decoding.why_unknown(vae) if wish is not False else None
    if wish is False or reason is not None:
        if reason is not None and mesh.is_main and mesh.world.size > 1:
            print(f"seqpar: every rank decodes whole pictures, because {reason}", flush=True)
        return share(vae, User(mesh, check))
    strips = decoding.of(vae, mesh, transport)
    ends = share(vae, User(mesh, check, strips.decode, strips.encode)), refuse_sizes(pipe_or_transformer, strips)

    def ended() -> None:
        for end in ends:
            end()
        strips.release()

    return ended


def _is_vae(vae: Any) -> bool:
    return hasattr(vae, "decode")
