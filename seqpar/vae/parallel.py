"""Decoding and encoding of one image or video on all ranks: each rank computes a strip of it.

diffusers' own VAE runs on this rank's strip inside `StripMode`. Convolutions get the neighbours' rows, norms the
statistics of all strips, and attention all keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from seqpar.mesh.mesh import Mesh
from seqpar.transports._contract import Transport
from seqpar.transports.collective import gather
from seqpar.types.say import say
from seqpar.vae.known import spatial_factor, why_untested
from seqpar.vae.norms import fewer_passes
from seqpar.vae.rules import StripMode
from seqpar.vae.strips import Cut, Exchanges, Strip, channels_last, pixels_last, weights_pixels_last


class ParallelVAE:
    """A VAE of diffusers on a mesh. Inference only; collective over the ranks of a replica, with equal inputs.

    transport: moves edge rows and sums; not shared with others, because `release` frees its memory. channels_last:
    compute in channels-last memory; until `release` the weights of convolutions have this format, too. Raises
    ValueError for a VAE with a type of module whose strips were not tested.
    """

    def __init__(self, vae: Any, mesh: Mesh, transport: Transport, channels_last: bool = False) -> None:
        if (reason := why_untested(vae)) is not None:
            raise ValueError(reason)
        self._vae, self._axis, self._transport, self._main = vae, mesh.replica, transport, mesh.is_main
        self._exchanges = Exchanges(self._axis, transport)
        self._side = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._factor, self._printed = spatial_factor(vae), set[str]()
        self._restore = weights_pixels_last(vae) if channels_last else None

    def why_whole(self, shape: Sequence[int], encode: bool = False) -> str | None:
        """Return why latents (or, with `encode`, images) of this shape are not cut into strips, or None."""
        rows, columns = shape[-2:]
        factor = self._factor if encode else 1
        if rows % factor or columns % factor:
            return f"{rows} x {columns} pixels are no multiples of the VAE's {factor}"
        if Cut.of(self._axis, rows // factor, columns // factor) is None:
            return f"{rows // factor} x {columns // factor} latent pixels are fewer than {self._axis.size} ranks"
        return None

    def release(self) -> None:
        """Free the memory of all exchanges and put the weights' format back. Collective."""
        self._exchanges.release()
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _compute(self, name: str, whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and whole.requires_grad:
            raise ValueError("The VAE's input requires grad, but strips support inference only; use torch.no_grad()")
        encode, method = name == "encode", getattr(type(self._vae), name)  # the instance's may be replaced
        factor, reason = self._factor if encode else 1, self.why_whole(whole.shape, encode)
        cut = Cut.of(self._axis, whole.shape[-2] // factor, whole.shape[-1] // factor)
        if reason is not None or cut is None:
            self._say(f"the VAE {name}s whole images on every rank, because {reason}")
            return method(self._vae, whole, *args, **kwargs)

        # this rank's strip, by the method inside of diffusers' hook around it, which `_on_strips` runs
        strip = cut.take(whole, factor)
        strip = strip if self._restore is None else pixels_last(strip)
        with self._on_strips(cut):
            result = inspect.unwrap(method)(self._vae, strip, *args, **kwargs)

        # the strips of all ranks
        output = result[0]
        local = (output.parameters if encode else output).contiguous()
        if cut.axis.size > 1:
            local = gather(local, cut.axis, cut.shares(local.shape[cut.dim]), dim=local.ndim + cut.dim).contiguous()
        joined = type(output)(local, deterministic=output.deterministic) if encode else local
        if isinstance(result, tuple):
            return (joined, *result[1:])
        setattr(result, "latent_dist" if encode else "sample", joined)
        return result

    decode = partialmethod(_compute, "decode")
    """Return the result of `vae.decode` for full latents (N, C, ..., h, w), full on every rank.

    If `why_whole` has a reason, every rank decodes full latents, and rank 0 prints the reason once. Tiling
    (`use_tiling`) is off while strips are decoded, because tiles leave seams; rank 0 prints that, too.
    """
    encode = partialmethod(_compute, "encode")
    """Return the result of `vae.encode` for full images (N, C, ..., H, W), full on every rank, as `decode` does."""

    @contextmanager
    def _on_strips(self, cut: Cut) -> Iterator[None]:
        """While it is entered, the VAE's modules compute this rank's strip."""
        self._transport.abandon()
        # diffusers' `apply_forward_hook` runs this hook around decode and encode, here outside `StripMode`: that of
        # `enable_model_cpu_offload` moves the weights to the device
        hook: Any = getattr(self._vae, "_hf_hook", None)
        if hasattr(hook, "pre_forward"):
            hook.pre_forward(self._vae)
        tiled = getattr(self._vae, "use_tiling", False)
        if tiled:
            self._say("the VAE's tiling is off while it works on strips, which need no tiles and have no seams")
            self._vae.use_tiling = False
        try:
            mode = StripMode(Strip(cut, self._exchanges, channels_last(self._vae), self._side))
            with torch.no_grad(), fewer_passes(self._vae), mode:
                yield
        finally:
            if tiled:
                self._vae.use_tiling = True

    def _say(self, message: str) -> None:
        if self._main and message not in self._printed:
            self._printed.add(message)
            say(message)
