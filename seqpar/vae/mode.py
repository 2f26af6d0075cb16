"""Runs diffusers' modules on a strip: a function mode that calls the rule of each torch function.

The modules and their weights stay diffusers' own, so there is no copy of a model that could differ.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name

from seqpar.vae.known import LOCAL
from seqpar.vae.rules import RULES
from seqpar.vae.strip import Strip


class StripMode(TorchFunctionMode):
    """While it is entered, torch functions of this thread act on this rank's strip. It computes no gradients.

    Raises ValueError for a function that has no rule and is not known to act on each pixel alone.
    """

    def __init__(self, strip: Strip) -> None:
        super().__init__()
        self._strip = strip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function's rule, or the function itself where it is local."""
        rule = RULES.get(func)
        if rule is not None:
            return rule(self._strip, func, *args, **(kwargs or {}))
        if func not in LOCAL:
            name = resolve_name(func) or getattr(func, "__name__", repr(func))
            self._strip.refuse(f"got the function {name}, which has no rule for strips")
        return func(*args, **(kwargs or {}))
