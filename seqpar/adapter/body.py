"""`Body`: the seam between the call of a diffusers transformer and what computes it on several ranks.

There are two: `native` computes with a model of this package on the module's weights, `generic` runs the module's own
forward with its tokens split. When each wins is said in their files; whoever calls a body need not know which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from seqpar.adapter.foreign import Foreign
from seqpar.adapter.forward import Ranks


@dataclass(frozen=True)
class Inside:
    """What computes a call, for those who look into it.

    module: its blocks compute the call. ranks: their exchanges, plan and the tokens of the last call. alone: computes
    the call with the same module on one rank, with attention by its formula; None where the transformer's own forward
    is what one rank computes, which has to be free of hooks for it (`release`).
    """

    module: nn.Module
    ranks: Ranks
    alone: Callable[[Mapping[str, Any]], tuple[Tensor, ...]] | None = None


class Body(Protocol):
    """Computes a diffusers transformer's forward on all ranks of a mesh's sequence axis."""

    def __call__(self, arguments: Mapping[str, Any], /) -> tuple[Tensor, ...]:
        """Return the transformer's outputs, complete on every rank of the sequence axis.

        arguments: those of the transformer's own forward by their names, without `return_dict`; tensors are complete
        and on the mesh's device, and all values are equal on all ranks of the sequence axis. An argument that is left
        out has its default; one more may be `seqpar.adapter.masks.FULL`. The outputs are those of
        `forward(..., return_dict=False)`; the next call may overwrite them. The first call of a kind builds exchanges;
        a later call with tensors of the same shapes and dtypes, the same other values and the same `state()` can be
        captured as a CUDA graph. Raises ValueError, the same on every rank, for arguments that this body cannot
        compute.
        """
        ...

    def why_eager(self) -> str | None:
        """Return the reason why no call can be captured as a CUDA graph (it copies from or to the host), or None."""
        ...

    def state(self) -> Hashable:
        """Return a key that stays equal while a captured call is valid.

        Weights, adapters, attention processors and exchanges are then unchanged. Raises ValueError if the module as it
        is now cannot be computed; another rank may find nothing wrong.
        """
        ...

    def told(self) -> Mapping[str, str]:
        """Return what must be equal on all ranks, as it was at the last `state`, as texts by their names.

        It says what computes, and has the texts of `seqpar.adapter.adapters.texts`.
        """
        ...

    def version(self) -> Hashable:
        """Return a key that stays equal while the module would compute the same, also by weights written in place."""
        ...

    def foreign(self) -> Foreign:
        """Return what others have put onto the module, as it was at the last `state`."""
        ...

    def inside(self, arguments: Mapping[str, Any]) -> Inside:
        """Return what computes a call with these arguments."""
        ...

    @property
    def lacks_memory(self) -> bool:
        """Return whether weights with merged adapters did not fit at the last `state`; other ranks may have room."""
        ...

    def end_copies(self) -> None:
        """Compute adapters by their own layers from now on; every rank must call this if one of them lacks memory."""
        ...

    def check_delivered(self) -> None:
        """Raise TimeoutError if a rank waited in vain for another one; this waits for the device."""
        ...

    def release(self) -> None:
        """Undo what was put onto the module and free the exchanges, on all ranks at the same time.

        The next call builds everything again.
        """
        ...
