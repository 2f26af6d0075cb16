"""Looks at what a pipeline's loop and its VAE make: diffusers shows values that are not finite as black or white."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from seqpar.vae.shared import looked_at


def watched_vae(
    vae: Any, name: str, look: Callable[[Any], None], begin: Callable[[], None]
) -> AbstractContextManager[None]:
    """Call `begin` before each `decode` or `encode` of a pipeline's VAE, if it has one, and `look` with the result."""
    return looked_at(vae, name, look, begin) if hasattr(vae, name) else nullcontext()


def refuse_latents(finite: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise FloatingPointError for the first step whose latents are not finite. finite: whether each step's are."""
    bad = [] if not finite else torch.stack([*finite]).logical_not().nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"latents stopped being finite at step {bad[0] + 1} of {len(finite)} in "
            f"{str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def refuse_infinite(finite: Sequence[bool], dtype: torch.dtype) -> None:
    """Raise FloatingPointError if one of the results is not finite."""
    bad = [number for number, right in enumerate(finite, 1) if not right]
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(finite)} results (the first is number "
            f"{bad[0]}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights"
        )


def counted(
    on_step: Callable[[int], None], finite: list[torch.Tensor], pipe: Any, index: int, timestep: Any, tensors: Any
) -> dict[str, Any]:
    """Tell of a step that diffusers' loop has made, and note whether its latents are finite; made for its callbacks."""
    if isinstance(latents := tensors.get("latents"), torch.Tensor):
        finite.append(latents.isfinite().all())
    on_step(index)
    return {}
