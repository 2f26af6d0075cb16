"""The cuts of diffusers' transformers, by class: where their tokens are split, which attention joins the ranks.

Where diffusers has a plan of its own (`_cp_plan`), ours are here because they do less or more: masks stay whole and are
joined once a call, text that only cross-attention reads is not split, a timestep for each token is. Tensors are cut
where they leave an embedder rather than where they enter each block, because that is one hook and compiles better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn

import seqpar.families
from seqpar.families._cuts import HELP, HOME, Cuts, _reads_lengths, check, from_diffusers
from seqpar.families.chroma import _chroma
from seqpar.families.cogvideox import _cogvideox
from seqpar.families.flux import _flux
from seqpar.families.flux2 import _flux2
from seqpar.families.flux3 import _flux3
from seqpar.families.hunyuan_video import _hunyuan_video, _hunyuan_video15
from seqpar.families.krea2 import _krea2
from seqpar.families.ltx import _ltx
from seqpar.families.ltx2 import _ltx2
from seqpar.families.lumina2 import _lumina2
from seqpar.families.mochi import _mochi
from seqpar.families.pixart import _from_patches
from seqpar.families.qwen_image import _attends_in_order, _qwen_image
from seqpar.families.sd3 import _sd3
from seqpar.families.wan import _wan, _wan_vace
from seqpar.families.z_image import _z_image
from seqpar.types.plugins import plugin, plugins


@cache
def families() -> dict[str, ModuleType]:
    """Return class of a block -> the file of `seqpar.families` that computes it."""
    files = [plugin(seqpar.families, name, "family of blocks") for name in plugins(seqpar.families)]
    return {kind: file for file in files for kind in getattr(file, "BLOCKS", ())}


@cache
def described() -> dict[str, ModuleType]:
    """Return name of a transformer's class -> the file whose `work` describes it to the planner."""
    return {kind: file for file in dict.fromkeys(families().values()) for kind in file.TRANSFORMERS}


def is_guided(module: nn.Module) -> bool:
    """Return whether pipelines of this family compute an unconditional branch: not where guidance is an input."""
    config: Any = getattr(module, "config", {})
    return not config.get("guidance_embeds", False) and type(module).__name__ != "FluxTransformer2DModel"


def cuts_of(module: nn.Module, asked: Cuts | Mapping[str, Any] | None = None) -> Cuts:
    """Return the cuts of a transformer: the caller's, those of this table, or those of its `_cp_plan`.

    asked: a `Cuts`, or a plan in diffusers' form. A class that is not in the table has the cuts of the class that it
    derives from, and is not split over ranks if its forward is a user's own. Raises ValueError, the same on every rank,
    if there are none, or if they name submodules or parameters that the transformer does not have.
    """
    theirs: Any = getattr(module, "_cp_plan", None)
    known = next((CUTS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in CUTS), theirs)
    cuts = known if asked is None else asked
    if not cuts and not isinstance(cuts, Cuts):
        raise ValueError(f"got {type(module).__name__}, which has no known cuts of its tokens, expected some; {HELP}")
    cuts = cuts if isinstance(cuts, Cuts) else from_diffusers(module, cuts)
    check(module, cuts)
    reason = _why_not(type(module)) if asked is None else None
    return cuts if reason is None else replace(cuts, why_not=lambda module: reason)


def _why_not(kind: type) -> str | None:
    """Return why the cuts of a class may not fit the forward of one that derives from it, or None."""
    theirs = next(one for one in kind.__mro__ if "forward" in vars(one))
    known = next((one for one in kind.__mro__ if one.__name__ in CUTS or vars(one).get("_cp_plan")), theirs)
    if kind.__mro__.index(theirs) >= kind.__mro__.index(known) or theirs.__module__.startswith(HOME):
        return None
    return (
        f"{theirs.__name__} has a forward of its own, which may decide by one rank's tokens; cuts= says that it "
        f"computes each token by itself"
    )


def is_known(module: nn.Module) -> bool:
    """Return whether a transformer is of a family of this package, or derives from one."""
    return any(kind.__name__ in CUTS for kind in type(module).__mro__)


CUTS = {
    "FluxTransformer2DModel": _flux(),
    "ChromaTransformer2DModel": _chroma(),
    "Flux2Transformer2DModel": _flux2(),
    "Flux3Transformer2DModel": _flux3(),
    "QwenImageTransformer2DModel": _qwen_image(),
    "QwenImage21Transformer2DModel": Cuts({}, {}, why_not=_attends_in_order, why_eager=_reads_lengths),
    "WanTransformer3DModel": _wan(),
    "WanVACETransformer3DModel": _wan_vace(),
    "ChronoEditTransformer3DModel": _wan(),
    "SD3Transformer2DModel": _sd3(),
    "CogVideoXTransformer3DModel": _cogvideox(),
    "HunyuanVideoTransformer3DModel": _hunyuan_video(),
    "HunyuanVideo15Transformer3DModel": _hunyuan_video15(),
    "LTXVideoTransformer3DModel": _ltx(),
    "LTX2VideoTransformer3DModel": _ltx2(),
    "PixArtTransformer2DModel": _from_patches("proj_out"),
    "DiTTransformer2DModel": _from_patches("proj_out_2"),
    "Lumina2Transformer2DModel": _lumina2(),
    "ZImageTransformer2DModel": _z_image(),
    "MochiTransformer3DModel": _mochi(),
    "Krea2Transformer2DModel": _krea2(),
}
