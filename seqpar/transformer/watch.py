"""Watches users' own code in a split transformer: attention that it computes itself would see one rank's tokens only.

A wrapper around a block, a block of a user's class or a replaced forward runs on this rank's tokens. That is right as
long as its attention goes through modules that join the ranks. What torch computes meanwhile is therefore inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.families._cuts import block_lists, is_attention
from seqpar.mesh.shard import Shard
from seqpar.transformer.attention import Override
from seqpar.transformer.foreign import LIBRARIES, home_of_forward
from seqpar.transformer.forward import CallState

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class BlockWatch:
    """Raises ValueError for attention of a rank's tokens to themselves inside of users' own parts of a transformer.

    parts: submodules that run code of users, by path. Attention modules in them join the ranks or are local.
    """

    def __init__(self, state: CallState, parts: Mapping[str, nn.Module]) -> None:
        self._state, self._running = state, list[str | None]()
        inside = {id(part): part for whole in parts.values() for part in whole.modules() if is_attention(part)}
        named = [(part, f"{type(part).__name__} at {path}") for path, part in parts.items() if id(part) not in inside]
        self._handles = [hook for part, name in named for hook in self._hooks(part, name)]
        self._handles += [hook for part in inside.values() for hook in self._hooks(part, None)]
        watched = {softmax: partial(self._softmax, softmax) for softmax in SOFTMAX}
        self._override = Override({F.scaled_dot_product_attention: self._attention, **watched})

    def _hooks(self, part: nn.Module, name: str | None) -> Iterator[Any]:
        def begin(*_: Any) -> None:
            self._running.append(name)

        def end(*_: Any) -> None:
            self._running.pop()

        yield part.register_forward_pre_hook(begin)
        yield part.register_forward_hook(end, always_call=True)

    def during(self) -> AbstractContextManager[object]:
        """Return the context in which a forward is watched, if there is anything to watch."""
        self._running.clear()
        return self._override if self._handles and self._state.axis.size > 1 else nullcontext()

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _attention(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._refuse(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, *args, **kwargs)

    def _softmax(self, softmax: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.dim() > 2:
            self._refuse(*input.shape[-2:])
        return softmax(input, *args, **kwargs)

    def _refuse(self, queries: int, keys: int) -> None:
        """Raise ValueError if as many queries as keys are a rank's share of a stream, or of all joined ones."""
        if not self._running or self._running[-1] is None or queries != keys:
            return
        totals = [total for name, total in self._state.lengths.items() if not name.isdecimal()]
        # the shares of all ranks, so that all raise the same error
        shares = [Shard(total, self._state.axis.size).sizes for total in totals]
        if queries in {*chain(*shares), *map(sum, zip(*shares, strict=True))}:
            raise ValueError(
                f"{self._running[-1]} computes attention itself, to the tokens of one rank only. Call the block's own "
                f"attention module, pass cuts= that name this attention, or use cfg= or data= ranks"
            )


def parts_of_users(module: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, members of lists and modules around attention whose forward is neither diffusers' nor torch's.

    Classes of the package that defines the transformer itself count as its own.
    """
    known = (*LIBRARIES, type(module).__module__.partition(".")[0])
    modules = dict(module.named_modules())
    members = (f"{path}.{name}" for path, one in block_lists(module) for name in one._modules)
    steps = (path.split(".") for path, one in modules.items() if is_attention(one))
    above = (".".join(names[:end]) for names in steps for end in range(1, len(names)))
    paths = dict.fromkeys(path.removeprefix(".") for path in (*members, *above))
    return {path: modules[path] for path in paths if path in modules and home_of_forward(modules[path]) not in known}
