"""Where a rule stands: the cut, the exchanges, and the padded buffers that one rule hands to the next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.vae.cut import Cut
from seqpar.vae.exchanges import Exchanges
from seqpar.vae.later import Later


@dataclass(frozen=True)
class Padded:
    """A buffer with `before` and `after` rows (along the cut dim) around a strip."""

    buffer: Tensor
    before: int
    after: int


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
        self._lent, self._halos = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def lend(self, interior: Tensor, padded: Padded) -> None:
        """Say that `interior` is the inside of a padded buffer, whose edge rows hold nothing yet.

        A convolution then lets the neighbours' rows arrive in the edge rows, without a copy of the strip.
        """
        self._lent[interior] = padded

    def padded(self, interior: Tensor, before: int, after: int) -> Tensor | None:
        """Return the whole buffer whose inside is this tensor, if one with these edges was lent; else None."""
        lent = self._lent.get(interior)
        return lent.buffer if lent is not None and (lent.before, lent.after) == (before, after) else None

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
        frame = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._names:
                return f"{self._names[module] or 'the VAE'} ({type(module).__name__})"
            frame = frame.f_back
        return "no module of the VAE"


def channels_last(vae: nn.Module) -> bool:
    """Return whether the weights of a VAE's convolutions are channels-last, so that its activations will be."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    weights = (module.weight for module in vae.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))
    return any(not one.is_contiguous() and one.is_contiguous(memory_format=formats[one.ndim]) for one in weights)
