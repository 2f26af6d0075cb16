"""Modules built without computing their initial values."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class WithoutValues(TorchFunctionMode):
    """Skips the random initial values of modules: the meta device has none, and torch imports its compiler for them."""

    SKIPPED = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.xavier_uniform_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor as it is from functions that set initial values, and what other functions return."""
        kwargs = kwargs or {}
        if func in self.SKIPPED:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
