"""Watches users' own code in a split transformer: attention that it computes itself would see one rank's tokens only.

A wrapper around a block, a block of a user's class or a replaced forward runs on this rank's tokens. That is right as
long as its attention goes through modules that join the ranks. What torch computes meanwhile is therefore inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.families._cuts import block_lists, is_attention
from seqpar.mesh.shard import Shard
from seqpar.transformer.foreign import LIBRARIES, unhooked
from seqpar.transformer.forward import Ranks

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


class BlockWatch(TorchFunctionMode):
    """Raises ValueError for attention of a rank's tokens to themselves inside of users' own parts of a transformer.

    parts: submodules that run code of users, by path. Attention modules in them join the ranks or are local.
    """

    def __init__(self, ranks: Ranks, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._ranks, self._running = ranks, list[str | None]()
        inside = {id(one): one for part in parts.values() for one in part.modules() if is_attention(one)}
        named = [(part, f"{type(part).__name__} at {path}") for path, part in parts.items() if id(part) not in inside]
        self._handles = [hook for part, name in named for hook in self._hooks(part, name)]
        self._handles += [hook for one in inside.values() for hook in self._hooks(one, None)]

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
        return self if self._handles and self._ranks.axis.size > 1 else nullcontext()

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compare the sizes of attention and of softmax with this rank's share of tokens."""
        options = kwargs or {}
        if self._running and self._running[-1] is not None:
            if func is F.scaled_dot_product_attention:
                query, key = (args[at] if len(args) > at else options[name] for at, name in enumerate(("query", "key")))
                self._refuse(query.shape[-2], key.shape[-2])
            elif func in SOFTMAX and (scores := args[0] if args else options["input"]).dim() > 2:
                self._refuse(*scores.shape[-2:])
        return func(*args, **options)

    def _refuse(self, queries: int, keys: int) -> None:
        """Raise ValueError if as many queries as keys are a rank's share of a stream, or of all joined ones."""
        axis, now = self._ranks.axis, self._ranks.now
        if now is None or queries != keys:
            return
        totals = [total for name, total in now.lengths.items() if not name.isdecimal()]
        # those of all ranks, so that all decide alike
        shares = [Shard(total, axis.size).sizes for total in totals]
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
    return {path: modules[path] for path in paths if path in modules and _home(modules[path]) not in known}


def _home(module: nn.Module) -> str:
    """Return the top-level package of the code that a module's forward runs, inside of partials and bound methods."""
    forward: Any = module.forward
    while isinstance(inner := unhooked(forward), partial) or inner is not forward:
        forward = inner.func if isinstance(inner, partial) else inner
    code = getattr(forward, "__func__", forward)  # `functools.wraps` changes its `__module__`, and not its globals
    return str(getattr(code, "__globals__", {}).get("__name__", type(module).__module__)).partition(".")[0]
