"""Keeps the state of a pipeline's loop in fp32, where its transformer has weights of 16 bits.

Schedulers of diffusers return latents in the dtype of the prediction or of the latents before, so that 16 bits round
the state after every step. Here both are fp32 from the first step on: the noise is drawn as always and then converted,
and the transformer returns fp32, so that guidance and the scheduler compute in fp32. The transformer converts latents
for its weights, as the VAE does (`seqpar.vae.shared`).
When it wins: for every pipeline in which the transformer and the VAE alone read the latents. Code of a user's own,
such as a callback, then gets fp32 where diffusers gives 16 bits, so it is off unless it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.loading.transformers import transformers_of
from seqpar.transformer.estimate import dtype_of
from seqpar.transformer.foreign import BEFORE

ENCODERS = ("text_encoder", "image_encoder")  # how the names of parts begin that never see the latents
HALF = 2  # bytes of a weight that rounds the state
PREPARES = "prepare_latents"  # the method of a pipeline that draws the noise


def keep_fp32(pipe: Any) -> str | None:
    """Let a parallelized pipeline keep its state in fp32 until the release; return why it does not, or None.

    Every rank must call this after `parallelize`, before the pipeline's first call.
    """
    modules = transformers_of(pipe)
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    others = [name for name in parts if name not in (*modules, "vae") and not name.startswith(ENCODERS)]
    if others:
        return f"{others[0]} may read the latents, too"
    dtypes = {dtype_of(module) for module in modules.values()}
    if any(dtype.itemsize != HALF for dtype in dtypes):
        return f"the transformer has weights of {', '.join(sorted(map(str, dtypes)))}".replace("torch.", "")
    for module in modules.values():
        vars(module)[BEFORE].call.keep_fp32(dtype_of(module))
    lease = vars(next(iter(modules.values())))[BEFORE].lease
    lease.ends.callback(_prepare_fp32(pipe))
    return None


def _prepare_fp32(pipe: Any) -> Callable[[], None]:
    """Convert the latents that a pipeline's loop begins with; return what ends that."""
    theirs, before = getattr(pipe, PREPARES, None), vars(pipe).get(PREPARES)
    if theirs is None:
        return lambda: None

    @wraps(theirs)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        latents = theirs(*args, **kwargs)
        if isinstance(latents, tuple):
            return (_converted(latents[0]), *latents[1:])
        return _converted(latents)

    def end() -> None:
        if vars(pipe).get(PREPARES) is prepared:  # otherwise someone has wrapped it since
            del vars(pipe)[PREPARES]
            if before is not None:
                vars(pipe)[PREPARES] = before

    prepared.__signature__ = inspect.signature(theirs)  # pyright: ignore[reportAttributeAccessIssue]
    vars(pipe)[PREPARES] = prepared
    return end


def _converted(latents: Any) -> Any:
    return latents.to(torch.float32) if isinstance(latents, Tensor) else latents
