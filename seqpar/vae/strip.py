"""What the rules of functions know about this rank's strip: its rows, its exchanges, and which tensors have a halo."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.vae.cut import Cut
from seqpar.vae.exchanges import Exchanges


class Strip:
    """The strip of this rank during one call of a VAE.

    channels_last: whether edges travel with the channels of a pixel together, which is fastest where tensors lie so.
    Ranks must agree, and the memory format of one strip does not tell: strips of one pixel lie both ways. side: the
    stream on which edges travel while a convolution runs.
    """

    def __init__(
        self, cut: Cut, exchanges: Exchanges, channels_last: bool = False, side: torch.cuda.Stream | None = None
    ) -> None:
        self.cut, self.exchanges, self.channels_last, self.side = cut, exchanges, channels_last, side
        self._halos = WeakTensorKeyDictionary()

    def has_halo(self, padded: Tensor) -> None:
        """Say that a tensor is a strip with rows of its neighbours, or of the outer padding."""
        self._halos[padded] = True

    def is_padded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a strip that has rows of its neighbours already."""
        return tensor in self._halos

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless the last two dims are this rank's strip at some resolution."""
        if not self.cut.fits(tensor):
            self.refuse(
                f"got a tensor {tuple(tensor.shape)} that is no strip of {self.cut.mine} of the latent's "
                f"{sum(self.cut.sizes)} rows or columns (dim {self.cut.dim}, {self.cut.other} along the other)"
            )

    def refuse(self, reason: str) -> NoReturn:
        """Raise ValueError with a reason; the traceback shows the line of diffusers that is running."""
        raise ValueError(f"{reason}; decode whole pictures, or add a rule to seqpar/vae/rules.py")
