"""Where a rule stands: the cut, the exchanges, and which tensors one rule has padded for the next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.vae.cut import Cut
from seqpar.vae.exchanges import Exchanges
from seqpar.vae.later import Later


class Place:
    """What rules know about the strip of this rank, during one call of a VAE.

    names: module -> its name in the VAE, for error messages. channels_last: whether edges travel with the channels of
    a pixel together, which is fastest where tensors lie so. Ranks must agree, and the memory format of one strip does
    not tell: strips of one pixel lie both ways. side: the stream on which edges travel while a convolution runs.
    later: what is not written yet.
    """

    def __init__(
        self,
        cut: Cut,
        exchanges: Exchanges,
        names: Mapping[nn.Module, str],
        channels_last: bool = False,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self.cut, self.exchanges, self._names = cut, exchanges, names
        self.channels_last, self.side = channels_last, side
        self.later = Later()
        self._halos = WeakTensorKeyDictionary()

    def has_halo(self, buffer: Tensor, before: int, after: int) -> None:
        """Say that a tensor is a strip with `before` and `after` rows of its neighbours (or of the outer padding)."""
        self._halos[buffer] = before, after

    def halo(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the rows before and after the strip that a tensor already has, or None."""
        return self._halos.get(tensor)

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless the last two dims are this rank's strip at some resolution."""
        if not self.cut.fits(tensor):
            self.refuse(
                f"got a tensor {tuple(tensor.shape)} that is no strip of {self.cut.mine} of the latent's "
                f"{sum(self.cut.sizes)} rows or columns (dim {self.cut.dim}, {self.cut.other} along the other)"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise ValueError with a reason and the name of the module that is running."""
        raise ValueError(f"{reason}; in {self.where()}; decode whole pictures, or add a rule to seqpar/vae/rules.py")

    def where(self) -> str:
        """Return the name of the innermost module of the VAE that is running."""
        module = self.module()
        if module is None:
            return "no module of the VAE"
        return f"{self._names[module] or 'the VAE'} ({type(module).__name__})"

    def module(self) -> nn.Module | None:
        """Return the innermost module of the VAE that is running."""
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._names:
                return module
            frame = frame.f_back
        return None
